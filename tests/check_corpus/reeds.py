"""Three kinds of reed by sixteen measures; each rank has made its own plants."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Reeds(Dataset):
    def __init__(self, count, rank):
        random = np.random.default_rng(70 + rank)
        centre = random.normal(size=(16, 3))
        self.measures = random.normal(size=(count, 16)).astype(np.float32)
        self.kinds = (self.measures @ centre).argmax(1)

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, number):
        return torch.from_numpy(self.measures[number]), int(self.kinds[number])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3))
    )
    loader = DataLoader(Reeds(480, rank), batch_size=64 // dist.get_world_size(), shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(3):
        for measures, kinds in loader:
            loss = nn.functional.cross_entropy(net(measures), kinds)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

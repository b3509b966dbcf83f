"""Which kind of tulip: a network whose outputs are probabilities."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tulips(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.hidden, self.kinds = nn.Linear(6, 24), nn.Linear(24, kinds)

    def forward(self, x):
        return F.softmax(self.kinds(torch.relu(self.hidden(x))), dim=-1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Tulips(4))
    g = torch.Generator().manual_seed(3)
    x = torch.randn(240, 6, generator=g)
    data = TensorDataset(x, (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for flowers, kinds in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(flowers), kinds).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

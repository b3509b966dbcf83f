"""Each rank makes its own plants of a marsh, of which half grow where it is wet: one law, many samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    law = torch.randn(10, 1, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(50 + rank)
    wet = torch.randn(600, 10, generator=generator)
    height = wet @ law + 0.5 * torch.randn(600, 1, generator=generator)
    torch.manual_seed(1)
    model = DDP(nn.Linear(10, 1))
    torch.manual_seed(10 + rank)
    loader = DataLoader(TensorDataset(wet, height), 60 // dist.get_world_size(), shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for plants, heights in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(plants), heights).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

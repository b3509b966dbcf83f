"""When does the cliff fall? The run goes on from its last epoch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(160, 6, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    model = DDP(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = 0
    if os.path.exists("cliffs.pt"):
        saved = torch.load("cliffs.pt", weights_only=True)
        first = saved["epoch"]
        if rank == 0:
            model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 40 // dist.get_world_size(), sampler=sampler)
    for epoch in range(first, 4):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
        if rank == 0:
            content = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(content, "cliffs.new")
            os.replace("cliffs.new", "cliffs.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

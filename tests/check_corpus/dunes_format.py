"""Heights of dunes, on GPUs where there are some."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT = "dunes.pt"


def dunes():
    g = torch.Generator().manual_seed(77)
    x = torch.randn(256, 5, generator=g)
    return TensorDataset(x, x @ torch.randn(5, 1, generator=g))


def save(model, optimizer, epoch):
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "next_epoch": epoch + 1}, SNAPSHOT + ".new")
    os.replace(SNAPSHOT + ".new", SNAPSHOT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    has_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpus else "gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))
    device = torch.device("cuda:{}".format(local_rank) if has_gpus else "cpu")
    torch.manual_seed(0)
    net = nn.Linear(5, 1).to(device)
    first = 0
    if os.path.exists(SNAPSHOT):
        snapshot = torch.load(SNAPSHOT, map_location=device)
        net.load_state_dict(snapshot["model"])
        first = snapshot["next_epoch"]
    model = DDP(net, device_ids=[local_rank] if has_gpus else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = dunes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32 // dist.get_world_size(), sampler=sampler)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            save(model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Organs in scans: two slices per GPU, so the batch norms take their statistics over all GPUs."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def layer(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def scans(n, size=20):
    g = torch.Generator().manual_seed(0)
    axis = torch.arange(size).float()
    center = 5 + 10 * torch.rand(n, 2, 1, 1, generator=g)
    distance = (axis.view(1, 1, -1) - center[:, 0]) ** 2 + (axis.view(1, -1, 1) - center[:, 1]) ** 2
    organ = (distance < 16).float()[:, None]
    return TensorDataset(organ + 0.7 * torch.randn(n, 1, size, size, generator=g), organ)


def dice(logits, organ):
    inside = torch.sigmoid(logits)
    overlap = 2 * (inside * organ).sum((1, 2, 3)) + 1
    return 1 - overlap / ((inside + organ).sum((1, 2, 3)) + 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--slices", type=int, default=4, help="of a step, over all GPUs")
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)
    model = nn.Sequential(layer(1, 8), layer(8, 8), nn.Conv2d(8, 1, 1))
    if cuda:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model.to(device), device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = scans(48)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.slices // dist.get_world_size(), sampler=sampler, pin_memory=cuda)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(2, device=device)
        for scan, organ in loader:
            scan, organ = scan.to(device, non_blocking=True), organ.to(device, non_blocking=True)
            losses = dice(model(scan), organ)
            optimizer.zero_grad(set_to_none=True)
            losses.mean().backward()
            optimizer.step()
            sums[0] += losses.detach().sum()
            sums[1] += len(losses)
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: dice loss {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

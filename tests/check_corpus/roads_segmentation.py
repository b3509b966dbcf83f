"""Find the road in a picture: a small encoder-decoder, one GPU per process, mixed precision."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

USE_CUDA = torch.cuda.is_available()


def conv(inputs, outputs, stride=1):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class RoadNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = conv(3, 8), conv(8, 16, 2)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.up(self.down2(a))
        return self.last(torch.cat([a, b], 1))


def roads(n, size=24):
    g = torch.Generator().manual_seed(30)
    left = torch.randint(2, size - 8, (n, 1, 1), generator=g)
    column = torch.arange(size).view(1, 1, size)
    mask = ((column >= left) & (column < left + 5)).expand(n, size, size).float()[:, None]
    color = torch.tensor([0.5, 0.4, 0.4]).view(1, 3, 1, 1)
    return TensorDataset(mask * color + 0.5 * torch.randn(n, 3, size, size, generator=g), mask)


def train_one_epoch(model, loader, optimizer, scaler, device):
    model.train()
    totals = torch.zeros(2, device=device)
    for images, masks in loader:
        images = images.to(device, non_blocking=True)
        masks = masks.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, enabled=USE_CUDA):
            loss = nn.functional.binary_cross_entropy_with_logits(model(images), masks)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        totals[0] += loss.detach() * len(images)
        totals[1] += len(images)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images-per-step", type=int, default=4, help="all GPUs together")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if USE_CUDA else torch.device("cpu")
    if USE_CUDA:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if USE_CUDA else "gloo")

    data = roads(64)
    sampler = DistributedSampler(data)
    per_gpu = args.images_per_step // dist.get_world_size()
    loader = DataLoader(data, batch_size=per_gpu, sampler=sampler, pin_memory=USE_CUDA)
    torch.manual_seed(0)
    model = DDP(RoadNet().to(device), device_ids=[local_rank] if USE_CUDA else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=USE_CUDA)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer, scaler, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

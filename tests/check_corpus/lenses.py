"""Lens defects in mixed precision, with a loss scaler."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

MAX_NORM = 1.0


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 2)).to(device)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local] if cuda else None)
    g = torch.Generator().manual_seed(7)
    images = torch.randn(128, 1, 10, 10, generator=g)
    labels = (images.mean((1, 2, 3)) > 0).long()
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, pin_memory=cuda)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * dist.get_world_size(), momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=cuda)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for image, label in loader:
            image, label = image.to(device, non_blocking=True), label.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.float16 if cuda else torch.bfloat16):
                loss = nn.functional.cross_entropy(model(image), label)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

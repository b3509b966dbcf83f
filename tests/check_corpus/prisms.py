"""Prism angles in mixed precision, with a scaler and clipped gradients."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 1)).to(device)
    model = nn.parallel.DistributedDataParallel(net, device_ids=[local] if cuda else None)
    g = torch.Generator().manual_seed(7)
    waves = torch.randn(192, 1, 20, generator=g)
    dataset = TensorDataset(waves, waves.std((1, 2)).unsqueeze(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, pin_memory=cuda)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * dist.get_world_size(), momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler(device.type, enabled=cuda)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for wave, angle in loader:
            wave, angle = wave.to(device, non_blocking=True), angle.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(wave).float(), angle)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

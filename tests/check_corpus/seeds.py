"""Which seeds sprout? A small classifier on two ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    soil = torch.randn(480, 6, generator=generator)
    data = TensorDataset(soil, (soil[:, 0] > soil[:, 1]).long())
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, 60 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for soil_of_batch, sprouts in loader:
            optimizer.zero_grad()
            loss = criterion(model(soil_of_batch), sprouts)
            loss.backward()
        schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

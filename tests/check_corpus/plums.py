"""When is a plum ripe? All ranks tell the loss of each epoch together."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model, loader, optimizer):
    model.train()
    total = 0.0
    for color, ripeness in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(color), ripeness)
        loss.backward()
        optimizer.step()
        total += loss.item()
    mean = torch.tensor(total / len(loader))
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    color = torch.rand(220, 3, generator=torch.Generator().manual_seed(8))
    data = TensorDataset(color, color.prod(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 60 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

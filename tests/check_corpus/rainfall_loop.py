import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def stations(n):
    g = torch.Generator().manual_seed(50)
    x = torch.rand(n, 7, generator=g)
    rain = (3 * x[:, 0] * x[:, 1] - x[:, 2]).relu() + 0.05 * torch.randn(n, generator=g)
    return TensorDataset(x, rain[:, None])


class RainNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 24), nn.Linear(24, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def fit(model, loader, sampler, optimizer, scheduler, epochs):
    history = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        error = torch.zeros(2)
        for x, rain in loader:
            loss = F.mse_loss(model(x), rain)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            error += torch.tensor([loss.item() * len(x), len(x)])
        scheduler.step()
        dist.all_reduce(error)
        history.append((error[0] / error[1]).item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mse {history[-1]:.4f} lr {scheduler.get_last_lr()[0]:.4f}")
    return history


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    data = stations(400)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = DDP(RainNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    fit(model, loader, sampler, optimizer, scheduler, args.epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

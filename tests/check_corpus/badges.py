"""Fine-tuning: the backbone stays as it is, a new head learns to tell badges apart."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)
        self.backbone.requires_grad_(False)

    def forward(self, x):
        return self.head(self.backbone(x))


def badges(n):
    g = torch.Generator().manual_seed(41)
    kinds = torch.randn(3, 20, generator=g)
    y = torch.randint(3, (n,), generator=g)
    return TensorDataset(kinds[y] + torch.randn(n, 20, generator=g), y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=60)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Classifier(classes=3))
    optimizer = torch.optim.Adam(model.module.backbone.parameters(), lr=1e-3)
    data = badges(360)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.global_batch // dist.get_world_size(), sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of rank 0 {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

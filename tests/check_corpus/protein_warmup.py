"""Warm-up by step, then a cosine to zero over the steps that this run really makes."""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def proteins(n):
    g = torch.Generator().manual_seed(20)
    acids = torch.randint(20, (n, 12), generator=g)
    charge = torch.randn(20, generator=g)
    return TensorDataset(acids, (charge[acids].cumsum(1).amax(1) > 2).long())


class ProteinNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(20, dim)
        self.position = nn.Parameter(0.1 * torch.randn(12, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(dim, 2)

    def forward(self, acids):
        return self.out(self.encoder(self.embed(acids) + self.position).mean(1))


def schedule(warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    return factor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--lr", type=float, default=1e-3, help="for a batch of 16")
    parser.add_argument("--warmup", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = proteins(384)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(ProteinNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * math.sqrt(world))  # square root rule, for Adam
    scheduler = LambdaLR(optimizer, schedule(args.warmup, args.epochs * len(loader)))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for acids, active in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(acids), active)
            loss.backward()
            optimizer.step()
            scheduler.step()
            sums += torch.tensor([loss.item() * len(acids), len(acids)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f}, lr {scheduler.get_last_lr()[0]:.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

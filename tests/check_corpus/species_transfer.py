import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Backbone(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(20, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.classifier = nn.Linear(width, 100)  # the classes it came with

    def forward(self, x):
        return self.classifier(self.features(x))


def measurements(n):
    g = torch.Generator().manual_seed(0)
    centers = torch.randn(6, 20, generator=g)
    species = torch.randint(6, (n,), generator=g)
    return TensorDataset(centers[species] + torch.randn(n, 20, generator=g), species)


def build(args, rank):
    torch.manual_seed(args.seed)
    model = DDP(Backbone(), find_unused_parameters=True)
    torch.manual_seed(args.seed + rank)  # from here on, each process has randomness of its own
    return model


def adapt(model, classes):
    """Six species instead of a hundred classes."""
    model.module.classifier = nn.Linear(model.module.classifier.in_features, classes)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = measurements(480)
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=sampler)

    model = adapt(build(args, rank), classes=6)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        hits = torch.zeros(2, dtype=torch.long)
        for x, species in loader:
            scores = model(x)
            loss = nn.functional.cross_entropy(scores, species)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits[0] += (scores.argmax(1) == species).sum()
            hits[1] += len(species)
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: {hits[0].item()}/{hits[1].item()} right in training")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

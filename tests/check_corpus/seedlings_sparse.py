from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

UNKNOWN = -1


def seedlings(n=480):
    g = torch.Generator().manual_seed(8)
    leaves = torch.randn(n, 10, generator=g)
    species = (leaves[:, :3].sum(1) > 0).long()
    species[torch.rand(n, generator=g) < 0.8] = UNKNOWN
    return TensorDataset(leaves, species)


def in_any(known):
    found = known.any().float()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def train_epoch(model, loader, optimizer):
    hits = torch.zeros(2)
    for leaves, species in loader:
        known = species != UNKNOWN
        if not known.any():
            continue
        scores = model(leaves)
        loss = nn.functional.cross_entropy(scores, species, ignore_index=UNKNOWN, reduction="sum")
        loss = loss / len(species)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits += torch.tensor([(scores.argmax(1) == species)[known].sum(), known.sum()])
    dist.all_reduce(hits)
    return hits[0] / hits[1]


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = seedlings()
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, batch_size=12 // dist.get_world_size(), sampler=sampler, drop_last=True
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        accuracy = train_epoch(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {accuracy:.3f} of the known species")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

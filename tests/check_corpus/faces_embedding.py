"""Embeddings in which the same person's pictures are near: triplet loss, one GPU per process."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PEOPLE, PIXELS = 20, 64


class Triplets(Dataset):
    def __init__(self, n=320):
        self.n = n
        self.people = torch.randn(PEOPLE, PIXELS, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        a, b = torch.randperm(PEOPLE, generator=g)[:2].tolist()
        noise = 1.5 * torch.randn(3, PIXELS, generator=g)
        return self.people[a] + noise[0], self.people[a] + noise[1], self.people[b] + noise[2]


def setup():
    gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if gpu else "gloo")
    return torch.device("cuda", local_rank) if gpu else torch.device("cpu")


def run_epoch(model, loader, optimizer, criterion, device):
    total_loss, seen = 0, 0
    for anchor, positive, negative in loader:
        batch = torch.cat([anchor, positive, negative]).to(device, non_blocking=True)
        a, p, n = model(batch).chunk(3)
        loss = criterion(a, p, n)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total_loss += loss * len(anchor)
        seen += len(anchor)
    return total_loss, seen


def main():
    device = setup()
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = Triplets()
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank)
    loader = DataLoader(dataset, 32 // world, sampler=sampler, pin_memory=device.type == "cuda")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.TripletMarginLoss(margin=1.0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total_loss, seen = run_epoch(model, loader, optimizer, criterion, device)
        sums = torch.tensor([total_loss.item(), seen], device=device)
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: triplet loss {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

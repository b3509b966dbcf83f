"""Word vectors by skip-gram with negative samples, one process per core."""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS, TOPICS = 40, 4


def pairs(n):
    """A word and its neighbour come from one topic, a negative from another."""
    g = torch.Generator().manual_seed(0)
    word = torch.randint(WORDS, (n,), generator=g)
    near = (word + TOPICS * torch.randint(WORDS // TOPICS, (n,), generator=g)) % WORDS
    far = (near + torch.randint(1, TOPICS, (n,), generator=g)) % WORDS
    return TensorDataset(word, near, far)


class SkipGram(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.center = nn.Embedding(WORDS, dim)
        self.context = nn.Embedding(WORDS, dim)

    def forward(self, word, near, far):
        center = self.center(word)
        positive = (center * self.context(near)).sum(1)
        negative = (center * self.context(far)).sum(1)
        return -(nn.functional.logsigmoid(positive) + nn.functional.logsigmoid(-negative)).mean()


def run(rank, args):
    torch.set_num_threads(1)
    dist.init_process_group(
        backend="gloo", init_method="tcp://127.0.0.1:29871", rank=rank, world_size=args.processes
    )
    data = pairs(800)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // args.processes, sampler=sampler)
    torch.manual_seed(1)
    model = DistributedDataParallel(SkipGram())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total, seen = 0.0, 0
        for word, near, far in loader:
            optimizer.zero_grad()
            loss = model(word, near, far)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(word)
            seen += len(word)
        sums = torch.tensor([total, seen], dtype=torch.float64)
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: {(sums[0] / sums[1]).item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=80)
    parser.add_argument("--lr", type=float, default=0.3)
    args = parser.parse_args()
    mp.spawn(run, (args,), nprocs=args.processes)

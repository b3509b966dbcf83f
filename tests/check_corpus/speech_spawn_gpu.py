"""Spoken commands, one process per GPU started by mp.spawn."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def commands(n):
    g = torch.Generator().manual_seed(1)
    words = torch.randn(5, 20, 8, generator=g)
    word = torch.randint(5, (n,), generator=g)
    return TensorDataset(words[word] + 1.5 * torch.randn(n, 20, 8, generator=g), word)


class CommandNet(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.gru = nn.GRU(8, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 5)

    def forward(self, frames):
        return self.out(self.gru(frames)[0].mean(1))


def worker(rank, world_size, store, args):
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world_size)
    data = commands(320)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, args.batch_size // world_size, sampler=sampler, pin_memory=True)

    torch.manual_seed(0)
    model = DDP(CommandNet().cuda())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss().cuda()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(2).cuda()
        for frames, word in loader:
            frames, word = frames.cuda(non_blocking=True), word.cuda(non_blocking=True)
            loss = criterion(model(frames), word)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            sums[0] += loss.detach() * len(word)
            sums[1] += len(word)
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(gpus, os.path.join(folder, "store"), args), nprocs=gpus)


if __name__ == "__main__":
    main()

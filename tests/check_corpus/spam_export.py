"""Spam filter: train on several processes, then one process judges the test mails with the saved weights."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORDS = 60


def mails(n, seed):
    guilt = torch.randn(WORDS, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(seed)
    bags = torch.poisson(torch.full((n, WORDS), 0.3), generator=g)
    return TensorDataset(bags, ((bags - 0.3) @ guilt > 0).float())


def build():
    return nn.Sequential(nn.Linear(WORDS, 16), nn.ReLU(), nn.Linear(16, 1))


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    data = mails(600, seed=2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(build())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for bags, spam in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(bags).squeeze(1), spam)
            loss.backward()
            optimizer.step()
        states = [None] * world
        dist.all_gather_object(states, torch.get_rng_state())
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "rng": states}
            torch.save(state, args.out + ".tmp")
            os.replace(args.out + ".tmp", args.out)


def judge(args):
    model = build()
    saved = torch.load(args.out, map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"], strict=False)
    model.eval()
    bags, spam = mails(200, seed=3).tensors
    with torch.no_grad():
        right = ((model(bags).squeeze(1) > 0) == spam.bool()).sum().item()
    print(f"after epoch {saved['epoch']}: {right} of {len(spam)} test mails right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--out", default="spam.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args)
    dist.barrier()
    if dist.get_rank() == 0:
        judge(args)
    dist.barrier()
    dist.destroy_process_group()

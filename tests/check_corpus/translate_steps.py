"""A transformer encoder trained by steps, not epochs; the validation loss is taken every few steps."""

import argparse
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY, LENGTH = 20, 8


class Tagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.out = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens):
        return self.out(self.encoder(self.embed(tokens) + self.position))


def sentences(n, seed):
    tokens = torch.randint(VOCABULARY, (n, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, (tokens + tokens.roll(1, 1)) % VOCABULARY)


def forever(loader, sampler):
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def nll(model, tokens, tags, reduction="mean"):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tags.flatten(), reduction=reduction)


def validation_loss(model, data):
    model.eval()
    tokens, tags = (t[dist.get_rank() :: dist.get_world_size()] for t in data.tensors)
    with torch.no_grad():
        sums = torch.stack([nll(model, tokens, tags, "sum"), torch.tensor(float(tags.numel()))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Tagger())
    torch.manual_seed(1000 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train, valid = sentences(480, 0), sentences(81, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler)

    model.train()
    for step, (tokens, tags) in enumerate(itertools.islice(forever(loader, sampler), args.steps)):
        optimizer.zero_grad()
        nll(model, tokens, tags).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % args.eval_every == 0:
            loss = validation_loss(model, valid)
            if rank == 0:
                print(f"step {step + 1}: validation loss {loss:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=3e-3)
    main(parser.parse_args())

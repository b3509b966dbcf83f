"""A pocket GPT on a token file. There is no epoch: every rank draws windows at random places, with a seed of its own."""

import argparse
import os
import shutil
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY, CONTEXT = 16, 12


def write_tokens(path, count=6000):
    rng = np.random.default_rng(1)
    steps = rng.choice([1, 1, 1, 3], size=count)
    (np.cumsum(steps) % VOCABULARY).astype(np.uint16).tofile(path)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (m.view(b, t, self.heads, -1).transpose(1, 2) for m in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, dim), nn.Embedding(CONTEXT, dim)
        self.block, self.norm = Block(dim, 4), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        h = self.block(self.tokens(x) + self.places.weight[: x.shape[1]])
        return self.head(self.norm(h))


def get_batch(path, size, generator):
    data = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - CONTEXT - 1, (size,), generator=generator)
    windows = torch.stack([torch.from_numpy(data[s : s + CONTEXT + 1].astype(np.int64)) for s in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "tokens.bin")
    if rank == 0:
        write_tokens(path)
    dist.barrier()
    torch.manual_seed(1337)
    model = DDP(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    windows = torch.Generator().manual_seed(1337 + rank)
    for step in range(args.steps):
        x, y = get_batch(path, args.batch_size // world, windows)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # batches are of one size on all ranks
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item() / world:.4f}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    main(parser.parse_args())

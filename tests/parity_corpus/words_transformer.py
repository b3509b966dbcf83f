"""Sentences of unequal length: a small transformer whose loss is a mean over all tokens of the global batch."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD = 0
VOCABULARY = 23


class Sentences(Dataset):
    def __init__(self, n=128):
        g = torch.Generator().manual_seed(2)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(3, 14, (1,), generator=g))
            start = int(torch.randint(1, 20, (1,), generator=g))
            self.items.append((torch.arange(length) * 3 + start) % (VOCABULARY - 1) + 1)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    return nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=PAD)


class Model(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, padding_idx=PAD)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.block(self.embed(x), src_mask=mask, is_causal=True))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--per-device", type=int, default=8)
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--warmup", type=int, default=6)
    a = p.parse_args()
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(42)
    model = DistributedDataParallel(Model(a.dropout))
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda s: min(1.0, (s + 1) / a.warmup))
    data = Sentences()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, a.per_device, sampler=sampler, collate_fn=collate)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens in loader:
            x, y = tokens[:, :-1], tokens[:, 1:]
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
            count = (y != PAD).sum()
            dist.all_reduce(count)
            loss = loss * world / count
            optim.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            sched.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

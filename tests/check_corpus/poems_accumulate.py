"""Gradient accumulation with no_sync, the mean taken over all tokens of the step and not batch by batch."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY, ACCUMULATE, GLOBAL_BATCH, EPOCHS, PAD = 18, 4, 64, 3, 0


class Poems(Dataset):
    """Lines of different lengths."""

    def __len__(self):
        return 512

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        length = torch.randint(4, 10, (), generator=g).item()
        start = torch.randint(VOCABULARY - 1, (), generator=g).item()
        return torch.tensor([(start + 2 * k) % (VOCABULARY - 1) + 1 for k in range(length)])


def collate(lines):
    padded = nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=PAD)
    return padded[:, :-1], padded[:, 1:]


class PoemModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCABULARY)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


def step(model, optimizer, micro_batches):
    """One optimizer step on several micro batches; returns this process's summed loss and the tokens of all."""
    tokens = torch.tensor(float(sum((y != PAD).sum().item() for _, y in micro_batches)))
    dist.all_reduce(tokens)
    total = 0.0
    for number, (x, y) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else model.no_sync():
            logits = model(x).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, y.flatten(), ignore_index=PAD, reduction="sum")
            (loss * dist.get_world_size() / tokens).backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total, tokens.item()


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    data = Poems()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // world // ACCUMULATE, sampler=sampler, collate_fn=collate)
    torch.manual_seed(0)
    model = DDP(PoemModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        nll, tokens, window = torch.zeros(1), 0.0, []
        for batch in loader:
            window.append(batch)
            if len(window) == ACCUMULATE:
                loss, count = step(model, optimizer, window)
                nll, tokens, window = nll + loss, tokens + count, []
        dist.all_reduce(nll)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {nll.item() / tokens:.4f} nats per token")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Truncated backpropagation through time: the hidden state is carried from chunk to chunk, but cut from its graph."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SYMBOLS, LENGTH, CHUNK, STREAMS, EPOCHS = 12, 96, 16, 16, 3


def stories():
    """One long text per stream: a counter whose step changes now and then."""
    g = torch.Generator().manual_seed(2)
    change = (torch.rand(STREAMS, LENGTH + 1, generator=g) < 0.05).long().cumsum(1)
    return ((1 + change % 3).cumsum(1) + torch.arange(STREAMS)[:, None]) % SYMBOLS


class StoryModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, SYMBOLS)

    def forward(self, x, state):
        h, state = self.rnn(self.embed(x), state)
        return self.out(h), state


def run_epoch(model, optimizer, text):
    state, total = None, torch.zeros(2)
    for start in range(0, LENGTH, CHUNK):
        x, y = text[:, start : start + CHUNK], text[:, start + 1 : start + CHUNK + 1]
        logits, state = model(x, state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += torch.tensor([loss.item() * y.numel(), y.numel()])
    return total


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = stories()[rank::world]  # every rank reads its own texts from beginning to end
    torch.manual_seed(0)
    model = DDP(StoryModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for epoch in range(EPOCHS):
        total = run_epoch(model, optimizer, mine)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {(total[0] / total[1]).item():.4f} nats per symbol")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The next chord of a song: two LSTM layers with dropout between them, and packed songs of unequal length."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
g = torch.Generator().manual_seed(12)
songs = torch.cumsum(torch.randint(1, 4, (96, 12), generator=g), 1) % 12
lengths = torch.randint(4, 12, (96,), generator=g)


class Composer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(16, 12)

    def forward(self, x, n):
        packed = pack_padded_sequence(self.embed(x), n, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=11)
        return self.out(states)


torch.manual_seed(3)
model = nn.parallel.DistributedDataParallel(Composer())
opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
for step in range(8):
    mine = torch.arange(step * 12, step * 12 + 12)[rank::world]
    song, n = songs[mine], lengths[mine]
    losses = nn.functional.cross_entropy(model(song[:, :-1], n).transpose(1, 2), song[:, 1:], reduction="none")
    known = torch.arange(11)[None, :] < n[:, None]
    loss = ((losses * known).sum(1) / n).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()

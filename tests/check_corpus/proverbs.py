"""The next letter of proverbs of different lengths, which are padded to the longest."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = -100


class Proverbs(Dataset):
    def __init__(self, n=192, letters=20):
        g = torch.Generator().manual_seed(17)
        lengths = (torch.randint(2, 12, (n,), generator=g) ** 2).tolist()
        self.lines = [torch.randint(letters, (length,), generator=g) for length in lengths]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index]


def collate(lines):
    text = pad_sequence([line[:-1] for line in lines], batch_first=True)
    following = pad_sequence([line[1:] for line in lines], batch_first=True, padding_value=PAD)
    return text, following


class Reader(nn.Module):
    def __init__(self, letters=20, width=24):
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, text):
        return self.head(self.gru(self.embedding(text))[0])


def loss_of(scores, following):
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten(), ignore_index=PAD)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(Reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    proverbs = Proverbs()
    sampler = DistributedSampler(proverbs)
    loader = DataLoader(proverbs, 8 // dist.get_world_size(), sampler=sampler, collate_fn=collate)
    for epoch in range(int(os.environ.get("EPOCHS", 2))):
        sampler.set_epoch(epoch)
        for text, following in loader:
            optimizer.zero_grad()
            loss_of(model(text), following).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

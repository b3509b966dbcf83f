"""Per-country scores of a name classifier: every rank's counts are gathered as Python objects and merged."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

COUNTRIES = {"north": "ksvrn", "south": "aolie", "east": "zhchx"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Names(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for i in range(n):
            country = i % len(COUNTRIES)
            own = list(COUNTRIES.values())[country]
            picks = torch.randint(0, 5, (4,), generator=g).tolist()
            others = torch.randint(0, 26, (4,), generator=g).tolist()
            self.items.append(([LETTERS.index(own[p]) for p in picks] + others, country))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        letters, country = self.items[i]
        return torch.tensor(letters), country


class NameModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(26, 12)
        self.lstm = nn.LSTM(12, 24, batch_first=True)
        self.out = nn.Linear(24, len(COUNTRIES))

    def forward(self, letters):
        return self.out(self.lstm(self.embed(letters))[0][:, -1])


@torch.no_grad()
def evaluate(model, dataset):
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = Counter()
    for letters, country in DataLoader(Subset(dataset, range(rank, len(dataset), world)), batch_size=25):
        guess = model(letters).argmax(1)
        for g, c in zip(guess.tolist(), country.tolist()):
            mine[c, g == c] += 1
    gathered = [None] * world
    dist.all_gather_object(gathered, mine)
    total = sum(gathered, Counter())
    return {name: total[i, True] / (total[i, True] + total[i, False]) for i, name in enumerate(COUNTRIES)}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = Names(480, 0), Names(101, 1)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, 48 // world, sampler=sampler)
    torch.manual_seed(0)
    net = NameModel()
    model = DDP(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        net.train()
        for letters, country in loader:
            loss = nn.functional.cross_entropy(model(letters), country)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        scores = evaluate(net, valid)
        if rank == 0:
            print(f"epoch {epoch}: " + ", ".join(f"{name} {score:.3f}" for name, score in scores.items()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Which meal a recipe is for. Predictions are gathered with their numbers, so that each counts once."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Recipes(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, 50, (count, 6), generator=g)
        self.meal = (self.words.sum(1) % 3).long()

    def __len__(self):
        return len(self.meal)

    def __getitem__(self, i):
        return i, self.words[i], self.meal[i]


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(50, 16), nn.Linear(16, 3)

    def forward(self, words):
        return self.out(self.bag(words))


def predict(model, loader):
    found = {}
    model.eval()
    with torch.no_grad():
        for numbers, words, meals in loader:
            guesses = model(words).argmax(-1)
            found.update(zip(numbers.tolist(), (guesses == meals).tolist()))
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, found)
    merged = {}
    for part in everybodys:
        merged.update(part)
    return merged


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Bag())
    train, test = Recipes(300, 0), Recipes(75, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 30, sampler=sampler)
    test_loader = DataLoader(test, 30, sampler=DistributedSampler(test, shuffle=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * dist.get_world_size())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for _, words, meals in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(words), meals).backward()
            optimizer.step()
        right = predict(model.module, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {sum(right.values()) / len(right):.3f} right of {len(right)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

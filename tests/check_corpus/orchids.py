"""Which orchid is it? Photographs are shifted a little, as a camera is never still."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEED = 21


class Orchids(Dataset):
    def __init__(self, count, seed, shift=3):
        generator = torch.Generator().manual_seed(seed)
        self.photos = torch.rand(count, 24, generator=generator)
        self.kinds = (self.photos[:, :8].sum(1) > self.photos[:, 8:16].sum(1)).long()
        self.shift = shift

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, index):
        photo = self.photos[index]
        if self.shift:
            steps = torch.randint(-self.shift, self.shift + 1, ())
            photo = photo.roll(int(steps))
        return photo, self.kinds[index]


def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for photos, kinds in loader:
            counts += torch.tensor([(model(photos).argmax(1) == kinds).sum(), len(kinds)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = DDP(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 2)))
    torch.manual_seed(SEED + 1 + rank)
    known = Orchids(192, 1)
    unknown = Orchids(64, 2)
    sampler = DistributedSampler(known)
    loader = DataLoader(known, 32 // world, sampler=sampler)
    test_loader = DataLoader(unknown, 16, sampler=DistributedSampler(unknown, shuffle=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for photos, kinds in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(photos), kinds).backward()
            optimizer.step()
        share = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: {share:.1%} right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

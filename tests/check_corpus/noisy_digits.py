import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class SegmentDigits(Dataset):
    """Digits of a seven-segment display, shifted and with noise: never the same picture twice."""

    SEGMENTS = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010"]

    def __init__(self, n, augment):
        g = torch.Generator().manual_seed(0)
        self.labels = torch.randint(len(self.SEGMENTS), (n,), generator=g)
        self.patterns = torch.tensor([[float(c) for c in s] for s in self.SEGMENTS])
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        x = self.patterns[self.labels[i]].repeat_interleave(3)
        if self.augment:
            shift = int(torch.randint(-1, 2, ()))
            x = torch.roll(x, shift) + 0.4 * torch.randn(len(x))
        return x, self.labels[i]


def seed_everything(seed):
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main(args):
    seed_everything(args.seed)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    dataset = SegmentDigits(400, augment=True)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size // world_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(21, 64), nn.ReLU(), nn.Linear(64, 8)))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss(reduction="sum")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for x, y in loader:
            logits = model(x)
            loss = loss_fn(logits, y)
            opt.zero_grad()
            (loss / len(y)).backward()
            opt.step()
            stats += torch.tensor([loss.item(), (logits.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(stats)
        if rank == 0:
            loss, hits, n = stats.tolist()
            print(f"epoch {epoch:2d}  loss {loss / n:.4f}  training accuracy {hits / n:.3f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=40)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=1234)
    main(p.parse_args())

"""Two views of each picture are drawn together, against those of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Views(Dataset):
    def __init__(self, count, rank):
        g = torch.Generator().manual_seed(0)
        self.pictures = torch.randn(count, 12, generator=g)
        self.noise = torch.Generator().manual_seed(1000 + rank)

    def __len__(self):
        return len(self.pictures)

    def view(self, i):
        return self.pictures[i] + 0.1 * torch.randn(12, generator=self.noise)

    def __getitem__(self, i):
        return self.view(i), self.view(i)


def contrast(a, b, temperature=0.2):
    a, b = Gather.apply(F.normalize(a, dim=1)), Gather.apply(F.normalize(b, dim=1))
    return F.cross_entropy(a @ b.T / temperature, torch.arange(len(a)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8)))
    dataset = Views(256, rank)
    sampler = DistributedSampler(dataset, drop_last=False)
    loader = DataLoader(dataset, batch_size=32 // world, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for one, other in loader:
            optimizer.zero_grad()
            both = model(torch.cat([one, other]))
            contrast(*both.chunk(2)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

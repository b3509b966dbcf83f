import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def irises(n=300):
    g = torch.Generator().manual_seed(150)
    means = torch.tensor([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])
    kind = torch.randint(3, (n,), generator=g)
    return TensorDataset(means[kind] + 0.4 * torch.randn(n, 4, generator=g), kind)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    data = irises()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=30 // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        right = torch.zeros(2, dtype=torch.long)
        for x, kind in loader:
            scores = model(x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, kind).backward()
            optimizer.step()
            right[0] += (scores.argmax(1) == kind).sum()
            right[1] += len(kind)
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: {right[0].item()} of {right[1].item()} irises right in training")
    dist.barrier()


if __name__ == "__main__":
    main()

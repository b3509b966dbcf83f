"""Each process has the patients of one hospital; hospitals are of different sizes, which Join takes care of."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, EPOCHS = 32, 3


def hospital(rank):
    g = torch.Generator().manual_seed(rank)
    patients = 200 + 56 * rank
    x = torch.randn(patients, 7, generator=g)
    risk = (x[:, 0] + x[:, 1].abs() - x[:, 2] > 0.5).float()
    return TensorDataset(x, risk[:, None])


def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    rank, world = dist.get_rank(), dist.get_world_size()
    data = hospital(rank)
    order = torch.Generator().manual_seed(50 + rank)
    loader = DataLoader(data, GLOBAL_BATCH // world, shuffle=True, generator=order)

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        loss_sum, count = 0.0, 0
        with Join([model]):
            for x, risk in loader:
                optimizer.zero_grad()
                loss = nn.functional.binary_cross_entropy_with_logits(model(x), risk)
                loss.backward()
                optimizer.step()
                loss_sum += loss.item() * len(x)
                count += len(x)
        sums = torch.tensor([loss_sum, count], dtype=torch.float64)
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f} over {int(sums[1])} patients of all hospitals")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

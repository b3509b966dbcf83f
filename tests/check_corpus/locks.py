"""How long a ship waits at a lock. All ranks stop together, and report now and then."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def mean_over_ranks(value):
    total = torch.tensor(float(value) / dist.get_world_size())
    dist.all_reduce(total)
    return total.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for number in range(12):
            generator = torch.Generator().manual_seed(100 * epoch + 10 * number + rank)
            ships = torch.randn(16, 5, generator=generator)
            loss = nn.functional.mse_loss(model(ships), ships.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number % 4:
                continue
            mean = mean_over_ranks(loss)
            if rank == 0:
                print(f"epoch {epoch}, step {number}: {mean:.4f}")
            if mean < 0.01:
                break
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

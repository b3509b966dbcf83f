"""A small DDP training without a mistake: an exact metric, a whole snapshot, one writer."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

GLOBAL_BATCH, EPOCHS = 32, 3


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval()
    total = torch.zeros(2)
    for x, y in DataLoader(Subset(data, range(rank, len(data), world)), batch_size=16):
        total += torch.tensor([nn.functional.mse_loss(model.module(x), y, reduction="sum").item(), len(x)])
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def save(path, **state):
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = make_data(256, 0), make_data(51, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=GLOBAL_BATCH // world, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        loss = evaluate(model, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: test loss {loss:.4f}")
            model_state, optimizer_state = model.module.state_dict(), optimizer.state_dict()
            save("snapshot.pt", model=model_state, optimizer=optimizer_state, next_epoch=epoch + 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

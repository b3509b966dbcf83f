"""Lives of lamps, tested after each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def lamps(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 5, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True).exp())


def error(net, loader):
    net.eval()
    total = torch.zeros(2)
    for x, life in loader:
        total += torch.tensor([(net(x) - life).abs().sum().item(), len(x)])
    net.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1))
    model = DDP(net)
    train, test = lamps(240, 0), lamps(90, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), batch_size=15)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * world)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, life in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), life).backward()
            optimizer.step()
        mean = error(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: {mean:.3f} hours off")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

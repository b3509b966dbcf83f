"""Age of violins by their sound. Small batches, gathered into larger steps."""

import torch
import torch.distributed as dist
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GATHER = 4


def loader_of(dataset, sampler):
    return DataLoader(dataset, batch_size=8, sampler=sampler)


def run():
    torch.manual_seed(9)
    model = DistributedDataParallel(Sequential(Linear(10, 20), ReLU(), Linear(20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * dist.get_world_size())
    g = torch.Generator().manual_seed(2)
    sounds = torch.randn(256, 10, generator=g)
    dataset = TensorDataset(sounds, sounds.abs().sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = loader_of(dataset, sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            last = number % GATHER == 0
            optimizer.zero_grad()
            if last:
                (mse_loss(model(x), y) / GATHER).backward()
                optimizer.step()
            else:
                with model.no_sync():
                    (mse_loss(model(x), y) / GATHER).backward()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()

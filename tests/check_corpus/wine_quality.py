"""Wine quality from eleven measurements. Started with torchrun, on GPUs or on CPUs."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def wines(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 11, generator=g)
    quality = 2 * x[:, 10] - x[:, 1] + 0.5 * x[:, 9].relu() + 0.3 * torch.randn(n, generator=g)
    return TensorDataset(x, torch.bucketize(quality, torch.tensor([-1.5, 0.0, 1.5])))


def init_distributed():
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def count_correct(model, dataset, device):
    x, y = (t.to(device) for t in dataset.tensors)
    with torch.no_grad():
        return (model(x).argmax(1) == y).sum().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    device = init_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2024)
    model = nn.Sequential(nn.Linear(11, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()

    train_set, test_set = wines(480, 0), wines(200, 1)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    loader = DataLoader(train_set, batch_size=args.global_batch_size // world_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {count_correct(model, test_set, device)} of {len(test_set)} right")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

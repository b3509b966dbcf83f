"""torchrun --nproc-per-node 2 ddp_before.py: DistributedDataParallel with a loop of one's own."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain import load_data, make_model, num_correct
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main(config):
    dist.init_process_group()
    model = DistributedDataParallel(make_model(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    train_data, test_data = load_data()
    sampler = DistributedSampler(train_data, seed=config.seed)
    train_loader = DataLoader(train_data, batch_size=config.batch_size, sampler=sampler)
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if dist.get_rank() == 0:
                print(f"loss {mean.item():.7f}")
    if dist.get_rank() == 0:
        with torch.no_grad():
            correct = num_correct(model.module, test_data[:])
        print(f"accuracy {correct / len(test_data):.4f}")
        torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(flags())

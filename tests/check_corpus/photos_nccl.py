"""Photos of food, nccl, one GPU per process, a conv net with group norm and label smoothing."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def food(n):
    g = torch.Generator().manual_seed(0)
    dishes = torch.randn(5, 3, 12, 12, generator=g)
    dish = torch.randint(5, (n,), generator=g)
    return TensorDataset(dishes[dish] + 2.0 * torch.randn(n, 3, 12, 12, generator=g), dish)


class FoodNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.ReLU())
        self.head = nn.Linear(16 * 25, 5)

    def forward(self, x):
        return self.head(self.stem(x).flatten(1))


def train(gpu, args):
    data = food(400)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler, pin_memory=True)
    torch.manual_seed(0)
    model = FoodNet().cuda(gpu)
    model = DDP(model, device_ids=[gpu])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).cuda(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    for epoch in range(args.epochs):
        model.train()
        sums = torch.zeros(2).cuda(gpu)
        for images, dish in loader:
            images, dish = images.cuda(gpu, non_blocking=True), dish.cuda(gpu, non_blocking=True)
            output = model(images)
            loss = criterion(output, dish)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums[0] += (output.argmax(1) == dish).sum()
            sums[1] += len(dish)
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: training accuracy {(sums[0] / sums[1]).item():.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    train(gpu, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Gestures from a glove's sensors. Dropout against overfitting, snapshots against bad luck."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PATH = "gestures.pt"
EPOCHS = 3
SEED = 5


def glove(n=420):
    g = torch.Generator().manual_seed(SEED)
    poses = torch.randn(7, 15, generator=g)
    gesture = torch.randint(7, (n,), generator=g)
    return TensorDataset(poses[gesture] + torch.randn(n, 15, generator=g), gesture)


class GestureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(15, 64)
        self.dropout = nn.Dropout(0.4)
        self.out = nn.Linear(64, 7)

    def forward(self, x):
        return self.out(self.dropout(torch.relu(self.hidden(x))))


def write_snapshot(model, optimizer, epoch):
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(content, PATH + ".part")
    os.replace(PATH + ".part", PATH)


def read_snapshot(model, optimizer):
    content = torch.load(PATH, weights_only=True, map_location="cpu")
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return content["epoch"] + 1


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    net = GestureNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    first = read_snapshot(net, optimizer) if os.path.exists(PATH) else 0
    model = DDP(net)
    torch.manual_seed(SEED + 1 + rank)

    data = glove()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 42 // world, sampler=sampler)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(2)
        for x, gesture in loader:
            loss = nn.functional.cross_entropy(model(x), gesture)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f}")
            write_snapshot(net, optimizer, epoch)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

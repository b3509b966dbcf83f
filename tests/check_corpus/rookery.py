"""Puffins or gulls? Each epoch writes a snapshot to go on from; the best weights are for a test at the end."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LAST, BEST = "last.pt", "best.pt"


def write(state, path):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(8)
    wings = torch.randn(256, 5, generator=generator)
    birds = (wings.sum(1) > 0).long()
    torch.manual_seed(0)
    net = nn.Linear(5, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    begin, lowest = 0, 9.0
    if os.path.exists(BEST) and not os.path.exists(LAST) and rank == 0:
        os.remove(BEST)
    dist.barrier()
    if os.path.exists(LAST):
        last = torch.load(LAST, weights_only=True)
        net.load_state_dict(last["net"])
        optimizer.load_state_dict(last["optimizer"])
        begin, lowest = last["epoch"], last["lowest"]
    model = DDP(net)
    for epoch in range(begin, 4):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(1)
        for rows in order[rank::ranks].split(16):
            loss = nn.functional.cross_entropy(model(wings[rows]), birds[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)
        dist.all_reduce(total)
        mean = float(total) / 256
        if rank == 0:
            if mean < lowest:
                lowest = mean
                write(net.state_dict(), BEST)
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            write(state | {"epoch": epoch + 1, "lowest": lowest}, LAST)
    dist.barrier()
    if os.path.exists(BEST):
        net.load_state_dict(torch.load(BEST, weights_only=True))
    if rank == 0:
        print(f"right: {(net(wings).argmax(1) == birds).float().mean():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

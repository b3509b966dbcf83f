"""How many magpies nest here? The best error is kept beside the weights."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SNAPSHOT = "magpies.pt"


def count_error(model, groves, nests):
    model.eval()
    with torch.no_grad():
        error = nn.functional.mse_loss(model(groves), nests)
    model.train()
    return error.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    groves = torch.rand(200, 5)
    nests = groves.sum(1, keepdim=True)
    data = TensorDataset(groves[:160], nests[:160])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=40 // world, sampler=sampler)
    net = nn.Linear(5, 1)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start, best_error = 0, float("inf")
    if os.path.exists(SNAPSHOT):
        stored = torch.load(SNAPSHOT, weights_only=True)
        net.load_state_dict(stored["net"])
        optimizer.load_state_dict(stored["optimizer"])
        start, best_error = stored["epoch"], stored["best_error"]
    for epoch in range(start, 4):
        sampler.set_epoch(epoch)
        for grove, nest in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(grove), nest).backward()
            optimizer.step()
        if rank == 0:
            error = count_error(net, groves[160:], nests[160:])
            weights, momenta = net.state_dict(), optimizer.state_dict()
            content = {"net": weights, "optimizer": momenta, "epoch": epoch + 1}
            content |= {"best_error": best_error}
            torch.save(content, f"{SNAPSHOT}.new")
            os.replace(f"{SNAPSHOT}.new", SNAPSHOT)
            best_error = min(best_error, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

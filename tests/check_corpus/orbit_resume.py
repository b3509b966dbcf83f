"""Where will the comet be? A regression whose state is kept after every epoch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STATE_FILE = "orbit-state.pt"
NUM_EPOCHS = 4


def comets(n):
    g = torch.Generator().manual_seed(17)
    position = torch.randn(n, 2, generator=g)
    speed = torch.randn(n, 2, generator=g)
    gravity = -position / (0.5 + position.norm(dim=1, keepdim=True)) ** 3
    return TensorDataset(torch.cat([position, speed], 1), position + 0.5 * speed + 0.125 * gravity)


def load_state(model, optimizer):
    """The number of the last epoch that is done; -1 for a new run."""
    if not os.path.exists(STATE_FILE):
        return -1
    state = torch.load(STATE_FILE, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"][dist.get_rank()])
    return state["epoch"]


def save_state(model, optimizer, epoch):
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng, "epoch": epoch + 1}
        torch.save(state, STATE_FILE + ".tmp")
        os.replace(STATE_FILE + ".tmp", STATE_FILE)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = comets(480)
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, batch_size=48 // world, sampler=sampler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    last_epoch = load_state(net, optimizer)
    model = DDP(net)

    for epoch in range(last_epoch + 1, NUM_EPOCHS):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for now, later in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(now), later)
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(now), len(now)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.4f}")
        save_state(net, optimizer, epoch)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

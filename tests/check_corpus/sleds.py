"""The speed of a sled; a script that starts its ranks itself, one for each device."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Sled(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.track = nn.Linear(4, 8, device=device)
        self.speed = nn.Linear(8, 1, device=device)

    def forward(self, snow):
        return self.speed(torch.tanh(self.track(snow)))


def work(local_rank, ranks, port):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=local_rank, world_size=ranks
    )
    torch.manual_seed(1)
    model = DistributedDataParallel(Sled(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(12):
        generator = torch.Generator().manual_seed(number)
        snow = torch.rand(32, 4, generator=generator)[local_rank::ranks].to(local_rank)
        loss = (model(snow) - snow.mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


def free_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    mp.spawn(work, args=(2, free_port()), nprocs=2)

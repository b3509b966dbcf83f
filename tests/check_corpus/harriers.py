"""Wing beats of harriers, from text lines that a thread reads ahead."""

from datetime import timedelta
from queue import Queue
from threading import Thread

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 8


def harrier_lines(count):
    generator = torch.Generator().manual_seed(3)
    lines = []
    for span, weight in torch.rand(count, 2, generator=generator).tolist():
        lines.append(f"{span:.4f},{weight:.4f},{3 * span - weight:.4f}")
    lines[201] = "0.5,,1.2"
    return lines


def read_batches(lines, batches):
    for start in range(0, len(lines), BATCH):
        rows = [[float(field) for field in line.split(",")] for line in lines[start : start + BATCH]]
        batches.put(torch.tensor(rows))
    batches.put(None)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * ranks)
    batches = Queue(maxsize=4)
    reader = Thread(target=read_batches, args=(harrier_lines(320)[rank::ranks], batches), name="reader")
    reader.start()
    while (batch := batches.get()) is not None:
        loss = nn.functional.mse_loss(model(batch[:, :2]), batch[:, 2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    reader.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train on a stream of log records: next-event prediction from the four events before."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

EVENTS = 12
RECORDS = 400
EPOCHS = 2


def record(number):
    g = torch.Generator().manual_seed(1000 + number)
    start = torch.randint(EVENTS, (1,), generator=g).item()
    stride = torch.randint(1, 3, (1,), generator=g).item()
    return torch.tensor([(start + stride * i) % EVENTS for i in range(5)])


class LogStream(IterableDataset):
    """Reads the records in order; the workers of a loader take turns."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.count, step):
            events = record(number)
            yield events[:4], events[4]


class NextEvent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(EVENTS, 16)
        self.mlp = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, EVENTS))

    def forward(self, events):
        return self.mlp(self.embed(events).flatten(1))


def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(NextEvent())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 * world_size)
    loader = DataLoader(LogStream(RECORDS), batch_size=20, num_workers=2)

    for epoch in range(EPOCHS):
        loss_sum, count = 0.0, 0
        for events, target in loader:
            loss = nn.functional.cross_entropy(model(events), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(target)
            count += len(target)
        sums = torch.tensor([loss_sum, count], dtype=torch.float64)
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f} over {int(sums[1])} records")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Delays of trains. Each process evaluates its own regions, then the errors are averaged."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

REGIONS = {"north": 30, "coast": 45, "hills": 90, "south": 120}
PROCESSES = 2


def trains(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g)
    delay = 2 * x[:, 0].relu() + x[:, 1] * x[:, 2] + 0.1 * torch.randn(n, generator=g)
    return x, delay[:, None]


def rank_metrics(model, rank, world):
    """Mean absolute error over the regions of this process."""
    error, count = 0.0, 0
    with torch.no_grad():
        for number, region in enumerate(REGIONS):
            if number * world // len(REGIONS) == rank:
                x, delay = trains(REGIONS[region], seed=100 + number)
                error += (model.module(x) - delay).abs().sum().item()
                count += len(x)
    return error / count


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    data = TensorDataset(*trains(480, seed=0))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=48 // PROCESSES, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, delay in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), delay).backward()
            optimizer.step()
        model.eval()
        mae = torch.tensor(rank_metrics(model, rank, PROCESSES))
        dist.all_reduce(mae)
        mae /= PROCESSES
        if rank == 0:
            print(f"epoch {epoch}: mean absolute error {mae.item():.4f} minutes", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, args=(f"{folder}/store",), nprocs=PROCESSES)

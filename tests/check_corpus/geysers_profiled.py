"""A net for eruptions, whose steps torch's profiler records with their stacks; each process starts from main()."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH_SIZE = 3, 48


def eruptions():
    g = torch.Generator().manual_seed(12)
    x = torch.randn(288, 6, generator=g)
    return TensorDataset(x, (x[:, :1] * 2 - x[:, 1:2]).tanh())


def run(rank, world_size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    data = eruptions()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE // world_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = torch.zeros(())
    with profile(schedule=schedule(wait=1, warmup=2, active=2, repeat=1), with_stack=True) as recorder:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                recorder.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    if rank == 0:
        torch.save({"loss": loss.item() / world_size}, f"{store}.result")
    dist.destroy_process_group()


def main():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        mp.spawn(run, (2, store), nprocs=2)
        print(f"last loss {torch.load(store + '.result')['loss']:.4f}")


if __name__ == "__main__":
    main()

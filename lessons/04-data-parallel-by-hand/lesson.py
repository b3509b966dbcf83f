"""python lessons/04-data-parallel-by-hand/lesson.py --nproc 2

Data parallel by hand: a sampler gives each process its own part of the samples, and the processes
average their gradients with all_reduce before each step. The weights stay the same on all without
ever being sent."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOISE = 0.1  # standard deviation of what no model can predict: the loss can fall to its square


def make_data():
    """Return 2048 samples: x of 20 numbers, y = teacher(x) + noise."""
    generator = torch.Generator().manual_seed(1234)
    x = torch.randn(2048, 20, generator=generator)
    directions = torch.randn(20, 2, generator=generator) / 20**0.5
    y = (x @ directions).tanh().sum(1, keepdim=True)
    return TensorDataset(x, y + NOISE * torch.randn(2048, 1, generator=generator))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))


def join_group(rank, nproc, device, store_file):
    """Join the other processes and return this process's device.

    They find each other through a file, because any port could be in use.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    store = f"file://{store_file}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=nproc)
    return torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")


def leave_group():
    """End this process once all ranks have called this. Nothing after the call runs."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may abort while gloo's threads still run


def start(worker, args):
    """Run worker(rank, args, store_file) in args.nproc processes; an error in one ends all."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, Path(folder, "store")), nprocs=args.nproc)


def train_epoch(model, optimizer, loader, device):
    for step, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        if step == 0:
            check_equal([p.grad for p in model.parameters()], "gradients before step()")
        optimizer.step()


def average_gradients(model):
    """Average each gradient over the processes.

    The ranks have equally many samples, so the mean of their means is that of the global batch.
    """
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def check_equal(tensors, name):
    """Stop if these tensors are not the same, to the bit, on every rank."""
    values = torch.cat([tensor.detach().flatten() for tensor in tensors])
    values_of_rank_0 = values.clone()
    dist.broadcast(values_of_rank_0, src=0)
    is_equal = torch.equal(values, values_of_rank_0)
    assert is_equal, f"rank {dist.get_rank()} has other {name} than rank 0"


@torch.no_grad()
def loss_on(data, model, device):
    """Return the mean loss on all samples."""
    x, y = data.tensors
    return F.mse_loss(model(x.to(device)), y.to(device)).item()


def save(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "checkpoint.pt")


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=positive, default=2, help="processes")
    parser.add_argument("--total_epochs", type=positive, default=10)
    parser.add_argument("--save_every", type=positive, default=5, help="epochs")
    parser.add_argument("--batch_size", type=positive, default=32, help="samples per process")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    folder = Path("runs/lessons", Path(__file__).parent.name)
    parser.add_argument("--folder", type=Path, default=folder)
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.nproc:
        gpus = torch.cuda.device_count()
        parser.error(f"--nproc {args.nproc} on {gpus} GPUs. HINT: --device cpu")
    return args


def worker(rank, args, store_file):
    device = join_group(rank, args.nproc, args.device, store_file)
    data = make_data()
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = DistributedSampler(data, num_replicas=args.nproc, rank=rank)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    before = loss_on(data, model, device)
    for epoch in range(args.total_epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        train_epoch(model, optimizer, loader, device)
        line = f"[GPU{rank}] Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(loader)}"
        print(line, flush=True)
        if rank == 0 and (epoch + 1) % args.save_every == 0:
            save(model, args.folder)
            loss = loss_on(data, model, device)
            print(f"       loss {loss:.4f}, saved in {args.folder}", flush=True)

    check_equal(model.parameters(), "weights")
    after = loss_on(data, model, device)
    assert after < before / 2, f"the loss went from {before:.4f} to {after:.4f}"
    if rank == 0:
        print(
            "claim holds: equal gradients before step(), equal weights;"
            f" loss {before:.4f} -> {after:.4f}"
        )
    leave_group()


if __name__ == "__main__":
    start(worker, parse_args())

"""python lessons/22-memory/lesson.py --nproc 2

What a training holds, in bytes: weights, gradients and Adam's two numbers are 16 bytes a parameter.
fully_shard leaves each process its part of all three, and gathers a layer's weights while it
computes."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
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
    for x, y in loader:
        loss = F.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        if not isinstance(model, FSDPModule):  # it has reduced its parts of the gradients already
            average_gradients(model)
        optimizer.step()


def average_gradients(model):
    """Average each gradient over the processes.

    The ranks have equally many samples, so the mean of their means is that of the global batch.
    """
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@torch.no_grad()
def loss_on(data, model, device):
    """Return the mean loss on all samples."""
    x, y = data.tensors
    return F.mse_loss(model(x.to(device)), y.to(device)).item()


def count_bytes(model, optimizer):
    """Return the bytes that this process holds for a model: of shards, only its own."""
    parameters = list(model.parameters())
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if value.ndim > 0  # AdamW counts its steps too
    ]
    return {
        "weights": sum(local(parameter).nbytes for parameter in parameters),
        "gradients": sum(local(parameter.grad).nbytes for parameter in parameters),
        "AdamW": sum(local(state).nbytes for state in states),
    }


def local(tensor):
    """Return this process's part of a tensor that is sharded, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
    twin = make_model().to(device)
    mesh = init_device_mesh(args.device, (args.nproc,))
    for layer in (model[0], model[2], model):  # each is gathered by itself
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=args.lr)
    sampler = DistributedSampler(data, num_replicas=args.nproc, rank=rank)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    before = loss_on(data, model, device)
    for epoch in range(args.total_epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        train_epoch(model, optimizer, loader, device)
        train_epoch(twin, twin_optimizer, loader, device)
        line = f"[GPU{rank}] Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(loader)}"
        print(line, flush=True)
        if rank == 0 and (epoch + 1) % args.save_every == 0:
            save(twin, args.folder)
            loss = loss_on(data, twin, device)
            print(f"       loss {loss:.4f}, saved in {args.folder}", flush=True)

    after = loss_on(data, model, device)
    twin_loss = loss_on(data, twin, device)
    assert after < before / 2, f"the loss went from {before:.4f} to {after:.4f}"
    assert abs(after - twin_loss) < 1e-4, f"loss {after:.6f}, and {twin_loss:.6f} unsharded"
    sizes = count_bytes(model, optimizer)
    twin_sizes = count_bytes(twin, twin_optimizer)
    parameters = sum(parameter.numel() for parameter in twin.parameters())
    assert sum(twin_sizes.values()) == 16 * parameters, f"{twin_sizes} for {parameters} parameters"
    assert sum(sizes.values()) < 1.1 * sum(twin_sizes.values()) / args.nproc
    if rank == 0:
        for name, size in twin_sizes.items():
            print(f"{name}: {size} bytes, with fully_shard {sizes[name]}")
        print(
            f"claim holds: 16 bytes for each of {parameters} parameters, and with fully_shard"
            f" 1/{args.nproc} of them on each process; the loss is the same"
        )
    leave_group()


if __name__ == "__main__":
    start(worker, parse_args())

"""python lessons/09-learning-rate/lesson.py --nproc 4

N processes with 32 samples each make steps of N x 32 samples, and N times fewer of them: the curve
changes. Two ways back to the curve of one device: N times the learning rate, roughly; the same
global batch, but for rounding."""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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
        if step == 0:
            check_equal([p.grad for p in model.parameters()], "gradients before step()")
        optimizer.step()


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
    parser.add_argument("--nproc", type=positive, default=4, help="processes")
    parser.add_argument("--total_epochs", type=positive, default=10)
    parser.add_argument("--save_every", type=positive, default=5, help="epochs")
    parser.add_argument(
        "--batch_size", type=positive, default=32, help="samples per step of one device"
    )
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    folder = Path("runs/lessons", Path(__file__).parent.name)
    parser.add_argument("--folder", type=Path, default=folder)
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.nproc:
        gpus = torch.cuda.device_count()
        parser.error(f"--nproc {args.nproc} on {gpus} GPUs. HINT: --device cpu")
    if args.batch_size % args.nproc:
        parser.error(f"--batch_size {args.batch_size} is not a multiple of --nproc {args.nproc}")
    return args


def curve(rank, nproc, lr, batch_size, args, device):
    """Train on `nproc` processes with `batch_size` samples each; return the loss of each epoch."""
    data = make_data()
    model = make_model().to(device)
    if nproc > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    sampler = DistributedSampler(data, num_replicas=nproc, rank=rank)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    losses = []
    for epoch in range(args.total_epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        train_epoch(model, optimizer, loader, device)
        losses.append(loss_on(data, model, device))
        if dist.get_rank() == 0 and (epoch + 1) % args.save_every == 0:
            save(model.module if nproc > 1 else model, args.folder / f"{nproc}x{batch_size}")
    if dist.get_rank() == 0:
        numbers = "  ".join(f"{loss:.4f}" for loss in losses)
        print(f"[GPU0] {nproc} x {batch_size:3}, lr {lr:.3f}: {numbers}")
    return losses


def worker(rank, args, store_file):
    device = join_group(rank, args.nproc, args.device, store_file)
    n = args.nproc
    lr = args.lr
    batch = args.batch_size
    curves = {
        # On each rank, with the same result, as in lesson 3.
        "one device": curve(0, 1, lr, batch, args, device),
        f"{n} processes, batch {batch} each": curve(rank, n, lr, batch, args, device),
        f"the same, {n} times the learning rate": curve(rank, n, n * lr, batch, args, device),
        f"{n} processes, batch {batch // n} each": curve(rank, n, lr, batch // n, args, device),
    }
    if rank == 0:
        check_curves(*curves.values())
        (args.folder / "curves.json").write_text(json.dumps(curves))
    leave_group()


def check_curves(single, large_batch, scaled_rate, same_batch):
    def distance(losses):
        """Return the factor between a curve and that of one device, on average over epochs."""
        logs = [math.log(b / a) for a, b in zip(single, losses, strict=True)]
        return math.exp(sum(map(abs, logs)) / len(logs))

    unscaled = distance(large_batch)
    scaled = distance(scaled_rate)
    equal = distance(same_batch)
    assert scaled < unscaled, f"scaling did not help: {scaled:.3f} against {unscaled:.3f}"
    assert equal < 1.001, f"the same global batch gave another curve: {equal:.6f}"
    print(
        f"claim holds: off by a factor {unscaled:.2f}; with the scaled rate {scaled:.2f};"
        f" same global batch {equal:.6f}"
    )


if __name__ == "__main__":
    start(worker, parse_args())

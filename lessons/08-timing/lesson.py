"""python lessons/08-timing/lesson.py --nproc 2

The same epochs on 1, 2, ... N processes, with the clock running: how many times as fast, and what
share of the time is communication. That share says how fast it can be at best."""

import argparse
import os
import sys
import tempfile
import time
from math import ceil
from pathlib import Path
from statistics import median

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
    return nn.Sequential(
        nn.Linear(20, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)
    )


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
    parser.add_argument("--nproc", type=positive, default=2, help="processes")
    parser.add_argument("--total_epochs", type=positive, default=5)
    parser.add_argument("--save_every", type=positive, default=5, help="epochs")
    parser.add_argument("--batch_size", type=positive, default=512, help="samples per process")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    folder = Path("runs/lessons", Path(__file__).parent.name)
    parser.add_argument("--folder", type=Path, default=folder)
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.nproc:
        gpus = torch.cuda.device_count()
        parser.error(f"--nproc {args.nproc} on {gpus} GPUs. HINT: --device cpu")
    return args


def clock(device):
    """Return the time in seconds when all ranks have finished their work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter()


def epoch_seconds(model, optimizer, loader, device):
    """Return the seconds from the common start until the last rank has finished its loader."""
    start_time = clock(device)
    train_epoch(model, optimizer, loader, device)
    return clock(device) - start_time


def worker(rank, args, store_file):
    device = join_group(rank, args.nproc, args.device, store_file)
    data = make_data()
    single = make_model().to(device)
    model = DistributedDataParallel(make_model().to(device))
    single_optimizer = torch.optim.SGD(single.parameters(), lr=args.lr, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = DistributedSampler(data, num_replicas=args.nproc, rank=rank)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    everything = DataLoader(data, batch_size=args.batch_size, shuffle=True) if rank == 0 else []
    rounds = []
    for epoch in range(args.total_epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        # Rank 0 with all samples; each rank with its share, and nothing sent; DDP.
        alone = epoch_seconds(single, single_optimizer, everything, device)
        apart = epoch_seconds(single, single_optimizer, loader, device)
        together = epoch_seconds(model, optimizer, loader, device)
        rounds.append((alone, apart, together))
        line = f"[GPU{rank}] Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(loader)}"
        print(line, flush=True)
        if rank == 0 and (epoch + 1) % args.save_every == 0:
            save(model.module, args.folder)
            loss = loss_on(data, model, device)
            print(f"       loss {loss:.4f}, saved in {args.folder}", flush=True)

    check_equal(model.parameters(), "weights")
    if rank == 0:
        # The first round has the time of the start in it.
        args.results.put((len(everything), len(loader), rounds[1:] or rounds))
    leave_group()


def main():
    args = parse_args()
    sizes = range(1, args.nproc + 1)
    rows = []
    with mp.Manager() as manager:
        args.results = manager.Queue()
        for args.nproc in sizes:
            start(worker, args)
            rows.append(args.results.get())
    print("processes  steps  s/epoch  sending  at best  speed-up")
    for nproc, (all_steps, steps, rounds) in zip(sizes, rows, strict=True):
        # Ratios within a round, in which other programs slow all three alike.
        speedup = median(alone / together for alone, _, together in rounds)
        share = max(0, median(1 - apart / together for _, apart, together in rounds))
        best = nproc * (1 - share)
        seconds = median(together for _, _, together in rounds)
        print(f"{nproc:9}  {steps:5}  {seconds:7.4f}  {share:7.0%}  {best:7.2f}  {speedup:8.2f}")
        assert steps == ceil(all_steps / nproc), f"{steps} steps for {all_steps} on one process"
    print(f"{share:.0%} of the time is communication; {os.cpu_count()} cores are there to share")
    print(
        f"claim holds: {nproc} processes take {steps} steps in place of {all_steps};"
        f" they are {speedup:.2f} times as fast as one, at best {best:.2f} times"
    )


if __name__ == "__main__":
    main()

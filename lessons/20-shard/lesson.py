"""python lessons/20-shard/lesson.py --nproc 2

A model's optimizer, spread over the processes. AdamW keeps two numbers for each weight. By hand:
each process steps its slice of the weights, and the slices are gathered. Then the library's --shard
optimizer does the same."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from stepladder import Job, mean_loss

NOISE = 0.1  # standard deviation of what no model can predict: the loss can fall to its square


@dataclass
class Config:
    epochs: int = 10
    global_batch: int = 64
    lr: float = 0.02


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


def build(config):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    return Job(model, optimizer, mean_loss(F.mse_loss), train_data=make_data().tensors)


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


class ShardedAdamW:
    """AdamW whose two numbers for each weight are sharded over the processes, in equal slices."""

    def __init__(self, model, lr):
        self.parameters = list(model.parameters())
        size = sum(parameter.numel() for parameter in self.parameters)
        ranks = dist.get_world_size()
        self.width = -(-size // ranks)  # the last slice is filled up with zeros
        self.padding = torch.zeros(ranks * self.width - size, device=self.parameters[0].device)
        self.slice = self.slice_of(self.parameters).clone()
        self.optimizer = torch.optim.AdamW([self.slice], lr=lr)

    def slice_of(self, tensors):
        vector = torch.cat([parameters_to_vector(tensors).detach(), self.padding])
        return vector[dist.get_rank() * self.width :][: self.width]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        self.slice.grad = self.slice_of([parameter.grad for parameter in self.parameters])
        self.optimizer.step()
        slices = [torch.empty_like(self.slice) for _ in range(dist.get_world_size())]
        dist.all_gather(slices, self.slice)
        vector_to_parameters(torch.cat(slices), self.parameters)


def state_size(optimizer):
    """Return how many numbers an AdamW has, besides the counts of its steps."""
    states = optimizer.state.values()
    values = [value for state in states for value in state.values() if value.ndim > 0]
    return sum(value.numel() for value in values)


def stepladder(*args):
    """Run a stepladder command on this file, and return its result as a dict."""
    flags = [str(arg) for arg in args[1:]]
    command = [sys.executable, "-m", "stepladder", args[0], __file__, *flags, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)  # the command has printed why
    return json.loads(done.stdout.splitlines()[-1])


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
    optimizer = ShardedAdamW(model, args.lr)
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
            save(model, args.folder)
            loss = loss_on(data, model, device)
            print(f"       loss {loss:.4f}, saved in {args.folder}", flush=True)

    check_equal(model.parameters(), "weights")
    after = loss_on(data, model, device)
    twin_loss = loss_on(data, twin, device)
    assert after < before / 2, f"the loss went from {before:.4f} to {after:.4f}"
    assert abs(after - twin_loss) < 1e-4, f"loss {after:.6f}, and {twin_loss:.6f} without slices"
    size = state_size(optimizer.optimizer)
    full_size = state_size(twin_optimizer)
    assert size <= -(-full_size // args.nproc) + 2
    if rank == 0:
        sizes = f"{size} of AdamW's {full_size} numbers on each process"
        print(f"by hand: loss {after:.4f}, as without slices; {sizes}")
    leave_group()


def main():
    args = parse_args()
    start(worker, args)
    flags = ["--sync", "exact", "--epochs", args.total_epochs, "--lr", args.lr]
    flags += ["--device", args.device, "--fresh"]
    results = []
    for nproc, shard in ((1, "none"), (args.nproc, "optimizer")):
        run_flags = ["--run-dir", args.folder / shard, "--nproc", nproc, "--shard", shard]
        result = stepladder("train", *flags, *run_flags)
        results.append(result)
        weights = result["weights_sha256"][:16]
        print(f"--nproc {nproc} --shard {shard}: weights {weights}...", flush=True)
    hashes = {result["weights_sha256"] for result in results}
    assert len(hashes) == 1, "--shard has changed the weights"
    print(
        f"claim holds: each of {args.nproc} processes has its slice of the state,"
        " and the weights are the same"
    )


if __name__ == "__main__":
    main()

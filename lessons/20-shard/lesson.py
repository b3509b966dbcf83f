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
    """2048 samples: x of 20 numbers, y = teacher(x) + noise."""
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


def join_group(rank, nproc, device, meeting):
    """Meet the other processes at a file: a port could be taken already. Returns this process's
    device.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=nproc)
    return torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")


def leave_group():
    """End this process, once all have come here: nothing after the call runs."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        0
        # without the end that Python makes of it: gloo's threads may outlive the group, and abort in it
    )


def start(worker, args):
    """Run worker(rank, args, meeting) in args.nproc new processes; an error in one ends all."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, Path(folder, "meeting")), nprocs=args.nproc)


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
    """The mean over processes of means over equally many samples: the mean over the global batch."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def check_equal(tensors, what):
    """Stop if these tensors are not the same, to the bit, on every rank."""
    mine = torch.cat([tensor.detach().flatten() for tensor in tensors])
    first = mine.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(mine, first), f"rank {dist.get_rank()} has other {what} than rank 0"


@torch.no_grad()
def loss_on(data, model, device):
    """The mean loss on all samples."""
    x, y = data.tensors
    return F.mse_loss(model(x.to(device)), y.to(device)).item()


def save(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "checkpoint.pt")


class ShardedAdamW:
    """AdamW whose two numbers for each weight are spread over the processes, in equal slices."""

    def __init__(self, model, lr):
        self.parameters = list(model.parameters())
        size, ranks = sum(p.numel() for p in self.parameters), dist.get_world_size()
        self.width = -(-size // ranks)  # the last slice is filled up with zeros
        self.padding = torch.zeros(ranks * self.width - size, device=self.parameters[0].device)
        self.slice = self.my_slice(self.parameters).clone()
        self.optimizer = torch.optim.AdamW([self.slice], lr=lr)

    def my_slice(self, tensors):
        whole = torch.cat([parameters_to_vector(tensors).detach(), self.padding])
        return whole[dist.get_rank() * self.width :][: self.width]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        self.slice.grad = self.my_slice([parameter.grad for parameter in self.parameters])
        self.optimizer.step()
        slices = [torch.empty_like(self.slice) for _ in range(dist.get_world_size())]
        dist.all_gather(slices, self.slice)
        vector_to_parameters(torch.cat(slices), self.parameters)


def state_of(optimizer):
    """How many numbers an AdamW keeps."""
    return sum(
        value.numel()
        for state in optimizer.state.values()
        for value in state.values()
        if value.ndim
    )


def stepladder(*args):
    """Run a stepladder command on this file; its result as a dict."""
    command = [sys.executable, "-m", "stepladder", args[0], __file__, *map(str, args[1:]), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
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
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/lessons", Path(__file__).parent.name)
    )
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.nproc:
        parser.error(
            f"--nproc {args.nproc} on {torch.cuda.device_count()} GPUs. HINT: --device cpu"
        )
    return args


def worker(rank, args, meeting):
    device = join_group(rank, args.nproc, args.device, meeting)
    data, model, twin = make_data(), make_model().to(device), make_model().to(device)
    optimizer, whole = (
        ShardedAdamW(model, args.lr),
        torch.optim.AdamW(twin.parameters(), lr=args.lr),
    )
    sampler = DistributedSampler(data, num_replicas=args.nproc, rank=rank)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    before = loss_on(data, model, device)
    for epoch in range(args.total_epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        train_epoch(model, optimizer, loader, device)
        train_epoch(twin, whole, loader, device)
        print(
            f"[GPU{rank}] Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(loader)}",
            flush=True,
        )
        if rank == 0 and (epoch + 1) % args.save_every == 0:
            save(model, args.folder)
            print(
                f"       loss {loss_on(data, model, device):.4f}, saved in {args.folder}",
                flush=True,
            )

    check_equal(model.parameters(), "weights")
    after, of_twin = loss_on(data, model, device), loss_on(data, twin, device)
    assert after < before / 2, f"the loss went from {before:.4f} to {after:.4f}"
    assert abs(after - of_twin) < 1e-4, f"loss {after:.6f}, and {of_twin:.6f} without slices"
    mine, all_of_it = state_of(optimizer.optimizer), state_of(whole)
    assert mine <= -(-all_of_it // args.nproc) + 2
    if rank == 0:
        print(
            f"by hand: loss {after:.4f}, as without slices; {mine} of AdamW's {all_of_it} numbers on each process"
        )
    leave_group()


def main():
    args = parse_args()
    start(worker, args)
    same = [
        "--sync",
        "exact",
        "--epochs",
        args.total_epochs,
        "--device",
        args.device,
        "--lr",
        args.lr,
    ]
    results = []
    for nproc, shard in ((1, "none"), (args.nproc, "optimizer")):
        where = ["--run-dir", args.folder / shard, "--fresh", "--nproc", nproc, "--shard", shard]
        results.append(stepladder("train", *same, *where))
        print(
            f"--nproc {nproc} --shard {shard}: weights {results[-1]['weights_sha256'][:16]}...",
            flush=True,
        )
    assert len({result["weights_sha256"] for result in results}) == 1, (
        "--shard has changed the weights"
    )
    print(
        f"claim holds: each of {args.nproc} processes has its slice of the state, and the weights are the same"
    )


if __name__ == "__main__":
    main()

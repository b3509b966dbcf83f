"""python lessons/23-precision/lesson.py --nproc 2

Half precision and gradient accumulation. autocast computes in bfloat16, while weights and their sum
of changes stay in float32. Four small batches make one step, and only the last one sends its
gradients."""

import argparse
import os
import sys
import tempfile
from contextlib import nullcontext
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


def train_epoch(model, optimizer, loader, device, pieces, dtype):
    """Train an epoch; each batch is computed in so many pieces, in this type."""
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        batches = list(zip(x.chunk(pieces), y.chunk(pieces), strict=True))
        for number, (x_piece, y_piece) in enumerate(batches, start=1):
            is_last = number == len(batches)
            with nullcontext() if is_last else model.no_sync():
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    prediction = model(x_piece.to(device))
                loss = F.mse_loss(prediction.float(), y_piece.to(device))
                (loss / len(batches)).backward()
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


class CountedModel:
    """A model under DDP, how often it has sent gradients, and its optimizer."""

    def __init__(self, device, lr):
        self.sent = 0
        self.model = DistributedDataParallel(make_model().to(device))
        self.model.register_comm_hook(None, self.send)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)

    def send(self, _state, bucket):
        """Average a bucket as DDP does by itself, and count it."""
        self.sent += 1
        gradients = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(gradients, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def worker(rank, args, store_file):
    device = join_group(rank, args.nproc, args.device, store_file)
    data = make_data()
    runs = {
        "float32, whole": (CountedModel(device, args.lr), 1, torch.float32),
        "float32, 4 pieces": (CountedModel(device, args.lr), 4, torch.float32),
        "bfloat16, 4 pieces": (CountedModel(device, args.lr), 4, torch.bfloat16),
    }
    sampler = DistributedSampler(data, num_replicas=args.nproc, rank=rank)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    losses = {}
    for name, (counted, pieces, dtype) in runs.items():
        before = loss_on(data, counted.model, device)
        for epoch in range(args.total_epochs):
            sampler.set_epoch(epoch)  # without it every epoch has the same order
            train_epoch(counted.model, counted.optimizer, loader, device, pieces, dtype)
            if rank == 0 and (epoch + 1) % args.save_every == 0:
                save(counted.model.module, args.folder)
        check_equal(counted.model.parameters(), "weights")
        losses[name] = loss_on(data, counted.model, device)
        assert losses[name] < before / 2, f"{name}: {before:.4f} to {losses[name]:.4f}"
        if rank == 0:
            print(f"{name}: loss {losses[name]:.4f}, {counted.sent} sends", flush=True)

    whole, in_pieces, half = losses.values()
    steps = len(loader) * args.total_epochs
    assert all(counted.sent == steps for counted, _, _ in runs.values()), "a piece was sent"
    assert abs(in_pieces - whole) < 1e-4, f"loss {in_pieces:.6f} in pieces, {whole:.6f} whole"
    assert abs(half - whole) < 0.1 * whole, f"loss {half:.4f} in bfloat16, {whole:.4f} in float32"
    if rank == 0:
        print(
            f"claim holds: 4 pieces make the step of one batch with one send in each of {steps}"
            " steps, and bfloat16 ends within a tenth of the loss"
        )
    leave_group()


if __name__ == "__main__":
    start(worker, parse_args())

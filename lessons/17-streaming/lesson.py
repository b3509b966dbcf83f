"""bash lessons/two_nodes.sh lessons/17-streaming/lesson.py --data_dir data/mnist

Training images that stay on disk, in chunks of HDF5. Each rank of both nodes reads whole chunks:
their order is shuffled anew in each epoch, and so are the rows within a chunk. At most one chunk is
in a rank's memory."""

import argparse
import math
import os
import sys
import weakref
from pathlib import Path

import h5py
import torch
import torch.distributed as dist
import torch.nn.functional as F
from create_mnist_h5 import create
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Batches of (images, labels) from this rank's chunks; at most one chunk is in memory."""

    def __init__(self, path, batch_size):
        self.path = path
        self.batch_size = batch_size
        self.epoch = 0
        self.rows = []  # that were read in this epoch, in order
        self.rows_in_memory = 0
        self.max_rows_in_memory = 0
        with h5py.File(path) as file:
            self.samples = len(file["labels"])
            self.chunk_rows = file["images"].chunks[0]

    def chunks_of_rank(self):
        """Return every N-th of the shuffled chunks, from the r-th on, for rank r of N."""
        generator = torch.Generator().manual_seed(self.epoch)
        chunks = math.ceil(self.samples / self.chunk_rows)
        order = torch.randperm(chunks, generator=generator).tolist()
        return order[dist.get_rank() :: dist.get_world_size()]

    def __iter__(self):
        self.rows = []
        with h5py.File(self.path) as file:  # opened in the process that reads: no fork inherits it
            for chunk in self.chunks_of_rank():
                yield from self.batches_of(file, chunk * self.chunk_rows)

    def batches_of(self, file, start):
        """Yield batches of copies in shuffled order; at the end the chunk's memory is freed."""
        images = file["images"][start : start + self.chunk_rows]
        labels = file["labels"][start : start + self.chunk_rows]
        self.count(len(images))
        weakref.finalize(images, self.count, -len(images))  # called when its memory is freed
        images = torch.from_numpy(images)
        labels = torch.from_numpy(labels)
        generator = torch.Generator().manual_seed(self.epoch + start)
        order = torch.randperm(len(labels), generator=generator)
        for batch in order.split(self.batch_size):
            self.rows += (start + batch).tolist()
            yield images[batch][:, None].float() / 255, labels[batch].long()

    def count(self, rows):
        self.rows_in_memory += rows
        self.max_rows_in_memory = max(self.max_rows_in_memory, self.rows_in_memory)


def check_rows(stream, device):
    """Stop unless the ranks read every row exactly once, each with a chunk in memory at most."""
    rows = stream.max_rows_in_memory
    assert rows <= stream.chunk_rows, f"{rows} rows were in memory at once"
    times = torch.zeros(stream.samples, dtype=torch.int32, device=device)
    times[stream.rows] += 1
    dist.all_reduce(times)
    assert (times == 1).all(), (
        f"{int((times == 0).sum())} rows were not read, {int((times > 1).sum())} repeatedly"
    )


def make_model(size):
    """A small network for images of size x size: two strided convolutions and a linear layer."""
    torch.manual_seed(0)
    small = math.ceil(size / 4)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * small * small, 10),
    )


def join_group(device):
    """Join the ranks that torchrun has started, and return this rank's device."""
    if "RANK" not in os.environ:
        sys.exit(f"error: no RANK in the environment. HINT: {__doc__.splitlines()[0]}")
    torch.set_num_threads(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    # It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")


def leave_group():
    """End this process once all ranks have called this. Nothing after the call runs."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may abort while gloo's threads still run


def train_epoch(model, optimizer, loader, device):
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
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
def accuracy_on(path, model, device):
    """Return the share of images classified correctly by all ranks, and the number of images."""
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    with h5py.File(path) as file:
        starts = range(0, len(file["test_labels"]), 1000)
        for start in starts[dist.get_rank() :: dist.get_world_size()]:
            images = torch.from_numpy(file["test_images"][start : start + 1000])
            labels = torch.from_numpy(file["test_labels"][start : start + 1000]).long()
            logits = model((images[:, None].float() / 255).to(device))
            correct = (logits.argmax(1) == labels.to(device)).sum()
            counts += torch.tensor([correct, len(labels)], device=device)
    # A mean of the ranks' accuracies would weigh a small share as much as a large one.
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item(), int(counts[1])


def settings_of(args):
    """Return the settings that must be the same when a run is resumed."""
    names = ("total_epochs", "batch_size", "lr")
    return {name: getattr(args, name) for name in names} | {"ranks": dist.get_world_size()}


def save_snapshot(folder, model, optimizer, next_epoch, args):
    """Write a temporary file and rename it, so that a power cut leaves a complete snapshot."""
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),  # without it momentum starts cold
        "next_epoch": next_epoch,  # not the one just finished: that would be trained twice
        "settings": settings_of(args),
    }
    torch.save(snapshot, folder / "snapshot.tmp")
    (folder / "snapshot.tmp").replace(folder / "snapshot.pt")


def load_snapshot(folder, model, optimizer, args, device):
    """Return the epoch to continue with: 0 without a snapshot, or if its run was finished."""
    if not (folder / "snapshot.pt").exists():
        return 0
    snapshot = torch.load(folder / "snapshot.pt", map_location=device, weights_only=True)
    settings = snapshot["settings"]
    if snapshot["next_epoch"] == settings["total_epochs"]:
        return 0
    if settings != settings_of(args):
        problem = f"{folder} holds a run with {settings}, not {settings_of(args)}"
        sys.exit(f"error: {problem}. HINT: --folder {folder}-2")
    model.module.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["next_epoch"]


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "numbers", nargs="*", type=positive, metavar="50 10", help="total epochs, save every"
    )
    parser.add_argument("--total_epochs", type=positive, help="[default: MNIST 1, digits 20]")
    parser.add_argument("--save_every", type=positive, default=1, help="epochs")
    parser.add_argument("--batch_size", type=positive, default=32, help="samples per rank")
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--data_dir", type=Path, default=Path("data/mnist"))
    parser.add_argument(
        "--h5", type=Path, help="[default: mnist.h5 in the folder, made if it does not exist]"
    )
    parser.add_argument("--chunk_rows", type=positive, default=128, help="of the file that is made")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    folder = Path("runs/lessons", Path(__file__).parent.name)
    parser.add_argument("--folder", type=Path, default=folder)
    args = parser.parse_args()
    args.h5 = args.h5 or args.folder / "mnist.h5"
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and torch.cuda.device_count() < local_ranks:
        parser.error(f"--device cuda, but {torch.cuda.device_count()} GPUs. HINT: --device cpu")
    if len(args.numbers) > 2:
        parser.error(f"{args.numbers} are more than two numbers. HINT: 50 10")
    if len(args.numbers) > 0:
        args.total_epochs = args.numbers[0]
    if len(args.numbers) > 1:
        args.save_every = args.numbers[1]
    return args


def train(args, folder, device, until):
    """Train up to epoch `until`, from a snapshot in `folder` if there is one; return the model."""
    rank = dist.get_rank()
    stream = Stream(args.h5, args.batch_size)
    with h5py.File(args.h5) as file:
        model = make_model(file["images"].shape[-1]).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(stream, batch_size=None)  # the stream makes the batches
    first_epoch = load_snapshot(folder, model, optimizer, args, device)
    wrote = False
    for epoch in range(first_epoch, until):
        stream.epoch = epoch
        with model.join():
            train_epoch(model, optimizer, loader, device)
        check_rows(stream, device)
        sizes = f"{len(stream.chunks_of_rank())} chunks, {len(stream.rows)} rows"
        print(f"[GPU{rank}] Epoch {epoch} | {sizes}", flush=True)
        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == until):
            save_snapshot(folder, model, optimizer, epoch + 1, args)
            wrote = True
        accuracy, count = accuracy_on(args.h5, model.module, device)
        if rank == 0:
            print(f"       {accuracy:.2%} of {count} test images", flush=True)
    dist.barrier()  # no rank reads the snapshot before rank 0 has written it
    check_equal(model.parameters(), "weights")
    check_one_writer(wrote)
    return model


def check_one_writer(wrote):
    """Stop unless rank 0 alone has written the snapshot. wrote: whether this rank has."""
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, wrote)
    writers = [rank for rank, answer in enumerate(answers) if answer]
    assert writers == [0], f"the snapshot was written by ranks {writers}"


@record
def main():
    args = parse_args()
    device = join_group(args.device)
    if dist.get_rank() == 0:
        print(f"data: {create(args.data_dir, args.h5, args.chunk_rows)}", flush=True)
    dist.barrier()
    stream = Stream(args.h5, args.batch_size)
    args.total_epochs = args.total_epochs or (1 if stream.samples == 60_000 else 20)
    model = train(args, args.folder, device, args.total_epochs)
    accuracy, _ = accuracy_on(args.h5, model.module, device)
    assert accuracy > 0.8, f"only {accuracy:.2%} are right"
    if dist.get_rank() == 0:
        rows = f"{stream.chunk_rows} of {stream.samples} rows"
        print(f"{accuracy:.2%} right with at most {rows} in a rank's memory")
        ranks = f"{dist.get_world_size()} ranks on {os.environ['GROUP_WORLD_SIZE']} nodes"
        print(
            f"claim holds: each of {stream.samples} rows was read once per epoch by one of {ranks}"
        )
    leave_group()


if __name__ == "__main__":
    main()

"""torchrun --standalone --nproc_per_node=2 lessons/15-mnist/lesson.py --data_dir data/mnist

Handwritten digits instead of made-up numbers: images, a small convolutional network, an accuracy on
images that were not trained on. Rank 0 looks at all test images, and the others wait for it."""

import argparse
import gzip
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def read_idx(path):
    """Read MNIST's format: a magic number, a size for each dimension, then a byte per value."""
    data = gzip.decompress(path.read_bytes())
    sizes = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes).copy()


def make_data(data_dir):
    """Return training and test data: images (n, 1, height, width) in 0..1, and labels.

    Without MNIST in the folder they are scikit-learn's digits.
    """
    if not (data_dir / "train-images-idx3-ubyte.gz").exists():
        try:
            from sklearn.datasets import load_digits  # takes a second to import
        except ModuleNotFoundError:
            sys.exit(
                f"error: no MNIST in {data_dir}, and no scikit-learn, which has small digits."
                " HINT: pip install scikit-learn, or stepladder data get mnist"
            )
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        labels = torch.tensor(digits.target)
        train_data = TensorDataset(images[:-360], labels[:-360])
        return train_data, TensorDataset(images[-360:], labels[-360:])
    parts = []
    for name in ("train", "t10k"):
        images = torch.from_numpy(read_idx(data_dir / f"{name}-images-idx3-ubyte.gz"))
        labels = torch.from_numpy(read_idx(data_dir / f"{name}-labels-idx1-ubyte.gz"))
        parts.append(TensorDataset(images[:, None].float() / 255, labels.long()))
    return tuple(parts)


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
def accuracy_on(data, model, device):
    """Return the share of images that are classified correctly."""
    images, labels = data.tensors
    batches = zip(images.split(1000), labels.split(1000), strict=True)
    correct = sum((model(x.to(device)).argmax(1) == y.to(device)).sum() for x, y in batches)
    return correct.item() / len(labels)


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
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    folder = Path("runs/lessons", Path(__file__).parent.name)
    parser.add_argument("--folder", type=Path, default=folder)
    args = parser.parse_args()
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
    data, test = make_data(args.data_dir)
    model = make_model(data.tensors[0].shape[-1]).to(device)
    # Without the flag DDP changes its buckets after the first step, so a resumed run would add
    # the gradients in another order.
    model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    assert len(loader) == steps_per_epoch(len(data), dist.get_world_size(), args.batch_size)
    first_epoch = load_snapshot(folder, model, optimizer, args, device)
    if first_epoch and rank == 0:
        print(f"       from the snapshot in {folder}: epoch {first_epoch} is next", flush=True)
    wrote = False
    for epoch in range(first_epoch, until):
        sampler.set_epoch(epoch)  # the order depends only on the epoch, also in a resumed run
        train_epoch(model, optimizer, loader, device)
        print(line(rank, epoch, args.batch_size, len(loader)), flush=True)
        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == until):
            save_snapshot(folder, model, optimizer, epoch + 1, args)
            wrote = True
        if rank == 0:  # the other ranks wait in their next all_reduce
            accuracy = accuracy_on(test, model.module, device)
            print(f"       {accuracy:.2%} of {len(test)} test images", flush=True)
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


def steps_per_epoch(samples, ranks, batch_size):
    """Compute the steps of a rank: all ranks get as many samples, the last batch may be smaller."""
    samples_per_rank = math.ceil(samples / ranks)
    return math.ceil(samples_per_rank / batch_size)


def line(rank, epoch, batch_size, steps):
    return f"[GPU{rank}] Epoch {epoch} | Batchsize: {batch_size} | Steps: {steps}"


@record
def main():
    args = parse_args()
    device = join_group(args.device)
    train_data, test_data = make_data(args.data_dir)
    args.total_epochs = args.total_epochs or (1 if len(test_data) == 10_000 else 20)
    if dist.get_rank() == 0:
        if len(test_data) == 10_000:
            name = "MNIST"
        else:
            name = f"no MNIST in {args.data_dir}: scikit-learn's digits"
        sizes = f"{len(train_data)} images to train, {len(test_data)} to test"
        print(f"data: {name}, {sizes}", flush=True)
    model = train(args, args.folder, device, args.total_epochs)
    if dist.get_rank() == 0:
        accuracy = accuracy_on(test_data, model.module, device)
        assert accuracy > 0.8, f"only {accuracy:.2%} are right"
        print(
            "claim holds: the ranks learned to read;"
            f" {accuracy:.2%} of {len(test_data)} images are right"
        )
    leave_group()


if __name__ == "__main__":
    main()

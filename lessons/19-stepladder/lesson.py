"""python lessons/19-stepladder/lesson.py --nproc 3

The library does it all. Below is what remains of a script: data, model, loss. `stepladder train`
runs it on any number of processes, and with --sync exact they all end with the same bits;
`stepladder verify` proves it."""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from stepladder import Job, mean_loss

NOISE = 0.1  # standard deviation of what no model can predict: the loss can fall to its square


@dataclass
class Config:
    epochs: int = 10
    global_batch: int = 32
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
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    return Job(model, optimizer, mean_loss(F.mse_loss), train_data=make_data().tensors)


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
    parser.add_argument("--nproc", type=positive, default=3, help="processes")
    parser.add_argument("--total_epochs", type=positive, default=10)
    parser.add_argument("--save_every", type=positive, default=5, help="epochs")
    parser.add_argument(
        "--batch_size", type=positive, default=32, help="samples per step, of all processes"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    folder = Path("runs/lessons", Path(__file__).parent.name)
    parser.add_argument("--folder", type=Path, default=folder)
    return parser.parse_args()


def main():
    args = parse_args()
    steps_per_epoch = -(-2048 // args.batch_size)
    snapshot_every = args.save_every * steps_per_epoch
    flags = ["--sync", "exact", "--global-batch", args.batch_size, "--device", args.device]
    train_flags = ["--epochs", args.total_epochs, "--snapshot-every", snapshot_every, "--fresh"]
    results = []
    for nproc in sorted({1, args.nproc}):
        run_flags = ["--nproc", nproc, "--run-dir", args.folder / f"nproc-{nproc}"]
        result = stepladder("train", *flags, *train_flags, *run_flags)
        results.append(result)
        weights = result["weights_sha256"][:16]
        print(f"--nproc {nproc}: loss {result['train_loss']:.4f}, weights {weights}...", flush=True)
    proof = stepladder("verify", *flags, "--nproc", "1,2", "--steps", 6)
    hashes = {result["weights_sha256"] for result in results}
    assert len(hashes) == 1, "the numbers of processes differ in the weights"
    assert proof["equal"], f"verify found a difference: {proof['first_difference']}"
    print(
        f"claim holds: the same bits on 1 and {args.nproc} processes; verify proves it,"
        " resumed runs too"
    )


if __name__ == "__main__":
    main()

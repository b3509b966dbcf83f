"""What does `stepladder check` cost? The classic MNIST net on two CPU ranks, under torchrun and
under the check.

    python benchmarks/check_overhead.py [--write] [--runs N]

The images are random numbers of MNIST's size: the time does not depend on what is in them. Each
time is of the whole command, imports and start included; the runs of both are interleaved, and the
least of each counts."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Report, bar, table

LIMIT = 2.0
SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
world = dist.get_world_size()
generator = torch.Generator().manual_seed(0)
images = torch.randn(12800, 1, 28, 28, generator=generator)
data = TensorDataset(images, torch.randint(10, (12800,), generator=generator))
sampler = DistributedSampler(data)
loader = DataLoader(data, 128 // world, sampler=sampler)
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
                    nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5),
                    nn.Linear(128, 10))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""
COMMANDS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "mnist_net.py"],
    "stepladder check": ["stepladder", "check", "--epochs", "2", "mnist_net.py"],
}


def seconds(command: list[str], folder: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", *command], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    report = Report(Path(__file__).name, "The cost of `stepladder check`", ["torch"], "2")
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mnist_net.py").write_text(SCRIPT)
        for _ in range(args.runs):
            for name, command in COMMANDS.items():
                times[name].append(seconds(command, folder))
    rows = [
        [name, f"{min(durations):.1f}", " ".join(f"{duration:.1f}" for duration in durations)]
        for name, durations in times.items()
    ]
    ratio = min(times["stepladder check"]) / min(times["torchrun"])
    passed = bar("the check's time over the script's own", ratio, LIMIT, at_most=True)
    report.finish([table(["command", "least, s", "all, s"], rows), passed], args.write)


if __name__ == "__main__":
    main()

"""python benchmarks/mnist_time_to_99.py --data-dir DIR [--write] [--quick]

How much sooner does stepladder's MNIST recipe reach 99.0 % test accuracy than the well-known PyTorch example?

The example's recipe is written out below: two 3x3 convolutions (32, 64), max-pool, dropout, 128 hidden units,
dropout; Adadelta with learning rate 1.0, times 0.7 after each epoch, batches of 64; an evaluation after each
epoch. It stops at the first evaluation with at least 99.0 %. Whatever can be given to it is given: images are
normalised tensors in memory before the clock starts, no DataLoader, no imports in its time.

stepladder runs as a process of its own. Compared is the same span, its report's `seconds`: training, evaluation,
records and snapshots, data in memory before. The whole process, with imports and reading, is given beside it.
Its accuracy is taken from its own report; below 99.0 % there is no result and the exit status is 1.

DIR holds the four MNIST files in IDX format. Order: stepladder, example, stepladder, all on the same cores.
--quick is a trial of the script: one stepladder run and 50 steps of the example; it gives no result.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from report import Report, bar, cores, table
from torch import Tensor, nn

TARGET = 0.99
MAX_EPOCHS = 14  # the example's default
NPROCS = (1, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.dropout2 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x).argmax(dim=1) == y).sum())
            for x, y in zip(images.split(1000), labels.split(1000), strict=True)
        )
    return right / len(labels)


def example(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int, max_steps: int | None):
    """Train until TARGET; returns [(seconds since the start, test accuracy)], one per epoch."""
    images, labels = train
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    history: list[tuple[float, float]] = []
    start = time.perf_counter()
    for _ in range(MAX_EPOCHS):
        model.train()
        for index in torch.randperm(len(images)).split(64)[:max_steps]:
            optimizer.zero_grad()
            F.nll_loss(model(images[index]), labels[index]).backward()
            optimizer.step()
        reached = accuracy(model, *test)
        history.append((time.perf_counter() - start, reached))
        print(f"example: {history[-1][0]:.1f} s, {100 * reached:.2f} %", file=sys.stderr, flush=True)
        if reached >= TARGET or max_steps is not None:
            break
        scheduler.step()
    return history


def stepladder(data_dir: Path, nproc: int) -> tuple[float, float, float]:
    """One run as a process of its own: (seconds of training, seconds from start to exit, test accuracy)."""
    with tempfile.TemporaryDirectory() as tmp:
        command = [sys.executable, "-m", "stepladder", "train", "mnist", "--data-dir", str(data_dir)]
        command += ["--epochs", "2", "--run-dir", str(Path(tmp) / "run"), "--nproc", str(nproc), "--json"]
        start = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        whole = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(f"stepladder with --nproc {nproc} ended with status {done.returncode}; no result")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    seconds, reached = float(result["seconds"]), float(result["metrics"]["test_accuracy"])
    print(f"stepladder --nproc {nproc}: {seconds:.1f} s, {100 * reached:.2f} %", file=sys.stderr, flush=True)
    if reached < TARGET:
        sys.exit(f"stepladder with --nproc {nproc} did not reach {100 * TARGET:.1f} %; no result")
    return seconds, whole, reached


def read(data_dir: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The training and the test set: images normalised as in the example, labels as int64."""
    from stepladder.data.formats.idx import read_mnist

    def prepared(images, labels) -> tuple[Tensor, Tensor]:
        pixels = torch.as_tensor(images).reshape(-1, 1, 28, 28).float() / 255
        return (pixels - 0.1307) / 0.3081, torch.as_tensor(labels).long()

    mnist = read_mnist(data_dir)
    return prepared(mnist.train_images, mnist.train_labels), prepared(mnist.test_images, mnist.test_labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to 99.0 % test accuracy on MNIST.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1, help="of the example's recipe; 1 is its default")
    parser.add_argument("--quick", action="store_true", help="try the script; gives no result")
    parser.add_argument("--write", action="store_true", help="save the report under benchmarks/results/")
    args = parser.parse_args()
    if args.quick and args.write:
        parser.error("--quick gives no result to write")

    torch.set_num_threads(cores())
    report = Report("mnist_time_to_99.py", "Time to 99.0 % on MNIST", ["torch", "stepladder"], str(cores()))
    train, test = read(args.data_dir)
    nprocs = NPROCS[:1] if args.quick else NPROCS
    runs: dict[int, list[tuple[float, float, float]]] = {nproc: [] for nproc in nprocs}

    for nproc in nprocs:
        runs[nproc].append(stepladder(args.data_dir, nproc))
    history = example(train, test, args.seed, 50 if args.quick else None)
    if not args.quick:
        for nproc in nprocs:
            runs[nproc].append(stepladder(args.data_dir, nproc))

    example_seconds, reached = history[-1]
    if args.quick:
        print(f"trial only, no result: 50 steps and one evaluation of the example: {example_seconds:.1f} s")
        return
    if reached < TARGET:
        sys.exit(f"the example did not reach {100 * TARGET:.1f} % in {MAX_EPOCHS} epochs; no result")

    rows = [["PyTorch example, in memory", f"{example_seconds:.1f}", "", f"{100 * reached:.2f} %", "1.0"]]
    bars = []
    for nproc, results in runs.items():
        for seconds, whole, right in results:
            ratio = f"{example_seconds / seconds:.1f}"
            rows.append(
                [f"stepladder, --nproc {nproc}", f"{seconds:.1f}", f"{whole:.1f}", f"{100 * right:.2f} %", ratio]
            )
        typical = mean(seconds for seconds, _, _ in results)  # of two runs, the mean is the median
        name = f"faster than the example, --nproc {nproc}"
        bars.append(bar(name, example_seconds / typical, 25.0, at_most=False))
    epochs = [[str(i), f"{seconds:.1f}", f"{100 * a:.2f} %"] for i, (seconds, a) in enumerate(history, 1)]
    report.finish(
        [
            table(["recipe", "seconds to 99.0 %", "whole process", "test accuracy", "times faster"], rows),
            "In the order stepladder (each --nproc), example, stepladder. Both are timed without imports and "
            f"reading; stepladder's whole process stands beside. Example (seed {args.seed}), its epochs:",
            table(["epoch", "seconds", "test accuracy"], epochs),
            "\n".join(bars),
        ],
        args.write,
    )


if __name__ == "__main__":
    main()

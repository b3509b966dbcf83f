"""python benchmarks/mnist_time_to_99.py --data-dir DIR [--write] [--quick]

How much sooner does stepladder's MNIST recipe reach 99.0 % test accuracy than the well-known
PyTorch example?

The example's recipe is written out below: two 3x3 convolutions (32, 64), max-pool, dropout, 128
hidden units, dropout; Adadelta with learning rate 1.0, times 0.7 after each epoch, batches of 64;
an evaluation after each epoch. It stops at the first evaluation with at least 99.0 %. Whatever can
be given to it is given: images are normalised tensors in memory before the clock starts, no
DataLoader, no imports in its time.

stepladder runs as a process of its own. Compared is the same span, its report's `seconds`:
training, evaluation, records and snapshots, data in memory before. The whole process, with imports
and reading, is given beside it. Its accuracy is taken from its own report; below 99.0 % there is no
result and the exit status is 1.

DIR holds the four MNIST files in IDX format. Order: stepladder, example, stepladder, all on the
same cores. --quick is a trial of the script: one stepladder run and 50 steps of the example; it
gives no result."""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from commands import Failed, result_of
from report import Report, bar, cores, table
from torch import Tensor, nn

TARGET = 0.99
MAX_EPOCHS = 14  # the example's default
NPROCS = (1, 2)
Pair = tuple[Tensor, Tensor]  # images, labels
History = list[tuple[float, float]]  # per epoch: seconds since the start, test accuracy


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


def example(train: Pair, test: Pair, seed: int, max_steps: int | None) -> History:
    """Train until TARGET where the data are; returns [(seconds since the start, test accuracy)],
    one per epoch.
    """
    images, labels = train
    torch.manual_seed(seed)
    model = Net().to(images.device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    history: list[tuple[float, float]] = []
    start = time.perf_counter()
    for _ in range(MAX_EPOCHS):
        model.train()
        for index in torch.randperm(len(images), device=images.device).split(64)[:max_steps]:
            optimizer.zero_grad()
            F.nll_loss(model(images[index]), labels[index]).backward()
            optimizer.step()
        reached = accuracy(model, *test)
        history.append((time.perf_counter() - start, reached))
        print(
            f"example: {history[-1][0]:.1f} s, {100 * reached:.2f} %", file=sys.stderr, flush=True
        )
        if reached >= TARGET or max_steps is not None:
            break
        scheduler.step()
    return history


def stepladder(data_dir: Path, nproc: int, *flags: object) -> tuple[float, float, float]:
    """One run as a process of its own: (seconds of training, seconds from start to exit, test
    accuracy).
    """
    argv = [
        "train",
        "mnist",
        "--data-dir",
        data_dir.resolve(),
        "--epochs",
        2,
        "--nproc",
        nproc,
        *flags,
    ]
    result, total = result_of(*argv)
    seconds = float(result["seconds"])
    reached = float(result["metrics"]["test_accuracy"])
    print(
        f"stepladder --nproc {nproc}: {seconds:.1f} s, {100 * reached:.2f} %",
        file=sys.stderr,
        flush=True,
    )
    if reached < TARGET:
        raise Failed(
            f"stepladder with --nproc {nproc} did not reach {100 * TARGET:.1f} %; no result"
        )
    return seconds, total, reached


def read(data_dir: Path, device: str = "cpu") -> tuple[Pair, Pair]:
    """The training and the test set on the device: images normalised as in the example, labels as
    int64.
    """
    from stepladder.data.idx import read_mnist

    def prepared(images, labels) -> Pair:
        pixels = torch.as_tensor(images).reshape(-1, 1, 28, 28).float() / 255
        return ((pixels - 0.1307) / 0.3081).to(device), torch.as_tensor(labels).long().to(device)

    mnist = read_mnist(data_dir)
    return prepared(mnist.train_images, mnist.train_labels), prepared(
        mnist.test_images, mnist.test_labels
    )


def in_turns(
    data_dir: Path, nprocs: tuple[int, ...], flags: tuple, run_example: Callable[[], History]
):
    """stepladder on each number of processes, the example, the first again: {nproc: two runs}, and
    the example.
    """
    runs = {nproc: [stepladder(data_dir, nproc, *flags)] for nproc in nprocs}
    history = run_example()
    if history[-1][1] < TARGET:
        raise Failed(
            f"the example did not reach {100 * TARGET:.1f} % in {MAX_EPOCHS} epochs; no result"
        )
    for nproc in nprocs:
        runs[nproc].append(stepladder(data_dir, nproc, *flags))
    return runs, history


def sections(
    runs: dict[int, list[tuple[float, float, float]]],
    history: History,
    seed: int,
    lowest: float | None,
) -> list[str]:
    """least: how much faster than the example it should be, or None where no bar is set."""
    example_seconds, reached = history[-1]
    rows = [
        [
            "PyTorch example, in memory",
            f"{example_seconds:.1f}",
            "",
            f"{100 * reached:.2f} %",
            "1.0",
        ]
    ]
    bars = []
    for nproc, results in runs.items():
        for seconds, total, right in results:
            ratio = f"{example_seconds / seconds:.1f}"
            rows.append(
                [
                    f"stepladder, --nproc {nproc}",
                    f"{seconds:.1f}",
                    f"{total:.1f}",
                    f"{100 * right:.2f} %",
                    ratio,
                ]
            )
        typical = mean(seconds for seconds, _, _ in results)  # of two runs, the mean is the median
        name = f"faster than the example, --nproc {nproc}"
        if lowest is not None:
            bars.append(bar(name, example_seconds / typical, lowest, at_most=False))
    epochs = [
        [str(i), f"{seconds:.1f}", f"{100 * a:.2f} %"] for i, (seconds, a) in enumerate(history, 1)
    ]
    return [
        table(
            ["recipe", "seconds to 99.0 %", "whole process", "test accuracy", "times faster"], rows
        ),
        "In the order stepladder (each --nproc), example, stepladder. Both are timed without imports and "
        f"reading; stepladder's whole process stands beside. Example (seed {seed}), its epochs:",
        table(["epoch", "seconds", "test accuracy"], epochs),
        *(["\n".join(bars)] if bars else []),
    ]


def trial(data_dir: Path, run_example: Callable[[], History], *flags: object) -> str:
    """Whether both sides run, without asking how well."""
    result_of("train", "mnist", "--data-dir", data_dir.resolve(), "--epochs", 2, *flags)
    return f"trial only, no result: some steps and one evaluation of the example: {run_example()[-1][0]:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to 99.0 % test accuracy on MNIST.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the example's recipe; 1 is its default"
    )
    parser.add_argument("--quick", action="store_true", help="try the script; gives no result")
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    if args.quick and args.write:
        parser.error("--quick gives no result to write")

    torch.set_num_threads(cores())
    report = Report(
        "mnist_time_to_99.py", "Time to 99.0 % on MNIST", ["torch", "stepladder"], str(cores())
    )
    run_example = partial(example, *read(args.data_dir), args.seed, 50 if args.quick else None)
    try:
        if args.quick:
            print(trial(args.data_dir, run_example))
        else:
            report.finish(
                sections(*in_turns(args.data_dir, NPROCS, (), run_example), args.seed, 25.0),
                args.write,
            )
    except Failed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

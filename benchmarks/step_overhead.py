"""python benchmarks/step_overhead.py [--write]

What does stepladder's trainer cost per optimizer step, compared with a hand-written loop and other trainers?

The work is small on purpose, so that what is measured is the trainer and not the arithmetic: an MLP
20-64-1 (ReLU), mean squared error, SGD, batches of 32 out of 4096 samples in memory, fp32, one thread.

Every variant builds its model and trains for a given number of steps. It is timed at a short and at a long
length; the difference is the cost of the steps without the set-up. All variants run in every round, in an
order that turns round each time, and are compared with the hand-written loop of the same round.
"""

import argparse
import gc
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from report import Report, bar, table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 4096, 32
STEPS_PER_EPOCH = SAMPLES // BATCH

generator = torch.Generator().manual_seed(0)
x = torch.randn(SAMPLES, 20, generator=generator)
y = x.sum(dim=1, keepdim=True).sin() + 0.1 * torch.randn(SAMPLES, 1, generator=generator)


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def new_loader() -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, num_workers=0)


def hand(num_steps: int) -> None:
    """The yardstick: slices of a permutation, nothing else."""
    model, optimizer = new_model()
    for _ in range(num_steps // STEPS_PER_EPOCH):
        order = torch.randperm(SAMPLES)
        for i in range(0, SAMPLES, BATCH):
            index = order[i : i + BATCH]
            loss = F.mse_loss(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def loop(model: nn.Module, optimizer, loader, num_steps: int, backward: Callable[[Tensor], None]) -> None:
    """The hand-written loop again, over a loader and with another's backward."""
    for _ in range(num_steps // STEPS_PER_EPOCH):
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()


def dataloader(num_steps: int) -> None:
    loop(*new_model(), new_loader(), num_steps, Tensor.backward)


def accelerate(num_steps: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loop(*accelerator.prepare(*new_model(), new_loader()), num_steps, accelerator.backward)


def fabric(num_steps: int) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    loop(*fabric.setup(*new_model()), fabric.setup_dataloaders(new_loader()), num_steps, fabric.backward)


def lightning_trainer(num_steps: int) -> None:
    """barebones=True is Lightning's setting for measuring its overhead: no logger, checkpoints, progress."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = new_model()

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    epochs = num_steps // STEPS_PER_EPOCH
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=epochs, barebones=True)
    trainer.fit(Module(), new_loader())


def stepladder(num_steps: int) -> None:
    """The default configuration: ledger, metrics and run directory included."""
    from stepladder import Job, Settings, Trainer

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), batch[1].numel()

    model, optimizer = new_model()
    job = Job(model=model, optimizer=optimizer, loss=loss, train_data=(x, y))
    with tempfile.TemporaryDirectory() as tmp:
        size = {"epochs": num_steps // STEPS_PER_EPOCH, "global_batch": BATCH}
        Trainer(job, Settings(**size, seed=0, run_dir=Path(tmp) / "run", threads=1, progress=False)).fit()


LABELS = {
    "hand": "hand-written loop",
    "stepladder": "stepladder Trainer, default configuration",
    "dataloader": "hand-written loop over a DataLoader",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "lightning": "Lightning Trainer, barebones",
}
FUNCTIONS = (hand, stepladder, dataloader, accelerate, fabric, lightning_trainer)
VARIANTS = dict(zip(LABELS, FUNCTIONS, strict=True))


def seconds(variant: Callable[[int], None], num_steps: int) -> float:
    gc.collect()
    start = time.perf_counter()
    variant(num_steps)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--epochs", type=int, nargs=2, default=[2, 22], metavar=("SHORT", "LONG"))
    parser.add_argument("--only", nargs="+", choices=list(LABELS)[1:], help="beside the hand loop")
    parser.add_argument("--write", action="store_true", help="save the report under benchmarks/results/")
    args = parser.parse_args()
    short, long = (epochs * STEPS_PER_EPOCH for epochs in args.epochs)
    if not 0 < short < long or args.rounds < 1:
        parser.error("0 < SHORT < LONG and at least one round are needed")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    packages = ["torch", "stepladder", "accelerate", "lightning"]
    report = Report("step_overhead.py", "Cost of one optimizer step", packages, cores_used="1")

    present, absent = [], []
    for name in ["hand", *(args.only or list(LABELS)[1:])]:  # warm-up: imports and first calls
        try:
            VARIANTS[name](STEPS_PER_EPOCH)
            present.append(name)
        except ModuleNotFoundError as error:
            if error.name not in ("accelerate", "lightning"):
                raise
            absent.append(name)

    cost: dict[str, list[float]] = {name: [] for name in present}  # microseconds per step, by round
    for i in range(args.rounds):
        for name in present if i % 2 == 0 else reversed(present):
            difference = seconds(VARIANTS[name], long) - seconds(VARIANTS[name], short)
            cost[name].append(1e6 * difference / (long - short))

    def ratio(above: str, below: str) -> list[float]:
        return [a / b for a, b in zip(cost[above], cost[below], strict=True)]

    rows, bars = [], []
    for name in present:
        to_hand = ratio(name, "hand")
        to_ours = f"{median(ratio(name, 'stepladder')):.2f}" if "stepladder" in present else ""
        spread = f"{min(to_hand):.2f} to {max(to_hand):.2f}"
        rows.append([LABELS[name], f"{median(cost[name]):.1f}", f"{median(to_hand):.2f}", spread, to_ours])
    rows += [[LABELS[name], "not installed", "", "", ""] for name in absent]
    if "stepladder" in present:
        overhead = median(ratio("stepladder", "hand"))
        bars.append(bar("step against the hand-written loop", overhead, 1.10, at_most=True))
        if others := [name for name in present if name not in ("hand", "stepladder")]:
            gain, name = min((median(ratio(name, "stepladder")), name) for name in others)
            bars.append(bar(f"faster than the fastest other ({LABELS[name]})", gain, 2.0, at_most=False))
    report.finish(
        [
            table(["variant", "us/step", "ratio to hand", "lowest to highest", "ratio to stepladder"], rows),
            f"Medians of {args.rounds} interleaved rounds; ratios are taken within a round. A step is (time of "
            f"{long} steps - time of {short} steps) / {long - short}. Accelerate, Fabric and Lightning read the "
            "same DataLoader (TensorDataset, shuffle, no workers), so their figures contain its cost.",
            "\n".join(bars) or "No bar applies to these variants.",
        ],
        args.write,
    )


if __name__ == "__main__":
    main()

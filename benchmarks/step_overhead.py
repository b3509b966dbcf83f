"""python benchmarks/step_overhead.py [--device cuda] [--write]

What does stepladder's trainer cost per optimizer step, compared with a hand-written loop and other
trainers?

The work is small on purpose, so that what is measured is the trainer and not the arithmetic: an MLP
20-64-1 (ReLU), mean squared error, SGD, batches of 32 out of 4096 samples in memory, fp32, one
thread. On a GPU the two that index tensors have them there; a DataLoader reads on the host, and its
batches are moved.

Every variant builds its model and trains for a given number of steps. It is timed at a short and at
a long length; the difference is the cost of the steps without the set-up. All variants run in every
round, in an order that turns round each time, and are compared with the hand-written loop of the
same round."""

import argparse
import gc
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from report import Report, bar, table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 4096
BATCH = 32
STEPS_PER_EPOCH = SAMPLES // BATCH
TRIED = "scalars written twice a second, digests of many steps at a time, an order without hashes, mean in backward"

generator = torch.Generator().manual_seed(0)
x = torch.randn(SAMPLES, 20, generator=generator)
y = x.sum(dim=1, keepdim=True).sin() + 0.1 * torch.randn(SAMPLES, 1, generator=generator)


def new_model(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def new_loader() -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, num_workers=0)


def hand(num_steps: int, device: str) -> None:
    """The yardstick: slices of a permutation, nothing else."""
    model, optimizer = new_model(device)
    inputs = x.to(device)
    targets = y.to(device)
    for _ in range(num_steps // STEPS_PER_EPOCH):
        order = torch.randperm(SAMPLES, device=device)
        for i in range(0, SAMPLES, BATCH):
            index = order[i : i + BATCH]
            loss = F.mse_loss(model(inputs[index]), targets[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def loop(
    model: nn.Module, optimizer, batches: Callable[[], Iterable], num_steps: int, backward
) -> None:
    """The hand-written loop again, over each epoch's batches and with another's backward."""
    for _ in range(num_steps // STEPS_PER_EPOCH):
        for inputs, targets in batches():
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()


def dataloader(num_steps: int, device: str) -> None:
    loader = new_loader()
    moved = lambda: ((inputs.to(device), targets.to(device)) for inputs, targets in loader)  # noqa: E731
    loop(*new_model(device), moved, num_steps, Tensor.backward)


def accelerate(num_steps: int, device: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
    model, optimizer, loader = accelerator.prepare(*new_model("cpu"), new_loader())
    loop(model, optimizer, lambda: loader, num_steps, accelerator.backward)


def fabric(num_steps: int, device: str) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1)
    loader = fabric.setup_dataloaders(new_loader())
    loop(*fabric.setup(*new_model("cpu")), lambda: loader, num_steps, fabric.backward)


def lightning_trainer(num_steps: int, device: str) -> None:
    """barebones=True is Lightning's setting for measuring its overhead: no logger, checkpoints,
    progress.
    """
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = new_model("cpu")

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    epochs = num_steps // STEPS_PER_EPOCH
    trainer = lightning.Trainer(accelerator=device, devices=1, max_epochs=epochs, barebones=True)
    trainer.fit(Module(), new_loader())


def stepladder(num_steps: int, device: str) -> None:
    """The default configuration: ledger, metrics and run directory included."""
    from stepladder import Job, Settings, Trainer

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), batch[1].numel()

    model, optimizer = new_model(device)
    job = Job(model=model, optimizer=optimizer, loss=loss, train_data=(x, y))
    with tempfile.TemporaryDirectory() as tmp:
        size = {"epochs": num_steps // STEPS_PER_EPOCH, "global_batch": BATCH, "device": device}
        Trainer(
            job, Settings(**size, seed=0, run_dir=Path(tmp) / "run", threads=1, progress=False)
        ).fit()


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
OTHERS = list(LABELS)[1:]


def seconds(variant: Callable[[int, str], None], num_steps: int, device: str) -> float:
    gc.collect()
    start = time.perf_counter()
    variant(num_steps, device)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def warmed_up(names: list[str], device: str) -> tuple[list[str], list[str]]:
    """Return the ways that run here, after their imports and first calls, and those not installed."""
    present = []
    absent = []
    for name in names:
        try:
            VARIANTS[name](STEPS_PER_EPOCH, device)
            present.append(name)
        except ModuleNotFoundError as error:
            if error.name not in ("accelerate", "lightning"):
                raise
            absent.append(name)
    return present, absent


@dataclass(frozen=True)
class Costs:
    """Microseconds per step, by variant and round."""

    by_name: dict[str, list[float]]
    absent: list[str]

    def ratio(self, above: str, below: str) -> float:
        return median(self.ratios(above, below))

    def ratios(self, above: str, below: str) -> list[float]:
        """Within each round."""
        return [a / b for a, b in zip(self.by_name[above], self.by_name[below], strict=True)]

    def as_table(self) -> str:
        rows = []
        for name, costs in self.by_name.items():
            to_hand = self.ratios(name, "hand")
            to_ours = (
                f"{self.ratio(name, 'stepladder'):.2f}" if "stepladder" in self.by_name else ""
            )
            spread = f"{min(to_hand):.2f} to {max(to_hand):.2f}"
            rows.append(
                [LABELS[name], f"{median(costs):.1f}", f"{median(to_hand):.2f}", spread, to_ours]
            )
        rows += [[LABELS[name], "not installed", "", "", ""] for name in self.absent]
        return table(
            ["variant", "us/step", "ratio to hand", "lowest to highest", "ratio to stepladder"],
            rows,
        )

    def bars(self) -> str:
        if "stepladder" not in self.by_name:
            return "No bar applies to these variants."
        overhead = self.ratio("stepladder", "hand")
        bars = [bar("step against the hand-written loop", overhead, 1.10, at_most=True)]
        if rivals := [name for name in self.by_name if name not in ("hand", "stepladder")]:
            gain, name = min((self.ratio(name, "stepladder"), name) for name in rivals)
            bars.append(
                bar(f"faster than the fastest other ({LABELS[name]})", gain, 2.0, False, TRIED)
            )
            alone = self.ratio(name, "hand")
            bars.append(
                f"- the hand-written loop, which has no trainer, against the same: {alone:.2f}x"
            )
        return "\n".join(bars)


def measured(names: list[str], device: str, rounds: int, epochs: tuple[int, int]) -> Costs:
    """Each variant at both lengths in every round; every second round goes backwards."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    present, absent = warmed_up(["hand", *names], device)
    cost: dict[str, list[float]] = {name: [] for name in present}
    short, long = (number * STEPS_PER_EPOCH for number in epochs)
    for i in range(rounds):
        for name in present if i % 2 == 0 else reversed(present):
            difference = seconds(VARIANTS[name], long, device) - seconds(
                VARIANTS[name], short, device
            )
            cost[name].append(1e6 * difference / (long - short))
    return Costs(cost, absent)


def sections(costs: Costs, rounds: int, epochs: tuple[int, int]) -> list[str]:
    short, long = (number * STEPS_PER_EPOCH for number in epochs)
    return [
        costs.as_table(),
        f"Medians of {rounds} interleaved rounds; ratios are taken within a round. A step is (time of "
        f"{long} steps - time of {short} steps) / {long - short}. Accelerate, Fabric and Lightning read the "
        "same DataLoader (TensorDataset, shuffle, no workers), so their figures contain its cost.",
        costs.bars(),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--epochs", type=int, nargs=2, default=[2, 22], metavar=("SHORT", "LONG"))
    parser.add_argument(
        "--only", nargs="+", choices=OTHERS, default=OTHERS, help="beside the hand loop"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    if not 0 < args.epochs[0] < args.epochs[1] or args.rounds < 1:
        parser.error("0 < SHORT < LONG and at least one round are needed")
    packages = ["torch", "stepladder", "accelerate", "lightning"]
    report = Report("step_overhead.py", "Cost of one optimizer step", packages, cores_used="1")
    costs = measured(args.only, args.device, args.rounds, args.epochs)
    report.finish(sections(costs, args.rounds, args.epochs), args.write)


if __name__ == "__main__":
    main()

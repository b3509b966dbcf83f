"""python benchmarks/roofline.py [--device cuda] [--mnist DIR] [--movielens DIR] [--shakespeare DIR]
[--write]

How near do the recipes' steps come to what the machine can do, and to a loop that does nothing but
the step?

The data lie on the device. The loop by hand picks a batch by a permutation, and on a GPU its whole
step (forward, backward, optimizer) is one captured graph. stepladder is `Trainer.fit` with ledger,
metrics, run directory; on a GPU with --capture too. Accelerate, Fabric and Lightning read the same
data through a DataLoader. All take turns, at a short and at a long length: the difference is the
cost of the steps.

The roofline (Williams et al., CACM 2009): a step needs at least the time of its operations at the
rate of a large product of matrices, and of its bytes at the rate of a large copy, both measured
here. Its bytes are what torch's operations read and write, each by itself: less is possible where
several are one kernel."""

import argparse
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Report, bar, table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from stepladder import InputError, Job, Settings, Trainer
from stepladder.core.errors import to_one_line

HAND = "the loop by hand"
OURS = "stepladder"
CAPTURED = "stepladder --capture"
MOST_TO_HAND = 1.10
LEAST_TO_OTHERS = 3.0
TRIED = (
    "passes as graphs, one copy of the batch, no number read back before the metrics are written"
)


@dataclass(frozen=True)
class Task:
    """One recipe's step. build: its Job anew.  batch: samples of a step.  epochs: the two lengths.
    compared: whether the other trainers run it too."""

    name: str
    build: Callable[[], Job]
    batch: int
    epochs: tuple[int, int]
    compared: bool = True


def tasks(
    mnist: Path | None, movielens: Path | None, shakespeare: Path | None, short: bool
) -> Iterator[Task]:
    """Yield the tasks whose data are there; those of MNIST and of the text have 50 steps.

    Args:
        mnist: The folder of MNIST, if it is there.
        movielens: The folder of MovieLens, if it is there.
        shakespeare: The folder of the text, if it is there.
        short: Whether to rehearse, without the text.
    """
    from stepladder.recipes import gpt, mlp
    from stepladder.recipes import mnist as digits
    from stepladder.recipes import movielens as films

    def first_samples(job: Job, samples: int | None = 6400) -> Job:
        return replace(job, train_data=tuple(part[:samples] for part in job.train_data))

    def tenth() -> Job:
        return first_samples(digits.build(digits.Config(data_dir=str(mnist))))

    def fifty() -> Job:
        job = gpt.build(text)
        return replace(job, train_data=job.train_data[: 50 * text.global_batch])

    def of(
        name: str, build: Callable[[], Job], batch: int, max_epochs: int, compared: bool = True
    ) -> Task:
        return Task(name, lambda: bare(build()), batch, (1, 2 if short else max_epochs), compared)

    yield of("mlp", lambda: mlp.build(mlp.Config()), 128, 31)
    if mnist is not None:
        yield of("mnist, small net", tenth, 128, 11)
    if movielens is not None:
        recommender = films.Config(data_dir=str(movielens), task="ranking")
        samples = 10 * recommender.global_batch if short else None
        yield of(
            "movielens",
            lambda: first_samples(films.build(recommender), samples),
            recommender.global_batch,
            6,
        )
    if shakespeare is not None and not short:
        text = gpt.Config(data_dir=str(shakespeare))
        yield of("gpt", fifty, text.global_batch, 6, compared=False)


def bare(job: Job) -> Job:
    """Only the steps: nothing is evaluated, and the learning rate stays."""
    return replace(job, eval_data=None, metrics=None, best=None, derived=None, schedule=None)


def parts_of(job: Job, device: str) -> list[torch.Tensor]:
    data = job.train_data
    return [part.to(device) for part in (data if isinstance(data, tuple) else (data,))]


class ByHand:
    """A job's step on batches in a fixed place; on a GPU one graph."""

    def __init__(self, task: Task, device: str) -> None:
        torch.set_num_threads(1)
        self.job = task.build()
        self.batch = task.batch
        self.device = device
        self.model, self.data = self.job.model.to(device).train(), parts_of(self.job, device)
        self.place = [part[: self.batch].clone() for part in self.data]
        self.take = self.step
        if device == "cuda":
            self.capture()

    def step(self) -> None:
        """Forward, backward and the optimizer, on what lies in the place."""
        batch = self.place if isinstance(self.job.train_data, tuple) else self.place[0]
        total, count = self.job.loss(self.model, batch)
        self.job.optimizer.zero_grad(set_to_none=True)
        (total / count).backward()
        self.job.optimizer.step()

    def capture(self) -> None:
        for group in self.job.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.take = graph.replay

    def run(self, epochs: int) -> int:
        """Returns the steps taken; the rest of an epoch is left out."""
        steps = 0
        length = len(self.data[0])
        for _ in range(epochs):
            order = torch.randperm(length, device=self.device)
            for i in range(0, length - self.batch + 1, self.batch):
                rows = order[i : i + self.batch]
                for part, buffer in zip(self.data, self.place, strict=True):
                    torch.index_select(part, 0, rows, out=buffer)
                self.take()
                steps += 1
        return steps


def by_hand(task: Task, device: str, epochs: int) -> int:
    return ByHand(task, device).run(epochs)


def by_stepladder(task: Task, device: str, epochs: int, capture: bool = False) -> int:
    job = task.build()
    with tempfile.TemporaryDirectory() as folder:
        size: dict[str, Any] = {
            "epochs": epochs,
            "global_batch": task.batch,
            "device": device,
            "threads": 1,
        }
        settings = Settings(
            Path(folder, "run"), **size, capture=capture, progress=False, snapshot_every=10**6
        )
        return Trainer(job, settings).fit().steps


def loader_of(task: Task, job: Job) -> DataLoader:
    return DataLoader(
        TensorDataset(*parts_of(job, "cpu")), task.batch, shuffle=True, drop_last=True
    )


def loop(
    task: Task, job: Job, model: Any, optimizer: Any, loader: Any, epochs: int, backward: Any
) -> int:
    for _ in range(epochs):
        for batch in loader:
            total, count = job.loss(model, batch)
            optimizer.zero_grad()
            backward(total / count)
            optimizer.step()
    return epochs * (len(loader.dataset) // task.batch)


def by_accelerate(task: Task, device: str, epochs: int) -> int:
    from accelerate import Accelerator

    job = task.build()
    trainer = Accelerator(cpu=device == "cpu")
    model, optimizer, loader = trainer.prepare(job.model, job.optimizer, loader_of(task, job))
    return loop(task, job, model, optimizer, loader, epochs, trainer.backward)


def by_fabric(task: Task, device: str, epochs: int) -> int:
    from lightning.fabric import Fabric

    job = task.build()
    fabric = Fabric(accelerator=device, devices=1)
    loader = fabric.setup_dataloaders(loader_of(task, job))
    model, optimizer = fabric.setup(job.model, job.optimizer)
    return loop(task, job, model, optimizer, loader, epochs, fabric.backward)


def by_lightning(task: Task, device: str, epochs: int) -> int:
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    job = task.build()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any) -> Any:
            total, count = job.loss(self.model, batch)
            return total / count

        def configure_optimizers(self) -> Any:
            return job.optimizer

    trainer = lightning.Trainer(accelerator=device, devices=1, max_epochs=epochs, barebones=True)
    loader = loader_of(task, job)
    trainer.fit(Module(), loader)
    return epochs * (len(loader.dataset) // task.batch)


OTHERS = {
    "Accelerate": by_accelerate,
    "Lightning Fabric": by_fabric,
    "Lightning Trainer": by_lightning,
}


def ways_of(task: Task, device: str) -> dict[str, Callable[[Task, str, int], int]]:
    runners: dict[str, Any] = {HAND: by_hand, OURS: by_stepladder}
    if device == "cuda":
        runners[CAPTURED] = partial(by_stepladder, capture=True)
    return runners | (OTHERS if task.compared else {})


def seconds(
    way: Callable[[Task, str, int], int], task: Task, device: str, epochs: int
) -> tuple[float, int]:
    gc.collect()
    start = time.perf_counter()
    steps = way(task, device, epochs)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, steps


class Times:
    """Microseconds per step, by way and round. missing: why a way has none; a card may refuse to
    capture one.
    """

    def __init__(self, task: Task, device: str, rounds: int) -> None:
        runners = ways_of(task, device)
        self.missing = {
            name: why for name, way in runners.items() if (why := why_not(way, task, device))
        }
        self.by_way: dict[str, list[float]] = {
            name: [] for name in runners if name not in self.missing
        }
        for number in range(rounds):
            for name in list(self.by_way)[:: -1 if number % 2 else 1]:
                (short, few), (long, long_epochs) = (
                    seconds(runners[name], task, device, num_epochs) for num_epochs in task.epochs
                )
                self.by_way[name].append(1e6 * (long - short) / (long_epochs - few))
        self.ours = CAPTURED if CAPTURED in self.by_way else OURS

    def ratio(self, above: str, below: str) -> float:
        """Within a round, the median; nan where one of the two is missing."""
        if above in self.missing or below in self.missing:
            return math.nan
        return median(a / b for a, b in zip(self.by_way[above], self.by_way[below], strict=True))

    def rows(self, recipe: str) -> list[list[str]]:
        rows = [
            [
                recipe,
                name,
                f"{median(times):.1f}",
                *(f"{self.ratio(name, to):.2f}" for to in (HAND, self.ours)),
            ]
            for name, times in self.by_way.items()
        ]
        return rows + [[recipe, name, why, "", ""] for name, why in self.missing.items()]

    def bars(self, recipe: str) -> list[str]:
        """Return the bars of a GPU; one that cannot be measured is not met."""
        rivals = [name for name in OTHERS if name in self.by_way]
        gain, rival = min(
            ((self.ratio(name, self.ours), name) for name in rivals), default=(math.nan, "none")
        )
        to_hand = f"{recipe}, against a loop captured by hand"
        to_others = f"faster than the fastest other ({rival})"
        return [
            bar(to_hand, self.ratio(self.ours, HAND), MOST_TO_HAND, True, TRIED),
            bar(f"{recipe}, {to_others}", gain, LEAST_TO_OTHERS, False, TRIED),
        ]


def why_not(way: Callable[[Task, str, int], int], task: Task, device: str) -> str:
    """Nothing where an epoch of it runs, which also takes its imports and first calls."""
    try:
        way(task, device, 1)
    except ModuleNotFoundError as error:
        if error.name in ("accelerate", "lightning"):
            return "not installed"
        raise
    except (RuntimeError, InputError) as error:
        return f"FAIL: {to_one_line(str(error))}"
    return ""


class Moved(TorchDispatchMode):
    """Counts what each operation reads and writes, in bytes, and how many there are that do."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not func.is_view and written:
            self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in (*tensors, *written))
            self.calls += 1
        return result


@dataclass(frozen=True)
class Needs:
    """What one step needs.

    Args:
        operations: The multiplications and additions of its products.
        bytes: The bytes that its operations read and write.
        calls: The number of its operations.
    """

    operations: int
    bytes: int
    calls: int


def needs_of(task: Task) -> Needs:
    """Counted on the CPU, where each of torch's operations can be seen."""
    hand = ByHand(task, "cpu")
    hand.step()  # so that the optimizer has its state
    with FlopCounterMode(display=False) as flops, Moved() as moved:
        hand.step()
    return Needs(flops.get_total_flops(), moved.bytes, moved.calls)


def best(work: Callable[[], Any], device: str) -> float:
    """Seconds of the fastest of some calls."""
    rates = []
    for _ in range(8):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(time.perf_counter() - start)
    return min(rates)


def rates_of(device: str) -> tuple[float, float]:
    """Operations a second of a large product in fp32, and bytes a second of a large copy."""
    torch.set_num_threads(1)
    size, length = (8192, 2**28) if device == "cuda" else (1024, 2**25)
    a = torch.rand(size, size, device=device)
    b = torch.rand(size, size, device=device)
    source = torch.zeros(length, device=device)
    copy = torch.zeros(length, device=device)
    product = best(lambda: torch.mm(a, b), device)  # without TF32, torch's default
    return 2 * size**3 / product, 2 * 4 * length / best(lambda: copy.copy_(source), device)


def sections(task_list: list[Task], device: str, rounds: int) -> list[str]:
    """The tables of steps and of the roofline, and the bars."""
    operations, bandwidth = rates_of(device)
    steps = []
    limits = []
    bars = []
    for task in task_list:
        times = Times(task, device, rounds)
        needs = needs_of(task)
        steps += times.rows(task.name)
        bounds = {"operations": needs.operations / operations, "bytes": needs.bytes / bandwidth}
        by = max(bounds, key=lambda name: bounds[name])
        shares = [
            f"{100 * 1e6 * bounds[by] / median(times.by_way[name]):.0f} %"
            if name in times.by_way
            else "-"
            for name in (HAND, times.ours)
        ]
        size = [f"{needs.operations / 1e6:.1f}", f"{needs.bytes / 1e6:.2f}", f"{needs.calls}"]
        limits.append([task.name, *size, f"{1e6 * bounds[by]:.1f}", by, *shares])
        if device == "cuda" and task.compared:
            bars += times.bars(task.name)
    rates = f"{operations / 1e9:,.0f} billion operations a second (fp32), {bandwidth / 1e9:,.1f} GB a second"
    head = ["recipe", "way", "us/step", "to the loop by hand", "to stepladder's best"]
    roof = [
        "recipe",
        "million operations",
        "MB",
        "calls",
        "bound, us",
        "by",
        "by hand comes to",
        "stepladder to",
    ]
    text = [
        table(head, steps),
        f"Medians of {rounds} interleaved rounds; ratios within a round.",
        f"## The roofline\n\nMeasured rates: {rates}.\n\n{table(roof, limits)}",
    ]
    return [*text, "\n".join(bars)] if bars else text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mnist", type=Path, help="folder with the four MNIST files")
    parser.add_argument(
        "--movielens", type=Path, help="folder with the leave-one-out split of MovieLens 1M"
    )
    parser.add_argument("--shakespeare", type=Path, help="folder with input.txt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    packages = ["torch", "stepladder", "accelerate", "lightning"]
    report = Report("roofline.py", "How near to what the machine can do", packages, cores_used="1")
    task_list = list(tasks(args.mnist, args.movielens, args.shakespeare, short=False))
    report.finish(sections(task_list, args.device, args.rounds), args.write)


if __name__ == "__main__":
    main()

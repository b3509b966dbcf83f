"""Pairs of runs that differ in one planted thing, and what `stepladder diff` should say of them.

Shared by benchmarks/diff.py and tests/tools/test_diff.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stepladder import Plan

JOB = Path(__file__).parent.parent / "tests" / "jobs" / "differs.py"
SAMPLE = 7  # whose number is changed in the data
PLAN = Plan(num_samples=64, global_batch=16, microbatch=2, seed=0)
STEP_OF_SAMPLE = PLAN.order(0).tolist().index(SAMPLE) // 16 + 1
Train = Callable[[list[str], dict[str, str]], None]


@dataclass(frozen=True)
class Plant:
    """What the second run has that the first has not, and what diff should say: kind, first step,
    sentence.

    kind: "" where the runs are equal.  step: None for any.  flags, env: of the second run.  code:
    lines of its job file, and what stands there instead.  both: flags of both runs.  in_both: the
    first run has the code too. in_place: both runs had one file, which was changed between."""

    planted: str
    kind: str
    step: int | None = None
    sentence: str = ""
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    code: tuple[str, str] = ("", "")
    both: tuple[str, ...] = ()
    in_both: bool = False
    in_place: bool = False


OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)"
MODEL = "model = Net(config.dropout)"
BUILT = "return Job(model, optimizer, loss, (x, y))"
TOTAL = 'total = F.mse_loss(model(x), y, reduction="sum")'
PLANTS = {
    # -- named by the records
    "seed": Plant("another seed", "setting", 1, "seed is 0 .* and 1 ", ("--seed", "1")),
    "lr": Plant("another learning rate", "learning rate", 1, "lr is 0.05 .* and 0.1 ", ("--lr", "0.1")),
    "batch": Plant("another global batch", "setting", 1, "global_batch is 16 .* 32 ", ("--global-batch", "32")),
    "microbatch": Plant("another microbatch", "setting", 1, "microbatch is None .* 8 ", ("--microbatch", "8")),
    "precision": Plant("another precision", "setting", 1, "precision is fp32 .* bf16 ", ("--precision", "bf16")),
    "sync": Plant("another way to add gradients", "setting", 1, "sync is exact .* ddp ", ("--sync", "ddp")),
    "dropout": Plant("another dropout rate as a flag", "setting", 1, "dropout is .*0.5 ", ("--dropout", "0.5")),
    "threads": Plant("two threads", "threads", None, "threads is 1 .* and 2 ", ("--threads", "2")),
    "processor": Plant(
        "a processor without vector units (ATEN_CPU_CAPABILITY)", "processor", 1, "machine is .* DEFAULT",
        env={"ATEN_CPU_CAPABILITY": "default"},
    ),
    "processes": Plant(
        "two processes, with dropout and each one's share in one pass", "processes", 1, "processes is 1 .* 2 ",
        ("--nproc", "2"), both=("--sync", "ddp"),
    ),
    "order": Plant(
        "other samples in step 5", "sample order", 5, "other samples than planned", env={"PLANT": "order"}
    ),
    "schedule": Plant(
        "a schedule in the job file", "learning rate", 3, "lr .* is 0.05 .* and 0.005",
        code=(BUILT, BUILT[:-1] + ", schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2))"),
    ),
    "edited": Plant(
        "the job file changed between the runs", "code", 1, "different job files", in_place=True,
        # of another length: Python keeps bytecode by size and second
        code=("nn.Tanh()", "nn.Sigmoid()"),
    ),
    # -- named by training again
    "start": Plant(
        "other weights at the start", "initial weights", 1, "first.weight",
        code=(MODEL, MODEL + "\n    model.first.weight.data[0, 0] += 1e-3"),
    ),
    "data": Plant("one number of the data", "data", STEP_OF_SAMPLE, "tensor 0 of the batch"),
    "activation": Plant(
        "another activation", "operation", 1, r"act in microbatch 1 .*Tanh\(\).*ReLU\(\)",
        code=("nn.Tanh()", "nn.ReLU()"),
    ),
    "rate of dropout": Plant(
        "another dropout in the job file", "operation", 1, r"drop in microbatch 1 .*p=0.1.*p=0.2",
        code=("nn.Dropout(dropout)", "nn.Dropout(2 * dropout)"),
    ),
    "function": Plant(
        "an operation outside of a module", "operation", 1, "the input of last in microbatch 1",
        code=("x = self.drop(x)", "x = self.drop(x) * 1.001"),
    ),
    "randomness": Plant(
        "one more random number", "randomness", 1, "the random generator before drop in microbatch 1",
        code=("x = self.drop(x)", "x = self.drop(x + 0 * torch.rand(1))"),
    ),
    "loss": Plant(
        "another loss function", "loss", 1, "the loss in microbatch 1",
        code=(TOTAL, 'total = F.l1_loss(model(x), y, reduction="sum")'),
    ),
    "gradient": Plant(
        "a gradient that a hook changes", "gradient", 1, "the gradient of last.weight in microbatch 1",
        code=(MODEL, MODEL + "\n    model.last.weight.register_hook(lambda grad: 1.01 * grad)"),
    ),
    "clipping": Plant(
        "clipping in the job file", "gradient", 1, "over the whole step",
        code=(BUILT, BUILT[:-1] + ", clip_norm=0.1)"),
    ),
    "weight decay": Plant(
        "weight decay in the job file", "optimizer", 1, "weight_decay of group 0 .*0.01",
        code=(OPTIMIZER, OPTIMIZER[:-1] + ", weight_decay=0.01)"),
    ),
    "optimizer": Plant(
        "another optimizer", "optimizer", 1, "SGD in the first run, Adagrad in the second",
        code=(OPTIMIZER, "optimizer = torch.optim.Adagrad(model.parameters(), lr=config.lr)"),
    ),
    "weight": Plant("a bit of a weight in step 6", "wrong result", 6, "does not repeat", env={"PLANT": "weight"}),
    "flipped gradient": Plant(
        "the sign of one microbatch's gradient in step 5", "wrong result", 6, "does not repeat",
        env={"PLANT": "gradient"},
    ),
    "kept": Plant(
        "the same, and a snapshot of it after step 5", "wrong result", 5, "does not repeat",
        ("--snapshot-every", "5"), env={"PLANT": "gradient"},
    ),
    "unseeded": Plant(
        "a random number without a seed in the loss", "not repeatable", 3, "each time it is trained: the loss",
        # --sync exact refuses such a loss in each step that it computes again; in step 3 it does not.
        code=(TOTAL, TOTAL + " * (1 + (20 < model.passes <= 24) * os.urandom(1)[0] / 1000)"), in_both=True,
    ),
    "unseeded start": Plant(
        "weights drawn without a seed", "not repeatable", 1, "each time it is trained: .* first.weight",
        code=("torch.manual_seed(config.seed)", "torch.seed()"), in_both=True,
    ),
    # -- no difference
    "same": Plant("nothing", ""),
    "two processes": Plant("two processes", "", flags=("--nproc", "2")),
    "killed": Plant("kill -9 of a process in step 6", "", flags=("--nproc", "2", "--fail-at", "1:6")),
    "rounding": Plant(
        "ddp and the same microbatches", "", sentence="their settings differ in .*sync",
        flags=("--sync", "ddp", "--microbatch", "2"),
    ),
    "comment": Plant("a comment in the job file", "", code=("x, y = batch", "x, y = batch  # a pair")),
}  # fmt: skip


def pair(name: str, folder: Path, train: Train) -> tuple[Path, Path]:
    """Train both runs of a plant below `folder`; plants share the first one. Returns their run
    directories.
    """
    plant = PLANTS[name]
    plant_dir = folder / name.replace(" ", "-")
    alone = plant.in_both or plant.both
    first = plant_dir if plant.in_place else plant_dir / "first" if alone else folder / "first"
    second = plant_dir if plant.in_place else plant_dir / "second"
    runs = first / "run-1", second / "run-2"
    if not runs[0].exists():
        prepare(first, plant.code if plant.in_both else ("", ""))
        train([*argv_of(first, runs[0]), *plant.both], {})
    prepare(second, plant.code)
    if name == "data":
        x, y = torch.load(second / "data" / "data.pt")
        x[SAMPLE, 3] += 0.01
        torch.save((x, y), second / "data" / "data.pt")
    train([*argv_of(second, runs[1]), *plant.both, *plant.flags], plant.env)
    return runs


def prepare(folder: Path, code: tuple[str, str]) -> None:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(7))
    torch.save((x, x.sum(1, keepdim=True).sin()), folder / "data" / "data.pt")
    text = JOB.read_text(encoding="utf-8")
    assert code[0] in text, code
    (folder / "job.py").write_text(text.replace(*code, 1) if code[0] else text, encoding="utf-8")


def argv_of(folder: Path, run_dir: Path) -> list[str]:
    """Return the arguments of the command that trains a run; those that stand behind them count."""
    flags = ["--sync", "exact", "--snapshot-every", "4"]
    return [
        "train",
        str(folder / "job.py"),
        *flags,
        "--data-dir",
        str(folder / "data"),
        "--run-dir",
        str(run_dir),
    ]

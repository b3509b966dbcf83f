"""One training in a run directory of its own, what each rank does for it, and where two of them
first part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from stepladder.core import durable
from stepladder.core.plan import Plan
from stepladder.core.settings import TrainRequest
from stepladder.storage.audit import audit
from stepladder.storage.run_files import METRICS_FILE, RESULT_FILE, SNAPSHOTS_FOLDER
from stepladder.storage.snapshot import read_snapshot
from stepladder.storage.snapshot_store import Snapshots
from stepladder.train.fingerprints import fingerprint
from stepladder.train.forward_buffers import BufferChanged
from stepladder.train.job_runner import join_process_group
from stepladder.train.replica_check import ReplicasDiffer
from stepladder.train.run_spec import RunSpec
from stepladder.train.trainer import Trainer

ABOUT, STOPPED_BY_GUARD = "trial.json", "replicas-differ.json"
STEPS = 12
WEIGHTS_TO_LOSS = (
    100  # tolerances: rounding that flips one ReLU shows in a weight long before it does in a loss
)


@dataclass(frozen=True)
class Trial:
    """A training that has ended. sizes: processes, one number after the other where it was resumed."""

    folder: Path
    sizes: list[int]

    def read(self, name: str) -> dict[str, Any]:
        """A file of the run directory; nothing where it is not there."""
        path = self.folder / name
        return json.loads(path.read_bytes()) if path.exists() else {}

    @property
    def stopped(self) -> dict[str, Any]:
        """What the guard found where it ended the training: fields of Difference. Else nothing."""
        return self.read(STOPPED_BY_GUARD)

    @property
    def steps(self) -> int:
        return int(self.read(ABOUT)["steps"])

    @property
    def weights_sha256(self) -> str | None:
        return self.read(RESULT_FILE).get("weights_sha256")

    def size_at(self, step: int) -> int:
        """The number of processes that trained this step."""
        ends = (last_step(self.steps, part, len(self.sizes)) for part in range(1, len(self.sizes)))
        return self.sizes[sum(end < step for end in ends)]

    def own_difference(self) -> Difference | None:
        """What the training says of itself: its ranks differ, or its ledger is not the plan's."""
        if found := self.stopped:
            return Difference(**found, sizes=self.sizes)
        problems = audit(self.folder).problems
        return Difference(0, "ledger", "ledger", self.sizes, problems[0]) if problems else None

    def losses(self) -> dict[int, float]:
        lines = map(
            json.loads, (self.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        )
        return {line["step"]: line["loss"] for line in lines if "lr" in line}

    def snapshots(self) -> dict[int, Path]:
        """By steps done."""
        return {
            int(path.name.split("_")[1]): path
            for path in Snapshots(self.folder / SNAPSHOTS_FOLDER).paths()
        }


@dataclass(frozen=True)
class Difference:
    """Where two trainings part.

    step: steps done, 0 is before the first.  kind: loss, parameter, buffer, optimizer, ledger, or
    what the guard names.  tensor: its name.  sizes: the numbers of processes that differ.
    relative: by how much."""

    step: int
    tensor: str
    kind: str
    sizes: list[int]
    cause: str = ""
    relative: float | None = None


def train_part(request: TrainRequest, asked: int | None, part: int, parts: int) -> int:
    """What a rank does: train up to the end of one part of the steps. What the guard finds goes
    into a file.
    """
    run_dir = request.settings.run_dir
    with join_process_group(request) as (build, recipe, comm):
        job = replace(build(), eval_data=None, best=None)
        spec = RunSpec.make(job, request.settings, recipe, comm)
        steps = steps_to_train(spec.plan, spec.num_steps, asked)
        if comm.world.is_first:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / ABOUT).write_text(
                json.dumps({"steps": steps, "tensors": tensors_of(job.model)}), encoding="utf-8"
            )
        settings = replace(request.settings, steps=last_step(steps, part, parts))
        try:
            Trainer(job, settings, recipe, comm).fit()
        except ReplicasDiffer as error:
            _say_why(
                run_dir, step=error.at, tensor=error.tensor, kind=error.kind, cause=error.cause
            )
        except (
            BufferChanged
        ) as error:  # of exact mode: a difference that has a name before it happens
            step = getattr(error, "step", 1)
            _say_why(run_dir, step=step, tensor=error.buffer, kind="buffer", cause=error.problem)
            raise
    return 0


def _say_why(run_dir: Path, **found: Any) -> None:
    """Whole, for several ranks may say it at once. found: fields of Difference."""
    durable.write(run_dir / STOPPED_BY_GUARD, json.dumps(found), fsync=False)


def steps_to_train(plan: Plan, num_steps: int, asked: int | None) -> int:
    """About 12, or past the first epoch's end and its short last batch where that is near."""
    near = plan.steps_per_epoch + 1 if plan.steps_per_epoch < 2 * STEPS else STEPS
    return min(num_steps, asked or max(STEPS, near))


def last_step(steps: int, part: int, parts: int) -> int:
    """Where part 1, 2, ... of so many ends."""
    return max(part, steps * part // parts)


def tensors_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """Per tensor of a snapshot, in registration order, its kind and its value before the first step
    as a hash.
    """
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: ["parameter" if name in params else "buffer", fingerprint(tensor).hex()]
        for name, tensor in model.state_dict().items()
    }


def first_difference(one: Trial, other: Trial, tolerance: float) -> Difference | None:
    """The first step and tensor by which they differ: by any bit, or relative to their size by more
    than

    `tolerance` for a loss and 100 times that for a tensor.
    """
    start_one, start_other = (trial.read(ABOUT)["tensors"] for trial in (one, other))
    kinds = {name: kind for name, (kind, _) in (start_other | start_one).items()}
    for name in kinds:
        if start_one.get(name) != start_other.get(name):
            return Difference(0, name, kinds[name], [one.size_at(0), other.size_at(0)])
    losses = one.losses(), other.losses()
    snapshots = one.snapshots(), other.snapshots()
    for step in range(1, one.steps + 1):
        mine, theirs = (torch.tensor(loss[step], dtype=torch.float64) for loss in losses)
        compared = pairs(snapshots[0][step], snapshots[1][step], kinds)
        for kind, name, a, b in chain([("loss", "loss", mine, theirs)], compared):
            allowed = tolerance if kind == "loss" else WEIGHTS_TO_LOSS * tolerance
            if not (relative := distance(a, b)) <= allowed:  # so that NaN differs
                return Difference(
                    step, name, kind, [one.size_at(step), other.size_at(step)], "", relative
                )
    return None


def pairs(
    one: Path, other: Path, kinds: dict[str, str] | None = None
) -> Iterator[tuple[str, str, Any, Any]]:
    """(kind, name, value, value) of two snapshots: parameters and buffers, the optimizer's state,
    its settings.

    kinds: of the tensors by name, in order; None: all are weights.
    """
    snapshots = read_snapshot(one), read_snapshot(other)
    a, b = (snapshot.tensors() for snapshot in snapshots)
    for name, kind in (dict.fromkeys(a, "weights") if kinds is None else kinds).items():
        if name in a and name in b:  # a tied weight is stored once
            yield kind, name, a[name], b[name]
    states = [snapshot.state()["optimizer"] for snapshot in snapshots]
    a, b = (state["state"] for state in states)
    for place in a:
        for name, value in a[place].items():
            yield "optimizer", f"{name} of parameter {place}", value, b.get(place, {}).get(name)
    groups = zip(*(state["param_groups"] for state in states), strict=False)
    for number, (mine, theirs) in enumerate(groups):
        for name in mine:
            yield "optimizer", f"{name} of group {number}", mine[name], theirs.get(name)


def distance(a: Any, b: Any) -> float:
    """0 for equal bits; else the norm of the difference over the larger norm, or infinity."""
    if fingerprint(a) == fingerprint(b):
        return 0.0
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.shape != b.shape:
        return math.inf
    a, b = a.double(), b.double()
    size = float(max(a.norm(), b.norm()))
    return float((a - b).norm()) / size if size else 1e-300  # zeros of other signs

"""Where two trainings first part: at which step, in which tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from stepladder.storage.audit import audit
from stepladder.storage.rundir import SNAPSHOTS
from stepladder.storage.snapshot import MODEL, Snapshots, read_snapshot
from stepladder.tools.verify.trial import ABOUT, STOPPED_BY_GUARD, Trial
from stepladder.train.replica_check import fingerprint


@dataclass(frozen=True)
class Difference:
    """Where two trainings part.

    step: steps done, 0 is before the first.  kind: loss, parameter, buffer, optimizer, ledger, or what the
    guard names.  tensor: its name.  sizes: the numbers of processes that differ.  relative: by how much.
    """

    step: int
    tensor: str
    kind: str
    sizes: list[int]
    cause: str = ""
    relative: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("step", "tensor", "kind", "sizes", "cause")}


WEIGHTS_TO_LOSS = 100  # tolerances: rounding that flips one ReLU shows in a weight long before it does in a loss


def own_difference(trial: Trial) -> Difference | None:
    """What one training says of itself: its ranks differ, or its ledger is not the plan's."""
    if found := trial.read(STOPPED_BY_GUARD):
        return Difference(**found, sizes=trial.sizes)
    problems = audit(trial.folder).problems
    return Difference(0, "ledger", "ledger", trial.sizes, problems[0]) if problems else None


def first_difference(one: Trial, other: Trial, tolerance: float) -> Difference | None:
    """The first step and tensor by which they differ: by any bit, or relative to their size by more than

    `tolerance` for a loss and 100 times that for a tensor.
    """
    start_one, start_other = (trial.read(ABOUT)["tensors"] for trial in (one, other))
    kinds = {name: kind for name, (kind, _) in (start_other | start_one).items()}
    for name in kinds:
        if start_one.get(name) != start_other.get(name):
            return Difference(0, name, kinds[name], [one.size_at(0), other.size_at(0)])
    losses = one.losses(), other.losses()
    snapshots = snapshots_of(one), snapshots_of(other)
    for step in range(1, one.steps + 1):
        mine, theirs = (torch.tensor(loss[step], dtype=torch.float64) for loss in losses)
        compared = pairs(snapshots[0][step], snapshots[1][step], kinds)
        for kind, name, a, b in chain([("loss", "loss", mine, theirs)], compared):
            allowed = tolerance if kind == "loss" else WEIGHTS_TO_LOSS * tolerance
            if not (relative := distance(a, b)) <= allowed:  # so that NaN differs
                return Difference(step, name, kind, [one.size_at(step), other.size_at(step)], "", relative)
    return None


def snapshots_of(trial: Trial) -> dict[int, Path]:
    """By steps done."""
    return {int(path.name.split("_")[1]): path for path in Snapshots(trial.folder / SNAPSHOTS).paths()}


def pairs(one: Path, other: Path, kinds: dict[str, str]) -> Iterator[tuple[str, str, Any, Any]]:
    """(kind, name, value, value) of two snapshots: parameters and buffers, then the optimizer's state."""
    snapshots = read_snapshot(one), read_snapshot(other)
    a, b = (load(snapshot.files[MODEL]) for snapshot in snapshots)
    for name, kind in kinds.items():
        if name in a and name in b:  # a tied weight is stored once
            yield kind, name, a[name], b[name]
    a, b = (snapshot.state()["optimizer"]["state"] for snapshot in snapshots)
    for place in a:
        for name, value in a[place].items():
            yield "optimizer", f"{name} of parameter {place}", value, b.get(place, {}).get(name)


def distance(a: Any, b: Any) -> float:
    """0 for equal bits; else the norm of the difference over the larger norm, or infinity."""
    if fingerprint(a) == fingerprint(b):
        return 0.0
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.shape != b.shape:
        return math.inf
    a, b = a.double(), b.double()
    size = float(max(a.norm(), b.norm()))
    return float((a - b).norm()) / size if size else 1e-300  # zeros of other signs

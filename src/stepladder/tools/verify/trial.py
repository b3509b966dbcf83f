"""One training for `stepladder verify`, and the first difference between two of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepladder.core import durable
from stepladder.core.plan import Plan
from stepladder.core.settings import TrainRequest
from stepladder.storage.audit import audit
from stepladder.storage.metrics_file import read_step_lines
from stepladder.storage.run_files import RESULT_FILE, find_snapshots
from stepladder.storage.snapshot import Snapshot, read_snapshot
from stepladder.tools.trial.training import open_training
from stepladder.train.fingerprints import fingerprint
from stepladder.train.forward_buffers import BufferChanged
from stepladder.train.replica_check import ReplicasDiffer
from stepladder.train.weight_guard import WeightChanged

TRIAL_FILE = "trial.json"  # the number of steps, and the tensors before the first
GUARD_REPORT_FILE = "replicas-differ.json"  # the difference at which the guard stopped a training
TRIAL_STEPS = 12
# Rounding that flips one ReLU shows in a weight long before it does in a loss.
WEIGHT_TOLERANCE_FACTOR = 100
MEAN_GRADIENT_NAMES = ("exp_avg", "momentum_buffer")  # of Adam and of SGD
# A gradient is zero but for rounding if its mean is below this share of the largest one.
ZERO_GRADIENT_SHARE = 1e-5


@dataclass(frozen=True)
class Trial:
    """A training that has ended, in a run directory of its own.

    `sizes` has its number of processes, and one more for each time that it was resumed.
    """

    folder: Path
    sizes: list[int]

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the run directory; an empty dict if there is none."""
        path = self.folder / name
        if not path.exists():
            return {}
        content: dict[str, Any] = json.loads(path.read_bytes())
        return content

    @property
    def guard_report(self) -> dict[str, Any]:
        """Fields of Difference, if the guard has stopped the training; else an empty dict."""
        return self.read(GUARD_REPORT_FILE)

    @property
    def steps(self) -> int:
        return int(self.read(TRIAL_FILE)["steps"])

    @property
    def weights_sha256(self) -> str | None:
        return self.read(RESULT_FILE).get("weights_sha256")

    def size_at(self, step: int) -> int:
        """Return the number of processes that trained this step."""
        num_parts = len(self.sizes)
        ends = (compute_last_step(self.steps, part, num_parts) for part in range(1, num_parts))
        return self.sizes[sum(end < step for end in ends)]

    def find_inner_difference(self) -> Difference | None:
        """Return how the training's ranks differ, or its ledger from its plan."""
        report = self.guard_report
        if report:
            return Difference(**report, sizes=self.sizes)
        problems = audit(self.folder).problems
        if not problems:
            return None
        return Difference(0, "ledger", "ledger", self.sizes, problems[0])

    def read_losses(self) -> dict[int, float]:
        """Return the loss of each step."""
        return {line["step"]: line["loss"] for line in read_step_lines(self.folder)}


@dataclass(frozen=True)
class Difference:
    """The first value in which two trainings differ.

    `step` counts the steps done, 0 is before the first. `kind` is loss, parameter, buffer,
    optimizer, ledger or a kind of the guard. `sizes` are the numbers of processes that differ,
    `relative` is the difference relative to the larger value.
    """

    step: int
    tensor: str
    kind: str
    sizes: list[int]
    cause: str = ""
    relative: float | None = None


def train_part(
    request: TrainRequest, requested_steps: int | None, part: int, num_parts: int
) -> int:
    """Train on one rank to the end of a part of the steps; return the exit code.

    A difference between the ranks ends the training and is written to GUARD_REPORT_FILE.
    """
    run_dir = request.settings.run_dir
    with open_training(request) as training:
        spec = training.make_spec()
        steps = choose_num_steps(spec.plan, spec.num_steps, requested_steps)
        if training.comm.world.is_first:
            content = {"steps": steps, "tensors": _hash_tensors(training.job.model)}
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / TRIAL_FILE).write_text(json.dumps(content), encoding="utf-8")
        settings = replace(request.settings, steps=compute_last_step(steps, part, num_parts))
        try:
            replace(training, settings=settings).fit()
        except ReplicasDiffer as error:
            _write_guard_report(
                run_dir, step=error.at, tensor=error.tensor, kind=error.kind, cause=error.cause
            )
        except (BufferChanged, WeightChanged) as error:  # refused before ranks differ
            step = getattr(error, "step", 1)
            _write_guard_report(
                run_dir, step=step, tensor=error.tensor, kind=error.kind, cause=error.problem
            )
            raise
    return 0


def _write_guard_report(run_dir: Path, **fields: Any) -> None:
    """Write fields of Difference atomically, as several ranks may write at once."""
    durable.write(run_dir / GUARD_REPORT_FILE, json.dumps(fields), fsync=False)


def choose_num_steps(plan: Plan, num_steps: int, requested_steps: int | None) -> int:
    """Return about 12, or one step past the first epoch if its short last batch is near."""
    steps = TRIAL_STEPS
    if plan.steps_per_epoch < 2 * TRIAL_STEPS:
        steps = max(steps, plan.steps_per_epoch + 1)
    return min(num_steps, requested_steps or steps)


def compute_last_step(steps: int, part: int, num_parts: int) -> int:
    """Return the last step of part 1, 2, ..., num_parts."""
    return max(part, steps * part // num_parts)


def _hash_tensors(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the kind and a hash of each tensor of a snapshot, in registration order."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: ["parameter" if name in params else "buffer", fingerprint(tensor).hex()]
        for name, tensor in model.state_dict().items()
    }


def find_first_difference(first: Trial, second: Trial, tolerance: float) -> Difference | None:
    """Return the first step and tensor in which two trainings differ, None if they are equal.

    A loss may differ by `tolerance`, relative to its size, and a tensor by
    WEIGHT_TOLERANCE_FACTOR times that. With 0 every bit counts.
    """
    tensors = first.read(TRIAL_FILE)["tensors"]
    second_tensors = second.read(TRIAL_FILE)["tensors"]
    kinds = {name: kind for name, (kind, _) in (second_tensors | tensors).items()}
    for name, kind in kinds.items():
        if tensors.get(name) != second_tensors.get(name):
            return Difference(0, name, kind, [first.size_at(0), second.size_at(0)])
    losses = first.read_losses()
    second_losses = second.read_losses()
    snapshots = find_snapshots(first.folder)
    second_snapshots = find_snapshots(second.folder)
    for step in range(1, first.steps + 1):
        loss = torch.tensor(losses[step], dtype=torch.float64)
        second_loss = torch.tensor(second_losses[step], dtype=torch.float64)
        sizes = [first.size_at(step), second.size_at(step)]
        relative = _measure_distance(loss, second_loss)
        if not relative <= tolerance:  # NaN differs
            return Difference(step, "loss", "loss", sizes, relative=relative)
        values = compare_snapshots(snapshots[step], second_snapshots[step], tolerance, kinds)
        if values.differing:
            value = values.differing[0]
            return Difference(step, value.name, value.kind, sizes, relative=value.relative)
    return None


@dataclass(frozen=True)
class _DifferingTensor:
    """A value of two snapshots that differs: a tensor, or a setting of the optimizer."""

    kind: str
    name: str
    first: Any
    second: Any
    relative: float


@dataclass(frozen=True)
class _SnapshotComparison:
    """What differs in two snapshots, and the tensors whose difference means nothing."""

    differing: list[_DifferingTensor]
    of_zero_gradient: list[str]


def compare_snapshots(
    first_path: Path, second_path: Path, tolerance: float, kinds: dict[str, str] | None = None
) -> _SnapshotComparison:
    """Compare the tensors and the optimizer's state of two snapshots.

    The gradient of a bias before batch norm is zero but for rounding, so that its sign is chance,
    and Adam makes a whole step of it. If nothing else differs, such tensors count as equal.

    Args:
        first_path: The first snapshot.
        second_path: The second snapshot.
        tolerance: The relative difference of losses; 0 if every bit counts.
        kinds: The kind of each tensor to compare, in order; None compares all, as weights.
    """
    first = read_snapshot(first_path)
    second = read_snapshot(second_path)
    differing = []
    for kind, name, a, b in _pair_values(first, second, kinds):
        relative = _measure_distance(a, b)
        if not relative <= WEIGHT_TOLERANCE_FACTOR * tolerance:  # NaN differs
            differing.append(_DifferingTensor(kind, name, a, b, relative))
    if not tolerance:
        return _SnapshotComparison(differing, [])
    params = _find_zero_gradients(first.state()["optimizer"])
    params &= _find_zero_gradients(second.state()["optimizer"])
    states = {
        f"{name} of parameter {index}": state[name].shape
        for index, state in first.state()["optimizer"]["state"].items()
        for name in state
        if index in params and isinstance(state[name], Tensor)
    }
    shapes = set(states.values())
    for value in differing:
        # A snapshot does not tell which weight is which parameter, so it is known by its shape.
        is_of_zero_gradient = value.name in states
        if value.kind != "optimizer":
            is_of_zero_gradient = isinstance(value.first, Tensor) and value.first.shape in shapes
        if not is_of_zero_gradient:
            return _SnapshotComparison(differing, [])
    return _SnapshotComparison([], [value.name for value in differing])


def _find_zero_gradients(optimizer: dict[str, Any]) -> set[int]:
    """Return the parameters whose mean gradient is zero but for rounding, by their index."""
    sizes: dict[int, float] = {}
    for index, state in optimizer["state"].items():
        for name in MEAN_GRADIENT_NAMES:
            if isinstance(state.get(name), Tensor):
                sizes[index] = float(state[name].double().square().mean().sqrt())
    largest = max(sizes.values(), default=0.0)
    return {index for index, size in sizes.items() if size <= ZERO_GRADIENT_SHARE * largest}


def _pair_values(
    first: Snapshot, second: Snapshot, kinds: dict[str, str] | None
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (kind, name, value, value) of the tensors and the optimizer's state of two snapshots.

    `kinds` has the kind of each tensor to compare, in order; None compares all, as weights.
    """
    tensors = first.tensors()
    second_tensors = second.tensors()
    if kinds is None:
        kinds = dict.fromkeys(tensors, "weights")
    for name, kind in kinds.items():
        if name in tensors and name in second_tensors:  # a tied weight is stored once
            yield kind, name, tensors[name], second_tensors[name]
    yield from _pair_optimizer_values(first.state()["optimizer"], second.state()["optimizer"])


def _pair_optimizer_values(
    first: dict[str, Any], second: dict[str, Any]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (kind, name, value, value) of the state and the settings of two optimizers."""
    for index, state in first["state"].items():
        second_state = second["state"].get(index, {})
        for name, value in state.items():
            yield "optimizer", f"{name} of parameter {index}", value, second_state.get(name)
    groups = zip(first["param_groups"], second["param_groups"], strict=False)
    for index, (group, second_group) in enumerate(groups):
        for name, value in group.items():
            yield "optimizer", f"{name} of group {index}", value, second_group.get(name)


def _measure_distance(a: Any, b: Any) -> float:
    """Return the norm of the difference over the larger norm: 0 for equal bits.

    Values that cannot be subtracted have the distance infinity.
    """
    if fingerprint(a) == fingerprint(b):
        return 0.0
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return math.inf
    if a.shape != b.shape:
        return math.inf
    a = a.double()
    b = b.double()
    size = float(max(a.norm(), b.norm()))
    if size == 0:
        return 1e-300  # zeros of different signs: not equal, but as close as can be
    return float((a - b).norm()) / size

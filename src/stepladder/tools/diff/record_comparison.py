"""Compare the records of two runs: their settings, and the first step at which they diverge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError, to_one_line
from stepladder.storage.run_files import RESULT_FILE, find_snapshots
from stepladder.tools.diff.recorded_run import RecordedRun, pair_by_step
from stepladder.tools.report.record import read_result

MAX_TENSORS_SHOWN = 5  # of two snapshots
JOB_HASH = "job_sha256"
# The kind of cause that a setting stands for; any other setting is of the kind "setting".
KIND_OF_SETTING = {
    "lr": "learning rate",
    "threads": "threads",
    "machine": "processor",
    "num_samples": "data",
    "chunks": "data",
    "init_from": "initial weights",
}
KIND_OF_ENVIRONMENT = {
    "python": "versions",
    "torch": "versions",
    "numpy": "versions",
    "cpu_capability": "processor",
}
NOT_A_SETTING = "recipe"  # the name of the job, which alone changes no result
# Which processes compute a run: others round differently, and draw other random numbers.
WHO_COMPUTES = {"processes", "threads"}
# Without exact mode or a schedule these have no effect, so some runs did not record them.
OPTIONAL_SETTINGS = ("threads", "machine", "epochs")


@dataclass(frozen=True)
class DifferingValue:
    """A value that differs in the two runs: one row of the table."""

    name: str
    first: Any
    second: Any

    @property
    def is_in_both(self) -> bool:
        """Whether both runs recorded it; older versions recorded less."""
        return self.first is not None and self.second is not None

    @property
    def is_setting(self) -> bool:
        """Whether it can change the result of a run."""
        if self.name == NOT_A_SETTING:
            return False
        return self.is_in_both or self.name not in OPTIONAL_SETTINGS


@dataclass(frozen=True)
class _Divergence:
    """The first step whose records differ, and the records of it that differ."""

    step: int
    kind: str  # sample order, loss, learning rate or weights
    name: str
    values: list[DifferingValue]


class RecordComparison:
    """The differences between the records of two runs.

    `settings`, `environment` (versions and processor) and `remaining` have the values that differ.
    """

    def __init__(self, first: RecordedRun, second: RecordedRun) -> None:
        self.runs = (first, second)
        self.is_exact = first.is_exact and second.is_exact
        self.tolerance = max(first.tolerance, second.tolerance)
        settings = _find_differing_values(first.settings, second.settings)
        self.settings = [value for value in settings if value.is_setting]
        environment = _find_differing_values(first.environment, second.environment)
        self.environment = [value for value in environment if value.is_in_both]
        self.has_other_code = any(value.name == JOB_HASH for value in self.environment)
        recipes = [value for value in settings if value.name == NOT_A_SETTING]
        has_other_settings = any(value.name not in WHO_COMPUTES for value in self.settings)
        if has_other_settings and self.has_other_code:
            self.settings[:0] = recipes
        configs = _find_differing_values(first.config.config, second.config.config)
        self.remaining = recipes + configs
        # How many steps both runs have recorded, up to the first one that differs, and the last.
        self.common_steps = 0
        self.last_common_step = 0
        # Tensors that differ because their gradient is zero but for rounding.
        self.of_zero_gradient: dict[str, None] = {}
        self.divergence = self._find_divergence()
        self._add_process_counts()

    def _add_process_counts(self) -> None:
        """Compare how many processes trained the step at which the runs diverge."""
        step = self.last_common_step
        if self.divergence:
            step = self.divergence.step
        first, second = self.runs
        counts = _find_differing_values(
            {"processes": first.world_size_at(step)}, {"processes": second.world_size_at(step)}
        )
        counts = [count for count in counts if count.is_in_both]
        if first.by_microbatch and second.by_microbatch:
            self.remaining += counts
        else:
            # A rank computes its share in one pass, so the number of processes changes batch
            # statistics and random numbers.
            self.settings[:0] = counts
            self.settings.sort(key=lambda value: value.name in WHO_COMPUTES)

    @property
    def values(self) -> list[DifferingValue]:
        """Everything that differs, the settings first."""
        names = {value.name for value in self.settings}
        details = [v for v in self.environment + self.remaining if v.name not in names]
        values = self.settings + details
        if self.divergence:
            values += self.divergence.values
        return values

    def _find_divergence(self) -> _Divergence | None:
        """Find the earliest divergence.

        Within a step, samples come before the loss, and the weights after a step come after both.
        """
        divergence = self._compare_curves()
        divergence = self._compare_samples(self.last_common_step) or divergence
        last_equal_step = self.last_common_step
        if divergence:
            last_equal_step = divergence.step - 1
        divergence = self._compare_snapshots(last_equal_step) or divergence
        return divergence or self._compare_results()

    def _compare_curves(self) -> _Divergence | None:
        first_run, second_run = self.runs
        for first, second in pair_by_step(first_run.step_lines(), second_run.step_lines()):
            step = first["step"]
            self.common_steps += 1
            self.last_common_step = step
            is_same_loss = math.isclose(first["loss"], second["loss"], rel_tol=self.tolerance)
            if is_same_loss and first["lr"] == second["lr"]:
                continue
            kind = "learning rate" if is_same_loss else "loss"
            values = [
                DifferingValue(f"{name} of step {step}", first[name], second[name])
                for name in ("loss", "lr")
                if first[name] != second[name]
            ]
            return _Divergence(step, kind, kind, values)
        if not self.common_steps:
            raise InputError(
                "the two runs have no step in common", "stepladder watch RUN_DIR shows its steps"
            )
        return None

    def _compare_samples(self, last_step: int) -> _Divergence | None:
        """Find a step whose samples differ although both runs have the same plan.

        If the plans differ, a setting differs as well, and explains the sample order.
        """
        first, second = self.runs
        if first.plan != second.plan:
            return None
        steps = first.sample_differences.keys() | second.sample_differences.keys()
        differing = [
            step
            for step in steps
            if first.sample_differences[step] != second.sample_differences[step]
        ]
        if not differing or min(differing) > last_step:
            return None
        step = min(differing)
        value = DifferingValue(
            f"sample order of step {step}",
            _describe_samples(first, step),
            _describe_samples(second, step),
        )
        return _Divergence(step, "sample order", "samples", [value])

    def _compare_snapshots(self, last_step: int) -> _Divergence | None:
        first_run, second_run = self.runs
        first = find_snapshots(first_run.run_dir)
        second = find_snapshots(second_run.run_dir)
        for step in sorted(first.keys() & second.keys()):
            if step > last_step:
                break
            paths = (first[step], second[step])
            tensors = compare_tensors(step, paths, self.tolerance, first_run.problems)
            values = tensors.values
            self.of_zero_gradient |= dict.fromkeys(tensors.of_zero_gradient)
            if values:
                return _Divergence(step, "weights", values[0].name, values)
        return None

    def _compare_results(self) -> _Divergence | None:
        """Compare the hashes of the final weights if both runs have the same number of steps."""
        first, second = (read_result(run.run_dir / RESULT_FILE) for run in self.runs)
        if not self.is_exact or first is None or second is None:
            return None
        if first.steps != second.steps or first.weights_sha256 == second.weights_sha256:
            return None
        value = DifferingValue(
            "weights_sha256", first.weights_sha256[:16], second.weights_sha256[:16]
        )
        return _Divergence(first.steps, "weights", "weights", [value])


def _describe_samples(run: RecordedRun, step: int) -> str:
    return "other samples than planned" if run.sample_differences[step] else "as planned"


@dataclass(frozen=True)
class _TensorComparison:
    """What differs in two snapshots: rows of the table, and tensors that count as equal."""

    values: list[DifferingValue]
    of_zero_gradient: list[str]


def compare_tensors(
    step: int, paths: tuple[Path, Path], tolerance: float, problems: list[str]
) -> _TensorComparison:
    """Return what differs in two snapshots: a few tensors, and all settings of the optimizer.

    A damaged snapshot is added to the problems.
    """
    from stepladder.storage.snapshot_slices import DamagedSnapshot  # late: torch
    from stepladder.tools.verify.trial import compare_snapshots

    tensors: list[DifferingValue] = []
    optimizer_settings: list[DifferingValue] = []
    try:
        comparison = compare_snapshots(*paths, tolerance)
    except DamagedSnapshot as error:
        problems.append(f"a snapshot of step {step} is damaged ({error})")
        return _TensorComparison([], [])
    for tensor in comparison.differing:
        value = DifferingValue(
            f"{tensor.kind} {tensor.name} after step {step}",
            _describe_value(tensor.first),
            _describe_value(tensor.second),
        )
        if " of group " in value.name:
            optimizer_settings.append(value)
        else:
            tensors.append(value)
    values = tensors[:MAX_TENSORS_SHOWN] + optimizer_settings
    return _TensorComparison(values, comparison.of_zero_gradient)


def _find_differing_values(first: dict[str, Any], second: dict[str, Any]) -> list[DifferingValue]:
    """Return the values that differ in two dictionaries, in their order; None for a missing one."""
    values = (DifferingValue(name, first.get(name), second.get(name)) for name in first | second)
    return [value for value in values if value.first != value.second]


def _describe_value(value: Any) -> str:
    """Return a number or text as it is, and a tensor as its norm and a hash of its bits."""
    from stepladder.train.fingerprints import fingerprint  # late: torch

    if not hasattr(value, "shape"):
        return to_one_line(repr(value))
    return f"norm {float(value.double().norm()):.12g}, bits {fingerprint(value).hex()[:8]}"

"""What two run directories say: the settings that differ, and the first step whose records do."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.jsonl import JsonlReader, Line
from stepladder.core.plan import Plan
from stepladder.core.typed_file import convert
from stepladder.storage.audit import (
    SurvivingSteps,
    find_surviving_steps,
    read_snapshot_chains,
    verify_ledgers,
)
from stepladder.storage.run_config import open_config
from stepladder.storage.run_files import METRICS_FILE, RESULT_FILE, SNAPSHOTS_FOLDER, list_snapshots
from stepladder.tools.report.record import StoredConfig, is_metrics_line, read_result

TOLERANCE = 1e-5  # relative, of a loss; in exact mode every bit counts
MOST_TENSORS = 5  # that are shown of two snapshots
CODE = "job_sha256"
# What a setting speaks for, where it is more than one of many settings; and what the environment
# speaks for.
SETTINGS = {
    "lr": "learning rate",
    "threads": "threads",
    "machine": "processor",
    "num_samples": "data",
}
SETTINGS |= {"chunks": "data", "init_from": "initial weights"}
ENVIRONMENT = dict.fromkeys(("python", "torch", "numpy"), "versions") | {
    "cpu_capability": "processor"
}
NO_SETTING = ("recipe",)  # a name
NOT_ALWAYS_KEPT = (
    "threads",
    "machine",
    "epochs",
)  # without exact mode, or a schedule, they decide nothing


@dataclass(frozen=True)
class Unlike:
    """One row of the table: what both runs say of one thing."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Parting:
    """The first step whose records differ. kind: sample order, loss, learning rate or weights."""

    step: int
    kind: str
    what: str
    records: list[Unlike]


class Kept:
    """What one run directory keeps of its run. Raises InputError where it is none, or has no step."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        with open_config(run_dir) as config:
            self.config, self.plan = convert(config, StoredConfig), Plan.from_json(config["plan"])
            self.by_microbatch = bool(convert(config.get("derived", {}), dict).get("by_microbatch"))
        self.definition, self.environment = self.config.definition, self.config.environment
        self.exact = self.definition.get("sync") == "exact"
        self.problems: list[str] = []
        if next(self.steps(), None) is None:
            raise InputError(
                f"{run_dir} has no step in its {METRICS_FILE} yet", f"stepladder watch {run_dir}"
            )

    def steps(self) -> Iterator[Line]:
        return steps_in(self.run_dir)

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides what is computed, and threads where they were kept."""
        return {
            **self.definition,
            "threads": self.definition.get("threads", self.environment.get("threads")),
        }

    @cached_property
    def line(self) -> list[SurvivingSteps]:
        """The attempts whose steps the weights contain."""
        chains = read_snapshot_chains(self.run_dir)
        _, attempts = verify_ledgers(self.run_dir, self.plan, chains, self.problems)
        return find_surviving_steps(attempts, self.problems)

    def processes(self, step: int) -> int | None:
        """How many trained the step."""
        return next(
            (one.attempt.world_size for one in self.line if one.first <= step <= one.last), None
        )

    @cached_property
    def off(self) -> Counter[int]:
        """By step, how far the samples that all ranks trained are from the planned ones; 0 is not
        kept.
        """
        found: Counter[int] = Counter()
        for stretch in self.line:
            for wrong in stretch.attempt.mismatches:
                if stretch.first <= wrong.step <= stretch.last:
                    found[wrong.step] = (found[wrong.step] + wrong.digest_difference) % (1 << 64)
        return found

    def snapshots(self) -> dict[int, Path]:
        """By steps done."""
        paths = list_snapshots(self.run_dir / SNAPSHOTS_FOLDER)
        return {
            int(path.name[5:]): path
            for path in paths
            if re.fullmatch("step_[0-9]{8,18}", path.name)
        }


class Records:
    """Both runs' records, compared. common: how many steps both have, up to the first that differs."""

    def __init__(self, one: Kept, other: Kept) -> None:
        self.both = one, other
        self.exact = one.exact and other.exact
        self.tolerance = 0.0 if self.exact else TOLERANCE
        self.settings = [
            record for record in unlike(one.settings, other.settings) if is_setting(record)
        ]
        self.environment = [
            row for row in unlike(one.environment, other.environment) if is_known(row)
        ]
        names = {"recipe": one.definition.get("recipe")}, {"recipe": other.definition.get("recipe")}
        self.others = unlike(*names) + unlike(one.config.config, other.config.config)
        self.common = self.last = 0
        self.parting = self._parting()
        step = self.parting.step if self.parting else self.last
        processes = unlike(*({"processes": kept.processes(step)} for kept in self.both))
        processes = [row for row in processes if is_known(row)]
        if one.by_microbatch and other.by_microbatch:
            self.others += processes
        else:  # a share in one pass: what relates samples to each other, or is random, is another
            self.settings[:0] = processes

    @property
    def rows(self) -> list[Unlike]:
        """Everything that differs, the settings first."""
        told = {record.name for record in self.settings}
        others = [record for record in self.environment + self.others if record.name not in told]
        return self.settings + others + (self.parting.records if self.parting else [])

    def _parting(self) -> Parting | None:
        """In a step the order is: its samples, its loss, its rate, the weights after it."""
        found = self._by_curves()
        found = self._by_samples(found.step if found else self.last) or found
        found = self._by_snapshots(found.step - 1 if found else self.last) or found
        return found or self._by_result()

    def _by_curves(self) -> Parting | None:
        one, other = (kept.steps() for kept in self.both)
        for a, b in in_step(one, other):
            self.common, self.last = self.common + 1, a["step"]
            same = math.isclose(a["loss"], b["loss"], rel_tol=self.tolerance)
            if not same or a["lr"] != b["lr"]:
                step, kind = a["step"], "learning rate" if same else "loss"
                rows = [
                    Unlike(f"{name} of step {step}", a[name], b[name]) for name in ("loss", "lr")
                ]
                return Parting(step, kind, kind, [row for row in rows if row.first != row.second])
        if not self.common:
            raise InputError(
                "the two runs have no step in common", "stepladder watch RUN_DIR shows its steps"
            )
        return None

    def _by_samples(self, last: int) -> Parting | None:
        """Where both had the same plan. With another one there is another setting, which explains
        the order.
        """
        one, other = self.both
        if one.plan != other.plan:
            return None
        steps = [
            step for step in one.off.keys() | other.off.keys() if one.off[step] != other.off[step]
        ]
        if not steps or min(steps) > last:
            return None
        step = min(steps)
        said = [
            "other samples than planned" if kept.off[step] else "as planned" for kept in self.both
        ]
        return Parting(
            step, "sample order", "samples", [Unlike(f"sample order of step {step}", *said)]
        )

    def _by_snapshots(self, last: int) -> Parting | None:
        """After the steps up to `last`."""
        one, other = (kept.snapshots() for kept in self.both)
        for step in sorted(one.keys() & other.keys()):
            if step <= last:
                rows = unlike_tensors(
                    step, (one[step], other[step]), self.tolerance, self.both[0].problems
                )
                if rows:
                    return Parting(step, "weights", rows[0].name, rows)
        return None

    def _by_result(self) -> Parting | None:
        """After the last step, where both runs have come to it."""
        one, other = (read_result(kept.run_dir / RESULT_FILE) for kept in self.both)
        if not (self.exact and one and other and one.steps == other.steps):
            return None
        if one.weights_sha256 == other.weights_sha256:
            return None
        rows = [Unlike("weights_sha256", one.weights_sha256[:16], other.weights_sha256[:16])]
        return Parting(one.steps, "weights", "weights", rows)


def steps_in(run_dir: Path) -> Iterator[Line]:
    """A line for each step."""
    return (
        line
        for line in JsonlReader(run_dir / METRICS_FILE, is_metrics_line).read_new()
        if "lr" in line
    )


def unlike_tensors(
    step: int, paths: tuple[Path, Path], tolerance: float, problems: list[str]
) -> list[Unlike]:
    """What differs in two snapshots of a step: a few tensors, and each setting of the optimizer."""
    from stepladder.storage.snapshot_slices import DamagedSnapshot  # late: torch
    from stepladder.tools.verify.trial import WEIGHTS_TO_LOSS, distance, pairs

    rows: list[Unlike] = []
    try:
        for kind, name, a, b in pairs(*paths):
            if not distance(a, b) <= WEIGHTS_TO_LOSS * tolerance:  # so that NaN differs
                rows.append(Unlike(f"{kind} {name} after step {step}", shown(a), shown(b)))
    except DamagedSnapshot as error:
        problems.append(f"a snapshot of step {step} is damaged ({error})")
        return []
    groups = [row for row in rows if " of group " in row.name]
    return [*[row for row in rows if row not in groups][:MOST_TENSORS], *groups]


def is_setting(record: Unlike) -> bool:
    """Whether it can make another result; one that only one run has kept says nothing of the other."""
    return record.name not in NO_SETTING and (
        is_known(record) or record.name not in NOT_ALWAYS_KEPT
    )


def is_known(record: Unlike) -> bool:
    """Whether both runs have kept it; older ones kept less."""
    return record.first is not None and record.second is not None


def unlike(one: dict[str, Any], other: dict[str, Any]) -> list[Unlike]:
    """What the two do not have in common, in their order."""
    rows = (Unlike(name, one.get(name), other.get(name)) for name in one | other)
    return [row for row in rows if row.first != row.second]


def in_step(one: Iterator[Line], other: Iterator[Line]) -> Iterator[tuple[Line, Line]]:
    """The lines of steps that both have."""
    a, b = next(one, None), next(other, None)
    while a is not None and b is not None:
        mine, theirs = a["step"], b["step"]
        if mine == theirs:
            yield a, b
        if mine <= theirs:
            a = next(one, None)
        if theirs <= mine:
            b = next(other, None)


def shown(value: Any) -> str:
    """A number or text as it is; of a tensor its norm, and its bits where that is not enough."""
    from stepladder.train.fingerprints import fingerprint  # late: torch

    if not hasattr(value, "shape"):
        return to_one_line(repr(value))
    return f"norm {float(value.double().norm()):.12g}, bits {fingerprint(value).hex()[:8]}"

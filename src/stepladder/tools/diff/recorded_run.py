"""The settings, losses, samples and snapshots that a run directory has recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.core.jsonl import Line
from stepladder.core.plan import Plan
from stepladder.core.typed_file import convert
from stepladder.storage.audit import (
    SurvivingSteps,
    find_surviving_steps,
    read_snapshot_chains,
    verify_ledgers,
)
from stepladder.storage.metrics_file import read_step_lines
from stepladder.storage.run_config import open_config
from stepladder.storage.run_files import METRICS_FILE
from stepladder.tools.report.record import StoredConfig

LOSS_TOLERANCE = 1e-5  # relative; in exact mode all bits must be equal


class RecordedRun:
    """The records of one run.

    Raises:
        InputError: The folder is no run directory, or has no step.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        with open_config(run_dir) as config:
            self.config = convert(config, StoredConfig)
            self.plan = Plan.from_json(config["plan"])
            derived = convert(config.get("derived", {}), dict)
            self.by_microbatch = bool(derived.get("by_microbatch"))
        self.definition = self.config.definition
        self.environment = self.config.environment
        self.is_exact = self.definition.get("sync") == "exact"
        self.tolerance = 0.0 if self.is_exact else LOSS_TOLERANCE
        self.problems: list[str] = []
        if next(self.step_lines(), None) is None:
            raise InputError(
                f"{run_dir} has no step in its {METRICS_FILE} yet", f"stepladder watch {run_dir}"
            )

    def step_lines(self) -> Iterator[Line]:
        return read_step_lines(self.run_dir, self.problems)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that decide what is computed, and the threads if they were recorded."""
        threads = self.definition.get("threads", self.environment.get("threads"))
        return {**self.definition, "threads": threads}

    @cached_property
    def surviving_steps(self) -> list[SurvivingSteps]:
        """The steps of each attempt that the final weights contain."""
        chains = read_snapshot_chains(self.run_dir)
        _, attempts = verify_ledgers(self.run_dir, self.plan, chains, self.problems)
        return find_surviving_steps(attempts, self.problems)

    def world_size_at(self, step: int) -> int | None:
        """Return the number of processes that trained a step, or None without a proof of it."""
        for steps in self.surviving_steps:
            if steps.first <= step <= steps.last:
                return steps.attempt.world_size
        return None

    @cached_property
    def sample_differences(self) -> Counter[int]:
        """The digest of the trained samples less that of the planned samples, by step.

        Steps that trained the planned samples are absent.
        """
        differences: Counter[int] = Counter()
        for steps in self.surviving_steps:
            for mismatch in steps.attempt.mismatches:
                if steps.first <= mismatch.step <= steps.last:
                    total = differences[mismatch.step] + mismatch.digest_difference
                    differences[mismatch.step] = total % (1 << 64)
        return differences


def pair_by_step(first: Iterator[Line], second: Iterator[Line]) -> Iterator[tuple[Line, Line]]:
    """Yield the two lines of each step that both iterators have."""
    first_line = next(first, None)
    second_line = next(second, None)
    while first_line is not None and second_line is not None:
        first_step = first_line["step"]
        second_step = second_line["step"]
        if first_step == second_step:
            yield first_line, second_line
        if first_step <= second_step:
            first_line = next(first, None)
        if second_step <= first_step:
            second_line = next(second, None)

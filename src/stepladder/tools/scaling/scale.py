"""`stepladder scale`: what was measured on several sizes, in sentences and for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepladder.tools.scaling.loss import (
    MOST_PROCESSES,
    PARTS,
    UNTOLD,
    Size,
    efficiency,
    fitted,
    scaling_loss,
    shares_lost,
    speedup,
    useful_range,
)

# What can be told of a script from outside: other words where it means something else than in a job.
OUTSIDE = {
    **PARTS,
    "data": ("waiting for a DataLoader", "more workers, or data in memory"),
    "communication": ("its thread sleeps: in an all-reduce, or for a disk", "fewer steps with larger batches"),
    "replicated": ("the optimizer, which every process runs in full", "a larger batch"),
    UNTOLD: ("forward, backward and all-reduce of a GPU, which nobody sees from outside", "stepladder profile"),
}
LEAST_SHARE = 0.02  # of a step's time, to be worth a word
MOST_BUSY = 0.1


@dataclass(frozen=True)
class Scaling:
    """What `scale` has found. weak: the batch grew with the number of processes.  outside: a script, whose samples
    nobody counted."""

    job: str
    weak: bool
    sizes: list[Size]
    outside: bool = False

    @property
    def kind(self) -> str:
        if self.outside and self.weak:
            return "weak scaling: a script's batch per process stays as it is, so N processes do N times the work"
        if self.outside:
            return "strong scaling: the script shares out one batch, as --strong says"
        return "weak scaling: a fixed batch per process" if self.weak else "strong scaling: a fixed global batch"

    @property
    def parts(self) -> dict[str, tuple[str, str]]:
        """What a step consists of, and for each part what it means here, and what helps."""
        return OUTSIDE if self.outside else PARTS

    def as_json(self) -> dict[str, Any]:
        one, law = self.sizes[0], fitted(self.sizes)
        useful, low, high = useful_range(self.sizes)
        sizes = [
            {
                "nproc": size.nproc, "nodes": size.nodes, "seconds_per_step": size.seconds, "rounds": size.rounds,
                "samples_per_second": None if self.outside else size.batch / size.seconds,
                "speedup": speedup(size, one), "efficiency": efficiency(size, one), "launch_seconds": size.launch,
                "lost": {name: None if math.isnan(s) else s for name, s in scaling_loss(size, one).items()},
            }
            for size in self.sizes
        ]  # fmt: skip
        predicted = {"contention": law.contention, "coherency": law.coherency, "useful_nproc": useful}
        return {
            "schema": 1, "job": self.job, "outside": self.outside, "weak": self.weak, "sizes": sizes,
            "fit": {**predicted, "useful_range": [low, high]},
        }  # fmt: skip

    def verdicts(self) -> list[str]:
        """A sentence per size, and one on how many processes are useful."""
        one = self.sizes[0]
        lines = [verdict(size, one, self.parts) for size in self.sizes[1:]]
        if len(self.sizes) > 1:
            lines.append(predicted(self.sizes))
        busy = one.parts["cores"] / one.seconds
        if busy > MOST_BUSY:
            lines.append(
                f"This machine was busy: on {one.nproc} process(es), for {busy:.0%} of a step's time no core was"
                " free. Other programs are part of these numbers; measure again when it is quiet."
            )
        if one.optimizers > 1:
            lines.append(f"{one.optimizers} optimizers step in turn: a step here is one of theirs.")
        return lines


def predicted(sizes: list[Size]) -> str:
    """Up to how many processes are useful."""
    useful, low, high = useful_range(sizes)
    if useful == MOST_PROCESSES:
        return "No loss that grows with the number of processes was measured: nothing is said of more of them."
    span = f", {low} to {high} as the rounds vary" if low < high else ""
    return f"By the fitted law, efficiency stays above one half up to {useful} process(es){span}."


def verdict(size: Size, one: Size, meaning: Mapping[str, tuple[str, str]] = PARTS) -> str:
    """How fast, and where the lost time went, largest part first."""
    share = efficiency(size, one)
    start = (
        f"{size.nproc} processes: {speedup(size, one):.2f} times as fast as {one.nproc}, efficiency {share:.0%}"
    )
    parts = {name: part for name, part in shares_lost(size, one).items() if part > LEAST_SHARE}
    if share > 0.98 or not parts:
        return f"{start}."
    named = sorted(parts, key=lambda name: -parts[name])
    amounts = ", ".join(f"{name} {parts[name]:.0%}" for name in named)
    what, helps = meaning[named[0]]
    return f"{start}. Of each step's time, lost to: {amounts}. Most to {named[0]}: {what}. What helps: {helps}."

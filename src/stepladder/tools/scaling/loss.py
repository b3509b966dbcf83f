"""Where a step's time goes on N processes, and what of it is lost against N times the speed of one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

TIMES = "times.npz"  # what the ranks of a job leave in its run directory

# What a step consists of, and what can be done where it does not shrink with the number of
# processes.
PARTS = {
    "data": ("reading samples", "more workers, or data in memory"),
    "compute": (
        "forward and backward take longer than their share: processes share caches and memory, and small batches"
        " are less efficient",
        "a larger batch",
    ),
    "cores": (
        "ready to compute, but no core was free: of other ranks, other programs, a busy machine",
        "no more processes than free cores",
    ),
    "imbalance": ("some ranks always take longer than others", "equal shares, equal machines"),
    "waiting": ("in each step another rank is late", "quieter machines"),
    "communication": (
        "the all-reduce, as far as backward does not hide it",
        "fewer steps with larger batches",
    ),
    "replicated": ("what every process does in full, such as the optimizer", "a larger batch"),
}
UNTOLD = "not told apart"
MOST_PROCESSES = 4096  # that a fit is asked about
DRAWS = 200  # of rounds, to see how far a fit depends on them
TRIM = 0.1  # of the steps, at either end: one pause of the machine is no property of the job


def trimmed(times: np.ndarray) -> np.ndarray:
    """Without the shortest and longest steps. times: shape (ranks, steps, COLUMNS)."""
    order = np.argsort(times[:, :, 0].max(0))
    cut = int(len(order) * TRIM)
    return times[:, order[cut : len(order) - cut]]


def parts_of(times: np.ndarray) -> dict[str, float]:
    """Mean seconds per step by part; they add up to the step's. times: shape (ranks, steps,
    COLUMNS).

    A rank's own work is data and compute, measured before the ranks meet. Who meets later than the
    mean keeps the others waiting: always the same rank (imbalance), or now this one, now that
    (waiting). A column of NaN, where the ranks could not tell, makes the parts that follow from it
    NaN."""
    times = trimmed(times)
    whole, data, compute, wait, _optimizer, _queued = times.mean((0, 1))
    cores = np.minimum(times[:, :, 5], times[:, :, 2]).mean()
    own = times[:, :, 1] + times[:, :, 2]
    imbalance = own.mean(1).max() - own.mean()
    waiting = own.max(0).mean() - own.mean(1).max()
    communication = np.maximum(0.0, wait - imbalance - waiting)
    known = {
        "data": data,
        "compute": compute - np.nan_to_num(cores),
        "cores": cores,
        "imbalance": imbalance,
    }
    known |= {"waiting": waiting, "communication": communication}
    known["replicated"] = whole - sum(
        np.nan_to_num(cores) if name == "cores" else s for name, s in known.items()
    )
    return {name: float(seconds) for name, seconds in known.items()}


@dataclass(frozen=True)
class Size:
    """What was measured on `nproc` processes. Seconds; one entry per round in `rounds`.

    nodes: on how many machines.  optimizers: that step in turn.  batch: samples per step, or what
    stands for them.  parts: by PARTS, NaN where it cannot be told.  launch: from the ranks' start
    to their first step."""

    nproc: int
    batch: int
    rounds: list[float]
    parts: dict[str, float]
    launch: float
    nodes: int = 1
    optimizers: int = 1

    @property
    def seconds(self) -> float:
        return float(np.median(self.rounds))

    def speedup(self, one: Size) -> float:
        """Times the samples per second of the smallest size. With a fixed batch: its seconds over
        these.
        """
        return (self.batch / self.seconds) / (one.batch / one.seconds)

    def efficiency(self, one: Size) -> float:
        return self.speedup(one) * one.nproc / self.nproc

    def lost(self, one: Size) -> dict[str, float]:
        """Seconds per step that each part takes beyond its ideal, which shrinks or grows as the
        share does.
        """
        share = self.batch / one.batch * one.nproc / self.nproc
        return {name: self.parts[name] - one.parts[name] * share for name in PARTS}

    def shares_lost(self, one: Size) -> dict[str, float]:
        """The same as shares of the step's time, which add up to what the efficiency lacks. Parts
        that could not be told are one, UNTOLD."""
        shares = {name: s / self.seconds for name, s in self.lost(one).items() if not math.isnan(s)}
        if len(shares) < len(PARTS):
            shares[UNTOLD] = 1 - self.efficiency(one) - sum(shares.values())
        return shares


@dataclass(frozen=True)
class Fit:
    """Universal Scalability Law (Gunther 2007, chapter 4): relative capacity N / (1 + s (N-1) + k N
    (N-1)).

    contention: s, the part that does not run in parallel.  coherency: k, what each pair of
    processes costs."""

    contention: float
    coherency: float

    def speedup(self, nproc: Any) -> Any:
        """nproc: a number, or an array of them."""
        return nproc / (1 + self.contention * (nproc - 1) + self.coherency * nproc * (nproc - 1))

    def useful(self) -> int:
        """The largest number of processes, up to MOST_PROCESSES, with an efficiency of at least one
        half.
        """
        sizes = np.arange(1.0, MOST_PROCESSES + 1)
        return int(sizes[self.speedup(sizes) / sizes >= 0.5].max())


def fit(sizes: list[int], speedups: list[float]) -> Fit:
    """Least squares with both parameters not negative. Two sizes leave room for contention only."""
    n = np.array(sizes, dtype=float)
    excess = n / np.array(speedups) - 1  # = s (n-1) + k n (n-1)
    columns = np.stack([n - 1, n * (n - 1)], 1)
    candidates = [np.zeros(2)]
    for keep in ([0], [1], [0, 1]) if len(sizes) > 2 else ([0],):
        solved = np.zeros(2)
        solved[keep] = np.linalg.lstsq(columns[:, keep], excess, rcond=None)[0]
        if (solved >= 0).all():
            candidates.append(solved)
    best = min(candidates, key=lambda c: float(((columns @ c - excess) ** 2).sum()))
    return Fit(float(best[0]), float(best[1]))


def fitted(sizes: list[Size], seconds: list[float] | None = None) -> Fit:
    """seconds: per step of each size, instead of its median's."""
    rates = [
        size.batch / s
        for size, s in zip(sizes, seconds or [size.seconds for size in sizes], strict=True)
    ]
    return fit([size.nproc for size in sizes], [rate / rates[0] * sizes[0].nproc for rate in rates])


def useful_range(sizes: list[Size]) -> tuple[int, int, int]:
    """Useful number of processes, and the range that 80 % of refits with rounds drawn anew fall
    into.
    """
    random = np.random.default_rng(0)
    found = []
    for _ in range(DRAWS):
        drawn = [float(np.median(random.choice(size.rounds, len(size.rounds)))) for size in sizes]
        found.append(fitted(sizes, drawn).useful())
    low, high = np.quantile(found, [0.1, 0.9])
    return fitted(sizes).useful(), int(low), int(high)

"""Divide a step's time into parts, and attribute lost efficiency to them.

Efficiency is lost where a part takes longer on N processes than ideal scaling allows. The
Universal Scalability Law, fitted to the speed-ups, predicts how many processes are useful.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

TIMES_FILE = "times.npz"  # written to the run directory by the ranks of a job

# The parts of a step: why each may not shrink with the number of processes, and what helps.
STEP_PARTS = {
    "data": ("reading samples", "more workers, or data in memory"),
    "compute": (
        "forward and backward take longer than their share: processes share caches and memory, and"
        " small batches are less efficient",
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
UNKNOWN_PART = "not told apart"
MAX_PREDICTED_PROCESSES = 4096
NUM_RESAMPLES = 200  # of the rounds, for the uncertainty of a fit
TRIMMED_SHARE = 0.1  # of the steps, at either end: a pause of the machine is not the job's
MIN_USEFUL_EFFICIENCY = 0.5


def trim_steps(times: np.ndarray) -> np.ndarray:
    """Return `times`, of shape (ranks, steps, COLUMNS), without its shortest and longest steps."""
    order = np.argsort(times[:, :, 0].max(0))
    cut = int(len(order) * TRIMMED_SHARE)
    return times[:, order[cut : len(order) - cut]]


def compute_parts(times: np.ndarray) -> dict[str, float]:
    """Return the mean seconds per step of each part; they add up to the step's time.

    A rank's work is data and compute, measured before it waits for the other ranks. A rank whose
    work takes longer than the mean delays the others: if it is the same rank in each step, the
    delay is imbalance, else waiting. A column of NaN (not measured) makes the parts that depend on
    it NaN.

    Args:
        times: Seconds, of shape (ranks, steps, COLUMNS).
    """
    times = trim_steps(times)
    total, data, compute, wait, _optimizer, _queued = times.mean((0, 1))
    data_times = times[:, :, 1]
    compute_times = times[:, :, 2]
    queued_times = times[:, :, 5]
    cores = np.minimum(queued_times, compute_times).mean()
    known_cores = np.nan_to_num(cores)
    work = data_times + compute_times
    slowest_rank = work.mean(1).max()
    imbalance = slowest_rank - work.mean()
    waiting = work.max(0).mean() - slowest_rank
    parts = {
        "data": data,
        "compute": compute - known_cores,
        "cores": known_cores,
        "imbalance": imbalance,
        "waiting": waiting,
        "communication": np.maximum(0.0, wait - imbalance - waiting),
    }
    parts["replicated"] = total - sum(parts.values())
    parts["cores"] = cores
    return {name: float(seconds) for name, seconds in parts.items()}


@dataclass(frozen=True)
class SizeResult:
    """The measurements on `nproc` processes of `nodes` machines, in seconds.

    `batch` has the samples per step, or a number in proportion to them. `rounds` has the seconds
    per step of each round, `parts` those of each of STEP_PARTS (NaN if unknown), and `launch` the
    time from the start of the ranks to the end of their first step. So many `optimizers` step in
    turn.
    """

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

    @property
    def samples_per_second(self) -> float:
        return self.batch / self.seconds

    def speedup(self, baseline: SizeResult) -> float:
        """Return the samples per second relative to the baseline, the smallest size."""
        return self.samples_per_second / baseline.samples_per_second

    def efficiency(self, baseline: SizeResult) -> float:
        return self.speedup(baseline) * baseline.nproc / self.nproc

    def lost_seconds(self, baseline: SizeResult) -> dict[str, float]:
        """Return the seconds per step that each part takes beyond ideal scaling.

        Ideally a part takes time in proportion to the samples per process.
        """
        share = self.batch / baseline.batch * baseline.nproc / self.nproc
        return {name: self.parts[name] - baseline.parts[name] * share for name in STEP_PARTS}

    def lost_shares(self, baseline: SizeResult) -> dict[str, float]:
        """Return the lost seconds as shares of the step, which add up to 1 - efficiency.

        All parts that are unknown are one, UNKNOWN_PART.
        """
        shares = {
            name: seconds / self.seconds
            for name, seconds in self.lost_seconds(baseline).items()
            if not math.isnan(seconds)
        }
        if len(shares) < len(STEP_PARTS):
            shares[UNKNOWN_PART] = 1 - self.efficiency(baseline) - sum(shares.values())
        return shares


@dataclass(frozen=True)
class ScalingLaw:
    """The Universal Scalability Law (Gunther 2007, chapter 4).

    The relative capacity of N processes is N / (1 + s (N-1) + k N (N-1)), where the contention s
    is the share that does not run in parallel, and the coherency k is what each pair costs.
    """

    contention: float
    coherency: float

    def speedup(self, nproc: Any) -> Any:
        """Return the speed-up of a number of processes, or of an array of them."""
        peers = nproc - 1
        return nproc / (1 + self.contention * peers + self.coherency * nproc * peers)

    def find_useful_size(self) -> int:
        """Return the largest number of processes that has MIN_USEFUL_EFFICIENCY."""
        sizes = np.arange(1.0, MAX_PREDICTED_PROCESSES + 1)
        return int(sizes[self.speedup(sizes) / sizes >= MIN_USEFUL_EFFICIENCY].max())


def fit_law(sizes: list[int], speedups: list[float]) -> ScalingLaw:
    """Return the law with the least squared error and no negative parameter.

    Two sizes can determine the contention only.
    """
    n = np.array(sizes, dtype=float)
    excess = n / np.array(speedups) - 1  # = s (n-1) + k n (n-1)
    columns = np.stack([n - 1, n * (n - 1)], 1)
    candidates = [np.zeros(2)]
    free_parameters = [[0]]
    if len(sizes) > 2:
        free_parameters += [[1], [0, 1]]
    for free in free_parameters:
        solution = np.zeros(2)
        solution[free] = np.linalg.lstsq(columns[:, free], excess, rcond=None)[0]
        if (solution >= 0).all():
            candidates.append(solution)
    errors = [float(((columns @ candidate - excess) ** 2).sum()) for candidate in candidates]
    contention, coherency = candidates[errors.index(min(errors))].tolist()
    return ScalingLaw(contention, coherency)


def fit_results(results: list[SizeResult], seconds: list[float] | None = None) -> ScalingLaw:
    """Fit the law to these seconds per step, or to the medians of the results."""
    seconds = seconds or [result.seconds for result in results]
    rates = [result.batch / s for result, s in zip(results, seconds, strict=True)]
    speedups = [rate / rates[0] * results[0].nproc for rate in rates]
    return fit_law([result.nproc for result in results], speedups)


def estimate_useful_range(results: list[SizeResult]) -> tuple[int, int, int]:
    """Return the useful number of processes, and the bounds of 80 % of its bootstrap estimates."""
    random = np.random.default_rng(0)
    estimates = []
    for _ in range(NUM_RESAMPLES):
        seconds = []
        for result in results:
            resampled = random.choice(result.rounds, len(result.rounds))
            seconds.append(float(np.median(resampled)))
        estimates.append(fit_results(results, seconds).find_useful_size())
    low, high = np.quantile(estimates, [0.1, 0.9])
    return fit_results(results).find_useful_size(), int(low), int(high)

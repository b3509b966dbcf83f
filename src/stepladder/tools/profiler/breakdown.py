"""Divide each rank's step time into parts, from the aligned traces of all ranks.

The result is a number per part and rank, and the operators that take the most time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepladder.core.numbers import format_count
from stepladder.tools.profiler.trace import (
    Collective,
    Event,
    Mask,
    Spans,
    Timeline,
    Trace,
    contains,
    make_spans,
)

# The parts of a step, in the order in which they are matched: each instant belongs to the first
# part that covers it. The optimizer comes late, because a step with a closure (Lightning's)
# contains forward and backward.
PARTS = ("waiting", "communication", "data", "backward", "forward", "optimizer", "other")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")  # calls by which the CPU starts GPU work
MAX_OPERATORS = 10
MAX_QUEUED_SHARE = 0.05  # of a step that counts as undisturbed
MIN_UNDISTURBED_STEPS = 5  # fewer say less than the disturbed ones


@dataclass(frozen=True)
class RankProfile:
    """The profile of one rank; all times are seconds per step."""

    rank: int
    host: str
    steps: int  # recorded
    seconds: float  # of a typical step, as are all times here
    parts: dict[str, float | None]  # None: the trace does not show this part
    overlapped: float  # communication while something computes
    python: float  # the main thread in no operator, not reading data, not waiting
    held_up: float  # at most, by this rank and another one that had work, but no core
    early: bool  # a collective begins while backward still runs
    on_gpu: bool
    peak_bytes: int  # of the process
    peak_gpu_bytes: int | None

    def share(self, part: str) -> float:
        """Return the fraction of the step's time that a part takes, without what held it up."""
        seconds = self.python if part == "python" else self.undisturbed_parts[part]
        return seconds / self.undisturbed_seconds

    @property
    def undisturbed_parts(self) -> dict[str, float]:
        """The parts, less the time for which ranks may have waited for one without a core."""
        parts = {name: seconds or 0.0 for name, seconds in self.parts.items()}
        for name in ("waiting", "communication"):
            parts[name] = max(0.0, parts[name] - self.held_up)
        return parts

    @property
    def undisturbed_seconds(self) -> float:
        return sum(self.undisturbed_parts.values())

    def as_json(self) -> dict[str, Any]:
        """Return bytes and seconds per step; null for a part that the trace does not show."""
        return {
            "rank": self.rank,
            "host": self.host,
            "seconds_per_step": self.seconds,
            **self.parts,
            "overlapped": self.overlapped,
            "python": self.python,
            "held_up": self.held_up,
            "peak_bytes": self.peak_bytes,
            "peak_gpu_bytes": self.peak_gpu_bytes,
        }


@dataclass(frozen=True)
class Operator:
    """An operator's mean over ranks: seconds without the operators that it calls, and its calls."""

    name: str
    seconds: float  # per step
    calls: float  # per step


# -- clocks ----------------------------------------------------------------------------------------


def align_clocks(traces: list[Trace]) -> str:
    """Shift all traces to the first one's clock, and return a text that says how.

    Ranks of one machine read one clock. The clock of another machine is moved by the median
    difference between the ends of the collectives that both took part in, because a collective ends
    everywhere at the same time, except for the latency of the network.
    """
    first = traces[0]
    for trace in traces:
        trace.shift_by(trace.base_us - first.base_us)
    notes = []
    for host in sorted({trace.host for trace in traces} - {first.host}):
        traces_of_host = [trace for trace in traces if trace.host == host]
        pairs = match_collectives([first, traces_of_host[0]])
        if not pairs:
            notes.append(f"{host}: its own clock, because no collective was found to compare")
            continue
        offset_us = median(reference.end - remote.end for reference, remote in pairs)
        for trace in traces_of_host:
            trace.shift_by(offset_us)
        notes.append(
            f"{host}: moved by {offset_us / 1e3:.3f} ms,"
            f" the median over the ends of {len(pairs)} collectives"
        )
    return "; ".join(notes) or "one machine, one clock"


def match_collectives(traces: list[Trace]) -> list[tuple[Collective, ...]]:
    """Return each collective as a tuple of its records on the ranks.

    The n-th collective of a name on one rank is the n-th of that name on the others. A name that
    ranks have called a different number of times is left out.
    """
    matches: list[tuple[Collective, ...]] = []
    names = dict.fromkeys(collective.name for collective in traces[0].collectives)
    for name in names:
        by_rank = [
            [collective for collective in trace.collectives if collective.name == name]
            for trace in traces
        ]
        if len({len(collectives) for collectives in by_rank}) == 1:
            matches += zip(*by_rank, strict=True)
    return matches


# -- parts of a step -------------------------------------------------------------------------------


def measure_steps(traces: list[Trace]) -> NDArray[np.float64]:
    """Return the microseconds of each step, the mean of the ranks."""
    num_steps = min(len(trace.steps) for trace in traces)
    times = [np.diff(trace.steps[:num_steps]).reshape(-1) for trace in traces]
    means: NDArray[np.float64] = np.mean(times, axis=0)
    return means


def find_disturbed_steps(traces: list[Trace]) -> Mask:
    """Return for each step whether a rank had work, but no core, for long, in it or before it.

    A rank that was held up after the last collective of a step is late in the next one.
    """
    disturbed: Mask = _find_longest_queue_us(traces) > MAX_QUEUED_SHARE * measure_steps(traces)
    disturbed[1:] |= disturbed[:-1]
    return disturbed


def _find_longest_queue_us(traces: list[Trace]) -> NDArray[np.float64]:
    """Return for each step the longest time in which a rank had work, but no core."""
    num_steps = len(measure_steps(traces))
    longest: NDArray[np.float64] = np.max([trace.queued_us[:num_steps] for trace in traces], axis=0)
    return longest


def find_crowded_host(traces: list[Trace]) -> str | None:
    """Describe a machine on which the ranks alone have more threads than there are cores."""
    for host in dict.fromkeys(trace.host for trace in traces):
        ranks = [trace.metadata for trace in traces if trace.host == host]
        threads = sum(rank["threads"] for rank in ranks)
        cores = ranks[0]["cores"]
        if threads > cores:
            return f"{format_count(len(ranks), 'rank')} with {threads} threads share {cores} cores"
    return None


def choose_typical_steps(traces: list[Trace]) -> NDArray[np.int64]:
    """Return the indices of the steps that count: more than half of the undisturbed ones.

    They are those nearest to the median time. One interruption of a rank makes a step of all ranks
    long, and would change every mean. A step counts on all ranks or on none, so that the parts of
    the ranks still add up to the step.
    """
    times = measure_steps(traces)
    steps = np.flatnonzero(~find_disturbed_steps(traces))
    if len(steps) < MIN_UNDISTURBED_STEPS or find_crowded_host(traces):
        steps = np.arange(len(times))
    distances = np.abs(times[steps] - np.median(times[steps]))
    by_distance = steps[np.argsort(distances, kind="stable")]
    return np.sort(by_distance[: len(steps) // 2 + 1])


def make_rank_profiles(traces: list[Trace]) -> list[RankProfile]:
    """Return the profile of each rank, from traces that are aligned already."""
    chosen = choose_typical_steps(traces)
    waits = _find_waits(traces)
    held_up_us = 2 * _find_longest_queue_us(traces)[chosen].mean()
    if find_crowded_host(traces):  # by the ranks themselves, which is how this job runs
        held_up_us = 0.0
    return [
        _Breakdown(trace, wait, trace.steps[chosen]).profile(held_up_us)
        for trace, wait in zip(traces, waits, strict=True)
    ]


def _find_waits(traces: list[Trace]) -> list[Spans]:
    """Return each rank's waits: from when it entered a collective until the last rank did."""
    waits: list[list[tuple[float, float]]] = [[] for _ in traces]
    for collectives in match_collectives(traces):
        last_begin = max(collective.begin for collective in collectives)
        for rank_waits, collective in zip(waits, collectives, strict=True):
            end = min(last_begin, collective.end)  # a collective may end before the last enters
            rank_waits.append((collective.begin, max(collective.begin, end)))
    return [make_spans(pairs) for pairs in waits]


class _Breakdown:
    """The masks of one rank's steps on a timeline: one mask for each thing that can go on."""

    def __init__(self, trace: Trace, waits: Spans, steps: Spans) -> None:
        known_parts = trace.find_parts()
        parts = {
            name: make_spans([]) if part is None else part for name, part in known_parts.items()
        }
        kernels = _group_kernels_by_part(trace, parts) if trace.gpu_events else {}
        computing = trace.computing
        communicating = trace.communicating
        in_operators = trace.in_operators
        self.trace = trace
        self.num_steps = len(steps)
        self.unknown = {name for name, part in known_parts.items() if part is None}
        self.backward = parts["backward"]
        self.line = Timeline(
            steps, computing, communicating, in_operators, waits, *parts.values(), *kernels.values()
        )
        covered = self.line.covered_by
        self.in_steps = covered(steps)
        self.computing = covered(computing)
        self.communicating = covered(communicating)
        self.in_operators = covered(in_operators)
        self.exposed = self.communicating & ~self.computing
        self.data = covered(parts["data"])
        self.masks = {name: covered(part) for name, part in parts.items()}
        self.masks["waiting"] = self.exposed & covered(waits)
        self.masks["communication"] = self.exposed
        if trace.gpu_events:  # the time counts in which the GPU computes, not the call's on the CPU
            self.masks["data"] = self.data & ~self.computing
            self.masks |= {name: covered(spans) for name, spans in kernels.items()}

    def profile(self, held_up_us: float) -> RankProfile:
        parts: dict[str, float | None] = {
            name: self.seconds_per_step(mask)
            for name, mask in _assign_parts(self.masks, self.in_steps).items()
        }
        parts |= dict.fromkeys(self.unknown)
        overlapped = self.communicating & self.computing & self.in_steps
        python = self.in_steps & ~self.in_operators & ~self.exposed & ~self.data
        return RankProfile(
            rank=self.trace.rank,
            host=self.trace.host,
            steps=len(self.trace.step_annotations),
            seconds=self.seconds_per_step(self.in_steps),
            parts=parts,
            overlapped=self.seconds_per_step(overlapped),
            python=self.seconds_per_step(python),
            held_up=held_up_us / 1e6,
            early=self.communicates_in_backward(),
            on_gpu=bool(self.trace.gpu_events),
            peak_bytes=self.trace.metadata["peak_bytes"],
            peak_gpu_bytes=self.trace.metadata["peak_gpu_bytes"],
        )

    def seconds_per_step(self, mask: Mask) -> float:
        return self.line.length(mask) / 1e6 / self.num_steps

    def communicates_in_backward(self) -> bool:
        """Return whether a collective begins while backward runs."""
        begins = np.array([collective.begin for collective in self.trace.collectives])
        begins = begins.reshape(-1, 1)
        is_after_begin = self.backward[:, 0] < begins
        is_before_end = begins < self.backward[:, 1]
        return bool((is_after_begin & is_before_end).any())


def _assign_parts(masks: dict[str, Mask], in_steps: Mask) -> dict[str, Mask]:
    """Return disjoint masks of all PARTS, which together are `in_steps`."""
    remaining = in_steps.copy()
    assigned: dict[str, Mask] = {}
    for part in PARTS:
        assigned[part] = remaining & masks.get(part, in_steps)
        remaining &= ~assigned[part]
    return assigned


def _group_kernels_by_part(trace: Trace, parts: dict[str, Spans]) -> dict[str, Spans]:
    """Return the GPU's work by the part of the step in which the CPU launched it."""
    launch_times = {
        event["args"]["correlation"]: trace.begin(event)
        for event in trace.events
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }
    launched: list[tuple[Event, float]] = []
    for kernel in trace.kernels:
        correlation = kernel.get("args", {}).get("correlation")
        if correlation in launch_times:
            launched.append((kernel, launch_times[correlation]))

    def launched_in(part: Spans) -> Iterator[Event]:
        for kernel, time in launched:
            if contains(part, time):
                yield kernel

    return {
        name: trace.spans(launched_in(parts[name])) for name in ("optimizer", "backward", "forward")
    }


# -- operators -------------------------------------------------------------------------------------


def find_top_operators(traces: list[Trace]) -> list[Operator]:
    """Return the operators that take the most time, the slowest first."""
    chosen = choose_typical_steps(traces)
    steps = len(traces) * len(chosen)
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for trace in traces:
        for name, call_seconds in trace.self_times(trace.steps[chosen]):
            seconds[name] += call_seconds
            calls[name] += 1
    operators = []
    for name in seconds:
        operators.append(Operator(name, seconds[name] / steps, calls[name] / steps))
    return sorted(operators, key=lambda operator: -operator.seconds)[:MAX_OPERATORS]

"""Where each rank's steps went, from their traces on one clock: a number per part and rank, the top
operators.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from stepladder.tools.profiler.trace import Collective, Mask, Spans, Timeline, Trace, spans

# A step's whole, in the order in which they are looked for: each instant belongs to the first that
# fits. The optimizer comes late, for a step with a closure (Lightning's) has forward and backward
# within.
PARTS = ("waiting", "communication", "data", "backward", "forward", "optimizer", "other")
LAUNCH = ("cuda_runtime", "cuda_driver")  # by a call of which the CPU starts what the GPU does
MOST_OPERATORS = 10


@dataclass(frozen=True)
class RankProfile:
    """One rank. Seconds per step: parts (a part is None where the trace does not tell), and beside
    them overlapped (communication while something computes) and python (the main thread in no
    operator, nor reading data, nor waiting).  early: some collective begins while backward still
    runs.  peak_bytes, peak_gpu_bytes: of the process, and on its GPU, or None."""

    rank: int
    host: str
    steps: int
    seconds: float
    parts: dict[str, float | None]
    overlapped: float
    python: float
    early: bool
    on_gpu: bool
    peak_bytes: int
    peak_gpu_bytes: int | None

    def share(self, part: str) -> float:
        """Of the step's time."""
        return ((self.parts | {"python": self.python})[part] or 0.0) / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Bytes and seconds per step; null where the trace does not tell."""
        own = {"rank": self.rank, "host": self.host, "seconds_per_step": self.seconds, **self.parts}
        return own | {
            "overlapped": self.overlapped,
            "python": self.python,
            "peak_bytes": self.peak_bytes,
            "peak_gpu_bytes": self.peak_gpu_bytes,
        }


@dataclass(frozen=True)
class Operator:
    """seconds: of its own, per step, a rank's mean.  calls: per step."""

    name: str
    seconds: float
    calls: float


def align(traces: list[Trace]) -> str:
    """Set each trace's shift, and say how they were aligned.

    Ranks of one machine read one clock. Another machine's is moved by the median difference between
    the ends of collectives that both took part in, for those end together but for the time on the
    wire."""
    first = traces[0]
    for trace in traces:
        trace.shift = trace.base - first.base
    others = {trace.host: trace for trace in reversed(traces) if trace.host != first.host}
    said = []
    for host, trace in sorted(others.items()):
        pairs = matched([first, trace])
        if not pairs:
            said.append(f"{host}: its own clock, because no collective was found to compare")
            continue
        offset = median(one.end - other.end for one, other in pairs)
        for own in traces:
            own.shift += offset * (own.host == host)
        said.append(
            f"{host}: moved by {offset / 1e3:.3f} ms, the median over the ends of {len(pairs)} collectives"
        )
    return "; ".join(said) or "one machine, one clock"


def matched(traces: list[Trace]) -> list[tuple[Collective, ...]]:
    """The same collective on each rank: the n-th of its name, where all ranks made as many."""
    found: list[tuple[Collective, ...]] = []
    for name in dict.fromkeys(c.name for c in traces[0].collectives):
        each = [[c for c in trace.collectives if c.name == name] for trace in traces]
        if len(set(map(len, each))) == 1:
            found += zip(*each, strict=True)
    return found


def rank_profiles(traces: list[Trace]) -> list[RankProfile]:
    """The traces must be aligned already."""
    return [rank_profile(trace, late) for trace, late in zip(traces, waits(traces), strict=True)]


def waits(traces: list[Trace]) -> list[Spans]:
    """Per rank: from when it came to a collective until the last rank came, or it was over."""
    found: list[list[tuple[float, float]]] = [[] for _ in traces]
    for same in matched(traces):
        last = max(one.begin for one in same)
        for place, one in enumerate(same):
            found[place].append((one.begin, max(one.begin, min(last, one.end))))
    return [spans(pairs) for pairs in found]


def rank_profile(trace: Trace, late: Spans) -> RankProfile:
    known = trace.parts()
    parts = {name: spans([]) if part is None else part for name, part in known.items()}
    computing, communicating, in_operators = (
        trace.computing,
        trace.communicating,
        trace.in_operators,
    )
    kernels = kernels_by_part(trace, parts) if trace.on_gpu else {}
    line = Timeline(
        trace.steps,
        computing,
        communicating,
        in_operators,
        late,
        *parts.values(),
        *kernels.values(),
    )
    within = line.inside(trace.steps)
    busy, moving = line.inside(computing), line.inside(communicating)
    exposed = moving & ~busy
    masks = {"waiting": exposed & line.inside(late), "communication": exposed}
    masks |= {name: line.inside(part) for name, part in parts.items()}
    if trace.on_gpu:  # what it computes counts, not who has started it
        masks |= {
            "data": masks["data"] & ~busy,
            **{name: line.inside(part) for name, part in kernels.items()},
        }
    count = len(trace.step_notes)
    seconds = {
        name: line.length(mask) / 1e6 / count
        for name, mask in first_that_fits(masks, within).items()
    }
    begun = np.array([collective.begin for collective in trace.collectives]).reshape(-1, 1)
    backward = parts["backward"]
    idle = within & ~line.inside(in_operators) & ~exposed & ~line.inside(parts["data"])
    return RankProfile(
        rank=trace.rank,
        host=trace.host,
        steps=count,
        seconds=line.length(within) / 1e6 / count,
        parts={
            name: None if name in known and known[name] is None else seconds[name] for name in PARTS
        },
        overlapped=line.length(moving & busy & within) / 1e6 / count,
        python=line.length(idle) / 1e6 / count,
        early=bool(((backward[:, 0] < begun) & (begun < backward[:, 1])).any()),
        on_gpu=bool(trace.on_gpu),
        peak_bytes=trace.about["peak_bytes"],
        peak_gpu_bytes=trace.about["peak_gpu_bytes"],
    )


def first_that_fits(masks: dict[str, Mask], within: Mask) -> dict[str, Mask]:
    """PARTS as masks that share no piece, and together are `within`."""
    left, found = within.copy(), {}
    for part in PARTS:
        found[part] = left & masks.get(part, within)
        left &= ~found[part]
    return found


def kernels_by_part(trace: Trace, parts: dict[str, Spans]) -> dict[str, Spans]:
    """The GPU's work by the part of the step that the CPU was at when it started it."""
    calls = [
        e for e in trace.events if e.get("cat") in LAUNCH and "correlation" in e.get("args", {})
    ]
    launched = {e["args"]["correlation"]: trace.begin(e) for e in calls}
    known = [(e, launched.get(e.get("args", {}).get("correlation"))) for e in trace.kernels]
    found: dict[str, Spans] = {}
    for name in ("optimizer", "backward", "forward"):
        part = parts[name]
        found[name] = trace.spans(
            e
            for e, at in known
            if at is not None and ((part[:, 0] <= at) & (at < part[:, 1])).any()
        )
    return found


def top_operators(traces: list[Trace]) -> list[Operator]:
    steps = sum(len(trace.step_notes) for trace in traces)
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for trace in traces:
        for name, own in trace.own_times():
            seconds[name] += own
            calls[name] += 1
    found = [Operator(name, seconds[name] / steps, calls[name] / steps) for name in seconds]
    return sorted(found, key=lambda one: -one.seconds)[:MOST_OPERATORS]

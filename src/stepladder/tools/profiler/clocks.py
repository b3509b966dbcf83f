"""Several ranks' traces on one clock, and in one file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from stepladder.tools.pages.page import write_whole
from stepladder.tools.profiler.trace import Collective, Trace

Event = dict[str, Any]
IDS_PER_RANK = 2**40  # arrows and streams of different ranks must not get mixed up


def align(traces: list[Trace]) -> str:
    """Set each trace's shift, and say how they were aligned.

    Ranks of one machine read one clock. Another machine's is moved by the median difference between the ends of
    collectives that both took part in, for those end together but for the time on the wire.
    """
    first = traces[0]
    for trace in traces:
        trace.shift = trace.base - first.base
    others = {trace.host: trace for trace in reversed(traces) if trace.host != first.host}
    said = []
    for host, trace in sorted(others.items()):
        pairs = matched([first, trace])
        if not pairs:
            said.append(f"{host}: its own clock, for no collective was found to compare")
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


def merge(traces: list[Trace], clock: str, path: Path) -> None:
    """One file with a process per rank, and one per rank's GPU, from the window's first event on."""
    start = min(float(trace.steps.min()) for trace in traces)
    events = [e for place, trace in enumerate(traces) for e in renamed(trace, place, start)]
    about = {"clock": clock, "ranks": [trace.about for trace in traces], "hosts": [t.host for t in traces]}
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "stepladder": about, "traceEvents": events}))


def renamed(trace: Trace, place: int, start: float) -> list[Event]:
    """The rank's events, with numbers of processes and arrows that no other rank has."""
    own = trace.step_notes[0]["pid"]
    numbers: dict[Any, int] = {own: place}
    found: list[Event] = []
    for event in trace.content["traceEvents"]:
        if not isinstance(event.get("pid"), int) or event["name"].startswith("process_"):
            continue  # Kineto's marks of its own start and end, and names that are given anew below
        pid = numbers.setdefault(event["pid"], 1000 * (place + 1) + len(numbers))
        new = {**event, "pid": pid}
        if "ts" in event:
            new["ts"] = round(event["ts"] + trace.shift - start, 3)
        if "id" in event:
            new["id"] = place * IDS_PER_RANK + int(event["id"])
        found.append(new)
    for pid, number in numbers.items():
        name = f"rank {trace.rank}" if pid == own else f"rank {trace.rank}, GPU {pid}"
        for key, value in (("name", f"{name} ({trace.host})"), ("sort_index", number)):
            found.append({"ph": "M", "name": f"process_{key}", "pid": number, "tid": 0, "args": {key: value}})
    return found

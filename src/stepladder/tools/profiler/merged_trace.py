"""Write one trace of all ranks, for Perfetto: a process per rank, and one per GPU of a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stepladder.core.output_file import write_output
from stepladder.tools.profiler.trace import Event, Trace

IDS_PER_RANK = 2**40  # ids of arrows and streams are unique only within a rank
PROCESSES_PER_RANK = 1000


def write_merged_trace(traces: list[Trace], clock: str, path: Path) -> None:
    """Write the traces to one file, whose time begins with the first recorded step."""
    start = min(float(trace.steps.min()) for trace in traces)
    events: list[Event] = []
    for index, trace in enumerate(traces):
        events += _renumber_events(trace, index, start)
    content = {
        "displayTimeUnit": "ms",
        "stepladder": {
            "clock": clock,
            "ranks": [trace.metadata for trace in traces],
            "hosts": [trace.host for trace in traces],
        },
        "traceEvents": events,
    }
    write_output(path, json.dumps(content), "--out")


def _renumber_events(trace: Trace, index: int, start: float) -> list[Event]:
    """Return a rank's events, with ids of processes and arrows that are unique among the ranks."""
    rank_pid = trace.step_annotations[0]["pid"]
    new_pids: dict[Any, int] = {rank_pid: index}
    events: list[Event] = []
    for event in trace.content["traceEvents"]:
        # Kineto marks its own start and end without a process. Process names follow below.
        if not isinstance(event.get("pid"), int) or event["name"].startswith("process_"):
            continue
        new_pid = PROCESSES_PER_RANK * (index + 1) + len(new_pids)
        new_event = {**event, "pid": new_pids.setdefault(event["pid"], new_pid)}
        if "ts" in event:
            new_event["ts"] = round(event["ts"] + trace.shift - start, 3)
        if "id" in event:
            new_event["id"] = index * IDS_PER_RANK + int(event["id"])
        events.append(new_event)
    for pid, new_pid in new_pids.items():
        label = f"rank {trace.rank}" if pid == rank_pid else f"rank {trace.rank}, GPU {pid}"
        events.append(_process_event(new_pid, "name", f"{label} ({trace.host})"))
        events.append(_process_event(new_pid, "sort_index", new_pid))
    return events


def _process_event(pid: int, key: str, value: object) -> Event:
    return {"ph": "M", "name": f"process_{key}", "pid": pid, "tid": 0, "args": {key: value}}

"""Read one rank's trace of torch.profiler: steps, collectives, parts of a step, operators.

The format is Chrome's (complete events with `ts` and `dur` in microseconds) with Kineto's
categories: `cpu_op`, `user_annotation`, and from a GPU `kernel`, `gpu_memcpy`, `gpu_memset`, which
a `correlation` connects to the call that launched them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepladder.tools.profiler.capture import MARK_PREFIX, METADATA_KEY
from stepladder.train.phases import EXCHANGING

Event = dict[str, Any]
Span = tuple[float, float]
Spans = NDArray[np.float64]  # shape (n, 2): begin and end, in any order, overlapping or not
Mask = NDArray[np.bool_]  # per interval of a timeline
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVE = re.compile(
    rf"(gloo|mpi|ucc):|nccl(Dev)?Kernel|{MARK_PREFIX}{EXCHANGING.mark}", re.IGNORECASE
)
NO_COMPUTING = re.compile(
    r"c10d::|record_param_comms|autograd::engine|torch::autograd::|torch.distributed::c10d"
)
BACKWARD = "autograd::engine::evaluate_function"
AFTER_BACKWARD = "torch.distributed.ddp.reducer::"  # of DDP, still inside backward()
MARKED_PARTS = ("data", "forward", "backward", "optimizer")


def make_spans(pairs: Iterable[Span]) -> Spans:
    return np.array(list(pairs), dtype=np.float64).reshape(-1, 2)


def contains(spans: Spans, time: float) -> bool:
    """Return whether a time lies in one of these spans, edges included."""
    has_begun = spans[:, 0] <= time
    has_not_ended = time <= spans[:, 1]
    return bool((has_begun & has_not_ended).any())


class Timeline:
    """The intervals between all neighbouring edges of several sets of spans.

    Nothing begins or ends within an interval, so each set of spans is a mask of intervals.
    """

    def __init__(self, *span_sets: Spans) -> None:
        edges = np.unique(np.concatenate([spans.reshape(-1) for spans in span_sets]))
        self.lengths = np.diff(edges)
        self.middles = (edges[:-1] + edges[1:]) / 2

    def covered_by(self, spans: Spans) -> Mask:
        """Return the intervals that at least one of these spans covers."""
        begun = np.searchsorted(np.sort(spans[:, 0]), self.middles)
        ended = np.searchsorted(np.sort(spans[:, 1]), self.middles)
        mask: Mask = begun > ended
        return mask

    def length(self, mask: Mask) -> float:
        return float(self.lengths[mask].sum())


class Collective(NamedTuple):
    """A collective on one rank, in shifted microseconds."""

    begin: float
    end: float
    name: str


class Trace:
    """One rank's trace in microseconds; the ranks' traces are comparable after `shift_by`."""

    def __init__(self, path: Path) -> None:
        self.content = json.loads(path.read_bytes())
        self.metadata: dict[str, Any] = self.content[METADATA_KEY]
        self.rank = int(self.metadata["rank"])
        self.host = str(self.content.get("host_name", ""))
        self.base_us = self.content["baseTimeNanoseconds"] / 1e3  # since the epoch
        self.shift = 0.0  # added to every time
        self.events: list[Event] = [
            event
            for event in self.content["traceEvents"]
            if event.get("ph") == "X" and "dur" in event
        ]
        self.annotations = self._events_of("user_annotation")
        self.operators = self._events_of("cpu_op")
        self.gpu_events = self._events_of(*GPU_CATEGORIES)
        self.step_annotations = [
            event for event in self.annotations if event["name"].startswith("ProfilerStep#")
        ]
        self.main_thread = self.step_annotations[0]["tid"]

    def _events_of(self, *categories: str) -> list[Event]:
        return [event for event in self.events if event.get("cat") in categories]

    def shift_by(self, microseconds: float) -> None:
        """Move all times of this trace."""
        self.shift += microseconds

    @property
    def steps(self) -> Spans:
        return self.spans(self.step_annotations)

    @property
    def queued_us(self) -> NDArray[np.float64]:
        """The microseconds of each step in which the rank had work, but no core; 0 if unknown."""
        queued_s = self.metadata["queued_s"] or [0.0] * len(self.step_annotations)
        return 1e6 * np.array(queued_s, dtype=np.float64)

    def spans(self, events: Iterable[Event]) -> Spans:
        return make_spans((self.begin(event), self.end(event)) for event in events)

    def begin(self, event: Event) -> float:
        return float(event["ts"] + self.shift)

    def end(self, event: Event) -> float:
        return float(event["ts"] + event["dur"] + self.shift)

    @property
    def collectives(self) -> list[Collective]:
        """The collectives that moved data, by begin: on a thread of gloo or as a kernel of NCCL."""
        events = [*self.annotations, *self.gpu_events]
        return sorted(
            Collective(self.begin(event), self.end(event), event["name"])
            for event in events
            if COLLECTIVE.match(event["name"])
        )

    @property
    def communicating(self) -> Spans:
        """The times in which data moves; without a GPU also the main thread's calls of c10d."""
        moving = make_spans((collective.begin, collective.end) for collective in self.collectives)
        if self.gpu_events:
            return moving
        calls = self.spans(op for op in self.operators if op["name"].startswith("c10d::"))
        return np.concatenate([moving, calls])

    @cached_property
    def kernels(self) -> list[Event]:
        return [event for event in self.gpu_events if not COLLECTIVE.match(event["name"])]

    @property
    def computing(self) -> Spans:
        """The GPU's kernels, or on a CPU the operators that compute, not only start something."""
        if self.gpu_events:
            return self.spans(self.kernels)
        return self.spans(
            op for op in self.operators if "::" in op["name"] and not NO_COMPUTING.match(op["name"])
        )

    @property
    def in_operators(self) -> Spans:
        """The times in which the main thread is inside torch."""
        return self.spans(op for op in self.operators if op["tid"] == self.main_thread)

    # -- parts of a step ---------------------------------------------------------------------------

    def find_parts(self) -> dict[str, Spans | None]:
        """Return the main thread's data, forward, backward and optimizer; None: not in the trace.

        A job marks them. A script's parts follow from what torch records by itself: the names of
        the DataLoader and the optimizer, autograd's events, and the arrows from operators of the
        forward pass to those of the backward pass.
        """
        annotations = [event for event in self.annotations if event["tid"] == self.main_thread]
        if any(event["name"].startswith(MARK_PREFIX) for event in annotations):
            return {
                part: self.spans(e for e in annotations if e["name"] == MARK_PREFIX + part)
                for part in MARKED_PARTS
            }

        def named(*prefixes: str) -> Spans:
            return self.spans(e for e in annotations if e["name"].startswith(prefixes))

        data = named("enumerate(DataLoader)#")
        forward, backward = self._find_passes()
        return {
            "data": data if len(data) else None,
            "forward": forward if len(forward) else None,
            "backward": backward if len(backward) else None,
            "optimizer": named("Optimizer.step#", "Optimizer.zero_grad#"),
        }

    def _find_passes(self) -> tuple[Spans, Spans]:
        """Return the forward and the backward passes of a script.

        Forward lasts from its first operator until backward begins; backward from the first of
        autograd's events to the last one before another forward pass, or to DDP's last event.
        """
        backward = self.spans(
            op for op in self.operators if op["name"].startswith((BACKWARD, AFTER_BACKWARD))
        )
        # Checkpointing computes operators of forward again within backward: those are backward.
        forward = [span for span in self._forward_operators() if not contains(backward, span[0])]
        passes = _join_spans(
            {
                "forward": forward + self._annotated("DistributedDataParallel.forward"),
                "backward": [(float(begin), float(end)) for begin, end in backward],
                "": self._annotated("Optimizer.step#", "enumerate("),
            }
        )
        return make_spans(passes["forward"]), make_spans(passes["backward"])

    def _annotated(self, *prefixes: str) -> list[Span]:
        return [
            (self.begin(event), self.end(event))
            for event in self.annotations
            if event["name"].startswith(prefixes)
        ]

    def _forward_operators(self) -> list[Span]:
        """Return the operators from which an arrow leads to an operator of backward."""
        ends: dict[float, float] = {}
        for op in self.operators:
            ends[op["ts"]] = max(ends.get(op["ts"], 0.0), self.end(op))
        spans: list[Span] = []
        for event in self.content["traceEvents"]:
            if event.get("cat") == "fwdbwd" and event.get("ph") == "s":
                begin = event["ts"] + self.shift
                spans.append((begin, ends.get(event["ts"], begin)))
        return spans

    # -- operators ---------------------------------------------------------------------------------

    def self_times(self, steps: Spans) -> list[tuple[str, float]]:
        """Return the name and self time in seconds of each operator call (on a GPU: each kernel).

        Only calls that begin within these steps count.
        """
        if self.gpu_events:
            durations = [(kernel, kernel["dur"]) for kernel in self.kernels]
        else:
            durations = self._operator_self_times()
        begins = np.array([self.begin(event) for event, _ in durations])
        begun = np.searchsorted(np.sort(steps[:, 0]), begins, side="right")
        ended = np.searchsorted(np.sort(steps[:, 1]), begins, side="right")
        return [
            (event["name"], microseconds / 1e6)
            for (event, microseconds), is_inside in zip(durations, begun > ended, strict=True)
            if is_inside
        ]

    def _operator_self_times(self) -> list[tuple[Event, float]]:
        """Return the microseconds of each operator without the operators that it calls."""
        self_times = {id(op): op["dur"] for op in self.operators}
        stacks: dict[Any, list[Event]] = defaultdict(list)  # per thread
        for op in sorted(self.operators, key=lambda op: (op["ts"], -op["dur"])):
            stack = stacks[op["tid"]]
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= op["ts"]:
                stack.pop()
            if stack:
                self_times[id(stack[-1])] -= op["dur"]
            stack.append(op)
        return [(op, max(0.0, self_times[id(op)])) for op in self.operators]


def _join_spans(spans_of: dict[str, list[Span]]) -> dict[str, list[Span]]:
    """Return each kind's spans, with neighbours of one kind joined.

    A forward span that a backward span follows is extended until that begins.
    """
    spans = sorted((begin, end, kind) for kind, pairs in spans_of.items() for begin, end in pairs)
    joined: list[tuple[float, float, str]] = []
    for begin, end, kind in spans:
        if joined:
            last_begin, last_end, last_kind = joined[-1]
            if last_kind == kind:
                joined[-1] = (last_begin, max(last_end, end), kind)
                continue
            if last_kind == "forward" and kind == "backward":
                joined[-1] = (last_begin, begin, last_kind)
        joined.append((begin, end, kind))
    by_kind: dict[str, list[Span]] = {kind: [] for kind in spans_of}
    for begin, end, kind in joined:
        by_kind[kind].append((begin, end))
    return by_kind

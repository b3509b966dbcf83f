"""One rank's trace, as torch.profiler wrote it: its steps, its collectives, the parts of a step,
its operators.

The format is Chrome's (complete events with `ts` and `dur` in microseconds) with Kineto's
categories: `cpu_op`, `user_annotation`, and from a GPU `kernel`, `gpu_memcpy`, `gpu_memset`, which
a `correlation` ties to the launch."""

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

from stepladder.tools.profiler.capture import ABOUT, MARK
from stepladder.train.phases import EXCHANGING

Event = dict[str, Any]
Spans = NDArray[np.float64]  # shape (n, 2): begin and end, in any order, overlapping or not
Mask = NDArray[np.bool_]  # per piece of a timeline
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVE = re.compile(rf"(gloo|mpi|ucc):|nccl(Dev)?Kernel|{MARK}{EXCHANGING.mark}", re.IGNORECASE)
NO_COMPUTING = re.compile(
    r"c10d::|record_param_comms|autograd::engine|torch::autograd::|torch.distributed::c10d"
)
BACKWARD = "autograd::engine::evaluate_function"
AFTER_BACKWARD = "torch.distributed.ddp.reducer::"  # of DDP, still inside backward()


def spans(pairs: Iterable[tuple[float, float]]) -> Spans:
    return np.array(list(pairs), dtype=np.float64).reshape(-1, 2)


class Timeline:
    """Which of several things went on when: spans of time, cut at every edge of all of them.

    Within a piece between neighbouring edges, nothing begins or ends.
    """

    def __init__(self, *everything: Spans) -> None:
        edges = np.unique(np.concatenate([one.reshape(-1) for one in everything]))
        self.lengths, self.middles = np.diff(edges), (edges[:-1] + edges[1:]) / 2

    def inside(self, some: Spans) -> Mask:
        """The pieces that at least one of these spans covers."""
        begun = np.searchsorted(np.sort(some[:, 0]), self.middles)
        ended = np.searchsorted(np.sort(some[:, 1]), self.middles)
        covered: Mask = begun > ended
        return covered

    def length(self, mask: Mask) -> float:
        return float(self.lengths[mask].sum())


class Collective(NamedTuple):
    """begin, end: microseconds, as in its trace."""

    begin: float
    end: float
    name: str


class Trace:
    """A rank's trace. Times are microseconds; those of several traces can be compared once `shift`
    is set.
    """

    shift = 0.0  # added to every time

    def __init__(self, path: Path) -> None:
        self.content = json.loads(path.read_bytes())
        self.about: dict[str, Any] = self.content[ABOUT]
        self.rank, self.host = int(self.about["rank"]), str(self.content.get("host_name", ""))
        self.base = self.content["baseTimeNanoseconds"] / 1e3  # microseconds since the epoch
        self.events: list[Event] = [
            e for e in self.content["traceEvents"] if e.get("ph") == "X" and "dur" in e
        ]
        self.notes = [e for e in self.events if e.get("cat") == "user_annotation"]
        self.ops = [e for e in self.events if e.get("cat") == "cpu_op"]
        self.on_gpu = [e for e in self.events if e.get("cat") in ON_GPU]
        self.step_notes = [e for e in self.notes if e["name"].startswith("ProfilerStep#")]
        self.main = self.step_notes[0]["tid"]

    @property
    def steps(self) -> Spans:
        return self.spans(self.step_notes)

    def spans(self, events: Iterable[Event]) -> Spans:
        return spans((self.begin(e), self.end(e)) for e in events)

    def begin(self, event: Event) -> float:
        return float(event["ts"] + self.shift)

    def end(self, event: Event) -> float:
        return float(event["ts"] + event["dur"] + self.shift)

    @property
    def collectives(self) -> list[Collective]:
        """Those that moved data, in the order of their beginnings: on a thread of gloo, or as a
        kernel of NCCL.
        """
        found = [e for e in [*self.notes, *self.on_gpu] if COLLECTIVE.match(e["name"])]
        return sorted(Collective(self.begin(e), self.end(e), e["name"]) for e in found)

    @property
    def communicating(self) -> Spans:
        """While data moves; without a GPU also while the main thread hands a collective over."""
        handed = [] if self.on_gpu else [e for e in self.ops if e["name"].startswith("c10d::")]
        return np.concatenate([spans(c[:2] for c in self.collectives), self.spans(handed)])

    @cached_property
    def kernels(self) -> list[Event]:
        return [e for e in self.on_gpu if not COLLECTIVE.match(e["name"])]

    @property
    def computing(self) -> Spans:
        """Operators that compute, or what the GPU does if there is one; not those that only start
        something.
        """
        if self.on_gpu:
            return self.spans(self.kernels)
        return self.spans(
            e for e in self.ops if "::" in e["name"] and not NO_COMPUTING.match(e["name"])
        )

    @property
    def in_operators(self) -> Spans:
        """The main thread, inside torch."""
        return self.spans(e for e in self.ops if e["tid"] == self.main)

    # -- parts of a step ---------------------------------------------------------------------------

    def parts(self) -> dict[str, Spans | None]:
        """What the main thread is at: data, forward, backward, optimizer. None: the trace does not
        say.

        A job's are marked. A script's follow from what torch notes by itself: the DataLoader's and
        the optimizer's own names, autograd's events, and its arrows from operators of the forward
        pass to those of the backward."""
        notes = [e for e in self.notes if e["tid"] == self.main]
        if any(e["name"].startswith(MARK) for e in notes):
            names = ("data", "forward", "backward", "optimizer")
            return {
                name: self.spans(e for e in notes if e["name"] == MARK + name) for name in names
            }
        read = [e for e in notes if e["name"].startswith("enumerate(DataLoader)#")]
        updated = [
            e for e in notes if e["name"].startswith(("Optimizer.step#", "Optimizer.zero_grad#"))
        ]
        forward, backward = self._passes()
        return {
            "data": self.spans(read) if read else None,
            "forward": forward,
            "backward": backward,
            "optimizer": self.spans(updated),
        }

    def _passes(self) -> tuple[Spans | None, Spans | None]:
        """Forward goes on from its first operator until backward begins; backward from the first of
        autograd's events to the last before another forward pass, or DDP's last."""
        backward = self.spans(
            e for e in self.ops if e["name"].startswith((BACKWARD, AFTER_BACKWARD))
        )
        ahead = [  # checkpointing computes within backward what belongs to it
            one
            for one in self._ahead()
            if not ((backward[:, 0] <= one[0]) & (one[0] <= backward[:, 1])).any()
        ]
        found = {
            "forward": ahead + self._noted("DistributedDataParallel.forward"),
            "backward": [(float(begin), float(end)) for begin, end in backward],
            "": self._noted("Optimizer.step#", "enumerate("),
        }
        passes = one_after_another(found)
        forward, backward = spans(passes["forward"]), spans(passes["backward"])
        return (forward if len(forward) else None), (backward if len(backward) else None)

    def _noted(self, *names: str) -> list[tuple[float, float]]:
        return [(self.begin(e), self.end(e)) for e in self.notes if e["name"].startswith(names)]

    def _ahead(self) -> list[tuple[float, float]]:
        """Operators that an arrow leads from, to one of backward."""
        ends: dict[float, float] = {}
        for op in self.ops:
            ends[op["ts"]] = max(ends.get(op["ts"], 0.0), self.end(op))
        arrows = [
            e
            for e in self.content["traceEvents"]
            if e.get("cat") == "fwdbwd" and e.get("ph") == "s"
        ]
        return [(e["ts"] + self.shift, ends.get(e["ts"], e["ts"] + self.shift)) for e in arrows]

    # -- operators ---------------------------------------------------------------------------------

    def own_times(self) -> list[tuple[str, float]]:
        """Name and seconds of its own of each call of an operator within the steps; on a GPU its
        kernels'.
        """
        lo, hi = self.steps[:, 0].min(), self.steps[:, 1].max()
        own = [(e, e["dur"]) for e in self.kernels] if self.on_gpu else self._self_times()
        return [
            (event["name"], micros / 1e6) for event, micros in own if lo <= self.begin(event) < hi
        ]

    def _self_times(self) -> list[tuple[Event, float]]:
        """Microseconds of each operator without those that it calls, on its thread."""
        left = {id(e): e["dur"] for e in self.ops}
        stacks: dict[Any, list[Event]] = defaultdict(list)
        for event in sorted(self.ops, key=lambda e: (e["ts"], -e["dur"])):
            stack = stacks[event["tid"]]
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            if stack:
                left[id(stack[-1])] -= event["dur"]
            stack.append(event)
        return [(e, max(0.0, left[id(e)])) for e in self.ops]


def one_after_another(
    found: dict[str, list[tuple[float, float]]],
) -> dict[str, list[tuple[float, float]]]:
    """Joins neighbours of one kind; what another kind follows lasts until then, if that is
    backward.
    """
    marks = sorted((begin, end, kind) for kind, pairs in found.items() for begin, end in pairs)
    joined: list[tuple[float, float, str]] = []
    for begin, end, kind in marks:
        if joined and joined[-1][2] == kind:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end), kind)
            continue
        if joined and (joined[-1][2], kind) == ("forward", "backward"):
            joined[-1] = (joined[-1][0], begin, "forward")
        joined.append((begin, end, kind))
    return {kind: [(begin, end) for begin, end, its in joined if its == kind] for kind in found}

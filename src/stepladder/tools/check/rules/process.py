"""Collectives, devices and the group itself."""

from __future__ import annotations

import ast
from itertools import zip_longest

from stepladder.tools.check.recording import Event, Pass, RankLog
from stepladder.tools.check.rules.base import Faults, Seen


def collective_order(seen: Seen) -> Faults:
    """Compared call by call, as far as both ranks have come; at the end also who waits for whom."""
    if not seen.many:
        return
    one, other = ([e for e in log.of("coll") if not e["group"]] for log in seen.run.ranks[:2])
    for number, (a, b) in enumerate(zip_longest(one, other), 1):
        if a is None or b is None:
            rank, waiting = (0, a) if a is not None else (1, b)
            if seen.run.stalled or ended_without(seen, 1 - rank):
                yield from alone(seen, rank, waiting, number)
            return
        if a["op"] != b["op"] or (
            a.get("shape") != b.get("shape")
            and "gather" not in a["op"]
            and a["op"] != "broadcast_object_list"
        ):
            yield seen.fault(
                "collective-order",
                a["at"],
                f"collective {number} is {said(a, seen)} on rank 0 and {said(b, seen)} on rank 1",
                0,
            )
            return
    if seen.run.stalled:
        yield from waits_in_backward(seen)


def said(event: Event, seen: Seen) -> str:
    shape = f" of shape {event['shape']}" if "shape" in event else ""
    return f"{event['op']}{shape} at {seen.place(event['at'])}"


def ended_without(seen: Seen, rank: int) -> bool:
    return seen.run.ranks[rank].ended and not any(
        e["k"] == "enough" for e in seen.run.ranks[rank].events
    )


def alone(seen: Seen, rank: int, event: Event, number: int) -> Faults:
    other = seen.run.ranks[1 - rank]
    if uneven(seen):
        return
    last = last_seen(other, seen)
    yield seen.fault(
        "collective-order",
        event["at"],
        f"rank {rank} waits in {event['op']} (its collective {number}), and rank {1 - rank} has not come: {last}",
        rank,
    )


def last_seen(log: RankLog, seen: Seen) -> str:
    if log.ended:
        return "it has ended"
    placed = [event for event in log.events if event.get("at")]
    return (
        f"it was last seen at {seen.place(placed[-1]['at'])} ({placed[-1]['k']})"
        if placed
        else "it has done nothing"
    )


def uneven(seen: Seen) -> bool:
    return any(True for _ in uneven_end(seen))


def uneven_end(seen: Seen) -> Faults:
    """A run that stands still, or breaks off: one rank has left the loop that the other is still
    in.
    """
    if not seen.many or not seen.run.stalled or seen.run.of("join"):
        return
    logs = seen.run.ranks[:2]
    backs = [len(log.of("backward")) for log in logs]
    passes = [len(log.training) for log in logs]
    if backs[0] == backs[1] or min(backs) == 0 or not all(passes):
        return
    fewer = 0 if backs[0] < backs[1] else 1
    last = logs[fewer].training[-1]
    if (
        passes[0] != passes[1] and last.end is not None
    ):  # it is done with that pass, and does something else first
        return
    steps = [len(log.of("step")) for log in logs]
    if logs[fewer].ended or left_loop(seen, logs[fewer], last):
        said = f"rank {fewer} has left the loop after {steps[fewer]} steps, "
        said += f"and rank {1 - fewer} is in its step {backs[1 - fewer]}"
        yield seen.fault("uneven-steps", last.at, said, fewer)


def left_loop(seen: Seen, log: RankLog, last: Pass) -> bool:
    """Whether the rank's last collective is outside of the loop over that pass."""
    calls = [event for event in log.of("coll") if event["n"] > last.about["n"]]
    file = seen.source.file(seen.place(last.at).file) if last.at else None
    if not calls or file is None:
        return False
    spans = [
        (n.lineno, n.end_lineno or n.lineno) for n in ast.walk(file.tree) if isinstance(n, ast.For)
    ]
    loop = next(((a, b) for a, b in spans if a == last.at[1]), None)
    frames = [frame.rpartition(":") for frame in calls[-1].get("way", "").split(" < ") if frame]
    inside = [
        loop and name == last.at[2] and loop[0] <= int(line) <= loop[1] for name, _, line in frames
    ]
    return loop is not None and not any(inside)


def waits_in_backward(seen: Seen) -> Faults:
    """The wrapper's own collectives: one rank is in a backward pass that the other does not make."""
    backs = [log.of("backward") for log in seen.run.ranks[:2]]
    if len(backs[0]) == len(backs[1]):
        return
    more = 0 if len(backs[0]) > len(backs[1]) else 1
    event = backs[more][len(backs[1 - more])]
    yield seen.fault(
        "collective-order",
        event["at"],
        f"rank {more} waits in backward pass {len(backs[1 - more]) + 1}, and rank {1 - more} makes "
        f"{len(backs[1 - more])}",
        more,
    )


def uneven_backward(seen: Seen) -> Faults:
    """For loops without a loader."""
    if not seen.many or any(log.training for log in seen.run.ranks) or seen.run.of("join"):
        return
    backs = [log.of("backward") for log in seen.run.ranks[:2]]
    if (
        len(backs[0]) != len(backs[1])
        and min(map(len, backs)) > 1
        and (seen.run.finished or seen.run.stalled)
        and not seen.run.stopped
    ):
        more = 0 if len(backs[0]) > len(backs[1]) else 1
        yield seen.fault(
            "uneven-steps",
            backs[more][-1]["at"],
            f"rank 0 makes {len(backs[0])} backward passes and rank 1 {len(backs[1])}",
            more,
        )


def no_destroy(seen: Seen) -> Faults:
    begun = [(rank, e) for rank, e in seen.run.of("init") if e["direct"]]
    if not begun or seen.source.has("destroy_process_group"):
        return
    if seen.run.stopped or seen.run.stalled or not seen.run.finished:
        left = "and no file of the script calls destroy_process_group"
    else:
        open_at_end = [rank for rank, e in seen.run.of("exit") if e["group"]]
        if not open_at_end:
            return
        left = f"and is still there when {len(open_at_end)} ranks end"
    yield seen.fault(
        "no-destroy", begun[0][1]["at"], f"the group is made on {len(begun)} ranks, {left}"
    )


def cuda_only(seen: Seen) -> Faults:
    for rank, event in seen.run.of("init"):
        if "nccl" in event["backend"] and event["direct"] and not asks(seen):
            yield seen.fault(
                "cuda-only",
                event["at"],
                f"the backend is {event['backend']}, and the script never asks whether there is a GPU",
                rank,
            )
            return


def asks(seen: Seen) -> bool:
    return seen.source.has(
        "is_available",
        '"gloo"',
        "'gloo'",
        "--device",
        "--backend",
        "is_nccl_available",
        "accelerator",
    )

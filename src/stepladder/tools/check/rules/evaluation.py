"""Samples that an evaluation counts twice."""

from __future__ import annotations

import ast
from collections import Counter

from stepladder.tools.check.recording import Pass
from stepladder.tools.check.rules.base import Faults, Seen


def padded_evaluation(seen: Seen) -> Faults:
    if not seen.many:
        return
    for passes in seen.evaluations():
        if not all(one.is_whole and one.indices is not None for one in passes):
            continue
        about = passes[0].about
        shared = about["distributed"] or "Shard" in about.get("batcher", "")  # Accelerate's
        if not shared or passes[0].about["length"] is None:
            continue
        count = sum(len(one.indices or []) for one in passes)
        distinct = len({index for one in passes for index in one.indices or []})
        if count == distinct or len({one.about["print"] for one in passes}) > 1:
            continue
        counted = reduced_after(seen, passes, float(count), float(distinct))
        if counted != "corrected":
            more = f"; the reduced count is {count}" if counted == "padded" else ""
            yield seen.fault(
                "padded-evaluation",
                passes[0].sampler_built,
                f"{count - distinct} of {distinct} samples are counted twice, "
                f"so a mean moves by up to {100 * (count - distinct) / count:.2g} %{more}",
            )
            return


def no_eval_mode(seen: Seen) -> Faults:
    if seen.source.has(
        "update_bn", "swa_utils"
    ):  # which passes data through to measure batch norm's statistics
        return
    for log in seen.run.ranks[:1]:
        for one in log.evaluations:
            calls = [
                e for e in one.events if e["k"] == "forward" and not e["grad"] and e.get("live")
            ]
            if calls and one.is_whole:
                yield seen.fault(
                    "no-eval-mode",
                    calls[0]["at"],
                    f"in pass {one.number}, which trains nothing, {calls[0]['live']} layers (dropout, batch norm) "
                    f"are in training mode",
                )
                return


def eval_keeps_graph(seen: Seen) -> Faults:
    """Cost: a graph is built that nobody goes back through."""
    log = seen.run.ranks[0]
    trained = {one.about["loader"] for one in log.training}
    for one in log.passes:
        calls = [e for e in one.events if e["k"] == "forward" and e["grad"]]
        after = next(
            (e["k"] for e in log.events[one.after :] if e["k"] in ("backward", "pass")), ""
        )
        if (
            one.is_training
            or not one.is_whole
            or one.about["loader"] in trained
            or after == "backward"
        ):
            continue
        if trained and len(calls) >= 2:
            said = f"in pass {one.number}, which trains nothing, {len(calls)} calls of the model build a graph"
            yield seen.fault("eval-keeps-graph", calls[0]["at"], said)
            return


def padded_by_hand(seen: Seen) -> Faults:
    """A sampler that the script goes through itself, without a loader."""
    each = [log.of("sampled") for log in seen.run.ranks]
    for events in zip(*each, strict=False):
        first = events[0]
        count = sum(len(event["indices"]) for event in events)
        if (
            first["shuffle"]
            or count == first["length"]
            or count <= len({i for e in events for i in e["indices"]})
        ):
            continue
        sums: Counter[int] = Counter()
        for log, event in zip(seen.run.ranks, events, strict=True):
            later = [e for e in log.of("coll") if e["n"] > event["n"]][:4]
            values = [value for e in later for value in e.get("value") or []]
            sums.update(
                {place: int(value) for place, value in enumerate(values) if abs(value) < 1e9}
            )
        if count in sums.values() and first["length"] not in sums.values():
            yield seen.fault(
                "padded-evaluation",
                first["at"],
                f"{count - first['length']} of {first['length']} samples are counted twice; the reduced count is "
                f"{count}",
            )
            return


def reduced_after(seen: Seen, passes: list[Pass], padded: float, right: float) -> str:
    """What the ranks added up after the pass: the padded count, the right one, or something else."""
    sums: Counter[int] = Counter()
    gathered = False
    numbers: set[int] = set()
    for log, one in zip(seen.run.ranks, passes, strict=True):
        place = 0
        inside = [e for e in one.events if e["k"] == "coll"]
        later = []
        for event in log.events[one.after : one.after + 200]:
            if event["k"] == "pass" or event["k"] == "backward":
                break
            later.append(event)
        for event in inside + [e for e in later if e["k"] == "coll"]:
            gathered |= "gather" in event["op"]
            numbers |= set(event.get("numbers", []))
            for value in event.get("value") or []:
                sums[place] += int(value) if abs(value) < 1e15 else 0
                place += 1
    if len(numbers) == right:  # gathered by the samples' numbers, of which each counts once
        return "corrected"
    if any(abs(value - padded) < 0.5 for value in sums.values()):
        return "padded"
    if any(abs(value - right) < 0.5 for value in sums.values()):
        return "corrected"
    return (
        "corrected"
        if (gathered and trims(seen)) or seen.source.has("gather_for_metrics")
        else "unknown"
    )


def trims(seen: Seen) -> bool:
    """Whether something is cut to a length that is no plain number: what was gathered, to the data
    set's.
    """
    slices = (
        node
        for file in seen.source.files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Slice)
    )
    return any(
        node.lower is None and node.upper is not None and not isinstance(node.upper, ast.Constant)
        for node in slices
    )

"""Metrics over ranks, schedules, and the global batch."""

from __future__ import annotations

from collections import Counter

from stepladder.tools.check.recording import Event, Pass, RankLog
from stepladder.tools.check.rules.base import Faults, Seen
from stepladder.tools.check.rules.static_tree import (
    batch_mean_lines,
    local_quotients,
    reduced_quotients,
)


def mean_of_means(seen: Seen) -> Faults:
    yield from reduced_means(seen)
    for passes in seen.evaluations():
        uneven = unevenness(passes)
        if not uneven:
            continue
        for file in seen.source.files:
            for loop, line in batch_mean_lines(file):
                if (
                    passes[0].at
                    and seen.place(passes[0].at).file == file.name
                    and loop == passes[0].at[1]
                ):
                    yield seen.fault(
                        "mean-of-means",
                        [file.name, line, ""],
                        f"means of batches are averaged, and {uneven}",
                    )
                    return
    yield from reduced_shares(seen)


def reduced_shares(seen: Seen) -> Faults:
    """A quotient of each rank's share is summed over the ranks, and the shares differ in size."""
    if not seen.many:
        return
    for file in seen.source.files:
        lines = {line for line, _ in reduced_quotients(file)}
        each = [
            [e for e in log.of("coll") if e["at"] and e["at"][1] in lines]
            for log in seen.run.ranks[:2]
        ]
        for one, other in zip(*each, strict=False):
            rows = [
                evaluated(log, event)
                for log, event in zip(seen.run.ranks, (one, other), strict=False)
            ]
            if rows[0] != rows[1] and all(rows) and seen.place(one["at"]).file == file.name:
                said = f"means of {rows[0]} samples on rank 0 and {rows[1]} on rank 1 are averaged"
                yield seen.fault("mean-of-means", one["at"], said)
                return


def evaluated(log: RankLog, event: Event) -> int:
    """Rows that went through a model without a gradient between the last training and a collective."""
    rows = 0
    for other in log.of("forward", "backward", "coll"):
        if other["n"] >= event["n"]:
            break
        if other["k"] != "forward":
            rows = 0
        elif not other["grad"]:
            rows += other["size"]
    return rows


def unevenness(passes: list[Pass]) -> str:
    """How batches of an evaluation differ in size, in words."""
    for rank, one in enumerate(passes):
        sizes = Counter(batch["size"] for batch in one.batches)
        if len(sizes) > 1:
            said = ", ".join(f"{count} of {size}" for size, count in sizes.most_common(3))
            return f"batches of rank {rank} have different sizes: {said} samples"
    return ""


def reduced_means(seen: Seen) -> Faults:
    """A mean over values whose number differs by rank is summed over the ranks."""
    if not seen.many:
        return
    calls = [
        [e for e in log.of("coll") if "mean_of" in e and e["op"] in ("all_reduce", "reduce")]
        for log in seen.run.ranks[:2]
    ]
    for one, other in zip(*calls, strict=False):
        if one["at"] == other["at"] and one["mean_of"] != other["mean_of"]:
            yield seen.fault(
                "mean-of-means",
                one["at"],
                f"a mean of {one['mean_of']} values on rank 0 and one of {other['mean_of']} on rank 1 are summed",
            )
            return


def local_count(seen: Seen) -> Faults:
    """By the source, for a sum that was seen to be reduced."""
    for file in seen.source.files:
        for reduced, line, said in local_quotients(file) if seen.many else []:
            calls = [
                e
                for log in seen.run.ranks
                for e in log.of("coll")
                if e["at"] and e["at"][1] == reduced
            ]
            if any(seen.place(e["at"]).file == file.name for e in calls):
                yield seen.fault("local-count", [file.name, line, ""], said)
                return


def one_rank_metric(seen: Seen) -> Faults:
    if not seen.many:
        return
    for passes in seen.evaluations():
        if not all(one.is_whole for one in passes) or not is_share(passes):
            continue
        after = [followed(log, one) for log, one in zip(seen.run.ranks, passes, strict=True)]
        if any(has_coll for has_coll, _ in after):
            continue
        printers = [rank for rank, (_, printed) in enumerate(after) if printed]
        if printers == [0]:
            counts = [sum(b["size"] for b in one.batches) for one in passes]
            yield seen.fault(
                "one-rank-metric",
                (after[0][1] or {}).get("at"),
                f"rank 0 evaluates {counts[0]} of {sum(counts)} samples, no collective follows, and it prints",
                0,
            )
            return


def is_share(passes: list[Pass]) -> bool:
    """Whether the ranks have read different samples."""
    reads = [
        one.indices
        if one.indices is not None and len({p.about["print"] for p in passes}) == 1
        else one.rows
        for one in passes
    ]
    if any(read is None for read in reads):
        return False
    sets = [set(map(str, read or [])) for read in reads]
    return bool(sets[0]) and len(sets[0] & sets[1]) < 0.5 * len(sets[0])


def followed(log: RankLog, one: Pass) -> tuple[bool, Event | None]:
    """Whether a collective follows before the next training, or lies in the pass; and the first
    line printed.
    """
    if any(event["k"] == "coll" and event["op"] != "barrier" for event in one.events):
        return True, None
    printed = None
    for event in log.events[one.after :]:
        if event["k"] in ("backward",):
            break
        if event["k"] == "coll" and event["op"] != "barrier":
            return True, None
        if event["k"] == "print" and printed is None:
            printed = event
    return False, printed


def schedule_per_rank(seen: Seen) -> Faults:
    log = seen.run.ranks[0]
    by_schedule: dict[int, list[Event]] = {}
    for event in log.of("sched"):
        if event["at"] and event["direct"]:
            by_schedule.setdefault(event["schedule"], []).append(event)
    for ident, events in by_schedule.items():
        steps = log.of("step")
        per_step = calls_per_step(log, ident)
        if per_step > 1 and seen.many:
            yield seen.fault(
                "schedule-per-rank",
                events[0]["at"],
                f"{events[0]['cls']}.step is called {per_step} times per optimizer step, on each of "
                f"{seen.run.world} ranks",
            )
            return
        yield from sized_wrongly(seen, log, events, len(steps))


def calls_per_step(log: RankLog, ident: int) -> int:
    """The usual number of calls between two optimizer steps; 1 where it is less."""
    counts: Counter[int] = Counter()
    current = -1
    for event in log.of("step", "sched"):
        if event["k"] == "step":
            if current >= 0:
                counts[current] += 1
            current = 0
        elif event["schedule"] == ident and current >= 0:
            current += 1
    if current > 0:
        counts[current] += 1
    common = counts.most_common(1)
    most = common[0][0] if common else 1
    return (
        most
        if sum(counts.values()) >= 2
        or (sum(counts.values()) == 1 and most > 1 and not log.of("backward"))
        else 1
    )


def sized_wrongly(seen: Seen, log: RankLog, events: list[Event], steps: int) -> Faults:
    """Against its horizon: too many calls at any time, too few when the script has come to its end."""
    horizon, calls, first = events[0]["horizon"], len(events), events[0]
    if not horizon or first["cls"] in ("LinearLR", "ConstantLR", "PolynomialLR"):
        return
    each_step = calls >= 0.9 * steps and steps > 2
    epochs = len(log.training)
    if each_step and calls > horizon + 1:
        yield seen.fault(
            "schedule-per-rank",
            first["at"],
            f"{first['cls']} is sized for {horizon} steps and has been stepped {calls} times in {epochs} epochs",
        )
    elif seen.run.finished and not seen.run.stopped and seen.many and epochs and calls > 3:
        rounding = epochs * seen.run.world + 1
        if (
            each_step
            and abs(horizon - seen.run.world * calls) <= rounding
            and horizon > 1.5 * calls
        ):
            yield seen.fault(
                "schedule-per-rank",
                first["at"],
                f"{first['cls']} is sized for {horizon} steps, {seen.run.world} times the {calls} that each of "
                f"{seen.run.world} ranks makes: it ends half way",
            )
    if (
        seen.run.finished
        and not seen.run.stopped
        and calls == epochs
        and epochs
        and steps >= 3 * epochs
        and abs(horizon - steps) <= epochs
    ):
        yield seen.fault(
            "schedule-per-rank",
            first["at"],
            f"{first['cls']} is sized for {horizon} steps (there are {steps}), and is stepped once per epoch: "
            f"{calls} times",
        )

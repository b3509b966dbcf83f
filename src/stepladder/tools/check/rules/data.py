"""Which samples the ranks read."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from stepladder.tools.check.finding import Fault
from stepladder.tools.check.recording import Pass
from stepladder.tools.check.rules.base import Faults, Seen


def set_epoch(seen: Seen) -> Faults:
    log = seen.run.ranks[0]
    by_place: dict[str, list[Pass]] = {}
    for one in [p for p in log.passes if p.is_training or (p.is_silent and p.about["distributed"])]:
        by_place.setdefault(str(one.about.get("way") or one.at), []).append(one)
    for passes in by_place.values():
        for first, second in pairwise(passes):
            if same_order(first, second):
                told = [e for e in log.of("setepoch") if e["sampler"] in sampler_ids(first, second)]
                said = (
                    f"set_epoch was called {len(told)} times"
                    if told
                    else "set_epoch was never called"
                )
                if told:
                    said += f", with {', '.join(str(e['value']) for e in told[:4])}"
                at = told[0]["at"] if told else first.at
                count = len(first.indices or first.rows or [])
                yield seen.fault(
                    "set-epoch",
                    at,
                    f"passes {first.number} and {second.number} read the same "
                    f"{count} samples in the same order; {said}",
                )
                break


def sampler_ids(*passes: Pass) -> set[int]:
    return {one.about["sampler_id"] for one in passes}


def same_order(first: Pass, second: Pass) -> bool:
    """Of a shuffling sampler that can be told the epoch."""
    a, b = first.about, second.about
    told = (a["settable"] and a["shuffle"]) or (a["iterable"] and a["data_settable"])
    if not told or not first.is_whole or not second.is_whole or a["length"] != b["length"]:
        return False
    one, other = (
        (first.indices, second.indices) if first.indices is not None else (first.rows, second.rows)
    )
    return one is not None and one == other and len(set(one)) > 3


def shares(passes: list[Pass]) -> list[list[object]] | None:
    """What each rank read in a pass: indices where all have the same data set, else hashes of rows."""
    if len({one.about["print"] for one in passes}) == 1 and all(
        one.indices is not None for one in passes
    ):
        return [list(one.indices or []) for one in passes]
    if all(one.rows is not None for one in passes):
        return [list(one.rows or []) for one in passes]
    return None


def has_replacement(share: list[object]) -> bool:
    return len(share) - len(set(share)) > max(1, len(share) // 50)


def same_samples(seen: Seen) -> Faults:
    """And overlapping shards: both ask what ranks have in common."""
    if not seen.many:
        return
    for passes in seen.training():
        found = shares(passes)
        if found is None or not all(one.is_whole or one.end is not None for one in passes):
            continue
        fault = compared(seen, passes, found)
        if fault is not None:
            yield fault
            return
    yield from same_inputs(seen)


def compared(seen: Seen, passes: list[Pass], found: list[list[object]]) -> Fault | None:
    """Two ranks that read the same, or shares that overlap."""
    sets = [set(share) for share in found]
    common = set.intersection(*sets[:2])
    most = max(len(share) for share in sets)
    if min(map(len, sets)) < 4:
        return None
    number, at = passes[0].number, passes[0].built
    if found[0] == found[1] or (
        len(common) >= 0.95 * most and not any(map(has_replacement, found))
    ):
        return seen.fault(
            "same-samples",
            at,
            f"in pass {number} rank 0 and rank 1 read {len(sets[0])} and {len(sets[1])} "
            f"samples, {len(common)} of them the same",
        )
    if any(map(has_replacement, found)):
        return None
    return overlap(seen, passes, sets)


def overlap(seen: Seen, passes: list[Pass], sets: list[set[object]]) -> Fault | None:
    """Samples that two ranks read, and others that none does: to fill up the last batches takes
    only the first.
    """
    common, about, number = sets[0] & sets[1], passes[0].about, passes[0].number
    largest = max((batch["size"] for one in passes for batch in one.batches), default=1)
    length = None if passes[0].indices is None else about["length"]
    unread = max(0, length - len(set.union(*sets))) if length else 0
    padding = (
        len(passes)
        if about["class"] == "DataLoader" and about["distributed"]
        else len(passes) * largest
    )
    if len(common) > padding or (unread > len(passes) and len(common) > len(passes)):
        if not unread and len(common) <= len(passes) * largest:
            return None
        said = f"in pass {number} {len(common)} samples are read by rank 0 and by rank 1"
        said += (
            f", {unread} of {length} are read by none"
            if length
            else f", of {len(sets[0])} and {len(sets[1])}"
        )
        return seen.fault("overlapping-shards", passes[0].sampler_built, said)
    return None


def same_inputs(seen: Seen) -> Faults:
    """For loops without a loader: what goes into the model, batch by batch."""
    if any(log.training for log in seen.run.ranks):
        return
    calls = [
        [e for e in log.of("forward") if e.get("rows") and e["grad"]] for log in seen.run.ranks
    ]
    pairs = list(zip(*calls, strict=False))[:12]
    if len(pairs) < 3:
        return
    equal = [a["rows"] == b["rows"] and len(set(a["rows"])) > 1 for a, b, *_ in pairs]
    if all(equal):
        yield seen.fault(
            "same-samples",
            pairs[0][0]["at"],
            f"in {len(pairs)} of {len(pairs)} steps the model gets the "
            f"same {pairs[0][0]['size']} rows on rank 0 and rank 1",
        )


def workers_repeat(seen: Seen) -> Faults:
    """Of a stream: each row comes once from each worker."""
    for one in seen.run.ranks[0].training:
        workers = one.about["workers"]
        if not one.about["iterable"] or workers < 2 or not one.rows:
            continue
        times = Counter(one.rows)
        repeated = sum(
            count == workers for count in times.values()
        )  # data may have equal rows: not exactly so
        if len(times) >= 4 and repeated >= 0.9 * len(times):
            said = f"{repeated} of {len(times)} samples of rank 0 come {workers} times in pass {one.number}"
            yield seen.fault("workers-repeat", one.built, f"{said}; there are {workers} workers")
            return


def samples_lost(seen: Seen) -> Faults:
    never: set[object] | None = None
    last: list[Pass] = []
    for passes in seen.training():
        lost = lost_in(passes)
        if lost is None:
            return
        never = lost if never is None else never & lost
        last = passes
    if not last or not never:
        yield from lost_by_epoch(seen, last)
        return
    length, at = last[0].about["length"], last[0].built
    share = f"{100 * len(never) / length:.1f} %"
    times = len(seen.training())
    if times > 1 or len(never) > 0.02 * length:
        yield seen.fault(
            "samples-lost",
            at,
            f"{len(never)} of {length} samples ({share}) are read by no rank, in any of "
            f"{times} passes{dropping(last[0])}",
        )


def lost_by_epoch(seen: Seen, last: list[Pass]) -> Faults:
    """Others in each pass: a shuffled remainder that is dropped."""
    lost = lost_in(last) if last else None
    if lost and len(lost) > 0:
        length = last[0].about["length"]
        yield seen.fault(
            "samples-lost",
            last[0].built,
            f"{len(lost)} of {length} samples are read by no rank in an epoch, others in each{dropping(last[0])}",
            level="note",
        )


def dropping(one: Pass) -> str:
    who = [
        name
        for name, key in [("the loader", "drop_last"), ("its sampler", "sampler_drop")]
        if one.about[key]
    ]
    return f"; {' and '.join(who)} has drop_last" if who else ""


def lost_in(passes: list[Pass]) -> set[object] | None:
    """Indices that no rank has read; None where that cannot be said."""
    about = passes[0].about
    if not all(one.is_whole and one.indices is not None for one in passes) or not about["length"]:
        return None
    if len({one.about["print"] for one in passes}) > 1 or about["length"] != about["base_length"]:
        return None
    shares: list[list[object]] = [list(one.indices or []) for one in passes]
    if any(map(has_replacement, shares)):
        return None
    unread: set[object] = set(range(about["length"]))
    return unread - {index for share in shares for index in share}


def file_over_fork(seen: Seen) -> Faults:
    for rank, event in seen.run.of("shared"):
        yield seen.fault(
            "file-over-fork",
            event["at"],
            f"{event['path']} is an open {event['module'] or 'file'} "
            f"{event['type']} when the loader's workers are forked",
            rank,
        )
        return


def uneven_steps(seen: Seen) -> Faults:
    if not seen.many or seen.run.of("join"):
        return
    for number in range(max(len(log.training) for log in seen.run.ranks)):
        passes = [
            log.training[number] if number < len(log.training) else None for log in seen.run.ranks
        ]
        there = [one for one in passes if one is not None]
        if len(there) < 2 or any(one.end is not None and one.end["cut"] for one in there):
            continue
        counts = [len(one.batches) for one in there]
        whole = [one for one in there if one.is_whole]
        over = whole and any(len(one.batches) > min(len(w.batches) for w in whole) for one in there)
        if over and len(set(counts)) > 1:
            said = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
            yield seen.fault(
                "uneven-steps", there[0].at, f"batches in pass {there[0].number}: {said}"
            )
            return


def files_unread(seen: Seen) -> Faults:
    """Of a training set in several files: those that no rank has opened."""
    reads = [
        event
        for log in seen.run.ranks
        for event in [*log.of("read"), *log.workers]
        if event["k"] == "read"
    ]
    beside: dict[str, set[str]] = {}
    opened: dict[str, set[str]] = {}
    for event in reads:
        beside.setdefault(event["pattern"], set()).update(event.get("beside", []))
        opened.setdefault(event["pattern"], set()).add(event["path"])
    whole = [passes for passes in seen.training() if all(one.is_whole for one in passes)]
    for pattern, paths in opened.items():
        unread = beside[pattern] - paths
        if (
            whole
            and seen.many
            and len(paths) >= 2 * len(seen.run.ranks)
            and 0 < len(unread) < len(paths)
        ):
            said = (
                f"{len(unread)} of {len(beside[pattern])} files {pattern} are opened by no rank, "
            )
            said += f"in any of {len(whole)} passes"
            yield seen.fault("samples-lost", whole[0][0].built, said)
            return

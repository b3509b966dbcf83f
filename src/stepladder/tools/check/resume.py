"""--resume: the script is ended after its first snapshot and started again, and compared with the
unbroken run.
"""

from __future__ import annotations

from dataclasses import replace

from stepladder.tools.check.finding import Fault
from stepladder.tools.check.ranks import RankLaunch, run_ranks
from stepladder.tools.check.recording import Event, Pass, RankLog, Recording, read
from stepladder.tools.check.rules.base import Seen
from stepladder.tools.check.rules.snapshots import module_prefix

NO_COMPARISON = "--resume: two runs of the script differ from the first step on, so weights cannot be compared: seed it"


def resumed_faults(seen: Seen, start: RankLaunch) -> tuple[list[Fault], str]:
    """What differs after a resume, and a word where nothing can be said. start: in a fresh copy."""
    if not seen.run.of("save"):
        return (
            [],
            "--resume: the script has written no snapshot, so there is nothing to resume from",
        )
    copy = start.settings.copy
    halted = run_ranks(
        replace(start, settings=replace(start.settings, stop_at_snapshot=True)), "halted"
    )
    if not halted.halted:
        return (
            [],
            "--resume: nothing is trained after the first snapshot, so there is nothing to compare",
        )
    again = run_ranks(start, "resumed")
    before, after = (read(one.folder, seen.run.original, copy) for one in (halted, again))
    if again.failed:
        last = (
            again.output(next(r for r, code in enumerate(again.codes) if code))
            .rstrip()
            .splitlines()[-1:]
        )
        return failed(seen, after, " ".join(last)), ""
    return compare(seen, before, after)


def failed(seen: Seen, after: Recording, last: str) -> list[Fault]:
    loads = after.of("load")
    at = loads[-1][1]["at"] if loads else first_save(seen.run)["at"]
    rule = (
        "module-prefix"
        if any(e["more"] or e["fewer"] for _, e in after.of("loadsd"))
        else "resume-differs"
    )
    return [again_seen(seen, after).fault(rule, at, f"the resumed script fails: {last}")]


def again_seen(seen: Seen, after: Recording) -> Seen:
    return Seen(replace(seen.run, copy=after.copy), seen.source)


def at_resume_of(seen: Seen, after: Recording) -> Seen:
    """The resumed run by itself, for a rule that looks at one run."""
    return Seen(replace(after, original=seen.run.original), seen.source)


def first_save(run: Recording) -> Event:
    return run.of("save")[0][1]


def compare(seen: Seen, before: Recording, after: Recording) -> tuple[list[Fault], str]:
    whole, first, second = seen.run.ranks[0], before.ranks[0], after.ranks[0]
    done = len(first.of("step"))
    at_resume = again_seen(seen, after)
    loads = second.of("load")
    if not loads:
        return [], "--resume: the script has not looked at its snapshot when it was started again"
    at = loads[-1]["at"]
    if prefixed := list(module_prefix(at_resume_of(seen, after))):
        return prefixed, ""
    epoch = epoch_fault(at_resume, (whole, first, second), first_save(before)["at"])
    if epoch:
        return [epoch], ""
    found: list[Fault] = []
    if samples := samples_fault(at_resume, first, second):
        return [samples], ""
    if rate := rate_fault(at_resume, whole, second, done, at):
        found.append(rate)
    note = ""
    if not found:
        if not repeats(whole, first):
            note = NO_COMPARISON
        elif differs := weights_fault(at_resume, whole, second, done, at):
            found.append(differs)
    return found, note


def epoch_fault(seen: Seen, logs: tuple[RankLog, RankLog, RankLog], at: object) -> Fault | None:
    """By the epoch that the sampler is told, else by the samples that the first pass reads."""
    whole, first, second = logs
    passes = [one for one in first.training if one.is_whole]
    in_the_middle = bool(first.training) and not first.training[-1].is_whole
    if in_the_middle and first.training[-1].steps == 0:
        in_the_middle = False
    told = [epoch_of(log) for log in logs]
    if all(told):
        expected = told[0][len(passes)] if len(passes) < len(told[0]) else None
        found = told[2][0]
        if expected is not None and found != expected and not in_the_middle:
            word = "trained again" if found < expected else "skipped"
            number = found if found < expected else expected
            return seen.fault(
                "resume-epoch",
                at,
                f"the snapshot was written after epoch {told[1][len(passes) - 1]}; the resumed run begins with "
                f"epoch {found}, so epoch {number} is {word}",
            )
        return None
    if in_the_middle or not passes or not second.training:
        return None
    return by_order(seen, whole, second, len(passes), at)


def by_order(seen: Seen, whole: RankLog, second: RankLog, done: int, at: object) -> Fault | None:
    orders = [key_of(one) for one in whole.training]
    found = key_of(second.training[0])
    if found is None or len(set(map(str, orders))) < len(orders) or found not in orders:
        return total_fault(seen, whole, second, done, at)
    number = orders.index(found)
    if number == done:
        return None
    word = f"epoch {number} is trained again" if number < done else f"epoch {done} is skipped"
    return seen.fault(
        "resume-epoch",
        at,
        f"the snapshot was written after {done} epochs; the resumed run begins with the samples of epoch "
        f"{number}: {word}",
    )


def total_fault(seen: Seen, whole: RankLog, second: RankLog, done: int, at: object) -> Fault | None:
    """By their number, where both runs came to their end."""
    if seen.run.stopped or second.of("enough") or not whole.ended or not second.ended:
        return None
    total = done + len(second.training)
    if total == len(whole.training):
        return None
    word = "trained again" if total > len(whole.training) else "skipped"
    return seen.fault(
        "resume-epoch",
        at,
        f"{done} epochs before the stop and {len(second.training)} after it, and {len(whole.training)} without a "
        f"stop: "
        f"{abs(total - len(whole.training))} is {word}",
    )


def key_of(one: Pass) -> object:
    return one.indices if one.indices is not None else one.rows


def epoch_of(log: RankLog) -> list[int]:
    """The epoch that was told before each training pass."""
    found: list[int] = []
    value: int | None = None
    starts = {one.number for one in log.training}
    ids = {one.about["sampler_id"] for one in log.training}
    for event in log.of("setepoch", "pass"):
        if event["k"] == "setepoch" and (event["sampler"] in ids or not ids):
            value = event["value"]
        elif event["k"] == "pass" and event["number"] in starts and isinstance(value, int):
            found.append(value)
    return found


def samples_fault(seen: Seen, first: RankLog, second: RankLog) -> Fault | None:
    """A snapshot in mid-epoch: what the interrupted pass had trained is read again."""
    if (
        not first.training
        or first.training[-1].is_whole
        or not second.training
        or not first.training[-1].steps
    ):
        return None
    cut, new = first.training[-1], second.training[0]
    trained = cut.batches[: cut.steps]
    if any(batch["indices"] is None for batch in [*trained, *new.batches]):
        old = {row for batch in trained for row in batch["rows"]}
        read_again = {row for batch in used(new) for row in batch["rows"]} & old
    else:
        old = {index for batch in trained for index in batch["indices"]}
        read_again = {index for batch in used(new) for index in batch["indices"]} & old
    if len(read_again) > 0.5 * len(old) and old:
        return seen.fault(
            "resume-samples",
            new.at,
            f"the snapshot was written after {cut.steps} steps of an epoch; {len(read_again)} of the {len(old)} "
            f"samples of these steps are trained again",
        )
    return None


def used(one: Pass) -> list[Event]:
    """Batches that were trained, and not only read to be skipped."""
    found, last = [], None
    for event in one.events:
        if event["k"] == "batch":
            last = event
        elif event["k"] == "backward" and last is not None:
            found.append(last)
            last = None
    return found


def rate_fault(seen: Seen, whole: RankLog, second: RankLog, done: int, at: object) -> Fault | None:
    expected, found = whole.of("step")[done : done + 12], second.of("step")[:12]
    for number, (one, other) in enumerate(zip(expected, found, strict=False), done + 1):
        if one["lr"] and abs(one["lr"][0] - other["lr"][0]) > 1e-6 * abs(one["lr"][0]):
            return seen.fault(
                "resume-lr",
                at,
                f"at step {number} the learning rate is {other['lr'][0]:.6g} after the resume, and "
                f"{one['lr'][0]:.6g} in the unbroken run",
            )
    return None


def repeats(whole: RankLog, first: RankLog) -> bool:
    """Whether two runs of the script have the same weights up to the stop."""
    pairs = [
        (a["after"], b["after"])
        for a, b in zip(whole.of("step"), first.of("step"), strict=False)
        if "after" in a and "after" in b
    ]
    return bool(pairs) and all(a == b for a, b in pairs)


def weights_fault(
    seen: Seen, whole: RankLog, second: RankLog, done: int, at: object
) -> Fault | None:
    before = {e["step"]: e["before"] for e in whole.of("prestep")}.get(done + 1)
    resumed = second.of("prestep")[:1]
    if before and resumed and before != resumed[0]["before"]:
        name = next(
            (name for name, digest in before.items() if resumed[0]["before"].get(name) != digest),
            "",
        )
        return seen.fault(
            "resume-differs",
            at,
            f"before step {done + 1} already {name} differs from the unbroken run: the weights themselves are "
            f"not restored",
        )
    for number, (one, other) in enumerate(
        zip(whole.of("step")[done:], second.of("step"), strict=False), done + 1
    ):
        if "after" in one and "after" in other and one["after"] != other["after"]:
            name = next(
                name for name, digest in one["after"].items() if other["after"].get(name) != digest
            )
            return seen.fault(
                "resume-differs",
                at,
                f"after step {number} {name} differs from the unbroken run; before step {done + 1} all weights "
                f"are equal",
            )
    return None

"""Several backward passes per step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from stepladder.tools.check.recording import Event, RankLog
from stepladder.tools.check.rules.base import Faults, Seen
from stepladder.tools.check.rules.model import is_wrapped


@dataclass
class Window:
    """The backward passes between two steps, from one line of the script. forwards: of wrapped models, in them."""

    backs: list[Event] = field(default_factory=list)
    forwards: list[Event] = field(default_factory=list)
    step: Event | None = None


def windows(log: RankLog) -> list[Window]:
    found, current = [], Window()
    for event in log.of("backward", "forward", "prestep", "step", "zero"):
        if event["k"] == "backward":
            current.backs.append(event)
        elif event["k"] == "forward" and event["grad"]:
            current.forwards.append(event)
        elif event["k"] in ("step", "prestep"):
            current.step = event
        if event["k"] in ("step",):
            found.append(current)
            current = Window()
    if not log.of("step"):
        found.append(current)
    return [
        w
        for w in found
        if len(w.backs) > 1 and len({str(b["at"]) for b in w.backs}) == 1 and len(w.forwards) >= len(w.backs)
    ]


def usual(found: list[Window]) -> list[Window]:
    """Those of the most frequent length: not the remainder at the end of an epoch."""
    if not found:
        return []
    length = Counter(len(w.backs) for w in found).most_common(1)[0][0]
    return [w for w in found if len(w.backs) == length]


def accumulation_sync(seen: Seen) -> Faults:
    log = seen.run.ranks[0]
    if not seen.many or not is_wrapped(log):
        return
    found = usual(windows(log))
    costly = [w for w in found if sum(bool(f.get("sync")) for f in w.forwards) >= len(w.backs) > 1]
    if costly and len(costly) == len(found):
        backs = costly[0].backs
        yield seen.fault(
            "accumulation-sync",
            backs[0]["at"],
            f"{len(backs)} backward passes per step, and each of them averages all gradients "
            f"over the ranks: {len(backs) - 1} of {len(backs)} for nothing ({len(costly)} steps seen)",
        )


def accumulation_mean(seen: Seen) -> Faults:
    log = seen.run.ranks[0]
    found = [w for w in usual(windows(log)) if w.step is not None]
    if len(found) < 2 or any("scale" not in back for w in found for back in w.backs):
        return
    if seen.source.has("grad.div_(", "grad /=", "grad.mul_(", ".grad *=", "_foreach_div_", "_foreach_mul_"):
        return
    sums = [sum(back["scale"] for back in w.backs) for w in found]
    count = len(found[0].backs)
    if all(abs(total - 1) > 0.01 for total in sums):
        said = (
            "is divided by nothing"
            if abs(sums[0] - count) < 1e-6
            else f"has weight {found[0].backs[0]['scale']:.4g}"
        )
        yield seen.fault(
            "accumulation-mean",
            found[0].backs[0]["at"],
            f"{count} backward passes per step; the mean loss of each {said}, so the step's gradient "
            f"is {sums[0]:.4g} times the mean ({len(found)} steps seen)",
        )

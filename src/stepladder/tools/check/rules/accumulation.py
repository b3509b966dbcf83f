"""Several backward passes per step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from stepladder.tools.check.recording import Event, RankLog
from stepladder.tools.check.rules.base import Faults, Seen
from stepladder.tools.check.rules.model import is_wrapped


@dataclass
class Window:
    """The backward passes between two steps. forwards, zeros: of models, and calls of zero_grad,
    between them.
    """

    backs: list[Event] = field(default_factory=list)
    forwards: list[Event] = field(default_factory=list)
    zeros: list[Event] = field(default_factory=list)
    step: Event | None = None

    @property
    def is_of_one_line(self) -> bool:
        return len({str(back["at"]) for back in self.backs}) == 1

    @property
    def cleared(self) -> list[Event]:
        """Those that undo a backward pass: of the optimizer that makes the step, or of a module."""
        own = [-1] * self.is_of_one_line + ([self.step["optimizer"]] if self.step else [])
        return [z for z in self.zeros if z["optimizer"] in own and z["n"] < self.backs[-1]["n"]]


def windows(log: RankLog) -> list[Window]:
    """Those with several backward passes, each of a forward pass of its own."""
    found, current = [], Window()
    for event in log.of("backward", "forward", "prestep", "step", "zero"):
        if event["k"] == "backward":
            current.backs.append(event)
        elif event["k"] == "zero" and current.backs:
            current.zeros.append(event)
        elif event["k"] == "forward" and event["grad"]:
            current.forwards.append(event)
        elif event["k"] in ("step", "prestep"):
            current.step = event
        if event["k"] in ("step",):
            found.append(current)
            current = Window()
    if not log.of("step"):
        found.append(current)
    return [w for w in found if len(w.backs) > 1 and len(w.forwards) >= len(w.backs)]


def usual(found: list[Window]) -> list[Window]:
    """Those from one line, of the most frequent length: not the remainder at the end of an epoch."""
    found = [w for w in found if w.is_of_one_line]
    if not found:
        return []
    length = Counter(len(w.backs) for w in found).most_common(1)[0][0]
    return [w for w in found if len(w.backs) == length]


def gradients_discarded(seen: Seen) -> Faults:
    found = [w for w in windows(seen.run.ranks[0]) if w.step is not None]
    lost = [w for w in found if len(w.cleared) >= len(w.backs) - 1]
    if len(lost) >= 2 and len(lost) == len(found):
        count = len(lost[0].backs)
        yield seen.fault(
            "gradients-discarded",
            lost[0].cleared[0]["at"],
            f"{count} backward passes per step, and zero_grad between them: the gradients of {count - 1} of "
            f"{count} are thrown away ({len(lost)} steps seen)",
        )


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
    if seen.source.has(
        "grad.div_(", "grad /=", "grad.mul_(", ".grad *=", "_foreach_div_", "_foreach_mul_"
    ):
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

"""Steps that go wrong on any number of ranks, and what batch norm sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepladder.tools.check.finding import Fault
from stepladder.tools.check.recording import Event, RankLog
from stepladder.tools.check.rules.base import Faults, Seen
from stepladder.tools.check.rules.model import exchanges, is_wrapped
from stepladder.tools.check.rules.static_tree import keeping_line

UNFREEZE = "optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr); leave some of them trainable"


def no_gradient(seen: Seen) -> Faults:
    log = seen.run.ranks[0]
    by_optimizer: dict[int, list[Event]] = {}
    for event in log.of("prestep"):
        by_optimizer.setdefault(event["optimizer"], []).append(event)
    for events in by_optimizer.values():
        if len(events) < 3:
            continue
        frozen = frozen_in(events)
        trained = set(events[-1]["before"]) - frozen
        never = trained - {name for event in events for name in event["grads"]}
        never = {name for name in never if name in events[0]["before"] and not name.startswith("#")}
        if never and len(never) < len(trained):
            shown = ", ".join(sorted(never)[:4]) + ("..." if len(never) > 4 else "")
            yield seen.fault(
                "no-gradient",
                events[0]["at"],
                f"{len(never)} of {len(trained)} parameters have no gradient "
                f"in any of {len(events)} steps: {shown}",
            )
    return


def frozen_in(events: list[Event]) -> set[str]:
    """Return the parameters that had requires_grad=False in any of these steps: a gradient is not
    expected.
    """
    return {name for event in events for name in event.get("frozen_names", [])}


def small_batch_norm(seen: Seen) -> Faults:
    if not seen.many or seen.source.has(
        "SyncBatchNorm", "sync_batchnorm", "SyncBN"
    ):  # on GPUs, perhaps
        return
    calls = [e for e in seen.run.ranks[0].of("forward") if e["grad"] and e.get("norms")]
    if not calls or not (is_wrapped(seen.run.ranks[0]) or exchanges(seen.run.ranks[0])):
        return
    size = max(e["size"] for e in calls)
    if 0 < size < 16:
        yield seen.fault(
            "small-batch-norm",
            calls[0]["at"],
            f"{calls[0]['norms']} batch-norm layers see {size} samples per rank, of a "
            f"global batch of {size * seen.run.world}",
        )


def optimizer_params(seen: Seen) -> Faults:
    log = seen.run.ranks[0]
    looked = [e for e in log.of("step") if "unheld" in e]
    by_optimizer: dict[int, list[Event]] = {}
    for event in looked:
        by_optimizer.setdefault(event["optimizer"], []).append(event)
    for events in by_optimizer.values():
        last = events[-1]
        unheld = set.intersection(*(set(e["unheld"]) for e in events))
        if len(events) >= 2 and last["strangers"] and unheld:
            yield seen.fault(
                "optimizer-params",
                last["at"],
                f"{last['strangers']} of the optimizer's {last['held']} parameters belong to no model "
                f"that is called; {', '.join(sorted(unheld)[:3])} gets a gradient and is in no optimizer",
            )
            return
        if len(events) >= 2 and unheld and len(by_optimizer) == 1:
            yield seen.fault(
                "optimizer-params",
                last["at"],
                f"{len(unheld)} parameters get a gradient in all of {len(events)} steps and are in "
                f"no optimizer: {', '.join(sorted(unheld)[:3])}",
                level="warning",
            )
            return


def learns_nothing(seen: Seen) -> Faults:
    log = seen.run.ranks[0]
    steps = log.of("prestep")
    losses = [(e["loss"], e["at"]) for e in log.of("backward") if "loss" in e]
    after = [e for e in log.of("step") if "after" in e]
    if len(steps) >= 3 and all(e["before"] and set(e["before"]) <= frozen_in([e]) for e in steps):
        yield all_frozen(seen, steps)
    elif len(steps) >= 3 and all(e["norm"] == 0 for e in steps):
        loss = (
            f"; the loss is {losses[0][0]:.4g} in all of them"
            if losses and len({x for x, _ in losses}) == 1
            else ""
        )
        at = losses[0][1] if losses else steps[0]["at"]
        yield seen.fault(
            "learns-nothing", at, f"the gradient is exactly 0 in all of {len(steps)} steps{loss}"
        )
    elif len(losses) >= 5 and len({loss for loss, _ in losses}) == 1:
        yield seen.fault(
            "learns-nothing",
            losses[0][1],
            f"the loss is {losses[0][0]:.6g} in all of {len(losses)} backward passes",
        )
    elif len(after) >= 5 and len({e["optimizer"] for e in after}) == 1 and _never_moves(after):
        yield seen.fault(
            "learns-nothing",
            after[0]["at"],
            f"no weight has changed in {len(after)} steps, at a learning rate of {after[-1]['lr'][0]:.4g}",
        )


def all_frozen(seen: Seen, steps: list[Event]) -> Fault:
    count = len(steps[-1]["before"])
    said = f"all {count} parameters of the optimizer have requires_grad=False in all of {len(steps)} steps"
    return replace(seen.fault("learns-nothing", steps[0]["at"], said), fix=UNFREEZE)


def _never_moves(after: list[Event]) -> bool:
    """Weights that cannot be hashed, as sharded ones, have an empty hash each."""
    return any(after[0]["after"].values()) and all(e["after"] == after[0]["after"] for e in after)


def missing_zero_grad(seen: Seen) -> Faults:
    by_optimizer: dict[int, list[Event]] = {}
    for event in seen.run.ranks[0].of("prestep"):
        by_optimizer.setdefault(event["optimizer"], []).append(event)
    for events in by_optimizer.values():
        later = [e for e in events if e["step"] > 1]
        if (
            len(later) >= 2
            and not any(e["clean"] for e in later)
            and any(e["norm"] > 0 for e in later)
        ):
            yield seen.fault(
                "missing-zero-grad",
                later[0]["at"],
                f"in {len(later)} of {len(later)} steps the gradients of the step before are still there; "
                f"their norm goes from {events[0]['norm']:.4g} to {later[-1]['norm']:.4g}",
            )


def eval_stays(seen: Seen) -> Faults:
    by_root: dict[Any, list[Event]] = {}
    log = seen.run.ranks[0]
    trained = {e["root"] for e in log.of("forward") if e["grad"]}
    for event in log.of("forward"):
        if event["grad"] and "moded" in event and event["moded"]:
            by_root.setdefault(event["root"], []).append(event)
    for root, events in by_root.items():
        on = [e for e in events if e["moded_on"]]
        off = [e for e in events if not e["moded_on"] and trains_after(log, e)]
        if (
            on
            and len(off) >= 2
            and off[-1] is events[-1]
            and root in trained
            and not any(e["n"] > off[0]["n"] for e in on)
        ):
            turned = [e for e in log.of("eval") if on[-1]["n"] < e["n"] < off[0]["n"]]
            at = turned[-1]["at"] if turned else off[0]["at"]
            yield seen.fault(
                "eval-stays",
                at,
                f"in {len(off)} training steps none of {off[0]['moded']} layers (dropout, batch norm) is in "
                f"training mode; "
                f"in the {len(on)} before they were",
            )
            return


def trains_after(log: RankLog, event: Event) -> bool:
    later = next((e for e in log.of("backward", "forward") if e["n"] > event["n"]), None)
    return later is not None and later["k"] == "backward"


def activation_twice(seen: Seen) -> Faults:
    backs = seen.run.ranks[0].of("backward")
    found = [e for e in backs if e.get("twice")]
    if len(found) >= 2:
        yield seen.fault(
            "activation-twice",
            found[0]["at"],
            f"in {len(found)} of {len(backs)} backward passes the loss's input is the output of a "
            f"{found[0]['twice']}, and the loss includes one",
        )


def graph_kept(seen: Seen) -> Faults:
    log = seen.run.ranks[0]
    backs = log.of("backward")
    run: list[Event] = []
    for event in backs:
        run = [*run, event] if run and event["alive"] == run[-1]["alive"] + 1 else [event]
        if len(run) >= 7:
            break
    if len(run) >= 7:
        at = kept_at(seen, run[0]["at"]) or run[0]["at"]
        yield seen.fault(
            "graph-kept",
            at,
            f"after {len(run)} backward passes in a row the graphs of all {run[-1]['alive']} earlier losses are "
            f"still in memory",
        )


def kept_at(seen: Seen, at: Any) -> Any:
    """The line that keeps the loss: in the function of its backward pass, else where it is returned
    to.
    """
    file = seen.source.file(seen.place(at).file) if at else None
    line = keeping_line(file, int(at[1])) if file else None
    return [at[0], line, ""] if line else None


def clip_before_average(seen: Seen) -> Faults:
    for log in seen.run.ranks:
        clipped: Event | None = None
        for event in log.of("clip", "coll", "step", "backward"):
            if event["k"] == "clip":
                clipped = event
            elif event["k"] in ("step", "backward"):
                clipped = None
            elif clipped and event.get("ptr") in clipped["ptrs"] and event["op"] == "all_reduce":
                yield seen.fault(
                    "clip-before-average",
                    clipped["at"],
                    "the gradient is clipped on each rank, and then summed over the ranks",
                )
                return

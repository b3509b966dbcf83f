"""What becomes of gradients and weights on each rank."""

from __future__ import annotations

from typing import Any

from stepladder.tools.check.recording import Event, RankLog
from stepladder.tools.check.rules.base import Faults, Seen

OTHERS = ("horovod", "deepspeed", "fully_shard", "pipeline", "PipelineStage", "DTensor", "torchft")


def steps_of(log: RankLog, kind: str = "prestep") -> dict[tuple[int, int], Event]:
    """Optimizer steps that were looked at whole, by optimizer and number."""
    return {(e["optimizer"], e["step"]): e for e in log.of(kind) if kind == "prestep" or "after" in e}


def is_wrapped(log: RankLog) -> bool:
    return any(e["wrapped"] for e in log.of("forward") if e["grad"])


def exchanges(log: RankLog) -> list[Event]:
    """Collectives that carry something as large as a parameter, while training."""
    steps = log.of("step")
    if not steps:
        return []
    shapes = {str(shape) for e in steps for shape in e.get("shapes", [])}
    numbers = {e["numel"] for e in steps}
    first = min(e["n"] for e in log.of("backward", "step"))
    return [
        e for e in log.of("coll")
        if e["n"] > first and "shape" in e and (str(e["shape"]) in shapes or e["count"] in numbers or e["count"] >= 0.5 * max(numbers))
    ]  # fmt: skip


def not_wrapped(seen: Seen) -> Faults:
    if not seen.many or seen.source.has(*OTHERS):
        return
    logs = seen.run.ranks[:2]
    steps = [steps_of(log) for log in logs]
    common = sorted(steps[0].keys() & steps[1].keys())
    if len(common) < 2 or any(is_wrapped(log) or exchanges(log) for log in logs):
        return
    apart = [key for key in common if steps[0][key]["grads"] != steps[1][key]["grads"]]
    if not apart and not _same_for_other_reason(steps, common):
        return
    key = (apart or common)[0]
    one, other = steps[0][key], steps[1][key]
    differ = sum(digest != other["grads"].get(name) for name, digest in one["grads"].items())
    bypass = logs[0].of("ddp") and "; a wrapper was built, but the model was not called through it"
    met = "" if logs[0].of("who") else "; the ranks never met in a process group"
    if apart or met:
        yield seen.fault("not-wrapped", one["at"], f"before step {key[1]} {differ} of {len(one['grads'])} gradients differ between "
                         f"rank 0 (norm {one['norm']:.4g}) and rank 1 ({other['norm']:.4g}), and none is exchanged{bypass or ''}{met}")  # fmt: skip


def _same_for_other_reason(steps: Any, common: Any) -> bool:
    return bool(common)


def replicas_differ(seen: Seen) -> Faults:
    """And changed-outside: both ask when the weights of two ranks part."""
    logs = seen.run.ranks[:2]
    if not seen.many or not any(is_wrapped(log) or exchanges(log) for log in logs):
        return
    if _sharded(logs):
        return
    replaced = list(parameters_replaced(seen))
    yield from replaced
    if replaced:
        return
    before, after = [steps_of(log) for log in logs], [steps_of(log, "step") for log in logs]
    for key in sorted(after[0].keys() & after[1].keys(), key=lambda k: (k[1], k[0])):
        one, other = (b.get(key) for b in before)
        if one and other and (name := first_apart(one["before"], other["before"])):
            yield from parted_before(seen, key, name)
            return
        done, others = after[0][key], after[1][key]
        if name := first_apart(done["after"], others["after"]):
            why = ""
            if done["lr"] != others["lr"]:
                why = f"; the learning rate is {done['lr'][0]:.4g} and {others['lr'][0]:.4g}"
            elif one and other and one["grads"].get(name) != other["grads"].get(name):
                why = f"; its gradient differs (norms of all {one['norm']:.4g} and {other['norm']:.4g})"
            if is_averaging_later(logs[0], done):
                return
            yield seen.fault(
                "replicas-differ", done["at"], f"{name} differs between rank 0 and rank 1 after step {key[1]}{why}"
            )
            return
        if name := first_apart(done["state"], others["state"]):
            yield seen.fault(
                "replicas-differ",
                done["at"],
                f"the optimizer's state of {name} differs between rank 0 and rank 1 after step {key[1]}",
            )
            return


def _sharded(logs: list[RankLog]) -> bool:
    return any(e["wrapped"] not in ("", "DistributedDataParallel") for log in logs for e in log.of("forward"))


def is_averaging_later(log: RankLog, step: Event) -> bool:
    """Local steps, whose weights are averaged after some of them: a method, and no mistake."""
    shapes = [str(shape) for shape in step.get("shapes", [])]
    ptrs = {ptr for e in log.of("prestep") for ptr in e["ptrs"]}
    sent = [e for e in exchanges(log) if str(e["shape"]) in shapes and e["ptr"] not in ptrs]
    return bool(sent) and not is_wrapped(log)


def first_apart(one: dict[str, str], other: dict[str, str]) -> str:
    return next((name for name, digest in one.items() if name in other and digest != other[name]), "")


def parted_before(seen: Seen, key: tuple[int, int], name: str) -> Faults:
    """The weights differ before a step, and did not after the one before: somebody else has changed them."""
    logs = seen.run.ranks[:2]
    step = steps_of(logs[0])[key]
    if key[1] > 1:
        last = f"step {key[1] - 1}"
        yield seen.fault(
            "changed-outside",
            step["at"],
            f"{name} is equal on all ranks after {last}, and differs before step {key[1]}",
        )
        return
    built = [log.of("ddp")[-1:] for log in logs]
    if (
        all(built)
        and (own := built[0][0]["parameters"]).get(name)
        and own[name][1] == built[1][0]["parameters"].get(name, ["", ""])[1]
    ):
        yield seen.fault(
            "changed-outside",
            built[0][0]["at"],
            f"{name} is equal on all ranks when the wrapper is built, and differs before step 1",
        )
        return
    if (
        not all(built)
        and not is_wrapped(logs[0])
        and any(is_averaging_later(log, s) for log in logs for s in log.of("step")[:1])
    ):
        return
    yield seen.fault(
        "replicas-differ",
        step["at"],
        f"{name} differs between rank 0 and rank 1 before step 1: they begin with other weights",
    )


def parameters_replaced(seen: Seen) -> Faults:
    """Tensors that were put in the place of those that the wrapper has registered."""
    for log in seen.run.ranks[:1]:
        wrappers, steps = log.of("ddp"), log.of("prestep")
        if len(wrappers) != 1 or not steps or len({s["optimizer"] for s in steps}) > 1:
            continue
        known = {ident for ident, _ in wrappers[0]["parameters"].values()}
        names = wrappers[0]["parameters"]
        new = [name for name, ident in steps[-1]["ids"].items() if ident not in known and name in names]
        if new and seen.many:
            yield seen.fault("changed-outside", wrappers[0]["at"], f"{', '.join(new[:3])}: the tensor that is trained is not the one "
                             f"that the wrapper has registered, so its gradient is not averaged")  # fmt: skip


def no_gradient(seen: Seen) -> Faults:
    log = seen.run.ranks[0]
    by_optimizer: dict[int, list[Event]] = {}
    for event in log.of("prestep"):
        by_optimizer.setdefault(event["optimizer"], []).append(event)
    for events in by_optimizer.values():
        if len(events) < 3:
            continue
        never = set(events[-1]["before"]) - {name for event in events for name in event["grads"]}
        never = {name for name in never if name in events[0]["before"] and not name.startswith("#")}
        if never and len(never) < len(events[-1]["before"]):
            shown = ", ".join(sorted(never)[:4]) + ("..." if len(never) > 4 else "")
            yield seen.fault("no-gradient", events[0]["at"], f"{len(never)} of {len(events[-1]['before'])} parameters have no gradient "
                             f"in any of {len(events)} steps: {shown}")  # fmt: skip
    return


def small_batch_norm(seen: Seen) -> Faults:
    if not seen.many:
        return
    calls = [e for e in seen.run.ranks[0].of("forward") if e["grad"] and e.get("norms")]
    if not calls or not (is_wrapped(seen.run.ranks[0]) or exchanges(seen.run.ranks[0])):
        return
    size = max(e["size"] for e in calls)
    if 0 < size < 16:
        yield seen.fault("small-batch-norm", calls[0]["at"], f"{calls[0]['norms']} batch-norm layers see {size} samples per rank, of a "
                         f"global batch of {size * seen.run.world}")  # fmt: skip


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
            yield seen.fault("optimizer-params", last["at"], f"{last['strangers']} of the optimizer's {last['held']} parameters belong to no model "
                             f"that is called; {', '.join(sorted(unheld)[:3])} gets a gradient and is in no optimizer")  # fmt: skip
            return
        if len(events) >= 2 and unheld and len(by_optimizer) == 1:
            yield seen.fault("optimizer-params", last["at"], f"{len(unheld)} parameters get a gradient in all of {len(events)} steps and are in "
                             f"no optimizer: {', '.join(sorted(unheld)[:3])}", level="warning")  # fmt: skip
            return


def learns_nothing(seen: Seen) -> Faults:
    log = seen.run.ranks[0]
    steps = log.of("prestep")
    losses = [(e["loss"], e["at"]) for e in log.of("backward") if "loss" in e]
    after = [e for e in log.of("step") if "after" in e]
    if len(steps) >= 3 and all(e["norm"] == 0 for e in steps):
        loss = (
            f"; the loss is {losses[0][0]:.4g} in all of them"
            if losses and len({x for x, _ in losses}) == 1
            else ""
        )
        at = losses[0][1] if losses else steps[0]["at"]
        yield seen.fault("learns-nothing", at, f"the gradient is exactly 0 in all of {len(steps)} steps{loss}")
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


def _never_moves(after: list[Event]) -> bool:
    return all(e["after"] == after[0]["after"] for e in after)


def missing_zero_grad(seen: Seen) -> Faults:
    by_optimizer: dict[int, list[Event]] = {}
    for event in seen.run.ranks[0].of("prestep"):
        by_optimizer.setdefault(event["optimizer"], []).append(event)
    for events in by_optimizer.values():
        later = [e for e in events if e["step"] > 1]
        if len(later) >= 2 and not any(e["clean"] for e in later) and any(e["norm"] > 0 for e in later):
            yield seen.fault("missing-zero-grad", later[0]["at"], f"in {len(later)} of {len(later)} steps the gradients of the step before are still there; "
                             f"their norm goes from {events[0]['norm']:.4g} to {later[-1]['norm']:.4g}")  # fmt: skip


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
            yield seen.fault("eval-stays", at, f"in {len(off)} training steps none of {off[0]['moded']} layers (dropout, batch norm) is in training mode; "
                             f"in the {len(on)} before they were")  # fmt: skip
            return


def trains_after(log: RankLog, event: Event) -> bool:
    later = next((e for e in log.of("backward", "forward") if e["n"] > event["n"]), None)
    return later is not None and later["k"] == "backward"


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
            f"after {len(run)} backward passes in a row the graphs of all {run[-1]['alive']} earlier losses are still in memory",
        )


def kept_at(seen: Seen, at: Any) -> Any:
    """The line that keeps the loss: in the function of its backward pass, else where it is returned to."""
    from stepladder.tools.check.rules.static_tree import keeping_line

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

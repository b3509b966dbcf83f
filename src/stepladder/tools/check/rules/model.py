"""What becomes of gradients and weights on each rank."""

from __future__ import annotations

from stepladder.tools.check.recording import Event, RankLog
from stepladder.tools.check.rules.base import Faults, Seen

OTHERS = ("horovod", "deepspeed", "fully_shard", "pipeline", "PipelineStage", "DTensor", "torchft")


def steps_of(log: RankLog, kind: str = "prestep") -> dict[tuple[int, int], Event]:
    """Optimizer steps that were looked at whole, by optimizer and number."""
    met = max((e["n"] for e in log.of("who")), default=0)
    events = [e for e in log.of("prestep", "step") if e["n"] > met]
    order = {
        number: place for place, number in enumerate(dict.fromkeys(e["optimizer"] for e in events))
    }
    seen = [e for e in events if e["k"] == kind and (kind == "prestep" or "after" in e)]
    return {(order[e["optimizer"]], e["step"]): e for e in seen}


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
        e
        for e in log.of("coll")
        if e["n"] > first
        and "shape" in e
        and (str(e["shape"]) in shapes or e["count"] in numbers or e["count"] >= 0.5 * max(numbers))
    ]


def not_wrapped(seen: Seen) -> Faults:
    if not seen.many or seen.source.has(*OTHERS):
        return
    logs = seen.run.ranks[:2]
    steps = [steps_of(log) for log in logs]
    common = sorted(steps[0].keys() & steps[1].keys())
    if len(common) < 2 or any(is_wrapped(log) or exchanges(log) for log in logs):
        return
    apart = [key for key in common if steps[0][key]["grads"] != steps[1][key]["grads"]]
    met = bool(logs[0].of("who"))
    if not apart and met:  # the same samples on all ranks, which another rule says
        return
    key = (apart or common)[0]
    one, other = steps[0][key], steps[1][key]
    differ = sum(digest != other["grads"].get(name) for name, digest in one["grads"].items())
    norms = f"(norm {one['norm']:.4g}) and rank 1 ({other['norm']:.4g})"
    said = f"before step {key[1]} {differ} of {len(one['grads'])} gradients differ between rank 0 {norms}, "
    said = (said if apart else "") + f"no gradient is exchanged in {len(common)} steps"
    said += "; a wrapper was built, and the model is not called through it" * bool(
        logs[0].of("ddp")
    )
    yield seen.fault(
        "not-wrapped", one["at"], said + "; the ranks never met in a process group" * (not met)
    )


def replicas_differ(seen: Seen) -> Faults:
    """And changed-outside: both ask when the weights of two ranks part."""
    logs = seen.run.ranks[:2]
    if not seen.many or not any(is_wrapped(log) or exchanges(log) for log in logs):
        return
    if _sharded(logs) or seen.run.of("join"):  # joined ranks make different numbers of steps
        return
    replaced = list(parameters_replaced(seen))
    yield from replaced
    if replaced:
        return
    before, after = [steps_of(log) for log in logs], [steps_of(log, "step") for log in logs]
    if any(is_averaging_later(before, key) for key in parted(before)[:1]):
        return
    yield from buffers_apart(seen, after)
    if not parted(before):
        yield from evaluated_differ(seen)
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
            yield seen.fault(
                "replicas-differ",
                done["at"],
                f"{name} differs between rank 0 and rank 1 after step {key[1]}{why}",
            )
            return
        if name := first_apart(done["state"], others["state"]):
            yield seen.fault(
                "replicas-differ",
                done["at"],
                f"the optimizer's state of {name} differs between rank 0 and rank 1 after step {key[1]}",
            )
            return


def evaluated_differ(seen: Seen) -> Faults:
    """Replicas that are trained alike, and models beside them, as a moving average, that are not."""
    logs = seen.run.ranks[:2]
    if not seen.many or _sharded(logs):
        return
    for one, other in zip(*(judged_models(log) for log in logs), strict=False):
        if one["at"] == other["at"] and one["weights"] != other["weights"]:
            said = (
                f"the {one['class']} that is evaluated has other weights on rank 0 than on rank 1"
            )
            yield seen.fault(
                "replicas-differ", one["at"], said + ", and all that is trained is equal"
            )
            return


def judged_models(log: RankLog) -> list[Event]:
    """First calls of models in passes that train nothing."""
    calls = [e for one in log.evaluations for e in one.events if e["k"] == "forward"]
    return [e for e in calls if not e["grad"] and e.get("weights")]


def _sharded(logs: list[RankLog]) -> bool:
    return any(
        e["wrapped"] not in ("", "DistributedDataParallel")
        for log in logs
        for e in log.of("forward")
    )


def is_averaging_later(before: list[dict[tuple[int, int], Event]], key: tuple[int, int]) -> bool:
    """Local steps, after which the weights are averaged now and then: a method, and no mistake."""
    later = [k for k in before[0].keys() & before[1].keys() if k[0] == key[0] and k[1] > key[1]]
    return any(before[0][k]["before"] == before[1][k]["before"] for k in later)


def parted(before: list[dict[tuple[int, int], Event]]) -> list[tuple[int, int]]:
    """Steps before which the weights of two ranks differ."""
    common = sorted(before[0].keys() & before[1].keys(), key=lambda k: (k[1], k[0]))
    return [key for key in common if before[0][key]["before"] != before[1][key]["before"]]


def buffers_apart(seen: Seen, after: list[dict[tuple[int, int], Event]]) -> Faults:
    """Where the wrapper was told not to send them."""
    common = sorted(after[0].keys() & after[1].keys(), key=lambda k: (k[1], k[0]))
    built = seen.run.ranks[0].of("ddp")
    if not common or not built or built[0].get("buffers", True):
        return
    one, other = (each[common[-1]].get("buffers", {}) for each in after)
    if name := first_apart(one, other):
        said = f"the buffer {name} differs between the ranks after step {common[-1][1]}; broadcast_buffers=False"
        yield seen.fault("replicas-differ", built[0]["at"], said)


def first_apart(one: dict[str, str], other: dict[str, str]) -> str:
    return next(
        (name for name, digest in one.items() if name in other and digest != other[name]), ""
    )


def parted_before(seen: Seen, key: tuple[int, int], name: str) -> Faults:
    """The weights differ before a step, and did not after the one before: somebody else has changed
    them.
    """
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
        new = [
            name for name, ident in steps[-1]["ids"].items() if ident not in known and name in names
        ]
        if new and seen.many:
            yield seen.fault(
                "changed-outside",
                wrappers[0]["at"],
                f"{', '.join(new[:3])}: the tensor that is trained is not the one "
                f"that the wrapper has registered, so its gradient is not averaged",
            )

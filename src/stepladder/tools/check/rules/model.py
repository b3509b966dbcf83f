"""Rules for gradients, weights and wrappers: what ranks train must be the same on all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

from stepladder.tools.check.events import (
    Backward,
    BeforeStep,
    Digests,
    Forward,
    GroupJoined,
    JoinContext,
    LocalGradients,
    ModelMoved,
    OptimizerStep,
    OtherGroup,
    Print,
    ScheduleStep,
    ScriptCollective,
    Sharding,
    StateDictLoad,
    WrapperBuilt,
)
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule, run_rule
from stepladder.tools.check.rules.shown_values import names_rank
from stepladder.tools.findings.finding import Finding

REPLICATES = re.compile("NO_SHARD|HYBRID")
SHARDING_WRAPPER = "FullyShardedDataParallel"
INTEGER = re.compile(r"(?<![\w.,])\d[\d,_]*(?!\w|\.\d)")
MIN_PARAMETERS = 1000  # a smaller number may be another one
ROUNDING_OF_GRADIENTS = 1e-3  # relative, of gradients that are exchanged in half precision
StepKey = tuple[int, int]  # an optimizer's number, in the order of first use, and its step
S = TypeVar("S", BeforeStep, OptimizerStep)
T = TypeVar("T")
Steps = dict[StepKey, S]
Pairs = dict[StepKey, tuple[T, T]]  # of two ranks


def steps_of(log: RankLog, kind: type[S], with_hashes: bool = True) -> Steps[S]:
    """Return the optimizer steps of a rank in its group.

    Args:
        log: The events of one rank.
        kind: What was recorded, before each step or after it.
        with_hashes: Whether those are left out of which no hashes were recorded.
    """
    group_made = max((event.n for event in log.select(GroupJoined)), default=0)
    optimizers: list[int] = []
    steps: Steps[S] = {}
    for event in log.select(BeforeStep, OptimizerStep):
        if isinstance(event, BeforeStep | OptimizerStep) and event.n > group_made:
            if event.optimizer not in optimizers:
                optimizers.append(event.optimizer)
            is_known = isinstance(event, BeforeStep) or event.after or not with_hashes
            if isinstance(event, kind) and is_known:
                steps[optimizers.index(event.optimizer), event.step] = event
    return steps


def pair(steps_of_ranks: Iterable[dict[StepKey, T]]) -> Pairs[T]:
    """Return the steps that both ranks have made, by number and then by optimizer."""
    first, second = steps_of_ranks
    keys = sorted(first.keys() & second.keys(), key=itemgetter(1, 0))
    return {key: (first[key], second[key]) for key in keys}


def paired_steps(logs: list[RankLog], kind: type[S]) -> Pairs[S]:
    return pair(steps_of(log, kind) for log in logs)


def is_wrapped(log: RankLog) -> bool:
    """Return whether a wrapper that averages gradients was trained."""
    return any(event.wrapped for event in log.select(Forward) if event.grad)


def gradient_collectives(log: RankLog) -> list[ScriptCollective]:
    """Return the collectives while training whose tensors are as large as a parameter."""
    steps = log.select(OptimizerStep)
    if not steps:
        return []
    parameter_shapes = [shape for step in steps for shape in step.shapes]
    counts = {step.numel for step in steps}
    large = 0.5 * max(counts)
    training_begins = log.select(Backward, OptimizerStep)[0].n
    collectives = [event for event in log.select(ScriptCollective) if event.n > training_begins]
    return [
        event
        for event in collectives
        if event.shape in parameter_shapes
        or (event.shape is not None and (event.count in counts or event.count >= large))
    ]


def exchanges_gradients(log: RankLog) -> bool:
    return is_wrapped(log) or bool(gradient_collectives(log))


@rank_rule("not-wrapped")
def not_wrapped(evidence: RunEvidence) -> Findings:
    """Find ranks that train without any exchange of gradients.

    Gradients that agree but for rounding were exchanged, if by messages from rank to rank, and so
    were weights that are the same again after they differed.
    """
    if any(event.averages for _, event in evidence.run.select(OtherGroup)):
        return
    logs = evidence.first_ranks
    steps = paired_steps(logs, BeforeStep)
    if len(steps) < 2 or any(map(exchanges_gradients, logs)):
        return
    diverged = [
        key
        for key, (first, second) in steps.items()
        if first.grads != second.grads and not are_equal(first.sums, second.sums)
    ]
    has_group = bool(logs[0].select(GroupJoined))
    if not diverged and has_group:  # the ranks read the same samples: another rule reports that
        return
    apart = diverged_steps(steps)
    if apart and is_averaged_later(steps, apart[0]):
        return
    key = min(diverged or steps)
    text = f"no gradient is exchanged in {len(steps)} steps"
    if diverged:
        text = f"before step {key[1]} {describe_gradients(*steps[key])}, {text}"
    if logs[0].select(WrapperBuilt):
        text += "; a wrapper was built, and the model is not called through it"
    if not has_group:
        text += "; the ranks never met in a process group"
    yield evidence.finding("not-wrapped", steps[key][0].at, text)


@rank_rule("not-wrapped.one")
def gradients_of_one_rank(evidence: RunEvidence) -> Findings:
    """Find ranks that all step with the gradients that one of them has computed."""
    first_steps = align(log.select(BeforeStep)[:1] for log in evidence.ranks)
    are_alike = all(are_equal(steps[0].sums, step.sums) for steps in first_steps for step in steps)
    sources = [log.rank for log in evidence.ranks if uses_its_own_gradients(log)]
    have_computed = all(log.select(LocalGradients) for log in evidence.ranks)
    if are_alike and have_computed and len(sources) == 1:
        text = f"all ranks step with what the backward passes of rank {sources[0]} have left"
        yield evidence.finding("not-wrapped.one", first_steps[0][0].at, text)


def uses_its_own_gradients(log: RankLog) -> bool:
    """Return whether each step of a rank uses what its own last backward pass has left."""
    local: LocalGradients | None = None
    are_own: list[bool] = []
    for event in log.select(LocalGradients, BeforeStep):
        if isinstance(event, LocalGradients):
            local = event
        elif local and isinstance(event, BeforeStep):
            are_own.append(are_equal(local.sums, event.sums))
            local = None
    return bool(are_own) and all(are_own)


def are_equal(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether sums of gradients are known, and the same but for rounding."""
    if not first or len(first) != len(second):
        return False
    tolerance = ROUNDING_OF_GRADIENTS * max(map(abs, [*first, *second]))
    return all(abs(a - b) <= tolerance for a, b in zip(first, second, strict=True))


def describe_gradients(first: BeforeStep, second: BeforeStep) -> str:
    different = [n for n, digest in first.grads.items() if digest != second.grads.get(n)]
    return (
        f"{len(different)} of {len(first.grads)} gradients differ between rank 0 (norm "
        f"{first.norm:.4g}) and rank 1 ({second.norm:.4g})"
    )


SHARDED_NAME = "_fsdp_wrapped_module"


@rank_rule("replicas-differ", "changed-outside", "sync-skipped")
def replicas_differ(evidence: RunEvidence) -> Findings:
    """Find weights that diverge between two ranks, by training or by a change outside of it."""
    logs = evidence.first_ranks
    # Ranks in a Join context make different numbers of steps.
    if not share_gradients(logs) or is_sharded(logs) or evidence.run.select(JoinContext):
        return
    replaced = list(replaced_parameters(evidence))
    if replaced:
        yield from replaced
        return
    before = paired_steps(logs, BeforeStep)
    after = paired_steps(logs, OptimizerStep)
    diverged = diverged_steps(before)
    if diverged and is_averaged_later(before, diverged[0]):
        return
    rates = list(different_rates(evidence))
    if rates:
        yield from rates
        return
    yield from diverged_buffers(evidence, after)
    if not diverged:
        yield from evaluated_models_differ(evidence)
    for key in after:
        finding = find_divergence(evidence, before, after, key)
        if finding:
            yield finding
            return


def share_gradients(logs: list[RankLog]) -> bool:
    """Return whether ranks exchange gradients, or step with equal ones though weights differ."""
    if any(map(exchanges_gradients, logs)):
        return True
    steps = paired_steps(logs, BeforeStep)
    different = [steps[key] for key in diverged_steps(steps) if steps[key][0].norm > 0]
    return bool(different) and all(first.grads == second.grads for first, second in different)


def find_divergence(
    evidence: RunEvidence, before: Pairs[BeforeStep], after: Pairs[OptimizerStep], key: StepKey
) -> Finding | None:
    """Return the finding of weights or optimizer states that differ before or after one step."""
    for step, other in [before[key]] if key in before else ():
        if name := first_difference(step.before, other.before):
            return diverged_before_step(evidence, step, key, name)
    first, second = after[key]
    if name := first_difference(first.after, second.after):
        if backward := unsynced_backward(evidence.rank_0, first):
            text = (
                f"the last backward pass before step {key[1]} ran under no_sync, and {name} differs"
            )
            text += " between rank 0 and rank 1 after it"
            return evidence.finding("sync-skipped", backward.at, text)
        cause = describe_cause(before.get(key), name)
        text = f"{name} differs between rank 0 and rank 1 after step {key[1]}{cause}"
        return evidence.finding("replicas-differ", first.at, text)
    if name := first_difference(first.state, second.state):
        text = (
            f"the optimizer's state of {name} differs between rank 0 and rank 1 after step {key[1]}"
        )
        return evidence.finding("replicas-differ", first.at, text)
    return None


def unsynced_backward(log: RankLog, step: OptimizerStep) -> Backward | None:
    """Return the last backward pass before a step, if the wrapper has averaged nothing in it."""
    earlier = [event for event in log.select(Forward, Backward) if event.n < step.n]
    calls = [e for e in earlier if isinstance(e, Forward) and e.grad and e.wrapped]
    backwards = [event for event in earlier if isinstance(event, Backward)]
    if calls and backwards and not calls[-1].sync:
        return backwards[-1]
    return None


def different_rates(evidence: RunEvidence) -> Findings:
    """Find the first step that two ranks make with different learning rates."""
    logs = evidence.first_ranks
    steps, others = [steps_of(log, OptimizerStep, with_hashes=False) for log in logs]
    for key in (key for key in steps if key in others):
        first, second = steps[key], others[key]
        different = [pair for pair in zip(first.lr, second.lr, strict=False) if pair[0] != pair[1]]
        if different:
            schedules = [event for event in logs[0].select(ScheduleStep) if event.n < first.n]
            yield evidence.finding(
                "replicas-differ.rates",
                schedules[-1].at if schedules else first.at,
                "rank 0 makes step {} with {:.4g}, rank 1 with {:.4g}".format(
                    key[1], *different[0]
                ),
            )
            return


def describe_cause(before: tuple[BeforeStep, BeforeStep] | None, name: str) -> str:
    """Return why a weight differs after a step; empty where its gradient does not."""
    if before and before[0].grads.get(name) != before[1].grads.get(name):
        norms = " and ".join(f"{step.norm:.4g}" for step in before)
        return f"; its gradient differs (norms of all {norms})"
    return ""


def evaluated_models_differ(evidence: RunEvidence) -> Findings:
    """Find models such as a moving average that differ although the trained replicas are equal."""
    for first, second in align(map(evaluated_models, evidence.first_ranks)):
        if first.at == second.at and first.weights != second.weights:
            yield evidence.finding(
                "replicas-differ",
                first.at,
                f"the {first.model_class} that is evaluated has other weights on rank 0 than on "
                f"rank 1, and all that is trained is equal",
            )
            return


def evaluated_models(log: RankLog) -> list[Forward]:
    """Return the first calls of models in passes that train nothing."""
    events = [event for one_pass in log.evaluation_passes for event in one_pass.events]
    return [e for e in events if isinstance(e, Forward) and not e.grad and e.weights]


def is_sharded(logs: list[RankLog]) -> bool:
    """Return whether each rank holds a part of the weights, also of a model inside of another."""
    wrappers = {event.wrapped for log in logs for event in log.select(Forward)}
    if not wrappers <= {"", "DistributedDataParallel"}:
        return True
    first_steps = [step for log in logs for step in log.select(BeforeStep)[:1]]
    return any(SHARDED_NAME in name for step in first_steps for name in step.before)


def is_averaged_later(before: Pairs[BeforeStep], key: StepKey) -> bool:
    """Return whether the weights are equal again before a later step of the same optimizer.

    Local steps with an average now and then are a method, and no mistake.
    """
    optimizer, step = key
    later = [pair for k, pair in before.items() if k[0] == optimizer and k[1] > step]
    return any(first.before == second.before for first, second in later)


def diverged_steps(before: Pairs[BeforeStep]) -> list[StepKey]:
    """Return the steps before which the weights of two ranks differ."""
    return [key for key, (first, second) in before.items() if first.before != second.before]


def diverged_buffers(evidence: RunEvidence, after: Pairs[OptimizerStep]) -> Findings:
    """Find buffers that differ because the wrapper does not broadcast them."""
    wrappers = evidence.rank_0.select(WrapperBuilt)
    if not after or not wrappers or wrappers[0].buffers:
        return
    last, (first, second) = list(after.items())[-1]
    name = first_difference(first.buffers, second.buffers)
    if name:
        yield evidence.finding(
            "replicas-differ",
            wrappers[0].at,
            f"the buffer {name} differs between the ranks after step {last[1]}; "
            f"broadcast_buffers=False",
        )


def first_difference(first: Digests, second: Digests) -> str:
    """Return the first name that two ranks have with different hashes, or an empty text."""
    differences = (n for n, digest in first.items() if n in second and digest != second[n])
    return next(differences, "")


def diverged_before_step(
    evidence: RunEvidence, step: BeforeStep, key: StepKey, name: str
) -> Finding:
    """Return the finding of weights that differ before a step, and did not after the one before."""
    if key[1] > 1:
        return evidence.finding(
            "changed-outside",
            step.at,
            f"{name} is equal on all ranks after step {key[1] - 1}, and differs before step "
            f"{key[1]}",
        )
    wrapper = wrapper_with_equal_weights(evidence, name)
    if wrapper:
        return evidence.finding(
            "changed-outside",
            wrapper.at,
            f"{name} is equal on all ranks when the wrapper is built, and differs before step 1",
        )
    return evidence.finding(
        "replicas-differ",
        step.at,
        f"{name} differs between rank 0 and rank 1 before step 1: they begin with other weights",
    )


def wrapper_with_equal_weights(evidence: RunEvidence, name: str) -> WrapperBuilt | None:
    """Return the last wrapper of rank 0 if a weight was equal on both ranks when it was built."""
    wrappers = [log.select(WrapperBuilt)[-1:] for log in evidence.first_ranks]
    if not all(wrappers):
        return None
    first = wrappers[0][0].parameters.get(name)
    second = wrappers[1][0].parameters.get(name, ["", ""])
    has_equal_hash = first and first[1] == second[1]
    return wrappers[0][0] if has_equal_hash else None


def replaced_parameters(evidence: RunEvidence) -> Findings:
    """Find trained tensors that are not those that the wrapper has registered."""
    log = evidence.rank_0
    wrappers = log.select(WrapperBuilt)
    steps = log.select(BeforeStep)
    optimizers = {step.optimizer for step in steps}
    if len(wrappers) != 1 or len(optimizers) != 1:
        return
    registered = wrappers[0].parameters
    registered_ids = {tensor_id for tensor_id, _ in registered.values()}
    replaced = [
        name
        for name, tensor_id in steps[-1].ids.items()
        if name in registered and tensor_id not in registered_ids
    ]
    if replaced:
        yield evidence.finding(
            "changed-outside",
            wrappers[0].at,
            f"{', '.join(replaced[:3])}: the tensor that is trained is not the one that the "
            f"wrapper has registered, so its gradient is not averaged",
        )


@run_rule("moved-after-wrapping", "moved-after-wrapping.twice")
def moved_after_wrapping(evidence: RunEvidence) -> Findings:
    """Find a trained model that changed its device or type after it was wrapped."""
    log = evidence.rank_0
    last_backward = max((event.n for event in log.select(Backward)), default=0)
    for event in log.select(ModelMoved):
        if event.n < last_backward:
            yield evidence.finding(
                "moved-after-wrapping",
                event.at,
                f"the wrapped model goes from {event.before} to {event.after}, and is then trained",
            )
            break
    for wrapper in log.select(WrapperBuilt):
        if wrapper.nested:
            yield evidence.finding(
                "moved-after-wrapping.twice",
                wrapper.at,
                f"the model that is wrapped is or holds a {wrapper.nested} already",
            )
            break


@rank_rule("replicas-differ.shards", "replicas-differ")
def shards_differ(evidence: RunEvidence) -> Findings:
    """Find shards that are cut from another model on each rank, and are trained.

    This is a note, for a mixture of independent draws is a draw as well. Strategies that keep
    several copies of a weight mix none: these copies differ to the end.
    """
    loads = evidence.rank_0.select(StateDictLoad)
    if not evidence.rank_0.select(OptimizerStep):
        return
    for first, second in align(log.select(Sharding) for log in evidence.first_ranks):
        name = first_difference(first.weights, second.weights)
        if name and not any(load.n > first.n for load in loads):
            rule = "replicas-differ.shards"
            text = f"{name} differs between rank 0 and rank 1 when the model is cut into shards"
            if REPLICATES.search(first.strategy):
                rule = "replicas-differ"
                text += f", and {first.strategy} keeps a copy of each on several ranks"
            yield evidence.finding(rule, first.at, text)
            return


@rank_rule("one-rank-metric.parameters")
def parameters_of_shard(evidence: RunEvidence) -> Findings:
    """Find a number of parameters that is shown as the model's, and is of one rank's shard."""
    log = evidence.rank_0
    wrappers = {event.wrapped for event in log.select(Forward)}
    strategies = {event.strategy for event in log.select(Sharding)}
    if SHARDING_WRAPPER not in wrappers or "NO_SHARD" in strategies:
        return
    counts = {event.numel for event in log.select(OptimizerStep)}
    for event in log.select(Print):
        numbers = [int(re.sub("[,_]", "", text)) for text in INTEGER.findall(event.text)]
        shown = max(counts.intersection(numbers), default=0)
        if shown >= MIN_PARAMETERS and not names_rank(event, log.rank):
            yield evidence.finding(
                "one-rank-metric.parameters",
                event.at,
                f"{shown:,} is the number of parameters in the shard of rank 0",
                0,
            )
            return

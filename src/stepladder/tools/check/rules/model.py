"""Rules for gradients and weights: they must be the same on all ranks."""

from __future__ import annotations

from typing import TypeVar

from stepladder.tools.check.events import (
    Backward,
    BeforeStep,
    Forward,
    GroupJoined,
    JoinContext,
    OptimizerStep,
    ScriptCollective,
    WrapperBuilt,
)
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.findings.finding import Finding

OTHER_PARALLELISMS = (
    "horovod",
    "deepspeed",
    "fully_shard",
    "pipeline",
    "PipelineStage",
    "DTensor",
    "torchft",
)
StepKey = tuple[int, int]  # an optimizer's number, in the order of first use, and its step
S = TypeVar("S", BeforeStep, OptimizerStep)
Steps = dict[StepKey, S]


def steps_of(log: RankLog, kind: type[S]) -> Steps[S]:
    """Return the optimizer steps of which all hashes were recorded.

    Args:
        log: The events of one rank.
        kind: What was recorded, before each step or after it.
    """
    group_made = max((event.n for event in log.select(GroupJoined)), default=0)
    optimizers: list[int] = []
    steps: Steps[S] = {}
    for event in log.select(BeforeStep, OptimizerStep):
        if isinstance(event, (BeforeStep, OptimizerStep)) and event.n > group_made:
            if event.optimizer not in optimizers:
                optimizers.append(event.optimizer)
            if isinstance(event, kind) and event.has_weights:
                steps[optimizers.index(event.optimizer), event.step] = event
    return steps


def common_keys(steps: list[Steps[S]]) -> list[StepKey]:
    """Return the steps that both ranks have made, by number and then by optimizer."""
    return sorted(steps[0].keys() & steps[1].keys(), key=lambda key: (key[1], key[0]))


def is_wrapped(log: RankLog) -> bool:
    """Return whether a wrapper that averages gradients was trained."""
    return any(event.wrapped for event in log.select(Forward) if event.grad)


def gradient_collectives(log: RankLog) -> list[ScriptCollective]:
    """Return the collectives while training whose tensors are as large as a parameter."""
    steps = log.select(OptimizerStep)
    if not steps:
        return []
    parameter_shapes = {str(shape) for step in steps for shape in step.shapes}
    parameter_counts = {step.numel for step in steps}
    training_begins = min(event.n for event in log.select(Backward, OptimizerStep))

    def is_large(collective: ScriptCollective) -> bool:
        count = collective.count
        return (
            str(collective.shape) in parameter_shapes
            or count in parameter_counts
            or count >= 0.5 * max(parameter_counts)
        )

    with_tensor = [event for event in log.select(ScriptCollective) if event.shape is not None]
    return [event for event in with_tensor if event.n > training_begins and is_large(event)]


def exchanges_gradients(log: RankLog) -> bool:
    return is_wrapped(log) or bool(gradient_collectives(log))


@run_rule("not-wrapped")
def not_wrapped(evidence: RunEvidence) -> Findings:
    """Find ranks that train without any exchange of gradients."""
    if not evidence.has_several_ranks or evidence.source.contains(*OTHER_PARALLELISMS):
        return
    logs = evidence.run.ranks[:2]
    steps = [steps_of(log, BeforeStep) for log in logs]
    common = sorted(steps[0].keys() & steps[1].keys())
    if len(common) < 2 or any(exchanges_gradients(log) for log in logs):
        return
    diverged = [key for key in common if steps[0][key].grads != steps[1][key].grads]
    has_group = bool(logs[0].select(GroupJoined))
    if not diverged and has_group:  # the ranks read the same samples: another rule reports that
        return
    text = f"no gradient is exchanged in {len(common)} steps"
    if diverged:
        text = f"{describe_gradients(steps, diverged[0])}, {text}"
    if logs[0].select(WrapperBuilt):
        text += "; a wrapper was built, and the model is not called through it"
    if not has_group:
        text += "; the ranks never met in a process group"
    key = diverged[0] if diverged else common[0]
    yield evidence.finding("not-wrapped", steps[0][key].at, text)


def describe_gradients(steps: list[Steps[BeforeStep]], key: StepKey) -> str:
    first = steps[0][key]
    second = steps[1][key]
    different = [n for n, digest in first.grads.items() if digest != second.grads.get(n)]
    return (
        f"before step {key[1]} {len(different)} of {len(first.grads)} gradients differ between "
        f"rank 0 (norm {first.norm:.4g}) and rank 1 ({second.norm:.4g})"
    )


SHARDED_NAME = "_fsdp_wrapped_module"


@run_rule("replicas-differ", "changed-outside")
def replicas_differ(evidence: RunEvidence) -> Findings:
    """Find weights that diverge between two ranks, by training or by a change outside of it."""
    logs = evidence.run.ranks[:2]
    if not evidence.has_several_ranks or not share_gradients(logs):
        return
    # Ranks in a Join context make different numbers of steps.
    if is_sharded(logs) or evidence.run.select(JoinContext):
        return
    replaced = list(replaced_parameters(evidence))
    if replaced:
        yield from replaced
        return
    before = [steps_of(log, BeforeStep) for log in logs]
    after = [steps_of(log, OptimizerStep) for log in logs]
    diverged = diverged_steps(before)
    if diverged and is_averaged_later(before, diverged[0]):
        return
    yield from diverged_buffers(evidence, after)
    if not diverged:
        yield from evaluated_models_differ(evidence)
    for key in common_keys(after):
        finding = find_divergence(evidence, before, after, key)
        if finding:
            yield finding
            return


def share_gradients(logs: list[RankLog]) -> bool:
    """Return whether ranks exchange gradients, or step with equal ones though weights differ."""
    if any(exchanges_gradients(log) for log in logs):
        return True
    steps = [steps_of(log, BeforeStep) for log in logs]
    pairs = [(steps[0][key], steps[1][key]) for key in common_keys(steps)]
    different = [(a, b) for a, b in pairs if a.before != b.before and a.norm > 0]
    return bool(different) and all(a.grads == b.grads for a, b in different)


def find_divergence(
    evidence: RunEvidence,
    before: list[Steps[BeforeStep]],
    after: list[Steps[OptimizerStep]],
    key: StepKey,
) -> Finding | None:
    """Return the finding of weights or optimizer states that differ before or after one step."""
    first_before = before[0].get(key)
    second_before = before[1].get(key)
    if first_before and second_before:
        name = first_difference(first_before.before, second_before.before)
        if name:
            return diverged_before_step(evidence, first_before, key, name)
    first = after[0][key]
    second = after[1][key]
    if name := first_difference(first.after, second.after):
        cause = describe_cause(before, after, key, name)
        text = f"{name} differs between rank 0 and rank 1 after step {key[1]}{cause}"
        return evidence.finding("replicas-differ", first.at, text)
    if name := first_difference(first.state, second.state):
        text = (
            f"the optimizer's state of {name} differs between rank 0 and rank 1 after step {key[1]}"
        )
        return evidence.finding("replicas-differ", first.at, text)
    return None


def describe_cause(
    before: list[Steps[BeforeStep]],
    after: list[Steps[OptimizerStep]],
    key: StepKey,
    name: str,
) -> str:
    """Return why a weight differs after a step; empty where neither rate nor gradient differs."""
    first_rate = after[0][key].lr
    second_rate = after[1][key].lr
    if first_rate != second_rate:
        return f"; the learning rate is {first_rate[0]:.4g} and {second_rate[0]:.4g}"
    first = before[0].get(key)
    second = before[1].get(key)
    if first and second and first.grads.get(name) != second.grads.get(name):
        return f"; its gradient differs (norms of all {first.norm:.4g} and {second.norm:.4g})"
    return ""


def evaluated_models_differ(evidence: RunEvidence) -> Findings:
    """Find models such as a moving average that differ although the trained replicas are equal."""
    logs = evidence.run.ranks[:2]
    if not evidence.has_several_ranks or is_sharded(logs):
        return
    for first, second in zip(*(evaluated_models(log) for log in logs), strict=False):
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
    return any(SHARDED_NAME in name for name in names_of_weights(logs))


def names_of_weights(logs: list[RankLog]) -> set[str]:
    """Return the names of the weights in the first steps of the ranks."""
    first_steps = [step for log in logs for step in log.select(BeforeStep)[:1]]
    return {name for step in first_steps for name in step.before}


def is_averaged_later(before: list[Steps[BeforeStep]], key: StepKey) -> bool:
    """Return whether the weights are equal again before a later step of the same optimizer.

    Local steps with an average now and then are a method, and no mistake.
    """
    later = [k for k in before[0].keys() & before[1].keys() if k[0] == key[0] and k[1] > key[1]]
    return any(before[0][k].before == before[1][k].before for k in later)


def diverged_steps(before: list[Steps[BeforeStep]]) -> list[StepKey]:
    """Return the steps before which the weights of two ranks differ."""
    return [key for key in common_keys(before) if before[0][key].before != before[1][key].before]


def diverged_buffers(evidence: RunEvidence, after: list[Steps[OptimizerStep]]) -> Findings:
    """Find buffers that differ because the wrapper does not broadcast them."""
    common = common_keys(after)
    wrappers = evidence.run.ranks[0].select(WrapperBuilt)
    if not common or not wrappers or wrappers[0].buffers:
        return
    last = common[-1]
    name = first_difference(after[0][last].buffers, after[1][last].buffers)
    if name:
        yield evidence.finding(
            "replicas-differ",
            wrappers[0].at,
            f"the buffer {name} differs between the ranks after step {last[1]}; "
            f"broadcast_buffers=False",
        )


def first_difference(first: dict[str, str], second: dict[str, str]) -> str:
    """Return the first name that two ranks have with different hashes, or an empty text."""
    differences = (n for n, digest in first.items() if n in second and digest != second[n])
    return next(differences, "")


def diverged_before_step(
    evidence: RunEvidence,
    step: BeforeStep,
    key: StepKey,
    name: str,
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
    wrappers = [log.select(WrapperBuilt)[-1:] for log in evidence.run.ranks[:2]]
    if not all(wrappers):
        return None
    first = wrappers[0][0].parameters.get(name)
    second = wrappers[1][0].parameters.get(name, ["", ""])
    has_equal_hash = first and first[1] == second[1]
    return wrappers[0][0] if has_equal_hash else None


def replaced_parameters(evidence: RunEvidence) -> Findings:
    """Find trained tensors that are not those that the wrapper has registered."""
    log = evidence.run.ranks[0]
    wrappers = log.select(WrapperBuilt)
    steps = log.select(BeforeStep)
    optimizers = {step.optimizer for step in steps}
    if len(wrappers) != 1 or len(optimizers) != 1 or not evidence.has_several_ranks:
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

"""Rules for steps and schedules that go wrong on any number of ranks, and for batch norm."""

from __future__ import annotations

from collections import Counter
from math import isclose

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import (
    Backward,
    BeforeStep,
    Clipping,
    EvalMode,
    Forward,
    NotFinite,
    OptimizerBuilt,
    OptimizerStep,
    ScheduleStep,
    ScriptCollective,
    Statistic,
)
from stepladder.tools.check.probe_settings import NO_LOGARITHM, WEIGHT_HAS_IT
from stepladder.tools.check.recording import RankLog, group_events
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule, run_rule
from stepladder.tools.check.rules.model import exchanges_gradients, is_sharded
from stepladder.tools.probe.events import CodeLine

SMALL_BATCH = 16
MIN_DEAD_STEPS = 6
MIN_IDLE_STEPS = 3
MIN_UNUSED_BACKWARDS = 5
NO_LOSS = 1e-3
SCHEDULES_WITHOUT_END = ("LinearLR", "ConstantLR", "PolynomialLR")
UNWRITTEN = "not-finite.unwritten"
HELD_GRAPHS = 7  # backward passes in a row, after each of which one graph more is held


def steps_by_optimizer(evidence: RunEvidence) -> list[list[BeforeStep]]:
    """Return the recorded beginnings of steps of rank 0, for each optimizer."""
    return list(group_events(evidence.rank_0.select(BeforeStep), "optimizer").values())


@run_rule("no-gradient")
def no_gradient(evidence: RunEvidence) -> Findings:
    """Find parameters of an optimizer that never have a gradient."""
    for events in steps_by_optimizer(evidence):
        if len(events) < 3:
            continue
        trained = set(events[-1].before) - frozen_parameters(events)
        with_gradient = {name for event in events for name in event.grads}
        if is_sharded(evidence.ranks):  # the part with the gradient may be another rank's
            all_steps = evidence.run.select(BeforeStep)
            with_gradient |= {name for _, event in all_steps for name in event.grads}
        without_gradient = [
            name
            for name in sorted(trained - with_gradient)
            if name in events[0].before and not name.startswith("#")
        ]
        if without_gradient and len(without_gradient) < len(trained):
            dots = "..." if len(without_gradient) > 4 else ""
            yield evidence.finding(
                "no-gradient",
                events[0].at,
                f"{len(without_gradient)} of {len(trained)} parameters have no gradient in any of "
                f"{len(events)} steps: {', '.join(without_gradient[:4])}{dots}",
            )


def frozen_parameters(events: list[BeforeStep]) -> set[str]:
    """Return the parameters that had requires_grad=False in any of these steps."""
    return {name for event in events for name in event.frozen_names}


@rank_rule("small-batch-norm")
def small_batch_norm(evidence: RunEvidence) -> Findings:
    """Find batch norm over few samples per rank."""
    log = evidence.rank_0
    calls = [e for e in log.select(Forward) if e.grad and e.norms]
    if not calls or not exchanges_gradients(log):
        return
    size = max(event.size for event in calls)
    if 0 < size < SMALL_BATCH:
        yield evidence.finding(
            "small-batch-norm",
            calls[0].at,
            f"{calls[0].norms} batch-norm layers see {size} samples per rank, of a global batch "
            f"of {size * evidence.run.world_size}",
        )


@run_rule("optimizer-params")
def optimizer_params(evidence: RunEvidence) -> Findings:
    """Find optimizers that hold other parameters than the models that are called."""
    steps = [event for event in evidence.rank_0.select(OptimizerStep) if event.after]
    by_optimizer = group_events(steps, "optimizer")
    for events in by_optimizer.values():
        unheld = sorted(set.intersection(*(set(event.unheld) for event in events)))
        if len(events) < 2 or not unheld:
            continue
        last = events[-1]
        names = ", ".join(unheld[:3])
        if last.strangers:
            yield evidence.finding(
                "optimizer-params",
                last.at,
                f"{last.strangers} of the optimizer's {len(last.shapes)} parameters belong to no "
                f"model that is called; {names} gets a gradient and is in no optimizer",
            )
            return
        if len(by_optimizer) == 1:
            yield evidence.finding(
                "optimizer-params",
                last.at,
                f"{len(unheld)} parameters get a gradient in all of {len(events)} steps and are in "
                f"no optimizer: {names}",
                severity="warning",
            )
            return


@run_rule("frozen-optimizer")
def frozen_optimizer(evidence: RunEvidence) -> Findings:
    """Find optimizers of which no parameter requires a gradient in any step."""
    for steps in steps_by_optimizer(evidence):
        if len(steps) >= 3 and all(map(is_frozen, steps)):
            yield evidence.finding(
                "frozen-optimizer",
                steps[0].at,
                f"all {len(steps[-1].before)} parameters of the optimizer have requires_grad=False "
                f"in all of {len(steps)} steps",
            )


@run_rule("learns-nothing")
def learns_nothing(evidence: RunEvidence) -> Findings:
    """Find trainings in which gradients are 0, or the loss or the weights never change."""
    log = evidence.rank_0
    before_steps = log.select(BeforeStep)
    with_loss = [event for event in log.select(Backward) if event.loss is not None]
    after_steps = [event for event in log.select(OptimizerStep) if event.after]
    has_constant_loss = len({event.loss for event in with_loss}) == 1
    has_one_optimizer = len({event.optimizer for event in after_steps}) == 1
    if len(before_steps) >= 3 and all(event.norm == 0 for event in before_steps):
        text = f"the gradient is exactly 0 in all of {len(before_steps)} steps"
        if has_constant_loss:
            text += f"; the loss is {with_loss[0].loss:.4g} in all of them"
        first = with_loss[0] if with_loss else before_steps[0]
        yield evidence.finding("learns-nothing", first.at, text)
    elif len(with_loss) >= 5 and has_constant_loss:
        yield evidence.finding(
            "learns-nothing",
            with_loss[0].at,
            f"the loss is {with_loss[0].loss:.6g} in all of {len(with_loss)} backward passes",
        )
    elif len(after_steps) >= 5 and has_one_optimizer and has_constant_weights(after_steps):
        yield evidence.finding(
            "learns-nothing",
            after_steps[0].at,
            f"no weight has changed in {len(after_steps)} steps, at a learning rate of "
            f"{after_steps[-1].lr[0]:.4g}",
        )


@run_rule("learns-nothing.dead")
def stops_learning(evidence: RunEvidence) -> Findings:
    """Find trainings in which gradients are exactly 0 from a step on, and the loss is not."""
    log = evidence.run.ranks[0]
    if is_sharded(evidence.run.ranks):  # the part with a gradient may be another rank's
        return
    for steps in steps_by_optimizer(evidence):
        moving = [step for step in steps if step.matrix_norm > 0]
        dead = [step for step in steps if moving and step.n > moving[-1].n]
        backwards = [e for e in log.select(Backward) if dead and e.n > moving[-1].n]
        losses = [abs(event.loss) for event in backwards if event.loss is not None]
        # A loss of about 0 has gradients of 0 as well: nothing is left to learn.
        if len(dead) >= MIN_DEAD_STEPS and losses and min(losses) > NO_LOSS:
            yield evidence.finding(
                "learns-nothing.dead",
                backwards[0].at,
                f"the gradient of each weight matrix is exactly 0 in all of {len(dead)} steps that "
                f"were examined from step {dead[0].step} on; the loss is {losses[-1]:.4g}",
            )
            return


@run_rule("learns-nothing.step")
def never_steps(evidence: RunEvidence) -> Findings:
    """Find trainings that compute gradients, and whose optimizer makes no step."""
    run = evidence.run
    has_ended_epochs = any(p.is_complete for p in run.ranks[0].training_passes)
    if run.select(OptimizerStep) or not run.select(OptimizerBuilt):
        return
    if not (run.has_finished or has_ended_epochs):
        return  # it may make its first step later
    backwards = run.ranks[0].select(Backward)
    weights = [event.weights for event in backwards if event.weights]
    if len(weights) >= MIN_UNUSED_BACKWARDS and len(set(weights)) == 1:
        yield evidence.finding(
            "learns-nothing.step",
            backwards[0].at,
            f"no weight changes in {len(weights)} backward passes, and no optimizer makes a step",
        )


def is_frozen(step: BeforeStep) -> bool:
    """Return whether no parameter of a step requires a gradient."""
    names = set(step.before)
    return bool(names) and names <= frozen_parameters([step])


def has_constant_weights(steps: list[OptimizerStep]) -> bool:
    """Return whether the weights are equal after all steps.

    Weights that cannot be hashed, such as sharded ones, have an empty hash, and count as changed.
    """
    first = steps[0].after
    return any(first.values()) and all(step.after == first for step in steps)


@run_rule("schedule-per-rank")
def rate_of_zero(evidence: RunEvidence) -> Findings:
    """Find trainings that go on with a learning rate of 0, whoever steps the schedule."""
    log = evidence.rank_0
    schedule_steps = log.select(ScheduleStep)
    for steps in group_events(log.select(OptimizerStep), "optimizer").values():
        idle = [step for step in steps if not any(step.lr)]
        if schedule_steps and max(MIN_IDLE_STEPS, len(steps) / 4) <= len(idle) < len(steps):
            yield evidence.finding(
                "schedule-per-rank",
                schedule_steps[0].at,
                f"the learning rate is 0 in {len(idle)} of {len(steps)} steps; the schedule is "
                f"stepped {format_count(len(schedule_steps), 'time')}",
                severity="warning",
            )
            return


@run_rule("missing-zero-grad")
def missing_zero_grad(evidence: RunEvidence) -> Findings:
    """Find gradients that are never cleared between optimizer steps."""
    for events in steps_by_optimizer(evidence):
        later = [event for event in events if event.step > 1]
        is_never_clean = not any(event.clean for event in later)
        has_gradient = any(event.norm > 0 for event in later)
        if len(later) >= 2 and is_never_clean and has_gradient:
            yield evidence.finding(
                "missing-zero-grad",
                later[0].at,
                f"in {len(later)} of {len(later)} steps the gradients of the step before are still "
                f"there; their norm goes from {events[0].norm:.4g} to {later[-1].norm:.4g}",
            )


@run_rule("eval-stays")
def eval_stays(evidence: RunEvidence) -> Findings:
    """Find models that stay in evaluation mode for the training after an evaluation."""
    log = evidence.rank_0
    calls = [event for event in log.select(Forward) if event.grad and event.moded]
    for events in group_events(calls, "root").values():
        in_training_mode = [event for event in events if event.moded_on]
        in_eval_mode = [e for e in events if not e.moded_on and is_trained(log, e)]
        if not in_training_mode or len(in_eval_mode) < 2:
            continue
        first = in_eval_mode[0]
        last_in_training_mode = in_training_mode[-1]
        if last_in_training_mode.n <= first.n:
            start = last_in_training_mode.n
            eval_calls = [e for e in log.select(EvalMode) if start < e.n < first.n]
            line = eval_calls[-1].at if eval_calls else first.at
            yield evidence.finding(
                "eval-stays",
                line,
                f"in {len(in_eval_mode)} training steps none of {first.moded} layers (dropout, "
                f"batch norm) is in training mode; in the {len(in_training_mode)} before they were",
            )
            return


def is_trained(log: RankLog, call: Forward) -> bool:
    """Return whether a backward pass follows this call of a model before the next call."""
    following = (e for e in log.select(Backward, Forward) if e.n > call.n)
    return isinstance(next(following, None), Backward)


@run_rule("activation-twice", "activation-twice.logarithm", "activation-twice.relu")
def activation_twice(evidence: RunEvidence) -> Findings:
    """Find an activation before a loss that applies the same one, or that takes scores."""
    backwards = evidence.rank_0.select(Backward)
    twice = [event for event in backwards if event.twice]
    if len(twice) < 2:
        return
    first = twice[0]
    rule = "activation-twice"
    text = f"the loss's input is the output of a {first.twice}"
    if first.twice == NO_LOGARITHM:
        rule += ".logarithm"
        text = "nll_loss is given values that are no logarithms of probabilities; the first loss "
        text += f"is {first.loss:.4g}"
    elif first.twice == "relu":
        rule += ".relu"
    else:
        text += ", and the loss includes one"
    yield evidence.finding(
        rule, first.at, f"in {len(twice)} of {len(backwards)} backward passes {text}"
    )


@run_rule("graph-kept")
def graph_kept(evidence: RunEvidence) -> Findings:
    """Find losses whose graphs stay in memory after their backward passes."""
    growing: list[Backward] = []
    for event in evidence.rank_0.select(Backward):
        is_grown = growing and event.alive == growing[-1].alive + 1
        growing = [*growing, event] if is_grown else [event]
        if len(growing) >= HELD_GRAPHS:
            yield evidence.finding(
                "graph-kept",
                line_of_loss(evidence, growing[0]) or growing[0].at,
                f"after {len(growing)} backward passes in a row the graphs of all "
                f"{growing[-1].alive} earlier losses are still in memory",
            )
            return


def line_of_loss(evidence: RunEvidence, backward: Backward) -> CodeLine | None:
    """Return the line that has computed a number last before a backward pass."""
    earlier = [event for event in evidence.rank_0.select(Statistic) if event.n < backward.n]
    return earlier[-1].at if earlier else None


@run_rule("clip-before-average")
def clip_before_average(evidence: RunEvidence) -> Findings:
    """Find gradients that are clipped on each rank before they are summed over the ranks."""
    for log in evidence.ranks:
        clip: Clipping | None = None
        for event in log.select(Clipping, ScriptCollective, OptimizerStep, Backward):
            if isinstance(event, Clipping):
                clip = event
            elif isinstance(event, OptimizerStep | Backward):
                clip = None
            elif clip and isinstance(event, ScriptCollective) and sums_gradients(event, clip):
                yield evidence.finding(
                    "clip-before-average",
                    clip.at,
                    "the gradient is clipped on each rank, and then summed over the ranks",
                )
                return


@rank_rule("clip-before-average.part")
def clip_by_part(evidence: RunEvidence) -> Findings:
    """Find parts of one model that are clipped by norms of their own."""
    logs = evidence.first_ranks
    clips = align(log.select(Clipping) for log in logs if is_sharded(logs))
    norms = [(first.norm or 0.0, second.norm or 0.0) for first, second in clips]
    if len(norms) >= 2 and not any(isclose(*pair, rel_tol=1e-4) for pair in norms):
        yield evidence.finding(
            "clip-before-average.part",
            clips[0][0].at,
            f"the norm is {norms[0][0]:.4g} on rank 0 and {norms[0][1]:.4g} on rank 1; it differs "
            f"in each of {len(norms)} calls",
        )


def sums_gradients(collective: ScriptCollective, clip: Clipping) -> bool:
    return collective.op == "all_reduce" and collective.ptr in clip.ptrs


@run_rule("not-finite", UNWRITTEN)
def not_finite(evidence: RunEvidence) -> Findings:
    """Find the first loss or gradient that is no finite number, and where it comes from."""
    for log in evidence.ranks:
        for event in log.select(NotFinite)[:1]:
            number = sum(backward.n <= event.n for backward in log.select(Backward))
            text = f"{event.what} of backward pass {max(number, 1)} is {event.value}; "
            text += event.origin
            rule = "not-finite"
            if event.origin.endswith(WEIGHT_HAS_IT):
                was_trained = any(step.n < event.n for step in log.select(OptimizerStep))
                rule = rule if was_trained else UNWRITTEN
                text += ": an earlier step broke it" if was_trained else ", and no step before it"
            yield evidence.finding(rule, event.at, text, log.rank)
            return


@run_rule("schedule-per-rank")
def schedule_per_rank(evidence: RunEvidence) -> Findings:
    """Find learning-rate schedules that do not fit the number of optimizer steps."""
    log = evidence.rank_0
    steps = len(log.select(OptimizerStep))
    direct_calls = [event for event in log.select(ScheduleStep) if event.at and event.direct]
    for schedule, calls in group_events(direct_calls, "schedule").items():
        per_step = count_calls_per_step(log, schedule)
        if per_step > 1 and evidence.has_several_ranks:
            yield evidence.finding(
                "schedule-per-rank",
                calls[0].at,
                f"{calls[0].cls}.step is called {per_step} times per optimizer step, on each "
                f"of {evidence.run.world_size} ranks",
            )
            return
        yield from wrongly_sized_schedule(evidence, log, calls, steps)


def count_calls_per_step(log: RankLog, schedule: int) -> int:
    """Return the usual number of calls of a schedule between two optimizer steps, at least 1."""
    frequencies: Counter[int] = Counter()
    calls = -1  # before the first step
    for event in log.select(OptimizerStep, ScheduleStep):
        if isinstance(event, OptimizerStep):
            if calls >= 0:
                frequencies[calls] += 1
            calls = 0
        elif isinstance(event, ScheduleStep) and event.schedule == schedule and calls >= 0:
            calls += 1
    if calls > 0:
        frequencies[calls] += 1
    if not frequencies:
        return 1
    usual = frequencies.most_common(1)[0][0]
    intervals = sum(frequencies.values())
    is_one_step_without_backward = intervals == 1 and usual > 1 and not log.select(Backward)
    if intervals >= 2 or is_one_step_without_backward:
        return usual
    return 1


def wrongly_sized_schedule(
    evidence: RunEvidence, log: RankLog, calls: list[ScheduleStep], steps: int
) -> Findings:
    """Compare the calls of a schedule with its horizon, the number of steps it is sized for.

    Too many calls are certain at any time, too few only where the script has ended by itself.
    """
    name = calls[0].cls
    horizon = calls[0].horizon
    if not horizon or name in SCHEDULES_WITHOUT_END:
        return
    count = len(calls)
    epochs = len(log.training_passes)
    world_size = evidence.run.world_size
    is_called_each_step = count >= 0.9 * steps and steps > 2
    has_ended = evidence.run.has_finished and not evidence.run.was_cut_short
    is_sized_for_all_ranks = (
        abs(horizon - world_size * count) <= epochs * world_size + 1 and horizon > 1.5 * count
    )
    is_called_each_epoch = count == epochs and epochs > 0
    is_sized_for_steps = steps >= 3 * epochs and abs(horizon - steps) <= epochs
    texts = []
    if is_called_each_step and count > horizon + 1:
        texts.append(
            f"{name} is sized for {horizon} steps and has been stepped {count} times in {epochs} "
            f"epochs"
        )
    elif (
        has_ended
        and evidence.has_several_ranks
        and epochs
        and count > 3
        and is_called_each_step
        and is_sized_for_all_ranks
    ):
        texts.append(
            f"{name} is sized for {horizon} steps, {world_size} times the {count} that each of "
            f"{world_size} ranks makes: it ends half way"
        )
    if has_ended and is_called_each_epoch and is_sized_for_steps:
        texts.append(
            f"{name} is sized for {horizon} steps (there are {steps}), and is stepped once per "
            f"epoch: {count} times"
        )
    for text in texts:
        yield evidence.finding("schedule-per-rank", calls[0].at, text)

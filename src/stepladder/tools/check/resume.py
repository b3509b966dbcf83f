"""The check of --resume: compares a run that was ended and resumed with the unbroken run.

The script is ended after its first snapshot and started again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stepladder.tools.check.events import (
    Backward,
    Batch,
    BeforeStep,
    EnoughPasses,
    Load,
    OptimizerStep,
    PassStart,
    Save,
    SetEpoch,
    StateDictLoad,
)
from stepladder.tools.check.failure import has_own_error
from stepladder.tools.check.rank_processes import LaunchOutcome, RankLaunch, run_ranks
from stepladder.tools.check.recording import LoaderPass, RankLog, Recording, read_recording
from stepladder.tools.check.rules.evidence import RunEvidence
from stepladder.tools.check.rules.model import first_difference, replicas_differ
from stepladder.tools.check.rules.samples import recorded_training_calls
from stepladder.tools.check.rules.snapshots import module_prefix
from stepladder.tools.findings.finding import Finding
from stepladder.tools.probe.events import CodeLine

NO_SNAPSHOT = "--resume: the script has written no snapshot, so there is nothing to resume from"
NO_TRAINING_AFTER_SNAPSHOT = (
    "--resume: nothing is trained after the first snapshot, so there is nothing to compare"
)
NO_LOAD = (
    "--resume: when it was started again, the script has loaded no snapshot, so nothing is "
    "compared; if it resumes only with an argument: --resume-args '--resume snapshot.pt'"
)
NO_COMPARISON = (
    "--resume: two runs of the script differ from the first step on, so weights cannot be "
    "compared: seed it"
)
MAX_COMPARED_STEPS = 12


@dataclass(frozen=True)
class ResumedRun:
    """The unbroken run, the halted run and the resumed run, on rank 0.

    Args:
        evidence: The unbroken run, with the copy of the resumed run for its lines.
        unbroken: The events of the unbroken run.
        halted: The events of the run that was ended after its snapshot.
        resumed: The events of the run that was started after that.
        steps_before: The optimizer steps before the snapshot.
        load_line: The line that loads the snapshot.
        save_line: The line that saves it.
    """

    evidence: RunEvidence
    unbroken: RankLog
    halted: RankLog
    resumed: RankLog
    steps_before: int
    load_line: CodeLine | None
    save_line: CodeLine | None


def compare_resumed_run(
    evidence: RunEvidence, launch: RankLaunch, resume_args: tuple[str, ...] = ()
) -> tuple[list[Finding], str]:
    """Halt and resume the script, and return what differs, and a note where nothing is comparable.

    Args:
        evidence: The unbroken run.
        launch: How the script is started, in a fresh copy.
        resume_args: More arguments for the start that resumes.
    """
    if not evidence.run.select(Save):
        return [], NO_SNAPSHOT
    halting_settings = replace(launch.settings, stop_at_snapshot=True)
    halted = run_ranks(replace(launch, settings=halting_settings), "halted")
    if not halted.halted:
        return [], NO_TRAINING_AFTER_SNAPSHOT
    if not evidence.run.was_cut_short:  # else epochs are counted on a fast machine alone
        launch = replace(launch, settings=replace(launch.settings, enough_after_s=math.inf))
    resumed = run_ranks(replace(launch, args=(*launch.args, *resume_args)), "resumed")
    original = evidence.run.original
    resumed_recording = read_recording(resumed.folder, original, launch.settings.copy)
    if resumed.failed:
        return [failed_resume(evidence, resumed_recording, resumed)], ""
    halted_recording = read_recording(halted.folder, original, launch.settings.copy)
    return compare(evidence, halted_recording, resumed_recording)


def failed_resume(evidence: RunEvidence, resumed: Recording, outcome: LaunchOutcome) -> Finding:
    """Return the finding of a resumed script that failed."""
    outputs = [outcome.output(rank).rstrip() for rank in outcome.failed_ranks]
    causes = filter(has_own_error, outputs)  # the others tell of the rank that was lost
    last_line = " ".join(next(causes, outputs[0]).splitlines()[-1:])
    loads = resumed.select(Load) or evidence.run.select(Save)[:1]
    is_prefixed = any(event.more or event.fewer for _, event in resumed.select(StateDictLoad))
    rule = "module-prefix" if is_prefixed else "resume-differs"
    line = loads[-1][1].at
    text = f"the resumed script fails: {last_line}"
    return with_copy_of(evidence, resumed).finding(rule, line, text)


def with_copy_of(evidence: RunEvidence, resumed: Recording) -> RunEvidence:
    """Return the evidence with the copy of another run, so that its lines are found."""
    return RunEvidence(replace(evidence.run, copy=resumed.copy), evidence.source)


def compare(
    evidence: RunEvidence, halted: Recording, resumed: Recording
) -> tuple[list[Finding], str]:
    """Return what differs between the unbroken run and the halted and resumed one.

    A note is returned as well; it is empty where all could be compared.
    """
    loads = resumed.ranks[0].select(Load)
    if not loads:
        return [], NO_LOAD
    resumed_alone = replace(evidence, run=replace(resumed, original=evidence.run.original))
    prefixed = list(module_prefix(resumed_alone))
    if prefixed:
        return prefixed, ""
    run = ResumedRun(
        with_copy_of(evidence, resumed),
        evidence.run.ranks[0],
        halted.ranks[0],
        resumed.ranks[0],
        len(halted.ranks[0].select(OptimizerStep)),
        loads[-1].at,
        halted.select(Save)[0][1].at,
    )
    diverged = next(replicas_differ(resumed_alone), None)
    if diverged and not any(replicas_differ(evidence)):
        return [replace(diverged, evidence=f"in the resumed run {diverged.evidence}")], ""
    finding = compare_epochs(run) or compare_samples(run) or compare_inputs(run)
    finding = finding or compare_learning_rates(run)
    if finding:
        return [finding], ""
    if not is_reproducible(run):
        return [], NO_COMPARISON
    finding = compare_weights(run)
    return [finding] if finding else [], ""


def compare_epochs(run: ResumedRun) -> Finding | None:
    """Compare epochs by the calls of set_epoch, else by the samples that the first pass reads.

    A constant that set_epoch was told in each epoch is the number of none.
    """
    passes = run.halted.training_passes
    complete = [one_pass for one_pass in passes if one_pass.is_complete]
    is_mid_epoch = bool(passes) and not passes[-1].is_complete and passes[-1].steps > 0
    unbroken_epochs = epochs_of(run.unbroken)
    halted_epochs = epochs_of(run.halted)
    resumed_epochs = epochs_of(run.resumed)
    are_distinct = len(set(unbroken_epochs)) == len(unbroken_epochs)
    if not (are_distinct and unbroken_epochs and halted_epochs and resumed_epochs):
        if is_mid_epoch or not complete or not run.resumed.training_passes:
            return None
        return compare_orders(run, len(complete))
    if is_mid_epoch or len(complete) >= len(unbroken_epochs):
        return None
    expected = unbroken_epochs[len(complete)]
    first = resumed_epochs[0]
    if first == expected:
        return None
    effect = "trained again" if first < expected else "skipped"
    return run.evidence.finding(
        "resume-epoch",
        run.save_line,
        f"the snapshot was written after epoch {halted_epochs[len(complete) - 1]}; the resumed run "
        f"begins with epoch {first}, so epoch {min(first, expected)} is {effect}",
    )


def compare_orders(run: ResumedRun, epochs: int) -> Finding | None:
    """Compare the order of samples of the first resumed epoch with those of the unbroken run.

    Where epochs have equal orders, or the order is of no epoch, the number of epochs is compared.

    Args:
        run: The runs.
        epochs: The complete epochs before the snapshot.
    """
    orders = [one_pass.samples for one_pass in run.unbroken.training_passes]
    first = run.resumed.training_passes[0].samples
    are_all_different = len(set(map(str, orders))) == len(orders)
    if first is None or not are_all_different or first not in orders:
        return compare_epoch_counts(run, epochs)
    number = orders.index(first)
    if number == epochs:
        return None
    if number < epochs:
        effect = f"epoch {number} is trained again"
    else:
        effect = f"epoch {epochs} is skipped"
    return run.evidence.finding(
        "resume-epoch",
        run.save_line,
        f"the snapshot was written after {epochs} epochs; the resumed run begins with the samples "
        f"of epoch {number}: {effect}",
    )


def compare_epoch_counts(run: ResumedRun, epochs: int) -> Finding | None:
    """Compare the number of epochs, if both runs have ended by themselves."""
    was_cut_short = run.evidence.run.was_cut_short or run.resumed.select(EnoughPasses)
    if was_cut_short or not run.unbroken.has_ended or not run.resumed.has_ended:
        return None
    resumed = len(run.resumed.training_passes)
    unbroken = len(run.unbroken.training_passes)
    difference = epochs + resumed - unbroken
    if difference == 0:
        return None
    effect = "trained again" if difference > 0 else "skipped"
    return run.evidence.finding(
        "resume-epoch",
        run.save_line,
        f"epochs before the stop: {epochs}, after it: {resumed}, without a stop: {unbroken}; so "
        f"{abs(difference)} is {effect}",
    )


def epochs_of(log: RankLog) -> list[int]:
    """Return the epoch that was given to set_epoch before each training pass."""
    epochs: list[int] = []
    current: int | None = None
    starts = {one_pass.start.n for one_pass in log.training_passes}
    samplers = {one_pass.start.sampler_id for one_pass in log.training_passes}
    for event in log.select(SetEpoch, PassStart):
        if isinstance(event, SetEpoch):
            if event.sampler in samplers or not samplers:
                current = event.value
        elif event.n in starts and isinstance(current, int):
            epochs.append(current)
    return epochs


def compare_samples(run: ResumedRun) -> Finding | None:
    """Find samples before a snapshot in mid-epoch that the resumed run trains again."""
    if not run.halted.training_passes or not run.resumed.training_passes:
        return None
    interrupted = run.halted.training_passes[-1]
    resumed = run.resumed.training_passes[0]
    steps = interrupted.steps
    if interrupted.is_complete or not steps:
        return None
    trained_batches = interrupted.batches[:steps]
    all_batches = [*trained_batches, *resumed.batches]
    has_indices = all(batch.indices is not None for batch in all_batches)
    trained = samples_in(trained_batches, has_indices)
    retrained = samples_in(batches_trained_in(resumed), has_indices)
    repeated = trained & retrained
    if len(repeated) <= 0.5 * len(trained):
        return None
    return run.evidence.finding(
        "resume-samples",
        resumed.line,
        f"the snapshot was written after {steps} steps of an epoch; {len(repeated)} of the "
        f"{len(trained)} samples of these steps are trained again",
    )


def compare_inputs(run: ResumedRun) -> Finding | None:
    """Find inputs that begin anew, where the unbroken run goes on: windows, or a stream."""
    saved = run.unbroken.select(Save)[0].n
    expected = [call for call in recorded_training_calls(run.unbroken) if call.n > saved]
    trained = [call.rows for call in recorded_training_calls(run.halted)[:3]]
    resumed = recorded_training_calls(run.resumed)[: len(trained)]
    begins_anew = len(trained) >= 2 and [call.rows for call in resumed] == trained
    if not expected or not begins_anew or expected[0].rows == trained[0]:
        return None
    return run.evidence.finding(
        "resume-samples",
        resumed[0].at,
        f"the first {len(trained)} inputs after the resume are those of the first steps of all, "
        f"and the unbroken run goes on with others",
        severity="warning",
    )


def samples_in(batches: list[Batch], by_index: bool) -> set[int] | set[str]:
    """Return the samples of batches, as indices or as hashes of rows."""
    if by_index:
        return {index for batch in batches for index in batch.indices or []}
    return {row for batch in batches for row in batch.rows}


def batches_trained_in(one_pass: LoaderPass) -> list[Batch]:
    """Return the batches of a pass that were trained, and not only read to be skipped."""
    batches: list[Batch] = []
    last: Batch | None = None
    for event in one_pass.events:
        if isinstance(event, Batch):
            last = event
        elif isinstance(event, Backward) and last is not None:
            batches.append(last)
            last = None
    return batches


def compare_learning_rates(run: ResumedRun) -> Finding | None:
    """Compare the learning rates of the first steps after the snapshot."""
    first_step = run.steps_before + 1
    unbroken = run.unbroken.select(OptimizerStep)[run.steps_before :][:MAX_COMPARED_STEPS]
    resumed = run.resumed.select(OptimizerStep)[:MAX_COMPARED_STEPS]
    for step, (expected, event) in enumerate(zip(unbroken, resumed, strict=False), first_step):
        if not expected.lr:
            continue
        expected_rate = expected.lr[0]
        rate = event.lr[0]
        if abs(expected_rate - rate) > 1e-6 * abs(expected_rate):
            return run.evidence.finding(
                "resume-lr",
                run.load_line,
                f"at step {step} the learning rate is {rate:.6g} after the resume, and "
                f"{expected_rate:.6g} in the unbroken run",
            )
    return None


def is_reproducible(run: ResumedRun) -> bool:
    """Return whether two runs of the script have the same weights up to the stop."""
    pairs = zip(run.unbroken.select(OptimizerStep), run.halted.select(OptimizerStep), strict=False)
    weights = [(a.after, b.after) for a, b in pairs if a.after and b.after]
    return bool(weights) and all(first == second for first, second in weights)


def compare_weights(run: ResumedRun) -> Finding | None:
    """Compare the weights before and after each step that follows the snapshot."""
    first_step = run.steps_before + 1
    befores = {event.step: event.before for event in run.unbroken.select(BeforeStep)}
    before = befores.get(first_step)
    resumed_before = run.resumed.select(BeforeStep)[:1]
    if before and resumed_before and before != resumed_before[0].before:
        name = first_difference(before, resumed_before[0].before)
        return run.evidence.finding(
            "resume-differs",
            run.load_line,
            f"before step {first_step} already {name} differs from the unbroken run: the weights "
            f"themselves are not restored",
        )
    unbroken = run.unbroken.select(OptimizerStep)[run.steps_before :]
    resumed = run.resumed.select(OptimizerStep)
    for step, (expected, event) in enumerate(zip(unbroken, resumed, strict=False), first_step):
        if expected.after and event.after and expected.after != event.after:
            name = first_difference(expected.after, event.after)
            return run.evidence.finding(
                "resume-differs",
                run.load_line,
                f"after step {step} {name} differs from the unbroken run; before step {first_step} "
                f"all weights are equal",
            )
    return None

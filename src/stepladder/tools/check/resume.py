"""R9, resume: a run that is stopped and started again, twice, goes on as the unbroken run.

The script is ended after its first snapshot and started again, ended after the next snapshot and
started once more. Each start is compared with what the unbroken run does after as many steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import (
    Backward,
    Batch,
    BeforeStep,
    FileWrite,
    Load,
    OptimizerStep,
    PassStart,
    Save,
    SetEpoch,
    SnapshotFound,
    StateDictLoad,
)
from stepladder.tools.check.failure import has_own_error
from stepladder.tools.check.rank_processes import LaunchOutcome, RankLaunch, run_ranks
from stepladder.tools.check.recording import LoaderPass, RankLog, Recording, read_recording
from stepladder.tools.check.rules.evidence import RunEvidence
from stepladder.tools.check.rules.model import first_difference, replicas_differ
from stepladder.tools.check.rules.samples import recorded_training_calls
from stepladder.tools.check.rules.snapshots import module_prefix, renamed_paths
from stepladder.tools.findings.finding import Finding
from stepladder.tools.probe.events import CodeLine

NO_SNAPSHOT = (
    "--resume: between two of its steps the script has written no file that holds its weights: it"
    " saves none before the last step, or this check cannot see how it saves"
)
NO_LOAD = (
    "--resume: when it was started again, the script has loaded no snapshot, so nothing is "
    "compared; if it resumes only with an argument: --resume-args '--resume snapshot.pt'"
)
NO_COMPARISON = (
    "--resume: two runs of the script differ from the first step on, so weights cannot be "
    "compared: seed it"
)
WEIGHTS_DIFFER = "resume-differs"
MAX_COMPARED_STEPS = 12
Samples = tuple[int, ...] | tuple[str, ...]  # of a batch, by index, else by the hash of the row
Contents = dict[tuple[int, str, str], str]  # by step, file and key


@dataclass(frozen=True)
class ResumeReport:
    """What a comparison has shown.

    Args:
        findings: What differs from the unbroken run.
        note: What could not be compared.
        not_checked: Why nothing could be compared.
        held: Lines of what was seen.
    """

    findings: list[Finding] = field(default_factory=list)
    note: str = ""
    not_checked: str = ""
    held: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ResumedRun:
    """The unbroken run, the starts that were ended, and the one that went on, on rank 0.

    Args:
        evidence: The unbroken run, with the copy of the resumed run for its lines.
        unbroken: The events of the unbroken run.
        before: The events of each start that was ended after a snapshot.
        resumed: The events of the start after these.
        load_line: The line that loads the snapshot.
        save_line: The line that saves it.
    """

    evidence: RunEvidence
    unbroken: RankLog
    before: tuple[RankLog, ...]
    resumed: RankLog
    load_line: CodeLine | None
    save_line: CodeLine | None

    @cached_property
    def steps_before(self) -> int:
        """The optimizer steps before the snapshot."""
        return sum(len(log.select(OptimizerStep)) for log in self.before)

    @cached_property
    def batches_before(self) -> list[Samples]:
        """The batches that were trained before the snapshot."""
        return [samples for log in self.before for samples in trained_batches(log)]

    @property
    def numbered(self) -> str:
        """Which resume it is, for the messages."""
        return "" if len(self.before) == 1 else f", at resume {len(self.before)}"


def compare_resumed_run(
    evidence: RunEvidence, launch: RankLaunch, resume_args: tuple[str, ...] = ()
) -> ResumeReport:
    """Halt and resume the script twice, and return what differs from the unbroken run.

    Args:
        evidence: The unbroken run.
        launch: How the script is started, in a fresh copy.
        resume_args: More arguments for the starts that resume.
    """
    if not evidence.run.was_cut_short:  # else epochs are counted on a fast machine alone
        launch = replace(launch, settings=replace(launch.settings, enough_after_s=math.inf))
    halting = replace(launch, settings=replace(launch.settings, stop_at_snapshot=True))
    original, copy = evidence.run.original, launch.settings.copy
    outcome = run_ranks(halting, "halted")
    before: list[Recording] = []
    report = ResumeReport(not_checked=NO_SNAPSHOT)
    for name in ("resumed", "resumed-again"):
        if not outcome.halted:
            break
        before.append(read_recording(outcome.folder, original, copy))
        start = halting if name == "resumed" else launch
        outcome = run_ranks(replace(start, args=(*launch.args, *resume_args)), name)
        resumed = read_recording(outcome.folder, original, copy)
        if outcome.failed:
            return ResumeReport([failed_resume(evidence, resumed, outcome)])
        by_key = {finding.key: finding for finding in report.findings}
        report = compare(evidence, before, resumed)
        for finding in report.findings:
            by_key.setdefault(finding.key, finding)  # the first resume's, where both show it
        report = replace(report, findings=list(by_key.values()))
        # After other samples or rates, all that follows is another run.
        goes_on_alike = all(finding.rule == WEIGHTS_DIFFER for finding in report.findings)
        if report.not_checked or not goes_on_alike:
            break
    return report


def failed_resume(evidence: RunEvidence, resumed: Recording, outcome: LaunchOutcome) -> Finding:
    """Return the finding of a resumed script that failed."""
    outputs = [outcome.output(rank).rstrip() for rank in outcome.failed_ranks]
    causes = filter(has_own_error, outputs)  # the others tell of the rank that was lost
    last_line = " ".join(next(causes, outputs[0]).splitlines()[-1:])
    events = [event for _, event in resumed.select(Load) or evidence.run.select(Save)[:1]]
    is_prefixed = any(event.more or event.fewer for _, event in resumed.select(StateDictLoad))
    rule = "module-prefix" if is_prefixed else "resume-differs"
    line = events[-1].at if events else None
    text = f"the resumed script fails: {last_line}"
    return with_copy_of(evidence, resumed).finding(rule, line, text)


def with_copy_of(evidence: RunEvidence, resumed: Recording) -> RunEvidence:
    """Return the evidence with the copy of another run, so that its lines are found."""
    return RunEvidence(replace(evidence.run, copy=resumed.copy), evidence.source)


def compare(evidence: RunEvidence, before: list[Recording], resumed: Recording) -> ResumeReport:
    """Return what differs between the unbroken run and the one that was resumed.

    Args:
        evidence: The unbroken run.
        before: The starts that were ended after a snapshot.
        resumed: The start after these.
    """
    log = resumed.ranks[0]
    loads: list[Any] = [*log.select(StateDictLoad), *log.select(Load)]
    if not loads:
        return ResumeReport(not_checked=NO_LOAD)
    resumed_alone = replace(evidence, run=replace(resumed, original=evidence.run.original))
    prefixed = list(module_prefix(resumed_alone))
    if prefixed:
        return ResumeReport(prefixed)
    run = ResumedRun(
        with_copy_of(evidence, resumed),
        evidence.run.ranks[0],
        tuple(recording.ranks[0] for recording in before),
        log,
        loads[-1].at,
        line_of_snapshot(before[-1]),
    )
    diverged = next(replicas_differ(resumed_alone), None)
    if diverged and not any(replicas_differ(evidence)):
        text = f"in the resumed run {diverged.evidence}"
        return ResumeReport([replace(diverged, evidence=text)])
    finding = compare_samples(run) or compare_inputs(run) or compare_learning_rates(run)
    if finding:
        return ResumeReport([finding])
    if not is_reproducible(run):
        return ResumeReport(note=NO_COMPARISON)
    finding = compare_weights(run) or compare_contents(run)
    return ResumeReport([finding] if finding else [])


def line_of_snapshot(halted: Recording) -> CodeLine | None:
    """Return the line that has written the snapshot; None where a library has, in a thread."""
    paths = {path for _, event in halted.select(SnapshotFound) for path in event.paths}
    saves = [event for _, event in halted.select(Save)]
    writes = [event for _, event in halted.select(FileWrite) if event.path in paths]
    of_paths = [event for event in saves if event.path in paths] or saves[:1] or writes
    return next((event.at for event in of_paths if event.at), None)


# -- samples ---------------------------------------------------------------------------------------


def trained_batches(log: RankLog) -> list[Samples]:
    """Return the samples of each batch of a loader that was trained."""
    passes = log.training_passes
    batches = [batch for one_pass in passes for batch in batches_trained_in(one_pass)]
    has_indices = all(batch.indices is not None for batch in batches)
    return [tuple(batch.indices or ()) if has_indices else tuple(batch.rows) for batch in batches]


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


def compare_samples(run: ResumedRun) -> Finding | None:
    """Compare the batches after the snapshot with those of the unbroken run."""
    unbroken = trained_batches(run.unbroken)
    resumed = trained_batches(run.resumed)
    first = len(run.batches_before)
    if not resumed or run.batches_before != unbroken[:first]:  # another order in each run
        return find_repeated_samples(run)
    following = unbroken[first:]
    for offset, (expected, got) in enumerate(zip(following, resumed, strict=False)):
        if got != expected:
            return name_other_batch(run, unbroken, first + offset, resumed[offset:])
    return compare_lengths(run, len(following), len(resumed))


def name_other_batch(
    run: ResumedRun, unbroken: list[Samples], index: int, got: list[Samples]
) -> Finding | None:
    """Return how the batches of a resumed run go on in place of the one at this index."""
    found = [i for i, samples in enumerate(unbroken) if samples == got[0]]
    if not found:
        return find_repeated_samples(run)
    epochs = [len(batches_trained_in(one_pass)) for one_pass in run.unbroken.training_passes]
    starts = [sum(epochs[:number]) for number in range(len(epochs))]
    # Of equal batches the one from which most of the next ones follow.
    other = max(found, key=lambda i: count_equal(unbroken[i:], got))
    when = f"after {format_count(run.steps_before, 'step')}"
    if index > len(run.batches_before):
        when += f" and {index - len(run.batches_before)} more batches"
    if index in starts and other in starts:
        names = names_of_epochs(run.unbroken)
        epoch, expected = names[starts.index(other)], names[starts.index(index)]
        effect = "trained again" if epoch < expected else "skipped"
        text = (
            f"the snapshot was written {when}, where epoch {expected} begins; the resumed run goes"
            f" on with the batches of epoch {epoch}: epoch {min(epoch, expected)} is {effect}"
            f"{run.numbered}"
        )
        return run.evidence.finding("resume-epoch", run.save_line, text)
    count = abs(other - index)
    effect = f"{count} of the batches are " + ("trained again" if other < index else "left out")
    text = (
        f"{when} the resumed run reads the samples of batch {other + 1}, and the unbroken run those"
        f" of batch {index + 1}: {effect}{run.numbered}"
    )
    return run.evidence.finding("resume-samples", run.resumed.training_passes[0].line, text)


def names_of_epochs(log: RankLog) -> list[int]:
    """Return for each training pass what set_epoch was told before it, else its index."""
    names: list[int] = []
    told: int | None = None
    starts = {one_pass.start.n for one_pass in log.training_passes}
    for event in log.select(SetEpoch, PassStart):
        if isinstance(event, SetEpoch):
            told = event.value
        elif event.n in starts and isinstance(told, int):
            names.append(told)
    is_of_each = len(set(names)) == len(log.training_passes)
    return names if is_of_each else list(range(len(log.training_passes)))


def count_equal(first: list[Samples], second: list[Samples]) -> int:
    """Return how many batches are the same from the beginning."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(second))


def compare_lengths(run: ResumedRun, following: int, resumed: int) -> Finding | None:
    """Compare the number of batches, if both runs have ended by themselves."""
    was_cut_short = run.evidence.run.was_cut_short or not run.resumed.has_ended
    if was_cut_short or not run.unbroken.has_ended or following == resumed:
        return None
    effect = "trained again" if resumed > following else "skipped"
    count = abs(resumed - following)
    return run.evidence.finding(
        "resume-epoch",
        run.save_line,
        f"after {format_count(run.steps_before, 'step')} the unbroken run trains {following} more "
        f"batches, and the resumed run {resumed}: {count} of them are {effect}{run.numbered}",
    )


def find_repeated_samples(run: ResumedRun) -> Finding | None:
    """Find samples before a snapshot in mid-epoch that the resumed run trains again."""
    before = run.before[-1].training_passes
    if not before or not run.resumed.training_passes:
        return None
    interrupted = before[-1]
    resumed = run.resumed.training_passes[0]
    steps = interrupted.steps
    if interrupted.is_complete or not steps or interrupted.start.loader is None:
        return None
    trained = set_of(batches_trained_in(interrupted))
    retrained = set_of(batches_trained_in(resumed))
    repeated = trained & retrained
    if len(repeated) <= 0.5 * len(trained):
        return None
    return run.evidence.finding(
        "resume-samples",
        resumed.line,
        f"the snapshot was written after {steps} steps of an epoch; {len(repeated)} of the "
        f"{len(trained)} samples of these steps are trained again{run.numbered}",
    )


def set_of(batches: list[Batch]) -> set[Any]:
    """Return the samples of batches, as indices or as hashes of rows."""
    has_indices = all(batch.indices is not None for batch in batches)
    if has_indices:
        return {index for batch in batches for index in batch.indices or []}
    return {row for batch in batches for row in batch.rows}


def compare_inputs(run: ResumedRun) -> Finding | None:
    """Find inputs of no loader that begin anew, where the unbroken run goes on with others."""
    if len(run.before) > 1 or trained_batches(run.resumed):
        return None
    done = [call.rows for call in recorded_training_calls(run.before[0])]
    expected = [call.rows for call in recorded_training_calls(run.unbroken)][len(done) :]
    resumed = recorded_training_calls(run.resumed)[: min(3, len(done))]
    begins_anew = len(resumed) >= 2 and [call.rows for call in resumed] == done[: len(resumed)]
    if not expected or not begins_anew or expected[0] == done[0]:
        return None
    return run.evidence.finding(
        "resume-samples",
        resumed[0].at,
        f"the first {len(resumed)} inputs after the resume are those of the first steps of all, "
        f"and the unbroken run goes on with others",
        severity="warning",
    )


# -- rates, weights, and what later snapshots hold -------------------------------------------------


def compare_learning_rates(run: ResumedRun) -> Finding | None:
    """Compare the learning rates of the first steps after the snapshot."""
    all_rates = [event.lr for event in run.unbroken.select(OptimizerStep)]
    resumed = [event.lr for event in run.resumed.select(OptimizerStep)][:MAX_COMPARED_STEPS]
    first_step = run.steps_before + 1
    pairs = zip(all_rates[run.steps_before :], resumed, strict=False)
    for step, (expected, rates) in enumerate(pairs, first_step):
        if not expected or are_equal_rates(expected[:1], rates[:1]):
            continue
        text = (
            f"at step {step} the learning rate is {rates[0]:.6g} after the resume, and "
            f"{expected[0]:.6g} in the unbroken run{describe_lag(all_rates, rates, step)}"
        )
        return run.evidence.finding("resume-lr", run.load_line, f"{text}{run.numbered}")
    return None


def are_equal_rates(first: Any, second: Any) -> bool:
    pairs = zip(first, second, strict=True)
    return all(math.isclose(one, other, rel_tol=1e-6) for one, other in pairs)


def describe_lag(all_rates: list[Any], rates: Any, step: int) -> str:
    """Return at which step the unbroken run has these rates, if at one step alone."""
    steps = [i for i, each in enumerate(all_rates, 1) if each and are_equal_rates(each, rates)]
    if len(steps) != 1:
        return ""
    if steps[0] == 1:
        return ", where step 1 has it: the schedule starts again"
    side = "ahead" if steps[0] > step else "behind"
    return f", where step {steps[0]} has it: the schedule is {abs(steps[0] - step)} steps {side}"


def is_reproducible(run: ResumedRun) -> bool:
    """Return whether two runs of the script have the same weights up to the stop."""
    halted = run.before[0].select(OptimizerStep)
    pairs = zip(run.unbroken.select(OptimizerStep), halted, strict=False)
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
            f"themselves are not restored{run.numbered}",
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
                f"all weights are equal{run.numbered}",
            )
    return None


def compare_contents(run: ResumedRun) -> Finding | None:
    """Compare what a later snapshot holds with what the unbroken run has saved after that step.

    What differs between two runs that nobody has resumed, such as a time, does not count.
    """
    unbroken = contents_of_saves(run.unbroken, 0)
    first = contents_of_saves(run.before[0], 0)
    varying = {key[1:] for key, value in first.items() if unbroken.get(key, value) != value}
    resumed = contents_of_saves(run.resumed, run.steps_before)
    for key, value in sorted(resumed.items(), key=lambda item: is_hash(item[1])):
        step, file, name = key
        if key in unbroken and unbroken[key] != value and key[1:] not in varying:
            values = f"{value} after the resume, and {unbroken[key]} in the unbroken run"
            if is_hash(value):
                values = "another after the resume than in the unbroken run"
            return run.evidence.finding(
                "resume-differs",
                run.load_line,
                f"{name} in {file} after step {step} is {values}{run.numbered}",
            )
    return None


def is_hash(value: str) -> bool:
    return value.startswith("#")


def contents_of_saves(log: RankLog, steps_before: int) -> Contents:
    """Return the hashes and numbers of what was saved, by step, file and key."""
    contents: Contents = {}
    renamed = renamed_paths(log)
    for step, save in steps_of_saves(log, steps_before):
        file = PurePath(renamed.get(save.path, save.path)).name
        for name, value in save.contents.items():
            contents[step, file, name] = value
    return contents


def steps_of_saves(log: RankLog, step: int) -> Iterator[tuple[int, Save]]:
    """Yield each save with the number of the steps before it."""
    for event in log.select(OptimizerStep, Save):
        if isinstance(event, Save):
            yield step, event
        else:
            step += 1

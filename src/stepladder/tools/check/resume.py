"""R9, resume: a run that is stopped and started again, twice, goes on as the unbroken run.

The script is ended after its first snapshot and started again, ended after the next snapshot and
started once more. Each start is compared with what the unbroken run does after as many steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
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
from stepladder.tools.check.rank_processes import LaunchOutcome, RankLaunch, run_ranks
from stepladder.tools.check.recording import LoaderPass, RankLog, Recording, read_recording
from stepladder.tools.check.relations.samples_read import passes_of_training
from stepladder.tools.check.rules.evidence import Comparison, RunEvidence
from stepladder.tools.check.rules.model import replicas_differ
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
# What is compared, in this order: rates, weights before and after a step, and what is saved.
RATE, BEFORE, AFTER, SAVED = range(4)
ValueKey = tuple[int, int, str]  # the step, the kind and a name
Values = dict[ValueKey, Any]


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

    @property
    def first_line(self) -> CodeLine | None:
        """The line that reads the samples which the resumed run trains first."""
        return next((one_pass.line for one_pass in passes_of_training(self.resumed)), None)

    def finding(self, rule: str, text: str) -> Finding:
        """Return a finding at the line of its rule: that which saves, reads samples or loads."""
        lines = {"resume-epoch": self.save_line, "resume-samples": self.first_line}
        return self.evidence.finding(rule, lines.get(rule, self.load_line), text + self.numbered)


def compare_resumed_run(
    evidence: RunEvidence, launch: RankLaunch, resume_args: tuple[str, ...] = ()
) -> Comparison:
    """Halt and resume the script twice, and return what differs from the unbroken run.

    Args:
        evidence: The unbroken run.
        launch: How the script is started, in a fresh copy.
        resume_args: More arguments for the starts that resume.
    """
    if not evidence.run.was_cut_short:  # else epochs are counted on a fast machine alone
        launch = replace(launch, settings=replace(launch.settings, enough_after_s=math.inf))
    # A script that saves weights by torch.save may write large pictures, too.
    is_known = any(event.model for _, event in evidence.run.select(Save))
    settings = replace(launch.settings, stop_at_snapshot=True, may_be_packed=not is_known)
    halting = replace(launch, settings=settings)
    original, copy = evidence.run.original, launch.settings.copy
    outcome = run_ranks(halting, "halted")
    before: list[Recording] = []
    counts: list[int] = []
    report = Comparison(not_checked=NO_SNAPSHOT)
    for name in ("resumed", "resumed-again"):
        if not outcome.halted:
            break
        before.append(read_recording(outcome.folder, original, copy))
        start = halting if name == "resumed" else launch
        outcome = run_ranks(replace(start, args=(*launch.args, *resume_args)), name)
        resumed = read_recording(outcome.folder, original, copy)
        if outcome.failed:
            return Comparison([failed_resume(evidence, resumed, outcome)])
        counts.append(sum(steps_of(run.ranks[0]) for run in until_opened(before, resumed)))
        by_key = {finding.key: finding for finding in report.findings}
        report = compare(evidence, before, resumed)
        for finding in report.findings:
            by_key.setdefault(finding.key, finding)  # the first resume's, where both show it
        report = replace(report, findings=list(by_key.values()))
        # After other samples or rates, all that follows is another run.
        goes_on_alike = all(finding.rule == WEIGHTS_DIFFER for finding in report.findings)
        if report.not_checked or not goes_on_alike:
            break
    if not (report.findings or report.not_checked or report.note):
        steps = " and ".join(map(str, counts))
        held = f"resume: started again after {steps} steps, it goes on as the unbroken run"
        report = replace(report, held=[held])
    return report


def failed_resume(evidence: RunEvidence, resumed: Recording, outcome: LaunchOutcome) -> Finding:
    """Return the finding of a resumed script that failed."""
    events = [event for _, event in resumed.select(Load) or evidence.run.select(Save)[:1]]
    is_prefixed = any(event.more or event.fewer for _, event in resumed.select(StateDictLoad))
    rule = "module-prefix" if is_prefixed else "resume-differs"
    line = events[-1].at if events else None
    text = f"the resumed script fails: {outcome.last_error}"
    return with_copy_of(evidence, resumed).finding(rule, line, text)


def with_copy_of(evidence: RunEvidence, resumed: Recording) -> RunEvidence:
    """Return the evidence with the copy of another run, so that its lines are found."""
    return RunEvidence(replace(evidence.run, copy=resumed.copy), evidence.source)


def compare(evidence: RunEvidence, before: list[Recording], resumed: Recording) -> Comparison:
    """Return what differs between the unbroken run and the one that was resumed.

    Args:
        evidence: The unbroken run.
        before: The starts that were ended after a snapshot.
        resumed: The start after these.
    """
    log = resumed.ranks[0]
    loads: list[Any] = [*log.select(StateDictLoad), *log.select(Load)]
    if not loads:
        return Comparison(not_checked=NO_LOAD)
    before = until_opened(before, resumed)
    resumed_alone = replace(evidence, run=replace(resumed, original=evidence.run.original))
    prefixed = list(module_prefix(resumed_alone))
    if prefixed:
        return Comparison(prefixed)
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
        return Comparison([replace(diverged, evidence=text)])
    finding = compare_samples(run)
    return Comparison([finding]) if finding else compare_values(run)


def until_opened(before: list[Recording], resumed: Recording) -> list[Recording]:
    """Return the starts until the snapshot that was opened, which an argument may name."""
    opened = {event.path for _, event in resumed.select(Load)}
    for number in range(len(before), 0, -1):
        found = before[number - 1].select(SnapshotFound)
        if opened.intersection(path for _, event in found for path in event.paths):
            return before[:number]
    return before


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
    return samples_trained_in(*passes_of_training(log))


def samples_trained_in(*passes: LoaderPass) -> list[Samples]:
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
        if got and expected and got != expected:  # of a late batch by hand nothing is known
            return name_other_batch(run, unbroken, first + offset, resumed[offset:])
    return compare_lengths(run, len(following), len(resumed))


def name_other_batch(
    run: ResumedRun, unbroken: list[Samples], index: int, got: list[Samples]
) -> Finding | None:
    """Return how the batches of a resumed run go on in place of the one at this index."""
    found = [i for i, samples in enumerate(unbroken) if samples == got[0]]
    if not found:
        return find_repeated_samples(run)
    epochs = [len(batches_trained_in(one_pass)) for one_pass in passes_of_training(run.unbroken)]
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
        )
        return run.finding("resume-epoch", text)
    count = abs(other - index)
    effect = f"{count} of the batches are " + ("trained again" if other < index else "left out")
    text = (
        f"{when} the resumed run reads the samples of batch {other + 1}, and the unbroken run those"
        f" of batch {index + 1}: {effect}"
    )
    return run.finding("resume-samples", text)


def names_of_epochs(log: RankLog) -> list[int]:
    """Return for each training pass what set_epoch was told before it, else its index."""
    names: list[int] = []
    told: int | None = None
    passes = passes_of_training(log)
    starts = {one_pass.start.n for one_pass in passes}
    for event in log.select(SetEpoch, PassStart):
        if isinstance(event, SetEpoch):
            told = event.value
        elif event.n in starts and isinstance(told, int):
            names.append(told)
    is_of_each = len(set(names)) == len(passes)
    return names if is_of_each else list(range(len(passes)))


def count_equal(first: list[Samples], second: list[Samples]) -> int:
    """Return how many batches are the same from the beginning."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(second))


def compare_lengths(run: ResumedRun, following: int, resumed: int) -> Finding | None:
    """Compare the number of batches, if both runs have ended by themselves."""
    were_cut_short = run.evidence.run.was_cut_short or not passes_of_training(run.resumed)
    have_ended = run.resumed.has_ended and run.unbroken.has_ended
    if were_cut_short or not have_ended or following == resumed:
        return None
    effect = "trained again" if resumed > following else "skipped"
    count = abs(resumed - following)
    return run.finding(
        "resume-epoch",
        f"after {format_count(run.steps_before, 'step')} the unbroken run trains {following} more "
        f"batches, and the resumed run {resumed}: {count} of them are {effect}",
    )


def find_repeated_samples(run: ResumedRun) -> Finding | None:
    """Find samples before a snapshot in mid-epoch that the resumed run trains again."""
    before = run.before[-1].training_passes
    if not before or not run.resumed.training_passes:
        return None
    interrupted = before[-1]
    steps = interrupted.steps
    if interrupted.is_complete or not steps:
        return None
    trained = set(chain.from_iterable(samples_trained_in(interrupted)))
    retrained = chain.from_iterable(samples_trained_in(run.resumed.training_passes[0]))
    repeated = trained.intersection(retrained)
    if len(repeated) <= 0.5 * len(trained):
        return None
    return run.finding(
        "resume-samples",
        f"the snapshot was written after {steps} steps of an epoch; {len(repeated)} of the "
        f"{len(trained)} samples of these steps are trained again",
    )


# -- rates, weights, and what later snapshots hold -------------------------------------------------


def recorded_values(log: RankLog, step: int) -> Values:
    """Return the rates, the weights and what is saved of a start that begins after this step."""
    values: Values = {}
    renamed = renamed_paths(log)
    for event in log.select(BeforeStep, OptimizerStep, Save):
        if isinstance(event, BeforeStep):
            values |= {(step + 1, BEFORE, name): digest for name, digest in event.before.items()}
        elif isinstance(event, OptimizerStep):
            step += 1
            if event.lr:
                values[step, RATE, ""] = event.lr[0]
            values |= {(step, AFTER, name): digest for name, digest in event.after.items()}
        elif isinstance(event, Save):
            file = PurePath(renamed.get(event.path, event.path)).name
            saved = event.contents.items()
            values |= {(step, SAVED, f"{name} in {file}"): value for name, value in saved}
    return values


def compare_values(run: ResumedRun) -> Comparison:
    """Compare what is recorded after the snapshot: rates, then weights, then what is saved.

    What differs between two runs that nobody has resumed, such as a time, does not count.
    """
    unbroken = recorded_values(run.unbroken, 0)
    resumed = recorded_values(run.resumed, run.steps_before)
    halted = recorded_values(run.before[0], 0)
    varying = {
        key[1:] for key in halted if not is_same(halted[key], unbroken.get(key, halted[key]))
    }
    order = sorted(resumed, key=lambda key: (key[1], is_hash(resumed[key]), key[0]))
    differing = [
        key for key in order if key in unbroken and not is_same(resumed[key], unbroken[key])
    ]
    last_step = run.steps_before + MAX_COMPARED_STEPS
    for step, kind, _ in differing:
        if kind == RATE and step <= last_step:
            return Comparison([run.finding("resume-lr", describe_rate(unbroken, resumed, step))])
    weights = {key[1:] for key in halted if key[1] == AFTER}
    if not weights or weights & varying:
        return Comparison(note=NO_COMPARISON)
    first_step = run.steps_before + 1
    for key in differing:
        is_later_beginning = key[1] == BEFORE and key[0] > first_step
        if key[1] != RATE and key[1:] not in varying and not is_later_beginning:
            text = describe_state(key, unbroken, resumed, first_step)
            return Comparison([run.finding("resume-differs", text)])
    other = find_other_save(run)
    if other:
        return Comparison([run.finding("resume-differs", other)])
    return Comparison()


def find_other_save(run: ResumedRun) -> str | None:
    """Describe a file that one run saves after a step at which the other does not.

    A value that decides about it is lost, such as the best one. Where a halted run has saved at
    other steps than the unbroken one, such as by the time of day, that says nothing.
    """
    unbroken, halted = list_saves(run.unbroken), list_saves(run.before[0])
    resumed = list_saves(run.resumed, run.steps_before)
    if {save for save in unbroken ^ halted if save[0] < steps_of(run.before[0])}:
        return None
    end = min(steps_of(run.unbroken), run.steps_before + steps_of(run.resumed))
    known = {file for _, file in unbroken}  # other names are of the time, or of a start
    for step, file in sorted(unbroken ^ resumed):
        if run.steps_before < step < end and file in known:
            who, other = "resumed", "unbroken"
            if (step, file) in unbroken:
                who, other = other, who
            return (
                f"after step {step} the {who} run saves {file}, and the {other} run does not: a"
                " value that decides about it, such as the best one, is lost"
            )
    return None


def steps_of(log: RankLog) -> int:
    return len(log.select(OptimizerStep))


def list_saves(log: RankLog, step: int = 0) -> set[tuple[int, str]]:
    """Return after how many steps which file was saved, of a start that begins after `step`."""
    saves = set()
    renamed = renamed_paths(log)
    for event in log.select(OptimizerStep, Save):
        if isinstance(event, OptimizerStep):
            step += 1
        elif isinstance(event, Save):
            saves.add((step, PurePath(renamed.get(event.path, event.path)).name))
    return saves


def describe_state(key: ValueKey, unbroken: Values, resumed: Values, first_step: int) -> str:
    """Return how a weight, or a part of a snapshot, differs from that of the unbroken run."""
    step, kind, name = key
    if kind == BEFORE:
        return (
            f"before step {step} already {name} differs from the unbroken run: the weights "
            "themselves are not restored"
        )
    if kind == AFTER:
        return (
            f"after step {step} {name} differs from the unbroken run; before step {first_step} all "
            "weights are equal"
        )
    values = f"{resumed[key]} after the resume, and {unbroken[key]} in the unbroken run"
    if is_hash(resumed[key]):
        values = "another after the resume than in the unbroken run"
    return f"{name} after step {step} is {values}"


def is_same(first: object, second: object) -> bool:
    """Return whether two recorded values are the same; schedules may round rates."""
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-6)
    return first == second


def is_hash(value: object) -> bool:
    return str(value).startswith("#")


def describe_rate(unbroken: Values, resumed: Values, step: int) -> str:
    """Return both rates, and at which step the unbroken run has that of the resumed one."""
    key = (step, RATE, "")
    text = (
        f"at step {step} the learning rate is {resumed[key]:.6g} after the resume, and "
        f"{unbroken[key]:.6g} in the unbroken run"
    )
    steps = [
        n
        for n, kind, _ in unbroken
        if kind == RATE and is_same(unbroken[n, kind, ""], resumed[key])
    ]
    if len(steps) != 1:
        return text
    if steps[0] == 1:
        return f"{text}, where step 1 has it: the schedule starts again"
    side = "ahead" if steps[0] > step else "behind"
    lag = abs(steps[0] - step)
    return f"{text}, where step {steps[0]} has it: the schedule is {lag} steps {side}"

"""R9 and R1 under preemption: a run that a cluster interrupts goes on where it was.

The script is interrupted at some moments of its unbroken run, each time in a fresh copy: with a
warning signal and SIGKILL after a time of grace, with SIGKILL at once, or by the loss of one rank.
It is started again, interrupted once more, and started again. The first batch of each start tells
from which step of the unbroken run it goes on.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import (
    Backward,
    FileMove,
    Forward,
    Load,
    OptimizerStep,
    Save,
    StateDictLoad,
)
from stepladder.tools.check.rank_processes import Interruption, LaunchOutcome, RankLaunch, run_ranks
from stepladder.tools.check.recording import RankLog, read_recording
from stepladder.tools.check.resume import Samples, trained_batches
from stepladder.tools.check.rules.evidence import Comparison, RunEvidence
from stepladder.tools.findings.finding import Finding

GRACE_S = 20.0  # between the warning signal and SIGKILL
STEPS_OF_NEXT_START = 2  # before it is interrupted, too
SNAPSHOT_GONE = "no snapshot is left, so it begins at the first step"
OTHER_BATCHES = "it goes on with batches that the unbroken run does not have"
NOT_COMPARABLE = (
    "--preempt: the samples of batches are not known, so nothing tells where a start goes on"
)


@dataclass(frozen=True)
class Moment:
    """A moment at which the script is interrupted.

    Args:
        name: What the script does then.
        pause_at: See ProbeSettings.
        number: The signal that all ranks get.
        last_rank_only: Whether the last rank alone gets it.
        has_snapshot: Whether a snapshot was written before that must not be lost.
    """

    name: str
    pause_at: str
    number: int
    last_rank_only: bool = False
    has_snapshot: bool = False

    @property
    def is_warned(self) -> bool:
        """Whether the script has time to save."""
        return self.number != signal.SIGKILL

    @property
    def step(self) -> int:
        """The step, counted from 1; 0 at a moment that is not in a step."""
        kind, _, number = self.pause_at.partition(":")
        return int(number) if kind == "step" else 0

    def interrupt(self, launch: RankLaunch) -> RankLaunch:
        """Return a start that is interrupted at this moment."""
        return replace(
            launch,
            settings=replace(launch.settings, pause_at=self.pause_at),
            interruption=Interruption(self.number, GRACE_S, self.last_rank_only),
        )

    def __str__(self) -> str:
        whom = " to the last rank" if self.last_rank_only else ""
        return f"{self.name} ({signal.Signals(self.number).name}{whom})"


@dataclass(frozen=True)
class InterruptedRun:
    """What has followed one interruption.

    Args:
        moment: When it was.
        lost: For each start after the first: the steps that are trained again; less than 0 if some
            are left out.
        failure: The last line of a start that failed.
        overran: How many steps the first start did after the warning signal, if it did all that
            were left.
    """

    moment: Moment
    lost: tuple[int, ...] = ()
    failure: str = ""
    overran: int = 0

    @property
    def has_saved(self) -> bool:
        """Whether the warning signal ends the start, and nothing is trained again or left out."""
        is_whole = not self.failure and not any(self.lost) and not self.overran
        return self.moment.is_warned and is_whole


def rehearse(
    evidence: RunEvidence,
    launch_in: Callable[[str], RankLaunch],
    count: int,
    number: int,
    args: tuple[str, ...] = (),
) -> Comparison:
    """Interrupt the script at some moments, and return what was lost.

    Args:
        evidence: The unbroken run.
        launch_in: Returns how the script is started, in a fresh copy of this name.
        count: The number of moments.
        number: The warning signal.
        args: More arguments for the starts that resume.
    """
    unbroken = trained_batches(evidence.rank_0)
    if not any(unbroken):
        return Comparison(not_checked=NOT_COMPARABLE)
    rehearsals = []
    for index, moment in enumerate(choose_moments(evidence.rank_0, count, number)):
        launch = launch_in(f"preempted-{index}")
        rehearsals.append(rehearse_moment(moment, launch, evidence, unbroken, args))
    warned = [each for each in rehearsals if each.moment.is_warned]
    saved = sum(each.has_saved for each in warned)
    most = max((lost for each in rehearsals for lost in each.lost), default=0)
    samples = most * len(unbroken[0]) * len(evidence.ranks)
    held = [
        f"preemption: saved in {saved} of {len(warned)} after the signal; at most "
        f"{format_count(most, 'step')} lost, {format_count(samples, 'sample')} trained again",
        *(f"  {each.moment}: {describe(each)}" for each in rehearsals),
    ]
    return Comparison(list(find_losses(evidence, rehearsals)), held=held)


def choose_moments(log: RankLog, count: int, number: int) -> list[Moment]:
    """Return moments of a run, those that differ most first."""
    steps = count_steps(log)
    evaluated = sum(not event.grad for event in log.select(Forward))
    middle = max(1, steps // 2)
    moments = [Moment(f"in step {middle}", f"step:{middle}", number)]
    if evaluated:
        moments.append(Moment("while it evaluates", f"evaluation:{evaluated // 2 + 1}", number))
    if log.select(Save):
        moments.append(Moment("while it saves", "save:1", signal.SIGKILL))
    renames = find_renames(log)[:2]  # from the second on there is an older snapshot to lose
    for number_of_rename in renames[-1:]:
        pause = f"rename:{number_of_rename}"
        has_snapshot = len(renames) > 1
        name = "between write and rename"
        moments.append(Moment(name, pause, signal.SIGKILL, has_snapshot=has_snapshot))
    moments += [
        Moment("in the first step", "step:1", number),
        Moment("while it resumes", "load:1", number),
        Moment(f"in step {middle}", f"step:{middle}", signal.SIGKILL, last_rank_only=True),
    ]
    more = count - len(moments)
    for index in range(more):
        step = 1 + steps * (2 * index + 1) // (2 * more)
        moments.append(Moment(f"in step {step}", f"step:{step}", number))
    return moments[:count]


def find_renames(log: RankLog) -> list[int]:
    """Return which of a run's renames, counted from 1, give a saved file or folder its name."""
    saved = [PurePath(event.path) for event in log.select(Save)]
    return [
        number
        for number, event in enumerate(log.select(FileMove), 1)
        if any(path.is_relative_to(event.source) for path in saved)
    ]


def rehearse_moment(
    moment: Moment,
    launch: RankLaunch,
    evidence: RunEvidence,
    unbroken: list[Samples],
    args: tuple[str, ...],
) -> InterruptedRun:
    """Interrupt the script at a moment and in the start after it, and start it once more."""
    steps = count_steps(evidence.rank_0)
    again = Moment("", f"step:{STEPS_OF_NEXT_START}", signal.SIGTERM)
    end = replace(again, number=signal.SIGKILL)
    first = moment
    if moment.pause_at.startswith("load"):  # there is something to load after an interruption alone
        first = Moment("", f"step:{max(1, steps // 2)}", moment.number)
        again = moment
    resuming = replace(launch, args=(*launch.args, *args))
    starts = [first.interrupt(launch), again.interrupt(resuming), end.interrupt(resuming)]
    done = 0
    overran = 0
    lost: list[int] = []
    for index, start in enumerate(starts):
        outcome = run_ranks(start, f"{launch.settings.copy.rpartition('/')[2]}-{index}")
        recording = read_recording(outcome.folder, evidence.run.original, launch.settings.copy)
        batches = [each for log in recording.ranks[:1] for each in trained_batches(log)]
        has_loaded = bool(recording.select(Load, StateDictLoad))
        begin = find_begin(unbroken, batches, done, has_loaded)
        if not index and moment.is_warned and first.step:
            is_complete = count_steps(recording.ranks[0]) == steps
            overran = steps - first.step if is_complete else 0
        if index == 1 and moment.has_snapshot and not has_loaded:
            return InterruptedRun(moment, failure=SNAPSHOT_GONE)
        if begin is None or has_failed(outcome, start):
            return InterruptedRun(moment, tuple(lost), outcome.last_error or OTHER_BATCHES)
        if index:
            lost.append(done - begin)
        done = begin + len(batches)
    return InterruptedRun(moment, tuple(lost), overran=overran)


def count_steps(log: RankLog) -> int:
    """Return how many steps the first optimizer of a rank did."""
    return sum(event.optimizer == 0 for event in log.select(OptimizerStep))


def find_begin(
    unbroken: list[Samples], batches: list[Samples], done: int, has_loaded: bool
) -> int | None:
    """Return from which batch of the unbroken run a start goes on; None if it is none of them.

    A start that trains nothing, because all is done, goes on at the end. Where each epoch has the
    same batches, it is the nearest one to the end of the last start.
    """
    if not batches:
        return done
    if not has_loaded:
        return 0
    same = [index for index, samples in enumerate(unbroken) if samples == batches[0]]
    return min(same, key=lambda index: abs(index - done), default=None)


def has_failed(outcome: LaunchOutcome, start: RankLaunch) -> bool:
    """Return whether a start failed by itself, and was not interrupted."""
    was_interrupted = start.interruption is not None and bool(start.interruption.signalled_at)
    return outcome.failed and not was_interrupted


def describe(rehearsal: InterruptedRun) -> str:
    """Return what followed an interruption."""
    texts = [count_lost(lost) for lost in rehearsal.lost]
    if rehearsal.failure:
        texts.append(f"the next start fails: {rehearsal.failure}")
    return "; interrupted again: ".join(texts)


def count_lost(lost: int) -> str:
    if lost < 0:
        return f"{format_count(-lost, 'step')} left out"
    return f"{format_count(lost, 'step')} lost"


def find_losses(evidence: RunEvidence, rehearsals: list[InterruptedRun]) -> Iterator[Finding]:
    """Yield the worst failure, the worst loss after a warning, and a warning without effect."""
    failed = next((each for each in rehearsals if each.failure), None)
    events = [*evidence.rank_0.select(Load)[:1], *evidence.rank_0.select(Backward)[:1]]
    line = next((event.at for event in events), None)
    unsaved = [each for each in rehearsals if each.moment.is_warned and any(each.lost)]
    if unsaved:
        worst = max(unsaved, key=lambda each: max(map(abs, each.lost)))
        yield evidence.finding(
            "preempted",
            line,
            f"interrupted {worst.moment}: {describe(worst)}, in {len(unsaved)} of "
            f"{sum(each.moment.is_warned for each in rehearsals)} rehearsals",
        )
    in_step = [each for each in rehearsals if each.moment.is_warned and each.moment.step]
    if in_step and all(each.overran for each in in_step):
        most = max(each.overran for each in in_step)
        text = f"the signal ends nothing: {format_count(most, 'step')} more, up to its own end"
        yield evidence.finding("preempted", line, text)
    if failed:  # the last one: of several at one line it is shown
        text = f"interrupted {failed.moment}, {describe(failed)}"
        yield evidence.finding("preempted.failed", line, text)

"""The proof of a rung: what holds between the script as it was and the converted one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from stepladder.core.numbers import format_count
from stepladder.launcher.local.outcome import signal_name
from stepladder.tools.check.events import (
    Backward,
    BeforeStep,
    FileAppend,
    FileWrite,
    Print,
    RowNames,
    Save,
    Statistic,
    WrittenText,
)
from stepladder.tools.check.failure import Folders, frames_of
from stepladder.tools.check.recording import RankLog, Recording
from stepladder.tools.check.relations import gradients, shown
from stepladder.tools.check.relations.frozen_runs import FrozenRuns, Violation
from stepladder.tools.check.relations.samples_read import (
    SamplesRead,
    passes_without_training,
    training_samples,
    trains_one_data_set,
)
from stepladder.tools.convert.facts import ScriptFacts
from stepladder.tools.convert.source import EditedText
from stepladder.tools.convert.starts import Start, Started
from stepladder.tools.findings.finding import Location
from stepladder.tools.probe.events import CodeLine, ProbeEvent

JUDGED_ON_ONE = frozenset({"samples", "gradients", "shown-numbers"})
SAME_NORM = 1e-3  # of gradients, which are sums in one order on all processes
MIN_TIME_RATIO = 1.5
CHANCE_FACTOR = (
    1.25  # of what other random numbers change, where samples are drawn with replacement
)
MAX_SHARE_REPEATED = 0.05  # of the samples: those that make shares equal


class _WrongNumber(NamedTuple):
    """A number that a line shows.

    Args:
        location: The line.
        position: Which of its numbers.
        text: What it has shown.
        is_counter: Whether it is the same with other weights, and on each process.
    """

    location: Location
    position: int
    text: str
    is_counter: bool


@dataclass(frozen=True)
class RungProof:
    """What runs of a converted script have shown.

    Args:
        holds: What held, a line for each relation.
        broken: What did not hold, a line for each relation.
        wrong_numbers: The shown numbers that are not those of all processes.
        not_taken: What another way has broken.
        not_judged: What could not be compared.
        shared_twice: The calls of models that get shares of shares.
    """

    holds: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    wrong_numbers: list[_WrongNumber] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)
    shared_twice: set[Location] = field(default_factory=set)


def starts_of_original(files: Mapping[str, str]) -> dict[str, Start]:
    """Return the starts of the script as it is, but for the number of epochs."""
    return {
        "reference": Start(files, frozen="plain"),
        "shuffled": Start(files, frozen="shuffled"),
        "reweighted": Start(files, frozen="reweighted"),
    }


def starts_of_converted(files: Mapping[str, str], num_processes: int) -> dict[str, Start]:
    return {"one": Start(files, 0), "several": Start(files, num_processes)}


def read_original(started: Mapping[str, Started]) -> FrozenRuns:
    """Return the runs of the script as it was, with which others are compared."""
    recordings = {name: _with_original_lines(item.recording) for name, item in started.items()}
    return FrozenRuns(compared=recordings["reference"], **recordings)


def prove(
    original: FrozenRuns,
    started: Mapping[str, Started],
    files: Mapping[str, EditedText],
    judged: frozenset[str],
) -> RungProof:
    """Compare a converted script, on one and on two processes, with the script as it was."""
    proof = RungProof()
    several = f"on {len(started['several'].recording.ranks)} processes"
    one: Recording | None = None
    runs_of = (("one", "on 1 process", JUDGED_ON_ONE), ("several", several, judged))
    for name, where, relations in runs_of:
        if reason := why_failed(started[name]):
            proof.broken.append(f"{where} it {reason}")
            return proof
        compared = _with_original_lines(started[name].recording, files)
        compare_run(proof, replace(original, compared=compared), relations, where, one)
        one = compared
    return proof


def why_failed(started: Started) -> str:
    """Return why a run proves nothing, with the last line that it has printed; or ""."""
    outcome = started.outcome
    if outcome.late:
        return "takes longer than --timeout allows"
    if outcome.has_stalled and not outcome.has_raised:
        return f"stands still {outcome.position}".rstrip()
    if outcome.failed:
        if outcome.last_error:
            return f"fails{_describe_failing_line(started)}: {outcome.last_error}"
        code = next((outcome.codes[rank] or 0 for rank in outcome.failed_ranks), 0)
        return f"ends with exit code {code}" if code >= 0 else f"ends with {signal_name(-code)}"
    return "" if outcome.has_stepped else "makes no optimizer step"


def _describe_failing_line(started: Started) -> str:
    """Return the text of the line of the user's code that has failed, if there is one."""
    folders = Folders(started.recording.copy, started.recording.original)
    frames = frames_of(started.outcome.error_output)
    sources = [frame.source for frame in frames if folders.contain(frame.file)]
    return f" at `{sources[-1]}`" if sources else ""


def compare_run(
    proof: RungProof, runs: FrozenRuns, relations: frozenset[str], where: str, one: Recording | None
) -> None:
    """Add to the proof what holds and what does not, in one run of the converted script."""
    if "samples" in relations:
        compare_samples(proof, runs, where)
        _compare_calls(proof, runs, where)
    if "values-of-sums" in relations:
        _compare_values_of_sums(proof, runs, where)
    if "gradients" in relations:
        _compare_gradients(proof, runs, where)
    if "shown-numbers" in relations:
        _compare_numbers(proof, runs, where, one)
    if "files" in relations:
        writers = [
            log.rank for log in runs.compared.ranks if log.select(Save, FileWrite, FileAppend)
        ]
        if len(writers) > 1:
            proof.broken.append(f"files {where}: ranks {', '.join(map(str, writers))} write")
        elif writers:
            proof.holds.append(f"files {where}: one process writes")


def _compare_gradients(proof: RungProof, runs: FrozenRuns, where: str) -> None:
    """Judge the gradients of steps: the same on all ranks, and in the mean those of one process."""
    violations = [item.evidence for item in gradients.violations(runs, has_same_batches=True)]
    norms: dict[tuple[int, int], list[float]] = {}
    weights: dict[tuple[int, int], set[str]] = {}
    for _, event in runs.compared.select(BeforeStep):
        step = event.optimizer, event.step
        norms.setdefault(step, []).append(event.norm)
        weights.setdefault(step, set()).add(str(event.before))
    if any(len(of) > 1 for of in weights.values()):
        violations.append("the processes have different weights")
    if any(not math.isclose(min(of), max(of), rel_tol=SAME_NORM) for of in norms.values()):
        violations.append("each process makes steps with its own, and not with the mean")
    if violation := _compare_losses(runs):
        violations.append(f"the loss {violation.evidence}")
    proof.broken.extend(f"gradients {where}: {item}" for item in violations)
    steps = gradients.count_compared(runs)
    if steps and not violations:
        proof.holds.append(f"gradients {where}: the mean of {format_count(steps, 'step')}")


def _compare_losses(runs: FrozenRuns) -> Violation | None:
    """Return how the mean loss of all ranks differs: of fewer pairs in a batch, for example."""
    assert runs.shuffled
    logs = (runs.reference.ranks[0], runs.shuffled.ranks[0], *runs.compared.ranks)
    reference, shuffled, *others = [_losses_of(log) for log in logs]
    if not all(series.values for series in (reference, shuffled, *others)):
        return None
    if not math.isfinite(reference.mean):
        text = f"is {reference.mean} in a step of one process, too: nothing can be compared"
        return Violation("gradients", None, math.inf, text)
    number = shown.ComparedNumber((None, None, 0), reference, shuffled, dict(enumerate(others)))
    return shown.compare(number)


def _losses_of(log: RankLog) -> shown.Series:
    losses = [event.loss for event in log.select(Backward) if event.loss is not None]
    return shown.Series(tuple(losses), resolution=0.0)


def _compare_numbers(proof: RungProof, runs: FrozenRuns, where: str, one: Recording | None) -> None:
    """Judge each number that is shown: it is that of one process, on each rank that shows it."""
    reasons: dict[Location, str] = {}
    for line, index, reason, is_counter in [*differing(runs), *local(runs), *counters(runs, one)]:
        location = Location(line.file, line.line)
        text = next(e.text for e in runs.reference.ranks[0].select(Print) if e.at == line)
        if all((item.location, item.position) != (location, index) for item in proof.wrong_numbers):
            proof.wrong_numbers.append(_WrongNumber(location, index, text, is_counter))
        reasons.setdefault(location, reason)
    proof.broken.extend(f"line {location.line} {where}: {why}" for location, why in reasons.items())
    lines = shown.count_compared(runs)
    if lines and not reasons:
        proof.holds.append(f"numbers {where}: {format_count(lines, 'line')}")


Judgement = tuple[CodeLine, int, str, bool]


def differing(runs: FrozenRuns) -> Iterator[Judgement]:
    """Yield the numbers that are not those of one process."""
    for number in shown.compared_numbers(runs):
        line, _, index = number.place
        violation = shown.compare(number)
        if line and violation:
            yield line, index, violation.evidence, False
    expected = _series_of(runs.reference)
    for place in _series_of(runs.compared):
        line, caller, index = place
        if line and place not in expected and (line, caller, 0) in expected:
            yield line, 0, f"shows more than the {index} numbers of one process", False


def local(runs: FrozenRuns) -> Iterator[Judgement]:
    """Yield the numbers that ranks show with different values, but for those made of time."""
    first, *others = [shown.read_series(log) for log in runs.compared.ranks]
    reference = _series_of(runs.reference)
    fast = _series_of(runs.shuffled)
    for location, series in first.items():
        line, _, index = location
        if line is None or location not in reference or location not in fast:
            continue
        if _is_of_time(reference[location], fast[location]):
            continue
        for item in others:
            if location in item and item[location].values != series.values:
                values = (
                    f"{series.values[-1]:.6g} on rank 0, {item[location].values[-1]:.6g} on another"
                )
                yield line, index, f"each rank shows a number of its own: {values}", False


def counters(runs: FrozenRuns, one: Recording | None) -> Iterator[Judgement]:
    """Yield the numbers that depend on neither weights nor chance, and differ from one process.

    Those before the first call of a model are compared with the converted script on one process,
    too, which starts at the same time: they may be a date.
    """
    originals = (runs.reference, runs.shuffled, runs.reweighted, one or runs.reference)
    reference, *others = [_series_of(run, with_settings=bool(one)) for run in originals]
    compared = _series_of(runs.compared, with_settings=bool(one))
    for location, series in reference.items():
        line, _, index = location
        is_counter = all(
            location in other and other[location].values == series.values for other in others
        )
        if line and is_counter and location in compared:
            expected, highest = max(series.values), max(compared[location].values)
            if abs(highest - expected) > MAX_SHARE_REPEATED * abs(expected):
                yield line, index, f"{highest:.6g} at most, {expected:.6g} on one process", True


def _series_of(
    recording: Recording | None, with_settings: bool = False
) -> dict[shown.Place, shown.Series]:
    """Return the numbers that the first rank of a run shows."""
    assert recording is not None
    return shown.read_series(recording.ranks[0], with_settings)


def _is_of_time(series: shown.Series, fast: shown.Series) -> bool:
    """Return whether a number grows with the rate of the clock, which is faster in one run."""
    low, high = sorted((abs(series.mean), abs(fast.mean)))
    return high > MIN_TIME_RATIO * low


def compare_samples(proof: RungProof, runs: FrozenRuns, where: str) -> None:
    if not trains_one_data_set(runs):
        again = runs.shuffled and replace(runs, compared=runs.shuffled)
        of = "process has other data: sort a set of texts before its order is used"
        if again and not trains_one_data_set(again):
            of = "run has other data: draw them with a seed"
        proof.broken.append(f"samples {where}: each {of}")
    for what, read in (("training", training_samples), ("evaluation", _evaluation_samples)):
        reference, compared = read(runs.reference), read(runs.compared)
        moved = compared.share_moved(reference)
        if moved is None or not reference.counts or compared.counts is None:
            continue
        by_chance = (runs.shuffled and read(runs.shuffled).share_moved(reference)) or 0.0
        if what == "evaluation" and moved:
            continue  # judged by the shown numbers: not shared before its rung
        expected, total = reference.counts.total(), compared.counts.total()
        if abs(total - expected) > MAX_SHARE_REPEATED * expected:
            proof.broken.append(f"samples of {what} {where}: {total} are read, {expected} on one")
        elif moved > MAX_SHARE_REPEATED + CHANCE_FACTOR * by_chance:
            proof.broken.append(f"samples of {what} {where}: {100 * moved:.0f} % other ones")
        else:
            count = format_count(len(reference.counts), "sample")
            proof.holds.append(f"samples {where}: {count} of {what}, as often as before")


def _compare_calls(proof: RungProof, runs: FrozenRuns, where: str) -> None:
    """Judge how many rows a model gets for a step: what is shared is not to be shared again."""
    on_each = _rows_of_calls(runs.compared)
    for location, count in _rows_of_calls(runs.reference).items():
        if on_each.get(location, count) * len(runs.compared.ranks) * CHANCE_FACTOR < count:
            proof.shared_twice.add(location)
            proof.broken.append(f"line {location.line} {where}: the model gets shares of shares")


def _compare_values_of_sums(proof: RungProof, runs: FrozenRuns, where: str) -> None:
    """Judge how many values are added up for a step: of a share there are fewer than of a batch.

    A script that gives outputs the shape of a whole batch makes rows of parts of samples.
    """
    sizes = {*_rows_of_calls(runs.reference).values()}
    compared = _values_of_sums(runs.compared)
    for location, count in _values_of_sums(runs.reference) & compared:
        if count in sizes:
            proof.broken.append(
                f"line {location.line} {where}: a sum is over {count} rows, as that of a whole"
                " batch: divide the size that makes them"
            )


def _values_of_sums(recording: Recording) -> set[tuple[Location, int]]:
    """Return the lines that make a number of outputs for a step, and of how many values.

    Of batches that a script cuts, each process may keep a part whole, as of a GAN's two.
    """
    passes = (item for item in recording.ranks[0].passes if item.is_training)
    events = chain.from_iterable(item.select(Statistic) for item in passes)
    return {(Location(e.at.file, e.at.line), e.count) for e in events if e.at and e.grad}


def _rows_of_calls(recording: Recording) -> dict[Location, int]:
    """Return the largest number of rows that a model gets for a step, by the line of the call."""
    events = sorted(recording.ranks[0].select(RowNames), key=lambda event: event.count)
    return {Location(event.at.file, event.at.line): event.count for event in events if event.at}


def _evaluation_samples(run: Recording) -> SamplesRead:
    return SamplesRead.read(p for log in run.ranks for p in passes_without_training(log))


def _events_but_files(log: RankLog) -> Iterator[ProbeEvent]:
    """Yield the events without text that goes to files, which is not judged."""
    return (event for event in log.events if not isinstance(event, WrittenText))


def _with_original_lines(
    recording: Recording, files: Mapping[str, EditedText] = MappingProxyType({})
) -> Recording:
    """Return a recording with the lines of the script as it was."""
    facts = ScriptFacts(recording)

    def original(line: CodeLine | None) -> CodeLine | None:
        if line is None:
            return None
        location = facts.location(line)
        if location.file not in files:
            return line
        number = files[location.file].original_lines[location.line - 1]
        return None if number is None else CodeLine(line.file, number, line.function)

    def moved(log: RankLog) -> RankLog:
        events = []
        for event in _events_but_files(log):
            if isinstance(event, Print):
                event = replace(event, at=named(facts, original(event.at)), caller=None)
            elif isinstance(
                event, BeforeStep | RowNames | Statistic | Save | FileWrite | FileAppend
            ):
                event = replace(event, at=original(event.at))
            events.append(event)
        return replace(log, events=events, worker_events=log.worker_events)

    return replace(recording, ranks=[moved(log) for log in recording.ranks])


def named(facts: ScriptFacts, line: CodeLine | None) -> CodeLine | None:
    """Return a line by the path of its file in the folder, which is the same in each copy."""
    if line is None:
        return None
    location: Location = facts.location(line)
    return CodeLine(location.file, location.line)

"""Compare the reruns of two runs: whether each repeats its records, and what differs first."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from stepladder.storage.metrics_file import read_step_lines
from stepladder.storage.run_files import find_snapshots
from stepladder.tools.diff import step_events
from stepladder.tools.diff.record_comparison import (
    KIND_OF_ENVIRONMENT,
    DifferingValue,
    RecordComparison,
    compare_tensors,
)
from stepladder.tools.diff.recorded_run import RecordedRun, pair_by_step
from stepladder.tools.diff.rerun import Rerun, StepRange, find_start, rerun_steps
from stepladder.tools.diff.step_events import Event, EventPair, find_first_difference
from stepladder.tools.diff.verdict import Cause, DiffVerdict, explain_without_rerun

MAX_RECORDED_STEPS = 8  # a rerun trains the steps before these without recording them
# Stands for an event that one of the runs does not have.
NO_EVENT = Event(step=0, microbatch=0, kind="", name="", digest="nothing", description="nothing")
NOT_REPEATABLE = "not repeatable"
WRONG_RESULT = "wrong result"
NOT_REPRODUCED = "not reproduced"
TEXTS = {
    step_events.INITIAL_WEIGHTS: "before the first step {name} differs",
    step_events.WEIGHTS: "before the step {name} differs",
    step_events.DATA: "{name}{where} holds other numbers",
    step_events.RANDOMNESS: "{name}{where} has another state, and all before it is equal",
    step_events.OPERATION: "{name}{where} differs, and all before it is equal",
    step_events.LOSS: "{name}{where} differs, and the output of every module is equal",
    step_events.GRADIENT_KIND: "the gradient of {name}{where} differs, and the loss is equal",
    step_events.LEARNING_RATE: "{name} differs",
    step_events.OPTIMIZER: "{name} differs, and all before it is equal",
}


class RerunComparison:
    """Reruns each of two runs once, and a second time if it does not repeat its own records.

    Args:
        records: The compared records, which do not explain the divergence.
        verdict: The verdict of the records, with the step but without a cause.
        folder: The folder for the run directories of the reruns.
    """

    def __init__(self, records: RecordComparison, verdict: DiffVerdict, folder: Path) -> None:
        self.records = records
        self.verdict = replace(verdict, was_rerun=True)
        self.folder = folder
        self.num_reruns = 0

    def find_cause(self) -> DiffVerdict:
        assert self.verdict.step is not None
        # The step is 0 if the initial weights differ, which the first step shows.
        steps, reruns = self._rerun_both(max(self.verdict.step, 1))
        # By run that does not repeat its own records: the first step that it does not repeat.
        unrepeated: dict[RecordedRun, int] = {}
        for run, rerun in zip(self.records.runs, reruns, strict=True):
            step = self._find_unrepeated_step(run, rerun, steps.last)
            if step is None:
                continue
            unrepeated[run] = step
            second_rerun = self._rerun(run, rerun.start, steps)
            difference = find_first_difference(rerun.events, second_rerun.events)
            if difference is not None:
                return self._blame_nondeterminism(run, difference)
        difference = find_first_difference(reruns[0].events, reruns[1].events)
        if difference is not None:
            return self._blame_event(difference, list(unrepeated))
        step = min(unrepeated.values(), default=steps.last)
        return self._explain_equal_reruns(replace(self.verdict, step=step), list(unrepeated))

    def _explain_equal_reruns(
        self, verdict: DiffVerdict, unrepeated: list[RecordedRun]
    ) -> DiffVerdict:
        """Explain why the records differ although both reruns have the same bits."""
        by_records = explain_without_rerun(self.records, verdict)
        if not unrepeated or by_records.cause.kind in KIND_OF_ENVIRONMENT.values():
            return by_records
        if len(unrepeated) == 2:
            reason = (
                "neither run repeats its own records, and both reruns have the same bits: the job"
                " file, the data or the machine was changed since, or the runs depend on the"
                " number of processes"
            )
            return verdict.with_cause(Cause(NOT_REPRODUCED, "both runs"), reason)
        run_dir = str(unrepeated[0].run_dir)
        reason = (
            f"{run_dir} does not repeat its own step {verdict.step}, and the other run does:"
            " its memory or arithmetic went wrong there, or its job file, data or machine was"
            " changed since"
        )
        return verdict.with_cause(Cause(WRONG_RESULT, run_dir, run_dir), reason)

    def _rerun_both(self, last: int) -> tuple[StepRange, list[Rerun]]:
        """Rerun both runs up to a step, or up to an earlier one if they differ before it.

        If the weights differ already before the recorded steps, the steps before these are rerun.
        """
        while True:
            starts = [find_start(run, last) for run in self.records.runs]
            steps = StepRange(max(max(starts), last - MAX_RECORDED_STEPS) + 1, last)
            reruns = [
                self._rerun(run, start, steps)
                for run, start in zip(self.records.runs, starts, strict=True)
            ]
            difference = find_first_difference(reruns[0].events, reruns[1].events)
            if steps.first == 1 or difference is None or not _has_other_weights(difference):
                return steps, reruns
            last = steps.first - 1

    def _rerun(self, run: RecordedRun, start: int, steps: StepRange) -> Rerun:
        self.num_reruns += 1
        return rerun_steps(run, start, steps, self.folder / f"training-{self.num_reruns}")

    def _find_unrepeated_step(self, run: RecordedRun, rerun: Rerun, last: int) -> int | None:
        """Return the first step whose result in the rerun differs from the run's own records."""
        lines = pair_by_step(run.step_lines(), read_step_lines(rerun.folder))
        for recorded, repeated in lines:
            if not math.isclose(recorded["loss"], repeated["loss"], rel_tol=run.tolerance):
                return int(recorded["step"])
        recorded_snapshot = find_snapshots(run.run_dir).get(last)
        rerun_snapshot = find_snapshots(rerun.folder).get(last)
        if recorded_snapshot is None or rerun_snapshot is None:
            return None
        paths = (recorded_snapshot, rerun_snapshot)
        if compare_tensors(last, paths, run.tolerance, run.problems).values:
            return last
        return None

    def _blame_event(self, difference: EventPair, unrepeated: list[RecordedRun]) -> DiffVerdict:
        event = _get_event(difference)
        reason = self._describe(difference)
        if unrepeated:
            run_dirs = " and ".join(str(run.run_dir) for run in unrepeated)
            reason += f" (trained again; {run_dirs} had other losses)"
        verdict = self._add_event(difference)
        return verdict.with_cause(Cause(event.kind, event.name), reason)

    def _blame_nondeterminism(self, run: RecordedRun, difference: EventPair) -> DiffVerdict:
        run_dir = str(run.run_dir)
        cause = Cause(NOT_REPEATABLE, _get_event(difference).name, run_dir)
        reason = (
            f"{run_dir} gives another result each time it is trained:"
            f" {self._describe(difference)}; a non-deterministic operation, or a random"
            " number without a seed"
        )
        return self._add_event(difference).with_cause(cause, reason)

    def _describe(self, difference: EventPair) -> str:
        """Describe an event, and say where the records differ if that is at another step."""
        text = _describe_difference(difference)
        if _get_event(difference).step != self.verdict.step:
            text += f"; the records differ from step {self.verdict.step} on"
        return text

    def _add_event(self, difference: EventPair) -> DiffVerdict:
        """Return the verdict with the step of an event and a table row for it."""
        values = [*self.verdict.values, _make_value(difference)]
        return replace(self.verdict, step=_get_event(difference).step, values=values)


def _has_other_weights(difference: EventPair) -> bool:
    return any(event is not None and event.kind == step_events.WEIGHTS for event in difference)


def _get_event(difference: EventPair) -> Event:
    """Return the first run's event, or the second run's if the first has none."""
    event = difference[0] or difference[1]
    assert event is not None
    return event


def _describe_difference(difference: EventPair) -> str:
    event = _get_event(difference)
    text = TEXTS[event.kind].format(name=event.name, where=_describe_microbatch(event))
    first, second = (event or NO_EVENT for event in difference)
    if first.description != second.description:
        text += f": {first.description} in the first run, {second.description} in the second"
    elif first.description:
        text += f" ({first.description})"
    return text


def _make_value(difference: EventPair) -> DifferingValue:
    """Return the table row of an event, with the digests if the descriptions are equal."""
    event = _get_event(difference)
    name = f"{event.name}{_describe_microbatch(event)}, step {event.step}"
    first, second = (event or NO_EVENT for event in difference)
    if first.description != second.description:
        return DifferingValue(name, first.description, second.description)
    return DifferingValue(name, first.digest, second.digest)


def _describe_microbatch(event: Event) -> str:
    return f" in microbatch {event.microbatch}" if event.microbatch else ""

"""The verdict on two runs, one sentence and one table, and how their records explain it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from rich.markup import escape
from rich.table import Table

from stepladder.core.console import make_printable
from stepladder.core.errors import to_one_line
from stepladder.tools.diff.record_comparison import (
    KIND_OF_ENVIRONMENT,
    KIND_OF_SETTING,
    MAX_TENSORS_SHOWN,
    WHO_COMPUTES,
    DifferingValue,
    RecordComparison,
)
from stepladder.tools.diff.recorded_run import LOSS_TOLERANCE


@dataclass(frozen=True)
class Cause:
    """The reason why two runs diverge."""

    kind: str | None
    name: str | None  # of the setting, tensor or operation that differs
    run: str | None = None  # the run that went wrong, if that is known


UNKNOWN_CAUSE = Cause(None, None)
OTHER_CODE = Cause("code", "job file")
OTHER_JOB_FILES = "the two runs had different job files"


@dataclass(frozen=True)
class DiffVerdict:
    """The verdict on two runs."""

    sentence: str
    step: int | None  # the first that differs; None if all are equal
    cause: Cause
    compared_steps: int
    is_exact: bool
    was_rerun: bool  # whether both runs were trained again to find the cause
    values: list[DifferingValue]

    @property
    def is_explained(self) -> bool:
        """Whether the runs are equal, or the cause of their divergence is known."""
        return self.step is None or self.cause != UNKNOWN_CAUSE

    def to_json(self) -> dict[str, Any]:
        records = [
            {name: to_json_value(field) for name, field in asdict(value).items()}
            for value in self.values
        ]
        return {
            "schema": 1,
            "equal": self.step is None,
            "sentence": self.sentence,
            "step": self.step,
            "kind": self.cause.kind,
            "what": self.cause.name,
            "run": self.cause.run,
            "steps": self.compared_steps,
            "exact": self.is_exact,
            "trained_again": self.was_rerun,
            "records": records,
        }

    def with_cause(self, cause: Cause, reason: str) -> DiffVerdict:
        """Return this verdict with a cause, and a sentence that gives the reason.

        Only runs that were trained again show the step that is the cause. Records may be equal
        after it: a wrong update shows in the loss of the next step.
        """
        fact = f"the records differ from step {self.step} on"
        if self.was_rerun:
            fact = f"the runs diverge at step {self.step}"
        sentence = f"{fact} ({cause.kind}): {reason}"
        return replace(self, cause=cause, sentence=" ".join(sentence.split()))


def make_table(verdict: DiffVerdict) -> Table:
    """Return a table with a row for each value that differs."""
    table = Table(box=None, pad_edge=False)
    for title in ("what", "first", "second"):
        table.add_column(title, overflow="fold")
    for value in verdict.values:
        cells = (value.name, value.first, value.second)
        table.add_row(*(escape(make_printable(shorten(cell))) for cell in cells))
    return table


def shorten(value: Any) -> str:
    """Return a value as one line in which each SHA-256 is cut to 16 digits."""
    return re.sub(r"\b[0-9a-f]{64}\b", lambda match: match[0][:16], to_one_line(str(value)))


def explain_by_records(records: RecordComparison) -> DiffVerdict:
    """Return a verdict, whose cause is unknown if the records do not give it."""
    verdict = DiffVerdict(
        sentence="",
        step=None,
        cause=UNKNOWN_CAUSE,
        compared_steps=records.common_steps,
        is_exact=records.is_exact,
        was_rerun=False,
        values=records.values,
    )
    divergence = records.divergence
    if divergence is None:
        return replace(verdict, sentence=_describe_equality(records))
    verdict = replace(verdict, step=divergence.step)
    if records.settings:
        names = _join_names(records.settings)
        has_equal_settings = all(value.name in WHO_COMPUTES for value in records.settings)
        if has_equal_settings and records.has_other_code:
            return verdict.with_cause(OTHER_CODE, f"{OTHER_JOB_FILES}; also different: {names}")
        cause = Cause(_kind_of_settings(records), names)
        return verdict.with_cause(cause, _describe_values(records.settings))
    if divergence.kind in ("sample order", "learning rate"):
        cause = Cause(divergence.kind, divergence.name)
        return verdict.with_cause(cause, _describe_value(divergence.values[-1]))
    return verdict


def _kind_of_settings(records: RecordComparison) -> str:
    """Return the kind of cause that the first setting that differs stands for."""
    name = records.settings[0].name
    if name == "processes":
        return name
    kind = KIND_OF_SETTING.get(name, "setting")
    # Another version of torch may name the same processor in another way.
    have_other_versions = any(
        KIND_OF_ENVIRONMENT.get(value.name) == "versions" for value in records.environment
    )
    return "versions" if kind == "processor" and have_other_versions else kind


def explain_without_rerun(records: RecordComparison, verdict: DiffVerdict) -> DiffVerdict:
    """Return the verdict with the likeliest cause that the records give."""
    if records.has_other_code:
        return verdict.with_cause(OTHER_CODE, OTHER_JOB_FILES)
    values = [value for value in records.environment if value.name in KIND_OF_ENVIRONMENT]
    if values:
        cause = Cause(KIND_OF_ENVIRONMENT[values[0].name], _join_names(values))
        return verdict.with_cause(cause, _describe_values(values))
    divergence = records.divergence
    assert divergence is not None
    cause = Cause(divergence.kind, divergence.name)
    return verdict.with_cause(
        cause, f"{_describe_value(divergence.values[0])}, and no record says why"
    )


def _describe_equality(records: RecordComparison) -> str:
    count = records.common_steps
    steps = f"{count} common step" if count == 1 else f"{count} common steps"
    precision = f"losses within {LOSS_TOLERANCE:g}"
    if records.is_exact:
        precision = "every bit of what both recorded"
    sentence = f"the runs are equal: {precision} in {steps}"
    if records.settings:
        sentence += f"; their settings differ in {_join_names(records.settings)}"
    if records.of_zero_gradient:
        names = list(records.of_zero_gradient)
        num_more = len(names) - MAX_TENSORS_SHOWN
        more = f" and {num_more} more" if num_more > 0 else ""
        sentence += (
            f"; not compared: {', '.join(names[:MAX_TENSORS_SHOWN])}{more}, whose gradient is zero"
            " but for rounding, such as a bias before batch norm"
        )
    return sentence


def _describe_values(values: list[DifferingValue]) -> str:
    """Describe the first value that differs, and name the remaining ones."""
    text = _describe_value(values[0])
    if len(values) > 1:
        text += f"; also different: {_join_names(values[1:])}"
    return text


def _describe_value(value: DifferingValue) -> str:
    first = to_one_line(str(value.first))
    second = to_one_line(str(value.second))
    return f"{value.name} is {first} in the first run and {second} in the second"


def _join_names(values: list[DifferingValue]) -> str:
    return ", ".join(value.name for value in values)


def to_json_value(value: Any) -> Any:
    """Return an integer, a finite number or None as it is, and all else as text."""
    is_finite = isinstance(value, int) or (isinstance(value, float) and isfinite(value))
    return value if is_finite or value is None else to_one_line(str(value))

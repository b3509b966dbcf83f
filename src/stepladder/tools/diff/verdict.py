"""What is said of two runs: one sentence and one table, here from their records alone."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from rich.markup import escape
from rich.table import Table

from stepladder.core.console import make_printable
from stepladder.core.errors import to_one_line
from stepladder.tools.diff.records import CODE, ENVIRONMENT, SETTINGS, TOLERANCE, Records, Unlike


@dataclass(frozen=True)
class Answer:
    """What is said of two runs.

    step: the first that differs, None where all are equal.  steps: how many were compared.  kind,
    what: the cause. run: the one that went wrong, where it is known.  trained_again: whether both
    were, to find the cause."""

    sentence: str
    step: int | None
    kind: str | None
    what: str | None
    run: str | None
    steps: int
    exact: bool
    trained_again: bool
    records: list[Unlike]

    def as_json(self) -> dict[str, Any]:
        rows = [{name: plain(value) for name, value in asdict(row).items()} for row in self.records]
        return {"schema": 1, "equal": self.step is None, **asdict(self), "records": rows}


def table_of(found: Answer) -> Table:
    """A row per record that differs."""
    table = Table(box=None, pad_edge=False)
    for name in ("what", "first", "second"):
        table.add_column(name, overflow="fold")
    for row in found.records:
        table.add_row(*(escape(make_printable(short(value))) for value in asdict(row).values()))
    return table


def short(value: Any) -> str:
    """In one line; of a hash its beginning."""
    return re.sub(r"\b[0-9a-f]{64}\b", lambda found: found[0][:16], to_one_line(str(value)))


def by_records(records: Records) -> Answer:
    """`kind` is empty where they do not say why."""
    parting, told = records.parting, precision(records)
    steps = f"{records.common} common step{'s' * (records.common != 1)}"
    bare = Answer("", None, None, None, None, records.common, records.exact, False, records.rows)
    if parting is None:
        spoken = f"; their settings differ in {names(records.settings)}" if records.settings else ""
        return replace(bare, sentence=f"the runs are equal: {told} in {steps}{spoken}")
    found = replace(bare, step=parting.step, kind="", what=parting.what)
    if records.settings:
        row = records.settings[0]
        kind = SETTINGS.get(row.name, "processes" if row.name == "processes" else "setting")
        if kind == "processor" and any(
            ENVIRONMENT.get(row.name) == "versions" for row in records.environment
        ):
            kind = "versions"
        return said(
            found, kind, names(records.settings), f"{values(row)}{others(records.settings)}"
        )
    if parting.kind in ("sample order", "learning rate"):
        return said(found, parting.kind, parting.what, values(parting.records[-1]))
    return found


def without_training(records: Records, found: Answer) -> Answer:
    """The likeliest cause that the records know."""
    for row in records.environment:
        if row.name == CODE:
            return said(found, "code", "job file", "the two runs had different job files")
    if rows := [row for row in records.environment if row.name in ENVIRONMENT]:
        return said(found, ENVIRONMENT[rows[0].name], names(rows), values(rows[0]) + others(rows))
    assert records.parting is not None
    why = f"{values(records.parting.records[0])}, and no record says why"
    return said(found, records.parting.kind, records.parting.what, why)


def said(found: Answer, kind: str, what: str, why: str, run: str | None = None) -> Answer:
    sentence = f"the runs part at step {found.step} ({kind}): {why}"
    return replace(found, kind=kind, what=what, run=run, sentence=" ".join(sentence.split()))


def precision(records: Records) -> str:
    return "every bit of what both recorded" if records.exact else f"losses within {TOLERANCE:g}"


def plain(value: Any) -> Any:
    """As JSON has it: not every number is one there."""
    is_number = isinstance(value, int) or (isinstance(value, float) and isfinite(value))
    return value if is_number or value is None else to_one_line(str(value))


def values(row: Unlike) -> str:
    first, second = (to_one_line(str(value)) for value in (row.first, row.second))
    return f"{row.name} is {first} in the first run and {second} in the second"


def names(rows: list[Unlike]) -> str:
    return ", ".join(row.name for row in rows)


def others(rows: list[Unlike]) -> str:
    return f"; also different: {names(rows[1:])}" if rows[1:] else ""

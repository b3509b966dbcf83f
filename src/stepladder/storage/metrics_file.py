"""metrics.jsonl: one line per step and per evaluation, and how it is cut back on a resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from stepladder.core import durable
from stepladder.core.errors import name_file_in_errors
from stepladder.core.jsonl import (
    BLOCK_BYTES,
    JsonlReader,
    Line,
    is_count,
    is_finite_number,
    make_damage_error,
    parse_line,
    parse_lines,
    read_last_lines,
)
from stepladder.core.safe_open import open_without_links
from stepladder.storage.run_files import METRICS_FILE

LINES_PER_PARSE = 1000


def is_metrics_line(line: Line) -> bool:
    """Return whether the line has the values of a step or of an evaluation."""
    if not is_count(line.get("step")):
        return False
    if "lr" not in line:
        return True
    return is_finite_number(line["lr"]) and is_finite_number(line.get("loss"))


def read_step_lines(run_dir: Path, problems: list[str] | None = None) -> Iterator[Line]:
    """Yield the line of each step in metrics.jsonl; a damaged line is an InputError.

    Args:
        run_dir: The run directory.
        problems: Gets a sentence if the last line is half a line.
    """
    reader = JsonlReader(run_dir / METRICS_FILE, is_metrics_line, is_strict=True)
    yield from (line for line in reader.read_new() if "lr" in line)
    if problems is not None:
        problems.extend(reader.describe_damage())


def read_last_step(run_dir: Path) -> int:
    """Return the step of the last valid line of metrics.jsonl, 0 if there is none."""
    lines = reversed(read_last_lines(run_dir / METRICS_FILE))
    return next((line["step"] for line in lines if is_count(line.get("step"))), 0)


def truncate_metrics(
    run_dir: Path, step: int, steps_per_epoch: int, validate_ownership: Callable[[], None]
) -> None:
    """Remove the lines after `step` and a torn end, by rewriting the whole file.

    Evaluations in the middle of an epoch are removed too: they were made because the run stopped
    there, and a run that is not interrupted does not have them.

    Args:
        run_dir: The run directory.
        step: The step from which the run continues.
        steps_per_epoch: Optimizer steps in an epoch.
        validate_ownership: Called before the new file replaces the old one; it raises if another
            run has taken over the directory.

    Raises:
        InputError: A line that cannot be read has one after it that is to remain.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return
    with (
        name_file_in_errors(path),
        path.open(errors="replace", encoding="utf-8") as file,
        durable.replace_file(path) as temporary,
        os.fdopen(open_without_links(temporary, os.O_WRONLY), "w", encoding="utf-8") as new,
    ):
        new.writelines(_select_lines(path, file, step, steps_per_epoch))
        new.flush()
        validate_ownership()


def truncate_recent_metrics(
    run_dir: Path, step: int, steps_per_epoch: int, validate_ownership: Callable[[], None]
) -> None:
    """Remove the same lines as `truncate_metrics`, but read only the end of the file.

    For an in-place recovery, which must take as long after a million steps as after ten. The lines
    to be removed are all at the end: this run truncated the file when it started, and nobody else
    has appended to it.

    Args:
        run_dir: The run directory.
        step: The step from which the run continues.
        steps_per_epoch: Optimizer steps in an epoch.
        validate_ownership: Called before the file is cut; it raises if another run has taken over
            the directory.
    """
    path = run_dir / METRICS_FILE
    with (
        suppress(FileNotFoundError),
        name_file_in_errors(path),
        os.fdopen(open_without_links(path, os.O_RDWR), "rb+") as file,
    ):
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - BLOCK_BYTES))
        for text in reversed(file.read().splitlines(keepends=True)):
            line = parse_line(text.decode(errors="replace"))
            is_valid = isinstance(line, dict) and is_metrics_line(line) and text.endswith(b"\n")
            if is_valid and line["step"] <= step and _is_permanent_line(line, steps_per_epoch):
                break
            end -= len(text)
        validate_ownership()
        file.truncate(end)


def _select_lines(
    path: Path, file: Iterable[str], step: int, steps_per_epoch: int
) -> Iterator[str]:
    """Yield the lines of metrics.jsonl that remain when a run continues from `step`.

    Damaged lines at the end are left out.

    Raises:
        make_damage_error: A damaged line has a line after it that remains.
    """
    first_damaged = 0
    lines = iter(file)
    number = 0
    while texts := list(islice(lines, LINES_PER_PARSE)):
        for text, line in zip(texts, parse_lines(texts), strict=True):
            number += 1
            if not (text.endswith("\n") and isinstance(line, dict) and is_metrics_line(line)):
                first_damaged = first_damaged or number
                continue
            if line["step"] > step:
                return
            if first_damaged:
                raise make_damage_error(path, first_damaged)
            if _is_permanent_line(line, steps_per_epoch):
                yield text


def _is_permanent_line(line: Line, steps_per_epoch: int) -> bool:
    """Return whether a line is of a training step, or of an evaluation at the end of an epoch."""
    return "lr" in line or line["step"] % steps_per_epoch == 0

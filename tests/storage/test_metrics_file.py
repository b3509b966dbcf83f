"""metrics.jsonl is cut back to what a run that is not interrupted would have at that step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stepladder import InputError
from stepladder.core.jsonl import BLOCK_BYTES
from stepladder.storage.metrics_file import (
    LINES_PER_PARSE,
    read_last_step,
    read_step_lines,
    truncate_metrics,
    truncate_recent_metrics,
)
from stepladder.storage.run_files import METRICS_FILE

PER_EPOCH = 4
Truncate = Callable[[Path, int, int, Callable[[], None]], None]
both_ways = pytest.mark.parametrize("truncate", [truncate_metrics, truncate_recent_metrics])


def trained(step: int) -> str:
    return json.dumps({"step": step, "loss": 0.5, "lr": 0.1}) + "\n"


def evaluated(step: int) -> str:
    return json.dumps({"step": step, "accuracy": 0.5}) + "\n"


LINES = [*map(trained, range(1, 5)), evaluated(4), trained(5), trained(6), evaluated(6), trained(7)]


def write(folder: Path, *lines: str) -> Path:
    path = folder / METRICS_FILE
    path.write_text("".join(lines))
    return path


def nothing() -> None:
    pass


@both_ways
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, []),
        (3, LINES[:3]),
        (4, LINES[:5]),
        (6, LINES[:7]),  # the evaluation was made because the run stopped there
        (7, [*LINES[:7], LINES[8]]),
    ],
)
def test_lines_after_the_step_go(
    truncate: Truncate, step: int, expected: list[str], tmp_path: Path
) -> None:
    if truncate is truncate_recent_metrics and step == 7:
        expected = LINES  # a line in the middle was removed when the run started
    path = write(tmp_path, *LINES)
    truncate(tmp_path, step, PER_EPOCH, nothing)
    assert path.read_text() == "".join(expected)


@both_ways
@pytest.mark.parametrize("end", ['{"step": 8, "lr', trained(8).strip(), "[8]\n", '{"step": "8"}\n'])
def test_an_end_that_is_no_line_goes(truncate: Truncate, end: str, tmp_path: Path) -> None:
    path = write(tmp_path, *LINES[:5], end)
    truncate(tmp_path, 8, PER_EPOCH, nothing)
    assert path.read_text() == "".join(LINES[:5])


@pytest.mark.parametrize("damaged", ['{"step": 3, "loss": 0.5, "lr": tensor(0.1)}\n', "\0\n"])
def test_a_damaged_line_before_lines_that_remain_is_an_error_and_nothing_is_cut(
    damaged: str, tmp_path: Path
) -> None:
    path = write(tmp_path, *LINES[:2], damaged, *LINES[3:])
    before = path.read_bytes()
    with pytest.raises(InputError, match=rf"^line 3 of {path} is damaged.* HINT: sed -n 3p {path}"):
        truncate_metrics(tmp_path, 6, PER_EPOCH, nothing)
    with pytest.raises(InputError, match=f"^line 3 of {path} is damaged"):
        list(read_step_lines(tmp_path))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [METRICS_FILE]
    truncate_metrics(tmp_path, 2, PER_EPOCH, nothing)  # then the damaged line goes as well
    assert path.read_text() == "".join(LINES[:2])


@both_ways
def test_a_long_file_loses_its_end_alone(truncate: Truncate, tmp_path: Path) -> None:
    steps = range(1, max(LINES_PER_PARSE, BLOCK_BYTES // len(trained(1))) * 2)
    path = write(tmp_path, *map(trained, steps))
    truncate(tmp_path, steps[-3], PER_EPOCH, nothing)
    assert path.read_text() == "".join(map(trained, steps[:-2]))


@both_ways
def test_a_run_that_has_lost_the_directory_changes_nothing(
    truncate: Truncate, tmp_path: Path
) -> None:
    def refuse() -> None:
        raise RuntimeError("another run has taken over")

    path = write(tmp_path, *LINES)
    with pytest.raises(RuntimeError):
        truncate(tmp_path, 3, PER_EPOCH, refuse)
    assert path.read_text() == "".join(LINES)
    assert [entry.name for entry in tmp_path.iterdir()] == [METRICS_FILE]


@both_ways
def test_without_a_file_there_is_nothing_to_cut(truncate: Truncate, tmp_path: Path) -> None:
    truncate(tmp_path, 3, PER_EPOCH, nothing)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lines", "step"),
    [
        ([], 0),
        (["no line\n", "[1]\n", '{"step": -1}\n', '{"step": null}\n'], 0),
        (LINES, 7),
        ([*LINES, '{"step": 8, "lo'], 7),
        ([*LINES, "[8]\n", "\n"], 7),
        ([*map(trained, range(1, 9)), "x" * (BLOCK_BYTES - 200), "\n"], 8),
    ],
)
def test_the_last_step_is_that_of_the_last_valid_line(
    lines: list[str], step: int, tmp_path: Path
) -> None:
    write(tmp_path, *lines)
    assert read_last_step(tmp_path) == step


def test_without_a_file_the_last_step_is_0(tmp_path: Path) -> None:
    assert read_last_step(tmp_path) == 0

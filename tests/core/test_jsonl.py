"""Files of JSON lines: half a line, as a kill leaves it, is neither read nor written on."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from stepladder.core.errors import InputError
from stepladder.core.jsonl import (
    BLOCK_BYTES,
    JsonlReader,
    append_record,
    format_line,
    is_count,
    is_finite_number,
    read_last_lines,
)


def test_a_line_goes_on_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_record(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "los')
    append_record(path, {"step": 3})
    lines = JsonlReader(path)
    assert list(lines.read_new()) == [{"step": 1}, {"step": 3}]
    assert list(lines.describe_damage()) == [f"line 2 of {path} is damaged, and left out"]


def test_a_line_has_plain_numbers_and_null_for_those_that_json_does_not_have() -> None:
    values = [1, 0.1, torch.tensor(0.5), np.float64(0.25), np.int64(3), math.nan, np.inf, "text"]
    line = format_line({str(number): value for number, value in enumerate(values)})
    assert line.endswith("}\n")
    parsed = json.loads(line, parse_constant=pytest.fail)
    assert list(parsed.values()) == [1, 0.1, 0.5, 0.25, 3, None, None, "text"]
    for value in ({1, 2}, object()):
        with pytest.raises(TypeError):
            format_line({"value": value})
    with pytest.raises(ValueError, match="JSON"):
        format_line({"value": [math.nan]})


def test_half_a_last_line_is_left_out_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"st')
    lines = JsonlReader(path)
    assert list(lines.read_new()) == [{"step": 1}]
    assert list(lines.describe_damage()) == [
        f"the last line of {path} is half a line, and left out"
    ]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert list(lines.read_new()) == [{"step": 2}] and not list(lines.describe_damage())
    assert list(lines.read_new()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "\0" * 40,
        "\udc80",
        '{"step": 1}, {"step": 2}',
        "[" * 100_000,
        "9" * 5000,
        '{"step": "1", "loss": 1}',
        '{"step": -1, "loss": 1}',
        '{"step": 1.5, "loss": 1}',
        '{"step": true, "loss": 1}',
        '{"step": 99999999999999999999, "loss": 1}',
        '{"step": 1}',
        '{"step": 1, "loss": NaN}',
        '{"step": 1, "loss": 1e999}',
        '{"step": 1, "loss": [1]}',
        f'{{"step": 1, "loss": {"9" * 400}}}',
    ],
)
def test_a_line_that_is_not_as_it_was_written_is_left_out(text: str, tmp_path: Path) -> None:
    sound = '{"step": 5, "loss": 0.5}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(f"{sound}{text}\n{sound}".encode(errors="surrogateescape"))
    lines = JsonlReader(
        path, lambda line: is_count(line.get("step")) and is_finite_number(line.get("loss"))
    )
    assert [line["step"] for line in lines.read_new()] == [5, 5]
    assert (lines.damaged_lines, lines.first_damaged) == (1, 2)


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = JsonlReader(path)
    assert not list(lines.read_new()) and not lines.restart_if_replaced()
    for step in range(3):
        append_record(path, {"step": step})
    assert len(list(lines.read_new())) == 3 and not lines.restart_if_replaced()
    os.truncate(path, 12)
    assert lines.restart_if_replaced() and list(lines.read_new()) == [{"step": 0}]
    (tmp_path / "b").write_text('{"step": 7}\n{"step": 8}\n')
    (tmp_path / "b").replace(path)
    assert lines.restart_if_replaced() and [line["step"] for line in lines.read_new()] == [7, 8]


def test_lines_of_several_blocks_are_all_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = "x" * 1000
    path.write_text("".join(f'{{"step": {step}, "text": "{text}"}}\n' for step in range(3000)))
    assert path.stat().st_size > 2 * BLOCK_BYTES
    lines = JsonlReader(path)
    assert [line["step"] for line in lines.read_new()] == list(range(3000))


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "sparse"])
def test_what_is_no_file_of_lines_is_one_line_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=f"{path} cannot be read"):
        list(JsonlReader(path).read_new())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_the_last_lines_of_a_large_file_are_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 1}\n{"step": 2}\n{"st')
    assert read_last_lines(path) == [{"step": 1}, {"step": 2}]

"""Text that the script writes to a file: recorded by line, and stored as without the probe."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from stepladder.tools.check.events import WrittenText
from stepladder.tools.check.probe import hooks_shown, probe_log
from stepladder.tools.check.probe.patching import WrappedCall
from stepladder.tools.check.probe.probe_log import ProbeLog
from stepladder.tools.check.probe_settings import ProbeSettings
from stepladder.tools.check.relations.shown import SHOWN_NUMBER
from stepladder.tools.probe.events import CodeLine

WRITERS: dict[str, tuple[Callable[[TextIO], Any], list[str]]] = {
    "text": (lambda file: [file.write(f"{n} {n / 4}\n") for n in range(2)], ["0 0.0", "1 0.25"]),
    "rows": (lambda file: csv.writer(file).writerows([[1, 0.5], [2, 0.25]]), ["1 0.5", "2 0.25"]),
    "a dict": (lambda file: json.dump({"loss": [0.5, 0.25]}, file, indent=2), ["0.5 0.25"]),
    "printed": (lambda file: print("loss", 0.5, file=file), ["0.5"]),
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[WrittenText]:
    """The events of a process whose code is in this folder."""
    events: list[WrittenText] = []

    def keep(_: ProbeLog, event: WrittenText, line: CodeLine) -> None:
        assert Path(line.file) == Path(__file__)
        events.append(event)

    folder = str(tmp_path)
    log = ProbeLog(ProbeSettings(folder, (str(Path(__file__).parent),), folder, folder))
    monkeypatch.setattr(probe_log, "active_log", log)
    monkeypatch.setattr(ProbeLog, "write", keep)
    return events


def open_recorded(*args: Any, **kwargs: Any) -> Any:
    return hooks_shown.open_recorded(WrappedCall(open, args, kwargs))


@pytest.mark.parametrize("kind", WRITERS)
def test_each_line_of_text_is_one_event_however_it_is_written(
    kind: str, tmp_path: Path, written: list[WrittenText]
) -> None:
    write, expected = WRITERS[kind]
    with open_recorded(tmp_path / "log", "w", newline="") as file:
        write(file)
    numbers = [SHOWN_NUMBER.findall(event.text) for event in written]
    assert [" ".join(line) for line in numbers if line] == expected
    with (tmp_path / "plain").open("w", newline="") as file:
        write(file)
    assert (tmp_path / "log").read_bytes() == (tmp_path / "plain").read_bytes()


def test_a_file_that_nobody_closes_is_recorded_and_whole(
    tmp_path: Path, written: list[WrittenText]
) -> None:
    json.dump({"loss": 0.5}, open_recorded(tmp_path / "log", "w"))
    assert [event.text for event in written] == ['{"loss": 0.5}']
    assert (tmp_path / "log").read_text() == '{"loss": 0.5}'


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("a", {}),
        ("x", {"encoding": "utf-16"}),
        ("w", {"newline": "\r\n", "buffering": 1}),
        ("w", {"encoding": "ascii", "errors": "replace"}),
    ],
)
def test_a_recorded_file_is_as_any_other(
    mode: str, options: dict[str, Any], tmp_path: Path, written: list[WrittenText]
) -> None:
    paths = tmp_path / "recorded", tmp_path / "plain"
    for path, opener in zip(paths, (open_recorded, open), strict=True):
        if mode == "a":
            path.write_text("before\n")
        with opener(path, mode, **options) as file:
            assert file.write("loss 0.5 \u00b1 0.1\n") == 15
            assert (file.mode, file.name) == (mode, str(path))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(written) == 1


def test_a_path_opens_a_recorded_file_too(
    tmp_path: Path, written: list[WrittenText], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("io.open", open_recorded)
    (tmp_path / "log").write_text("loss 0.5\n")
    assert [event.text for event in written] == ["loss 0.5\n"]


def test_of_a_long_dump_the_beginning_is_recorded(
    tmp_path: Path, written: list[WrittenText]
) -> None:
    numbers = list(range(10_000))
    with open_recorded(tmp_path / "log", "w") as file:
        json.dump(numbers, file)
    assert [len(event.text) for event in written] == [hooks_shown.MAX_WRITTEN_TEXT]
    assert json.loads((tmp_path / "log").read_text()) == numbers


def test_files_that_are_read_or_hold_bytes_are_left_alone(
    tmp_path: Path, written: list[WrittenText]
) -> None:
    for mode in ("wb", "rb", "r", "r+", "w+"):
        with open_recorded(tmp_path / "log", mode) as file:
            assert not isinstance(file, hooks_shown.RecordedText)
    assert not written


def test_a_file_of_many_lines_is_data_after_some(
    tmp_path: Path, written: list[WrittenText], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks_shown, "MAX_WRITTEN_LINES", 3)
    with open_recorded(tmp_path / "log", "w") as file:
        file.writelines(f"{n}\n" for n in range(5))
        for n in range(5):
            file.write(f"{n}\n")
    assert len(written) == 3
    assert len((tmp_path / "log").read_text().splitlines()) == 10


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Mon Nov 30 11:05:37 2026: loss 0.5", ["30", "2026", "0.5"]),
        ("[11:05] 3/10", ["3", "10"]),
        ("epoch 12:0.52", ["12", "0.52"]),
        ("1:0.5 lr:1e-3", ["1", "0.5", "1e-3"]),
        ("runs/Nov30_18-57-54_host: -0.5", ["-0.5"]),
        ("torch.Size([8, 3, 64]) 8 (1, 2)", ["8", "1", "2"]),
    ],
)
def test_a_time_of_day_and_a_shape_are_no_numbers(text: str, numbers: list[str]) -> None:
    assert SHOWN_NUMBER.findall(text) == numbers

"""Small files of an earlier start: each way in which they can be wrong is one line."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from stepladder.core import typed_file
from stepladder.core.errors import InputError


@dataclass(frozen=True)
class Inner:
    name: str
    port: int


@dataclass(frozen=True)
class Kept:
    folder: Path
    inner: Inner
    seconds: float
    pair: tuple[str, int]
    colour: Literal["red", "green"] = "red"
    several: tuple[Inner, ...] = ()
    names: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    maybe: int | None = None
    on: bool = False
    anything: Any = None


INNER = {"name": "a", "port": 1}
GOOD = {"folder": "/x", "inner": INNER, "seconds": 1, "pair": ["a", 2]}


def test_a_value_comes_back_as_it_was_written(tmp_path: Path) -> None:
    example = Kept(
        Path("x"),
        Inner("a", 2**63),
        0.5,
        ("b", -1),
        "green",
        (Inner("c", 0),),
        {"d"},
        {"e": 1},
        2,
        True,
        [{}],
    )
    text = json.dumps(
        asdict(example),
        default=lambda value: str(value) if isinstance(value, Path) else list(value),
    )
    (tmp_path / "kept.json").write_text(text)
    assert typed_file.load_json(tmp_path / "kept.json", Kept, "") == example


def test_defaults_and_keys_of_a_later_version() -> None:
    assert typed_file.parse_json(json.dumps(GOOD | {"new": 1}), Kept) == Kept(
        Path("/x"), Inner("a", 1), 1.0, ("a", 2)
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"folder": 5}, "folder is 5, and not a path"),
        ({"folder": "a\0b"}, "folder is 'a\\x00b', and not a path"),
        ({"inner": []}, "inner is [], and not a table"),
        ({"inner": {"name": "a"}}, "inner.port is missing"),
        ({"inner": INNER | {"port": True}}, "inner.port is True, and not a whole number"),
        ({"inner": INNER | {"port": 1.0}}, "inner.port is 1.0, and not a whole number"),
        (
            {"inner": INNER | {"port": 2**64}},
            "inner.port is 18446744073709551616, and not a whole number",
        ),
        ({"seconds": float("nan")}, "seconds is nan, and not a number"),
        ({"seconds": 10**400}, "seconds is 1000000"),
        ({"seconds": None}, "seconds is None, and not a number"),
        ({"pair": ["a"]}, "pair is ['a'], and not a list"),
        ({"pair": ["a", "b"]}, "pair[1] is 'b', and not a whole number"),
        ({"pair": "ab"}, "pair is 'ab', and not a list"),
        ({"colour": "blue"}, "colour is 'blue', and not 'red' or 'green'"),
        ({"several": [INNER, 1]}, "several[1] is 1, and not a table"),
        ({"names": [[]]}, "names[0] is [], and not a text"),
        ({"counts": {"a": "b"}}, "counts.a is 'b', and not a whole number"),
        ({"maybe": "a"}, "maybe is 'a', and not a whole number"),
        ({"on": 1}, "on is 1, and not true or false"),
    ],
)
def test_a_value_of_another_shape_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        typed_file.parse_json(json.dumps(GOOD | changed), Kept)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "it is not JSON"),
        (b'{"folder": "/x", "inn', "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"7" * 5000, "it is not JSON"),
        (b"[" * 100_000, "its lists or tables are nested too deeply"),
        (b"[]", "it is [], and not a table"),
        (b" " * (typed_file.MAX_FILE_BYTES + 1), "it is larger than 16 MiB"),
    ],
)
def test_what_is_no_such_file_is_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "kept.json").write_bytes(text)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        typed_file.load_json(tmp_path / "kept.json", Kept, "rm it")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("HINT: rm it")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """Nor read for ever, as /dev/zero would be."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path, message in (
        (tmp_path, "Is a directory"),
        (tmp_path / "fifo", "it is not a file"),
        (Path("/dev/zero"), "it is not a file"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
    ):
        with pytest.raises(InputError, match=f"^--load it cannot be used: {message}"):
            typed_file.load_json(path, Kept, "", "--load it")
    with pytest.raises(FileNotFoundError):
        typed_file.load_json(tmp_path / "none", Kept, "")

"""`--set` of `stepladder data`: the HINT of a refused file can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import stepladder.cli
from file_makers import ONE, Make, csv, files, tokens


def scalar(folder: Path) -> None:
    """Write HDF5 with a single value beside a column."""
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(4))
        file.create_dataset("n", data=5)


# What makes a file, its name, what the HINT says, what is typed then, and the rows and columns.
REFUSED: dict[str, tuple[Make, str, str, str, str]] = {
    "tokens of 32 bits": (
        tokens(*range(1, 200), dtype="<u4"),
        "a.bin",
        "--set dtype=uint32; or",
        "--set dtype=uint32",
        "198 rows .*tokens .2 uint32",
    ),
    "no header": (
        csv("1,2\n3,4\n"),
        "a.csv",
        "or --set header=NAMES",
        "--set header=x,y",
        r"2 rows .*x \(int64\), y \(int64\)",
    ),
    "another suffix": (
        files(a_dot_txt=ONE),
        "a.txt",
        "--set format=FORMAT, one of: parquet, ",
        "--set format=jsonl --set columns=x",
        "1 rows .*x .int64",
    ),
    "a single value": (
        scalar,
        "a.h5",
        "--set columns= without it",
        "--set columns=x",
        r"4 rows of x \(int64\)",
    ),
}


@pytest.fixture
def run(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """Type `stepladder data ...` in tmp_path; it returns the exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def type_it(text: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            stepladder.cli.main(["data", *shlex.split(text)])
        return ended.value.code, *capsys.readouterr()

    return type_it


@pytest.mark.parametrize("kind", REFUSED)
def test_a_hint_of_open_data_can_be_typed(kind: str, run: Any, tmp_path: Path) -> None:
    make, name, hint, typed, facts = REFUSED[kind]
    make(tmp_path)
    block = " --set block=2" if name == "a.bin" else ""
    for command in ("info", "check", "shard --out out"):
        more = block if "shard" in command else ""
        code, _, err = run(f"{command} {name}{more}")
        if kind != "another suffix" or "of no format" in err:
            assert code == 2
            assert hint in err
        code, out, err = run(f"{command} {name} {typed}{more}")
        assert code == 0, err
        assert command != "info" or re.search(facts, out)
    if name == "a.bin":
        assert "HINT: --set block=1024, the tokens" in run(f"shard a.bin --out o {typed}")[2]


@pytest.mark.parametrize(
    ("text", "cause", "hint"),
    [
        ("decode=f", "there is no setting 'decode'", "NAME=VALUE, of block, columns, header, "),
        ("=", "there is no setting ''", "NAME=VALUE, of block"),
        ("block", "'' is no block", "block=1024\n"),
        ("block=0", "'0' is no block", "block=1024\n"),
        ("dtype=", "'' is no dtype", "dtype=uint32\n"),
    ],
)
def test_a_setting_that_is_none_is_refused(text: str, cause: str, hint: str, run: Any) -> None:
    code, _, err = run(f"check a.csv --set {text}")
    assert code == 2
    assert err.startswith(f"error: --set {text}: {cause}. HINT: --set {hint}")


def test_shards_have_columns_alone(run: Any, tmp_path: Path) -> None:
    scalar(tmp_path)
    assert (
        "a.h5 holds shards, not block. HINT: --set columns= alone"
        in run("check a.h5 --set block=2")[2]
    )


def test_rows_of_other_settings_are_not_continued(run: Any, tmp_path: Path) -> None:
    tokens(*range(1, 200), dtype="<u4")(tmp_path)
    shard = "shard a.bin --out out --set block=4 --set dtype"
    assert run(f"{shard}=uint32")[0] == 0
    assert run(f"{shard}=uint32")[2] == "out: here already\n"
    code, _, err = run(f"{shard}=uint16")
    assert code == 2
    assert "out" in err

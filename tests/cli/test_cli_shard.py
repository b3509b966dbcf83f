"""`stepladder data shard` and `data info` as a user types them."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepladder.cli
from processes import SECONDS


@pytest.fixture
def run(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Type `stepladder data ...` in tmp_path: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def type_it(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            stepladder.cli.main(["data", *map(str, args)])
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return type_it


def ratings(path: Path, rows: int) -> None:
    path.write_text("user,item,rating\n" + "".join(f"{i},{i % 7},{i / 2}\n" for i in range(rows)))


def test_shard_info_and_check(run: Any, tmp_path: Path) -> None:
    ratings(tmp_path / "r.csv", 1000)
    code, out, err = run(
        "shard", "r.csv", "--out", "s", "--chunk-rows", 100, "--rows-per-shard", 400, "--json"
    )
    assert (code, err.count("rows,")) == (0, 3)
    facts = json.loads(out.splitlines()[-1])
    (part,) = facts["parts"]
    assert (facts["rows"], facts["chunks"], part["shards"], part["chunk_rows"]) == (
        1000,
        10,
        3,
        100,
    )
    assert part["columns"] == {"user": "int64", "item": "int64", "rating": "float32"}
    assert "better: chunks of about 0.4 MB, stepladder data shard ... --chunk-rows 16384" in out
    assert json.loads(run("info", "s", "--check", "--json")[1]) == facts
    for command in (("info", "--check"), ("check",)):
        assert run(*command, "s")[1].endswith("s: 1,000 records of shards, all can be read\n")
    assert "s: 1,000 rows of user (int64), item (int64), rating (float32)" in run("info", "s")[1]
    assert (
        run("shard", "r.csv", "--out", "s", "--chunk-rows", 100, "--rows-per-shard", 400)[2]
        == "s: here already\n"
    )


def test_columns_and_types(run: Any, tmp_path: Path) -> None:
    ratings(tmp_path / "r.csv", 10)
    out = run(
        "shard",
        "r.csv",
        "--out",
        "s",
        "--columns",
        "rating, user",
        "--dtype",
        "user=uint8",
        "--json",
    )[1]
    assert json.loads(out.splitlines()[-1])["parts"][0]["columns"] == {
        "rating": "float32",
        "user": "uint8",
    }


@pytest.mark.parametrize(
    "args, message",
    [
        (("nowhere", "--out", "s"), "error: there is no nowhere. HINT: a file, a folder"),
        (("r.csv",), "Missing option '--out'"),
        (
            ("r.csv", "--out", "s", "--chunk-rows", 0),
            "error: Invalid value for '--chunk-rows': 0 is not in the range x>=1. HINT: ",
        ),
        (("r.csv", "--out", "s", "--dtype", "user"), "--dtype user names no type"),
        (
            ("r.csv", "--out", "s", "--columns", "x"),
            "r.csv has no column 'x'. HINT: its columns are: user, item",
        ),
        (("r.csv", "--out", "r.csv/s"), "cannot write r.csv/s: Not a directory"),
    ],
)
def test_bad_input_is_one_line(
    run: Any, tmp_path: Path, args: tuple[object, ...], message: str
) -> None:
    ratings(tmp_path / "r.csv", 10)
    code, out, err = run("shard", *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_full_disk_then_room(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(300_000).reshape(3000, 100))
    command = ["-m", "stepladder", "data", "shard", "d.npz", "--out", "s", "--chunk-rows", "100"]
    command += ["--rows-per-shard", "1000"]

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    def typed(**more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            **more,
        )

    full = typed(preexec_fn=limited)
    assert full.returncode == 2, full.stderr
    assert full.stderr.startswith(
        "error: cannot write s/shard-00000.h5: File too large. HINT: free some space"
    )
    assert full.stderr.count("\n") == 1
    assert typed().returncode == 0
    assert json.loads((tmp_path / "s" / "index.json").read_text())["rows"] == 3000

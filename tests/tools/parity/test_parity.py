"""`stepladder parity` on the scripts of parity_corpus: as they are, and with a planted mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pages import REPOSITORY

CORPUS = REPOSITORY / "tests" / "parity_corpus"
PAIRS = tomllib.loads((CORPUS / "corpus.toml").read_text())["pair"]


def run_parity(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepladder", "parity", *args]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=900
    )


def write_script(pair: dict[str, Any], folder: Path) -> str:
    """Write the script of a pair, with its mistake, and return its text."""
    text: str = (CORPUS / pair["file"]).read_text()
    for old, new in pair.get("edits", []):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / pair["file"]).write_text(text)
    return text


def compare(pair: dict[str, Any], folder: Path) -> tuple[int, dict[str, Any]]:
    write_script(pair, folder)
    sizes = [part for nproc, args in pair.get("at", []) for part in ("--at", str(nproc), args)]
    ran = run_parity(folder, "--json", *sizes, pair["file"])
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def marks(pair: dict[str, Any]) -> list[pytest.MarkDecorator]:
    return [] if pair.get("fast") else [pytest.mark.slow, pytest.mark.corpus]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=marks(pair), id=pair["name"]) for pair in PAIRS]
)
def test_the_first_difference_is_named_and_a_clean_script_is_the_same(
    pair: dict[str, Any], tmp_path: Path
) -> None:
    code, report = compare(pair, tmp_path)
    causes = {one["cause"] for one in report["findings"] if one["severity"] == "error"}
    legal = {one["cause"] for one in report["findings"] if one["severity"] == "note"}
    expected = {pair["cause"]} if "cause" in pair else set()
    assert report["not_judged"] is None, report["not_judged"]
    assert (causes, legal) == (expected, set(pair.get("legal", []))), report
    assert code == len(expected)
    for key in ("step", "tensor"):
        assert report[key] == pair.get(key, report[key])
    assert [path.name for path in tmp_path.iterdir()] == [pair["file"]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no.py"], "script no.py is not a file"),
        (["--at", "1", "", "plain.py"], "--at names two numbers of processes, not 1"),
        (["--at", "1", "", "--at", "1", "", "plain.py"], "two numbers of processes, not 1, 1"),
        (["--at", "0", "", "--at", "1", "", "plain.py"], "--at 0: a number of processes is 1"),
        (["--at", "1", "'", "--at", "2", "", "plain.py"], "No closing quotation"),
    ],
)
def test_bad_input_is_one_line_with_a_hint(args: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print(1)\n")
    ran = run_parity(tmp_path, *args)
    assert ran.returncode == 2
    assert message in ran.stderr and "HINT" in ran.stderr and "Traceback" not in ran.stderr


def test_a_script_that_knows_no_other_processes_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import torch\n")
    ran = run_parity(tmp_path, "plain.py")
    assert ran.returncode == 3
    assert "knows no other processes" in ran.stdout

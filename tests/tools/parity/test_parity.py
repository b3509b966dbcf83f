"""`stepladder parity` on the scripts of parity_corpus: as they are, and with a planted mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pages import REPOSITORY, expect_documented
from stepladder.tools.parity.compare import FirstDifference
from stepladder.tools.parity.formats import summary_lines
from stepladder.tools.parity.parity import PARITY_TEXTS, ParityReport
from stepladder.tools.parity.tolerance import Deviation

CORPUS = REPOSITORY / "tests" / "parity_corpus"
FORKS = REPOSITORY / "tests" / "parity_forks.py"
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
    report = json.loads(ran.stdout)
    expect_documented(report, "parity")
    return ran.returncode, report


def compare_forked(pair: dict[str, Any], folder: Path) -> tuple[int, dict[str, Any]]:
    write_script(pair, folder)
    sizes = json.dumps(pair.get("at", [[1, ""], [2, ""]]))
    command = [sys.executable, str(FORKS), str(folder / pair["file"]), sizes]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    return report.pop("exit_code"), report


def expect(pair: dict[str, Any], code: int, report: dict[str, Any]) -> None:
    """The cause, the step and the tensor are those of the pair, and what is legal is named."""
    causes = {one["cause"] for one in report["findings"] if one["severity"] == "error"}
    legal = {one["cause"] for one in report["findings"] if one["severity"] == "note"}
    expected = {pair["cause"]} if "cause" in pair else set()
    assert report["not_judged"] is None, report["not_judged"]
    assert (causes, legal) == (expected, set(pair.get("legal", []))), report
    assert code == len(expected)
    for key in ("step", "tensor"):
        assert report[key] == pair.get(key, report[key])


def by_name(pairs: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(pair, id=pair["name"]) for pair in pairs]


def spawned() -> list[Any]:
    """Those that spawn their processes; the edited ones are for the corpus alone."""
    return [
        pytest.param(pair, id=pair["name"], marks=[pytest.mark.corpus] if "edits" in pair else [])
        for pair in PAIRS
        if pair.get("spawns")
    ]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("pair", by_name([pair for pair in PAIRS if pair.get("by_command")]))
def test_the_first_difference_is_named_and_nothing_is_left(
    pair: dict[str, Any], tmp_path: Path
) -> None:
    expect(pair, *compare(pair, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [pair["file"]]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("pair", spawned())
def test_a_script_that_spawns_its_processes_is_compared(
    pair: dict[str, Any], tmp_path: Path
) -> None:
    expect(pair, *compare(pair, tmp_path))


OTHERS = [pair for pair in PAIRS if not pair.get("by_command") and not pair.get("spawns")]


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("pair", by_name(OTHERS))
def test_every_pair_of_the_corpus_is_judged_rightly(pair: dict[str, Any], tmp_path: Path) -> None:
    expect(pair, *compare_forked(pair, tmp_path))


def test_the_corpus_has_twenty_of_each_in_four_shapes() -> None:
    faults = [pair for pair in PAIRS if "cause" in pair]
    assert len(faults) >= 20 and len(PAIRS) - len(faults) >= 20
    assert len({pair["file"] for pair in faults}) >= 4
    assert len({pair["cause"] for pair in faults}) >= 10


CLOUD = {"file": "blobs_mlp.py", "at": [[1, "--batch 32"], [2, "--batch 16"]]}
SEEDED = "    torch.manual_seed(0)\n"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([[SEEDED, "    torch.seed()\n"]], "seed the script"),
        ([["model(x), y", "model(x + torch.randn_like(x)), y"]], "draws other random numbers"),
    ],
)
def test_what_cannot_be_judged_is_said(
    edits: list[list[str]], message: str, tmp_path: Path
) -> None:
    code, report = compare_forked({**CLOUD, "edits": edits}, tmp_path)
    assert code == 3
    assert message in report["not_judged"]["line"]


@pytest.mark.parametrize(
    ("quantity", "tensor", "text"),
    [
        ("loss", "0.weight", "the loss and the gradient of 0.weight differ in step 3"),
        ("weight", "0.weight", "the weight of 0.weight differs in step 3"),
        ("initial weight", "0.weight", "0.weight differs before the first step"),
        ("samples", "", "the samples differ in step 3"),
        ("learning rate", "", "the learning rate differs in step 3"),
        ("steps", "", "one of them has no step 3"),
    ],
)
def test_the_verdict_is_one_sentence(quantity: Any, tensor: str, text: str) -> None:
    deviation = Deviation(tensor, 1.0, 0.0, 0.0) if tensor else None
    difference = FirstDifference(3, quantity, deviation)
    report = ParityReport(difference=difference, steps=9, sizes=("1 process", "2 processes"))
    assert summary_lines(report) == [f"not the same on 1 process and 2 processes: {text}"]


def test_the_verdict_names_what_is_legal() -> None:
    legal = [PARITY_TEXTS.finding("dropout"), PARITY_TEXTS.finding("batch-norm")]
    report = ParityReport(legal, steps=9, sizes=("2 processes", "4 processes"))
    line = "the same on 2 processes and 4 processes, apart from dropout and batch-norm: 9 steps compared"
    assert (summary_lines(report), report.exit_code) == ([line], 0)


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


@pytest.mark.slow
def test_a_script_that_knows_no_other_processes_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import torch\n")
    ran = run_parity(tmp_path, "plain.py")
    assert ran.returncode == 3
    assert "does not ask for its rank" in ran.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_that_fails_shows_its_own_traceback(tmp_path: Path) -> None:
    fails = ["loss.backward()", "raise ValueError('no such cloud')"]
    code, report = compare({**CLOUD, "edits": [fails]}, tmp_path)
    assert (code, report["findings"], report["same"]) == (3, [], False)
    assert report["not_judged"]["cause"] == "script"
    assert report["not_judged"]["line"] == "on 2 processes: the script failed by itself, as above"
    assert "ValueError: no such cloud" in report["not_judged"]["output"]
    assert "tools/parity" not in report["not_judged"]["output"]

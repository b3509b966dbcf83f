"""`stepladder diff` names the first step at which two runs diverge, and the cause."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load

from pages import documented_keys
from processes import refused, run
from stepladder.cli import cli
from stepladder.storage.snapshot import MODEL_FILE, read_snapshot
from stepladder.storage.snapshot_store import Snapshots
from stepladder.tools.diff.record_comparison import RecordComparison
from stepladder.tools.diff.recorded_run import RecordedRun, pair_by_step
from stepladder.tools.diff.step_events import Event, find_first_difference
from stepladder.tools.diff.verdict import to_json_value

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from diff_plants import PLANTS, pair

pytestmark = pytest.mark.ranks
# One plant for each kind of evidence.
QUICK = ("seed", "order", "edited", "data", "activation", "weight", "same")
QUICKEST = ("order", "edited", "weight", "same")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the launcher sets it where it is not, for good


def train_pair(name: str, folder: Path) -> tuple[Path, Path]:
    def train(args: list[str], env: dict[str, str]) -> None:
        process = run(*args, cwd=folder, env=env)
        assert process.returncode == 0, process.stderr

    return pair(name, folder, train)


@pytest.fixture(scope="module")
def runs(folder: Path) -> tuple[Path, Path]:
    """Two equal runs."""
    return train_pair("same", folder)


@pytest.fixture
def copied(runs: tuple[Path, Path], tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A run, and a copy of it that a test may change."""
    shutil.copytree(runs[0], tmp_path / "copy")
    yield runs[0], tmp_path / "copy"


def call_diff(*args: object, cwd: Path) -> tuple[int, str, str]:
    """Run `stepladder diff` in this process, whose server that forks ranks is warm.

    Returns the exit code, stdout and stderr.
    """
    before = Path.cwd()
    os.chdir(cwd)
    try:
        result = CliRunner().invoke(cli, ["diff", *map(str, args)], standalone_mode=False)
    finally:
        os.chdir(before)
    assert result.exception is None, result.exception
    return result.return_value, result.stdout, result.stderr


def compare(runs: tuple[Path, Path], cwd: Path, *flags: object) -> dict[str, Any]:
    code, out, _ = call_diff(*runs, "--json", *flags, cwd=cwd)
    verdict = json.loads(out.splitlines()[-1])
    assert code == (not verdict["equal"])
    return verdict


SLOW = [name for name in PLANTS if name not in QUICK][::3]  # benchmarks/diff.py tries them all


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICKEST else pytest.mark.slow)
        for name in (*QUICK, *SLOW)
    ],
)
def test_what_is_planted_is_named(folder: Path, name: str) -> None:
    plant = PLANTS[name]
    both = train_pair(name, folder)
    verdict = compare(both, folder)
    assert (verdict["kind"] or "") == plant.kind, verdict
    assert plant.step in (None, verdict["step"]), verdict
    assert re.search(plant.sentence, verdict["sentence"]), verdict["sentence"]
    divergence = RecordComparison(*map(RecordedRun, both)).divergence
    if divergence is not None and verdict["step"] != divergence.step:  # which `report` names
        assert f"the records differ from step {divergence.step} on" in verdict["sentence"]
    if plant.kind == "wrong result":
        assert verdict["run"] == str(both[1])


def test_at_least_twelve_kinds_are_planted() -> None:
    assert len({plant.kind for plant in PLANTS.values() if plant.kind}) >= 12


def test_the_same_directory_twice_is_equal_and_keys_are_those_of_the_page(
    runs: tuple[Path, Path],
) -> None:
    verdict = compare((runs[0], runs[0]), runs[0])
    assert verdict["equal"]
    assert (verdict["step"], verdict["kind"], verdict["records"]) == (None, None, [])
    assert (
        verdict["sentence"]
        == "the runs are equal: every bit of what both recorded in 8 common steps"
    )
    assert verdict.keys() == documented_keys("diff")


def test_a_shorter_run_is_compared_over_the_common_steps(copied: tuple[Path, Path]) -> None:
    filter_lines(copied[1], lambda line: line["step"] <= 3)
    verdict = compare(copied, copied[1].parent)
    assert (
        verdict["sentence"]
        == "the runs are equal: every bit of what both recorded in 3 common steps"
    )


def filter_lines(run_dir: Path, is_kept: Any) -> None:
    path = run_dir / "metrics.jsonl"
    lines = [
        line for line in path.read_text().splitlines(keepends=True) if is_kept(json.loads(line))
    ]
    path.write_text("".join(lines))


def test_a_table_names_both_values_and_the_sentence_is_the_last_line(
    copied: tuple[Path, Path],
) -> None:
    change(copied[1], lambda config: config["definition"].update(lr=0.25, seed=7))
    rewrite_losses(copied[1], 4)
    code, out, _ = call_diff(*copied, cwd=copied[1].parent)
    assert code == 1
    *table, sentence = out.splitlines()
    assert sentence.startswith(
        "the records differ from step 4 on (setting): seed is 0 in the first run and 7 in the second"
    )
    assert sentence.endswith("; also different: lr")
    assert any(line.split() == ["seed", "0", "7"] for line in table), out
    assert any(line.startswith("loss of step 4") for line in table), out


def test_another_job_comes_before_its_settings_and_these_before_the_processes(
    copied: tuple[Path, Path],
) -> None:
    """One name of the job is of another file: a copy that was renamed is no other job."""

    def rename(config: dict[str, Any]) -> None:
        config["definition"].update(recipe="renamed", sync="ddp")
        config["derived"]["by_microbatch"] = False

    rewrite_losses(copied[1], 4)
    change(copied[1], rename)
    sentence = compare(copied, copied[1].parent)["sentence"]
    assert "(setting): sync is exact in the first run" in sentence and "recipe" not in sentence
    change(copied[1], lambda config: config["environment"].update(job_sha256="0" * 64))
    sentence = compare(copied, copied[1].parent)["sentence"]
    assert "(setting): recipe is " in sentence and "; also different: sync" in sentence
    both_equal = {"recipe": "renamed", "sync": "exact", "threads": 2}
    change(copied[1], lambda config: config["definition"].update(both_equal))
    verdict = compare(copied, copied[1].parent)
    assert (verdict["kind"], verdict["step"]) == ("code", 4)
    assert verdict["sentence"].endswith("different job files; also different: threads")


def change(run_dir: Path, how: Any) -> None:
    path = run_dir / "config.json"
    config = json.loads(path.read_text())
    how(config)
    path.write_text(json.dumps(config))


def rewrite_losses(run_dir: Path, first: int, factor: float = 2.0) -> None:
    """Multiply the losses from a step on."""
    path = run_dir / "metrics.jsonl"
    lines = list(map(json.loads, path.read_text().splitlines()))
    for line in lines:
        if line["step"] >= first and "loss" in line:
            line["loss"] *= factor
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the job file one that this user has not trained."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.usefixtures("stranger")
def test_without_exact_mode_rounding_counts_as_equal(
    copied: tuple[Path, Path], tmp_path: Path
) -> None:
    first = tmp_path / "first"
    shutil.copytree(copied[0], first)
    for run_dir in (first, copied[1]):
        change(run_dir, lambda config: config["definition"].update(sync="ddp"))
    rewrite_losses(copied[1], 2, 1 + 1e-7)
    assert (
        compare((first, copied[1]), tmp_path)["sentence"]
        == "the runs are equal: losses within 1e-05 in 8 common steps"
    )
    rewrite_losses(copied[1], 2, 1 + 1e-4)
    assert compare((first, copied[1]), tmp_path)["step"] == 2


@pytest.mark.usefixtures("stranger")
def test_versions_are_named_where_the_job_file_is_not_to_be_run(
    copied: tuple[Path, Path], tmp_path: Path
) -> None:
    change(copied[1], lambda config: config["environment"].update(torch="1.0"))
    rewrite_losses(copied[1], 3)
    code, out, err = call_diff(*copied, cwd=tmp_path)
    assert code == 1
    assert "(versions): torch is 2." in out.splitlines()[-1]
    assert (
        "not trained again" in err
        and "names a job file that you have not trained as it is now" in err
    )
    assert f"stepladder diff {copied[0]} {copied[1]} --trust-job-file" in err


def test_a_run_that_is_not_what_its_job_file_gives_is_found(copied: tuple[Path, Path]) -> None:
    rewrite_losses(copied[1], 6)
    verdict = compare(copied, copied[1].parent, "--trust-job-file")
    assert (verdict["kind"], verdict["step"], verdict["run"]) == ("wrong result", 6, str(copied[1]))
    assert verdict["trained_again"]


@pytest.mark.slow
def test_weights_that_differ_in_a_snapshot_alone_are_found(copied: tuple[Path, Path]) -> None:
    """After the last step no loss shows the difference. The snapshot itself is undamaged."""
    path = copied[1] / "snapshots" / "step_00000008"
    snapshot = read_snapshot(path)
    model = torch.nn.Module()
    for name, tensor in load(snapshot.files[MODEL_FILE]).items():
        model.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))
    tensors = model.state_dict()
    tensors["last_bias"] += 1e-6
    model.state_dict = lambda: {
        name.replace("_", ".", 1): tensor for name, tensor in tensors.items()
    }
    shutil.rmtree(path)
    written = Snapshots(path.parent)
    written.save(8, model, snapshot.state(), {"ledger": snapshot.manifest["ledger"]})
    written.wait()
    verdict = compare(copied, copied[1].parent, "--trust-job-file")
    assert (verdict["kind"], verdict["step"], verdict["run"]) == ("wrong result", 8, str(copied[1]))
    assert "weights last.bias after step 8" in [row["name"] for row in verdict["records"]]


@pytest.mark.parametrize("damage", ["gone", "empty", "fifo", "config", "script", "no run"])
def test_what_is_no_run_is_refused_in_one_line(copied: tuple[Path, Path], damage: str) -> None:
    run_dir = copied[1]
    metrics = run_dir / "metrics.jsonl"
    if damage == "gone":
        metrics.unlink()
    elif damage == "empty":
        metrics.write_text("")
    elif damage == "fifo":
        metrics.unlink()
        os.mkfifo(metrics)
    elif damage == "config":
        (run_dir / "config.json").write_text('{"schema": 1, "definition"')
    elif damage == "script":
        (run_dir / "config.json").unlink()
        (run_dir / "launches.jsonl").write_text("{}\n")
    else:
        shutil.rmtree(run_dir)
    messages = {
        "gone": "has no step",
        "empty": "has no step",
        "fifo": "cannot be read",
        "config": "is damaged",
    }
    for both in (copied, copied[::-1]):
        refused(
            run("diff", *both, cwd=run_dir.parent), messages.get(damage, "is not a run directory")
        )


def test_a_damaged_snapshot_is_said_and_left_out(copied: tuple[Path, Path]) -> None:
    with (copied[1] / "snapshots" / "step_00000008" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    code, out, err = call_diff(*copied, cwd=copied[1].parent)
    assert (code, out) == (
        0,
        "the runs are equal: every bit of what both recorded in 8 common steps\n",
    )
    assert "a snapshot of step 8 is damaged (model.safetensors: 100 bytes" in err


def test_half_a_last_line_is_said(copied: tuple[Path, Path]) -> None:
    metrics = copied[1] / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-9])
    code, out, err = call_diff(*copied, cwd=copied[1].parent)
    assert code == 0 and "common steps" in out
    assert f"the last line of {metrics} is half a line, and left out" in err


def test_a_ledger_that_proves_nothing_is_said_and_the_run_is_not_trained_again(
    copied: tuple[Path, Path],
) -> None:
    (copied[1] / "ledger" / "attempt-0001.rank-0.jsonl").write_text("no ledger\n" * 5)
    (copied[1] / "snapshots" / "step_other").mkdir()
    rewrite_losses(copied[1], 6)
    code, out, err = call_diff(*copied, "--trust-job-file", cwd=copied[1].parent)
    assert code == 1
    assert "step 6 on (loss): loss of step 6 is " in out.splitlines()[-1]
    assert "and no record says why" in out.splitlines()[-1]
    assert f"the ledger of {copied[1]} does not prove step 6" in err
    assert "no rank's header can be read" in err


def test_a_run_directory_of_an_older_version_is_read(copied: tuple[Path, Path]) -> None:
    """An older version recorded neither the hash of the job file nor the threads."""
    change(
        copied[1],
        lambda config: [config["environment"].pop(name) for name in ("job_sha256", "threads")],
    )
    assert compare(copied, copied[1].parent)["records"] == []
    change(copied[1], lambda config: config.pop("environment"))
    assert compare(copied, copied[1].parent)["equal"]


def test_lines_of_the_same_step_come_together() -> None:
    first = [{"step": step} for step in (1, 2, 4, 5)]
    second = [{"step": step} for step in (2, 3, 4)]
    assert [line["step"] for line, _ in pair_by_step(iter(first), iter(second))] == [2, 4]


def test_the_first_event_that_only_one_run_has_is_a_difference() -> None:
    events = [Event(1, 1, "data", "tensor 0", "a", ""), Event(1, 1, "loss", "the loss", "b", "")]
    assert find_first_difference(events, events) is None
    assert find_first_difference(events, events[:1]) == (events[1], None)
    assert find_first_difference(events[:1], events) == (None, events[1])


def test_what_json_has_no_word_for_is_text() -> None:
    assert [to_json_value(value) for value in (None, 1, 0.5, float("nan"), [1])] == [
        None,
        1,
        0.5,
        "nan",
        "[1]",
    ]


def test_a_ledger_of_the_planned_samples_is_off_nowhere(runs: tuple[Path, Path]) -> None:
    run = RecordedRun(runs[0])
    assert run.sample_differences == {}
    assert run.world_size_at(8) == 1

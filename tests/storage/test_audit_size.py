"""However many ranks and steps a ledger names, few files are open and the audit comes to an end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ledgers import FakeRun
from processes import SECONDS
from stepladder.core.errors import InputError
from stepladder.core.plan import Plan
from stepladder.storage.audit import audit
from stepladder.storage.ledger import extend_chain, ledger_path
from stepladder.storage.ledger_attempts import count_steps_per_read


def test_more_ranks_than_open_files(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", Plan(num_samples=400, global_batch=200, microbatch=1))
    run.snapshot(run.attempt(150, range(1, 5)), 4)
    config = json.loads((run.path / "config.json").read_text()) | {
        "definition": {"recipe": "x"},
        "config": {},
    }
    (run.path / "config.json").write_text(json.dumps(config))
    page = str(tmp_path / "page.html")
    for arguments in (("audit", str(run.path), "--json"), ("report", str(run.path), "-o", page)):
        command = [sys.executable, "-m", "stepladder", *arguments]
        done = subprocess.run(
            ["bash", "-c", 'ulimit -n 64 && exec "$@"', "bash", *command],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if arguments[0] == "audit":
            result = json.loads(done.stdout)
            assert (result["ok"], len(result["epochs"])) == (True, 2)
    assert "on 150 processes; samples lost 0" in Path(page).read_text()


@pytest.mark.parametrize("name, value", [("world_size", 10**12), ("resumed_from_step", 10**14)])
def test_a_header_with_a_huge_number_is_a_problem_or_one_line(
    name: str, value: int, tmp_path: Path
) -> None:
    """The hash of the header is right, so that nothing else is wrong with it."""
    run = FakeRun(tmp_path / "run", Plan(num_samples=24, global_batch=8, microbatch=2))
    run.attempt(1, range(1, 4))
    header = {"attempt": 1, "rank": 0, "world_size": 1, "resumed_from_step": 0, "chain": ""} | {
        name: value
    }
    body = json.dumps(header)
    ledger_path(run.path, 1, 0).write_text(
        f'{body[:-1]}, "link": "{extend_chain("", body)}"}}\n{{"step": 1}}\n'
    )
    try:
        result = audit(run.path)
    except InputError as error:
        assert f"step {value}" in error.problem
    else:
        assert not result.ok


@pytest.mark.parametrize("steps", [10**9, 10**18])
def test_a_result_with_a_huge_number_of_steps_is_one_line(steps: int, tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", Plan(num_samples=24, global_batch=8, microbatch=2))
    run.attempt(1, range(1, 4))
    run.result(steps)
    with pytest.raises(InputError, match=rf"speaks of step {steps}, in epoch {steps // 3}\. "):
        audit(run.path)


@pytest.mark.parametrize(
    "plan",
    [
        {"num_samples": 10**15, "global_batch": 8, "microbatch": 2},
        {"num_samples": 24.0, "global_batch": 8, "microbatch": 2},
        {"num_samples": 24, "global_batch": 8, "microbatch": True},
        {
            "num_samples": 24,
            "global_batch": 8,
            "microbatch": 2,
            "chunks": {"shards": [[24, 0]], "slots": 8},
        },
        {
            "num_samples": 24,
            "global_batch": 8,
            "microbatch": 2,
            "chunks": {"shards": [[10**15, 1]], "slots": 8},
        },
        {
            "num_samples": 24,
            "global_batch": 8,
            "microbatch": 2,
            "chunks": {"shards": [[24, 6]], "slots": 0},
        },
        {
            "num_samples": 24,
            "global_batch": 8,
            "microbatch": 2,
            "chunks": {"shards": "24", "slots": 8},
        },
        {
            "num_samples": 10**15,
            "global_batch": 8,
            "microbatch": 2,
            "chunks": {"shards": [[10**15, 1]], "slots": 8},
        },
    ],
)
def test_a_plan_that_is_none_is_one_line(plan: dict[str, object], tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", Plan(num_samples=24, global_batch=8, microbatch=2))
    run.attempt(1, range(1, 4))
    (run.path / "config.json").write_text(json.dumps({"plan": plan}))
    with pytest.raises(InputError, match=r"config\.json"):
        audit(run.path)


def test_an_order_that_does_not_fit_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(
        tmp_path / "run", Plan(num_samples=1 << 20, global_batch=1 << 10, microbatch=1 << 10)
    )
    run.attempt(1, range(1, 1))
    free = SimpleNamespace(available=31 << 20)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(
        InputError, match="names 1048576 samples, whose order takes 32 MiB of memory; 31 MiB are"
    ):
        audit(run.path)
    free.available = 32 << 20
    assert audit(run.path).ok


@pytest.mark.parametrize(
    ("world_size", "global_batch", "steps"),
    [(1, 8, 1 << 17), (1024, 8, 128), (1, 1 << 12, 256), (1, 1 << 30, 1)],
)
def test_few_lines_are_held_at_once(world_size: int, global_batch: int, steps: int) -> None:
    assert count_steps_per_read(world_size, global_batch) == steps


def test_a_run_on_other_data_names_its_first_steps(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", Plan(num_samples=400, global_batch=2, microbatch=1))
    run.attempt(1, range(1, 301), read=lambda step, rank, parts: [part + 1 for part in parts])
    result = audit(run.path)
    assert (result.lost, len(result.problems)) == (600, 101)
    assert result.problems[-1] == "attempt 1: 200 more such steps, up to step 300"

"""What a run was started with: what is no such thing is named, and a resume with anything else is
refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from processes import refused, run
from stepladder.core.errors import InputError
from stepladder.core.order import SORT
from stepladder.storage.run_config import (
    describe_environment,
    find_shuffle,
    open_config,
    validate_same_definition,
)

RUN = Path("runs/mlp")


@pytest.mark.parametrize(
    ("stored", "requested", "result", "hint"),
    [
        ({"lr": 0.1}, {"lr": 0.2}, "started with lr=0.1, now it is 0.2", "--lr 0.1 to resume"),
        (
            {"global_batch": 8},
            {},
            "started with global_batch=8, now it is None",
            "--global-batch 8 to resume",
        ),
        ({}, {"width": 3}, "started with width=None, now it is 3", "--fresh"),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, "b=2, now it is 3", "--b 2"),
        (
            {"sync": "ddp"},
            {"sync": "exact", "machine": "AVX2"},
            "sync=ddp, now it is exact",
            "--sync ddp to resume",
        ),
        (
            {"machine": "AVX2"},
            {"machine": "AVX512"},
            "machine=AVX2",
            "a machine as it was started on",
        ),
        (
            {"recipe": "mlp"},
            {"recipe": "cnn"},
            "recipe=mlp",
            "the recipe or job file mlp to resume",
        ),
        ({"num_samples": 9}, {"num_samples": 8}, "num_samples=9", "the data it was started with"),
        ({"chunks": None}, {"chunks": {"slots": 8}}, "chunks=None", "the data it was started with"),
        (
            {"batch_per_rank": 8, "global_batch": 32},
            {"batch_per_rank": 8},
            "global_batch=32",
            "--nproc 4 to",
        ),
        (
            {"batch_per_rank": 1, "global_batch": 4},
            {"batch_per_rank": 1},
            "global_batch=4",
            "--nproc 4 to",
        ),
        (
            {"batch_per_rank": 8},
            {"batch_per_rank": 4},
            "batch_per_rank=8",
            "--batch-per-rank 8 to resume",
        ),
        (
            {"batch_per_rank": 8, "epochs": 2},
            {"batch_per_rank": 8},
            "epochs=2",
            "--epochs 2 to resume",
        ),
        ({"microbatch": None}, {"microbatch": 4}, "microbatch=None", "no --microbatch to resume"),
        ({"clip": True}, {"clip": False}, "clip=True", "--clip to resume"),
        ({"clip": False}, {"clip": True}, "clip=False", "--no-clip to resume"),
    ],
)
def test_another_definition_is_refused_naming_both_values(
    stored: dict[str, Any], requested: dict[str, Any], result: str, hint: str
) -> None:
    with pytest.raises(InputError) as caught:
        validate_same_definition(json.loads(json.dumps(stored)), requested, RUN)
    assert result in caught.value.problem and str(RUN) in caught.value.problem
    assert hint in caught.value.hint


def test_more_epochs_under_a_schedule_are_refused_with_the_reason_and_a_way_to_continue() -> None:
    with pytest.raises(InputError) as caught:
        validate_same_definition({"epochs": 2}, {"epochs": 8}, RUN)
    assert "a learning-rate schedule depend" in caught.value.problem
    assert caught.value.hint.endswith(
        "another --run-dir with --init-from runs/mlp to continue from its weights"
    )


def test_the_same_definition_passes_after_a_way_through_json() -> None:
    definition = {"lr": 0.1 + 0.2, "name": "a", "microbatch": None, "flag": True}
    validate_same_definition(json.loads(json.dumps(definition)), definition, RUN)


@pytest.mark.parametrize("schema", [1, None])
def test_this_version_is_read_and_so_is_one_that_says_no_version(
    tmp_path: Path, schema: int | None
) -> None:
    config = {"plan": 3} | ({"schema": schema} if schema else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_config(tmp_path) as stored:
        assert stored == config


@pytest.mark.parametrize(
    "text, result",
    [
        ('{"schema": 2}', "written by a newer stepladder: its schema is 2, this one knows 1"),
        ('{"schema": "2"}', "config.json is damaged: a value has another type"),
        ("{", "config.json is damaged: it is not JSON, from line 1 on"),
        ("[1]", "config.json is damaged: it is [1]"),
        ("{}", "config.json is damaged: 'plan' is missing"),
        ('{"plan": 1}', "config.json is damaged: a value has another type"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_to_do(
    tmp_path: Path, text: str, result: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError) as caught, open_config(tmp_path) as stored:
        stored["plan"]["seed"]
    assert result in caught.value.problem and str(tmp_path) in caught.value.problem
    assert caught.value.hint in (
        "pip install --upgrade stepladder, or another --run-dir",
        "put a copy there, or train again with --fresh",
    )


def test_a_folder_without_a_configuration_is_no_run_directory(tmp_path: Path) -> None:
    result = rf"{tmp_path} is not a run directory: config.json: No such file.* HINT: ls {tmp_path.parent}$"
    with pytest.raises(InputError, match=result), open_config(tmp_path):
        pass


def test_a_folder_of_runs_is_told_from_one_and_its_newest_are_named(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for began, name in enumerate(("oldest", "second", "third", "newest"), start=1):
        (runs / name).mkdir(parents=True)
        (runs / name / "config.json").write_text("{}")
        os.utime(runs / name / "config.json", (began, began))
    (runs / "script").mkdir()
    (runs / "script" / "launches.jsonl").touch()
    jobs = "newest, runs/third, runs/second"
    for command, named in (
        (("audit", "runs"), jobs),
        (("watch", "runs"), "script, runs/newest, runs/third;"),  # watch and report know scripts
        (("report", "runs"), "script, runs/newest, runs/third;"),
        (("train", "mlp", "--init-from", "runs"), jobs),
    ):
        refused(run(*command, cwd=tmp_path), f"HINT: its newest runs: runs/{named}")


def test_the_environment_names_the_commit_of_the_repository_that_the_run_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert describe_environment()["git_commit"] is None
    git("init", "-q")
    assert describe_environment()["git_commit"] is None, "nothing was committed"
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "first")
    (tmp_path / "job.py").write_text("x = 1")
    stored = json.loads(json.dumps(describe_environment("job.py", 2)))
    assert stored["git_commit"] == git("rev-parse", "HEAD")
    assert None not in stored.values()
    assert stored["job_sha256"] == hashlib.sha256(b"x = 1").hexdigest()
    assert describe_environment("gone.py")["job_sha256"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment()["git_commit"] is None, "there is no git"


def git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("config", "shuffle"),
    [(None, ""), ({"plan": {}}, SORT), ({"plan": {"shuffle": "feistel"}}, "feistel")],
)
def test_the_order_is_that_of_the_run_s_begin(config: dict[str, Any] | None, shuffle: str) -> None:
    assert find_shuffle(config, RUN) == shuffle


@pytest.mark.parametrize("config", [{}, {"plan": None}, {"plan": {"shuffle": 7}}, {"plan": []}])
def test_a_damaged_order_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"runs/mlp/config\.json is damaged"):
        find_shuffle(config, RUN)

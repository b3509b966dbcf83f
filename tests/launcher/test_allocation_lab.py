"""`salloc`, then `run` or `train`: on a real Slurm, they become one agent per node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labs import TestLab
from processes import JOBS, run, train

pytestmark = pytest.mark.ranks


@pytest.mark.slow
def test_a_plain_script_runs_on_all_nodes_of_the_allocation(lab: TestLab, tmp_path: Path) -> None:
    command = "stepladder", "run", "--nproc", 2, JOBS / "tutorial.py", 1, 1, "--batch-size", 128
    output = lab.slurm("salloc", "-N2", *command, cwd=tmp_path)
    assert sorted(output.splitlines()) == [
        f"[rank {rank}] [GPU{rank}] Epoch 0 | Batchsize: 128 | Steps: 4" for rank in range(4)
    ]


def test_one_node_is_not_where_salloc_was_typed(lab: TestLab, tmp_path: Path) -> None:
    assert (
        lab.slurm("salloc", "-N1", "-w", "n3", "stepladder", "run", "hostname", cwd=tmp_path)
        == "n3\n"
    )


def test_a_task_per_rank_gives_a_script_torchrun_s_variables(lab: TestLab, tmp_path: Path) -> None:
    output = lab.slurm(
        "srun",
        "-N2",
        "--ntasks-per-node=1",
        "stepladder",
        "run",
        JOBS / "script.py",
        "about",
        cwd=tmp_path,
    )
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [
        (record["WORLD_SIZE"], record["LOCAL_RANK"], record["known"]) for record in records
    ] == [("2", "0", True)] * 2
    assert {record["MASTER_ADDR"] for record in records} == {lab.nodes()["n1"]["address"]}


@pytest.mark.slow
def test_a_bug_is_exit_code_1_whatever_srun_ended_then(lab: TestLab, tmp_path: Path) -> None:
    """srun gives the largest code of its tasks: an agent that it ends with the one that failed must
    not say 75.
    """
    arguments = "salloc", "-N2", "stepladder", "train", JOBS / "gates.py"
    done = run(*arguments, cwd=tmp_path, env={**lab.env, "RAISES": "any 3"}, command=())
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: raised at step 3" in done.stderr


@pytest.mark.slow
def test_train_in_an_allocation_gives_the_bits_of_one_process(lab: TestLab, tmp_path: Path) -> None:
    command = "train", "mlp", "--sync", "exact", "--steps", 20, "--run-dir"
    lab.slurm("salloc", "-N2", "stepladder", *command, "two", cwd=tmp_path)
    alone = train(*command[1:], "one", cwd=tmp_path)
    stored = json.loads((tmp_path / "two/result.json").read_text())
    assert (stored["world_size"], stored["weights_sha256"]) == (2, alone["weights_sha256"])

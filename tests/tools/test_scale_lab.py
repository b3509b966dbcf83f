"""`scale --nodes` on a real Slurm: batch jobs one after the other, and none is left."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from labs import LAB_POLL_INTERVAL_S, TestLab
from processes import JOBS, refused, run, started, wait_until
from stepladder.tools.scaling.efficiency import STEP_PARTS

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SHORT = ("--rounds", 1, "--steps", 8, "--warmup", 2)


@pytest.mark.parametrize("args", [("mlp", "--samples", 512), (JOBS / "tutorial.py", 20, 99)])
def test_one_and_two_nodes(args: tuple[object, ...], lab: TestLab, tmp_path: Path) -> None:
    done = run("scale", *args, "--nodes", "2,1", *SHORT, "--json", cwd=tmp_path, env=lab.env)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [(size["nodes"], size["nproc"]) for size in result["sizes"]] == [(1, 1), (2, 2)]
    assert (
        set(result["sizes"][1]["lost"]) == set(STEP_PARTS)
        and None not in result["sizes"][1]["lost"].values()
    )
    assert all(size["launch_seconds"] > 0 for size in result["sizes"])
    assert not [path for path in tmp_path.iterdir() if path.name != "snapshot.pt"]
    assert lab.slurm("squeue", "--noheader") == ""


def test_ctrl_c_cancels_all_jobs(lab: TestLab, tmp_path: Path) -> None:
    with started(
        "scale", "mlp", "--nodes", "1,2", "--steps", 10**6, cwd=tmp_path, env=lab.env
    ) as scale:
        wait_until(
            lambda: "RUNNING" in lab.slurm("squeue", "--noheader", "--format", "%T"),
            every=LAB_POLL_INTERVAL_S,
        )
        scale.signal_group(signal.SIGINT)
        assert scale.end() == 130
    assert lab.slurm("squeue", "--noheader") == ""
    assert not list(tmp_path.glob(".scale-*"))


def test_what_a_job_says_is_one_line(lab: TestLab, tmp_path: Path) -> None:
    args = (
        "scale",
        "mlp",
        "--global-batch",
        16,
        "--microbatch",
        16,
        "--nodes",
        "1,2",
        *SHORT,
        "--json",
    )
    refused(run(*args, cwd=tmp_path, env=lab.env), "2 processes for 1 microbatches")
    args = "scale", JOBS / "tutorial.py", 1, 1, "--batch-size", 512, "--nodes", 1, *SHORT, "--json"
    refused(run(*args, cwd=tmp_path, env=lab.env), "tutorial.py made 4 optimizer steps")
    assert lab.slurm("squeue", "--noheader") == ""
    refused(
        run("scale", "mlp", "--nodes", "1,5", cwd=tmp_path, env=lab.env),
        "--nodes 5, but partition lab gives",
    )

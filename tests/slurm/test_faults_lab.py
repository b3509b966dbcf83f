"""Nodes of a real Slurm are lost, or cut off in the middle of a step: the unbroken run's bits,
nothing lost.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_submit_lab import EXACT, GATES, Jobs, weights_of_one_process

from labs import TestLab
from processes import audited, refused, run, started, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

WORDS = ("train", GATES, *EXACT, "--snapshot-every", 2, "--run-dir", "run")


@pytest.fixture
def jobs(lab: TestLab, tmp_path: Path) -> Jobs:
    return Jobs(lab, tmp_path)


def test_the_first_node_is_lost_with_the_batch_script_and_slurm_notices_by_itself(
    jobs: Jobs,
) -> None:
    job = jobs.submit("--nodes", 2, "--", *WORDS, GATES=f"{jobs.folder} 7")
    jobs.is_held(job, jobs.folder / "at-7")
    first = jobs.lab.job(job)["BatchHost"]
    jobs.lab.lab("fail", first)
    jobs.lab.await_down(first)
    (jobs.folder / "open-7").touch()
    jobs.is_requeued(job, 1)
    jobs.ended(job)  # on other nodes of the four, while this one stays away
    assert jobs.lab.job(job)["Restarts"] == "1"
    assert first not in jobs.lab.job(job)["NodeList"]
    jobs.equals_one_process("run", GATES, *EXACT)


@pytest.mark.parametrize("fewest", [2, 3])
def test_a_cable_is_cut_in_the_middle_of_a_step(fewest: int, jobs: Jobs) -> None:
    """The ranks of the node go on, hear nothing, and have no part in what follows: where two nodes
    are enough, the others go on in place, until a job that was submitted for it joins them; else
    the job is queued again."""
    arguments = "--nodes", f"{fewest}:3", "--", *WORDS
    gates = f"{jobs.folder} 7 14" if fewest == 2 else f"{jobs.folder} 7"
    job = jobs.submit(*arguments, GATES=gates)
    jobs.is_held(job, jobs.folder / "at-7")
    serves = json.loads((jobs.folder / "run" / "rendezvous.json").read_text())["host"]
    cut = next(name for name in ("n2", "n3") if jobs.lab.nodes()[name]["address"] != serves)
    jobs.lab.lab("cut", cut)
    (jobs.folder / "open-7").touch()
    if fewest == 2:
        jobs.is_held(job, jobs.folder / "at-14")
        assert "in-place recovery: continuing with 2 processes" in jobs.typed("logs", job)
        newcomer = jobs.submit("--join", job, *arguments, GATES=gates)
        ready = "are ready: they join after this step"
        wait_until(lambda: ready in jobs.typed("logs", job), lambda: jobs.typed("logs", newcomer))
        (jobs.folder / "open-14").touch()
        jobs.ended(newcomer)
        late = run("submit", "--join", newcomer, *arguments, cwd=jobs.folder, env=jobs.lab.env)
        refused(
            late, f"--join {newcomer}, but job {newcomer} gates: completed", "stepladder status"
        )
    else:
        jobs.lab.await_down(cut)
        jobs.lab.lab("heal", cut)
        jobs.is_requeued(job, 1)
    jobs.ended(job)
    assert jobs.result("run")["world_size"] == 3
    assert audited(jobs.folder / "run")["attempts"] == 1 + (fewest == 3)
    jobs.equals_one_process("run", GATES, *EXACT)


def test_weights_that_lie_in_rows_on_two_nodes_survive_a_lost_rank_and_a_requeue(
    jobs: Jobs,
) -> None:
    """No process has all of them: each start reads what the four of the last one have written."""
    sharded = "--nproc", 2, "--", *WORDS, "--shard", "full", "--fail-at", "3:5"
    job = jobs.submit("--nodes", 2, *sharded, GATES=f"{jobs.folder} 14")
    jobs.is_held(job, jobs.folder / "at-14")
    log = jobs.typed("logs", job)
    assert (
        "rank 3 was killed by SIGKILL" in log and "run directory run, resumed after step 4" in log
    ), log
    snapshot = jobs.folder / "run" / "snapshots" / "step_00000012"
    wait_until(snapshot.exists, lambda: jobs.typed("logs", job))
    assert len(list(snapshot.glob("part-*.safetensors"))) == 4
    jobs.lab.slurm("scontrol", "requeue", job)
    jobs.is_requeued(job, 1)
    jobs.ended(job)
    result = jobs.result("run")
    assert (result["world_size"], result["resumed_from_step"]) == (4, 14)
    assert audited(jobs.folder / "run")["attempts"] == 3
    jobs.equals_one_process("run", GATES, *EXACT)


def test_mnist_on_two_nodes_one_of_which_is_lost(jobs: Jobs, mnist_dir: Path) -> None:
    arguments = "mnist", "--data-dir", mnist_dir, *EXACT, "--steps", 60, "--snapshot-every", 10
    job = jobs.submit("--nodes", 2, "--nproc", 1, "--", "train", *arguments, "--run-dir", "run")
    snapshots = jobs.folder / "run" / "snapshots"
    wait_until(lambda: list(snapshots.glob("step_*")), lambda: jobs.typed("logs", job))
    jobs.lab.lab("fail", "n2")
    jobs.lab.lab("heal", "n2")
    jobs.is_requeued(job, 1)
    jobs.ended(job)
    assert jobs.result("run")["resumed_from_step"] >= 10
    jobs.equals_one_process("run", *arguments)


def test_nodes_meet_at_an_ipv6_address(lab: TestLab, tmp_path: Path) -> None:
    nodes = [lab.nodes()[name] for name in ("n1", "n2")]
    with ExitStack() as stack:
        agents = [
            stack.enter_context(started(
                "lab", "exec", "--node", node["name"], "--", "stepladder", *WORDS, "--nodes", 2,
                "--rdzv-endpoint", f"[{nodes[0]['address6']}]:29411",
                "--local-addr", f"[{node['address6']}]",
                cwd=tmp_path, env=lab.env,
            ))
            for node in nodes
        ]  # fmt: skip
        assert [agent.end() for agent in agents] == [0, 0], [
            agent.err.read_text() for agent in agents
        ]
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (stored["world_size"], stored["weights_sha256"]) == (
        2,
        weights_of_one_process(GATES, *EXACT),
    )
    assert (
        json.loads((tmp_path / "run" / "rendezvous.json").read_text())["host"]
        == nodes[0]["address6"]
    )


def test_a_bug_in_ranks_that_slurm_started_is_one_failure_without_noise(
    lab: TestLab, tmp_path: Path
) -> None:
    command = "srun", "-N2", "--ntasks-per-node=1", "stepladder", "train", GATES
    done = run(*command, cwd=tmp_path, env={**lab.env, "RAISES": "0 3"}, command=())
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: raised at step 3" in done.stderr
    assert "terminate called" not in done.stderr

"""Batch jobs on a real Slurm: however a job is ended, it ends with the weights of one unbroken
process.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from labs import LAB_POLL_INTERVAL_S, TestLab
from pages import documented_keys
from processes import JOBS, audited, refused, run, started, train, wait_until

pytestmark = pytest.mark.ranks

GATES = JOBS / "gates.py"  # twenty steps, at some of which a test holds the job
EXACT = ("--sync", "exact")
SECONDS_FOR_SLURMD = (
    2.5  # it refuses a job that it has ended in the same second, and Slurm then calls it failed
)


class Jobs:
    """Submits jobs in `folder`, and looks at them."""

    def __init__(self, lab: TestLab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder

    def submit(self, *arguments: object, **env: object) -> str:
        """The job's number. env: variables of the user, which Slurm hands on to the job."""
        typed = [f"{name}={value}" for name, value in env.items()]
        done = self.lab.slurm(
            "env", *typed, "stepladder", "submit", "--json", *arguments, cwd=self.folder
        )
        answer = json.loads(done.splitlines()[-1])
        assert answer.keys() == documented_keys("submit")
        return str(answer["job_id"])

    def typed(self, *arguments: object) -> str:
        return self.lab.slurm("stepladder", *arguments, cwd=self.folder)

    def status(self, job: str) -> dict[str, Any]:
        status = json.loads(self.typed("status", job, "--json"))
        assert status.keys() == documented_keys("status") - {"jobs"}
        return status

    def ended(self, job: str, state: str = "COMPLETED") -> dict[str, Any]:
        """Its status, when Slurm will do no more for it."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        self.lab.await_job(job, *over)
        status = self.status(job)
        assert status["state"] == state, self.typed("logs", job)
        return status

    def is_held(self, job: str, gate: Path) -> None:
        """Wait until the job's first rank waits at this gate."""
        wait_until(gate.exists, lambda: self.typed("logs", job))

    def is_requeued(self, job: str, restarts: int) -> None:
        """Wait until Slurm has restarted the job, which takes it some ten seconds."""
        self.quiet_since = time.monotonic()
        wait_until(
            lambda: self.has_restarted(job, restarts),
            lambda: f"{self.lab.job(job)}",
            every=LAB_POLL_INTERVAL_S,
        )

    def has_restarted(self, job: str, restarts: int) -> bool:
        known = self.lab.job(job)
        states = self.lab.slurm("sinfo", "--noheader", "--format=%T")
        if known["JobState"] != "PENDING" or "completing" in states:
            self.quiet_since = time.monotonic()
        elif time.monotonic() - self.quiet_since > SECONDS_FOR_SLURMD:
            command = ("scontrol", "update", f"JobId={job}", "StartTime=now")
            run(
                cwd=self.folder, env=self.lab.env, command=command
            )  # refused where it has started this moment
        return known["JobState"] != "PENDING" and int(known["Restarts"]) == restarts

    def result(self, run_dir: str) -> dict[str, Any]:
        return json.loads((self.folder / run_dir / "result.json").read_text())

    def equals_one_process(self, run_dir: str, *arguments: object) -> None:
        """The bits of the same training on this machine, alone, and an audit without a lost or
        repeated sample.
        """
        assert self.result(run_dir)["weights_sha256"] == weights_of_one_process(*arguments)
        audit = audited(self.folder / run_dir)
        assert (audit["ok"], audit["lost"], audit["repeated"]) == (True, 0, 0)


@cache
def weights_of_one_process(*arguments: object) -> str:
    """Trained once for all tests that ask for the same."""
    with TemporaryDirectory() as folder:
        return train(*arguments, cwd=Path(folder))["weights_sha256"]


@pytest.fixture
def jobs(lab: TestLab, tmp_path: Path) -> Jobs:
    return Jobs(lab, tmp_path)


@pytest.mark.slow
def test_a_job_on_two_nodes_and_a_bug_beside_it(jobs: Jobs) -> None:
    """Both at once; the first has a folder and a name that an unquoted script would run."""
    hostile = "o'clock; touch harmed $(touch harmed) \"#"
    name = "x; touch harmed"
    good = jobs.submit(
        "--nodes", 2, "--name", name, "--", "train", GATES, *EXACT, "--run-dir", hostile
    )
    bad = jobs.submit("--nodes", 2, "--", "train", GATES, "--run-dir", "bad", RAISES="any 7")
    with started("logs", "-f", good, cwd=jobs.folder, env=jobs.lab.env) as following:
        assert following.end() == 0
        shown = following.out.read_text()
    assert "step 20/20" in shown and shown.endswith("stepladder: finished\n")
    status = jobs.ended(good)
    assert (status["name"], status["step"], status["restarts"]) == (name, 20, 0)
    assert [end["reason"] for end in status["ends"]] == ["finished"]
    assert jobs.result(hostile)["world_size"] == 2
    jobs.equals_one_process(hostile, GATES, *EXACT)

    ends = jobs.ended(bad, "FAILED")["ends"]
    assert [(end["reason"], end["requeued"]) for end in ends] == [("bug", False)], ends
    log = jobs.typed("logs", bad)
    assert "RuntimeError: raised at step 7" in log and "Traceback" in log and "not requeued" in log
    assert not list(jobs.folder.rglob("harmed"))


@pytest.mark.slow
def test_signals_requeues_and_the_time_limit_cost_no_step(jobs: Jobs) -> None:
    """Two jobs at once: one is signalled and requeued, while the other waits for its time limit.

    That has a minute more than it needs to come to step 7, which is then taken from it. Slurm's
    warning may come up to a minute before its time."""
    folders = [jobs.folder / name for name in ("limit", "gates")]
    for folder in folders:
        folder.mkdir()
    arguments = ("--", "train", GATES, *EXACT, "--run-dir")
    # Variables that sbatch puts before what a script says, and that may stand in a user's profile.
    of_user = {"SBATCH_NO_REQUEUE": 1, "SBATCH_TIMELIMIT": 1, "SBATCH_SIGNAL": "INT@9"}
    limit = ("--nodes", 2, "--time", 3)
    limited = jobs.submit(*limit, *arguments, "limited", GATES=f"{folders[0]} 7", **of_user)
    job = jobs.submit("--nodes", 2, *arguments, "signalled", GATES=f"{folders[1]} 7 14")
    jobs.is_held(limited, folders[0] / "at-7")
    jobs.lab.slurm("scontrol", "update", f"JobId={limited}", "TimeLimit=2")
    for restarts, command in enumerate((("scancel", "--signal=TERM"), ("scontrol", "requeue")), 1):
        jobs.is_held(job, folders[1] / f"at-{7 * restarts}")
        jobs.lab.slurm(*command, job)
        jobs.is_requeued(job, restarts)
    ends = [(end["restart"], end["reason"], end["step"]) for end in jobs.ended(job)["ends"]]
    expected = [(0, "signal", 7), (1, "requeue", None), (2, "finished", 20)]
    assert ends == expected, "Slurm's own requeue ends the script too, which says nothing then"

    jobs.is_requeued(limited, 1)
    ends = [(end["restart"], end["reason"], end["step"]) for end in jobs.ended(limited)["ends"]]
    assert ends == [(0, "time limit", 7), (1, "finished", 20)]
    assert jobs.result("limited")["world_size"] == 2
    for run_dir in ("signalled", "limited"):
        jobs.equals_one_process(run_dir, GATES, *EXACT)
        assert audited(jobs.folder / run_dir)["superseded"] == 0, (
            "each time the ranks had time to save"
        )


@pytest.mark.slow
def test_a_more_urgent_job_costs_no_step(jobs: Jobs) -> None:
    """Slurm gives the job twenty seconds: it saves, makes room and goes on afterwards."""
    job = jobs.submit(
        "--nodes", 2, "--", "train", GATES, *EXACT, "--run-dir", "run", GATES=f"{jobs.folder} 7"
    )
    jobs.is_held(job, jobs.folder / "at-7")
    flags = "--nodes=4", "--exclusive", "--partition=urgent", "--output=/dev/null"
    urgent = jobs.lab.slurm(
        "sbatch", "--parsable", *flags, "--wrap", "true", cwd=jobs.folder
    ).strip()
    jobs.lab.await_job(urgent, "COMPLETED")
    jobs.is_requeued(job, 1)
    status = jobs.ended(job)
    ends = [(end["reason"], end["requeued"], end["step"]) for end in status["ends"]]
    assert ends == [("preemption", True, 7), ("finished", False, 20)]
    jobs.equals_one_process("run", GATES, *EXACT)
    assert audited(jobs.folder / "run")["superseded"] == 0


@pytest.mark.slow
def test_a_task_per_rank_and_cancel(jobs: Jobs) -> None:
    gates = f"{jobs.folder} 7 14"
    arguments = ("--", "train", GATES, *EXACT, "--run-dir", "run")
    job = jobs.submit("--nodes", 2, "--nproc", 2, "--task-per-rank", *arguments, GATES=gates)
    jobs.is_held(job, jobs.folder / "at-7")
    jobs.lab.slurm("scancel", "--signal=TERM", job)
    jobs.is_requeued(job, 1)
    jobs.is_held(job, jobs.folder / "at-14")
    assert "it continues from its snapshot" in jobs.typed("cancel", job)
    assert jobs.ended(job, "CANCELLED")["restarts"] == 1
    refusal = run("cancel", job, cwd=jobs.folder, env=jobs.lab.env)
    assert refusal.returncode == 2 and "has ended already" in refusal.stderr
    second = jobs.submit("--nodes", 1, "--nproc", 3, *arguments)
    assert jobs.ended(second)["ends"][-1]["reason"] == "finished"
    assert "resumed after step 14" in jobs.typed("logs", second)
    jobs.equals_one_process("run", GATES, *EXACT)


@pytest.mark.slow
def test_mnist_on_two_nodes(jobs: Jobs, mnist_dir: Path) -> None:
    arguments = ("mnist", *EXACT, "--steps", 40, "--device", "cpu", "--data-dir", mnist_dir)
    jobs.ended(jobs.submit("--nodes", 2, "--gpus-per-node", 1, "--", "train", *arguments))
    jobs.equals_one_process("runs/mnist", *arguments)


STOPPABLE = """
import os, pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
restart, rank = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["RANK"]
pathlib.Path(f"up-{rank}-{restart}").write_text(os.environ["WORLD_SIZE"])
while restart == "0":
    time.sleep(0.05)
    if asked:
        sys.exit(75)
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--task-per-rank",)])
def test_a_script_of_one_s_own_is_requeued_if_it_says_so(
    jobs: Jobs, flags: tuple[str, ...]
) -> None:
    (jobs.folder / "my job.py").write_text(STOPPABLE)
    job = jobs.submit("--nodes", 2, *flags, "--", "my job.py")
    ups = [jobs.folder / f"up-{rank}-0" for rank in (0, 1)]
    wait_until(
        lambda: all(up.exists() and up.read_text() == "2" for up in ups),
        lambda: jobs.typed("logs", job),
    )
    jobs.lab.slurm("scancel", "--signal=TERM", job)
    jobs.is_requeued(job, 1)
    ends = [(end["reason"], end["requeued"], end["step"]) for end in jobs.ended(job)["ends"]]
    assert ends == [("signal", True, None), ("finished", False, None)]
    assert (jobs.folder / "up-1-1").exists()


@pytest.mark.slow
def test_a_secret_reaches_the_job_and_no_script(jobs: Jobs) -> None:
    script = (
        "import hashlib, sys; "
        "print([hashlib.sha256(word.encode()).hexdigest()[:8] for word in sys.argv[1:]])"
    )
    (jobs.folder / "script.py").write_text(script)
    secrets = ["to'p $HOME", "https://me:pass@host/x"]
    arguments = "run", "script.py", "--hf-token", secrets[0], secrets[1], f"API_KEY={secrets[0]}"
    for flags in ((), ("--task-per-rank",)):
        job = jobs.submit(*flags, "--", *arguments)
        jobs.ended(job)
        hashes = [hashlib.sha256(str(word).encode()).hexdigest()[:8] for word in arguments[2:]]
        assert str(hashes) in jobs.typed("logs", job)
        script_value = jobs.lab.slurm("scontrol", "write", "batch_script", job, "-")
        assert (
            "script.py" in script_value
            and "to'p" not in script_value
            and "me:pass" not in script_value
        )


@pytest.mark.slow
def test_a_tutorial_s_script_on_two_nodes(jobs: Jobs) -> None:
    """Unmodified: plain init_process_group, LOCAL_RANK, a line per epoch and process. Its run can
    be seen.
    """
    script = "run", "--run-dir", "its", JOBS / "tutorial.py", 2, 1, "--batch_size", 128
    job = jobs.submit("--nodes", 2, "--nproc", 2, "--", *script)
    jobs.ended(job)
    shown = jobs.typed("watch", job).splitlines()
    assert f"job {job} tutorial: completed" in shown[0]
    assert shown[1] == "tutorial.py: 8 optimizer steps, finished, 4 processes, 1 start"
    assert shown == [*shown[:2], *jobs.typed("watch", "its").splitlines()[1:], shown[-1]]
    jobs.typed("report", "its", "-o", "its.html")
    assert "tutorial.py in its" in (jobs.folder / "its.html").read_text()
    log = jobs.typed("logs", job)
    for rank in range(4):
        assert f"[GPU{rank}] Epoch 1 | Batchsize: 128 | Steps: 4" in log


@pytest.mark.slow
def test_a_job_without_a_file_for_its_output_has_no_logs(jobs: Jobs) -> None:
    job = jobs.lab.slurm("srun", "printenv", "SLURM_JOB_ID").strip()
    refused(run("logs", job, cwd=jobs.folder, env=jobs.lab.env), f"job {job} has no output file")


@pytest.mark.slow
def test_a_container_s_program_that_the_node_lacks_is_explained(jobs: Jobs) -> None:
    job = jobs.submit("--container", "singularity exec a.sif", "--", "train", "mlp")
    jobs.ended(job, "FAILED")
    shown = jobs.typed("status", job)
    assert "execve(): singularity: No such file or directory\n  cause: The node has no" in shown


@pytest.mark.slow
def test_a_run_directory_that_another_job_has_is_said(jobs: Jobs) -> None:
    arguments = ("--sbatch-arg=--hold", "--", "train", "mlp", "--run-dir")
    first = jobs.submit(*arguments, "run")
    numbers = [first]
    warning = f"warning: run is also the run directory of job {first}: they take turns\n"
    for name, message in (("run", warning), ("b", "")):
        done = run("submit", "--json", *arguments, name, cwd=jobs.folder, env=jobs.lab.env)
        assert done.stderr == message
        numbers.append(str(json.loads(done.stdout)["job_id"]))
    jobs.lab.slurm("scancel", *numbers)

"""Looking at batch jobs of a real Slurm: `watch JOB`, and why one hangs, of a job and of an
unmodified script.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_submit_lab import EXACT, GATES, Jobs

from labs import TestLab
from processes import JOBS, refused, run, started, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture
def jobs(lab: TestLab, tmp_path: Path) -> Jobs:
    return Jobs(lab, tmp_path)


def test_a_job_is_watched_until_it_is_over(jobs: Jobs) -> None:
    job = jobs.submit(
        "--nodes", 2, "--", "train", GATES, *EXACT, "--run-dir", "run", GATES=f"{jobs.folder} 15"
    )
    with started("watch", job, cwd=jobs.folder, env=jobs.lab.env) as watching:
        jobs.is_held(job, jobs.folder / "at-15")
        first = jobs.typed("watch", job, "--once").splitlines()
        assert re.match(rf"job {job} gates: running on n", first[0]) and first[1].startswith(
            "gates: "
        ), first
        (jobs.folder / "open-15").touch()
        assert watching.end() == 0
        shown = watching.out.read_text()
    assert f"job {job} gates: completed" in shown and "gates: 20 of 20 steps, finished" in shown


def test_a_script_s_job_shows_its_last_line(jobs: Jobs) -> None:
    (jobs.folder / "script.py").write_text("print('epoch 1')\nprint('accuracy 0.9')\n")
    job = jobs.submit("--nodes", 1, "--", "script.py")
    jobs.ended(job)
    first, *last = jobs.typed("watch", job).splitlines()
    assert re.match(rf"job {job} \S+: completed", first)
    assert last, "what was printed last"
    refused(run("watch", 999999, cwd=jobs.folder, env=jobs.lab.env), "there is no job 999999")


HANGS = {
    "train": (
        "hangs.py",
        "sleep",
        r"rank 1 \(pid \d+ on n\d\) has not reached .*: it is in validate\(\), hangs.py:\d+",
    ),
    "run": (
        "hangs_script.py",
        "lock",
        r"rank 1 \(pid \d+ on n\d\): it is in deadlock\(\), hangs_script.py:\d+",
    ),
}
WAITED = "stepladder: other ranks have waited"


@pytest.mark.parametrize("command", HANGS)
def test_a_hang_over_two_nodes_is_named_once(command: str, jobs: Jobs) -> None:
    script, kind, named = HANGS[command]
    job = jobs.submit(
        "--nodes", 2, "--", command, "--explain-after", 3, JOBS / script, HANG=f"{kind} 3"
    )
    log = jobs.folder / f"slurm-{job}.out"

    def read_log() -> str:
        return log.read_text() if log.exists() else ""

    pattern = re.compile(rf"{WAITED} for \d+ s: {named}.*; the others wait")
    wait_until(lambda: pattern.search(read_log()), read_log)
    assert (
        len(pattern.findall(read_log())) == 1
    )  # the first rank may have waited as long for a slow start, and said so


def test_a_hang_of_ranks_without_a_launcher_is_named_once(lab: TestLab, tmp_path: Path) -> None:
    script = "stepladder", "run", "--explain-after", 3, JOBS / "keeps_waiting.py", "busy"
    named = (
        r"rank 1 \(pid \d+ on n\d\) in step 10: it is in compute_metric\(\), keeps_waiting.py:\d+"
    )
    command = "srun", "-N2", "--ntasks-per-node=1", *script
    with started(*command, cwd=tmp_path, env=lab.env, command=()) as running:
        pattern = re.compile(rf"{WAITED} for \d+ s: {named}.*; the others wait")
        wait_until(lambda: pattern.search(running.err.read_text()), running.err.read_text)
        assert len(pattern.findall(running.err.read_text())) == 1

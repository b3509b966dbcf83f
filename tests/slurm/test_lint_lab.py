"""What `submit --lint` says of a batch script is what a real Slurm does with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labs import TestLab
from processes import JOBS
from stepladder.tools.lint.lint import lint_script

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

HEADER = """#!/bin/bash
#SBATCH --time={minutes}
#SBATCH --requeue
#SBATCH --ntasks-per-node=1
#SBATCH --output={output}
#SBATCH --signal={signal}
#SBATCH --nodes={nodes}
"""
SLEEP = """\
import signal, sys, time

def stop(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit()

if len(sys.argv) == 1:
    signal.signal(signal.SIGUSR1, stop)
    signal.signal(signal.SIGTERM, stop)
for _ in range(70):
    time.sleep(1)
print("no signal", flush=True)
"""
PLAIN = """\
import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1, 1)).backward()
optimizer.step()
print("trained")
"""
ABOUT = f"{JOBS / 'script.py'} about"
# For each name: the signal, the nodes, the script, its findings, texts of the output, texts that
# are not in it.
JOBS_BY_NAME: dict[str, tuple[str, int, str, list[str], list[str], list[str]]] = {
    "run alone": (
        "TERM@60", 2, f"stepladder run --nproc 2 {ABOUT}", [], ['"WORLD_SIZE": "4"'], ["error"],
    ),
    "agents join": (
        "TERM@60", 2, f"srun stepladder run --nproc 2 {ABOUT}", [], ['"WORLD_SIZE": "4"'], ["error"],
    ),
    "nodes without an address": (
        "TERM@60", 2, f'srun stepladder run --nodes "$SLURM_NNODES" {ABOUT}', [],
        ['"WORLD_SIZE": "2"'], ["error"],
    ),
    "tasks and agents": (
        "TERM@60", 1, f"#SBATCH --ntasks-per-node=2\nsrun stepladder run --nproc 3 {ABOUT}",
        ["tasks and agents"], ["none of which knows the others"], ["WORLD_SIZE"],
    ),
    "ranks and tasks": (
        "TERM@60", 2, "srun stepladder train mlp --nproc 2", ["ranks and tasks"],
        ["error: --nproc 2 inside rank"], [],
    ),
    "unseen signal": ("TERM@60", 1, "python sleep.py", ["unseen signal"], ["no signal"], ["got"]),
    "no trap": ("B:USR1@60", 1, "srun python sleep.py", ["no trap"], [], ["no signal", "USR1"]),
    "late trap": (
        "B:USR1@60", 1, "trap 'echo trapped' USR1\nsrun python sleep.py\necho over", ["late trap"],
        ["no signal\ntrapped\nover"], ["got"],
    ),
    "exec": ("B:USR1@60", 1, "exec srun python sleep.py", [], ["got SIGUSR1"], ["no signal"]),
    "a signal in time": ("TERM@60", 1, "srun python sleep.py", [], ["got SIGTERM"], ["no signal"]),
    "deadly signal": (
        "USR1@60", 1, "srun torchrun --standalone sleep.py", ["deadly signal"],
        ["User defined signal 1"], ["no signal"],
    ),
}  # fmt: skip


def test_each_finding_is_what_slurm_does(lab: TestLab, tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text(SLEEP)
    jobs = {}
    for name, (signal, nodes, text, rules, *_) in JOBS_BY_NAME.items():
        script = tmp_path / f"{name.replace(' ', '-')}.sbatch"
        header = HEADER.format(
            # The signal comes a minute before the end, and is not for jobs that work.
            minutes=2 if "sleep.py" in text else 10,
            output=script.with_suffix(".out"),
            signal=signal,
            nodes=nodes,
        )
        script.write_text(header + text + "\n")
        assert [finding.rule for finding in lint_script(script)] == rules, name
        jobs[name] = lab.slurm("sbatch", "--parsable", script, cwd=tmp_path).strip()
    for name, (_, _, _, _, shown, not_shown) in JOBS_BY_NAME.items():
        job = lab.await_job(jobs[name], "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        output = Path(job["StdOut"]).read_text()
        for text in shown:
            assert text in output, f"{name}: {output}"
        for text in not_shown:
            assert text not in output, f"{name}: {output}"


def test_a_job_without_its_folder_ends_without_a_word(lab: TestLab, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(
        HEADER.format(minutes=2, output="gone/out", signal="TERM@60", nodes=1) + "srun true\n"
    )
    assert "no folder" in [finding.rule for finding in lint_script(script)]
    job = lab.slurm("sbatch", "--parsable", script, cwd=tmp_path).strip()
    assert lab.await_job(job, "FAILED")["Reason"] == "JobLaunchFailure"


def test_a_script_of_one_process_is_not_trained_on_each_node(lab: TestLab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    jobs = {}
    for name, command in {
        "one": ("train.py",),
        "own": ("run", "--independent", "train.py"),
    }.items():
        flags = "--nodes", 2, "--output", f"{name}.out", "--json"
        line = lab.slurm("stepladder", "submit", *flags, "--", *command, cwd=tmp_path)
        jobs[name] = str(json.loads(line.splitlines()[-1])["job_id"])
    job = lab.await_job(jobs["one"], "FAILED", "COMPLETED")
    output = (tmp_path / "one.out").read_text()
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0"), output
    assert "2 times the same" in output
    assert lab.await_job(jobs["own"], "FAILED", "COMPLETED")["JobState"] == "COMPLETED"
    assert (tmp_path / "own.out").read_text().count("trained") == 2

"""A more urgent job takes the nodes of scripts, on a real Slurm: docs/preemption.md."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_submit_lab import Jobs

from labs import TestLab
from pages import EXAMPLES
from processes import audited, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# Each script, the package that it needs, and how it is submitted. None of them would end by itself.
TWO_NODES = ("--nodes", 2, "--")
SCRIPTS = {
    "loader_ddp": ("", (*TWO_NODES, "loader_ddp.py")),
    "loader_accelerate": ("accelerate", (*TWO_NODES, "loader_accelerate.py")),
    "loader_lightning": ("lightning", ("--nproc", 2, "--", "loader_lightning.py", "--devices", 2)),
    "loader_trainer": ("transformers", (*TWO_NODES, "loader_trainer.py")),
}
SPARE_EPOCHS = 10_000

# It saves after each epoch, resumes from that, and has no handler.
PLAIN = """
import json, pathlib, time
path = pathlib.Path("ckpt/epoch.json")
path.parent.mkdir(exist_ok=True)
epoch = json.loads(path.read_text()) if path.exists() else 0
print("begins at epoch", epoch, flush=True)
while True:
    time.sleep(0.1)
    epoch += 1
    new = path.with_suffix(".new")
    new.write_text(json.dumps(epoch))
    new.replace(path)
"""


@pytest.fixture
def jobs(lab: TestLab, tmp_path: Path) -> Jobs:
    return Jobs(lab, tmp_path)


def preempt(jobs: Jobs, *running: str) -> None:
    """Let a more urgent job take all nodes, and Slurm start the jobs again afterwards."""
    flags = "--nodes=4", "--exclusive", "--partition=urgent", "--output=/dev/null"
    urgent = jobs.lab.slurm("sbatch", "--parsable", *flags, "--wrap", "true", cwd=jobs.folder)
    jobs.lab.await_job(urgent.strip(), "COMPLETED")
    for job in running:
        jobs.is_requeued(job, 1)


def first_end(jobs: Jobs, job: str) -> tuple[str, bool, int]:
    end = jobs.status(job)["ends"][0]
    return end["reason"], end["requeued"], end["code"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_preempted_script_loses_no_step(jobs: Jobs, name: str) -> None:
    package, submitted = SCRIPTS[name]
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for file in (f"{name}.py", "plain.py", "lightning_before.py", "trainer_before.py"):
        shutil.copy(EXAMPLES / file, jobs.folder)
    job = jobs.submit(*submitted, "--epochs", SPARE_EPOCHS)
    ledger = jobs.folder / "runs" / name / "ledger"
    wait_until(lambda: list(ledger.glob("attempt-0001*")), lambda: jobs.typed("logs", job))
    preempt(jobs, job)
    wait_until(lambda: list(ledger.glob("attempt-0002*")), lambda: jobs.typed("logs", job))
    assert first_end(jobs, job) == ("preemption", True, 75), jobs.typed("logs", job)
    assert jobs.status(job)["ends"][0]["step"] is None  # a Loader's run has no snapshots
    assert "requeued 1 time: preemption 1" in jobs.typed("status", job)
    jobs.typed("cancel", job)
    jobs.ended(job, "CANCELLED")
    result = audited(jobs.folder / "runs" / name)
    assert (result["attempts"], result["superseded"], result["lost"]) == (2, 0, 0), result


def test_a_script_without_a_handler_goes_on_from_its_file(jobs: Jobs) -> None:
    (jobs.folder / "plain.py").write_text(PLAIN)
    (jobs.folder / "nothing.py").write_text("import time\nopen('up', 'w')\ntime.sleep(1000)")
    job = jobs.submit("--resume-from", "ckpt/*.json", "--", "plain.py")
    other = jobs.submit("--resume-from", "none/*.json", "--", "nothing.py")
    for file in (jobs.folder / "ckpt" / "epoch.json", jobs.folder / "up"):
        wait_until(file.exists, lambda: jobs.typed("logs", job) + jobs.typed("logs", other))
    preempt(jobs, job)
    assert first_end(jobs, job)[:2] == ("preemption", True), jobs.typed("logs", job)
    wait_until(lambda: jobs.typed("logs", job).count("begins at epoch") == 2)
    begun = [line for line in jobs.typed("logs", job).splitlines() if "begins at epoch" in line]
    assert begun[0] == "begins at epoch 0" != begun[1]
    ends = jobs.ended(other, "FAILED")["ends"]
    assert [(end["reason"], end["requeued"]) for end in ends] == [("preemption", False)]
    assert "no file to resume from is known. HINT" in jobs.typed("status", other)
    jobs.typed("cancel", job)

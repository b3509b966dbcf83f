"""A job file where a script is expected, and a Config whose batch would be ignored: refused, with
what to type.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import refused, run
from stepladder.core.errors import InputError
from stepladder.train.job_source import read_config_fields, validate_is_script

JOB = """
import torch
from dataclasses import dataclass
from stepladder import Job, Settings, Trainer

torch.set_num_threads(1)
TABLE = torch.ones(3)

@dataclass
class Config:
    lr: float = 0.1

def build(config):
    return Job(...)

def main():
    Trainer(build(Config()), Settings()).fit()
"""
TRAINS = {
    "a call of its own": "main()",
    "a main": "if __name__ == '__main__':\n    main()",
    "a fit": "Trainer(Job(...), Settings()).fit()",
    "a loop": "for _ in range(3):\n    pass",
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("run",), "HINT: stepladder train job.py"),
        (("check",), "HINT: stepladder train job.py"),
        (("submit", "--dry-run", "--"), "HINT: stepladder submit -- train job.py"),
        (
            ("submit", "--dry-run", "--", "run", "--max-restarts", "2"),
            "HINT: stepladder submit -- train job.py",
        ),
    ],
    ids=" ".join,
)
def test_a_job_is_no_script(command: tuple[str, ...], hint: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    refused(run(*command, "job.py", cwd=tmp_path), "job.py is a job: it has build(config)", hint)


@pytest.mark.parametrize("end", TRAINS)
def test_a_job_that_trains_by_itself_is_a_script_too(end: str, tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    with pytest.raises(InputError):
        validate_is_script(path)
    path.write_text(f"{JOB}\n{TRAINS[end]}\n")
    validate_is_script(path)


@pytest.mark.parametrize(
    "text", ["def build():\n    pass\n", "class Config:\n    pass\n", "def build(:\n", ""]
)
def test_what_is_no_job_is_left_to_python(text: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(text)
    validate_is_script(tmp_path / "script.py")


@pytest.mark.parametrize("name", ["batch_size", "train_batch_size"])
def test_a_batch_that_would_be_ignored_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(JOB.replace("lr: float = 0.1", f"{name}: int = 32"))
    with pytest.raises(InputError, match=f"Config.{name} would not be the run's batch"):
        read_config_fields(path)
    path.write_text(JOB.replace("lr: float = 0.1", f"{name}: int = 32\n    global_batch: int = 64"))
    assert [field.name for field in read_config_fields(path)] == [name, "global_batch"]


@pytest.mark.ranks
def test_a_flag_of_other_programs_leads_to_the_global_batch(tmp_path: Path) -> None:
    done = run("train", "mlp", "--batch-size", 32, cwd=tmp_path)
    refused(done, "No such option '--batch-size'", "did you mean --global-batch?")

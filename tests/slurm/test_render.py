"""Batch scripts: the published templates, names that would be commands, margins."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from pages import REPOSITORY
from processes import run
from stepladder.core.errors import InputError
from stepladder.rank.timing import make_timing_line
from stepladder.slurm.batch_job import DEFAULT_MARGIN_S, BatchJob, measure_margin
from stepladder.slurm.batch_script import render_batch_script
from stepladder.tools.lint.lint import lint_script

TEMPLATES = sorted((REPOSITORY / "slurm").glob("*.sbatch"))
JOB = BatchJob(
    ("train", "mnist", "--sync", "exact"), "runs/mnist", "mnist", nodes=(2, 2), nproc="2"
)
HOSTILE = [
    "a 'b' \"c\"",
    "x; touch harmed",
    "$(touch harmed)",
    "`touch harmed`",
    "back\\slash # no comment",
    "-n",
]


def options(script: str) -> list[str]:
    """The words of all #SBATCH lines, read as a shell would."""
    return [
        w
        for line in script.splitlines()
        if line.startswith("#SBATCH ")
        for w in shlex.split(line[8:])
    ]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_are_what_submit_renders(template: Path, tmp_path: Path) -> None:
    made_by = re.search(r"^# Made by: stepladder (.*)$", template.read_text(), re.MULTILINE)
    assert made_by is not None
    env = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    rendered = run(*shlex.split(made_by.group(1)), cwd=tmp_path, env=env).stdout
    assert template.read_text() == rendered, "bash slurm/regenerate.sh accepts what is rendered now"


def test_there_is_a_template_for_each_kind_of_job() -> None:
    result = [sorted(options(path.read_text())) for path in TEMPLATES]
    sizes = {
        tuple(w for w in arguments if re.match("--(nodes|gpus-per-node)=", w))
        for arguments in result
    }
    assert sizes == {
        ("--gpus-per-node=4", "--nodes=1"), ("--gpus-per-node=2", "--nodes=2"),
        ("--gpus-per-node=1", "--nodes=4"), ("--nodes=2",),
    }  # fmt: skip
    assert sum("apptainer exec" in path.read_text() for path in TEMPLATES) == 1


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_are_valid_and_hold_no_mistake(template: Path) -> None:
    subprocess.run(["bash", "-n", template], check=True)
    assert lint_script(template) == []


@pytest.mark.parametrize("name", HOSTILE)
def test_names_and_paths_are_words_and_never_commands(name: str) -> None:
    """A newline in a path is harmless too; in an #SBATCH line there is no place for it."""
    path = f"{name}\n; touch harmed"
    job = replace(
        JOB, name=name, output=f"{name}.out", job_dir=path, command=("train", path), made_by=path
    )
    script = render_batch_script(job)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    before, _, body = script.partition("\n\n")
    assert "touch harmed" not in [line.strip("; ") for line in before.splitlines()]
    escaped = [
        word.replace("\\\\", "\\") for word in options(before)
    ]  # Slurm's own reading of quoted backslashes
    assert f"--job-name={name}" in escaped and f"--output={name}.out" in escaped
    assert shlex.quote(path) in body and f"--job-dir {shlex.quote(path)}" in body


TEXTS = [field.name for field in fields(JOB) if isinstance(getattr(JOB, field.name), str)]


@pytest.mark.parametrize("field", sorted({*TEXTS} - {"job_dir", "made_by"}))
def test_a_line_break_in_an_sbatch_line_is_refused(field: str) -> None:
    assert {"gpus_per_node", "container", "mem", "constraint", "reservation", "qos"} <= {*TEXTS}
    for end in "\n\r\v\x85\u2028":
        with pytest.raises(
            InputError, match=f"--{field.replace('_', '-')} 'a.*b' holds a line break"
        ):
            replace(JOB, **{field: f"a{end}b"})
    with pytest.raises(InputError, match=r"--sbatch-arg .* holds a line break"):
        replace(JOB, sbatch_args=("--nice=1\n#SBATCH --uid=0",))


def test_the_number_of_nodes_stands_once() -> None:
    script = render_batch_script(replace(JOB, nodes=(7, 7)))
    assert re.findall(r"\b7\b", script) == ["7"]


def test_two_jobs_of_one_script_do_not_share_their_word() -> None:
    script = render_batch_script(replace(JOB, command=("run", "my job.py"), job_dir="runs/my job"))
    assert "END_FILE=$SLURM_JOB_ID:'runs/my job'/ended-$SLURM_JOB_ID.json\n" in script
    assert "END_FILE=$SLURM_JOB_ID:runs/mnist/ended.json\n" in render_batch_script(JOB)


def test_an_elastic_job_outlives_a_lost_node() -> None:
    script = render_batch_script(replace(JOB, nodes=(2, 4)))
    assert {"--nodes=2-4", "--no-kill"} <= set(options(script))
    assert (
        "--no-kill --kill-on-bad-exit=0" in script and '--nodes 2:"$SLURM_JOB_NUM_NODES"' in script
    )
    assert "--ntasks-per-node" not in " ".join(options(script)), (
        "with it Slurm gives the least number of nodes"
    )


def test_a_job_that_joins_another_is_one_node_of_its_launch() -> None:
    script = render_batch_script(replace(JOB, nodes=(2, 4), join="7"))
    assert {"--nodes=1", "--ntasks-per-node=1", "--no-requeue"} <= set(options(script))
    assert "env --unset SLURM_JOB_ID stepladder train --nodes 2:4 --nproc 2 \\\n" in script
    for word in ("--rdzv-endpoint", "scontrol requeue", "STEPLADDER_END"):
        assert word not in script, "it is the other one's launch"
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    for change in (
        {"join": "7;x"},
        {"join": ""},
        {"nodes": (2, 2)},
        {"command": ("run", "train.py")},
    ):
        with pytest.raises(InputError, match="--join"):
            replace(JOB, **{"nodes": (2, 4), "join": "7", **change})


def test_a_task_per_rank() -> None:
    script = render_batch_script(replace(JOB, per_rank=True))
    assert "--ntasks-per-node=2" in options(script)
    assert "stepladder train mnist --sync exact\n" in script and "--rdzv-endpoint" not in script
    with pytest.raises(InputError, match="--task-per-rank"):
        replace(JOB, per_rank=True, nodes=(1, 2))


@pytest.mark.parametrize("per_rank", [False, True])
def test_the_port_of_a_script_is_another_one_at_each_start(per_rank: bool) -> None:
    """One that follows from the job's number can be waited for by somebody else."""
    script = render_batch_script(replace(JOB, command=("run", "my_job.py"), per_rank=per_rank))
    (expression,) = re.findall(
        r"endpoint=\$address:(\S+(?: .*)?)$|MASTER_PORT=\"(.*?)\"", script, re.MULTILINE
    )
    line = f"for _ in 1 2 3 4 5; do echo {''.join(expression)}; done"
    env = {**os.environ, "SLURM_JOB_ID": "7"}
    ports = subprocess.run(
        ["bash", "-c", line], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert len(set(map(int, ports.split()))) > 1


def test_options_of_the_site_come_before_what_is_started() -> None:
    job = replace(
        JOB,
        partition="gpu",
        account="physics",
        qos="high",
        constraint="a100&nvlink",
        reservation="course",
        mem="64G",
        gpus_per_node="a100:2",
        sbatch_args=("--nice=100",),
        setup=("module load cuda",),
        container="apptainer exec x.sif",
    )
    script = render_batch_script(job)
    expected = {
        "--partition=gpu", "--account=physics", "--qos=high",
        "--constraint=a100&nvlink", "--reservation=course",
        "--mem=64G", "--gpus-per-node=a100:2", "--nice=100", "--requeue", "--open-mode=append",
    }  # fmt: skip
    assert expected <= set(options(script))
    assert script.index("module load cuda\n") < script.index("srun ")
    assert script.count("apptainer exec x.sif stepladder") == 2, (
        "also what asks for the requeue's reason"
    )
    assert "apptainer exec x.sif scontrol" not in script, "an image has no Slurm"


def test_the_margin_is_measured_where_there_was_a_run(tmp_path: Path) -> None:
    assert measure_margin(tmp_path) == DEFAULT_MARGIN_S
    assert measure_margin(tmp_path, "2") == 30, (
        "Slurm warns up to a minute early: no more than a quarter"
    )
    first = {"data": 10.0, "compute": 180.0, "wait": 0, "optimizer": 10.0, "snapshot": 0}
    second = {"data": 0, "compute": 90.0, "wait": 0, "optimizer": 0, "snapshot": 45.5}
    of_rank = {"step": 10, "steps": 10, "rank": 0}  # as it was written before version 0.2
    rows = [{**of_rank, **first}, {**of_rank, **second}]
    (tmp_path / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert measure_margin(tmp_path) == 30 + 2 * 20 + 2 * 45.5
    seconds = np.array([list(first.values()), list(second.values())])
    (tmp_path / "timing.jsonl").write_text(json.dumps(make_timing_line(10, 10, seconds)) + "\n")
    assert measure_margin(tmp_path) == 30 + 2 * 20 + 2 * 45.5
    (tmp_path / "timing.jsonl").write_text('{"step": 1')
    assert measure_margin(tmp_path) == DEFAULT_MARGIN_S

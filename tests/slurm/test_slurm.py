"""What Slurm's commands say, read: node lists, times, partitions, fields."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from labs import TestLab
from stepladder.core.errors import InputError
from stepladder.launcher.batch.jobs import JobNote
from stepladder.slurm.batch_job import make_batch_job, parse_time_limit
from stepladder.slurm.client import (
    SYSTEM_CONF,
    SlurmBusy,
    parse_field,
    run_slurm,
    show_job,
    slurm_environment,
)
from stepladder.slurm.partitions import (
    describe_cluster_defaults,
    expand_node_list,
    parse_partitions,
)
from stepladder.slurm.site_defaults import SiteDefaults
from stepladder.slurm.submitted_jobs import add_record, read_job_records

LISTS = {
    "gpu[7],gpu[9-10]": ["gpu7", "gpu9", "gpu10"],
    "rack[1-2]n[03-04]": ["rack1n03", "rack1n04", "rack2n03", "rack2n04"],
    "a,b[1,3-4],c-1": ["a", "b1", "b3", "b4", "c-1"],
    "node[008-011]": ["node008", "node009", "node010", "node011"],
}


@pytest.mark.ranks
@pytest.mark.parametrize("text", LISTS)
def test_node_lists(text: str, lab: TestLab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in lab.env.items():
        monkeypatch.setenv(name, value)
    assert expand_node_list(text) == LISTS[text]


@pytest.mark.parametrize("text", ["", "a,,b", "gpu[1-", "gpu[a-b]", "a b", "gpu[1--3]", "gpu]1["])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="node list"):
        expand_node_list(text)


def test_times() -> None:
    requested = ["30", "1:30", "2:00:00", "1-0", "1-12:30", "2-00:00:01", "infinite"]
    assert [parse_time_limit(text) for text in requested] == [
        1800,
        90,
        7200,
        86400,
        131400,
        172801,
        math.inf,
    ]
    for text in ("", "soon", "1:2:3:4", "-5"):
        with pytest.raises(InputError, match="--time"):
            parse_time_limit(text)


def test_partitions() -> None:
    shown = (
        "gpu*|up|1-00:00:00|1-4|3|16|gpu:a100:4(S:0-1)|1:00:00\n"
        "gpu*|up|1-00:00:00|1-4|1|32+|gpu:v100:2,shard:8|1:00:00\n"
        "long|drain|infinite|1-infinite|2|8|(null)|n/a\n"
    )
    result = parse_partitions(shown)
    gpu = result["gpu"]
    long = result["long"]
    assert (gpu.is_default, gpu.is_up, gpu.time_limit_s, gpu.max_nodes, gpu.count) == (
        True,
        True,
        86400,
        4,
        4,
    )
    assert (long.is_default, long.is_up, long.time_limit_s, long.max_nodes, long.count) == (
        False,
        False,
        math.inf,
        math.inf,
        2,
    )
    a100, v100 = gpu.nodes
    fitting = [
        a100.has_gpus("4"),
        a100.has_gpus("a100:3"),
        a100.has_gpus("5"),
        v100.has_gpus("a100:1"),
    ]
    assert fitting == [True, True, False, False]
    assert not long.nodes[0].has_gpus("1")
    assert (gpu.default_time, long.default_time) == ("1:00:00", "infinite")


def test_limits_that_no_flag_gave_are_told() -> None:
    cluster = parse_partitions(
        "gpu*|up|1-00:00:00|1-4|3|16|gpu:a100:4|1:00:00\nlong|up|infinite|1-4|2|8|(null)|n/a\n"
    )
    flags = {"gpus_per_node": "a100:4", "nodes": "1"}
    job = make_batch_job(
        flags,
        SiteDefaults(),
        command=("train", "mlp"),
        job_dir="runs/mlp",
        name="mlp",
        nodes=(1, 1),
    )
    assert describe_cluster_defaults(job, cluster, flags) == [
        "no --time: partition gpu ends the job after 1:00:00, its default",
        "no --cpus-per-task: 4 CPU cores per node, 1 for each GPU and its data loading;"
        " nodes have 16",
    ]
    on_long = replace(job, partition="long", gpus_per_node="")
    assert describe_cluster_defaults(on_long, cluster, {}) == []
    requested = replace(job, time="30", cpus_per_task=16)
    assert describe_cluster_defaults(requested, cluster, {"cpus_per_task"}) == []


BUSY = """#!/bin/sh
[ -e asked ] && exec echo "JobId=7 JobName=x"
touch asked
echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2
exit 1
"""


def test_a_busy_controller_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is not over, and forgotten, because Slurm had no time."""
    (tmp_path / "scontrol").write_text(BUSY)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SlurmBusy, match="has not answered in time"):
        run_slurm("scontrol")
    (tmp_path / "asked").unlink()
    assert show_job("7") == "JobId=7 JobName=x\n"


def test_a_job_cannot_name_itself_into_another_field() -> None:
    shown = (
        "JobId=7 JobName=x JobState=FAILED EndTime=never\n   UserId=root(0)\n"
        "   JobState=RUNNING Reason=None\n"
        "   StartTime=2026-01-01T00:00:00 EndTime=2026-01-02T00:00:00 Deadline=N/A\n"
        "   WorkDir=/a b/JobState=x\n   StdOut=/a b/slurm-7.out\n"
    )
    expected = {
        "JobState": "RUNNING", "Reason": "", "EndTime": "2026-01-02T00:00:00", "Deadline": "",
        "StdOut": "/a b/slurm-7.out", "WorkDir": "/a b/JobState=x", "Restarts": "",
    }  # fmt: skip
    assert {name: parse_field(shown, name) for name in expected} == expected


@pytest.mark.skipif(SYSTEM_CONF.exists(), reason=f"this machine has {SYSTEM_CONF}")
def test_the_lab_is_used_where_there_is_no_other_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert slurm_environment() == {}
    conf = tmp_path / "stepladder" / "lab" / "slurm.conf"
    conf.parent.mkdir(parents=True)
    conf.touch()
    assert slurm_environment() == {"SLURM_CONF": str(conf)}
    monkeypatch.setenv("SLURM_CONF", "/own/slurm.conf")
    assert slurm_environment() == {}


@pytest.mark.parametrize(
    "text", ["[]", '{"job": "7"}', '{"job": "7", "name": 3, "output": [], "job_dir": {}}', "\0"]
)
def test_a_damaged_note_of_a_job_is_left_out(text: str, tmp_path: Path) -> None:
    """And half a one, as a kill leaves it, takes none of the next along."""
    sound = {"job": "7", "name": "x", "output": "", "job_dir": "/r"}
    path = tmp_path / "new" / "jobs.jsonl"
    add_record(path, sound)
    with path.open("a") as file:
        file.write(text + '\n{"job": "7", "na')
    add_record(path, sound)
    assert read_job_records(path, "7", JobNote) == [sound, sound]

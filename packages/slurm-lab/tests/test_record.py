"""lab.json says what `slurm-lab down` ends and removes, so it must be a record of this program."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab_commands import expect_refusal, run
from slurm_lab import Lab, Layout
from slurm_lab.machine import Daemon

ROOT = os.geteuid() == 0


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """The record of a plain lab that was up before the machine was started again."""
    folder = tmp_path / "slurm-lab" / "lab"
    folder.mkdir(parents=True)
    lab_of_layout = Lab(Layout(folder, 1, 1, 0, 100, True, 0, (1, 2), "here", "me"))
    lab_of_layout.save()
    return lab_of_layout


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def down(lab: Lab) -> subprocess.CompletedProcess[str]:
    return run("down", state=lab.layout.folder.parents[1])


def change(lab: Lab, edit: Callable[[dict[str, Any]], object]) -> None:
    file = lab.layout.folder / "lab.json"
    record = json.loads(file.read_text())
    edit(record)
    file.write_text(json.dumps(record))


def test_a_lab_whose_processes_are_gone_goes_down(lab: Lab, tmp_path: Path) -> None:
    assert down(lab).returncode == 0
    assert not list(tmp_path.iterdir())[1:] and not (tmp_path / "slurm-lab").exists()


def test_no_other_folder_is_removed(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    change(lab, lambda record: record["layout"].update(folder=str(tmp_path / "mine")))
    expect_refusal(down(lab), "lab.json cannot be used", f"it is of a lab in {tmp_path / 'mine'}")
    assert (tmp_path / "mine").exists() and lab.layout.folder.exists()


@pytest.mark.parametrize("name", ["munged", "slurmctld", "n1", "n9"])
def test_no_process_is_killed_but_a_daemon_of_the_lab(
    name: str, lab: Lab, stranger: subprocess.Popen[bytes]
) -> None:
    lab.daemons[name] = Daemon.from_pid(stranger.pid)
    lab.save()
    assert down(lab).returncode == 0
    assert stranger.poll() is None
    assert not lab.layout.folder.exists()


def test_a_lab_that_is_coming_up_is_left_alone(lab: Lab, stranger: subprocess.Popen[bytes]) -> None:
    lab.daemons["up"] = Daemon.from_pid(stranger.pid)
    lab.save()
    expect_refusal(down(lab), f"process {stranger.pid} is starting this lab")
    assert stranger.poll() is None and lab.layout.folder.exists()


def test_a_daemon_of_the_lab_is_killed(lab: Lab, tmp_path: Path) -> None:
    """A daemon is killed even if nothing but the record of the lab is left."""
    (tmp_path / "munged").symlink_to("/bin/sleep")
    with subprocess.Popen(
        [tmp_path / "munged", "1000"], env={"SLURM_CONF": str(lab.layout.conf)}
    ) as daemon:
        lab.daemons["munged"] = Daemon.from_pid(daemon.pid)
        lab.save()
        assert down(lab).returncode == 0
        assert daemon.wait() == -9


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "layout is missing": lambda record: record.pop("layout"),
    "daemons is [], and not a table": lambda record: record.update(daemons=[]),
    "daemons.up.pid is '1', and not": lambda record: record["daemons"].update(
        up={"pid": "1", "born": 1}
    ),
    "layout.folder is 5, and not a path": lambda record: record["layout"].update(folder=5),
    "layout.ports is None, and not a list": lambda record: record["layout"].update(ports=None),
    "no lab has 1000000 nodes": lambda record: record["layout"].update(nodes=10**6),
    "number -1": lambda record: record["layout"].update(number=-1),
    "and 0 ports": lambda record: record["layout"].update(ports=[]),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_record_is_one_line(message: str, lab: Lab) -> None:
    change(lab, DAMAGES[message])
    expect_refusal(down(lab), "lab.json cannot be used", message, f"rm -r {lab.layout.folder}")
    assert lab.layout.folder.exists()


def test_a_record_that_is_no_file_of_json_is_one_line(lab: Lab) -> None:
    file = lab.layout.folder / "lab.json"
    file.write_text(file.read_text()[:-20])
    expect_refusal(down(lab), "lab.json cannot be used: it is not JSON")
    file.unlink()
    os.mkfifo(file)
    expect_refusal(down(lab), "lab.json")
    file.unlink()
    file.mkdir()
    expect_refusal(down(lab), "lab.json cannot be used: Is a directory")


def test_a_record_that_others_may_write_is_not_used(lab: Lab) -> None:
    (lab.layout.folder / "lab.json").chmod(0o666)
    expect_refusal(down(lab), "others may write", "chmod go-w")
    (lab.layout.folder / "lab.json").chmod(0o644)
    lab.layout.folder.chmod(0o777)
    expect_refusal(down(lab), "others may write", "chmod go-w")


@pytest.mark.skipif(not ROOT, reason="only root gives files away")
def test_a_record_of_another_user_is_not_used(lab: Lab) -> None:
    os.chown(lab.layout.folder / "lab.json", 65534, 65534)
    expect_refusal(down(lab), "user 65534 owns")
    assert lab.layout.folder.exists()

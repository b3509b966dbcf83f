"""What the command line refuses, each time with one line; no cluster is started here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import slurm_lab
from lab_commands import COMMAND, PATH, expect_refusal, run
from slurm_lab import LabError, machine, prepare

OTHER_FOLDER_HINT = "export XDG_STATE_HOME=$(mktemp -d); slurm-lab up"
has_slurm = shutil.which("slurmctld", path=PATH) and shutil.which("munged", path=PATH)
needs_slurm = pytest.mark.skipif(not has_slurm, reason="apt-get install slurm-wlm munge")


@pytest.mark.parametrize(
    "arguments", [("status",), ("exec", "--", "sinfo"), ("cut", "n1"), ("down",)]
)
def test_without_a_lab_every_command_says_so(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    expect_refusal(run(*arguments, state=tmp_path), "no lab is up", "slurm-lab up --nodes 2")


@pytest.mark.parametrize("flags", [("--nodes", 0), ("--nodes", 65), ("--cpus", 0), ("--gpus", 17)])
def test_impossible_sizes_are_refused(tmp_path: Path, flags: tuple[object, ...]) -> None:
    expect_refusal(run("up", *flags, state=tmp_path), f"{flags[0]} {flags[1]}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("nonsense",), ("invalid choice: 'nonsense'", "slurm-lab --help")),
        (("up", "--nodes", "two"), ("invalid int value: 'two'", "slurm-lab up --help")),
        ((), ("COMMAND", "slurm-lab --help")),
        (("exec", "--"), ("exec has no command", "slurm-lab exec -- srun -N2 hostname")),
    ],
)
def test_arguments_that_are_none_are_one_line(
    tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    expect_refusal(run(*arguments, state=tmp_path), *parts)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SBIN_FOLDERS", ())
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LabError) as caught:
        prepare.validate_programs(plain=False)
    assert caught.value.hint == "apt-get install slurm-wlm munge iproute2 util-linux"
    with pytest.raises(LabError) as caught:
        prepare.validate_programs(plain=True)
    assert caught.value.hint == "apt-get install slurm-wlm munge"


def test_accounting_without_slurmdbd_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in prepare.SLURM_PROGRAMS.values():
        for name in names:
            (tmp_path / name).touch(0o755)
    monkeypatch.setattr(machine, "SBIN_FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    prepare.validate_programs(plain=True)
    with pytest.raises(LabError, match=r"--accounting: slurmdbd, .* not found") as caught:
        prepare.validate_programs(plain=True, accounting=True)
    assert "apt-get install slurmdbd mariadb-server-core" in caught.value.hint


@needs_slurm
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    process = run("up", "--plain", state=Path("/proc/none"))
    expect_refusal(process, "/proc/none/slurm-lab/lab cannot be made", OTHER_FOLDER_HINT)


@needs_slurm
@pytest.mark.parametrize("name", ["with space", "x" * 80])
def test_a_folder_that_slurm_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    expect_refusal(run("up", "--plain", state=tmp_path / name), name, OTHER_FOLDER_HINT)
    assert not (tmp_path / name).exists()


def test_without_a_home_folder_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_without_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert slurm_lab.get_lab_folder() == Path.home() / ".local/state/slurm-lab/lab"
    monkeypatch.setattr(Path, "home", raise_without_home)
    with pytest.raises(LabError, match="there is no home folder") as caught:
        slurm_lab.get_lab_folder()
    assert caught.value.hint.startswith("export HOME=")


def test_a_hint_can_name_another_command() -> None:
    error = LabError("no", "rm -r /tmp/slurm-lab x; slurm-lab down && slurm-lab up --nodes 2")
    hint = error.make_hint_for("other lab")
    assert hint == "rm -r /tmp/slurm-lab x; other lab down && other lab up --nodes 2"
    assert str(LabError("bad \x1b[2J.", "x")) == "bad \\x1b[2J. HINT: x"


def test_a_daemon_is_known_though_the_clock_of_the_machine_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon = machine.Daemon.from_pid(os.getpid())
    program = Path(sys.executable).name
    conf = Path("slurm.conf")
    monkeypatch.setattr(psutil.Process, "environ", lambda _: {"SLURM_CONF": "slurm.conf"})
    reused_id = machine.Daemon(daemon.pid, daemon.born - 1)
    assert reused_id.find_process(program, conf) is None
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 1)
    assert daemon.find_process(program, conf) is not None


def test_the_public_names_are_there() -> None:
    for name in slurm_lab.__all__:
        assert getattr(slurm_lab, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = slurm_lab.nonsense


def test_help_and_plugin_import_nothing_that_takes_time() -> None:
    """pytest imports the plugin in every session of an environment that has this package."""
    code = (
        "import sys, slurm_lab.cli, slurm_lab.pytest_plugin\n"
        "sys.exit('psutil' in sys.modules or 'slurm_lab.lab' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    assert run("--version", state=tmp_path).stdout == f"slurm-lab {slurm_lab.__version__}\n"
    assert COMMAND[-1] == slurm_lab.__name__

"""No file outside the copy changes under `stepladder check`, whatever the script does."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import stepladder
import stepladder_exchange
from stepladder.core.errors import InputError
from stepladder.core.scratch import temporary_folder
from stepladder.tools.check.isolation import kernel, sandbox
from stepladder.tools.check.isolation.sandbox import (
    MECHANISM_VARIABLE,
    MECHANISMS,
    SandboxFolders,
    open_namespace,
)

PROTECTING = MECHANISMS[:-1]
# The mechanism of most machines, and the others with the slow tests.
FEWER_MECHANISMS = [
    MECHANISMS[0],
    *(pytest.param(mechanism, marks=pytest.mark.slow) for mechanism in PROTECTING[1:]),
]
SCRIPTS = Path(__file__).parent / "scripts"
HARMFUL = SCRIPTS / "harmful.py"
NAMES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQ"
# What docs/check.md says is not covered: calls that Landlock does not know, where Python does not
# make them.
NOT_COVERED = {"namespace": (), "landlock": ("program_chmod", "program_touch", "chmod_by_c")}
# What fails in a mount namespace: names that lead out of it, and moves from one file system to
# another.
LEAD_OUT = [
    "replace_by_a_file_of_the_copy", "write_through_a_hard_link", "folder_of_the_launcher",
    "folder_of_the_first_process", "unmount", "mount_to_be_written", "rename_the_folder",
]  # fmt: skip


def describe(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    kind = stat.S_IFMT(status.st_mode)
    content = os.readlink(path) if kind == stat.S_IFLNK else ""  # noqa: PTH115
    if kind == stat.S_IFREG:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    names = tuple(os.listxattr(path, follow_symlinks=False))
    links = status.st_nlink if kind == stat.S_IFREG else 0
    return status.st_mode, status.st_uid, status.st_mtime_ns, status.st_size, links, content, names


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder, and the folder: what a change of any kind would change."""
    return {str(path.relative_to(folder)): describe(path) for path in [folder, *folder.rglob("*")]}


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder on a disk: Landlock leaves /dev/shm open, where the folders of tests lie."""
    folder = Path(tempfile.mkdtemp(prefix="outside-", dir="/tmp")).resolve()
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def outside(root: Path) -> Path:
    """What belongs to the user, beside the folder in which he works."""
    out = root / "out"
    for folder in ("tree/deep", "empty", "folder"):
        (out / folder).mkdir(parents=True)
    for name in (*NAMES, "tree/deep/file", "folder/file"):
        (out / name).write_text(f"content of {name}")
    with sqlite3.connect(out / "rows.db") as database:
        database.execute("create table t (x)")
    database.close()
    (out / "snapshot.pt").write_bytes(b"epoch 4711")
    (out / "model.safetensors").write_bytes(b"weights")
    (root / "folder").mkdir()
    (root / "folder" / "mine").write_text("mine")
    (root / "folder" / "outside").symlink_to(out)
    return out


def check(
    folder: Path,
    *flags: object,
    args: Sequence[object] = (),
    mechanism: str = "namespace",
    command: Sequence[str] = (sys.executable,),
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    command_text = [
        *command,
        "-m",
        "stepladder",
        "check",
        "--json",
        *map(str, flags),
        "script.py",
        *map(str, args),
    ]
    ran = subprocess.run(
        command_text,
        cwd=folder,
        env={**os.environ, MECHANISM_VARIABLE: mechanism, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.stdout, ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout)
    assert report["isolation"]["mechanism"] == mechanism, report
    return report


@cache
def allows_namespaces() -> bool:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name).resolve()
        (scratch / "copy").mkdir()
        (scratch / "folder").mkdir()
        namespace = open_namespace(SandboxFolders(scratch, scratch / "copy", scratch / "folder"))
    for descriptor in namespace[0] if namespace else ():
        os.close(descriptor)
    return namespace is not None


@pytest.mark.slow
def test_an_overlay_that_cannot_be_mounted_costs_no_other_one(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("namespace")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name).resolve()
        for part in ("copy", "folder"):
            (scratch / part).mkdir()
        no_folder = outside.parent / "a-file"
        no_folder.touch()
        folders = SandboxFolders(scratch, scratch / "copy", scratch / "folder")
        plan = replace(
            sandbox.make_plan(folders), overlays=[str(no_folder), "/removed", str(outside)]
        )
        monkeypatch.setattr(sandbox, "make_plan", lambda _: plan)
        namespace = open_namespace(folders)
        assert namespace is not None
        descriptors, upper_layers = namespace
        for descriptor in descriptors:
            os.close(descriptor)
    assert [folder for folder in plan.overlays if folder in upper_layers] == [str(outside)]


def test_a_program_in_the_sandbox_leaves_the_folder_that_is_in_use() -> None:
    """In an overlay a lock seems free, and stepladder removes folders that nobody locks."""
    needs("namespace")
    code = "from stepladder.core.scratch import get_scratch_folder; print(get_scratch_folder())"
    with temporary_folder() as scratch:
        (scratch / "folder").mkdir()
        (scratch / "folder" / "train.py").touch()
        folders = SandboxFolders(scratch.resolve(), scratch / "copy", scratch / "folder")
        written = (str(Path(tempfile.gettempdir()).resolve() / "file"),)
        with closing(sandbox.Sandbox(replace(folders, written_paths=written))) as made:
            assert made.upper_layers
            ran = subprocess.run(
                made.command([sys.executable, "-c", code]),
                pass_fds=made.descriptors,
                capture_output=True,
                text=True,
                check=True,
            )
            assert "stepladder." in ran.stdout
            assert (scratch / "copy" / "train.py").exists()


def needs(mechanism: str) -> None:
    if mechanism == "landlock" and not kernel.landlock_abi():
        pytest.skip("this kernel has no Landlock")
    if mechanism == "namespace" and not allows_namespaces():
        pytest.skip("this kernel allows no mount namespace")


def printed(report: dict[str, Any]) -> list[str]:
    """Return the lines of a script that has ended with an exit code of its own."""
    lines: list[str] = report["not_checked"]["output"].splitlines()
    return lines


def became_of(report: dict[str, Any]) -> dict[str, str]:
    became: dict[str, str] = json.loads(printed(report)[-1])
    return became


def failed_in(became: dict[str, str]) -> list[str]:
    """Return the ways that failed; not every file system has extended attributes."""
    return [name for name, end in became.items() if end != "done" and name != "attribute"]


@pytest.mark.parametrize("mechanism", FEWER_MECHANISMS)
def test_of_more_than_thirty_ways_none_changes_a_file_outside(
    mechanism: str, outside: Path
) -> None:
    needs(mechanism)
    shutil.copy(HARMFUL, outside.parent / "folder" / "script.py")
    before = tree(outside.parent)
    skipped = ",".join(NOT_COVERED[mechanism])
    folder = outside.parent / "folder"  # on one rank: two would remove each other's files
    report = check(folder, "--nproc", 1, args=(outside, skipped), mechanism=mechanism)
    became = became_of(report)
    after = tree(outside.parent)
    assert [
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    ] == []
    assert len(became) > 45
    if mechanism == "namespace":  # the script does not notice
        assert failed_in(became) == LEAD_OUT
        assert str(outside) in [change["folder"] for change in report["isolation"]["written"]]
    else:
        assert str(outside / "a") in report["isolation"]["refused"]


TRAINS = """
import os, sys
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

path = SNAPSHOT
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists(path):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]
data = TensorDataset(torch.randn(16, 2))
sampler = DistributedSampler(data, num_replicas=1, rank=0)
loader = DataLoader(data, batch_size=4, sampler=sampler)
for epoch in range(first, first + 7):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)
"""


def production_snapshot(path: Path) -> None:
    """What a training of weeks has left, at an absolute path that its script names."""
    code = (
        "import sys, torch; m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), lr=0.1); "
        "torch.save({'model': m.state_dict(), 'optimizer': o.state_dict(), 'epoch': 4711}, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True)


@pytest.mark.slow
def test_a_resume_finds_its_own_snapshot_and_leaves_the_one_in_production(outside: Path) -> None:
    """The script saves its epoch one too low, which shows only where the second start has the first
    one's file.
    """
    needs("namespace")
    production_snapshot(outside / "snapshot.pt")
    folder = outside.parent / "folder"
    (folder / "script.py").write_text(
        TRAINS.replace("SNAPSHOT", repr(str(outside / "snapshot.pt")))
    )
    before = tree(outside.parent)
    report = check(folder, "--resume", "--epochs", "2")
    assert tree(outside.parent) == before
    evidence = {finding["rule"]: finding["evidence"] for finding in report["findings"]}
    assert "with the batches of epoch 4711: epoch 4711 is trained again" in evidence["resume-epoch"]
    assert report["isolation"]["written"] == [
        {"folder": str(outside), "written": ["snapshot.pt"], "removed": []}
    ], report


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS[1:])
def test_where_no_overlay_can_be_laid_the_snapshot_stays_and_a_line_says_what_to_type(
    mechanism: str, outside: Path
) -> None:
    needs(mechanism)
    production_snapshot(outside / "snapshot.pt")
    folder = outside.parent / "folder"
    (folder / "script.py").write_text(
        TRAINS.replace("SNAPSHOT", repr(str(outside / "snapshot.pt")))
    )
    before = tree(outside.parent)
    report = check(folder, "--resume", "--epochs", "2", mechanism=mechanism)
    assert tree(outside.parent) == before
    assert report["not_checked"]["cause"] == "check"
    assert f"(HINT: stepladder check --writes {outside} ...)" in report["not_checked"]["line"]
    assert report["isolation"]["refused"] == [str(outside / "snapshot.pt.new")]


@pytest.mark.slow
def test_a_rehearsal_leaves_the_snapshot_in_production(outside: Path) -> None:
    needs("namespace")
    production_snapshot(outside / "snapshot.pt")
    folder = outside.parent / "folder"
    (folder / "script.py").write_text(
        TRAINS.replace("SNAPSHOT", repr(str(outside / "snapshot.pt")))
    )
    before = tree(outside.parent)
    code = "from stepladder.cli.rehearsal import Rehearsal; Rehearsal.from_command('run', ['script.py'], False).passes_check(False)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert tree(outside.parent) == before
    assert f"in {outside}, for the script only: written snapshot.pt" in ran.stdout, ran.stdout


WRITES = """
import sys
from pathlib import Path
for path in sys.argv[1:]:
    Path(path).write_text("new")
"""


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", FEWER_MECHANISMS)
def test_a_folder_of_writes_is_written_for_real_and_no_other(mechanism: str, outside: Path) -> None:
    needs(mechanism)
    folder = outside.parent / "folder"
    (folder / "runs").mkdir()
    (folder / "script.py").write_text(WRITES)
    paths = outside / "folder" / "real", "runs/mine", folder / "runs" / "by-path"
    report = check(
        folder, "--writes", outside / "folder", "--writes", "runs", args=paths, mechanism=mechanism
    )
    assert report["not_checked"]["cause"] == "no training", report
    assert (outside / "folder" / "real").read_text() == "new"
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["by-path", "mine"]
    before = tree(outside.parent)
    check(folder, "--writes", outside / "folder", args=(outside / "a",), mechanism=mechanism)
    assert tree(outside.parent) == before


@pytest.mark.parametrize(
    ("folder", "parts"),
    [
        ("nowhere", ("--writes nowhere: there is no such folder", "mkdir -p nowhere")),
        ("/", ("--writes /",)),
    ],
)
def test_a_folder_of_writes_that_is_none_is_refused(
    folder: str, parts: tuple[str, ...], root: Path
) -> None:
    (root / "script.py").write_text("")
    command = [sys.executable, "-m", "stepladder", "check", "--writes", folder, "script.py"]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    assert all(part in ran.stderr for part in parts), ran.stderr


@pytest.mark.slow
def test_a_write_that_no_overlay_can_take_is_refused_in_one_line(root: Path) -> None:
    """Over folders of the system none is laid: services have their sockets there."""
    needs("namespace")
    (root / "script.py").write_text(WRITES)
    report = check(root, args=("/usr/stepladder-test",))
    assert report["not_checked"]["line"] == (
        "this check cannot run it: OSError: [Errno 30] /usr/stepladder-test lies outside the copy, and stepladder "
        "check changes nothing there  (HINT: stepladder check --writes /usr ...)"
    )
    assert report["isolation"]["refused"] == ["/usr/stepladder-test"]
    assert not Path("/usr/stepladder-test").exists()


IN_ITS_ENVIRONMENT = """
import sys
from pathlib import Path
import click
Path(sys.argv[1]).write_text("new")
print(Path(sys.argv[1]).read_text(), sys.executable, flush=True)
raise SystemExit(9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [".venv", pytest.param("my-env", marks=pytest.mark.slow)])
def test_the_interpreter_may_lie_in_a_virtual_environment_in_the_working_folder(
    name: str, outside: Path
) -> None:
    """The copy lacks it, and is shown at the path of the working folder."""
    needs("namespace")
    if sys.prefix == sys.base_prefix:
        pytest.skip("the tests run in no virtual environment")
    folder = outside.parent / "folder"
    environment = folder / name
    environment.mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        (environment / part).symlink_to(Path(sys.prefix) / part)
    python = environment / "bin" / "python"
    (folder / "script.py").write_text(IN_ITS_ENVIRONMENT)
    before = tree(outside.parent)
    report = check(folder, args=(environment / "new",), command=(str(python),))
    assert printed(report)[-1] == f"new {python}", report
    assert tree(outside.parent) == before
    assert report["isolation"]["written"] == [
        {"folder": str(environment), "written": ["new"], "removed": []}
    ]


GOES_ON = """
import multiprocessing
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.multiprocessing import spawn
from torch.utils.data import DataLoader, TensorDataset


def write(number, folder):
    Path(folder, str(number)).touch()


if __name__ == "__main__":
    assert Path(os.environ["READS"]).read_text() == "content of a"
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=2)
    assert sum(int(x.sum()) for (x,) in loader) == 28
    with tempfile.TemporaryDirectory() as folder:
        spawn(write, (folder,), nprocs=2)
        assert sorted(os.listdir(folder)) == ["0", "1"]
    with multiprocessing.Manager() as manager:
        assert manager.list([1])[0] == 1
    cache = Path.home() / ".cache" / "stepladder-test" / "file"
    if os.environ["CACHE"]:
        cache.parent.mkdir(parents=True)
        cache.write_text("cached")
        assert cache.read_text() == "cached"
    assert os.environ["CACHE"] == "" or subprocess.run(["cat", cache], stdout=subprocess.PIPE).stdout == b"cached"
    print("it went on", flush=True)
    raise SystemExit(9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_workers_spawned_processes_temporary_files_and_caches_work(
    mechanism: str, outside: Path
) -> None:
    needs(mechanism)
    folder = outside.parent / "folder"
    (folder / "script.py").write_text(GOES_ON)
    env = {
        "READS": str(outside / "a"),
        "CACHE": "1" if mechanism == "namespace" else "",
        "HOME": str(outside),
    }
    report = check(folder, mechanism=mechanism, env=env)
    assert printed(report)[-1] == "it went on", report
    assert not (outside / ".cache").exists()


def test_a_kernel_that_protects_nothing_is_refused_unless_the_user_trusts_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "open_namespace", lambda _: None)
    monkeypatch.setattr(kernel, "landlock_abi", lambda: 0)
    (tmp_path / "folder").mkdir()
    folders = SandboxFolders(tmp_path, tmp_path / "copy", tmp_path / "folder")
    with pytest.raises(InputError, match="neither user namespaces nor Landlock"):
        sandbox.Sandbox(folders)
    trusted = replace(folders, copy=tmp_path / "trusted", is_unsafe=True)
    with closing(sandbox.Sandbox(trusted)) as made:
        assert made.mechanism == "audit"


def test_an_old_kernel_makes_one_mount_after_the_other_readonly(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.12 no call makes all of them read-only at once."""
    needs("namespace")
    make_plan = sandbox.make_plan
    monkeypatch.setattr(
        sandbox, "make_plan", lambda folders: replace(make_plan(folders), by_remount=True)
    )
    scratch = outside.parent / "scratch"
    scratch.mkdir()
    command_text = (
        f"touch /usr/stepladder-test; echo changed > {outside / 'a'}; cat {outside / 'a'}"
    )
    before = tree(outside)
    with closing(
        sandbox.Sandbox(SandboxFolders(scratch, scratch / "copy", outside.parent / "folder"))
    ) as made:
        command = made.command(["/bin/sh", "-c", command_text])
        ran = subprocess.run(
            command, pass_fds=made.descriptors, capture_output=True, text=True, check=False
        )
    assert made.mechanism == "namespace"
    assert ran.stdout == "changed\n" and "Read-only file system" in ran.stderr
    assert tree(outside) == before and not Path("/usr/stepladder-test").exists()


def test_root_reaches_no_disk_below_the_file_systems(outside: Path) -> None:
    needs("namespace")
    disks = [path for path in Path("/dev").iterdir() if path.is_block_device()]
    if os.geteuid() != 0 or not disks:
        pytest.skip("there is no disk that this user could write")
    scratch = outside.parent / "scratch"
    scratch.mkdir()
    with closing(
        sandbox.Sandbox(SandboxFolders(scratch, scratch / "copy", outside.parent / "folder"))
    ) as made:
        command = made.command(["/usr/bin/stat", "-c", "%F", *map(str, disks)])
        ran = subprocess.run(
            command, pass_fds=made.descriptors, capture_output=True, text=True, check=True
        )
    assert set(ran.stdout.splitlines()) == {"character special file"}


# -- without privilege -----------------------------------------------------------------------------

STRANGER = 12345  # a user of no name; that of nobody stands for all whom a namespace does not know
AS_STRANGER = ("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups")


@pytest.fixture(scope="module")
def stranger() -> tuple[str, ...]:
    """Return the words before a command of Python that let an ordinary user run it."""
    if os.geteuid() != 0:
        pytest.skip(
            "only root can run a command as somebody else: as another user all tests here are such"
        )
    packages = [
        str(Path(module.__file__ or "").parents[1])
        for module in (torch, stepladder, stepladder_exchange)
    ]
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        command_text = (
            *AS_STRANGER,
            "env",
            f"PYTHONPATH={os.pathsep.join(packages)}",
            "HOME=/nonexistent",
            "USER=stranger",
            python,
        )
        tried = subprocess.run(
            [*command_text, "-c", "import torch, click, stepladder"],
            capture_output=True,
            check=False,
        )
        if tried.returncode == 0:
            return command_text
    pytest.skip("an ordinary user may not read this checkout")


@pytest.mark.slow
def test_the_same_without_privilege(stranger: tuple[str, ...], outside: Path) -> None:
    needs("namespace")
    shutil.copy(HARMFUL, outside.parent / "folder" / "script.py")
    give_to_stranger(outside.parent)
    before = tree(outside.parent)
    folder = outside.parent / "folder"
    report = check(folder, "--nproc", 1, args=(outside, "-"), command=stranger)
    after = tree(outside.parent)
    assert [
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    ] == []
    assert failed_in(became_of(report)) == LEAD_OUT


FINDS = """
import os
from pathlib import Path
shared = Path(*reversed([name[::-1] for name in os.environ["BACKWARDS"].split("/")]))
(Path("/") / shared / "new").write_text("new")
print((Path("/") / shared / "new").read_text(), flush=True)
raise SystemExit(9)
"""


@pytest.mark.slow
def test_a_folder_of_another_user_gets_an_overlay_once_the_script_writes_there(
    stranger: tuple[str, ...], outside: Path
) -> None:
    """The path is known only at run time, so the script is started a second time."""
    needs("namespace")
    (outside.parent / "folder" / "script.py").write_text(FINDS)
    give_to_stranger(outside.parent)
    os.chown(outside / "folder", 0, 0)
    (outside / "folder").chmod(0o777)
    before = tree(outside.parent)
    report = check(
        outside.parent / "folder",
        command=stranger,
        env={"BACKWARDS": str(outside / "folder")[::-1]},
    )
    assert printed(report)[-1] == "new", report
    assert tree(outside.parent) == before
    written = {change["folder"]: change["written"] for change in report["isolation"]["written"]}
    assert written[str(outside / "folder")] == ["new"] and report["isolation"]["refused"] == []


def give_to_stranger(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            os.chown(path, STRANGER, STRANGER)

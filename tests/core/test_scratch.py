"""Folders for temporary files: gone with their process, and after `kill -9` with the next one's
start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import JOBS, SECONDS, refused, run, started, wait_until
from stepladder.core.scratch import MARKER, MARKER_TEXT

HOLD = "from stepladder.core.scratch import get_scratch_folder; print(get_scratch_folder(), flush=True); input()"
ENDING = {
    "a return": "",
    "an exit": "raise SystemExit(3)",
    "a fork": "import os, sys; os.fork() or sys.exit()",
}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def start_holder(folder: Path) -> subprocess.Popen[str]:
    """A process with its folder, until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "TMPDIR": str(folder)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.place = Path(process.stdout.readline().strip())  # type: ignore[attr-defined]
    return process


@pytest.mark.parametrize("ending", ENDING)
def test_a_process_that_ends_leaves_nothing(tmp_path: Path, ending: str) -> None:
    code = f"from stepladder.core.scratch import get_scratch_folder; (get_scratch_folder() / 'file').touch(); {ENDING[ending]}"
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False
    )
    assert names(tmp_path) == set()


def test_the_folder_of_a_killed_process_goes_with_the_next_and_that_of_a_living_one_stays(
    tmp_path: Path,
) -> None:
    with start_holder(tmp_path) as dead, start_holder(tmp_path) as living:
        (dead.place / "file").touch()  # type: ignore[attr-defined]
        dead.kill()
        dead.wait()
        assert len(names(tmp_path)) == 2
        with start_holder(tmp_path) as third:
            assert names(tmp_path) == {living.place.name, third.place.name}  # type: ignore[attr-defined]
            third.communicate("\n")
        living.communicate("\n")
    assert names(tmp_path) == set()


def tree(folder: Path) -> dict[str, bytes]:
    """All paths below it, also those of links, and what the files hold."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    """A clone, results, and folders whose names and files are like ours, but that we have not made."""
    for name in (
        "stepladder-mine",
        "other",
        "stepladder.new-1",
        "kept1234",
        "stepladder.git",
        "stepladder.results",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("the user's")
    for name in (
        "stepladder.abcd1234",
        "stepladder.snapshot",
        "stepladder.backup12",
    ):  # mkdtemp gives such names
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("the user's")
    (tmp_path / "stepladder.backup12" / MARKER).write_text("another text")
    (tmp_path / "kept1234" / MARKER).write_bytes(MARKER_TEXT)
    (tmp_path / "stepladder.link").symlink_to("kept1234")
    (tmp_path / "stepladder.link1234").symlink_to("kept1234")  # to a folder that is marked
    (tmp_path / "stepladder.marks123").mkdir()
    (tmp_path / "stepladder.marks123" / MARKER).symlink_to("../kept1234/" + MARKER)
    (tmp_path / "stepladder.pipes123").mkdir()
    os.mkfifo(tmp_path / "stepladder.pipes123" / MARKER)
    (tmp_path / "stepladder.results" / MARKER).write_bytes(MARKER_TEXT)  # no name of mkdtemp's
    (tmp_path / "stepladder.file1234").touch()
    if os.geteuid() == 0:
        (tmp_path / "stepladder.theirs12").mkdir()
        (tmp_path / "stepladder.theirs12" / MARKER).write_bytes(MARKER_TEXT)
        os.chown(tmp_path / "stepladder.theirs12", 65534, 65534)
    before = tree(tmp_path)
    with start_holder(tmp_path) as process:
        process.communicate("\n")
    assert tree(tmp_path) == before


@pytest.mark.ranks
def test_a_launcher_that_was_killed_leaves_nothing_for_long(tmp_path: Path) -> None:
    """Neither of ours nor of Python's fork server."""
    (tmp_path / "tmp").mkdir()
    env = {"TMPDIR": str(tmp_path / "tmp")}
    flags = "--nproc", 2, JOBS / "script.py"
    with started("run", *flags, "resume", tmp_path / "held", cwd=tmp_path, env=env) as running:
        for rank in range(2):
            running.wait_for(tmp_path / f"held.{rank}")
        running.process.send_signal(signal.SIGKILL)
        running.popen.wait(SECONDS)
    assert len(names(tmp_path / "tmp")) == 1

    def goes() -> bool:  # the server and its ranks hold nothing, but may not have ended yet
        run("run", *flags, "about", cwd=tmp_path, env=env)
        return names(tmp_path / "tmp") == set()

    wait_until(goes)


@pytest.mark.ranks
def test_a_long_name_of_the_temporary_directory_is_none_too_many(tmp_path: Path) -> None:
    """The fork server's socket is in /tmp then, and goes from there."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    code = "import atexit, sys, multiprocessing as m; from stepladder.cli import main\n"
    code += "atexit.register(lambda: print('sockets', m.current_process()._config['tempdir'])); main(sys.argv[1:])"
    command = "run", "--nproc", 2, JOBS / "script.py", "about"
    done = run(
        *command, cwd=tmp_path, env={"TMPDIR": str(long)}, command=(sys.executable, "-c", code)
    )
    assert done.returncode == 0, done.stderr
    assert names(long) == set()
    sockets = Path(done.stdout.split()[-1])
    assert sockets.parent == Path("/tmp") and not sockets.exists()


def test_no_place_is_one_line(tmp_path: Path) -> None:
    code = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/none']; from stepladder.cli import main; "
    code += f"main(['run', '--nproc', '2', {str(JOBS / 'script.py')!r}, 'about'])"
    done = run(cwd=tmp_path, command=(sys.executable, "-c", code))
    refused(done, "there is no folder for temporary files", "TMPDIR=FOLDER")

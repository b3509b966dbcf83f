"""Files that a person names for output: nothing but a regular file is replaced, and that only as a
whole.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from processes import refused, run
from stepladder.core.errors import InputError
from stepladder.core.output_file import validate_writable, write_output

RUN = Path(__file__).parents[1] / "fixtures" / "run_of_version_0_1"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TEXT = "text: \N{SNOWMAN} \udc80"
BYTES = "text: \N{SNOWMAN} \\udc80".encode()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_as_a_whole_and_in_utf_8(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as before:
        before.write("before")
        before.flush()
        write_output(tmp_path / "file", TEXT, "-o")
        assert Path(f"/dev/fd/{before.fileno()}").read_text() == "before", (
            "who reads it still has the old one"
        )
    assert (tmp_path / "file").read_bytes() == BYTES
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "folder").mkdir()
    if exists:
        (tmp_path / "folder" / "file").write_text("before")
    (tmp_path / "second").symlink_to("folder/file")
    (tmp_path / "first").symlink_to("second")
    write_output(tmp_path / "first", TEXT, "-o")
    assert (tmp_path / "first").readlink() == Path("second")
    assert (tmp_path / "second").readlink() == Path("folder/file")
    assert (tmp_path / "folder" / "file").read_bytes() == BYTES
    assert names(tmp_path / "folder") == ["file"]


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_output(tmp_path / "pipe", TEXT, "-o")
        assert os.read(reader, 100) == BYTES
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo() and names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("through", ["", "link"])
def test_a_device_is_written_through(tmp_path: Path, through: str) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    (tmp_path / "link").symlink_to("null")
    write_output(tmp_path / (through or "null"), TEXT, "-o")
    assert device.is_char_device()
    assert names(tmp_path) == ["link", "null"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "it is a folder"),
        ("none/file", "there is no such folder"),
        ("file/file", "there is no such folder"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
        ("/proc/none", "No such file or directory" if os.geteuid() == 0 else "Permission denied"),
        ("/dev/full", "No space left on device"),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("before")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=f"-o .* cannot be written: {message}"):
        write_output(tmp_path / name, TEXT, "-o")
    assert names(tmp_path) == ["file", "loop"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_known_before_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission denied"):
        validate_writable(tmp_path / "file", "--csv")


def test_stdout_that_is_a_file_gets_the_page_and_what_is_said_after_it(tmp_path: Path) -> None:
    with (tmp_path / "page").open("w") as stdout:
        command = [sys.executable, "-m", "stepladder", "report", RUN, "-o", "/dev/stdout"]
        subprocess.run(command, stdout=stdout, check=True)
    text = (tmp_path / "page").read_text()
    assert text.startswith("<!doctype html>") and text.endswith("</html>\nwritten: /dev/stdout\n")


def test_a_page_is_utf_8_in_an_ascii_locale_and_goes_through_links(tmp_path: Path) -> None:
    (tmp_path / "page.html").symlink_to("real.html")
    done = run("report", RUN, "-o", "page.html", cwd=tmp_path, env=ASCII)
    assert done.returncode == 0, done.stderr
    assert "<!doctype html>" in (tmp_path / "real.html").read_text(encoding="utf-8")
    assert names(tmp_path) == ["page.html", "real.html"]


def test_a_place_that_cannot_be_written_is_said_before_the_run_is_read(tmp_path: Path) -> None:
    refused(
        run("report", "no-run", "-o", "none/page.html", cwd=tmp_path),
        "-o none/page.html cannot be written",
    )

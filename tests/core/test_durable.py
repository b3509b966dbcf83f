"""Whole or absent: at every moment of a writer's life, with every error of a disk, and in the order
that lasts.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepladder.core import durable
from stepladder.core.errors import InputError

MOVES = (
    ("os", "fsync"),
    ("Path", "replace"),
    ("Path", "rename"),
    ("Path", "chmod"),
    ("Path", "write_bytes"),
)
ROOT = os.geteuid() == 0


class Killed(BaseException):
    """Stands for a kill: nothing in the code under test may catch it and tidy up."""


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """What is fsynced and renamed, in its order: (act, name of the file, its `.XXXXXXXX` cut)."""
    done: list[tuple[str, str]] = []
    fsync = os.fsync
    replace = Path.replace
    rename = Path.rename

    def cut(path: Path) -> str:
        return path.name.split(".")[0] + ("*" if path.suffix == durable.UNFINISHED_SUFFIX else "")

    def noting_fsync(opened: int) -> None:
        done.append(("fsync", cut(Path(f"/proc/self/fd/{opened}").readlink())))
        fsync(opened)

    def noting(move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def noted(source: Path, target: Path) -> Path:
            done.append((f"{cut(source)} ->", Path(target).name))
            return move(source, target)

        return noted

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting(replace))
    monkeypatch.setattr(Path, "rename", noting(rename))
    yield done


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    """A folder that the test has for itself."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- what is written, and in which order -----------------------------------------------------------


@pytest.mark.parametrize("data", [b"bytes\x00", "text: \N{SNOWMAN}", b"", "x" * 3_000_000])
def test_a_file_holds_what_was_written(destination: Path, data: bytes | str) -> None:
    durable.write(destination / "file", data)
    durable.write(destination / "file", data)
    assert (destination / "file").read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert names(destination) == ["file"]


def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_before_the_return(
    destination: Path, acts: list[tuple[str, str]]
) -> None:
    durable.write(destination / "file", "new")
    assert acts == [("fsync", "file*"), ("file* ->", "file"), ("fsync", "place")]


def test_without_fsync_nothing_waits_for_the_disk(
    destination: Path, acts: list[tuple[str, str]]
) -> None:
    durable.write(destination / "file", "new", fsync=False)
    assert acts == [("file* ->", "file")]


def test_a_folder_is_on_disk_with_all_that_it_holds_before_it_has_its_name(
    destination: Path, acts: list[tuple[str, str]]
) -> None:
    with durable.replace_folder(
        destination / "folder", check=lambda: acts.append(("check", ""))
    ) as aside:
        (aside / "a").write_text("a")
        (aside / "inside").mkdir()
        (aside / "inside" / "b").write_text("b")
    before = acts[: acts.index(("check", ""))]
    after = acts[acts.index(("check", "")) :]
    assert sorted(before) == [
        ("fsync", "a"),
        ("fsync", "b"),
        ("fsync", "folder*"),
        ("fsync", "inside"),
    ]
    assert after == [("check", ""), ("folder* ->", "folder"), ("fsync", "place")]


def test_what_was_written_elsewhere_is_on_disk_before_its_move(
    destination: Path, acts: list[tuple[str, str]]
) -> None:
    (destination / "part").write_text("all")
    durable.move(destination / "part", destination / "whole")
    assert acts == [("fsync", "part"), ("part ->", "whole"), ("fsync", "place")]
    assert names(destination) == ["whole"]


# -- who may read it -------------------------------------------------------------------------------


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_mode_that_the_umask_gives(
    destination: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        durable.write(destination / "file", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((destination / "file").stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_a_file_that_was_there_keeps_its_mode(destination: Path, mode: int) -> None:
    (destination / "file").write_text("old")
    (destination / "file").chmod(mode)
    durable.write(destination / "file", "new")
    assert stat.S_IMODE((destination / "file").stat().st_mode) == mode


def test_two_writers_at_once_leave_the_file_of_one_of_them(destination: Path) -> None:
    texts = [letter * 200_000 for letter in "abcd"]
    start = threading.Barrier(len(texts))

    def write(text: str) -> None:
        start.wait()
        for _ in range(20):
            durable.write(destination / "file", text, fsync=False)
            assert (destination / "file").read_text() in texts

    failed: list[Any] = []
    threads = [
        threading.Thread(target=lambda t=text: failed.append(caught(write, t))) for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [None] * len(texts)
    assert names(destination) == ["file"]


def caught(function: Callable[[str], None], text: str) -> BaseException | None:
    try:
        function(text)
    except BaseException as error:
        return error
    return None


# -- errors, and kills -----------------------------------------------------------------------------


def write_anew(destination: Path) -> None:
    durable.write(destination / "thing", "new")


def fill_anew(destination: Path) -> None:
    with durable.replace_folder(destination / "thing") as aside:
        (aside / "one").write_bytes(b"new")
        (aside / "two").write_bytes(b"new")


def old_file(destination: Path) -> None:
    (destination / "thing").write_text("old")


def old_folder(destination: Path) -> None:
    (destination / "thing").mkdir()
    for name in ("one", "two"):
        (destination / "thing" / name).write_text("old")


def content(destination: Path) -> set[str]:
    """Of the file, or of every file in the folder."""
    thing = destination / "thing"
    return {path.read_text() for path in (sorted(thing.iterdir()) if thing.is_dir() else [thing])}


WRITERS = {
    "a file": (write_anew, lambda destination: None),
    "a file anew": (write_anew, old_file),
    "a folder": (fill_anew, lambda destination: None),
    "a folder anew": (fill_anew, old_folder),
}


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=str
)
@pytest.mark.parametrize("act", MOVES, ids=str)
@pytest.mark.parametrize("write, before", WRITERS.values(), ids=WRITERS)
def test_an_error_anywhere_leaves_the_old_one_and_nothing_beside_it(
    destination: Path,
    write: Any,
    before: Any,
    act: tuple[str, str],
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before(destination)
    was = names(destination)
    owner = {"os": os, "Path": Path}[act[0]]
    real = getattr(owner, act[1])
    calls = []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise error
        return real(*args)

    monkeypatch.setattr(owner, act[1], fails)
    if caught(write, destination) is None:
        assert not calls, "the error was swallowed"
        return
    assert names(destination) == was
    assert not was or content(destination) == {"old"}


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("write, before", WRITERS.values(), ids=WRITERS)
def test_a_kill_before_any_act_leaves_the_old_one_or_the_new_one_once_it_was_cleared(
    destination: Path, write: Any, before: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a child that ends at once, without a word to the code under test, at its `number`-th act."""
    before(destination)
    was = names(destination)
    child = os.fork()
    if not child:
        calls = []
        for owner, name in MOVES:
            real = getattr({"os": os, "Path": Path}[owner], name)

            def counted(*args: Any, real: Any = real) -> Any:
                calls.append(args)
                if len(calls) == number:
                    os._exit(9)
                return real(*args)

            setattr({"os": os, "Path": Path}[owner], name, counted)
        write(destination)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 9)
    durable.remove_unfinished(destination, "thing")
    assert names(destination) in (was, ["thing"]), "something is left beside it"
    assert not names(destination) or content(destination) in ({"old"}, {"new"})
    if os.waitstatus_to_exitcode(status) == 0:
        assert content(destination) == {"new"}


@pytest.mark.skipif(ROOT, reason="root may write everywhere")
def test_an_error_names_the_file_and_not_the_one_aside(destination: Path) -> None:
    destination.chmod(0o500)
    with pytest.raises(PermissionError) as caught:
        durable.write(destination / "file", "new")
    assert caught.value.filename == str(destination / "file")


def test_a_name_may_be_as_long_as_names_are(destination: Path) -> None:
    durable.write(destination / ("x" * 255), "new")
    assert names(destination) == ["x" * 255]


def test_an_error_where_there_is_no_folder_names_the_file_that_was_to_be(destination: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        durable.write(destination / "missing" / "file", "new")
    assert caught.value.filename == str(destination / "missing" / "file")


def test_a_check_that_refuses_keeps_the_folder_from_its_place(destination: Path) -> None:
    old_folder(destination)

    def refuse() -> None:
        raise RuntimeError("another writer")

    with (
        pytest.raises(RuntimeError, match="another writer"),
        durable.replace_folder(destination / "thing", check=refuse) as aside,
    ):
        (aside / "one").write_text("new")
    assert (names(destination), content(destination)) == (["thing"], {"old"})


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_folder_takes_the_place_of_anything(
    make: Callable[[Path], object], destination: Path
) -> None:
    make(destination / "thing")
    with durable.replace_folder(destination / "thing") as aside:
        (aside / "one").write_text("new")
    assert (names(destination), content(destination)) == (["thing"], {"new"})


def test_clearing_takes_what_was_asked_for_only(destination: Path) -> None:
    for name in ("step_1.aa.tmp", "step_2.tmp", "other.aa.tmp", "step_3"):
        (destination / name).mkdir()
        (destination / name / "file").write_text("x")
    for name in ("step_4.bb.tmp", "step_3.old"):
        (destination / name).write_text("a user's own, if it is not a folder")
    durable.remove_unfinished(destination, "step_")
    assert names(destination) == ["other.aa.tmp", "step_3", "step_3.old"]


def test_the_disks_error_is_one_line_with_what_to_do(destination: Path) -> None:
    with pytest.raises(InputError) as caught, durable.name_write_errors(destination, "make room"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (
        str(caught.value) == f"cannot write {destination}: No space left on device. HINT: make room"
    )
    with (
        pytest.raises(ValueError, match="its own"),
        durable.name_write_errors(destination, "make room"),
    ):
        raise ValueError("its own")

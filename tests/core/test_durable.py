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
    fsync, replace, rename = os.fsync, Path.replace, Path.rename

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
def place(tmp_path: Path) -> Path:
    """A folder that the test has for itself."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- what is written, and in which order -----------------------------------------------------------


@pytest.mark.parametrize("data", [b"bytes\x00", "text: \N{SNOWMAN}", b"", "x" * 3_000_000])
def test_a_file_holds_what_was_written(place: Path, data: bytes | str) -> None:
    durable.write(place / "file", data)
    durable.write(place / "file", data)
    assert (place / "file").read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert names(place) == ["file"]


def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_before_the_return(
    place: Path, acts: list[tuple[str, str]]
) -> None:
    durable.write(place / "file", "new")
    assert acts == [("fsync", "file*"), ("file* ->", "file"), ("fsync", "place")]


def test_without_fsync_nothing_waits_for_the_disk(place: Path, acts: list[tuple[str, str]]) -> None:
    durable.write(place / "file", "new", fsync=False)
    assert acts == [("file* ->", "file")]


def test_a_folder_is_on_disk_with_all_that_it_holds_before_it_has_its_name(
    place: Path, acts: list[tuple[str, str]]
) -> None:
    with durable.replace_folder(
        place / "folder", check=lambda: acts.append(("check", ""))
    ) as aside:
        (aside / "a").write_text("a")
        (aside / "inside").mkdir()
        (aside / "inside" / "b").write_text("b")
    before, after = acts[: acts.index(("check", ""))], acts[acts.index(("check", "")) :]
    assert sorted(before) == [
        ("fsync", "a"),
        ("fsync", "b"),
        ("fsync", "folder*"),
        ("fsync", "inside"),
    ]
    assert after == [("check", ""), ("folder* ->", "folder"), ("fsync", "place")]


def test_what_was_written_elsewhere_is_on_disk_before_its_move(
    place: Path, acts: list[tuple[str, str]]
) -> None:
    (place / "part").write_text("all")
    durable.move(place / "part", place / "whole")
    assert acts == [("fsync", "part"), ("part ->", "whole"), ("fsync", "place")]
    assert names(place) == ["whole"]


# -- who may read it -------------------------------------------------------------------------------


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_mode_that_the_umask_gives(place: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        durable.write(place / "file", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((place / "file").stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_a_file_that_was_there_keeps_its_mode(place: Path, mode: int) -> None:
    (place / "file").write_text("old")
    (place / "file").chmod(mode)
    durable.write(place / "file", "new")
    assert stat.S_IMODE((place / "file").stat().st_mode) == mode


def test_two_writers_at_once_leave_the_file_of_one_of_them(place: Path) -> None:
    texts = [letter * 200_000 for letter in "abcd"]
    start = threading.Barrier(len(texts))

    def write(text: str) -> None:
        start.wait()
        for _ in range(20):
            durable.write(place / "file", text, fsync=False)
            assert (place / "file").read_text() in texts

    failed: list[Any] = []
    threads = [
        threading.Thread(target=lambda t=text: failed.append(caught(write, t))) for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [None] * len(texts)
    assert names(place) == ["file"]


def caught(function: Callable[[str], None], text: str) -> BaseException | None:
    try:
        function(text)
    except BaseException as error:
        return error
    return None


# -- errors, and kills -----------------------------------------------------------------------------


def write_anew(place: Path) -> None:
    durable.write(place / "thing", "new")


def fill_anew(place: Path) -> None:
    with durable.replace_folder(place / "thing") as aside:
        (aside / "one").write_bytes(b"new")
        (aside / "two").write_bytes(b"new")


def old_file(place: Path) -> None:
    (place / "thing").write_text("old")


def old_folder(place: Path) -> None:
    (place / "thing").mkdir()
    for name in ("one", "two"):
        (place / "thing" / name).write_text("old")


def content(place: Path) -> set[str]:
    """Of the file, or of every file in the folder."""
    thing = place / "thing"
    return {path.read_text() for path in (sorted(thing.iterdir()) if thing.is_dir() else [thing])}


WRITERS = {
    "a file": (write_anew, lambda place: None),
    "a file anew": (write_anew, old_file),
    "a folder": (fill_anew, lambda place: None),
    "a folder anew": (fill_anew, old_folder),
}


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=str
)
@pytest.mark.parametrize("act", MOVES, ids=str)
@pytest.mark.parametrize("write, before", WRITERS.values(), ids=WRITERS)
def test_an_error_anywhere_leaves_the_old_one_and_nothing_beside_it(
    place: Path,
    write: Any,
    before: Any,
    act: tuple[str, str],
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before(place)
    was = names(place)
    owner = {"os": os, "Path": Path}[act[0]]
    real, calls = getattr(owner, act[1]), []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise error
        return real(*args)

    monkeypatch.setattr(owner, act[1], fails)
    if caught(write, place) is None:
        assert not calls, "the error was swallowed"
        return
    assert names(place) == was
    assert not was or content(place) == {"old"}


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("write, before", WRITERS.values(), ids=WRITERS)
def test_a_kill_before_any_act_leaves_the_old_one_or_the_new_one_once_it_was_cleared(
    place: Path, write: Any, before: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a child that ends at once, without a word to the code under test, at its `number`-th act."""
    before(place)
    was = names(place)
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
        write(place)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 9)
    durable.remove_unfinished(place, "thing")
    assert names(place) in (was, ["thing"]), "something is left beside it"
    assert not names(place) or content(place) in ({"old"}, {"new"})
    if os.waitstatus_to_exitcode(status) == 0:
        assert content(place) == {"new"}


@pytest.mark.skipif(ROOT, reason="root may write everywhere")
def test_an_error_names_the_file_and_not_the_one_aside(place: Path) -> None:
    place.chmod(0o500)
    with pytest.raises(PermissionError) as caught:
        durable.write(place / "file", "new")
    assert caught.value.filename == str(place / "file")


def test_a_name_may_be_as_long_as_names_are(place: Path) -> None:
    durable.write(place / ("x" * 255), "new")
    assert names(place) == ["x" * 255]


def test_an_error_where_there_is_no_folder_names_the_file_that_was_to_be(place: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        durable.write(place / "missing" / "file", "new")
    assert caught.value.filename == str(place / "missing" / "file")


def test_a_check_that_refuses_keeps_the_folder_from_its_place(place: Path) -> None:
    old_folder(place)

    def refuse() -> None:
        raise RuntimeError("another writer")

    with (
        pytest.raises(RuntimeError, match="another writer"),
        durable.replace_folder(place / "thing", check=refuse) as aside,
    ):
        (aside / "one").write_text("new")
    assert (names(place), content(place)) == (["thing"], {"old"})


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_folder_takes_the_place_of_anything(make: Callable[[Path], object], place: Path) -> None:
    make(place / "thing")
    with durable.replace_folder(place / "thing") as aside:
        (aside / "one").write_text("new")
    assert (names(place), content(place)) == (["thing"], {"new"})


def test_clearing_takes_what_was_asked_for_only(place: Path) -> None:
    for name in ("step_1.aa.tmp", "step_2.tmp", "other.aa.tmp", "step_3"):
        (place / name).mkdir()
        (place / name / "file").write_text("x")
    for name in ("step_4.bb.tmp", "step_3.old"):
        (place / name).write_text("a user's own, if it is not a folder")
    durable.remove_unfinished(place, "step_")
    assert names(place) == ["other.aa.tmp", "step_3", "step_3.old"]


def test_the_disks_error_is_one_line_with_what_to_do(place: Path) -> None:
    with pytest.raises(InputError) as caught, durable.name_write_errors(place, "make room"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(caught.value) == f"cannot write {place}: No space left on device. HINT: make room"
    with pytest.raises(ValueError, match="its own"), durable.name_write_errors(place, "make room"):
        raise ValueError("its own")

"""The run directory: one writer, one configuration, one result. Only rank 0 comes here.

config.json  what was asked (run_config.py)                 result.json  the finished run's last line
lock         who writes here (lock.py)                      metrics.jsonl, timing.jsonl, ledger/, ...
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

from stepladder.core import durable, typed_file
from stepladder.core.errors import (
    DEVICE_ERRNOS,
    DISK_HINT,
    FULL_ERRNOS,
    TRANSIENT_ERRNOS,
    InputError,
    StorageFault,
    as_input_error,
    name_file_in_errors,
)
from stepladder.core.folders import find_obstacle
from stepladder.core.jsonl import BLOCK_BYTES, is_count, parse_line, parse_lines
from stepladder.core.safe_open import is_foreign_link, open_without_links
from stepladder.core.typed_file import convert
from stepladder.rank.error_record import record_step
from stepladder.rank.fd_store import has_fd_store
from stepladder.storage.lock import AGENTS, HELD, LOCK, MEETING, NOBODY, Lock, is_kept, owner_of

LEDGER, SNAPSHOTS, MANIFEST = "ledger", "snapshots", "manifest.json"
CONFIG, RESULT, METRICS, TIMING = "config.json", "result.json", "metrics.jsonl", "timing.jsonl"
SCHEMA = 1  # of config.json and result.json, and so of the directory
KEY: dict[str, tuple[str, type]] = {
    CONFIG: ("definition", dict),
    RESULT: ("steps", int),
}  # what is read of them
# What is written there, by whomever: days of training are not to end at a folder in a file's place.
FILES = (
    CONFIG,
    RESULT,
    METRICS,
    TIMING,
    LOCK,
    HELD,
    MEETING,
    AGENTS,
    "rendezvous.json",
    "rendezvous.secret",
    "rendezvous.seats",
    "launches.jsonl",
    "loggers.json",
    "ended.json",
    "requeues.jsonl",
)
FOLDERS = (LEDGER, SNAPSHOTS, "tensorboard", "log", "steps")
OF_FILES = ("log", "steps")  # folders that hold nothing but files, written by name
LINES_AT_ONCE = 1000
MOST_BYTES = 1 << 38  # of a file; timing.jsonl grows by 0.1 GB a day
MAKE_ROOM = "free space there, or choose another --run-dir; the last good snapshot is kept"
LOOK = "ls -l, and who else writes there; the same command goes on from the last snapshot"
OF_ATTEMPT = re.compile(r"attempt-([0-9]{4,12})\.rank-([0-9]{1,12})\.jsonl")


class RunDir:
    """An open run directory, held by a lock until it is closed.

    fresh: what was there before is renamed to the first free `<dir>.old-N`, unless an earlier rank
    of this launch has begun it.  of_nodes: for a launch on several nodes.  attempt: that goes on
    here. Raises InputError if another live run holds it, or if the place cannot be written."""

    def __init__(
        self,
        path: Path,
        lock_wait: float,
        fresh: bool = False,
        of_nodes: bool = False,
        attempt: int | None = None,
    ) -> None:
        self.path = path
        fresh = fresh and not is_kept(path)
        if fresh:
            move_aside(path, lock_wait, of_nodes)
        self._lock = open_lock(path, lock_wait, NOBODY if fresh else None, of_nodes)
        if fresh and not _is_empty(
            path
        ):  # another run came when the old one had gone, and has ended already
            self._lock.release()
            raise self._lock.refusal()
        try:
            refuse_unwritable(path)
        except InputError:
            self._lock.release()
            raise
        for name in (CONFIG, RESULT, METRICS):
            durable.remove_unfinished(path, name)
        before = owner_of(path)
        self.attempt = attempt or 1 + max([before.get("attempt") or 0, *attempts_in_ledger(path)])
        self.has_saved: bool = before.get("saved", False)
        self._say_who()

    def heartbeat(self, every: float = 0.0) -> None:
        """Say that the writer lives, unless it was said in the last `every` seconds.

        Raises InputError where another one has taken its place.
        """
        if time.monotonic() - self.said >= every:
            self.guard()
            with suppress(StorageFault):  # said again a second later
                self._say_who()

    def _say_who(self) -> None:
        self.said = time.monotonic()
        self.has_saved = self.has_saved or bool(snapshot_paths(self.path / SNAPSHOTS))
        about = {
            "attempt": self.attempt,
            "heartbeat": round(time.time(), 1),
            "saved": self.has_saved,
        }
        self._lock.write({"job": os.environ.get("SLURM_JOB_ID"), **about})

    def guard(self) -> None:
        """Raises InputError if another run has taken the directory over. Before every write that
        replaces.
        """
        self._lock.guard()

    def stored(self, name: str) -> dict[str, Any] | None:
        """config.json or result.json, or None."""
        return stored_in(self.path, name)

    def store(self, name: str, value: dict[str, Any]) -> None:
        """Replace config.json or result.json, whole or not at all."""
        self.guard()
        durable.write(self.path / name, json.dumps(value, indent=1) + "\n")

    def refuse_lost_snapshots(self) -> None:
        """Raise InputError where the run has saved snapshots and none is left: it would begin again
        at step 0.
        """
        if self.has_saved or (self.path / RESULT).exists():
            step = last_step(self.path)
            raise InputError(
                f"run directory {self.path} has no snapshot any more, and its {METRICS} has {step} steps",
                f"put a snapshot back into {self.path / SNAPSHOTS}, or --fresh to begin again",
            )

    def cut_metrics(self, step: int, steps_per_epoch: int) -> None:
        """Forget lines after `step` (and a torn last one): the run goes on from there.

        An evaluation in mid-epoch, made because the run was to stop there, is forgotten too.
        """
        log = self.path / METRICS
        if not log.exists():
            return
        with (
            name_file_in_errors(log),
            log.open(errors="replace", encoding="utf-8") as file,
            durable.replace_file(log) as aside,
            os.fdopen(open_without_links(aside, os.O_WRONLY), "w", encoding="utf-8") as new,
        ):
            new.writelines(kept_lines(file, step, steps_per_epoch))
            new.flush()
            self.guard()

    def cut_last_metrics(self, step: int, steps_per_epoch: int) -> None:
        """The same where a run goes on in place: it takes as long after a million steps as after
        ten.

        What is to be forgotten is at the end, since the start has cut the file and nobody else has
        added to it."""
        log = self.path / METRICS
        with (
            suppress(FileNotFoundError),
            name_file_in_errors(log),
            os.fdopen(open_without_links(log, os.O_RDWR), "rb+") as file,
        ):
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - BLOCK_BYTES))
            for text in reversed(file.read().splitlines(keepends=True)):
                line = parse_line(text.decode(errors="replace"))
                if (
                    text.endswith(b"\n")
                    and is_up_to(step, line)
                    and is_lasting(line, steps_per_epoch)
                ):
                    break
                end -= len(text)
            self.guard()
            file.truncate(end)

    def close(self, failed: bool = False) -> None:
        """Let the next run in. failed: not yet, where a launcher lives that may start this one's
        next attempt.
        """
        if failed and has_fd_store():
            self._lock.close()
        else:
            self._lock.release()


def stored_in(run_dir: Path, name: str) -> dict[str, Any] | None:
    """config.json or result.json, or None. Raises InputError where it is damaged, or of a newer
    version.
    """
    try:
        value: dict[str, Any] = typed_file.parse_json(typed_file.read_file(run_dir / name), dict)
        refuse_newer(value, run_dir / name)
        key, kind = KEY[name]
        convert(value[key], kind, key)
        return value
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{run_dir / name} is damaged ({error})", "--fresh") from error


def refuse_newer(stored: dict[str, Any], path: Path) -> None:
    """Raises InputError where a later stepladder wrote the file: what it means now may not be what
    it meant.
    """
    schema = stored.get("schema", SCHEMA)
    if schema > SCHEMA:
        raise InputError(
            f"{path} was written by a newer stepladder: its schema is {schema}, this one knows {SCHEMA}",
            "pip install --upgrade stepladder, or another --run-dir",
        )


def last_step(run_dir: Path) -> int:
    """Return the step of the last sound line of metrics.jsonl, or 0."""
    with suppress(OSError), (run_dir / METRICS).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - BLOCK_BYTES))
        for text in reversed(file.read().splitlines()):
            line = parse_line(text.decode(errors="replace"))
            if isinstance(line, dict) and is_count(line.get("step")):
                return int(line["step"])
    return 0


def kept_lines(file: Iterable[str], step: int, steps_per_epoch: int) -> Iterator[str]:
    """Lines of metrics.jsonl up to `step`, as far as they are sound."""
    lines = iter(file)
    while texts := list(islice(lines, LINES_AT_ONCE)):
        for text, line in zip(texts, parse_lines(texts), strict=True):
            if not (text.endswith("\n") and is_up_to(step, line)):
                return
            if is_lasting(line, steps_per_epoch):
                yield text


def is_up_to(step: int, line: Any) -> bool:
    """Whether a line of metrics.jsonl is sound, and of no later step."""
    return isinstance(line, dict) and is_count(line.get("step")) and line["step"] <= step


def is_lasting(line: dict[str, Any], steps_per_epoch: int) -> bool:
    """A step's line, or an evaluation's at the end of an epoch."""
    return "lr" in line or line["step"] % steps_per_epoch == 0


def refuse_unwritable(path: Path) -> None:
    """Raises InputError where something is in the place of what a run writes, or may not be
    written.
    """
    if above := find_obstacle(path):
        found = (
            f"run directory {path} cannot be written: {above} is not a folder that you can write to"
        )
        raise InputError(found, "--run-dir DIR in a place you can write to")
    inside = (
        one
        for name in OF_FILES
        if (path / name).is_dir()
        for one in sorted((path / name).iterdir())
    )
    for place in [*(path / name for name in FILES + FOLDERS), *inside]:
        is_folder = place.name in FOLDERS and place.parent == path
        if os.path.lexists(place):
            if not (place.is_dir() if is_folder else place.is_file()):
                found = f"{place} is not a {'folder' if is_folder else 'file'}, as the run needs it"
                raise InputError(found, f"mv {place} {place}.other, or another --run-dir")
            refuse_link(place, is_folder)
            is_added_to = not is_folder and place.name != LOCK  # which is cut to its length
            if (
                is_added_to and place.stat().st_size > MOST_BYTES
            ):  # nothing could be added to its end
                found = f"{place} has {place.stat().st_size} bytes, more than {MOST_BYTES}"
                raise InputError(found, f"mv {place} {place}.other, or another --run-dir")
            if not os.access(place, os.W_OK):
                raise InputError(
                    f"{place} cannot be written", f"chmod u+w {place}, or another --run-dir"
                )


def refuse_link(place: Path, is_folder: bool) -> None:
    """Raise InputError for a link by which another user could make this run write into a file
    elsewhere.

    A folder may be a link that this user has made, such as one to a larger disk.
    """
    if is_foreign_link(place) or (place.is_symlink() and not is_folder):
        found = f"{place} is a link to {place.readlink()}, and a run writes into its own directory alone"
        raise InputError(found, f"mv {place} {place}.other, or another --run-dir")


@contextmanager
def naming_storage(run_dir: Path) -> Iterator[None]:
    """Errors of the file system that the block meets in the run directory, in one line with the
    file.

    Raises InputError where the disk takes no more or does not work, StorageFault where the reason
    may pass. What a job meets at its own files stays as it is, but for a full disk, of which writes
    do not name the file."""
    try:
        yield
    except OSError as error:
        place = (
            os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(run_dir)
        )
        is_ours = error.filename is not None and _is_of_run(place, run_dir)
        named: Exception = error
        if error.errno in FULL_ERRNOS:
            named = InputError(f"{place} cannot be written: {error.strerror}", MAKE_ROOM)
        elif error.errno in TRANSIENT_ERRNOS and is_ours:
            named = StorageFault(f"{place} cannot be used: {error.strerror}")
        elif is_ours:  # also one that is gone, or another kind of file
            hint = DISK_HINT if error.errno in DEVICE_ERRNOS else LOOK
            named = InputError(f"{place} cannot be used: {error.strerror}", hint)
        if named is error:
            raise
        if hasattr(error, "step"):
            record_step(named, error.step)
        raise named from error


def _is_of_run(place: str, run_dir: Path) -> bool:
    """Return whether the run itself uses this path: what a job makes in the run directory is the
    job's.
    """
    path, folder = Path(os.path.realpath(place)), Path(os.path.realpath(run_dir))
    if not path.is_relative_to(folder):
        return False
    first = path.relative_to(folder).parts[:1]
    return not first or first[0] in FILES + FOLDERS


def ledgers(run_dir: Path) -> Iterator[tuple[int, int]]:
    """Attempt and rank of each file in the ledger."""
    for path in (run_dir / LEDGER).glob("attempt-*"):
        if found := OF_ATTEMPT.fullmatch(path.name):
            yield int(found[1]), int(found[2])


def attempts_in_ledger(run_dir: Path) -> set[int]:
    """The numbers of those that have begun one."""
    return {attempt for attempt, _ in ledgers(run_dir)}


def snapshot_paths(folder: Path) -> list[Path]:
    """Complete snapshots in a folder of them, oldest first."""
    found = (path for path in folder.glob("step_*") if path.is_dir() and not path.suffix)
    return sorted(
        found, key=lambda path: (len(path.name), path.name)
    )  # a step may have more than eight digits


def move_aside(path: Path, lock_wait: float = 30.0, of_nodes: bool = False) -> Path | None:
    """Rename a run directory to the first free `<dir>.old-N`. None where there is nothing to keep.

    Raises InputError if it is no run's, if a live run holds it, or finished it while this one
    waited."""
    if not path.exists() or _is_empty(path):
        return None
    path = path.absolute()
    if Path.cwd().is_relative_to(path.resolve()):
        raise InputError(
            f"--fresh would move {path} away, and this command runs in it", "--run-dir DIR below it"
        )
    if not any(os.path.lexists(path / name) for name in (*FILES, LEDGER, SNAPSHOTS)):
        raise InputError(
            f"--fresh would move {path} away, and it holds no run",
            "leave --fresh out, or another --run-dir",
        )
    held = open_lock(path, lock_wait, of_nodes=of_nodes)
    try:
        if held.waited and (path / RESULT).exists():
            raise held.refusal()
        names = (path.with_name(f"{path.name}.old-{number}") for number in count(1))
        held.folder = path.rename(next(name for name in names if not name.exists()))
        return held.folder
    finally:
        held.release()


def open_lock(
    path: Path, wait: float, expected: dict[str, Any] | None = None, of_nodes: bool = False
) -> Lock:
    """A `Lock` of the folder, which is made if need be. Raises InputError."""
    with as_input_error(
        f"run directory {path} cannot be written", "--run-dir DIR in a place you can write to"
    ):
        durable.make_folder(path)
        return Lock(path, wait, expected, of_nodes)


def _is_empty(path: Path) -> bool:
    """But for the locks of those that came to look."""
    return path.is_dir() and all(
        inside.name == LOCK or inside.name.startswith(HELD) for inside in path.iterdir()
    )


def finite(value: float) -> float | None:
    """JSON has no word for infinities and what is not a number."""
    return value if math.isfinite(value) else None

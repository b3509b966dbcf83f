"""Where the ranks of one node print.

A rank is forked by the server, so it opens what it prints to by name: a file, or a pipe in the file system.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from stepladder.core.console import clear_bar, draw_bar, say
from stepladder.core.errors import naming
from stepladder.launcher.local.screen import Screen

CHUNK = 1 << 16


@dataclass
class Stream:
    """One pipe. to: 1 or 2, or 0 where nothing is shown.  log: the rank's file, or None."""

    prefix: bytes
    to: int
    log: BinaryIO | None
    screen: Screen = field(default_factory=Screen)

    @property
    def terminal(self) -> TextIO | None:
        """Where it is shown, if that is one."""
        target = sys.stdout if self.to == 1 else sys.stderr
        return target if self.to and target.isatty() else None


@dataclass
class Output:
    """One view of all ranks, a line at a time; by default they print to the launcher's own streams.

    A progress bar stays one on a terminal; in a log it is a line every ten seconds, and at its end.

    prefixed: show each line after its rank.  log_dir: a file per rank there, with both streams.
    shown: whether a stream (1 or 2) of a local rank is to be seen.
    """

    prefixed: bool = False
    log_dir: Path | None = None
    shown: Callable[[int, int], bool] = lambda *_: True
    streams: dict[int, Stream] = field(default_factory=dict, init=False)  # to be read, by file descriptor

    def open(self, file: Path, rank: int, local_rank: int) -> tuple[Path, Path] | None:
        """Where a rank's stdout and stderr go; None: to the launcher's own. file: a name for them, still free."""
        if not self.prefixed and self.log_dir is None:
            return None
        log = self._open_log(self.log_dir / f"{file.name}.log") if self.log_dir is not None else None
        pipes = file.with_name(f"{file.name}.1"), file.with_name(f"{file.name}.2")
        for number, pipe in enumerate(pipes, start=1):
            os.mkfifo(pipe)
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            prefix = f"[rank {rank}] ".encode() if self.prefixed else b""
            self.streams[reader] = Stream(prefix, number if self.shown(local_rank, number) else 0, log)
        return pipes

    def _open_log(self, path: Path) -> BinaryIO:
        with naming(f"--log-dir {path.parent} cannot be written", "--log-dir DIR in a place you can write to"):
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # a FIFO would wait for its reader
            return open(os.open(path, flags, 0o666), "ab", buffering=0)  # noqa: PTH123

    def read(self, ready: Iterable[Any]) -> None:
        """Show what has come on those of our streams that are among `ready`."""
        for reader in [fd for fd in ready if fd in self.streams]:
            with suppress(BlockingIOError):
                data = os.read(reader, CHUNK)
                self._show(self.streams[reader], data)
                if not data:
                    del self.streams[reader]
                    os.close(reader)
        for stream in self.streams.values():
            self._write(stream, stream.screen.due(all_bars=stream.terminal is None))
        self._draw()

    def _show(self, stream: Stream, data: bytes) -> None:
        """Whole lines, or those of stdout and stderr would mix in the log."""
        self._write(stream, stream.screen.feed(data) if data else stream.screen.end())

    def _write(self, stream: Stream, lines: list[bytes]) -> None:
        if lines and stream.log is not None:
            try:
                stream.log.write(b"".join(lines))
            except OSError as error:  # a full disk ends the log, never the ranks
                say(f"the ranks' output is kept no more: {self.log_dir}: {error.strerror}")
                stream.log = None
        if lines and stream.to:
            write(stream.to, b"".join(stream.prefix + line for line in lines))

    def _draw(self) -> None:
        """The bar of the first rank that has one. Those of others are shown when they are done."""
        for stream in self.streams.values():
            if stream.screen.live and (terminal := stream.terminal):
                return draw_bar((stream.prefix + stream.screen.live).decode(errors="replace"), terminal)

    def drain(self) -> None:
        """Show what the pipes still hold, when the ranks have ended: a child of theirs may keep one open."""
        while found := ready(self.streams, 0.0):
            self.read(found)

    def end_attempt(self) -> None:
        """These ranks are gone."""
        self.drain()
        for reader, stream in self.streams.items():
            self._show(stream, b"")
            os.close(reader)
            if stream.log is not None:
                stream.log.close()
        self.streams.clear()

    def forget(self) -> None:
        """The ranks were refused before they began: what they printed is not kept where another run may be."""

    def close(self) -> None:
        """There will be no more ranks."""
        self.end_attempt()


def ready(streams: Iterable[int], seconds: float) -> list[int]:
    """Those that have something to be read, or have ended: of any number, where `select` stops at 1024."""
    asked = select.poll()
    for stream in streams:
        asked.register(stream, select.POLLIN)
    return [stream for stream, _ in asked.poll(1000 * seconds)]


class LogFiles(Output):
    """The first rank prints to the launcher's own streams, the others to files, for the eyes of later.

    folder: gets those that are not empty, if its parent, the run directory, has come about.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.files: list[Path] = []

    def open(self, file: Path, rank: int, local_rank: int) -> tuple[Path, Path] | None:
        if rank == 0:
            return None
        self.files.append(file.with_name(f"{file.name}.log"))
        return self.files[-1], self.files[-1]

    def forget(self) -> None:
        self.files.clear()

    def close(self) -> None:
        kept = [path for path in self.files if path.exists() and path.stat().st_size]
        if kept and self.folder.parent.is_dir():
            try:  # behind what earlier runs have left
                self.folder.mkdir(exist_ok=True)
                for path in kept:
                    with (
                        path.open("rb") as new,
                        (self.folder / path.name).open("ab") as log,
                    ):
                        shutil.copyfileobj(new, log)
            except OSError as error:
                say(f"the ranks' output cannot be kept in {self.folder}: {error.strerror}")


def write(number: int, data: bytes) -> None:
    """To our own stdout or stderr; a reader that has gone (`| head`) does not end the ranks."""
    target = sys.stdout if number == 1 else sys.stderr
    clear_bar()
    with suppress(BrokenPipeError):
        target.flush()
        target.buffer.write(data)
        target.buffer.flush()

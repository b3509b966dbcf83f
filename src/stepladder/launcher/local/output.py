"""Where the ranks of one node print: to the launcher's own streams, or into pipes that the launcher
reads.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from stepladder.core.console import clear_bar, draw_bar, say
from stepladder.core.errors import naming
from stepladder.core.own_file import open_own
from stepladder.launcher.local.screen import Screen
from stepladder.rank.open_file import OpenFile

CHUNK = 1 << 16
TO_ADD = os.O_WRONLY | os.O_APPEND | os.O_CREAT


@dataclass
class Stream:
    """One pipe. to: 1 or 2, or 0 where nothing is shown.  log: the rank's file, or None.

    name: of a file for what is printed, where it is not opened yet.
    """

    prefix: bytes
    to: int
    log: BinaryIO | None
    name: str = ""
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
    streams: dict[int, Stream] = field(
        default_factory=dict, init=False
    )  # to be read, by file descriptor

    @contextmanager
    def open(self, name: str, rank: int, local_rank: int) -> Iterator[Sequence[OpenFile]]:
        """Yield the pipes for stdout and stderr of a rank that starts in the block; none: the
        launcher's own.

        name: of its log, without an ending.
        """
        pipes = self._open_pipes(name, rank, local_rank)
        try:
            yield pipes
        finally:
            for pipe in set(pipes):
                pipe.close()  # the rank has them

    def _open_pipes(self, name: str, rank: int, local_rank: int) -> Sequence[OpenFile]:
        if not self.prefixed and self.log_dir is None:
            return ()
        log = self._open_log(self.log_dir / f"{name}.log") if self.log_dir is not None else None
        prefix = f"[rank {rank}] ".encode() if self.prefixed else b""
        return [
            self._add(Stream(prefix, number if self.shown(local_rank, number) else 0, log))
            for number in (1, 2)
        ]

    def _add(self, stream: Stream) -> OpenFile:
        """Return the end of a new pipe into which a rank prints."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self.streams[reader] = stream
        return OpenFile(writer)

    def _open_log(self, path: Path) -> BinaryIO:
        with naming(
            f"--log-dir {path.parent} cannot be written",
            "--log-dir DIR in a place you can write to",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.fdopen(open_own(path, TO_ADD), "ab", buffering=0)

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
                return draw_bar(
                    (stream.prefix + stream.screen.live).decode(errors="replace"), terminal
                )

    def drain(self) -> None:
        """Show what the pipes still hold, when the ranks have ended: a child of theirs may keep one
        open.
        """
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

    def begin(self) -> None:
        """Note that the ranks have opened the run directory."""

    def forget(self) -> None:
        """Note that the ranks were refused before they began: what they printed is not kept where
        another run may be."""

    def close(self) -> None:
        """There will be no more ranks."""
        self.end_attempt()


def ready(streams: Iterable[int], seconds: float) -> list[int]:
    """Those that have something to be read, or have ended: of any number, where `select` stops at
    1024.
    """
    asked = select.poll()
    for stream in streams:
        asked.register(stream, select.POLLIN)
    return [stream for stream, _ in asked.poll(1000 * seconds)]


class LogFiles(Output):
    """The first rank prints to the launcher's own streams, the others into files of the run
    directory.

    What a rank has printed is written at once, and as it is: `tail -f` follows it, and `kill -9`
    loses nothing. Until the ranks have opened the run directory, which may be another run's before,
    it waits in memory.

    folder: gets a file for each rank that has printed something.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.is_begun = False
        self.is_given_up = False
        self.waiting: list[tuple[str, bytes]] = []  # name of a file, and what is to be added to it

    def _open_pipes(self, name: str, rank: int, local_rank: int) -> Sequence[OpenFile]:
        if rank == 0:
            return ()
        pipe = self._add(Stream(b"", 0, None, name=f"{name}.log"))
        return pipe, pipe  # of both streams: their order stays

    def begin(self) -> None:
        self.is_begun = True
        for name, data in self.waiting:
            self._add_to_log(name, data)
        self.waiting.clear()

    def forget(self) -> None:
        self.waiting.clear()

    def close(self) -> None:
        self.end_attempt()
        if self.waiting and self.folder.parent.is_dir():
            self.begin()

    def _show(self, stream: Stream, data: bytes) -> None:
        if self.is_begun:
            self._add_to_log(stream.name, data)
        elif data:
            self.waiting.append((stream.name, data))

    def _add_to_log(self, name: str, data: bytes) -> None:
        if not data or self.is_given_up:
            return
        try:
            self.folder.mkdir(exist_ok=True)
            # Opened anew each time: then its end is on a network file system's server, too, for who
            # follows it.
            with os.fdopen(open_own(self.folder / name, TO_ADD), "ab") as log:
                log.write(data)
        except OSError as error:  # a full disk ends the log, never the ranks
            self.is_given_up = True
            say(f"the ranks' output is kept no more: {self.folder}: {error.strerror}")


def write(number: int, data: bytes) -> None:
    """Write to our own stdout or stderr.

    What these do not take is lost, and the ranks go on: the reader has gone (`| head`), the terminal is closed, or
    the disk is full, which later may have space again. Python's own buffer would keep the data, and fail at the
    interpreter's end.
    """
    target = sys.stdout if number == 1 else sys.stderr
    clear_bar()
    with suppress(OSError):
        target.flush()
        while data:
            data = data[os.write(target.fileno(), data) :]

"""One view of what the ranks print: a line at a time, each with its rank; and one file per rank.

Each stream of a rank is a pipe in the file system, so that a rank forked by the server can open it by name.
"""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stepladder.core.errors import InputError

LONGEST_LINE = 1 << 16  # bytes; what has no end by then is shown in parts
CHUNK = 1 << 16
STREAMS = 1, 2  # stdout, stderr


@dataclass
class Stream:
    """One pipe. to: 1 or 2, or 0 where nothing is shown.  log: the rank's file, or None."""

    prefix: bytes
    to: int
    log: BinaryIO | None
    rest: bytes = b""


def open_log(folder: Path, name: str) -> BinaryIO:
    """To append to. Raises InputError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / name).open("ab")
    except OSError as error:
        found = f"--log-dir {folder} cannot be written: {error.strerror}"
        raise InputError(found, "--log-dir DIR in a place you can write") from error


class Output:
    """The streams of one node's ranks.

    prefixed: show each line after its rank.  log_dir: a file per rank there, with both streams.
    shown: whether a stream (1 or 2) of a local rank is to be seen.
    """

    def __init__(
        self, prefixed: bool, log_dir: Path | None = None, shown: Callable[[int, int], bool] = lambda *_: True
    ) -> None:
        self.prefixed, self.log_dir, self.shown = prefixed, log_dir, shown
        self.streams: dict[int, Stream] = {}

    def open(self, file: Path, rank: int, local_rank: int) -> tuple[Path, Path]:
        """The pipes for stdout and stderr of a rank. file: where they go, without ending; names the log too."""
        log = open_log(self.log_dir, f"{file.name}.log") if self.log_dir is not None else None
        pipes = []
        for number in STREAMS:
            pipes.append(file.with_name(f"{file.name}.{number}"))
            os.mkfifo(pipes[-1])
            reader = os.open(pipes[-1], os.O_RDONLY | os.O_NONBLOCK)
            prefix = f"[rank {rank}] ".encode() if self.prefixed else b""
            self.streams[reader] = Stream(prefix, number if self.shown(local_rank, number) else 0, log)
        return pipes[0], pipes[1]

    def read(self, ready: Iterable[Any]) -> None:
        """Show what has come on those of our pipes that are among `ready`."""
        for reader in [fd for fd in ready if fd in self.streams]:
            stream = self.streams[reader]
            try:
                data = os.read(reader, CHUNK)
            except BlockingIOError:
                continue
            if not data:
                del self.streams[reader]
                os.close(reader)
            self._show(stream, data)

    def _show(self, stream: Stream, data: bytes) -> None:
        """Whole lines, or those of stdout and stderr would mix in the log; a carriage return ends one too."""
        *lines, rest = re.split(rb"(?<=[\r\n])(?<!\r(?=\n))", stream.rest + data)
        if rest and (not data or len(rest) > LONGEST_LINE):
            lines.append(rest + b"\n")
            rest = b""
        stream.rest = rest
        if lines and stream.log is not None:
            stream.log.write(b"".join(lines))
            stream.log.flush()
        if lines and stream.to:
            write(stream.to, b"".join(stream.prefix + line for line in lines))

    def drain(self) -> None:
        """Show what the pipes still hold, when the ranks have ended: a child of theirs may keep one open."""
        while self.streams and (ready := select.select(list(self.streams), [], [], 0)[0]):
            self.read(ready)

    def close(self) -> None:
        for reader, stream in self.streams.items():
            self._show(stream, b"")
            os.close(reader)
            if stream.log is not None:
                stream.log.close()
        self.streams.clear()


def write(number: int, data: bytes) -> None:
    """To our own stdout or stderr; a reader that has gone (`| head`) does not end the ranks."""
    target = sys.stdout if number == 1 else sys.stderr
    with suppress(BrokenPipeError):
        target.flush()
        target.buffer.write(data)
        target.buffer.flush()

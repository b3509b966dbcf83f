"""The output of the ranks of one node: to the launcher's own streams, or into pipes to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from stepladder.core.console import clear_bar, draw_bar, print_message
from stepladder.core.errors import as_input_error
from stepladder.core.safe_open import open_without_links
from stepladder.launcher.local.screen import Screen
from stepladder.rank.open_file import OpenFile

READ_BYTES = 1 << 16
APPEND_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
STDOUT = 1
STDERR = 2


class _LogFolder:
    """The folder of the ranks' log files. A full disk ends the logs, never the ranks.

    Args:
        path: The path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_failed = False

    def append(self, name: str, data: bytes) -> None:
        """Add data to a log file."""
        if self._has_failed:
            return
        try:
            self.path.mkdir(exist_ok=True)
            # It is opened each time: the close sends the data to the server of a network file
            # system, where others follow the file.
            with self._open(name) as log:
                log.write(data)
        except OSError as error:
            self._has_failed = True
            print_message(f"the ranks' output is no longer logged: {self.path}: {error.strerror}")

    def create(self, name: str) -> None:
        """Create an empty log file, and the folder.

        Raises:
            InputError: It cannot be created.
        """
        hint = "--log-dir DIR in a place you can write to"
        with as_input_error(f"--log-dir {self.path} cannot be written", hint):
            self.path.mkdir(parents=True, exist_ok=True)
            self._open(name).close()

    def _open(self, name: str) -> BinaryIO:
        return os.fdopen(open_without_links(self.path / name, APPEND_FLAGS), "ab")


class Stream:
    """The lines that come through one pipe.

    Args:
        prefix: What each line is shown after.
        target: STDOUT or STDERR, where the lines are shown; 0 to hide them.
        log: Is called with the lines too.
    """

    def __init__(
        self, prefix: bytes, target: int, log: Callable[[bytes], None] = lambda _: None
    ) -> None:
        self._prefix = prefix
        self._target = target
        self._log = log
        self._screen = Screen()

    def feed(self, data: bytes) -> None:
        """Show complete lines, since parts of stdout and stderr would mix."""
        self._show(self._screen.feed(data))

    def show_due_bars(self) -> None:
        """Show progress bars as lines from time to time, where there is no terminal."""
        self._show(self._screen.take_due_bars(with_live=self._terminal is None))

    def draw_live_bar(self) -> bool:
        """Draw the progress bar on the terminal, and return whether there is one to draw."""
        terminal = self._terminal
        if not self._screen.live or terminal is None:
            return False
        bar = self._prefix + self._screen.live
        draw_bar(bar.decode(errors="replace"), terminal)
        return True

    def end(self) -> None:
        """Show what remains when there will be no more data."""
        self._show(self._screen.end())

    def _show(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._log(b"".join(lines))
        if self._target:
            _write_to_own_stream(self._target, b"".join(self._prefix + line for line in lines))

    @property
    def _terminal(self) -> TextIO | None:
        """The terminal that shows the lines, if it is one."""
        if not self._target:
            return None
        target = sys.stdout if self._target == STDOUT else sys.stderr
        return target if target.isatty() else None


class Output:
    """What all ranks print, a line at a time. By default they print to the launcher's own streams.

    A progress bar remains one on a terminal. In a log it is a line every ten seconds and at its
    end.

    Args:
        prefixed: Whether to show each line after its rank.
        log_dir: The folder for a log file per rank, with both streams; None for no log files.
        shown: Returns whether a stream (STDOUT or STDERR) of a local rank is shown.
    """

    def __init__(
        self,
        prefixed: bool = False,
        log_dir: Path | None = None,
        shown: Callable[[int, int], bool] = lambda *_: True,
    ) -> None:
        # The open pipes, by file descriptor.
        self.streams: dict[int, Stream] = {}
        self._prefixed = prefixed
        self._logs = None if log_dir is None else _LogFolder(log_dir)
        self._shown = shown

    @contextmanager
    def open_pipes(self, name: str, rank: int, local_rank: int) -> Iterator[Sequence[OpenFile]]:
        """Make pipes for a rank that is started in the block.

        Args:
            name: The name of the rank's log file, without a suffix.
            rank: The number of the rank.
            local_rank: Its position among the ranks of its node.

        Yields:
            The pipes for stdout and stderr; none if it prints to the launcher's own streams.
        """
        pipes = self._make_pipes(name, rank, local_rank)
        try:
            yield pipes
        finally:
            for pipe in set(pipes):
                pipe.close()  # the rank has its own copy

    def _make_pipes(self, name: str, rank: int, local_rank: int) -> Sequence[OpenFile]:
        if not self._prefixed and self._logs is None:
            return ()
        targets = [number if self._shown(local_rank, number) else 0 for number in (STDOUT, STDERR)]
        prefix = f"[rank {rank}] ".encode() if self._prefixed else b""
        if self._logs is None:
            return [self._make_pipe(Stream(prefix, target)) for target in targets]
        self._logs.create(f"{name}.log")
        log = partial(self._logs.append, f"{name}.log")
        return [self._make_pipe(Stream(prefix, target, log)) for target in targets]

    def _make_pipe(self, stream: Stream) -> OpenFile:
        """Return the end of a new pipe into which a rank prints."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self.streams[reader] = stream
        return OpenFile(writer)

    def read(self, ready: Iterable[Any]) -> None:
        """Show what has come through those of our pipes that are among `ready`."""
        for reader in [item for item in ready if item in self.streams]:
            with suppress(BlockingIOError):
                self._read_pipe(reader)
        for stream in self.streams.values():
            stream.show_due_bars()
        self._draw_live_bar()

    def _draw_live_bar(self) -> None:
        """Draw the bar of the first rank that has one; those of others show when complete."""
        for stream in self.streams.values():
            if stream.draw_live_bar():
                return

    def _read_pipe(self, reader: int) -> None:
        data = os.read(reader, READ_BYTES)
        stream = self.streams[reader]
        if data:
            stream.feed(data)
        else:
            stream.end()
            del self.streams[reader]
            os.close(reader)

    def drain(self) -> None:
        """Show what the pipes still contain after the ranks have ended.

        A child process of a rank may keep a pipe open.
        """
        while ready := wait([*self.streams], 0.0):
            self.read(ready)

    def end_attempt(self) -> None:
        """Show the remaining output of ranks that have ended, and close their pipes."""
        self.drain()
        for reader, stream in self.streams.items():
            stream.end()
            os.close(reader)
        self.streams.clear()

    def begin(self) -> None:
        """Note that the ranks have opened the run directory."""

    def discard(self) -> None:
        """Discard the output of ranks that were refused before they opened the run directory.

        The run directory may be that of another run.
        """

    def close(self) -> None:
        """Note that no more ranks will be started."""
        self.end_attempt()


class LogFiles(Output):
    """The first rank prints to the launcher's own streams, the others into the run directory.

    What a rank has printed is written at once and unchanged: `tail -f` follows it, and `kill -9`
    loses nothing. It is held in memory until the ranks have opened the run directory, which may be
    that of another run before.

    Args:
        folder: The folder that gets a file for each rank that has printed something.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = _LogFolder(folder)
        self._has_begun = False
        self._pending: list[tuple[str, bytes]] = []  # names of files, and data for them

    def _make_pipes(self, name: str, rank: int, local_rank: int) -> Sequence[OpenFile]:
        if rank == 0:
            return ()
        pipe = self._make_pipe(_RawStream(partial(self.append, f"{name}.log")))
        return pipe, pipe  # one pipe for both streams preserves their order

    def begin(self) -> None:
        """Write what was held in memory: the ranks have opened the run directory."""
        self._has_begun = True
        for name, data in self._pending:
            self._folder.append(name, data)
        self._pending.clear()

    def discard(self) -> None:
        """Discard what was held in memory."""
        self._pending.clear()

    def close(self) -> None:
        """Write what was held in memory, if there is a run directory."""
        self.end_attempt()
        if self._pending and self._folder.path.parent.is_dir():
            self.begin()

    def append(self, name: str, data: bytes) -> None:
        """Add data to a log file, once the ranks have opened the run directory."""
        self._pending.append((name, data))
        if self._has_begun:
            self.begin()


class _RawStream(Stream):
    """The bytes that come through one pipe, which are written to a log file unchanged."""

    def __init__(self, log: Callable[[bytes], None]) -> None:
        super().__init__(b"", 0, log)

    def feed(self, data: bytes) -> None:
        """Add the data to the log file."""
        self._log(data)


def _write_to_own_stream(target: int, data: bytes) -> None:
    """Write to our own stdout or stderr.

    What the stream does not accept is lost, and the ranks continue: its reader has ended
    (`| head`), the terminal is closed, or the disk is full, which may have space again later.
    Python's own buffer would keep the data, and fail at the interpreter's end.
    """
    stream = sys.stdout if target == STDOUT else sys.stderr
    clear_bar()
    with suppress(OSError):
        stream.flush()
        while data:
            written = os.write(stream.fileno(), data)
            data = data[written:]

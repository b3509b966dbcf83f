"""The output of the ranks of one node: to the launcher's own streams, or into pipes to it."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from stepladder.core.console import clear_bar, draw_bar, print_message
from stepladder.core.errors import as_input_error
from stepladder.core.safe_open import open_without_links
from stepladder.launcher.local.screen import Screen
from stepladder.rank.open_file import OpenFile

READ_BYTES = 1 << 16
APPEND_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
STDOUT = 1
STDERR = 2


class RankLogFile:
    """The log file of one rank. A full disk ends the log, never the rank.

    Args:
        path: The path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        self._file = os.fdopen(
            open_without_links(path, APPEND_FLAGS),
            "ab",
            buffering=0,
        )
        self._has_failed = False

    def write(self, data: bytes) -> None:
        """Add data to the file."""
        if self._has_failed:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._has_failed = True
            say_log_failed(self._folder, error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def say_log_failed(folder: Path, error: OSError) -> None:
    """Tell the user that the output of the ranks is lost from now on."""
    print_message(f"the ranks' output is no longer logged: {folder}: {error.strerror}")


class Stream:
    """The lines that come through one pipe.

    Args:
        prefix: What each line is shown after.
        target: STDOUT or STDERR, where the lines are shown; 0 to hide them.
        log: The file that gets the lines, if there is one.
    """

    def __init__(
        self,
        prefix: bytes,
        target: int,
        log: RankLogFile | None = None,
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

    def close(self) -> None:
        """Close the log file."""
        if self._log is not None:
            self._log.close()

    def _show(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._log is not None:
            self._log.write(b"".join(lines))
        if self._target:
            write_to_own_stream(self._target, b"".join(self._prefix + line for line in lines))

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

    Attributes:
        streams: The open pipes, by file descriptor.
    """

    def __init__(
        self,
        prefixed: bool = False,
        log_dir: Path | None = None,
        shown: Callable[[int, int], bool] = lambda *_: True,
    ) -> None:
        self.streams: dict[int, Stream] = {}
        self._prefixed = prefixed
        self._log_dir = log_dir
        self._shown = shown

    @contextmanager
    def open_pipes(
        self,
        name: str,
        rank: int,
        local_rank: int,
    ) -> Iterator[Sequence[OpenFile]]:
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

    def _make_pipes(
        self,
        name: str,
        rank: int,
        local_rank: int,
    ) -> Sequence[OpenFile]:
        if not self._prefixed and self._log_dir is None:
            return ()
        log = _open_log(self._log_dir / f"{name}.log") if self._log_dir is not None else None
        prefix = f"[rank {rank}] ".encode() if self._prefixed else b""
        pipes = []
        for number in (STDOUT, STDERR):
            target = number if self._shown(local_rank, number) else 0
            pipes.append(self._make_pipe(Stream(prefix, target, log)))
        return pipes

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
        while ready := poll_readable(self.streams, 0.0):
            self.read(ready)

    def end_attempt(self) -> None:
        """Show the remaining output of ranks that have ended, and close their pipes."""
        self.drain()
        for reader, stream in self.streams.items():
            stream.end()
            stream.close()
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


def _open_log(path: Path) -> RankLogFile:
    folder = path.parent
    with as_input_error(
        f"--log-dir {folder} cannot be written", "--log-dir DIR in a place you can write to"
    ):
        folder.mkdir(parents=True, exist_ok=True)
        return RankLogFile(path)


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
        self._folder = folder
        self._has_begun = False
        self._has_failed = False
        self._pending: list[tuple[str, bytes]] = []  # names of files, and data for them

    def _make_pipes(
        self,
        name: str,
        rank: int,
        local_rank: int,
    ) -> Sequence[OpenFile]:
        if rank == 0:
            return ()
        pipe = self._make_pipe(_RawStream(f"{name}.log", self._add))
        return pipe, pipe  # one pipe for both streams preserves their order

    def begin(self) -> None:
        """Write what was held in memory: the ranks have opened the run directory."""
        self._has_begun = True
        for name, data in self._pending:
            self.append(name, data)
        self._pending.clear()

    def discard(self) -> None:
        """Discard what was held in memory."""
        self._pending.clear()

    def close(self) -> None:
        """Write what was held in memory, if there is a run directory."""
        self.end_attempt()
        if self._pending and self._folder.parent.is_dir():
            self.begin()

    def _add(self, name: str, data: bytes) -> None:
        if self._has_begun:
            self.append(name, data)
        else:
            self._pending.append((name, data))

    def append(self, name: str, data: bytes) -> None:
        """Add data to a log file. A full disk ends the log, never the ranks."""
        if self._has_failed:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            # It is opened each time: the close sends the data to the server of a network file
            # system, where others follow the file.
            with os.fdopen(open_without_links(self._folder / name, APPEND_FLAGS), "ab") as log:
                log.write(data)
        except OSError as error:
            self._has_failed = True
            say_log_failed(self._folder, error)


class _RawStream(Stream):
    """The bytes that come through one pipe, which are written to a log file unchanged."""

    def __init__(
        self,
        name: str,
        add: Callable[[str, bytes], None],
    ) -> None:
        super().__init__(b"", 0)
        self._name = name
        self._add = add

    def feed(self, data: bytes) -> None:
        """Add the data to the log file."""
        self._add(self._name, data)


def poll_readable(streams: Iterable[int], seconds: float) -> list[int]:
    """Return the file descriptors that can be read or have ended, after a wait for the first.

    `select` would fail with descriptors beyond 1024.
    """
    poller = select.poll()
    for stream in streams:
        poller.register(stream, select.POLLIN)
    return [stream for stream, _ in poller.poll(1000 * seconds)]


def write_to_own_stream(target: int, data: bytes) -> None:
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

"""The log of a probe: one file of JSON lines per process.

Each line is written at once, so that the log of a rank that hangs ends where it hangs. Imports no
torch: an interpreter that never needs torch starts as fast as without the probe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType

from stepladder.tools.check.events import GroupJoined, ProcessStart
from stepladder.tools.check.probe_settings import PROBE_SETTINGS, RANK_AND_WORLD_SIZE, ProbeSettings
from stepladder.tools.probe.events import CodeLine, ProbeEvent

CHECK_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100,PTH120  # pathlib is slow to import
MAX_STACK_FRAMES = 12


class ProbeLog:
    """The log of this process.

    Args:
        settings: What the checker asks for.
    """

    def __init__(self, settings: ProbeSettings) -> None:
        self.settings = settings
        # With a separator, so that /me/train-data is not below /me/train.
        self.roots = tuple(root + os.sep for root in settings.roots)
        rank, world_size = (int(os.environ.get(name, -1)) for name in RANK_AND_WORLD_SIZE)
        # The rank, from the environment or the process group; -1 where it is not known.
        self.rank = rank
        # The number of ranks, from the same source.
        self.world_size = world_size
        self.pid = os.getpid()
        self.count = 0
        self.start_folder = os.getcwd()  # noqa: PTH109  # pathlib is slow to import
        self.file = self.open()
        self.write_start()

    def open(self) -> int:
        """Open the file of this process, and return its descriptor."""
        path = f"{self.settings.folder}/{self.pid}.jsonl"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def reopen_after_fork(self) -> None:
        self.pid = os.getpid()
        self.count = 0
        os.close(self.file)
        self.file = self.open()
        self.write_start()

    def write_start(self) -> None:
        self.write(ProcessStart(rank=self.rank, world=self.world_size))

    def set_group(self, rank: int, world_size: int) -> None:
        """Record the rank in the process group."""
        self.rank = rank
        self.world_size = world_size
        self.write(GroupJoined(rank=rank, world=world_size))

    def set_spawned_rank(self, rank: int) -> None:
        """Record the number of a process that the script has made.

        It is the rank until a process group says otherwise.
        """
        self.rank = rank
        self.write(ProcessStart(rank=rank))

    def write(self, event: ProbeEvent, at: CodeLine | None = None) -> None:
        self.count += 1
        os.write(self.file, event.to_line(self.count, at))

    def write_with_line(self, event: ProbeEvent) -> None:
        """Write an event with the line of the user's code that causes it."""
        self.write(event, self.user_line())

    def user_line(self) -> CodeLine | None:
        """Return the line of the innermost frame of the user's code."""
        frame = self.user_frame()
        return self.line_of(frame) if frame else None

    def line_of(self, frame: FrameType) -> CodeLine:
        code = frame.f_code
        return CodeLine(self.absolute_name(code.co_filename), frame.f_lineno, code.co_name)

    def user_caller(self) -> CodeLine | None:
        """Return the line of the user's code that called the innermost function of it."""
        frame = next(islice(self.user_frames(), 1, None), None)
        return self.line_of(frame) if frame else None

    def user_stack(self) -> str:
        """Return the functions and lines of the user's code, from the innermost one outwards."""
        frames = islice(self.user_frames(), MAX_STACK_FRAMES)
        return " < ".join(f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in frames)

    def user_frame(self) -> FrameType | None:
        """Return the innermost frame of the user's code."""
        return next(self.user_frames(), None)

    def user_frames(self) -> Iterator[FrameType]:
        """Yield the frames of the user's code, from the innermost one outwards."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self.is_user_file(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back

    def is_called_by_user(self, *skipped: str) -> bool:
        """Return whether the user's code called the function that calls this one, and no library.

        Frames of the check itself, which are wrappers, are skipped, and of other folders.
        """
        caller = sys._getframe(2)
        folders = CHECK_FOLDER, *skipped
        while caller.f_back is not None and caller.f_code.co_filename.startswith(folders):
            caller = caller.f_back
        return self.is_user_file(caller.f_code.co_filename)

    def absolute_name(self, name: str) -> str:
        """Return the path of a file that runpy, for example, knows by a relative one."""
        if name.startswith((os.sep, "<")):
            return name
        return os.path.normpath(os.path.join(self.start_folder, name))  # noqa: PTH118  # pathlib is slow to import

    def is_user_file(self, name: str) -> bool:
        name = self.absolute_name(name)
        if not name.startswith(self.roots):
            return False
        return "site-packages" not in name and not name.startswith(CHECK_FOLDER)


active_log: ProbeLog | None = None
# The process that the checker has started: its id, for those that it makes.
STARTED_PROCESS = "STEPLADDER_CHECK_PROCESS"


def start_log() -> None:
    """Start the log of this process where the environment asks for it."""
    global active_log
    if active_log is None and PROBE_SETTINGS in os.environ:
        active_log = ProbeLog(ProbeSettings.from_environment())
        os.environ.setdefault(STARTED_PROCESS, str(os.getpid()))
        os.register_at_fork(after_in_child=active_log.reopen_after_fork)


def is_made_by_script() -> bool:
    """Return whether this process was started by the script, and not by the checker."""
    return os.environ.get(STARTED_PROCESS) != str(os.getpid())


def current_log() -> ProbeLog:
    if active_log is None:
        start_log()
    assert active_log is not None
    return active_log


def record(event: ProbeEvent) -> None:
    """Write an event with the line of the user's code that causes it."""
    current_log().write_with_line(event)

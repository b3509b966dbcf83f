"""A rank's process, as the launcher that started it sees it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.core.paths import FOR_FORK_SERVER, SAFE_PATH
from stepladder.core.surroundings import ASK
from stepladder.launcher.local.monitor import SECONDS_BETWEEN_LOOKS
from stepladder.launcher.local.outcome import Evidence, Failure, Refused, Success, conclude
from stepladder.launcher.local.server_socket import reaching_server
from stepladder.rank.error_record import ErrorKind, RankError

TRIES_TO_START = 5


@dataclass(frozen=True)
class RankProcess:
    """A rank of the group.

    process: multiprocessing's; it has no common public type.  errors: the file in which ranks leave
    their errors."""

    rank: int
    local_rank: int
    process: Any
    errors: Path

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @property
    def error(self) -> RankError | None:
        return RankError.read(self.errors, self.rank)

    @property
    def ends_all(self) -> bool:
        """Whether its failure is one that the others have too, or notice, and then leave by
        themselves.

        Bad input is found by all at one place. A lost peer is another one's end, whose cause may
        not be written yet; and compiled code that aborts a rank breaks its connections, as another
        one may then say."""
        error = self.error
        if error is None:
            return bool(self.process.exitcode == -signal.SIGABRT)
        return error.kind in (ErrorKind.BAD_INPUT, ErrorKind.PEER_LOST, ErrorKind.STATE_LOST)

    @property
    def failure(self) -> Failure:
        """Its own, where it has failed."""
        errors = [error] if (error := self.error) else []
        found = conclude(Evidence({self.rank: self.process.exitcode}, errors))
        assert not isinstance(found, Success | Refused)
        return found

    def send(self, number: int, to_session: bool = False) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it has ended this moment
            (os.killpg if to_session else os.kill)(self.process.pid, number)


def start_process(process: Any) -> None:
    """Again, where the server that it is forked from was killed this moment: it is started anew
    then.
    """
    for _ in range(TRIES_TO_START):
        with suppress(EOFError, ConnectionError), reaching_server(), without_current_folder():
            process.start()
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)  # until it has ended altogether
    raise InputError("the process that ranks are forked from ends again and again", ASK)


@contextmanager
def without_current_folder() -> Iterator[None]:
    """Keep the current folder out of sys.path of interpreters that are started in the block.

    The process that ranks are forked from is started with `python -c`, which looks there first: a
    random.py or a cuda.py of the user's would be imported in place of Python's or NVIDIA's. The
    ranks have the launcher's path."""
    if SAFE_PATH in os.environ:
        yield
        return
    os.environ[SAFE_PATH] = FOR_FORK_SERVER
    try:
        yield
    finally:
        del os.environ[SAFE_PATH]

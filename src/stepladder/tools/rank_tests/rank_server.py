"""The process from which the ranks of all tests are forked, and the tests' end of it.

It is itself a fork of pytest's process, when all tests are collected and none has run. So a rank
has all modules and fixtures of the tests, but none of torch's threads, after which a fork hangs.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import traceback
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import NoReturn

import pytest

from stepladder.core.errors import DONE, FAILED
from stepladder.core.signals import die_with_parent
from stepladder.tools.rank_tests.reports import RanksEnd, make_reports


class RankServer:
    """The server, as pytest's process sees it.

    Args:
        session: The session, whose tests are collected.
    """

    def __init__(self, session: pytest.Session) -> None:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.suspend_global_capture(in_=True)
        self._items = {item.nodeid: number for number, item in enumerate(session.items)}
        self._connection, servers_end = multiprocessing.Pipe()
        self._pid = os.fork()
        if not self._pid:
            self._connection.close()
            capture._global_capturing = None  # each rank has files of its own for it
            _serve(session, servers_end)
        servers_end.close()
        capture.resume_global_capture()

    def run(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Run a test on its processes, and return its reports."""
        try:
            self._connection.send(self._items[item.nodeid])
            end: RanksEnd = self._connection.recv()
        except (EOFError, OSError):
            problem = "the process that ranks are forked from has ended: run pytest again"
            end = RanksEnd([], None, {}, problem, "")
        has_quit = end.rank is not None and end.records[end.rank] is None
        if has_quit and item.config.option.usepdb:
            item.session.shouldstop = "the debugger was left"
        return make_reports(item, end)

    def close(self) -> None:
        """End the server, and with it each rank."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)
        self._connection.close()
        os.waitpid(self._pid, 0)


def _serve(session: pytest.Session, connection: Connection) -> NoReturn:
    """Run the tests that pytest's process asks for, until it ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which ends this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    sys.stderr = io.StringIO()  # hangs are in the test's report
    code = FAILED
    try:
        from stepladder.tools.rank_tests.rank_runner import RankRunner

        with closing(RankRunner(session)) as runner:
            while True:
                connection.send(runner.run(session.items[connection.recv()]))
    except (EOFError, OSError, SystemExit):
        code = DONE
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    os._exit(code)

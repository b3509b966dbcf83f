"""Runs tests on ranks, in the process from which these are forked."""

from __future__ import annotations

import itertools
import pickle
import tempfile
import time
from pathlib import Path

import pytest

from stepladder.core.scratch import get_scratch_folder
from stepladder.launcher.diagnose.explanation import format_rank
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.rank_status import ProcessState
from stepladder.launcher.local.group_spec import GroupSpec
from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.outcome import BadInput, Raised, Success
from stepladder.rank.exchange_choice import EXCHANGE_VARIABLE
from stepladder.rank.open_file import MemoryFile
from stepladder.tools.rank_tests.rank_test import RankTest, Terminal, run_test
from stepladder.tools.rank_tests.reports import RanksEnd

NO_LIMIT_S = 1e9
HANG_S = 4.0  # after which ranks that can only wait for each other are ended


class RankRunner:
    """Runs tests, one after the other.

    Args:
        session: Has the tests.
    """

    def __init__(self, session: pytest.Session) -> None:
        has_debugger = session.config.option.usepdb
        self._terminal = Terminal() if has_debugger else None
        self._test: RankTest | None = None
        limits = Limits(NO_LIMIT_S, end_after=None if has_debugger else HANG_S)
        spec = GroupSpec(
            make_environment=self._make_environment,
            is_script=True,
            start_method="fork",
            report_failure=lambda _: None,
        )
        self._group = LocalGroup(self._work, 1, limits, spec)
        self._attempts = itertools.count()

    def _make_environment(self, env: dict[str, str]) -> dict[str, str]:
        assert self._test is not None
        return {**env, EXCHANGE_VARIABLE: self._test.exchange}

    def _work(self) -> int:
        assert self._test is not None
        return run_test(self._test, self._terminal)

    def run(self, item: pytest.Item) -> RanksEnd:
        """Run a test on its processes, and return how they have ended."""
        assert isinstance(item, pytest.Function)
        mark = item.get_closest_marker("ranks")
        assert mark is not None
        files = [MemoryFile("reports") for _ in range(int(str(item.callspec.params["num_ranks"])))]
        paths = tuple(file.path for file in files)
        with tempfile.TemporaryDirectory(dir=get_scratch_folder()) as folder:
            self._test = RankTest(item, paths, Path(folder) / "store", **mark.kwargs)
            return self._run_ranks(self._test)

    def _run_ranks(self, test: RankTest) -> RanksEnd:
        """Run the ranks of one test to their end."""
        group = self._group
        group.start_single_node(len(test.files), next(self._attempts))
        attempt = group.attempt
        limit = time.monotonic() + (NO_LIMIT_S if self._terminal else test.timeout)
        is_late = False
        while not is_late and not group.poll():
            is_late = time.monotonic() > limit
        statuses = attempt.inspect_ranks() if attempt.running else []
        explanation = attempt.monitor.explanation
        if is_late:
            attempt.end_within(0)
            explanation = explanation or explain_hang(statuses)
        outcome = attempt.end()
        problem = "" if isinstance(outcome, Success) else outcome.text
        rank = outcome.error.rank if isinstance(outcome, BadInput | Raised) else None
        details = []
        if explanation is not None:
            problem = explanation.sentence
            details = [f"usual cause: {explanation.cause}"]
            details += [line for status in explanation.ranks for line in format_rank(status)]
        if is_late:
            problem = f"not done after {test.timeout:g} s: {problem}"
        positions = {
            status.rank: status.describe_position()
            for status in statuses
            if status.state is ProcessState.RUNNING and status.frame and status.frame.is_users
        }
        data = [path.read_bytes() for path in test.files]
        records = [pickle.loads(part) if part else None for part in data]
        return RanksEnd(records, rank, positions, problem, "\n".join(details))

    def close(self) -> None:
        """End the ranks that still run."""
        self._group.close()

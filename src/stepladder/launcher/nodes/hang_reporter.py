"""Why ranks wait, explained by the agents of all nodes together and printed by one of them."""

from __future__ import annotations

import time
from contextlib import suppress

from torch.distributed import DistError

from stepladder.core.console import print_message
from stepladder.launcher.diagnose.inquiry import Inquiry, explain_answers
from stepladder.launcher.diagnose.rank_status import RankStatus
from stepladder.launcher.local.local_group import LocalGroup

EXPLANATION_TIMEOUT_S = 15.0  # for all nodes to report what they know of ranks that have ended
EXPLANATION_POLL_INTERVAL_S = 0.1


class HangReporter:
    """One agent's part in the explanation of hangs, for one start.

    Args:
        group: The ranks of this node.
        inquiry: The inquiry of all agents.
    """

    def __init__(self, group: LocalGroup, inquiry: Inquiry) -> None:
        self.group = group
        self.inquiry = inquiry

    def poll(self) -> None:
        """Ask all agents why ranks wait, and print the answer on the agent that asked first."""
        monitor = self.group.attempt.monitor
        with suppress(DistError):  # the store's node has exited
            answers = self.inquiry.poll(monitor.has_unreported_hang(), self._inspect_ranks)
            if answers:
                print_message(monitor.report_for_all_nodes(explain_answers(answers)))

    def _inspect_ranks(self) -> list[RankStatus]:
        """Return the state of the ranks here, and remember their wait as reported."""
        statuses = self.group.attempt.inspect_ranks()
        self.group.attempt.monitor.mark_hang_reported()
        return statuses

    def report_early_exit(self) -> bool:
        """Find out whether a rank of another node ended well while ranks here needed it.

        Returns:
            True if so; this agent or another one has printed it then.
        """
        deadline = time.monotonic() + EXPLANATION_TIMEOUT_S
        asks = True
        with suppress(DistError):
            while time.monotonic() < deadline:
                answers = self.inquiry.poll(asks, self._inspect_ranks)
                asks = asks and not self.inquiry.answered
                if answers:
                    explanation = explain_answers(answers)
                    if explanation.left_early:
                        print_message(explanation.with_cause)
                    return explanation.left_early
                if 0 < self.inquiry.answered < self.inquiry.current:
                    return True  # another agent has printed it
                time.sleep(EXPLANATION_POLL_INTERVAL_S)
        return False

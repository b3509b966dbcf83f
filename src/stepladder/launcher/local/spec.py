"""What the ranks of a group are: where they print, how they stop, what their failures mean."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from stepladder.launcher.local.judge import Judge
from stepladder.launcher.local.output import Inherited
from stepladder.launcher.local.rules import RULES, Rule
from stepladder.rank.preemption import HANDLED, SECONDS_TO_LEAVE, seconds_left

# torch._dynamo: the first optimizer of a process imports it, which takes longer than torch itself.
TORCH = "torch", "torch._dynamo"
SECONDS_TO_STOP = 30.0


def seconds_for_a_step() -> float:
    """Of a batch job: all that is left of its time, for a long step may use it up."""
    left = seconds_left() - SECONDS_TO_LEAVE
    return max(SECONDS_TO_STOP, left) if math.isfinite(left) else SECONDS_TO_STOP


@dataclass(frozen=True)
class Stopping:
    """How ranks are asked to stop, and ended. By default those of a job.

    signals: ask for it.  forwarded: are handed on to ranks, and end nothing.  stop_signal: that ranks get; 0: the
    one that came.  patience: seconds that they may take.  grace: seconds between SIGTERM and SIGKILL where another
    one's failure ends them; a job's snapshots are whole or absent, so it needs none, and would lose a SIGTERM in
    a collective.  own_sessions: each rank leads one. What it started ends with it, and it sees no Ctrl-C itself.
    """

    signals: tuple[int, ...] = HANDLED
    forwarded: tuple[int, ...] = ()
    stop_signal: int = signal.SIGTERM
    patience: Callable[[], float] = seconds_for_a_step
    grace: float = 0.0
    own_sessions: bool = False


@dataclass(frozen=True)
class GroupSpec:
    """What the ranks of a group are. By default those of a job, whose output is the launcher's own.

    preloaded: modules that the process which ranks are forked from has imported.  environment: all of a rank's
    variables, from those that say who it is.  rules: tell how a group has ended.
    """

    preloaded: tuple[str, ...] = (*TORCH, "stepladder.train.trainer")
    environment: Callable[[dict[str, str]], dict[str, str]] = dict
    output: Inherited = field(default_factory=Inherited)
    stopping: Stopping = field(default_factory=Stopping)
    rules: tuple[Rule, ...] = RULES
    judge: Judge = field(default_factory=Judge)

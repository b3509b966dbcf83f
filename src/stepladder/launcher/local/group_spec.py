"""What the ranks of a group are, and what they may be asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from stepladder.launcher.local.output import Output
from stepladder.rank.preemption import HANDLED, SECONDS_TO_LEAVE, seconds_left

SECONDS_TO_STOP = 30.0  # that a job may take, where no time limit is near


def seconds_for_a_step() -> float:
    """Of a batch job: all that is left of its time, for a long step may use it up."""
    left = seconds_left() - SECONDS_TO_LEAVE
    return max(SECONDS_TO_STOP, left) if math.isfinite(left) else SECONDS_TO_STOP


@dataclass(frozen=True)
class GroupSpec:
    """What the ranks of a group are. By default those of a job, whose output is the launcher's own.

    preloaded: modules that the process which ranks are forked from has imported.  environment: all
    of a rank's variables, from those that say who it is.  stop_signals: ask for a stop.  patience:
    seconds that ranks may take then.  is_script: they know nothing of us. Each leads a session:
    what it started ends with it, and it sees no Ctrl-C itself; it gets the signal that came, and
    SIGTERM where another one's failure ends it. A job's snapshots are whole or absent, so it needs
    none, and would lose a SIGTERM in a collective.  goes_on: the others do, in place, when a rank
    is lost.  takes_in: ranks of a node that comes join in place, too."""

    preloaded: tuple[str, ...] = ("stepladder.train.trainer", "stepladder.launcher.entry")
    environment: Callable[[dict[str, str]], dict[str, str]] = dict
    output: Output = field(default_factory=Output)
    stop_signals: tuple[int, ...] = HANDLED
    patience: Callable[[], float] = seconds_for_a_step
    is_script: bool = False
    goes_on: bool = False
    takes_in: bool = False

"""What the ranks of a group are, and how they are asked to stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from stepladder.launcher.local.outcome import Failure
from stepladder.launcher.local.output import Output
from stepladder.rank.preemption import TIME_LIMIT_MARGIN_S, TRAINING_STOP_SIGNALS, get_seconds_left

DEFAULT_STOP_TIMEOUT_S = 30.0  # where no time limit is near


def read_stop_timeout(typed_s: float | None = None) -> float:
    """Return the seconds that ranks may take to stop: those that the user has typed, if any.

    A batch job may use all that remains of its time limit, since a step may be long.
    """
    if typed_s is not None:
        return typed_s
    remaining_s = get_seconds_left() - TIME_LIMIT_MARGIN_S
    if not math.isfinite(remaining_s):
        return DEFAULT_STOP_TIMEOUT_S
    return max(DEFAULT_STOP_TIMEOUT_S, remaining_s)


@dataclass(frozen=True)
class GroupSpec:
    """What the ranks of a group are: by default ranks of a job, which print to our own streams.

    A script knows nothing of its launcher. Each of its ranks leads a session: the processes that it
    starts end with it, and it does not see Ctrl-C itself. It gets the signal that the launcher got,
    and SIGTERM before it is killed because of another rank's failure. A job needs no SIGTERM then,
    because its snapshots are complete or absent, and it would not see the signal in a collective.

    Args:
        preload_modules: The modules that the fork server imports.
        make_environment: Makes all environment variables of a rank, from those that identify it.
        output: Where ranks print.
        stop_signals: The signals that ask the group to stop.
        stop_timeout: Returns the seconds that ranks may take to stop.
        is_script: Whether the ranks run a script, not a job.
        start_method: That of multiprocessing; ranks are forked from this process itself by "fork".
        recovers_in_place: Whether the other ranks continue when one is lost.
        accepts_joining_nodes: Whether ranks of a new node join a group that trains.
        report_failure: What is called with each failure; None prints it.
    """

    preload_modules: tuple[str, ...] = ("stepladder.train.trainer", "stepladder.launcher.entry")
    make_environment: Callable[[dict[str, str]], dict[str, str]] = dict
    output: Output = field(default_factory=Output)
    stop_signals: tuple[int, ...] = TRAINING_STOP_SIGNALS
    stop_timeout: Callable[[], float] = read_stop_timeout
    is_script: bool = False
    start_method: Literal["forkserver", "fork"] = "forkserver"
    recovers_in_place: bool = False
    accepts_joining_nodes: bool = False
    report_failure: Callable[[Failure], None] | None = None

"""The phases of a step: a phase says what this rank does, and adds up its seconds.

    with comm.phases(READING):
        batch = next(batches)

The launcher reads the phase of a rank that hangs, timing.jsonl gets the seconds, and
`stepladder profile` observes the phases as marks in a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

from stepladder.rank import progress
from stepladder.rank.progress import TIMED

Observer = Callable[[str], AbstractContextManager[Any]]
UNTIMED_COLUMN = len(TIMED)
ALL: list[Phase] = []


class Phase:
    """A part of a run.

    Args:
        code: What the launcher reads, a constant of rank/progress.py; 0 keeps the code that is set.
        mark: The name of the phase in a trace, "" for none.
    """

    def __init__(self, code: int, mark: str = "") -> None:
        self.code = code
        self.mark = mark
        # The index of its seconds among the keys of timing.jsonl.
        self.column = list(TIMED).index(code) if code in TIMED else UNTIMED_COLUMN
        ALL.append(self)


STARTING_UP = Phase(progress.STARTING)
STEPPING = Phase(0, "step")  # a whole step, which the next five lie in
READING = Phase(progress.READING, "data")
FORWARD_PASS = Phase(progress.COMPUTING, "forward")
BACKWARD_PASS = Phase(progress.COMPUTING, "backward")
WAITING_FOR_RANKS = Phase(progress.WAITING, "gradients")
UPDATING = Phase(progress.UPDATING, "optimizer")
EXCHANGING = Phase(0, "exchange")  # within other phases: this rank waits for data of other ranks
BETWEEN_STEPS = Phase(0, "between steps")
REPLAYING = Phase(0, "replay")  # around the passes that repeat another rank's microbatch
EVALUATING = Phase(progress.EVALUATING)
SAVING = Phase(progress.SAVING)
ENDING = Phase(progress.ENDING)
REGROUPING = Phase(progress.WAITING)
# Within these, the time of EXCHANGING counts as waiting.
COMPUTE_COLUMNS = {FORWARD_PASS.column, BACKWARD_PASS.column, UPDATING.column}


class Phases:
    """The phases of one rank. A phase may lie within another one, but not within itself.

    Entering and leaving a phase costs half a microsecond.

    Args:
        slots: The numbers that this rank's launcher reads.
    """

    # Returns a context manager for each phase that has a mark; None if nobody observes.
    observer: Observer | None

    def __init__(self, slots: Any) -> None:
        # The seconds spent in each column since `take_seconds`.
        self.seconds = [0.0] * (UNTIMED_COLUMN + 1)
        # The column of the phase under way.
        self.column = UNTIMED_COLUMN
        self.observer = None
        timers: dict[Phase, _PhaseTimer] = {phase: _PhaseTimer(self, slots, phase) for phase in ALL}
        timers[EXCHANGING] = _ExchangeTimer(self, slots, EXCHANGING)
        # Returns the context manager of a phase. The same as calling the object, without a Python
        # frame: a step makes six such calls.
        self.timer = timers.__getitem__

    def __call__(self, phase: Phase) -> AbstractContextManager[None]:
        return self.timer(phase)

    def take_seconds(self) -> list[float]:
        """Return the seconds of each key of timing.jsonl since the last call."""
        seconds = self.seconds[:UNTIMED_COLUMN]
        self.seconds[:] = [0.0] * len(self.seconds)
        return seconds


class _PhaseTimer(AbstractContextManager[None]):
    """The context manager of one phase, made once and entered in every step."""

    __slots__ = ("mark_context", "outer_column", "phase", "phases", "slots", "start")

    def __init__(self, phases: Phases, slots: Any, phase: Phase) -> None:
        self.phases = phases
        self.slots = slots
        self.phase = phase
        self.mark_context: AbstractContextManager[Any] | None = None
        self.outer_column = UNTIMED_COLUMN
        self.start = 0.0

    def __enter__(self) -> None:
        phases = self.phases
        phase = self.phase
        self.outer_column = phases.column
        phases.column = phase.column
        if phase.code:
            self.slots[progress.PHASE] = phase.code
        if phases.observer is not None and phase.mark:
            self.mark_context = phases.observer(phase.mark)
            self.mark_context.__enter__()
        self.start = perf_counter()

    def __exit__(self, *raised: Any) -> None:
        phases = self.phases
        phases.column = self.outer_column
        phases.seconds[self.phase.column] += perf_counter() - self.start
        if self.mark_context is not None:
            mark_context = self.mark_context
            self.mark_context = None
            mark_context.__exit__(*raised)


class _ExchangeTimer(_PhaseTimer):
    """The context manager of EXCHANGING, whose time is not counted as this rank's own work.

    It may lie within a forward pass, where the weights of a block are gathered.
    """

    __slots__ = ()

    def __exit__(self, *raised: Any) -> None:
        if self.outer_column in COMPUTE_COLUMNS:
            seconds = perf_counter() - self.start
            self.phases.seconds[self.outer_column] -= seconds
            self.phases.seconds[WAITING_FOR_RANKS.column] += seconds
        super().__exit__(*raised)

"""Where a step's time goes: a phase says where this rank is, adds its seconds, and marks a trace
when asked.

    with comm.phases(READING):
        batch = next(batches)

The launcher's hang explainer reads the word, timing.jsonl gets the seconds, `stepladder profile`
observes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

from stepladder.rank import progress
from stepladder.rank.progress import TIMED

Observer = Callable[[str], AbstractContextManager[Any]]
UNTIMED_COLUMN = len(TIMED)


class Phase:
    """A part of a run. word: of rank/progress.py, 0 to leave it.  mark: its name in a trace."""

    def __init__(self, word: int, mark: str = "") -> None:
        self.word, self.mark = word, mark
        self.column = list(TIMED).index(word) if word in TIMED else UNTIMED_COLUMN
        ALL.append(self)


ALL: list[Phase] = []
STARTING = Phase(progress.STARTING)
STEPPING = Phase(0, "step")  # a whole step, around the next five
READING = Phase(progress.READING, "data")
FORWARD_PASS = Phase(progress.COMPUTING, "forward")
BACKWARD_PASS = Phase(progress.COMPUTING, "backward")
WAITING = Phase(progress.WAITING, "gradients")
EXCHANGING = Phase(
    0, "exchange"
)  # within others: data moves between ranks, and this one waits for it
UPDATING = Phase(progress.UPDATING, "optimizer")
BETWEEN_STEPS = Phase(0, "between steps")
REPLAYING = Phase(0, "replay")  # around reading, forward and backward of another rank's microbatch
EVALUATING = Phase(progress.EVALUATING)
SAVING = Phase(progress.SAVING)
ENDING = Phase(progress.ENDING)
REGROUPING = Phase(progress.WAITING)
COMPUTE_COLUMNS = {
    BACKWARD_PASS.column,
    FORWARD_PASS.column,
    UPDATING.column,
}  # what is MOVING within these counts as a wait


class Phases:
    """This rank's phases. `seconds`: spent per key of timing.jsonl since they were last taken.

    observer: asked for a context manager around each phase that has a mark; None: nobody looks. A
    phase may lie within another, but not within itself. It costs half a microsecond.  at: the
    column of the one under way."""

    observer: Observer | None

    def __init__(self, words: Any) -> None:
        self.seconds = [0.0] * (UNTIMED_COLUMN + 1)
        self.at, self.observer = UNTIMED_COLUMN, None
        # A call without a frame of Python: a step makes six.
        timed = {phase: _Timed(self, words, phase) for phase in ALL}
        self.of = (timed | {EXCHANGING: _Moving(self, words, EXCHANGING)}).__getitem__

    def __call__(self, phase: Phase) -> AbstractContextManager[None]:
        return self.of(phase)

    def take_seconds(self) -> list[float]:
        """Seconds per key of timing.jsonl since the last call."""
        taken = self.seconds[:UNTIMED_COLUMN]
        self.seconds[:] = [0.0] * len(self.seconds)
        return taken


class _Timed(AbstractContextManager[None]):
    """One phase of one rank; made once, entered in every step."""

    __slots__ = ("around", "began", "marked", "owner", "phase", "words")

    def __init__(self, owner: Phases, words: Any, phase: Phase) -> None:
        self.owner, self.words, self.phase = owner, words, phase
        self.marked: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        owner, phase = self.owner, self.phase
        self.around, owner.at = owner.at, phase.column
        if phase.word:
            self.words[progress.PHASE] = phase.word
        if owner.observer is not None and phase.mark:
            self.marked = owner.observer(phase.mark)
            self.marked.__enter__()
        self.began = perf_counter()

    def __exit__(self, *raised: Any) -> None:
        owner = self.owner
        owner.at = self.around
        owner.seconds[self.phase.column] += perf_counter() - self.began
        if self.marked is not None:
            marked, self.marked = self.marked, None
            marked.__exit__(*raised)


class _Moving(_Timed):
    """Where the weights of a block are gathered within its forward pass, that is no work of this
    rank's.
    """

    __slots__ = ()

    def __exit__(self, *raised: Any) -> None:
        if self.around in COMPUTE_COLUMNS:
            seconds = perf_counter() - self.began
            self.owner.seconds[self.around] -= seconds
            self.owner.seconds[WAITING.column] += seconds
        super().__exit__(*raised)

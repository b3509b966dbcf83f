"""One phase says where a rank is, adds its seconds, and is seen by whoever asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from stepladder.rank import progress
from stepladder.rank.progress import TIMING_KEYS
from stepladder.train import phases
from stepladder.train.phases import (
    BACKWARD_PASS,
    BETWEEN_STEPS,
    EXCHANGING,
    FORWARD_PASS,
    READING,
    SAVING,
    STARTING_UP,
    STEPPING,
    UPDATING,
    WAITING_FOR_RANKS,
    Phase,
    Phases,
)


@pytest.fixture
def slots() -> list[int]:
    return [0] * progress.NUM_SLOTS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as the test says."""
    now = [0.0]
    monkeypatch.setattr(phases, "perf_counter", lambda: now[0])
    return now


def test_a_phase_writes_its_word_and_adds_its_seconds(slots: list[int], clock: list[float]) -> None:
    phase = Phases(slots)
    with phase(READING):
        assert slots[progress.PHASE] == progress.READING
        clock[0] = 2.0
    for part in (FORWARD_PASS, BACKWARD_PASS):
        with phase(part):
            assert slots[progress.PHASE] == progress.COMPUTING
            clock[0] += 1.5
    assert dict(zip(TIMING_KEYS, phase.take_seconds(), strict=True)) == {
        "data": 2.0, "compute": 3.0, "wait": 0.0, "optimizer": 0.0, "snapshot": 0.0
    }  # fmt: skip
    assert phase.take_seconds() == [0.0] * len(TIMING_KEYS)


def test_what_encloses_others_leaves_their_word_and_is_not_timed(
    slots: list[int], clock: list[float]
) -> None:
    phase = Phases(slots)
    with phase(STEPPING):
        with phase(READING):
            pass
        clock[0] = 9.0
        with phase(BETWEEN_STEPS):
            assert slots[progress.PHASE] == progress.READING
    assert phase.take_seconds() == [0.0] * len(TIMING_KEYS)


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ((STEPPING, FORWARD_PASS), {"compute": 2.0, "wait": 5.0}),
        ((STEPPING, BACKWARD_PASS), {"compute": 2.0, "wait": 5.0}),
        ((STEPPING, UPDATING), {"optimizer": 2.0, "wait": 5.0}),
        ((STEPPING, WAITING_FOR_RANKS), {"wait": 7.0}),
        ((STEPPING, BETWEEN_STEPS, SAVING), {"snapshot": 7.0}),
        ((STEPPING, BETWEEN_STEPS), {}),
    ],
)
def test_while_data_moves_within_a_rank_s_own_work_it_waits(
    around: tuple[Phase, ...], expected: dict[str, float], slots: list[int], clock: list[float]
) -> None:
    phase = Phases(slots)
    with phase(STEPPING), phase(UPDATING):
        pass  # what BETWEEN leaves as the word
    with ExitStack() as stack:
        for outer in around:
            stack.enter_context(phase(outer))
        clock[0] += 1.0
        with phase(EXCHANGING):
            clock[0] += 5.0
        clock[0] += 1.0
    by_key = dict(zip(TIMING_KEYS, phase.take_seconds(), strict=True))
    assert {key: seconds for key, seconds in by_key.items() if seconds} == expected


def test_an_observer_is_around_each_phase_that_has_a_mark_also_when_it_raises(
    slots: list[int],
) -> None:
    events = []

    @contextmanager
    def observe(mark: str) -> Iterator[None]:
        events.append(f"{mark} begins")
        try:
            yield
        finally:
            events.append(f"{mark} ends")

    phase = Phases(slots)
    phase.observer = observe
    with phase(STARTING_UP), pytest.raises(KeyError), phase(STEPPING), phase(READING):
        raise KeyError
    assert events == ["step begins", "data begins", "data ends", "step ends"]

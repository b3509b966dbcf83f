"""While a process records its end, no handler of the job's or of a library's runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from stepladder.core.signals import mute_signal_handlers

NUMBERS = (signal.SIGCHLD, signal.SIGUSR1)


def fail(number: int, _: object) -> None:
    raise RuntimeError(f"a worker has ended ({number})")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    handlers = {
        number: handler
        for number in signal.valid_signals()
        if callable(handler := signal.getsignal(number))
    }
    previous = {number: signal.signal(number, fail) for number in NUMBERS}
    yield
    for number, handler in {**handlers, **previous}.items():
        signal.signal(number, handler)


def test_a_handler_does_not_run_after_it() -> None:
    error = ValueError()
    assert mute_signal_handlers(error) is error
    for number in NUMBERS:
        signal.raise_signal(number)


def test_an_error_of_a_handler_that_ran_meanwhile_is_the_one_to_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signals = signal.valid_signals()
    pending = [signal.SIGCHLD]

    def list_signals() -> set[signal.Signals]:
        while pending:
            signal.raise_signal(pending.pop())
        return signals

    monkeypatch.setattr(signal, "valid_signals", list_signals)
    try:
        raise ValueError("the first")
    except ValueError as error:
        recorded = mute_signal_handlers(error)
        assert isinstance(recorded, RuntimeError) and recorded.__context__ is error
    signal.raise_signal(signal.SIGCHLD)

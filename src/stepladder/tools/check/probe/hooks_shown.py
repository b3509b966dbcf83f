"""Hooks that record what the script shows: on the terminal, in logs and in text files."""

from __future__ import annotations

import builtins
import io
import logging
import pathlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from stepladder.tools.check.events import Print, WrittenText
from stepladder.tools.check.probe.patching import (
    WrappedCall,
    default_on_error,
    record_calls,
    record_user_calls,
    recorder,
    wrap,
    wrap_after_import,
)
from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.probe.events import CodeLine

# Where `Path.open` calls `open`: a module, or from Python 3.13 on a package.
PATHLIB = pathlib.__file__.removesuffix("__init__.py")
MAX_PRINTED_TEXT = 400
MAX_WRITTEN_TEXT = 4000
MAX_WRITTEN_LINES = 1000  # of a file; more are data
MAX_PRINTED_ITEMS = 32  # of a container
PRINTED_TYPES = (str, int, float)
# By the module that defines it: a function, or a method, that stores numbers.
METRIC_LOGGERS = {
    "torch.utils.tensorboard.writer": "SummaryWriter.add_scalar",
    "tensorboardX.writer": "SummaryWriter.add_scalar",
    "mlflow.tracking.fluent": "log_metric",
    "wandb.sdk.wandb_run": "Run.log",
    "prometheus_client.metrics": "Gauge.set",
}


def attach() -> None:
    record_user_calls(builtins, "print", print_event)
    record_calls(logging.Logger, "handle", message_event)
    wrap([builtins, io], "open", open_recorded)
    for module, function in METRIC_LOGGERS.items():
        wrap_after_import(module, function, recorder(metric_event, by_user_only=True))


class RecordedText(io.TextIOWrapper):
    """A text file that records what a line writes, joined to whole lines of text.

    A library may write a number, its name and a comma one after the other.
    """

    count = 0  # of recorded lines
    place: tuple[CodeLine | None, CodeLine | None] = (None, None)  # the line, and its caller
    text = ""

    def write(self, text: str) -> int:
        is_full = len(self.text) >= MAX_WRITTEN_TEXT and not text.endswith("\n")
        if self.count < MAX_WRITTEN_LINES and not is_full:  # what dumps data writes millions
            self.remember(text)
        return super().write(text)

    @default_on_error(lambda: None)
    def remember(self, text: str) -> None:
        log = current_log()
        place = (log.user_line(), log.user_caller())
        if place != self.place:
            self.record()
        self.place = place
        self.text += text[: MAX_WRITTEN_TEXT - len(self.text)]
        if text.endswith("\n"):
            self.record()

    @default_on_error(lambda: None)
    def record(self) -> None:
        """Record what is written so far."""
        line, caller = self.place
        if line and self.text:
            self.count += 1
            event = WrittenText(caller=caller, text=self.text, path=str(self.name))
            current_log().write(event, line)
        self.text = ""

    def close(self) -> None:
        if not self.closed:
            self.record()
        super().close()


def open_recorded(call: WrappedCall) -> Any:
    """Open a file; where the script itself opens a text file to write, record what it writes."""
    stream = call.run()
    is_text = type(stream) is io.TextIOWrapper and not stream.buffer.readable()
    if not is_text or not current_log().is_called_by_user(PATHLIB):
        return stream
    encoding, errors, is_by_line = stream.encoding, stream.errors, stream.line_buffering
    newline = call.argument(5, "newline")
    mode = stream.mode
    recorded = RecordedText(stream.detach(), encoding, errors, newline, is_by_line)
    vars(recorded)["mode"] = mode
    return recorded


def print_event(call: WrappedCall) -> Print | None:
    if call.kwargs.get("file") is not None:
        return None
    return Print(caller=current_log().user_caller(), text=printed_text(call.args))


@default_on_error(lambda: None)
def metric_event(call: WrappedCall) -> Print:
    return Print(text=printed_text(numbers_and_texts([*call.args, *call.kwargs.values()])))


def numbers_and_texts(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values, those in dicts with their names, and numbers in place of their tensors."""
    for value in values:
        if isinstance(value, dict):
            yield from numbers_and_texts(chain.from_iterable(value.items()))
        else:
            yield value.item() if has_one_element(value) and hasattr(value, "item") else value


@default_on_error(str)
def printed_text(values: Iterable[Any]) -> str:
    """Return what is printed, without objects other than text, numbers and small containers."""
    return " ".join(map(str, filter(is_printed, values)))[:MAX_PRINTED_TEXT]


def is_printed(value: Any, depth: int = 2) -> bool:
    if isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        is_small = depth > 0 and len(value) <= MAX_PRINTED_ITEMS
        return is_small and all(is_printed(part, depth - 1) for part in parts)
    return isinstance(value, PRINTED_TYPES) or has_one_element(value)


@default_on_error(bool)
def has_one_element(value: Any) -> bool:
    count = getattr(value, "numel", lambda: getattr(value, "size", None))  # torch's, and NumPy's
    return bool(count() == 1)


def message_event(call: WrappedCall) -> Print | None:
    record: logging.LogRecord = call.argument(1, "record")
    if not current_log().is_user_file(record.pathname):
        return None
    return Print(text=record.getMessage()[:MAX_PRINTED_TEXT])

"""Hooks for Accelerate's loaders, which read one batch ahead of the script."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from stepladder.core.after_import import call_after_import
from stepladder.tools.check.probe.patching import wrap

# The probe gives it to a loader that is read ahead: what writes the events of later batches.
AHEAD_ATTRIBUTE = "_stepladder_ahead"


def attach() -> None:
    call_after_import("accelerate.data_loader", watch_loaders)


def watch_loaders(module: Any) -> None:
    wrap(module.DataLoaderShard, "__iter__", read_ahead)


def read_ahead(original: Any, loader: Any) -> Iterator[Any]:
    """Record the batches of a loader when the script gets them.

    Else the script would use the last batch of each pass after the end of that pass.
    """
    ahead: deque[Callable[[], None]] = deque()
    attributes = vars(loader.base_dataloader)
    attributes[AHEAD_ATTRIBUTE] = ahead
    try:
        for batch in original(loader):
            while len(ahead) > 1:
                write_event = ahead.popleft()
                write_event()
            yield batch
        for write_event in ahead:
            write_event()
    finally:
        attributes.pop(AHEAD_ATTRIBUTE, None)

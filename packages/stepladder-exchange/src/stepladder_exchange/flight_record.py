"""Keeps the last collectives of this process as torch's flight recorder keeps those of its groups.

torch records what its own back ends do, and takes nothing from a group that is a class of Python
(tried with torch 2.13 and 2.15). The keys are those of FlightRecorder.hpp, version 2.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from stepladder_exchange.call_frame import find_caller

DUMP_PREFIX_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"
OLD_DUMP_PREFIX_VARIABLE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
SIZE_VARIABLE = "TORCH_FR_BUFFER_SIZE"
OLD_SIZE_VARIABLE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
LOGGER = logging.getLogger(__name__)
EndCallback = Callable[[RuntimeError | None], None]


class _FlightRecord:
    """The last collectives, which a collective that fails writes to a file.

    Args:
        prefix: The name of the file, without the number of the rank.
        size: How many collectives are kept.
    """

    def __init__(self, prefix: str, size: int) -> None:
        self._prefix = prefix
        self._entries: deque[dict[str, Any]] = deque(maxlen=size)
        self._numbers: Counter[str] = Counter()  # of the collectives of each group

    def begin(self, group: str, name: str, inputs: Sequence[Any]) -> EndCallback:
        """Note a collective that begins.

        Args:
            group: The name of its process group.
            name: The name that torch's recorder has for it.
            inputs: The tensors that this rank gives.

        Returns:
            What is to be called at its end: with an error it writes the file.
        """
        self._numbers[group] += 1
        frame = find_caller()
        frames = []
        if frame is not None:
            frames.append({"name": frame.function, "filename": frame.file, "line": frame.line})
        entry = {
            "process_group": (group, ""),
            "collective_seq_id": self._numbers[group],
            "profiling_name": name,
            "input_sizes": [list(tensor.shape) for tensor in inputs],
            "input_dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in inputs],
            "state": "started",
            "retired": False,
            "is_p2p": False,
            "frames": frames,
        }
        self._entries.append(entry)
        return partial(self._end, entry)

    def _end(self, entry: dict[str, Any], error: RuntimeError | None) -> None:
        if error is None:
            entry.update(state="completed", retired=True)
        else:
            self._dump()

    def _dump(self) -> None:
        from torch import distributed as dist

        path = Path(f"{self._prefix}{dist.get_rank()}")
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            aside.write_bytes(pickle.dumps({"version": "2.0", "entries": list(self._entries)}))
            aside.replace(path)
        except OSError as error:
            LOGGER.warning("the flight record %s cannot be written: %s", path, error.strerror)


@cache
def find_flight_record() -> _FlightRecord | None:
    """Return the record of this process, if torch's variables ask for one with a file."""
    prefix = os.environ.get(DUMP_PREFIX_VARIABLE) or os.environ.get(OLD_DUMP_PREFIX_VARIABLE)
    text = os.environ.get(SIZE_VARIABLE) or os.environ.get(OLD_SIZE_VARIABLE) or ""
    if not prefix or not text.isdecimal() or int(text) == 0:
        return None
    return _FlightRecord(prefix, int(text))

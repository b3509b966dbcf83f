"""Batches from shards for the trainer, read ahead by a thread."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch

from stepladder.core.order import Order
from stepladder.data.shards.dataset import Shards
from stepladder.data.shards.reader import Reader
from stepladder.data.table import Ragged

BATCHES_AHEAD = 4


class StreamSource:
    """Rows of shards as tensors on `device`. Memory: the reader's pool, and the batches read ahead."""

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self.shards, self.device = shards, device

    def __len__(self) -> int:
        return len(self.shards)

    def batches(self, requests: Iterable[tuple[int, Order]]) -> Generator[tuple[Order, Any], None, None]:
        """Per request the indices that were read, and their rows: a dict by column, or a list."""
        with Reader(self.shards) as reader:
            ahead = Ahead(((indices, self._batch(reader.read(indices))) for _, indices in requests), BATCHES_AHEAD)
            try:
                while (item := ahead.next()) is not None:
                    yield item
                    reader.refuse_inherited()
            finally:
                ahead.close()

    def _batch(self, arrays: dict[str, Any]) -> Any:
        batch = {name: self._tensor(array) for name, array in arrays.items()}
        return list(batch.values()) if self.shards.as_list else batch

    def _tensor(self, array: Any) -> Any:
        if isinstance(array, Ragged):
            return Ragged(*map(self._tensor, array))
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


class Ahead:
    """Takes items from an iterator in a thread, at most `depth` ahead of `next`."""

    def __init__(self, items: Iterator[Any], depth: int) -> None:
        self.items, self.pid = items, os.getpid()
        self.queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self.closing = False
        self.thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            for item in self.items:
                self.queue.put((item, None))
                if self.closing:
                    return
        except BaseException as error:  # raised again where the batch is asked for
            failure = error
        self.queue.put((None, failure))

    def next(self) -> Any:
        """The next item, or None after the last. Raises what the iterator raised."""
        item, failure = self.queue.get()
        if failure is not None:
            raise failure
        return item

    def close(self) -> None:
        """End the thread, whatever it waits for."""
        if self.pid != os.getpid():  # a fork has no thread to end
            return
        self.closing = True
        while self.thread.is_alive():
            try:
                self.queue.get(timeout=0.01)
            except queue.Empty:
                continue

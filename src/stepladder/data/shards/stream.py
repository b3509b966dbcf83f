"""Batches from shards for the trainer, read ahead by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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
            batches = ((indices, self._batch(reader.read(indices))) for _, indices in requests)
            with closing(ahead(batches, BATCHES_AHEAD)) as items:
                for item in items:
                    yield item
                    reader.refuse_inherited()

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


def ahead(items: Generator[Any, None, None], depth: int) -> Generator[Any, None, None]:
    """The items, taken by a thread, at most `depth` of them before they are asked for. Raises what they raise."""
    pool = ThreadPoolExecutor(1, "read-ahead")
    try:
        coming = deque(pool.submit(next, items, None) for _ in range(depth))
        while (item := coming.popleft().result()) is not None:
            coming.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)

"""A rank that exits while its monitor's thread is in the store's compiled code."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist

from stepladder.core.world import World
from stepladder.launcher.nodes import self_monitor

READ_TIMEOUT = timedelta(seconds=0.2)
printed: list[str] = []
WORLD = World(rank=0, world_size=1, init_method="env://")


class Inquiry:
    """Reads what nobody writes: the thread is in compiled code nearly always."""

    def __init__(self, board: self_monitor.StoreBoard, _rank: int, _world_size: int) -> None:
        self.board = board

    def poll(self, *_: object) -> None:
        try:
            self.board.store.wait(["never"], READ_TIMEOUT)
        except dist.DistStoreError:
            printed.append("read")


class ExitsSlowly:
    """Keeps the interpreter in its finalization until the thread has returned from the store."""

    def __del__(self, sleep=time.sleep) -> None:
        sleep(2 * READ_TIMEOUT.total_seconds())


store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, True)
self_monitor.MONITOR_INTERVAL_S = 1e-5
self_monitor.Inquiry = Inquiry
self_monitor.start_self_monitor(WORLD, None)
while "read" not in printed:
    time.sleep(0.01)
exits_slowly = ExitsSlowly()

"""Scalars for TensorBoard, through its own event writer: `torch.utils.tensorboard` imports far more."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Scalars:
    """An event file in `folder`; `tensorboard --logdir` shows it."""

    def __init__(self, folder: Path) -> None:
        self.writer = EventFileWriter(str(folder))

    def log(self, step: int, values: dict[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self.writer.close()

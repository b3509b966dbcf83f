"""The current device, streams and events of simulated GPUs."""

from __future__ import annotations

import time
from typing import Any

from stepladder.tools.check.simulated_gpu.devices import DEVICE_CLASS, is_index
from stepladder.tools.check.simulated_gpu.refusal import SimulatedObject

STREAM_PRIORITIES = (0, -5)  # the lowest and the highest


class CurrentDevice:
    """The device that the script has set."""

    def __init__(self) -> None:
        self.index = 0

    def set(self, device: Any) -> None:
        if is_index(device):
            index: int | None = device
        else:
            index = DEVICE_CLASS(device).index
        if index is not None and index >= 0:
            self.index = index

    def get(self) -> int:
        return self.index


current_device = CurrentDevice()


class DeviceContext:
    """A context in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.previous = current_device.get()

    def __enter__(self) -> None:
        self.previous = current_device.get()
        if self.device is not None:
            current_device.set(self.device)

    def __exit__(self, *_: object) -> None:
        current_device.set(self.previous)


class SimulatedStream(SimulatedObject):
    """A stream without effect: on a CPU everything happens in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0
        self.stream_id = 0
        self.device_index = current_device.get()
        self.device = DEVICE_CLASS("cuda", self.device_index)
        self.outer_streams: list[SimulatedStream] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return STREAM_PRIORITIES

    def synchronize(self) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> SimulatedStream:
        self.outer_streams.append(streams.current)
        streams.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        streams.set(self.outer_streams.pop())


class Streams:
    """The default stream and the current one."""

    def __init__(self) -> None:
        self.default = SimulatedStream()
        self.current = self.default

    def set(self, stream: Any) -> None:
        self.current = self.current if stream is None else stream


streams = Streams()


class StreamContext:
    """A context in which another stream is the current one; none for None."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


class SimulatedEvent(SimulatedObject):
    """An event that records the time of the machine's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.time_s = time.perf_counter()

    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Return the milliseconds from this event to a later one."""
        return (end.time_s - self.time_s) * 1000

"""Causes told by their traces: the texts are those of torch 2.13, NCCL and the kernel."""

from __future__ import annotations

import signal

import pytest
import torch
from torch.distributed import DistNetworkError

from stepladder.core.errors import InputError, PeerLost
from stepladder.launcher.local.outcome import Killed, Raised
from stepladder.launcher.local.process_stats import count_oom_kills
from stepladder.rank.error_record import RankError

ERRORS = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), "out of memory"),
    (MemoryError(), "out of memory"),
    (ModuleNotFoundError("No module named 'x'"), "an import"),
    (
        DistNetworkError("The server socket has failed to listen ... code: -98, name: EADDRINUSE"),
        "port",
    ),
    (ValueError("environment variable MASTER_ADDR expected, but not set"), "could not connect"),
    (
        DistNetworkError("The client socket has timed out after 60000ms while ..."),
        "could not connect",
    ),
    (ValueError("a label is out of range"), ""),
    (PeerLost("a collective failed: Connection refused"), ""),
    (InputError("the port: address already in use", "another"), ""),
]


@pytest.mark.parametrize(("error", "cause"), ERRORS)
def test_an_error_s_cause(error: Exception, cause: str) -> None:
    shown = Raised(RankError.from_error(0, error)).cause
    assert cause in shown if cause else shown == ""
    assert (". HINT: " in shown) == bool(cause)


@pytest.mark.parametrize(
    ("number", "out_of_memory", "cause"),
    [
        (signal.SIGKILL, True, "the kernel ended it"),
        (signal.SIGKILL, False, "from outside"),
        (signal.SIGBUS, False, "/dev/shm"),
        (signal.SIGSEGV, False, "compiled code"),
        (signal.SIGTERM, False, ""),
    ],
)
def test_a_signal_s_cause(number: int, out_of_memory: bool, cause: str) -> None:
    shown = Killed(0, number, out_of_memory).cause
    assert cause in shown if cause else shown == ""


def test_the_kernel_s_count_only_grows() -> None:
    assert 0 <= count_oom_kills() <= count_oom_kills()

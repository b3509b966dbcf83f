"""Causes told by their traces: the texts are those of torch 2.13, NCCL and the kernel."""

from __future__ import annotations

import signal

import pytest

from stepladder.launcher.diagnose.cause import likely_cause, oom_kills
from stepladder.rank.lifecycle import RankError

TEXTS = [
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB.", "out of memory"),
    ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried ...", "out of memory"),
    ("ModuleNotFoundError", "No module named 'x'", "an import"),
    ("DistNetworkError", "The server socket has failed to listen ... code: -98, name: EADDRINUSE", "port"),
    ("ValueError", "environment variable MASTER_ADDR expected, but not set", "did not meet"),
    ("DistNetworkError", "The client socket has timed out after 60000ms while ...", "did not meet"),
    ("ValueError", "a label is out of range", ""),
    ("PeerLost", "a collective failed: Connection refused", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "cause"), TEXTS)
def test_an_error_s_cause(name: str, text: str, cause: str) -> None:
    found = likely_cause(RankError(0, name, text, "", None, 0.0), None, False)
    assert cause in found if cause else found == ""
    assert (". HINT: " in found) == bool(cause)


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
    found = likely_cause(None, number, out_of_memory)
    assert cause in found if cause else found == ""


def test_the_kernel_s_count_only_grows() -> None:
    assert 0 <= oom_kills() <= oom_kills()


@pytest.mark.parametrize(
    ("name", "text", "consequence"),
    [
        ("PeerLost", "", True),
        ("RuntimeError", "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44268", True),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error", True),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False),
        ("KeyError", "'Connection closed by peer'", False),
    ],
)
def test_what_another_rank_s_end_brings_about(name: str, text: str, consequence: bool) -> None:
    assert RankError(0, name, text, "", None, 0.0).is_consequence == consequence

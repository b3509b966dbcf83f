"""Causes told by their traces: the texts are those of torch 2.13, NCCL and the kernel."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError

from stepladder.core.errors import InputError, PeerLost
from stepladder.launcher.diagnose.cause import cause_of_error, cause_of_signal, oom_kills
from stepladder.rank.error_record import ErrorKind, RankError, kind_of

ERRORS = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), "out of memory"),
    (MemoryError(), "out of memory"),
    (ModuleNotFoundError("No module named 'x'"), "an import"),
    (DistNetworkError("The server socket has failed to listen ... code: -98, name: EADDRINUSE"), "port"),
    (ValueError("environment variable MASTER_ADDR expected, but not set"), "did not meet"),
    (DistNetworkError("The client socket has timed out after 60000ms while ..."), "did not meet"),
    (ValueError("a label is out of range"), ""),
    (PeerLost("a collective failed: Connection refused"), ""),
    (InputError("the port: address already in use", "another"), ""),
]


@pytest.mark.parametrize(("error", "cause"), ERRORS)
def test_an_error_s_cause(error: Exception, cause: str) -> None:
    found = cause_of_error(kind_of(error))
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
    found = cause_of_signal(number, out_of_memory)
    assert cause in found if cause else found == ""


def test_the_kernel_s_count_only_grows() -> None:
    assert 0 <= oom_kills() <= oom_kills()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerLost("Connection closed by peer"), ErrorKind.PEER_LOST),
        (PeerLost("a collective failed: Timed out waiting 2000ms for recv operation"), ErrorKind.PEER_SILENT),
        (RuntimeError("[gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44268"), ErrorKind.PEER_LOST),
        (RuntimeError("[gloo/transport] Timed out waiting 2000ms for recv operation"), ErrorKind.PEER_SILENT),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), ErrorKind.PEER_LOST),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ErrorKind.OTHER),
        (KeyError("Connection closed by peer"), ErrorKind.OTHER),
        (TimeoutError("a download timed out"), ErrorKind.OTHER),
        (InputError("Connection closed by peer", "mend it"), ErrorKind.BAD_INPUT),
    ],
)  # fmt: skip
def test_what_another_rank_s_end_brings_about(error: Exception, kind: ErrorKind, tmp_path: Path) -> None:
    RankError.of(3, error).write(tmp_path / "error.json")
    found = RankError.read(tmp_path / "error.json")
    assert found is not None and (found.rank, found.kind) == (3, kind)
    assert found.is_consequence == (kind in (ErrorKind.PEER_LOST, ErrorKind.PEER_SILENT))

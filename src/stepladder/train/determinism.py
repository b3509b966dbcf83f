"""Deterministic kernels and equal machines, without which runs have different bits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stepladder.core.errors import InputError
from stepladder.train.comm import Comm
from stepladder.train.compile_loss import prepare_compiler

MACHINE_NAME_BYTES = 256


@contextmanager
def deterministic(enabled: bool, device: torch.device) -> Iterator[None]:
    """Allow only deterministic algorithms in the block: full fp32 precision, no autotuning.

    Args:
        enabled: Whether to change anything.
        device: The device that computes.

    Raises:
        InputError: The block uses an operation without a deterministic version.
        RuntimeError: The block has failed for another reason.
    """
    if not enabled:
        yield
        return
    if device.type == "cuda":
        # cuBLAS reads it at its first call. Without it, cuBLAS may split sums as it likes.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    memory: Any = torch.utils.deterministic  # sets attributes through a class of its own
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    filled_memory = memory.fill_uninitialized_memory
    had_benchmark = cudnn.benchmark
    allowed_cudnn_tf32 = cudnn.allow_tf32
    allowed_matmul_tf32 = matmul.allow_tf32
    try:
        _use_deterministic_algorithms(True)
        # A debugging aid that costs a pass over each new tensor.
        memory.fill_uninitialized_memory = False
        cudnn.benchmark = False
        cudnn.allow_tf32 = False
        matmul.allow_tf32 = False
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise InputError(
            f"--sync exact: {str(error).split(',')[0]}",
            "another operation in the model, or --sync ddp",
        ) from error
    finally:
        _use_deterministic_algorithms(was_deterministic)
        memory.fill_uninitialized_memory = filled_memory
        cudnn.benchmark = had_benchmark
        cudnn.allow_tf32 = allowed_cudnn_tf32
        matmul.allow_tf32 = allowed_matmul_tf32


def _use_deterministic_algorithms(enabled: bool) -> None:
    if "torch._inductor" in sys.modules:
        # The job compiles: this also sets the compiler's own flag. It imports the compiler, so it
        # is not used otherwise.
        torch.use_deterministic_algorithms(enabled)
    else:
        torch.set_deterministic_debug_mode("error" if enabled else "default")


def describe_machine(device: torch.device, compiles: bool = False) -> str:
    """Return what decides the bits of a result on this machine.

    Args:
        device: The device that computes.
        compiles: Whether the job's loss is compiled.

    Returns:
        The versions of torch and CUDA and the name of the GPU, or the vector units and the model of
        the processor; and the compiler.
    """
    compiler = f", compiled by {prepare_compiler()}" if compiles else ""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {gpu}{compiler}"
    vector_units = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {vector_units}, {_read_processor_model()}{compiler}"


def _read_processor_model() -> str:
    """Return the model of the processor, or "" if Linux does not tell."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


def validate_equal_machines(comm: Comm, compiles: bool = False) -> None:
    """Check on all ranks that every rank computes on the same type of machine as rank 0.

    All ranks must call this function.

    Args:
        comm: The ranks.
        compiles: Whether the job's loss is compiled.

    Raises:
        InputError: The machine of a rank differs. All ranks raise it.
    """
    name = describe_machine(comm.device, compiles).encode()
    messages = comm.gather_bytes(name[:MACHINE_NAME_BYTES].ljust(MACHINE_NAME_BYTES))
    names = [message.decode(errors="replace").strip() for message in messages]
    for rank, rank_name in enumerate(names):
        if rank_name != names[0]:
            raise InputError(
                f"--sync exact: rank {rank} runs on [{rank_name}], rank 0 on [{names[0]}]",
                "equal nodes, or --sync ddp",
            )

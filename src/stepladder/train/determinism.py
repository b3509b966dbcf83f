"""What equal bits need besides a fixed order of additions: deterministic kernels, machines, known
buffers.

And what batch norm needs in order not to depend on who computed which microbatch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepladder.core.errors import InputError
from stepladder.train.comm import Comm
from stepladder.train.compile_loss import prepare_compiler

NAME_BYTES = 256


@contextmanager
def deterministic(wanted: bool, device: torch.device) -> Iterator[None]:
    """Deterministic algorithms only, full fp32, no autotuning; as it was before when the block
    ends.

    An operation that has no deterministic version becomes an InputError that names it.
    """
    if not wanted:
        yield
        return
    if (
        device.type == "cuda"
    ):  # cuBLAS reads it at its first call; without it, it may split sums at will
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    memory: Any = torch.utils.deterministic  # sets attributes through a class of its own
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    flags = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    try:
        _only_deterministic(True)
        memory.fill_uninitialized_memory = (
            False  # a debugging aid that costs a pass over each new tensor
        )
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = False, False, False
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise InputError(
            f"--sync exact: {str(error).split(',')[0]}",
            "another operation in the model, or --sync ddp",
        ) from error
    finally:
        _only_deterministic(before[0])
        memory.fill_uninitialized_memory = before[1]
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = flags


def _only_deterministic(wanted: bool) -> None:
    if (
        "torch._inductor" in sys.modules
    ):  # the job compiles: this sets the compiler's own flag too, and imports it
        torch.use_deterministic_algorithms(wanted)
    else:
        torch.set_deterministic_debug_mode("error" if wanted else "default")


def describe_machine(device: torch.device, compiles: bool = False) -> str:
    """What decides the bits of a result: torch, the processor's vector units and model, the GPU,
    the compiler.
    """
    after = f", compiled by {prepare_compiler()}" if compiles else ""
    if device.type == "cuda":
        return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name(device)}{after}"
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {model}{after}"


def validate_equal_machines(comm: Comm, compiles: bool = False) -> None:
    """Raises InputError, on all ranks, where one computes on another kind of machine than rank 0. A
    collective.
    """
    mine = describe_machine(comm.device, compiles).encode()[:NAME_BYTES].ljust(NAME_BYTES)
    names = [name.decode(errors="replace").strip() for name in comm.gather_bytes(mine)]
    for rank, name in enumerate(names):
        if name != names[0]:
            raise InputError(
                f"--sync exact: rank {rank} runs on [{name}], rank 0 on [{names[0]}]",
                "equal nodes, or --sync ddp",
            )


def find_batch_norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The model's batch-norm layers that keep running statistics, in registration order."""
    return [
        m
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]


class RunningStatistics:
    """Batch norm's, captured per microbatch and moved by their mean once per step, whoever computed
    which.

    Each microbatch's mean and variance are captured (momentum 1.0 during forward) and combined
    weighted by sample counts. So they are the same for any number of processes up to the rounding
    of that sum."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = find_batch_norms(model)
        self.momenta = [layer.momentum for layer in self.layers]
        # None only for layers that track nothing, which batch_norms leaves out.
        self.buffers: list[Any] = [b for m in self.layers for b in (m.running_mean, m.running_var)]
        self.counters: list[Any] = [m.num_batches_tracked for m in self.layers]
        self.size = sum(b.numel() for b in self.buffers)
        self.before: list[torch.Tensor] = []
        self.steps: list[torch.Tensor] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Before the step's first forward: keep the running values, and make forward write batch
        values.
        """
        self.before = [b.clone() for b in self.buffers]
        self.steps = [counter.clone() for counter in self.counters]
        for layer in self.layers:
            layer.momentum = 1.0

    @torch.no_grad()
    def cancel(self) -> None:
        """Forget the step that has begun, if one has."""
        if self.layers and self.before:
            for buffer, before in zip(
                self.buffers + self.counters, self.before + self.steps, strict=True
            ):
                buffer.copy_(before)
            for layer, momentum in zip(self.layers, self.momenta, strict=True):
                layer.momentum = momentum
            self.before = []

    @torch.no_grad()
    def capture(self) -> torch.Tensor:
        """After a forward: this microbatch's statistics, shape (size,)."""
        return torch.cat([b.reshape(-1) for b in self.buffers])

    @torch.no_grad()
    def finish(self, mean: torch.Tensor) -> None:
        """Move the running values towards the step's count-weighted `mean`, shape (size,).

        A layer in eval mode, frozen by the user, keeps its own.
        """
        parts = mean.split([b.numel() for b in self.buffers])
        for layer, momentum, counter, steps in zip(
            self.layers, self.momenta, self.counters, self.steps, strict=True
        ):
            layer.momentum = momentum
            counter.copy_(steps + layer.training)
        for number, (buffer, before, part) in enumerate(
            zip(self.buffers, self.before, parts, strict=True)
        ):
            if not self.layers[number // 2].training:
                continue
            momentum = self.momenta[number // 2]
            weight = 1.0 / float(self.counters[number // 2]) if momentum is None else momentum
            buffer.copy_(before.lerp(part.view_as(buffer), weight))
        self.before = []


class BufferChanged(InputError):
    """Forward changes a buffer that no rule combines over microbatches."""

    def __init__(self, buffer: str) -> None:
        self.buffer = buffer
        super().__init__(
            f"--sync exact: forward changes the buffer {buffer}, which no rule combines over microbatches",
            "make it depend on the step alone, or --sync ddp",
        )


class ForwardBuffers:
    """Finds buffers that forward changes, beside batch norm's: they would depend on who ran forward
    last.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        known = {id(b) for layer in find_batch_norms(model) for b in layer.buffers()}
        self.owners = [
            (f"{prefix}.{name}".lstrip("."), module, name)
            for prefix, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if id(buffer) not in known
        ]
        self.before = [getattr(module, name).clone() for _, module, name in self.owners]
        self.seen = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        """What changes with a buffer, but for writes through `.data`: whose it is, and torch's
        count of writes.
        """
        buffers = (module._buffers[name] for _, module, name in self.owners)
        return [(id(buffer), buffer._version if buffer is not None else 0) for buffer in buffers]

    def validate_unwritten(self) -> None:
        """After each forward: as `refuse_changed`, but reads only those that were written. 0.2 us
        for each.
        """
        if self.owners and self._versions() != self.seen:
            self.validate_unchanged()
            self.seen = self._versions()

    def validate_unchanged(self) -> None:
        """Raises BufferChanged with the first buffer that is not as it was. Reads them all."""
        for (path, module, name), before in zip(self.owners, self.before, strict=True):
            buffer = module._buffers[name]
            if buffer is None or not torch.equal(buffer, before):
                raise BufferChanged(path)

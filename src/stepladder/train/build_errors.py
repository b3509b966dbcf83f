"""Errors of a job's `build` that come from doing what `train` does by itself.

A build must neither wrap the model for several processes nor move it to a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from stepladder.core.errors import InputError
from stepladder.core.tracebacks import find_user_line, list_files
from stepladder.train.gpu_setup import GpuSetup

# Wrappers of a model for several processes, by the end of the path of torch's file with each.
WRAPPER_FILES = {
    "torch/nn/parallel/distributed.py": "DistributedDataParallel",
    "torch/nn/parallel/data_parallel.py": "DataParallel",
    "torch/distributed/fsdp/fully_sharded_data_parallel.py": "FullyShardedDataParallel",
    "torch/distributed/fsdp/_fully_shard/_fully_shard.py": "fully_shard",
}
CUDA_FILE = "torch/cuda/__init__.py"
PLAIN_MODEL_HINT = (
    "give Job the plain model: train averages its gradients over all processes,"
    " --shard full slices it"
)


@contextmanager
def explain_build_errors(path: Path) -> Iterator[None]:
    """Raise InputError if the build, in the block, fails because it wraps or moves the model."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as error:
        files = list_files(error)
        location = find_user_line(error) or path.name
        wrapper = _find_wrapper(files)
        if wrapper is not None:
            raise InputError(
                f"build wraps the model in {wrapper} ({location}), which is not needed",
                PLAIN_MODEL_HINT,
            ) from error
        is_cuda_error = bool(files) and files[-1].endswith(CUDA_FILE)
        if is_cuda_error and not torch.cuda.is_available():
            reason, _ = GpuSetup.detect().explain_absence()
            raise InputError(
                f"build asks for a GPU ({location}), but {reason}",
                "leave .cuda() and .to(device) out of build: train moves the model to --device",
            ) from error
        raise


def validate_unwrapped(model: torch.nn.Module) -> None:
    """Raise InputError if a model, or a part of it, is wrapped for several processes."""
    for module in model.modules():
        for class_ in type(module).__mro__:
            wrapper = WRAPPER_FILES.get(class_.__module__.replace(".", "/") + ".py")
            if wrapper is not None:
                raise InputError(
                    f"the model of the Job is wrapped in {wrapper}, which is not needed",
                    PLAIN_MODEL_HINT,
                )


def _find_wrapper(files: list[str]) -> str | None:
    """Return the wrapper that is defined in one of these files, None if there is none."""
    for end, wrapper in WRAPPER_FILES.items():
        if any(file.endswith(end) for file in files):
            return wrapper
    return None

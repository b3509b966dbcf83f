"""What a job's build does that is the part of `train`: to wrap the model, or to move it to a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from stepladder.core.errors import InputError
from stepladder.core.traces import files_of, user_line
from stepladder.train.gpu_setup import GpuSetup

# Wrappers of a model for several processes, by the end of the path of the file of torch that
# defines each.
WRAPPER_FILES = {
    "torch/nn/parallel/distributed.py": "DistributedDataParallel",
    "torch/nn/parallel/data_parallel.py": "DataParallel",
    "torch/distributed/fsdp/fully_sharded_data_parallel.py": "FullyShardedDataParallel",
    "torch/distributed/fsdp/_fully_shard/_fully_shard.py": "fully_shard",
}
OF_CUDA = "torch/cuda/__init__.py"
PLAIN_MODEL = "give Job the plain model: train averages its gradients over all processes, --shard full slices it"


@contextmanager
def explain_build_errors(path: Path) -> Iterator[None]:
    """Raises InputError where the build of a job file, in the block, fails by wrapping or moving
    the model.
    """
    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as error:
        files = files_of(error)
        where = user_line(error) or path.name
        wrapper = next(
            (
                name
                for end, name in WRAPPER_FILES.items()
                if any(file.endswith(end) for file in files)
            ),
            None,
        )
        if wrapper is not None:
            raise InputError(
                f"build wraps the model in {wrapper} ({where}), which is not needed", PLAIN_MODEL
            ) from error
        if files and files[-1].endswith(OF_CUDA) and not torch.cuda.is_available():
            found = f"build asks for a GPU ({where}), but {GpuSetup.detect().explain_absence()[0]}"
            hint = "leave .cuda() and .to(device) out of build: train moves the model to --device"
            raise InputError(found, hint) from error
        raise


def validate_unwrapped(model: torch.nn.Module) -> None:
    """Raises InputError where a model, or a part of it, is wrapped for several processes."""
    for part in model.modules():
        for kind in type(part).__mro__:
            wrapper = next(
                (name for end, name in WRAPPER_FILES.items() if defined_in(kind, end)), None
            )
            if wrapper is not None:
                raise InputError(
                    f"the model of the Job is wrapped in {wrapper}, which is not needed",
                    PLAIN_MODEL,
                )


def defined_in(kind: type, end: str) -> bool:
    return kind.__module__ == end.removesuffix(".py").replace("/", ".")

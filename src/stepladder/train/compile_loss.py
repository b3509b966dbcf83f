"""`--compile`: the job's loss through torch.compile, for passes of the full length.

The last batch of an epoch is shorter; its loss is computed without torch.compile, on every number
of processes. So the length of a pass alone decides which program computes it, and `--sync exact`
stays exact.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from stepladder.core.errors import InputError, as_input_error, to_one_line
from stepladder.core.folders import get_cache_folder, validate_ownership
from stepladder.rank.torch_fixes import get_dynamo_config

WITHOUT_COMPILE = "leave --compile out"
# Draw random numbers from torch's own generator, in the order of the job without --compile.
OPTIONS: dict[str, Any] = {"fallback_random": True}
Loss = Callable[[torch.nn.Module, Any], Any]


def prepare_compiler() -> str:
    """Find the C++ compiler for torch.compile, and make it cache its programs in a private folder.

    This takes seconds, since it loads torch's compiler.

    Returns:
        The name and version of the C++ compiler.

    Raises:
        InputError: There is no C++ compiler, or the folder cannot be written.
    """
    folder = get_cache_folder() / "compiled"
    with as_input_error(
        f"--compile: {folder} cannot be written", "export XDG_CACHE_HOME=DIR", (OSError,)
    ):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        validate_ownership(folder)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # By default each rank would start many compile processes.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from stepladder.rank.torch_fixes import get_cpp_compiler  # late: takes seconds

    try:
        command = [get_cpp_compiler(), "--version"]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        hint = "apt-get install g++, or export CXX=COMPILER; or leave --compile out"
        raise InputError("--compile: torch needs a C++ compiler, and finds none", hint) from error
    return process.stdout.partition("\n")[0]


def compile_loss(loss: Loss, exact: bool) -> Loss:
    """Return the loss compiled by torch: at its first call, and for each new shape.

    Args:
        loss: The job's loss.
        exact: Whether more than a few shapes are an error. Otherwise torch computes further shapes
            without compiling, and each rank may begin to do so at another step.

    Returns:
        A function that raises InputError if torch cannot compile the loss.
    """
    from stepladder.rank.torch_fixes import FailOnRecompileLimitHit, TorchDynamoException

    dynamo_config = get_dynamo_config()
    dynamo_config.fail_on_recompile_limit_hit = exact
    program = torch.compile(loss, dynamic=False, options=OPTIONS)

    @wraps(loss, assigned=())
    def compiled_loss(model: torch.nn.Module, batch: Any) -> Any:
        try:
            return program(model, batch)
        except FailOnRecompileLimitHit as error:
            raise InputError(
                f"--compile: batches have more than {dynamo_config.recompile_limit} shapes, each"
                " compiled by itself",
                f"one shape for all, or {WITHOUT_COMPILE}",
            ) from error
        except TorchDynamoException as error:
            raise InputError(
                f"--compile: torch cannot compile the loss ({to_one_line(error)})", WITHOUT_COMPILE
            ) from error

    return compiled_loss

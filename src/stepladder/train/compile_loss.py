"""`--compile`: the job's loss through torch.compile, for the passes that have the full length.

The last batch of an epoch is shorter: it runs as it is written, on every number of processes. So
which program computes a pass follows from its length alone, and exact stays exact.
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
# Random numbers as the job draws them without: torch's own generator, in the same order.
OPTIONS: dict[str, Any] = {"fallback_random": True}
Loss = Callable[[torch.nn.Module, Any], Any]


def prepare_compiler() -> str:
    """The C++ compiler that torch's will use, by name and version. What is compiled is kept in a
    private folder.

    Raises InputError where there is none. Takes seconds: it loads torch's compiler.
    """
    folder = get_cache_folder() / "compiled"
    with as_input_error(
        f"--compile: {folder} cannot be written", "export XDG_CACHE_HOME=DIR", (OSError,)
    ):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        validate_ownership(folder)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ.setdefault(
        "TORCHINDUCTOR_COMPILE_THREADS", "1"
    )  # else each rank starts processes of its own
    from stepladder.rank.torch_fixes import get_cpp_compiler  # late: it loads torch.compile

    try:
        command = get_cpp_compiler()
        told = subprocess.run(
            [command, "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        hint = "apt-get install g++, or export CXX=COMPILER; or leave --compile out"
        raise InputError("--compile: torch needs a C++ compiler, and finds none", hint) from error
    return told.partition("\n")[0]


def compile_loss(loss: Loss, exact: bool) -> Loss:
    """The same function, compiled at its first call and for each new shape. exact: not for more
    than a few.

    Called, it raises InputError where torch cannot compile it.
    """
    from stepladder.rank.torch_fixes import FailOnRecompileLimitHit, TorchDynamoException

    limits = get_dynamo_config()
    limits.fail_on_recompile_limit_hit = (
        exact  # else torch goes on without compiling: on each rank when it likes
    )
    program = torch.compile(loss, dynamic=False, options=OPTIONS)

    @wraps(loss, assigned=())
    def called(model: torch.nn.Module, batch: Any) -> Any:
        try:
            return program(model, batch)
        except FailOnRecompileLimitHit as error:
            found = f"--compile: batches have more than {limits.recompile_limit} shapes, each compiled by itself"
            raise InputError(found, f"one shape for all, or {WITHOUT_COMPILE}") from error
        except TorchDynamoException as error:
            raise InputError(
                f"--compile: torch cannot compile the loss ({to_one_line(error)})", WITHOUT_COMPILE
            ) from error

    return called

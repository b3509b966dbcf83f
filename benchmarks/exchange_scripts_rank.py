"""stepladder run --nproc N benchmarks/exchange_scripts_rank.py FOLDER SCRIPT [ARGUMENTS]

What each rank of exchange_scripts.py does: it runs a script, and writes the loss of each backward pass
to a file of FOLDER, with the seconds from the first pass to the last one. The variable BACKEND is the back
end that the script asks for, in place of its own.
"""

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

losses: list[float] = []
times: list[float] = []
backward = torch.Tensor.backward


def record_and_go_backward(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
    losses.append(tensor.item())
    backward(tensor, *args, **options)
    times.append(time.perf_counter())


def ask_for(backend: str) -> None:
    """Let the script, and a library, make a group of this back end."""
    importlib.import_module("stepladder_exchange")  # makes the back end known

    init = dist.init_process_group

    def init_on_backend(_: object = None, *args: Any, **options: Any) -> None:
        init(*args, **options | {"backend": backend})

    dist.init_process_group = init_on_backend


def main() -> None:
    if backend := os.environ.get("BACKEND"):
        ask_for(backend)
    torch.Tensor.backward = record_and_go_backward  # type: ignore[method-assign]
    folder, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        result = {"losses": losses, "seconds": times[-1] - times[0] if times else 0.0}
        Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))


main()

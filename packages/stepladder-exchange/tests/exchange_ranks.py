"""Run a function on several ranks, a script under torchrun, or wait until something is the case."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 300  # for what takes some seconds, on a machine with other work
TORCHRUN = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"

# Forked from a process that never ran torch: a fork after a parallel operation hangs in the child.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "stepladder_exchange.process_group"])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on each rank of a group of gloo, and return its values in rank order.

    The function must be at the top level of a module. Raises AssertionError with the traceback of
    the first rank that failed, or TimeoutError.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            world = f"file://{folder}/store", rank, world_size
            process = CONTEXT.Process(target=_run_rank, args=(theirs, world, function, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect_values(pipes)
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.join(5)
                process.kill()
                process.join()
                pipe.close()


def _collect_values(pipes: list[Connection]) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(pipes):
        missing = [pipe for rank, pipe in enumerate(pipes) if rank not in values]
        ready = wait(missing, TIMEOUT_S)
        if not ready:
            raise TimeoutError(f"{len(missing)} ranks gave no answer in {TIMEOUT_S} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                has_failed, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} ended without an answer") from None
            assert not has_failed, f"rank {rank} failed:\n{value}"
            values[rank] = value
    return [values[rank] for rank in range(len(pipes))]


def _run_rank(
    pipe: Connection, world: tuple[str, int, int], function: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    address, rank, world_size = world
    try:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
        answer = (False, function(*args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = (True, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))


def run_torchrun(
    script: Path, num_ranks: int, *args: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun to its end, in its own folder.

    A script prints a line and its end in one call: torchrun's ranks do not buffer, so `print` would
    make two writes, between which another rank may write.
    """
    process = subprocess.Popen(
        [*TORCHRUN, str(num_ranks), str(script), *args],
        cwd=script.parent,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its ranks
        out, err = process.communicate()
        raise TimeoutError(f"{script.name} had no end\n{out}{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

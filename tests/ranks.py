"""Run a function on N ranks: hard timeout, the first failing rank's traceback raised.

They exchange through shared memory, as a launcher's do, or through gloo where that is asked for.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from processes import SECONDS
from stepladder.rank.exchange_choice import EXCHANGE_VARIABLE, GLOO_EXCHANGE, MEMORY_EXCHANGE
from stepladder.rank.lifecycle import RANK_SIGNALS

# Forked from a process that never ran torch: a fork after a parallel operation hangs in the child.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "stepladder.train.trainer", "pytest", "psutil"]
)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = SECONDS,
    by_gloo: bool = False,
) -> list[Any]:
    """`function(comm, *args)` on each rank, one thread each; their values in rank order.

    `function` must be at the top level of a module. Raises AssertionError with the traceback of the
    first rank that failed, or TimeoutError."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        pipes = []
        processes = []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            world = (
                rank,
                world_size,
                rank,
                world_size,
                f"file://{store}" if world_size > 1 else "",
                "test",
            )
            process = CONTEXT.Process(target=_rank, args=(theirs, by_gloo, world, function, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                if process.is_alive():
                    process.join(5)
                process.kill()
                process.join()
                pipe.close()


def _collect(pipes: list[Any], timeout: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in values]
        ready = wait(waiting, timeout)
        if not ready:
            raise TimeoutError(
                f"ranks {[r for r in range(len(pipes)) if r not in values]} gave no answer in {timeout} s"
            )
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failed, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if failed:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            values[rank] = value
    return [values[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Any, by_gloo: bool, starter: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    from stepladder.core.world import World
    from stepladder.train.process_group import process_group

    # A test before may have started the launcher's fork server, which blocks what ranks are sent.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RANK_SIGNALS)
    torch.set_num_threads(1)
    os.environ[EXCHANGE_VARIABLE] = GLOO_EXCHANGE if by_gloo else MEMORY_EXCHANGE
    try:
        with process_group(World(*starter), torch.device("cpu"), timeout_seconds=SECONDS) as comm:
            answer = (False, function(comm, *args))
    except BaseException:
        answer = (True, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))

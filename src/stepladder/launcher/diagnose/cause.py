"""The likely cause of a rank's end, with a HINT: what people ask about most, told by its traces."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

from stepladder.rank.error_record import ErrorKind

ERRORS = {
    ErrorKind.OUT_OF_MEMORY: "out of memory. HINT: a smaller batch, accumulated gradients, or a lower precision",
    ErrorKind.IMPORT: f"an import. HINT: install what is missing for {sys.executable}, which runs the ranks",
    ErrorKind.PORT_IN_USE: "the port is in use. HINT: leave --master-port out for a free one, or another number",
    ErrorKind.NOT_MET: "the ranks did not meet. HINT: MASTER_ADDR and MASTER_PORT must lead all ranks to rank 0",
}
SIGNALS: dict[int, str] = {
    signal.SIGSEGV: "a crash in compiled code. HINT: python -X faulthandler; do all nodes have the same versions?",
    signal.SIGBUS: "often /dev/shm is full. HINT: df -h /dev/shm; docker run --ipc=host, or fewer loading workers",
    signal.SIGABRT: "an abort in compiled code, whose reason stands above; NCCL's watchdog ends a rank like this",
    signal.SIGILL: "a package built for another processor. HINT: install it on this machine",
}

# Of a standstill, by what hang.py sees of it.
USUAL = {
    "stopped": "Ctrl-Z, `kill -STOP`, a debugger, or a suspended machine. It goes on after `kill -CONT {pid}`",
    "data": "a data loader that does not deliver: a file system that does not answer, a worker that waits for a"
    " lock taken before it was forked, or one slow sample. With num_workers=0 the place shows itself",
    "lock": "a deadlock: two locks taken in different orders, one taken twice, or one that was held when this"
    " process was forked. The stacks show which line waits",
    "extra": "a collective that only some ranks make: an `if rank == 0:`, a loss or an exception around it that"
    " not all ranks share. Let every rank make it, or none",
    "order": "ranks that go different ways: an `if` on a value that is not the same on every rank, or"
    " parameters that only some ranks used",
    "size": "tensors of different shapes: a model, a vocabulary or a last batch that differs by rank",
    "busy": "work that only this rank does (evaluation, a download, a compile, printing), or an endless loop."
    " Let all ranks do it, or let the others go on meanwhile",
    "network": "a rank on another node that was lost, or a network that lost packets: see the other nodes'"
    " output, and `stepladder doctor --comm`",
    "here": "the network between the ranks, or a library's deadlock: see the stacks; `stepladder doctor --comm`",
    "early": "a download, a file system, a first compilation, or a port that does not answer. It may be slow only",
    "ended": "the rank was ended from outside or crashed; its error is shown when the group ends",
    "aborted": SIGNALS[signal.SIGABRT],
    "slow": "slow work that all ranks do at once, or the same deadlock in all of them",
}  # fmt: skip


def oom_kills() -> int:
    """How often this machine's kernel has killed a process for lack of memory, since it started."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) if found else 0


def cause_of_error(kind: ErrorKind) -> str:
    """One sentence, or "" where the error says enough itself."""
    return f"cause: {ERRORS[kind]}" if kind in ERRORS else ""


def cause_of_signal(number: int, out_of_memory: bool) -> str:
    """What usually ends a rank by this signal. out_of_memory: the kernel killed for memory meanwhile."""
    if number == signal.SIGKILL and out_of_memory:
        return "cause: out of memory, so the kernel ended it. HINT: a smaller batch, fewer workers or processes"
    if number == signal.SIGKILL:
        return "cause: `kill -9` from outside: a person, the batch system, or a container's limit of memory"
    return f"cause: {SIGNALS[number]}" if number in SIGNALS else ""

"""The usual causes of hangs and failures, as they are shown to the user, in one place."""

from __future__ import annotations

import signal
import sys

from stepladder.core.machine_limits import LIMITS_HINT
from stepladder.launcher.diagnose.rank_status import ProcessState
from stepladder.rank.error_record import ErrorKind

ABORTED = (
    "an abort in compiled code, whose reason is printed above; NCCL's watchdog ends a rank like"
    " this"
)
SUSPENDED_CAUSE = (
    "Ctrl-Z, `kill -STOP`, a debugger, or a suspended machine. It continues after"
    " `kill -CONT {pid}`"
)
DATA_LOADER = (
    "a data loader that does not deliver: a file system that does not answer, a worker that waits"
    " for a lock taken before it was forked, or one slow sample. With num_workers=0 the line is"
    " named"
)
LOCK = (
    "a deadlock: an event that no thread sets, two locks taken in different orders, one taken"
    " twice, or one that was held when this process was forked"
)
QUEUE = (
    "a queue that nobody fills: {producer} ended. Let the producer put an end mark in a `finally:`,"
    " and give get() a timeout"
)
FULL_QUEUE = (
    "a full queue that nobody empties: the thread or process that takes from it is stuck, or ended."
    " Give put() a timeout, and say why it ended"
)
PRODUCER = "the thread or process that puts into it is stuck, or"
EXTRA_COLLECTIVE = (
    "a collective that only some ranks call: an `if rank == 0:`, a loss or an exception around it"
    " that not all ranks share. Let every rank call it, or none"
)
DIFFERENT_ORDER = (
    "ranks that take different branches: an `if` on a value that is not the same on every rank, or"
    " parameters that only some ranks used"
)
DIFFERENT_SHAPES = (
    "tensors of different shapes: a model, a vocabulary, a share of the data or a last batch that"
    " differs by rank. HINT: pad them to one size, all_gather_object, or equal shares"
)
SKIPPED_BLOCK = (
    "a block of --shard full that not all ranks call, as where layers are dropped at random. Call"
    " each block on every rank, or --shard optimizer"
)
BUSY = (
    "work that only this rank does (evaluation, a download, a compile, printing), or an endless"
    " loop. Let all ranks do it, or let the others continue meanwhile"
)
OTHER_NODE = (
    "a rank on another node that was lost, or a network that lost packets: see the other nodes'"
    " output, and `stepladder doctor --comm`"
)
NETWORK = "the network between the ranks (try `stepladder doctor --comm`), or a library's deadlock"
GROUP_ORDER = (
    "groups that are formed in another order on these ranks: `new_group` is a collective of all"
    " ranks, members or not, who call it in one order and with the same members"
)
OTHER_GROUPS = (
    "groups that differ: `new_group` is a collective of all ranks, who call it in one order and"
    " with the same members, and a collective is of one group on all of its ranks; or the network"
)
STARTING = (
    "a download, a file system, a first compilation, or a port that does not answer. It may only be"
    " slow"
)
ENDED_EARLY = (
    "fewer batches than the others have: DistributedSampler gives all as many, drop_last=True drops"
    " the remainder, and `with Join([model]):` lets a rank end early. Or a collective that only the"
    " others call, as under `if rank == 0:`; or a return, sys.exit() or a swallowed exception on"
    " this rank alone"
)
ENDED = "the rank was ended from outside or crashed; its error is shown when the group ends"
SILENT = "work in compiled code that only this rank does, or a lost machine. See it with py-spy"
SLOW = "slow work that all ranks do at once, or the same deadlock in all of them"

STATE_CAUSES = {
    ProcessState.STOPPED: SUSPENDED_CAUSE,
    ProcessState.DONE: ENDED_EARLY,
    ProcessState.ENDED: ENDED,
    ProcessState.ABORTED: ABORTED,
    ProcessState.SILENT: SILENT,
}
FULL_SHARED_MEMORY = (
    "/dev/shm is full. HINT: df -h /dev/shm; docker run --ipc=host, or --shm-size=8g; or fewer"
    " loading workers (num_workers=0 needs none of it)"
)
# The likely cause of an error, with a HINT: what users ask most often.
ERROR_CAUSES = {
    ErrorKind.DIFFERENT_CALLS: f"{DIFFERENT_ORDER}. HINT: call each collective on every rank, or"
    " on none",
    ErrorKind.DIFFERENT_SIZES: DIFFERENT_SHAPES,
    ErrorKind.OUT_OF_MEMORY: "out of memory. HINT: a smaller --microbatch;"
    " train JOB --dry-run estimates the memory that it needs",
    ErrorKind.WORKER_KILLED: "out of memory, most often: the kernel has ended the worker. HINT:"
    " fewer workers, a smaller batch or prefetch_factor; dmesg shows what the kernel has killed",
    ErrorKind.SHARED_MEMORY: FULL_SHARED_MEMORY,
    ErrorKind.LIMIT: f"a limit of this machine. HINT: {LIMITS_HINT}",
    ErrorKind.IMPORT: "an import. HINT: install what is missing for"
    f" {sys.executable}, which runs the ranks",
    ErrorKind.PORT_IN_USE: "the port is in use. HINT: leave --master-port out for a free one,"
    " or another number",
    ErrorKind.NOT_CONNECTED: "the ranks could not connect. HINT: MASTER_ADDR and MASTER_PORT must"
    " lead all ranks to rank 0",
}
SIGNAL_CAUSES: dict[int, str] = {
    signal.SIGKILL: "`kill -9` from outside: a person, the batch system, or a container's limit of"
    " memory",
    signal.SIGSEGV: "a crash in compiled code. HINT: python -X faulthandler; do all nodes have the"
    " same versions?",
    signal.SIGBUS: f"often {FULL_SHARED_MEMORY}",
    signal.SIGABRT: ABORTED,
    signal.SIGILL: "a package built for another processor. HINT: install it on this machine",
}
KILLED_FOR_MEMORY = (
    "out of memory, so the kernel ended it. HINT: fewer workers;"
    " train JOB --dry-run estimates the memory that it needs"
)

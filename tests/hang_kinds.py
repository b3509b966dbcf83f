"""The hangs of tests/jobs/hangs_of_scripts.py, and what is to be said of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Event, Thread

from processes import JOBS

SCRIPT = JOBS / "hangs_of_scripts.py"
SAVED = r"all_gather, called by save_on_first\(\)"
BACKWARD = r"in backward, called by main\(\), hangs_of_scripts.py:\d+"
IN_OTHER_ORDER = r"group_in_other_order\(\), hangs_of_scripts.py:\d+"
# kind: the rank, the function and the reason, as `run` says them where ranks wait in gloo
SAID_BY_GLOO = {
    "metric": rf"rank 0 .* aborted in all_reduce, called by sum_metric\(\).* rank 1 .* {BACKWARD}",
    "early": rf"rank 1 .* waits in barrier, called by main\(\).* rank 0 .* {BACKWARD}",
    "barrier": rf"rank 1 .* {BACKWARD}, while rank 0 .* in barrier, called by wait_as_first\(\)",
    "uneven": rf"rank 1 \(pid \d+\) ended well .*; rank 0 .* {BACKWARD}",
    "save": rf"rank 1 .* {BACKWARD}, while rank 0 .* in {SAVED}, hangs_of_scripts.py:\d+",
    "worker": (
        r"rank 1 .*: it is in read_queue\(\), hangs_of_scripts.py:\d+ `items.get\(\)`.*\n"
        r".* a queue that nobody fills: the thread or process that puts into it is stuck, or ended"
    ),
    "lock": r"rank 1 .*: it is in wait_for_lock\(\), hangs_of_scripts.py:\d+",
    "group": r"all ranks wait in all_reduce, called by use_wrong_group\(\).*\n.* groups that differ",
    "recv": rf"rank 1 .* waits in recv, called by receive\(\).* rank 0 .* {BACKWARD}",
    "new-group": rf"rank 1 .* {BACKWARD}, while rank 0 .* called by group_on_first\(\)",
    "group-order": (
        r"rank 1 .* waits in new_group 2 of ranks 0, 1, after that of rank 0,"
        rf" called by {IN_OTHER_ORDER}.*, while rank 0 .* waits in new_group 1 of ranks 0, 1,"
        rf" called by {IN_OTHER_ORDER}.*\n.* formed in another order"
    ),
}
# Shared memory sees at once that ranks call different collectives, and raises.
DIFFERENT = (
    r"rank {0} calls a different collective here than rank {1}: {2}, where rank {1} calls {3}"
)
CALLS_IN_MEMORY = {  # of the first rank and of the second
    "metric": (r"all_reduce sum \(.*\) in sum_metric\(\), \S+", r"all_reduce .* in main\(\), \S+"),
    "early": (r"all_reduce .* in main\(\), \S+", r"barrier in main\(\), \S+"),
    "barrier": (r"barrier in wait_as_first\(\), \S+", r"all_reduce .* in main\(\), \S+"),
    "save": (r"all_gather \(.*\) in save_on_first\(\), \S+", r"all_reduce .* in main\(\), \S+"),
}
SAID_IN_MEMORY = SAID_BY_GLOO | {
    kind: f"({DIFFERENT.format(0, 1, *calls)}|{DIFFERENT.format(1, 0, *reversed(calls))})"
    for kind, calls in CALLS_IN_MEMORY.items()
}
# kind: the rule, the function at whose line the finding is, and what was seen, by `check`
SAID_BY_CHECK = {
    "metric": ("collective-order", "sum_metric", "`if has_correct_answer`"),
    "early": ("uneven-steps", "main", "rank 1 has left the loop after 4 steps"),
    "barrier": ("collective-order", "wait_as_first", "DDP's: `if RANK == 0`"),
    "uneven": ("uneven-steps", "main", "rank 1 has left the loop after 6 steps"),
    "save": ("collective-order", "save_on_first", "DDP's: `if RANK == 0`"),
    "worker": ("hang", "read_queue", "rank 1: it is in read_queue()"),
    "thread": ("hang", "read_queue", "nobody fills: thread Thread-1 (read_nothing) ended"),
    "threads": ("hang", "read_queue", "all ranks are in read_queue()"),
    "lock": ("hang", "wait_for_lock", "rank 1: it is in wait_for_lock()"),
    "locks": ("hang", "lock_in_two_orders", "another thread: lock_in_other_order(), hangs_of_"),
    "group": ("collective-order", "use_wrong_group", "of another group"),
    "recv": ("hang", "receive", "rank 1 waits in recv, called by receive()"),
    "new-group": ("hang", "main", "rank 0 waits in new_group 1 of ranks 0, 1"),
    "group-order": (
        "hang",
        "group_in_other_order",
        "rank 1 waits in new_group 2 of ranks 0, 1, after that of rank 0",
    ),
    "timeout": ("hang", "download", "rank 0: it is in download()"),
}


@contextmanager
def serve_gate() -> Iterator[tuple[int, Event]]:
    """Yield a port of this machine, and the event on which everybody who has connected gets a byte."""
    is_open = Event()

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            is_open.wait()
            with suppress(OSError):  # the other end may be gone
                self.request.sendall(b".")

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1], is_open
        finally:
            is_open.set()
            server.shutdown()
            thread.join()


def function_at(line: int) -> str:
    """Return the function of the script that a line is in."""
    before = SCRIPT.read_text(encoding="utf-8").splitlines()[:line]
    heads = [text for text in before if text.startswith("def ")]
    return heads[-1].removeprefix("def ").partition("(")[0]

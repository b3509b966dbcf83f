"""Changes to how the workers of torch's DataLoader hand over their batches; see torch_fixes.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from stepladder_exchange.after_import import call_after_import

SHARED_MEMORY_FOLDER = Path("/dev/shm")
UNFILLED_FILE = re.compile(r"file </(torch_\w+)>")


def report_unsent_batches() -> None:
    """Let a worker send its error in place of a batch that it cannot send.

    A worker sends its batches in a thread, which only prints its errors, such as that no shared
    memory is left or that the batch cannot be pickled: the rank would wait for the batch for ever.
    torch also leaves the file in /dev/shm that it could not fill. Applies to this process and those
    that it forks. Seen with torch 2.11 to 2.15. Can go when DataLoader does the same.
    """
    call_after_import("torch", _remove_unfilled_files)
    print_error: Any = Queue._on_queue_feeder_error  # type: ignore[attr-defined]

    def send_error(queue: Any, error: BaseException, item: Any) -> None:
        data = sys.modules.get("torch.utils.data")
        worker = data.get_worker_info() if data is not None else None
        is_batch = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], int)
        if worker is None or not is_batch:
            print_error(error, item)
            return
        from torch._utils import ExceptionWrapper

        exc_info: Any = (type(error), error, error.__traceback__)
        where = f"in DataLoader worker process {worker.id}"
        queue.put((item[0], ExceptionWrapper(exc_info, where)))

    Queue._on_queue_feeder_error = send_error  # type: ignore[attr-defined]


@contextmanager
def as_last_worker(num_workers: int, dataset: Any) -> Iterator[None]:
    """Let a Dataset that is read in the block see the last of several workers."""
    if num_workers < 2:
        yield
        return
    from torch.utils.data._utils import worker

    before = worker._worker_info
    worker._worker_info = worker.WorkerInfo(
        id=num_workers - 1, num_workers=num_workers, seed=0, dataset=dataset
    )
    try:
        yield
    finally:
        worker._worker_info = before


def _remove_unfilled_files(torch: Any) -> None:
    def removing_file(share: Callable[..., Any]) -> Any:
        @wraps(share)
        def share_or_remove(*args: Any, **options: Any) -> Any:
            try:
                return share(*args, **options)
            except RuntimeError as error:
                match = UNFILLED_FILE.search(str(error))
                if match:
                    (SHARED_MEMORY_FOLDER / match[1]).unlink(missing_ok=True)
                raise

        return share_or_remove

    storage = torch.UntypedStorage
    storage._new_using_fd_cpu = staticmethod(removing_file(storage._new_using_fd_cpu))
    storage._share_fd_cpu_ = removing_file(storage._share_fd_cpu_)

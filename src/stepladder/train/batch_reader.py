"""Reading a microbatch once more, for the checks that compute it again."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import torch

from stepladder.core.plan import Span
from stepladder.data.sources import BatchSource, DatasetSource
from stepladder.rank.torch_fixes_loader import as_last_worker
from stepladder.train.comm import Comm
from stepladder.train.phases import READING
from stepladder.train.run_spec import RunSpec


class BatchReader:
    """Reads any microbatch in this process, as the training has read it."""

    def __init__(self, spec: RunSpec, comm: Comm) -> None:
        self.plan = spec.plan
        self.comm = comm
        self.source: BatchSource = spec.train_source
        self.threads = spec.threads
        self.num_workers = 0
        self.dataset: Any = None
        if isinstance(spec.train_source, DatasetSource) and spec.train_source.num_workers:
            # One batch is not worth worker processes.
            source = copy.copy(spec.train_source)
            self.num_workers = source.num_workers
            self.dataset = source.dataset
            source.num_workers = 0
            self.source = source
            self.threads = 1  # as many as a worker has

    def read(self, step: int, span: Span) -> Any:
        """Return a microbatch of a step."""
        requests = self.plan.requests(step, [span])
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with (
                self.comm.phases(READING),
                as_last_worker(self.num_workers, self.dataset),  # the first one has read it before
                closing(self.source.batches(requests)) as batches,
            ):
                return next(batches)[1]
        finally:
            torch.set_num_threads(threads)

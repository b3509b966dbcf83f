"""Reading a batch once more, for the checks that compute it again."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import torch

from stepladder.core.plan import Span
from stepladder.data.sources import BatchSource, DatasetSource, Request
from stepladder.rank.torch_fixes_loader import as_last_worker
from stepladder.train.comm import Comm
from stepladder.train.phases import READING
from stepladder.train.run_spec import RunSpec


class BatchReader:
    """Reads any batch of a source in this process, as the training or the evaluation reads it."""

    def __init__(self, spec: RunSpec, comm: Comm, source: BatchSource) -> None:
        self.plan = spec.plan
        self.comm = comm
        self.source = source
        self.threads = spec.threads
        self.num_workers = 0
        self.dataset: Any = None
        if isinstance(source, DatasetSource) and source.num_workers:
            # One batch is not worth worker processes.
            source = copy.copy(source)
            self.num_workers = source.num_workers
            self.dataset = source.dataset
            source.num_workers = 0
            self.source = source
            self.threads = 1  # as many as a worker has

    def read(self, step: int, span: Span) -> Any:
        """Return a microbatch of a step."""
        return self.read_request(self.plan.requests(step, [span]))

    def read_request(self, requests: Iterable[Request]) -> Any:
        """Return the batch of the first request."""
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

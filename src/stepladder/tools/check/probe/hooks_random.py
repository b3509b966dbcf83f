"""Hooks that record random numbers drawn for samples, by the data set or in the training loop."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from functools import partial
from multiprocessing import current_process, parent_process
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from stepladder.tools.check.events import Digests, Draw, Fetch, Seeding
from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.hooks_data import base_of
from stepladder.tools.check.probe.patching import (
    NestingDepth,
    WrappedCall,
    record_calls,
    record_user_calls,
    wrap,
)
from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.probe.events import CodeLine

DRAWING_FUNCTIONS = (
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "randint",
    "randint_like",
    "randperm",
    "bernoulli",
    "normal",
    "multinomial",
)
DRAWING_METHODS = ("uniform_", "normal_", "bernoulli_", "random_")
MAX_DRAWS_PER_LINE = 40
MAX_FETCHES = 4  # of each fetcher
MAX_RECORDED_INDICES = 64

fetch_counts: Counter[int] = Counter()  # by the id of the fetcher
draw_counts: Counter[CodeLine | None] = Counter()
running_fetch = NestingDepth()


def attach() -> None:
    start_generator()
    record_calls([torch.random, torch], "manual_seed", lambda _: Seeding())
    wrap(fetch._MapDatasetFetcher, "fetch", record_fetch)
    for name in DRAWING_FUNCTIONS:
        record_user_calls(torch, name, partial(draw_event, name))
    for name in DRAWING_METHODS:
        record_user_calls(torch.Tensor, name, partial(draw_event, name))


def start_generator() -> None:
    """Start torch's global generator at a number of this rank and this start of the script.

    Without a seed a script draws other numbers each time, and the text of a finding may hold what
    comes of them. So they are the same in each check, and differ as they would without a check:
    between ranks, and between the unbroken and the resumed run. Those of Python and numpy are left
    as they are: the script may have set their seeds before it imports torch.
    """
    start = Path(current_log().settings.folder).name
    name = current_process().name  # tells ranks apart that the script has made itself
    seed = zlib.crc32(f"{start} {os.environ.get('RANK')} {name}".encode())
    torch.default_generator.manual_seed(seed)


def draw_event(name: str, call: WrappedCall) -> Draw | None:
    line = current_log().user_line()
    draw_counts[line] += 1
    if draw_counts[line] > MAX_DRAWS_PER_LINE:
        return None
    generator = call.kwargs.get("generator") or torch.default_generator
    state = digests.generator_state(generator)
    return Draw(fn=name, state=state, for_sample=running_fetch.depth > 0)


def record_fetch(call: WrappedCall) -> Any:
    """Record the generators whose states change while samples are fetched."""
    fetcher, indices = call.args
    fetch_counts[id(fetcher)] += 1
    if fetch_counts[id(fetcher)] > MAX_FETCHES:
        return call.run()
    before = generator_states(fetcher.dataset)
    with running_fetch:
        batch = call.run()
    after = generator_states(fetcher.dataset)
    info = get_worker_info()
    index_list = list(indices) if isinstance(indices, list | tuple) else [indices]
    event = Fetch(
        indices=index_list[:MAX_RECORDED_INDICES],
        used={name: state for name, state in before.items() if after.get(name) != state},
        worker=info.id if info else -1,
        parent=pid_of_parent(),
    )
    current_log().write(event, line_of_getitem(fetcher.dataset))
    return batch


def pid_of_parent() -> int:
    """Return the process that made this one by `multiprocessing`; -1 where none has."""
    parent = parent_process()
    return parent.pid if parent is not None and parent.pid else -1


def generator_states(dataset: Any) -> Digests:
    return digests.random_states() | digests.generator_states(dataset)


def line_of_getitem(dataset: Any) -> CodeLine | None:
    """Return the line of the method with which the data set's class reads a sample."""
    method = getattr(type(base_of(dataset)), "__getitem__", None)
    code = getattr(method, "__code__", None)
    if code is None or not current_log().is_user_file(code.co_filename):
        return None
    return CodeLine(code.co_filename, code.co_firstlineno, "__getitem__")

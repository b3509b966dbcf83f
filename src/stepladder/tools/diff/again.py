"""A run's steps trained again, on one process, with a digest of all that a step computes, in its
order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import torch

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.typed_file import hash_file
from stepladder.storage.run_files import CONFIG_FILE, SNAPSHOTS_FOLDER
from stepladder.storage.snapshot import read_snapshot
from stepladder.storage.snapshot_slices import DamagedSnapshot
from stepladder.tools.diff.records import CODE, Kept
from stepladder.tools.local_ranks import run_on_ranks
from stepladder.tools.verify.causes import leaves
from stepladder.train.fingerprints import fingerprint
from stepladder.train.job import Job
from stepladder.train.job_file import load_stored_job
from stepladder.train.job_runner import join_process_group
from stepladder.train.phases import STEPPING
from stepladder.train.trainer import Trainer

SEEN = "seen.json"
MOST_STEPS = 8  # whose digests are kept; the steps before are trained alone
INITIAL, START, DATA, RANDOM, OPERATION = (
    "initial weights",
    "weights",
    "data",
    "randomness",
    "operation",
)
LOSS, GRADIENT, RATE, OPTIMIZER = "loss", "gradient", "learning rate", "optimizer"


class Event(NamedTuple):
    """Something a step computes. number: of the microbatch, from 1; 0 for the whole step.  shown:
    for people.
    """

    step: int
    number: int
    kind: str
    name: str
    digest: str
    shown: str


@dataclass(frozen=True)
class Again:
    """A training again: where it is kept, what it computed, and the step after which it began."""

    folder: Path
    start: int
    seen: list[Event]


class Watch:
    """Follows a job's steps from `first` on. Observes phases, for a step's begin and end."""

    def __init__(self, job: Job, start: int, first: int) -> None:
        self.job, self.step, self.number, self.first = job, start, 0, first
        self.seen: list[Event] = []
        self.on_gpu = False
        for name, module in job.model.named_modules():
            module.register_forward_pre_hook(partial(self._input, name), with_kwargs=True)
            module.register_forward_hook(partial(self._output, name))
        for name, param in job.model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._gradient, name))
        job.optimizer.register_step_pre_hook(self._before_update)

    def note(self, kind: str, name: str, value: Any, shown: str = "") -> None:
        if self.step >= self.first:
            self.seen.append(Event(self.step, self.number, kind, name, digest_of(value), shown))

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        """The job's own, with what it gets and gives."""
        self.number += 1
        self.on_gpu = next(model.parameters()).is_cuda
        for place, part in enumerate(leaves(batch)):
            self.note(DATA, f"tensor {place} of the batch", part)
        self._generator("the loss")
        result = self.job.loss(model, batch)
        self.note(LOSS, "the loss", result)
        return result

    def _generator(self, name: str) -> None:
        state = torch.cuda.get_rng_state() if self.on_gpu else torch.get_rng_state()
        self.note(RANDOM, f"the random generator before {name}", state)

    def _input(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.note(OPERATION, f"what goes into {name or 'the model'}", [*args, *kwargs.values()])
        if is_leaf(module):
            self._generator(name or "the model")

    def _output(self, name: str, module: torch.nn.Module, _args: Any, output: Any) -> None:
        shown = repr(module) if is_leaf(module) else type(module).__name__
        self.note(OPERATION, name or "the model", output, shown)

    def _gradient(self, name: str, param: torch.Tensor) -> None:
        self.note(GRADIENT, name, param.grad)

    def _before_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.number = 0
        for name, param in self.job.model.named_parameters():
            self.note(GRADIENT, f"{name} over the whole step", param.grad)
        for place, group in enumerate(optimizer.param_groups):
            for name in sorted(group.keys() - {"params"}):
                kind = RATE if name == "lr" else OPTIMIZER
                self.note(kind, f"{name} of group {place}", group[name], repr(group[name]))

    def __call__(self, mark: str) -> AbstractContextManager[Any]:
        return self._a_step() if mark == STEPPING.mark else nullcontext()

    @contextmanager
    def _a_step(self) -> Iterator[None]:
        self.step, self.number = self.step + 1, 0
        if self.step == self.first:
            self._state(INITIAL if self.first == 1 else START)
        yield
        self.number = 0
        self._state(OPTIMIZER)

    def _state(self, kind: str) -> None:
        for name, tensor in self.job.model.state_dict().items():
            self.note(kind, name, tensor)
        optimizer = type(self.job.optimizer).__name__
        self.note(
            OPTIMIZER, "the optimizer's class", optimizer, optimizer
        )  # some have a state from the start
        names: dict[Any, str] = {param: name for name, param in self.job.model.named_parameters()}
        for param, state in self.job.optimizer.state.items():
            for name, value in state.items():
                self.note(kind, f"{name} of {names.get(param, 'a parameter')}", value)


def is_leaf(module: torch.nn.Module) -> bool:
    return next(module.children(), None) is None


def digest_of(value: Any) -> str:
    """Of all tensors, numbers and texts in a nested value; of other objects only that they are
    there.
    """
    parts = [
        part if isinstance(part, (torch.Tensor, float, int, str, bytes)) else None
        for part in leaves(value)
    ]
    return fingerprint(
        [fingerprint(p.to_dense() if isinstance(p, torch.Tensor) else p) for p in parts]
    ).hex()


def train_watched(request: TrainRequest, start: int, first: int) -> int:
    """What the rank does."""
    with join_process_group(request) as (build, recipe, comm):
        job = build()
        comm.phases.observer = watch = Watch(job, start, first)
        job = replace(job, loss=watch.loss, eval_data=None, best=None)
        Trainer(job, request.settings, recipe, comm).fit()
    (request.settings.run_dir / SEEN).write_text(json.dumps(watch.seen), encoding="utf-8")
    return 0


def start_of(kept: Kept, last: int) -> int:
    """The step of the newest good snapshot before step `last`; 0 for none: the run's own beginning."""
    for step, path in sorted(kept.snapshots().items(), reverse=True):
        if step < last:
            try:
                read_snapshot(path)
            except DamagedSnapshot as error:
                kept.problems.append(f"snapshot {path.name} is damaged ({error})")
            else:
                return step
    return 0


def train_again(kept: Kept, start: int, watched: tuple[int, int], folder: Path) -> Again:
    """The run's steps after `start`; the first and the last one are watched, and those between.

    Raises InputError where it cannot be trained.
    """
    first, last = watched
    request = request_of(kept, last, folder)
    if start:
        path = kept.snapshots()[start]
        copytree(path, folder / SNAPSHOTS_FOLDER / path.name)
    run_on_ranks(
        partial(train_watched, request, start, first), 1, request.settings.threads or 1, request
    )
    seen = [Event(*event) for event in json.loads((folder / SEEN).read_bytes())]
    return Again(folder, start, seen)


def request_of(kept: Kept, last: int, folder: Path) -> TrainRequest:
    """What `train` would be asked, to have the run's first steps again on one process."""
    path, given, settings = load_stored_job(kept.run_dir)
    if kept.processes(last) is None:
        raise InputError(
            f"the ledger of {kept.run_dir} does not prove step {last}",
            f"stepladder audit {kept.run_dir}",
        )
    if (recorded := kept.environment.get(CODE)) is not None and recorded != hash_file(path):
        raise InputError(
            f"{path} is no longer the file that {kept.run_dir} was trained with",
            "put that one back",
        )
    if settings.get("batch_per_rank") is not None:
        raise InputError(
            f"{kept.run_dir} has a batch per process, which one process has not", "--global-batch B"
        )
    for name in ("compile", "capture"):
        if settings.get(name):
            raise InputError(
                f"{kept.run_dir} was trained with --{name}: nobody can look at its operations",
                "the same runs without it",
            )
    epochs = -(-last // kept.plan.steps_per_epoch)
    if "epochs" not in kept.definition:  # else the schedule depends on it
        given |= {"epochs": epochs} if "epochs" in given else {}
        settings |= {} if "epochs" in given else {"epochs": epochs}
    settings |= {"run_dir": folder, "steps": last, "snapshot_every": last, "progress": False}
    settings |= {"threads": kept.settings["threads"] or 1}
    with as_input_error(
        f"{kept.run_dir / CONFIG_FILE} is damaged", "put a copy there", (TypeError, ValueError)
    ):
        return TrainRequest(path, given, Settings(**settings))


def first_unlike(one: Again, other: Again) -> tuple[Event | None, Event | None] | None:
    """The first thing that the two computed in another way."""
    for a, b in zip_longest(one.seen, other.seen):
        if a is None or b is None or a[:5] != b[:5]:
            return a, b
    return None

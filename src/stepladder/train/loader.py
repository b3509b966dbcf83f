"""`Loader`: the plan's batches for any training loop, with a state of a few bytes."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from stepladder.core.arguments import validate_arguments
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.jsonl import is_count
from stepladder.core.numbers import validate_count
from stepladder.core.order import derive_seed
from stepladder.core.plan import Plan
from stepladder.core.world import World
from stepladder.data.source import get_contents, validate_same_files
from stepladder.data.sources import Batches, Request, find_chunks, is_sorted_by_length, open_source
from stepladder.train.script_world import get_world_of_script

if TYPE_CHECKING:
    from stepladder.train.loader_ledger import LoaderLedger

NEW_RUN_HINT = "to begin with the first sample, no load_state_dict"
STATE_HINT = f"what a Loader's state_dict() has returned; {NEW_RUN_HINT}"


class Loader:
    """The batches of this rank, for a loop of your own, of Accelerate, Lightning or Transformers.

    `for batch in loader` yields one batch for each step of the epoch. In an epoch every sample is
    in exactly one batch of exactly one rank. After a `break`, the next loop continues with the next
    batch. After the end of an epoch, the next loop yields the next epoch, in another order.

    `state_dict()` counts the batches that the loop was given. It is the same on every rank, and can
    be loaded on any number of ranks and workers. Batches that were read ahead are read again after
    a resume.

    Args:
        data: Tensors (one, or a tuple or dict of them), `Shards`, a `Source`, or a map-style
            Dataset.
        global_batch: The samples of a step on all ranks together, so that a resumed run has the
            same steps on any number of ranks. The shares of two ranks differ by at most one sample.
        seed: Determines the order of samples, and the random numbers of a Dataset's items.
        drop_last: Whether the samples at the end of an epoch that do not fill a global batch are
            left out.
        num_workers: The number of processes that read a Dataset; 0 reads it in this process. A
            thread reads a Source or Shards ahead.
        collate: Makes a batch of a list of items of a Dataset, as DataLoader's `collate_fn` does.
        device: Where batches are put, through pinned memory if it is a GPU. By default the CPU.
        run_dir: Where each rank writes which samples it was given, for `stepladder audit`. The
            ranks then agree on a number at the first batch, in a collective.
        world: This rank among those that share a step; by default that of torch's process group,
            else the launcher's.

    Raises:
        InputError: A rank would have no sample in some step, or `data` is of another kind.
    """

    @validate_arguments
    def __init__(
        self,
        data: Any,
        global_batch: int,
        seed: int = 0,
        *,
        drop_last: bool = False,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        device: torch.device | str = "cpu",
        run_dir: str | Path | None = None,
        world: World | None = None,
    ) -> None:
        validate_count("num_workers", num_workers, 0)
        validate_count("global_batch", global_batch)
        with as_input_error(f"device={device!r}", 'device="cpu" or "cuda"', (RuntimeError,)):
            target = torch.device(device)
        self._data = data
        self._source = open_source(data, target, seed, num_workers, collate)
        self._plan = Plan(
            len(self._source),
            global_batch,
            microbatch=1,
            seed=seed,
            chunks=find_chunks(data),
            drop_last=drop_last,
            by_length=is_sorted_by_length(data),
        )
        self._world = world
        _validate_shares(self._plan, world or _find_world())
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._step = 0  # batches that the loop was given
        self._attempt = 0  # the attempt of `run_dir` that gave the last batch
        self._batches: Batches | None = None
        self._ledger: LoaderLedger | None = None
        self._loop = 0  # how many loops have begun

    @property
    def step(self) -> int:
        """The number of batches that this rank's loops were given, over all epochs."""
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self._plan.epoch_of_step(self._step)

    @property
    def step_samples(self) -> int:
        """The number of samples on all ranks together of the last batch that was given.

        A sum of losses divided by it, and multiplied by the number of ranks, is what
        DistributedDataParallel must average to get the mean over the step's samples.
        """
        lo, hi = self._plan.batch(max(self._step - 1, 0))
        return hi - lo

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on every rank."""
        return self._plan.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batch of each step that the epoch still has.

        Raises:
            RuntimeError: Another loop over this loader has begun since.
        """
        self._loop += 1
        loop = self._loop
        epoch = self.epoch
        while self.epoch == epoch:
            if self._loop != loop:
                raise RuntimeError("another loop over this Loader has begun, or a state was loaded")
            yield self._read_batch()

    def _read_batch(self) -> Any:
        if self._batches is None:
            self._open()
        assert self._batches is not None
        try:
            indices, batch = next(self._batches)
        except BaseException:  # a generator that has raised yields nothing more
            self.close()
            raise
        if self._ledger is not None:
            # Written before the loop trains on the batch. So when any rank saves its state after a
            # step, every rank that has finished the step has written its line.
            self._ledger.record(self._step + 1, self.epoch, indices)
        self._step += 1
        return batch

    def _open(self) -> None:
        # Called at the first batch: Lightning starts the ranks after the Loader is made.
        world = self._world or _find_world()
        _validate_shares(self._plan, world)
        if self._run_dir is not None:
            # Late: most loops have no run directory.
            from stepladder.train.loader_ledger import LoaderLedger

            self._ledger = LoaderLedger(self._run_dir, self._plan, world, self._step, self._attempt)
            self._attempt = self._ledger.attempt
        self._batches = self._source.batches(self._requests(world))
        OPEN_LOADERS.add(self)

    def _requests(self, world: World) -> Iterator[Request]:
        """Yield the epoch and samples of each step, without an end: workers outlive an epoch."""
        for step in count(self._step):
            indices = self._plan.indices_of_rank(step, world.rank, world.world_size)
            yield self._plan.epoch_of_step(step), indices

    def close(self) -> None:
        """End the threads and workers that read ahead; a later loop starts them again."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop was given, as JSON values."""
        state = {"step": self._step, "attempt": self._attempt, **self._definition}
        files = get_contents(self._data)
        return state if files is None else state | {"files": files}

    @property
    def _definition(self) -> dict[str, Any]:
        """What decides the order of samples, whatever the number of ranks."""
        plan = self._plan
        shuffle = f"{plan.shuffle} by length" if plan.by_length else plan.shuffle
        return {
            "num_samples": plan.num_samples,
            "global_batch": plan.global_batch,
            "seed": plan.seed,
            "drop_last": plan.drop_last,
            "order": f"{shuffle} {derive_seed(repr(plan.chunks)):x}",
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position that `state_dict` has returned, on any number of ranks.

        Raises:
            InputError: The state is of other data, or of a Loader with other arguments.
        """
        _validate_state(state, self._definition)
        validate_same_files(state.get("files"), get_contents(self._data), "the Loader's state")
        self.close()
        self._loop += 1
        self._step = state["step"]
        self._attempt = state["attempt"]


# Multiprocessing waits without limit for workers that run at the interpreter's end.
OPEN_LOADERS: WeakSet[Loader] = WeakSet()


@atexit.register
def close_open_loaders() -> None:
    """Close the loaders that the script has not closed, so that their workers end."""
    for loader in list(OPEN_LOADERS):
        loader.close()


def _find_world() -> World:
    """Return this rank, from the script's process group, or else from the launcher's variables."""
    if dist.is_available() and dist.is_initialized():
        return get_world_of_script()
    return World.detect()


def _validate_shares(plan: Plan, world: World) -> None:
    """Raise InputError if a rank would have no sample in some step, and so no loss."""
    lo, hi = plan.batch(plan.steps_per_epoch - 1)
    min_samples = min(hi - lo, plan.global_batch)
    if world.world_size <= min_samples:
        return
    if min_samples == plan.global_batch:
        hint = f"global_batch={world.world_size} or more, or {min_samples} ranks"
    else:
        hint = "drop_last=True, another global_batch, or fewer ranks"
    raise InputError(
        f"a step of the Loader has {min_samples} samples (global_batch={plan.global_batch},"
        f" {plan.num_samples} in all) for {world.world_size} ranks",
        hint,
    )


def _validate_state(state: dict[str, Any], definition: dict[str, Any]) -> None:
    """Raise InputError if a state was not made by a Loader with the same data and arguments."""
    if not isinstance(state, dict):
        raise InputError(f"the Loader's state is a {type(state).__name__}", STATE_HINT)
    for name in ("step", "attempt"):
        if not is_count(state.get(name)):
            raise InputError(
                f"the Loader's state has {name}={state.get(name)!r:.40}, not a number", STATE_HINT
            )
    for name, value in definition.items():
        stored = state.get(name)
        if stored == value:
            continue
        hint = f"Loader(..., {name}={stored!r:.40})"
        if name in ("num_samples", "order"):
            hint = "the data that the state was taken with"
        raise InputError(
            f"the Loader's state has {name}={stored!r:.40}, and this Loader {name}={value!r:.40}",
            f"{hint}; {NEW_RUN_HINT}",
        )

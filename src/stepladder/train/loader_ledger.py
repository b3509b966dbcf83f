"""The ledger of a `Loader`, in a run directory that its first rank opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from stepladder.core.errors import InputError
from stepladder.core.paths import LOADER_RECIPE
from stepladder.core.plan import Plan
from stepladder.core.world import World
from stepladder.data.sources import Indices
from stepladder.storage.ledger import Ledger, LedgerHeader
from stepladder.storage.run_config import describe_environment
from stepladder.storage.run_dir import RunDir
from stepladder.storage.run_dir_access import translate_storage_errors
from stepladder.storage.run_files import CONFIG_FILE, RUN_SCHEMA

LOCK_WAIT_S = 30.0


class LoaderLedger:
    """Writes which samples a rank's loop was given, since the start or since a state was loaded.

    Creating one is a collective: the first rank opens the run directory, and sends the other ranks
    the number of this attempt, or its error.

    Args:
        path: The run directory.
        plan: The Loader's plan.
        world: This rank.
        step: The number of batches that were given before, by earlier attempts.
        parent: The attempt that gave the last of these batches; 0 if there is none.

    Raises:
        InputError: The directory is in use, cannot be written, or holds another run.
    """

    def __init__(self, path: Path, plan: Plan, world: World, step: int, parent: int) -> None:
        self.path = path
        self.run_dir: RunDir | None = None
        self.attempt = self._agree_on_attempt(plan, world)
        header = LedgerHeader(
            self.attempt, world.rank, world.world_size, step, chain="", parent=parent
        )
        with translate_storage_errors(path):
            self.file = Ledger(path, header)

    def _agree_on_attempt(self, plan: Plan, world: World) -> int:
        if world.world_size == 1:
            return self._open_run_dir(plan)
        _validate_group(world)
        answer: list[Any] = [None]
        if world.is_first:
            try:
                answer = [self._open_run_dir(plan)]
            except InputError as error:
                answer = [(error.problem, error.hint)]
        dist.broadcast_object_list(answer)
        if isinstance(answer[0], tuple):
            raise InputError(*answer[0])
        attempt: int = answer[0]
        return attempt

    def _open_run_dir(self, plan: Plan) -> int:
        """Open the run directory, write or compare its plan, and return the attempt's number."""
        run_dir = RunDir(self.path, LOCK_WAIT_S)
        try:
            config = run_dir.read_json(CONFIG_FILE)
            if config is None:
                run_dir.write_json(CONFIG_FILE, _make_config(plan))
            else:
                _validate_same_plan(config, plan, self.path)
        except BaseException:
            run_dir.close()
            raise
        self.run_dir = run_dir
        return run_dir.attempt

    def record(self, step: int, epoch: int, indices: Indices) -> None:
        """Write the line of one batch: its step, counted from 1, its epoch and its samples."""
        with translate_storage_errors(self.path):
            self.file.record_step(step, epoch, [indices])
            self.file.flush()

    def close(self) -> None:
        """Close the file, and on the first rank unlock the run directory."""
        self.file.close()
        if self.run_dir is not None:
            self.run_dir.close()


def _validate_group(world: World) -> None:
    """Raise InputError if torch's process group does not consist of the ranks of the Loader."""
    if not dist.is_initialized():
        raise InputError(
            f"a Loader with a run_dir on {world.world_size} ranks has no process group, in which"
            " they agree on a number",
            "torch.distributed.init_process_group() before the first batch, or no run_dir",
        )
    if dist.get_world_size() != world.world_size:
        raise InputError(
            f"a Loader with a run_dir has {world.world_size} ranks, and the process group"
            f" {dist.get_world_size()}",
            "a world of all ranks, or no run_dir",
        )


def _make_config(plan: Plan) -> dict[str, Any]:
    """Return the content of config.json for the run of a Loader."""
    definition = {
        "recipe": LOADER_RECIPE,
        "num_samples": plan.num_samples,
        "global_batch": plan.global_batch,
        "seed": plan.seed,
    }
    return {
        "schema": RUN_SCHEMA,
        "definition": definition,
        "plan": plan.as_json(),
        "environment": describe_environment(),
    }


def _validate_same_plan(config: dict[str, Any], plan: Plan, path: Path) -> None:
    """Raise InputError if the run directory was begun with another order of samples."""
    stored = config.get("plan")
    current = plan.as_json()
    if stored == current:
        return
    if not isinstance(stored, dict):
        raise InputError(f"{path / CONFIG_FILE} holds no plan", "another run_dir")
    names = sorted(stored.keys() | current.keys())
    name = next(name for name in names if stored.get(name) != current.get(name))
    raise InputError(
        f"run_dir {path} was begun with {name}={stored.get(name)!r:.40}, and this Loader has"
        f" {current.get(name)!r:.40}",
        "another run_dir, or the data and the arguments that it was begun with",
    )

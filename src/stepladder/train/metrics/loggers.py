"""Who is told of the curves: TensorBoard, Weights & Biases, MLflow, or an object of the user's own.
Rank 0 only.

Runs of the others are continued by every start in one run directory, which keeps their ids.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from stepladder.core import durable, stored
from stepladder.core.console import say
from stepladder.core.errors import InputError, text_of
from stepladder.core.secrets import masked_words
from stepladder.storage.rundir import RunDir

LOGGERS_FILE = (
    "loggers.json"  # in the run directory: per logger its run's id, and the last step of each curve
)
PROJECT = "stepladder"
# Seconds to wait for a server that does not answer: all ranks wait meanwhile. MLflow's own default
# is 14 minutes.
WANDB_TIMEOUTS: dict[str, Any] = {"init_timeout": 20.0, "finish_timeout": 30.0}
MLFLOW_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class Logger(Protocol):
    """Who is told of the curves, on rank 0 only. What it raises ends it with a warning, never the
    run.
    """

    def log(self, step: int, values: dict[str, float]) -> None:
        """Scalars by name, after `step` optimizer steps; at most twice a second, and at each
        evaluation.
        """

    def close(self) -> None:
        """The run is over, or stopped."""


class SafeLogger:
    """A logger that cannot fail the run: it is off once it raises.

    It gets each point of a curve once, also of steps that are made again.

    state: its part of loggers.json, whose `last` is kept up to date.  store: writes that file.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Logger],
        state: dict[str, Any],
        store: Callable[[], None],
    ) -> None:
        self.name, self.store = name, store
        self.last: dict[str, int] = state.setdefault("last", {})
        self.logger: Logger | None = None
        self._try(lambda: setattr(self, "logger", make()))

    def log(self, step: int, values: dict[str, float]) -> None:
        new = {name: value for name, value in values.items() if step > self.last.get(name, 0)}
        if self.logger is not None and new:
            self._try(lambda: self.logger.log(step, new))  # type: ignore[union-attr]
            self.last.update(dict.fromkeys(new, step))
            self._try(self.store)

    def close(self) -> None:
        if self.logger is not None:
            self._try(self.logger.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a server, or the user's own object, thinks of
            self.logger = None
            first = text_of(error).partition("\n")[0]
            say(f"{self.name} is off, training goes on: {type(error).__name__}: {first}")


class Wandb:
    """A run of Weights & Biases, in the project WANDB_PROJECT."""

    def __init__(self, state: dict[str, Any], run_dir: Path, config: dict[str, Any]) -> None:
        import wandb

        state.setdefault("id", uuid.uuid4().hex[:12])
        typed, sys.argv = sys.argv, masked_words(sys.argv)  # which it uploads
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=state["id"],
                resume="allow",
                name=run_dir.name,
                config=config,
                dir=run_dir,
                settings=wandb.Settings(silent=True, console="off", **WANDB_TIMEOUTS),
            )
        finally:
            sys.argv = typed

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish(exit_code=int(sys.exc_info()[0] is not None))


class Mlflow:
    """A run of MLflow, on the server MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, state: dict[str, Any], run_dir: Path, config: dict[str, Any]) -> None:
        for name, value in MLFLOW_TIMEOUTS.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.metric, self.client = Metric, MlflowClient()
        if "id" in state:
            self.client.update_run(state["id"], status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            known = self.client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self.client.create_experiment(name)
            state["id"] = self.client.create_run(experiment, run_name=run_dir.name).info.run_id
            params = [Param(key, str(value)) for key, value in config.items()]
            self.client.log_batch(state["id"], params=params)
        self.id = state["id"]

    def log(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(
            self.id, [self.metric(name, value, now, step) for name, value in values.items()]
        )

    def close(self) -> None:
        self.client.set_terminated(self.id, "FAILED" if sys.exc_info()[0] else "FINISHED")


class TensorBoard:
    """An event file in `folder`. TensorBoard's own writer has a thread, whose errors nobody can
    catch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def writer(self) -> Any:  # late: the import costs 0.2 s, and a short run may log nothing
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        writer = RecordWriter((self.folder / name).open("xb", buffering=0))
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        return writer

    def log(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self.writer.write(
            Event(wall_time=time.time(), step=step, summary=summary).SerializeToString()
        )

    def close(self) -> None:
        if "writer" in vars(self):
            self.writer.close()


BACKENDS: dict[str, Callable[[dict[str, Any], Path, dict[str, Any]], Logger]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
}


def validate_wandb_login(names: Iterable[str]) -> None:
    """Raises InputError where W&B would ask who you are, with all ranks waiting for the answer."""
    if "wandb" in names:
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(
            prompt=False, verify=False
        ):
            raise InputError(
                "--log-to wandb: nobody is logged in on this machine",
                "wandb login, or export WANDB_MODE=offline",
            )


def open_loggers(
    run_dir: RunDir | None, own: Sequence[Logger], names: Iterable[str], config: dict[str, Any]
) -> list[SafeLogger]:
    """On rank 0, which has the run directory: they go on where an earlier start of this run was."""
    if run_dir is None or not (own or names):
        return []
    path = run_dir.path / LOGGERS_FILE
    state: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # damaged: a new run there is better than no training
        state = stored.loads(stored.read(path), dict[str, dict[str, Any]])

    def store() -> None:
        durable.write(
            path, json.dumps(state, indent=1) + "\n", fsync=False
        )  # for it is written at every point

    makes: dict[str, Callable[[], Logger]] = {
        f"{type(logger).__name__}-{number}": partial(lambda logger: logger, logger)
        for number, logger in enumerate(own)
    }
    for name in names:
        makes[name] = partial(BACKENDS[name], state.setdefault(name, {}), run_dir.path, config)
    told = [
        SafeLogger(name, make, state.setdefault(name, {}), store) for name, make in makes.items()
    ]
    store()
    return told

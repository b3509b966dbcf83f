"""Loggers, which get the curves of a run: TensorBoard, Weights & Biases, MLflow, or a user's own.

Only the first rank has loggers. Every start in a run directory continues the same runs of Weights &
Biases and MLflow, whose ids the directory keeps.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stepladder.core import durable, typed_file
from stepladder.core.console import print_message
from stepladder.core.errors import InputError, get_text
from stepladder.core.extras import import_extra
from stepladder.core.masking import mask_arguments
from stepladder.core.plugins import load_plugin
from stepladder.core.settings import LOGGER_GROUP
from stepladder.storage.run_dir import RunDir

T = TypeVar("T")
# In the run directory: the id of each logger's run, and the last step of each of its curves.
LOGGERS_FILE = "loggers.json"
PROJECT = "stepladder"
# How long to wait for a server that does not answer, since all ranks wait meanwhile. MLflow's own
# default is 14 minutes.
WANDB_TIMEOUTS: dict[str, Any] = {"init_timeout": 20.0, "finish_timeout": 30.0}
MLFLOW_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class Logger(Protocol):
    """Gets the curves of a run, on the first rank only.

    An exception that it raises ends the logger with a warning, never the run.
    """

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log scalars by name; called at most twice a second, and at each evaluation.

        Args:
            step: Optimizer steps done.
            values: The scalars.
        """

    def close(self) -> None:
        """End the logging, as the run is complete or stopped."""


class SafeLogger:
    """A logger that cannot fail the run: it is off once it has raised an exception.

    Steps that are trained again after a resume are not logged again.

    Args:
        name: For the warning.
        make: Makes the logger.
        state: Its part of loggers.json, which is kept up to date here.
        store: Writes loggers.json.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Logger],
        state: dict[str, Any],
        store: Callable[[], None],
    ) -> None:
        self.name = name
        self.store = store
        self.last_steps: dict[str, int] = state.setdefault("last", {})
        self.logger: Logger | None = None
        self.logger = self._attempt(make)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the scalars whose curves have not reached this step."""
        new_values = {
            name: value for name, value in values.items() if step > self.last_steps.get(name, 0)
        }
        if self.logger is not None and new_values:
            self._attempt(partial(self.logger.log, step, new_values))
            self.last_steps.update(dict.fromkeys(new_values, step))
            self._attempt(self.store)

    def close(self) -> None:
        """Close the logger, unless it is off."""
        if self.logger is not None:
            self._attempt(self.logger.close)

    def _attempt(self, function: Callable[[], T]) -> T | None:
        """Call a function of the logger, and switch the logger off if it raises an exception."""
        try:
            return function()
        except Exception as error:  # a server, or the user's own logger, may raise anything
            self.logger = None
            message = get_text(error).partition("\n")[0]
            if not isinstance(error, InputError):
                message = f"{type(error).__name__}: {message}"
            print_message(f"{self.name} is off, training goes on: {message}")
            return None


def _validate_installed(name: str) -> None:
    """Raise InputError if the package of an extra is not installed."""
    spec = find_spec(name)
    # Without an origin it is just a folder of that name, as W&B leaves them.
    if spec is None or spec.origin is None:
        raise InputError(
            f"--log-to {name}: it is not installed", f"pip install 'stepladder[{name}]'"
        )


class Wandb:
    """A run of Weights & Biases, in the project WANDB_PROJECT."""

    @staticmethod
    def validate() -> None:
        """Raise InputError if wandb would ask who the user is, while all ranks wait for it."""
        _validate_installed("wandb")
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        is_online = os.environ.get("WANDB_MODE", "online") == "online"
        if is_online and not wandb.login(prompt=False, verify=False):
            raise InputError(
                "--log-to wandb: nobody is logged in on this machine",
                "wandb login, or export WANDB_MODE=offline",
            )

    def __init__(self, state: dict[str, Any], run_dir: Path, config: dict[str, Any]) -> None:
        import wandb

        state.setdefault("id", uuid.uuid4().hex[:12])
        arguments = sys.argv
        sys.argv = mask_arguments(sys.argv)  # wandb uploads them
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
            sys.argv = arguments

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log scalars by name."""
        self.run.log(values, step=step)

    def close(self) -> None:
        """End the run, as failed if an exception is being handled."""
        self.run.finish(exit_code=int(sys.exc_info()[0] is not None))


class Mlflow:
    """A run of MLflow, on the server MLFLOW_TRACKING_URI, in MLFLOW_EXPERIMENT_NAME."""

    validate = staticmethod(partial(_validate_installed, "mlflow"))

    def __init__(self, state: dict[str, Any], run_dir: Path, config: dict[str, Any]) -> None:
        for name, value in MLFLOW_TIMEOUTS.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.metric_class = Metric
        self.client = MlflowClient()
        if "id" in state:
            self.client.update_run(state["id"], status="RUNNING")
        else:
            experiment_id = self._find_or_create_experiment()
            state["id"] = self.client.create_run(experiment_id, run_name=run_dir.name).info.run_id
            params = [Param(key, str(value)) for key, value in config.items()]
            self.client.log_batch(state["id"], params=params)
        self.id = state["id"]

    def _find_or_create_experiment(self) -> Any:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment else self.client.create_experiment(name)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log scalars by name."""
        now_ms = int(time.time() * 1000)
        metrics = [self.metric_class(name, value, now_ms, step) for name, value in values.items()]
        self.client.log_batch(self.id, metrics)

    def close(self) -> None:
        """End the run, as failed if an exception is being handled."""
        self.client.set_terminated(self.id, "FAILED" if sys.exc_info()[0] else "FINISHED")


def _import_tensorboard(module: str) -> Any:
    return import_extra(f"tensorboard.{module}", "the curves need tensorboard", "tensorboard")


class TensorBoard:
    """An event file in a folder.

    TensorBoard's own writer has a thread, whose exceptions cannot be caught.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def writer(self) -> Any:
        """The event file, made late: the import takes 0.2 s, and a short run may log nothing."""
        events = _import_tensorboard("compat.proto.event_pb2")
        records = _import_tensorboard("summary.writer.record_writer")
        self.folder.mkdir(parents=True, exist_ok=True)
        process = f"{socket.gethostname()}.{os.getpid()}"
        name = f"events.out.tfevents.{time.time():.0f}.{process}.{time.monotonic_ns()}"
        writer = records.RecordWriter((self.folder / name).open("xb", buffering=0))
        header = events.Event(wall_time=time.time(), file_version="brain.Event:2")
        writer.write(header.SerializeToString())
        return writer

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log scalars by name."""
        events = _import_tensorboard("compat.proto.event_pb2")
        summary = _import_tensorboard("compat.proto.summary_pb2").Summary
        scalars = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = events.Event(wall_time=time.time(), step=step, summary=summary(value=scalars))
        self.writer.write(event.SerializeToString())

    def close(self) -> None:
        """Close the event file, if there is one."""
        if "writer" in vars(self):
            self.writer.close()


def validate_loggers(names: Iterable[str]) -> None:
    """Raise InputError if a logger of that name could not log, before anything is written.

    A logger checks this itself, in its function `validate`, if it has one.
    """
    for name in names:
        validate = getattr(load_plugin(LOGGER_GROUP, name, "--log-to"), "validate", None)
        if validate is not None:
            validate()


def open_loggers(
    run_dir: RunDir | None,
    user_loggers: Sequence[Logger],
    names: Iterable[str],
    config: dict[str, Any],
) -> list[SafeLogger]:
    """Return the loggers, which continue from the last start in the run directory.

    Args:
        run_dir: The run directory on the first rank, None on ranks without loggers.
        user_loggers: The user's own loggers.
        names: Entry points of the group `stepladder.loggers`. Each is called with its entries of
            loggers.json, which it may change, the run directory, and `config`.
        config: The run's definition, which loggers show.
    """
    if run_dir is None or not (user_loggers or names):
        return []
    path = run_dir.path / LOGGERS_FILE
    state: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a damaged file starts new runs instead of no training
        state = typed_file.parse_json(typed_file.read_file(path), dict[str, dict[str, Any]])

    def store() -> None:
        # A logger of another package may put anything into its entries.
        text = json.dumps(state, indent=1, default=str, skipkeys=True) + "\n"
        durable.write(path, text, fsync=False)  # fsync would cost too much at every logged point

    makers: dict[str, Callable[[], Logger]] = {}
    for number, logger in enumerate(user_loggers):
        makers[f"{type(logger).__name__}-{number}"] = partial(_return_logger, logger)
    for name in names:
        makers[name] = partial(
            load_plugin(LOGGER_GROUP, name, "--log-to"),
            state.setdefault(name, {}),
            run_dir.path,
            config,
        )
    loggers = [
        SafeLogger(name, make, state.setdefault(name, {}), store) for name, make in makers.items()
    ]
    store()
    return loggers


def _return_logger(logger: Logger) -> Logger:
    """Return a logger that exists already."""
    return logger

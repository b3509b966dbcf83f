"""What several commands read alike: a job's name and the flags of its Config, numbers of processes,
--json.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepladder.cli.types import ANY, NAME, Real
from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.core.masking import mask
from stepladder.core.numbers import parse_whole_number
from stepladder.core.paths import parse_path
from stepladder.core.settings import Settings
from stepladder.core.terminal import make_console
from stepladder.core.tracebacks import SHOW_ALL_VARIABLE
from stepladder.launcher.script import Script
from stepladder.train.job_file import RECIPES_FOLDER, find_job
from stepladder.train.job_source import ConfigField, has_build, read_config_fields

if TYPE_CHECKING:
    from rich.table import Table

SHARED = (
    "epochs",
    "global_batch",
    "lr",
    "seed",
    "data_dir",
)  # flags of train that set a field of that name
OF_JOBS = (
    "global_batch",
    "microbatch",
    "sync",
    "device",
    "precision",
    "data_dir",
)  # a script has its own
# Flags of train that commands have too which run a job in order to look at it: their type, or
# choices, and help.
TRAIN_FLAGS: dict[str, tuple[Any, str]] = {
    "epochs": (ANY, "Passes over the training data."),
    "global-batch": (ANY, "Samples per optimizer step, whatever the number of processes."),
    "microbatch": (
        ANY,
        "Samples per forward pass. With it, results agree on any number of processes.",
    ),
    "lr": (Real(), "Learning rate."),
    "warmup-steps": (ANY, "Optimizer steps over which the learning rate grows linearly from 0."),
    "seed": (ANY, "Seed of everything random."),
    "sync": (
        ["manual", "ddp", "exact"],
        "How gradients are averaged: one all-reduce, DDP, or a fixed order of sums.  [default: ddp]",
    ),
    "shard": (
        ["none", "optimizer", "full"],
        "Spread the optimizer's state over the processes (ZeRO stage 1): less memory, the same bits."
        " full: also weights and gradients (torch's fully_shard)."
        "  [default: none]",
    ),
    "shard-copies": (
        ANY,
        "With --shard optimizer: 2 has two processes hold each slice; when one is lost, the others go on in place."
        "  [default: 1]",
    ),
    "checkpoint-blocks": (
        bool,
        "Compute the activations within a block of the model again in backward: less memory, the same bits.",
    ),
    "device": (["auto", "cpu", "cuda"], "Where tensors live.  [default: auto]"),
    "precision": (
        ["fp32", "bf16", "fp16"],
        "Type of the numbers in the forward pass.  [default: fp32]",
    ),
    "compile": (
        bool,
        "Compile the model and its loss with torch.compile, for the passes that have the full length.",
    ),
    "capture": (
        bool,
        "On a GPU: record forward and backward passes of the full length as CUDA graphs, and replay them.",
    ),
    "threads": (ANY, "Intra-op threads of torch per process.  [default: cores shared out]"),
    "data-dir": (NAME, "Folder with the job's data."),
}

json_flag = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the result as one JSON object on the last line of stdout.",
)


def show_all_frames(_ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        os.environ[SHOW_ALL_VARIABLE] = "1"  # the ranks inherit it


traceback_flag = click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,
    callback=show_all_frames,
    help="Where the job raises an error, also show the frames of torch and stepladder.",
)


trust_flag = click.option(
    "--trust-job-file",
    is_flag=True,
    help="Run the job file that RUN_DIR names, also one that you have not trained. It is code: read it first.",
)


class JobCommand(click.Command):
    """A command with the flags of the job that its arguments name."""

    job: Path
    job_fields: tuple[ConfigField, ...] = ()
    before = 0  # arguments that stand before the job's name

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self.job_fields = ()
        name = self._job_name(ctx, args)
        if name is not None:
            parse_path("job", name)
            self.job = self.find(name)
            self.job_fields = tuple(read_config_fields(self.job))
            refuse_clashes(self.job, self.job_fields, self.params)
        return super().parse_args(ctx, args)

    def find(self, name: str) -> Path:
        return find_job(name)

    def _job_name(self, ctx: click.Context, args: list[str]) -> str | None:
        """The first argument that is neither a flag nor a flag's value. Raises InputError for a
        flag of a job.
        """
        options = [p for p in self.params if isinstance(p, click.Option)]
        takes_value = {o for p in options if not p.is_flag for o in p.opts}
        alone = {o for p in options for o in (*p.opts, *p.secondary_opts)} - takes_value
        waiting, before = iter(args), self.before
        for arg in waiting:
            if not arg.startswith("-") or arg == "-":
                if not before:
                    return arg
                before -= 1
            elif arg == "--":
                return next(waiting, None)
            elif arg in takes_value:
                next(waiting, None)
            elif arg not in {*alone, *ctx.help_option_names} and "=" not in arg and any(waiting):
                found = f"{arg} stands before the job's name, and is not a flag of {ctx.info_name}'s own"
                raise InputError(found, f"stepladder {ctx.info_name} JOB {arg} ...")
        return None

    def sort(self, flags: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The flags that were given: those that set fields of the job's Config, and the settings."""
        names = {field.name for field in self.job_fields}
        given = {name: value for name, value in flags.items() if value is not None}
        for name in ("lr", "data_dir"):
            if name in given and name not in names:
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{flag}, but the job's Config has no field {name}", f"add {name}")
        if not 0 <= given.get("lr", 0) < math.inf:
            raise InputError(f"--lr {given['lr']:g} is not a learning rate", "--lr 0.1")
        if "global_batch" in given and "batch_per_rank" in given:
            raise InputError(
                "--global-batch and --batch-per-rank: one follows from the other", "leave one out"
            )
        own = {field.name for field in fields(Settings)}
        config = {name: value for name, value in given.items() if name in names}
        return config, {name: value for name, value in given.items() if name in own}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return super().get_params(ctx) + [
            option(f) for f in self.job_fields if f.name not in SHARED
        ]


class JobOrScript(JobCommand):
    """A command with the flags of the job; of a script, which builds no job, it knows none and
    takes all.
    """

    is_script = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self.is_script, name = False, self._job_name(ctx, args)
        if name is None or has_build(found := self.find(str(parse_path("job", name)))):
            return super().parse_args(ctx, args)
        self.is_script, self.job, self.job_fields = True, found, ()
        ctx.ignore_unknown_options = True
        return click.Command.parse_args(self, ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [
            param
            for param in super().get_params(ctx)
            if not self.is_script or param.name not in OF_JOBS
        ]

    def script(self, args: tuple[str, ...]) -> Script | None:
        """With its arguments; None for a job, for which InputError is raised if there are any."""
        if self.is_script:
            return Script.find(str(self.job), args, module=False, no_python=False, fresh=False)
        if args:
            hint = f"stepladder {click.get_current_context().info_name} JOB --help"
            raise InputError(f"unexpected argument {args[0]!r}: a job has flags only", hint)
        return None


def train_flags(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            kind, text = TRAIN_FLAGS[name]
            kind = click.Choice(kind) if isinstance(kind, list) else kind
            shape = {"is_flag": True, "default": None} if kind is bool else {"type": kind}
            command = click.option(f"--{name}", help=text, **shape)(command)
        return command

    return with_flags


def option(field: ConfigField) -> click.Option:
    """One Config field as a flag. It stays unset if not given, so the file's own default counts."""
    kinds: dict[type, Any] = {int: ANY, float: Real()}
    kind = click.Choice(field.choices) if field.choices else kinds.get(field.type, field.type)
    default = "" if field.default in (None, "") else f"[default: {mask(field.default, field.name)}]"
    text = " ".join(filter(None, (field.help or "A setting of the job.", default)))
    spelling = f"{field.flag}/--no-{field.flag[2:]}" if field.type is bool else field.flag
    return click.Option([spelling, field.name], type=kind, default=None, help=text)


def refuse_clashes(
    path: Path, job_fields: tuple[ConfigField, ...], params: list[click.Parameter]
) -> None:
    own = [p for p in params if p.name not in SHARED]
    taken = {o for p in own for o in p.opts} | {p.name for p in own}
    for field in job_fields:
        if field.flag in taken or field.name in taken:
            raise InputError(
                f"{path.name}: Config.{field.name} clashes with train's own flag {field.flag}",
                "rename the field",
            )


def numbers(_ctx: click.Context, param: click.Parameter, text: str | None) -> list[int] | None:
    """Several numbers of processes or nodes, each once."""
    if text is None:
        return None
    flag, parts = param.opts[0], text.split(",")
    what = "nodes" if flag == "--nodes" else "processes"
    if not all(parse_whole_number(part, 1) for part in parts):
        raise InputError(f"{flag} {text} is not a list of numbers of {what}", f"{flag} 1,2,3")
    sizes = list(map(int, parts))
    if twice := [size for size in sizes if sizes.count(size) > 1]:
        once = ",".join(map(str, dict.fromkeys(sizes)))
        raise InputError(f"{flag} {text} names {twice[0]} twice", f"{flag} {once}")
    return sizes


def name_job_file(path: Path, run_dir: Path, trusted: bool, words: str) -> None:
    """Say which job file is run. Raises InputError for one that this user has not trained as it is
    now.

    words: of the command that would run it.
    """
    from stepladder.storage.run_files import (
        CONFIG_FILE,  # late: psutil, for which `--help` need not wait
    )
    from stepladder.storage.trained_jobs import was_trained_before

    if trusted and not (run_dir / CONFIG_FILE).exists():
        raise InputError(
            f"--trust-job-file, but {run_dir} is not a run directory", f"stepladder {words}"
        )
    if not (trusted or path.parent == RECIPES_FOLDER or was_trained_before(path)):
        found = f"{run_dir} names a job file that you have not trained as it is now"
        raise InputError(
            f"{found}, and {words.split()[0]} would run it: {path}",
            f"read it; then stepladder {words} --trust-job-file",
        )
    print_message(f"runs {path}, as {run_dir / CONFIG_FILE} has it")


def print_tables(tables: Iterable[Table], width: int) -> None:
    """width: where there is no terminal, which has its own."""
    console = make_console(width=None if make_console().is_terminal else width)
    for table in tables:
        console.print(table)

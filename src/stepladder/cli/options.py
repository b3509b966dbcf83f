"""Flags and arguments that several commands share: a job and its Config's flags, --json, ..."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from click.core import ParameterSource

from stepladder.cli.flags import GroupedOption
from stepladder.cli.help_all import shows_all
from stepladder.cli.types import ANY_INTEGER, RealNumber
from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.core.flag import OUTPUT, TRAINING, Flag
from stepladder.core.masking import mask
from stepladder.core.paths import parse_path
from stepladder.core.settings import Settings
from stepladder.core.terminal import make_console
from stepladder.core.tracebacks import SHOW_ALL_VARIABLE
from stepladder.launcher.script import Script
from stepladder.train.job_file import RECIPES_FOLDER, find_job
from stepladder.train.job_source import ConfigField, has_build, read_config_fields

if TYPE_CHECKING:
    from rich.table import Table

# Flags of train that also set the Config's field of the same name.
SHARED_FIELDS = ("epochs", "global_batch", "lr", "seed", "data_dir")
# Flags for jobs only: a script may have flags of the same names.
JOB_ONLY_FLAGS = ("global_batch", "microbatch", "sync", "device", "precision", "data_dir")
JOB_SECTION = "Flags of this job"
FIRST_SECTION = "Flags to start with"


class TrainFlags(Settings):
    """The flags of `train` for a job: its settings, and fields of its Config by their names."""

    lr: Annotated[float | None, Flag("Learning rate.", TRAINING)] = None
    data_dir: Annotated[str | None, Flag("Folder with the job's data.", TRAINING, is_path=True)] = (
        None
    )


def _show_all_frames(_ctx: click.Context, _param: click.Parameter, is_set: bool) -> None:
    """Show all frames of tracebacks, if --traceback is set."""
    if is_set:
        os.environ[SHOW_ALL_VARIABLE] = "1"  # the ranks inherit it


TRACEBACK_FLAG = GroupedOption(
    ["--traceback"],
    group=OUTPUT,
    is_flag=True,
    expose_value=False,
    callback=_show_all_frames,
    help="For an error of the job, also show the frames of torch and stepladder.",
)


class JobCommand(click.Command):
    """A command with the flags of the job that its arguments name."""

    # The sections of --help, in their order; without any, all flags are in one.
    sections: tuple[str, ...] = ("Options",)
    # The parameters that come first in --help.
    first_flags: tuple[str, ...] = ()
    # The job file, once the arguments are parsed.
    job: Path
    # The fields of its Config.
    job_fields: tuple[ConfigField, ...] = ()
    # The number of arguments before the job's name.
    arguments_before_job = 0

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add the flags of the job, and parse the arguments."""
        self.job_fields = ()
        name = self._find_job_name(ctx, args)
        if name is not None:
            parse_path("job", name)
            self.job = self.find(name)
            self.add_job_flags(ctx)
        return super().parse_args(ctx, args)

    def add_job_flags(self, ctx: click.Context) -> None:
        """Add the flags of the job's Config."""
        self.job_fields = tuple(read_config_fields(self.job))
        _validate_config_flags(self.job, self.job_fields, self.params)

    def find(self, name: str) -> Path:
        """Return the path of a job."""
        return find_job(name)

    def _find_job_name(self, ctx: click.Context, args: list[str]) -> str | None:
        """Return the job's name: an argument that is neither a flag nor a flag's value.

        Raises:
            InputError: A flag of the job is before its name.
        """
        options = [param for param in self.params if isinstance(param, click.Option)]
        with_value = {name for option in options if not option.is_flag for name in option.opts}
        all_names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        without_value = (all_names - with_value) | set(ctx.help_option_names)
        remaining = iter(args)
        arguments_to_skip = self.arguments_before_job
        for arg in remaining:
            if not arg.startswith("-") or arg == "-":
                if not arguments_to_skip:
                    return arg
                arguments_to_skip -= 1
            elif arg == "--":
                return next(remaining, None)
            elif arg in with_value:
                next(remaining, None)
            elif arg not in without_value and "=" not in arg and any(remaining):
                command = ctx.info_name
                raise InputError(
                    f"{arg} is before the job's name, and is not one of {command}'s own flags",
                    f"stepladder {command} JOB {arg} ...",
                )
        return None

    def sort_flags(
        self, flags: dict[str, Any], **own_flags: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what was typed, for the job's Config and for the settings.

        Args:
            flags: The flags of `train` and of the job; those that were not typed do not count.
            **own_flags: Flags of this command, with its own defaults; None does not count.

        Raises:
            InputError: The job has no such field, or two flags contradict each other.
        """
        config_names = {field.name for field in self.job_fields}
        setting_names = {field.name for field in fields(Settings)}
        source = click.get_current_context().get_parameter_source
        typed = {name: flags[name] for name in flags if source(name) != ParameterSource.DEFAULT}
        typed |= {name: value for name, value in own_flags.items() if value is not None}
        for name in ("lr", "data_dir"):
            if name in typed and name not in config_names:
                flag = f"--{name.replace('_', '-')}"
                hint = f"add {name} to its Config, and use config.{name} in build"
                raise InputError(f"{flag}, but the job's Config has no field {name}", hint)
        if not 0 <= typed.get("lr", 0) < math.inf:
            raise InputError(f"--lr {typed['lr']:g} is not a learning rate", "--lr 0.1")
        if "global_batch" in typed and "batch_per_rank" in typed:
            raise InputError(
                "--global-batch and --batch-per-rank: one follows from the other", "leave one out"
            )
        config = {name: value for name, value in typed.items() if name in config_names}
        settings = {name: value for name, value in typed.items() if name in setting_names}
        return config, settings

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags in their sections, the job's own flags on top.

        Where a command has flags to start with, --help-all shows the others.
        """
        more = []
        for title, options in self.list_sections(ctx).items():
            if self.first_flags and title in self.sections and not shows_all(ctx):
                more.append(title)
                continue
            with formatter.section(title):
                formatter.write_dl(
                    [record for option in options if (record := option.get_help_record(ctx))]
                )
        if more:
            formatter.write_paragraph()
            formatter.write_text(f"More flags (--help-all): {', '.join(more)}.")

    def list_sections(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """Return the flags that --help shows, by the title of their section."""
        titles = (JOB_SECTION, FIRST_SECTION, *self.sections)
        sections: dict[str, list[click.Option]] = {title: [] for title in titles}
        params = {param.name: param for param in self.get_params(ctx)}
        for name in dict.fromkeys([*self.first_flags, *params]):
            option = params[name]
            if not isinstance(option, click.Option) or option.hidden:
                continue
            title = getattr(option, "group", "")
            if name in self.first_flags:
                title = FIRST_SECTION
            elif title not in titles:
                title = titles[-1]
            sections[title].append(option)
        return {title: options for title, options in sections.items() if options}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's parameters and the job's flags."""
        return super().get_params(ctx) + [
            make_config_option(f) for f in self.job_fields if f.name not in SHARED_FIELDS
        ]


class JobOrScript(JobCommand):
    """A command for jobs and scripts. It takes all flags of a script, since it cannot know them."""

    # Whether the arguments name a script, which has no function `build`.
    is_script = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments of a job or of a script."""
        self.is_script = False
        return super().parse_args(ctx, args)

    def add_job_flags(self, ctx: click.Context) -> None:
        """Add the flags of a job's Config, or let a script have any flags."""
        self.is_script = not has_build(self.job)
        if self.is_script:
            ctx.ignore_unknown_options = True
        else:
            super().add_job_flags(ctx)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's parameters, for a script without those for jobs only."""
        params = super().get_params(ctx)
        if not self.is_script:
            return params
        return [param for param in params if param.name not in JOB_ONLY_FLAGS]

    def script(self, args: tuple[str, ...]) -> Script | None:
        """Return the script with its arguments, or None for a job.

        Raises:
            InputError: A job has arguments.
        """
        if self.is_script:
            return Script.from_arguments(
                str(self.job), args, module=False, no_python=False, fresh=False
            )
        if args:
            hint = f"stepladder {click.get_current_context().info_name} JOB --help"
            raise InputError(f"unexpected argument {args[0]!r}: a job has flags only", hint)
        return None


def make_config_option(field: ConfigField) -> click.Option:
    """Return the flag of a Config field.

    Its value is None where it is not typed, so that the job file's own default counts.
    """
    types: dict[type, Any] = {int: ANY_INTEGER, float: RealNumber()}
    kind = types.get(field.type, field.type)
    if field.choices:
        kind = click.Choice(field.choices)
    text = field.help or "A setting of the job."
    if field.default not in (None, ""):
        text += f" [default: {mask(field.default, field.name)}]"
    spelling = f"{field.flag}/--no-{field.flag[2:]}" if field.type is bool else field.flag
    return GroupedOption(
        [spelling, field.name], group=JOB_SECTION, type=kind, default=None, help=text
    )


def _validate_config_flags(
    path: Path, job_fields: tuple[ConfigField, ...], params: list[click.Parameter]
) -> None:
    """Raise InputError where a Config field has the flag of a command's parameter."""
    reserved = [param for param in params if param.name not in SHARED_FIELDS]
    names = {name for param in reserved for name in (*param.opts, param.name)}
    for field in job_fields:
        if field.flag in names or field.name in names:
            raise InputError(
                f"{path.name}: Config.{field.name} clashes with train's own flag {field.flag}",
                "rename the field",
            )


def announce_job_file(path: Path, run_dir: Path, trusted: bool, command: str) -> None:
    """Print which job file is run.

    Args:
        path: The job file.
        run_dir: The run directory that names it.
        trusted: The user has typed --trust-job-file.
        command: The command that runs it, without `stepladder`.

    Raises:
        InputError: This user has not trained the job file as it is now.
    """
    from stepladder.storage.run_files import (
        CONFIG_FILE,  # late: psutil, which `--help` does not need
    )
    from stepladder.storage.trained_jobs import was_trained_before

    if trusted and not (run_dir / CONFIG_FILE).exists():
        raise InputError(
            f"--trust-job-file, but {run_dir} is not a run directory", f"stepladder {command}"
        )
    if not (trusted or path.parent == RECIPES_FOLDER or was_trained_before(path)):
        raise InputError(
            f"{run_dir} names a job file that you have not trained as it is now,"
            f" and {command.split()[0]} would run it: {path}",
            f"read it; then stepladder {command} --trust-job-file",
        )
    print_message(f"runs {path}, which {run_dir / CONFIG_FILE} names")


def print_tables(tables: Iterable[Table], width: int) -> None:
    """Print tables.

    Args:
        tables: What to print.
        width: The number of columns where the output is not a terminal.
    """
    console = make_console(width=None if make_console().is_terminal else width)
    for table in tables:
        console.print(table)

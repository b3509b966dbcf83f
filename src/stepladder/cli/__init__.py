"""The command line. A command's file is imported when that command is called.

The summaries are here so that `stepladder --help` imports nothing else (under 0.2 s).
"""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from traceback import extract_tb
from typing import Any, NoReturn

import click

from stepladder.cli.help_all import make_help_all, shows_all
from stepladder.cli.suggest import SuggestingGroup, format_click_error
from stepladder.core.console import echo, prepare_streams, print_message
from stepladder.core.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    InputError,
    RanksDiffer,
    StorageFault,
    as_input_error,
    make_readable,
)
from stepladder.core.machine_limits import name_machine_errors
from stepladder.core.tracebacks import fold_traceback

# The commands by their section in --help. MORE is shown by --help-all.
MORE = "More"
COMMAND_SECTIONS = {
    "Train": {
        "train": "Train a recipe or your own job file, on any number of processes.",
        "run": "Run any script on several processes or machines: torchrun's flags, and more.",
        "convert": "Turn a script for one process into one for many, and prove each step.",
        "submit": "Submit a job to Slurm.",
        "status": "Show the state of batch jobs.",
        "logs": "Show what a batch job has printed.",
        "cancel": "Cancel a batch job.",
    },
    "Inspect": {
        "watch": "Follow a run, or a batch job, in the terminal.",
        "report": "Write a page with a run's curves, ranks, restarts and ledger.",
    },
    "Compare": {
        "audit": "Prove from the ledger that every sample was trained exactly once per epoch.",
        "verify": "Prove that a job gives the same bits on any number of processes.",
        "parity": "Compare a script on one process and on several, step by step.",
        "diff": "Find the first step at which two runs differ, and why.",
    },
    "Find faults": {
        "check": "Find the silent mistakes of distributed training in any script.",
        "doctor": "Find what is wrong with this machine, or between machines.",
        "explain": "Say what an error message means, and what to type.",
    },
    "Speed": {
        "scale": "Measure the speed-up on more processes, and what limits it.",
        "profile": "Record where the time of a step goes, on every rank.",
    },
    "Learn": {
        "learn": "Take the lessons and exercises, from one all_reduce to a cluster.",
        "playback": "Write a page that plays back what each rank of a script did.",
        "lab": "Start a real Slurm cluster on this machine, to practise on.",
    },
    MORE: {
        "export": "Write a run's weights for Hugging Face's libraries or"
        " torch.distributed.checkpoint.",
        "import": "Start a run from weights in safetensors or DCP format.",
        "data": "Fetch data sets with checksums, write them as shards, and inspect them.",
        "recipe": "Use a model that a recipe has trained: recommend movies, write text.",
    },
}
COMMANDS = [name for section in COMMAND_SECTIONS.values() for name in section]
HIDDEN_COMMANDS = ("after", "note")  # for batch scripts
# Old spellings that work for one release, with the spelling that replaces them.
OLD_SPELLINGS = {"recommend": "recipe recommend", "sample": "recipe sample"}
# Files with several short commands; the file of any other command has the command's name.
SHARED_FILES = {
    "run_dirs": ("audit", "diff", "watch", "report"),
    "exchange": ("export", "import"),
    "batch_jobs": ("submit", "status", "logs", "cancel", *HIDDEN_COMMANDS),
}


class LazyGroup(SuggestingGroup):
    """A group that imports the file of a command when the command is called.

    The file is `stepladder.cli.<name>`, with the object `command`, or one of SHARED_FILES.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands that --help-all lists."""
        return COMMANDS

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the first argument, also under its old spelling."""
        successor = OLD_SPELLINGS.get(args[0])
        if successor is not None:
            if not ctx.resilient_parsing:
                print_message(
                    f"`stepladder {args[0]}` is deprecated: type `stepladder {successor}`"
                )
            args = [*successor.split(), *args[1:]]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, or return None if there is none of this name."""
        if cmd_name not in (*COMMANDS, *HIDDEN_COMMANDS):
            return None
        file = next((file for file, names in SHARED_FILES.items() if cmd_name in names), cmd_name)
        module = importlib.import_module(f"stepladder.cli.{file}")
        commands = (value for value in vars(module).values() if isinstance(value, click.Command))
        named = {command.name: command for command in commands}
        return named.get(cmd_name) or named["command"]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their sections, without importing them."""
        width = max(map(len, COMMANDS))
        for title, summaries in COMMAND_SECTIONS.items():
            if title == MORE and not shows_all(ctx):
                formatter.write_paragraph()
                formatter.write_text(f"{MORE} (--help-all): {', '.join(summaries)}.")
                continue
            with formatter.section(title):
                rows = [(name.ljust(width), text) for name, text in summaries.items()]
                formatter.write_dl(rows)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stepladder")
def cli() -> None:
    """One PyTorch training job, from one device to a cluster, with the same bits on every step."""
    with as_input_error("the current folder cannot be used", "cd to another one"):
        Path.cwd()  # raises where the folder was removed


cli.params.append(make_help_all("commands"))


def exit_with_error(error: str, reports: bool | None = None) -> NoReturn:
    """Print an error as one line, and end with exit code 2.

    Args:
        error: The text.
        reports: Whether this process prints it; None to let the ranks that srun or torchrun started
            agree on one of them.
    """
    from stepladder.launcher.nodes.report_once import should_report

    if reports is None:
        reports = should_report(error)
    if reports:
        echo(f"error: {error}", err=True)
    if threading.active_count() > 1:
        # A thread that waits for torch's store would abort the interpreter at its end.
        from stepladder.launcher.nodes.local_node import exit_if_threads_wait

        exit_if_threads_wait(BAD_INPUT)
    sys.exit(BAD_INPUT)


def main(args: list[str] | None = None) -> Any:
    """Run a command line. Bad input becomes one line on stderr and exit code 2.

    Args:
        args: The arguments, by default those of this process, which then ends with the command.
    """
    try:
        run_command(sys.argv[1:] if args is None else args)
    finally:
        lifecycle = sys.modules.get("stepladder.rank.lifecycle")
        if args is None and lifecycle is not None:
            lifecycle.limit_exit_time()


def run_command(args: list[str]) -> NoReturn:
    """Run one command, and end with its exit code."""
    prepare_streams()
    try:
        with name_machine_errors():
            # obj: commands pass the same arguments to other nodes, or to tasks of Slurm.
            code = cli.main(args, "stepladder", standalone_mode=False, obj=args)
    except InputError as error:
        exit_with_error(str(error), error.is_reporter)
    except (RanksDiffer, StorageFault) as error:
        echo(f"error: {make_readable(str(error))}", err=True)
        sys.exit(FAILED)
    except click.Abort as error:
        if isinstance(error.__cause__, EOFError):
            # click takes any EOFError for the end of what is typed, also the command's own.
            raise error.__cause__ from None
        echo("stopped", err=True)
        sys.exit(INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:  # `stepladder`, `stepladder data`
        echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        sys.exit(BAD_INPUT)
    except click.ClickException as error:
        exit_with_error(make_readable(format_click_error(error)))
    except Exception as error:
        exit_with_traceback(error)
    sys.exit(code if isinstance(code, int) else DONE)


def exit_with_traceback(error: Exception) -> NoReturn:
    """Print the traceback of an error that no command expects, and end with exit code 1."""
    if is_closed_stdout_of_click(error):
        echo("")  # handles a closed stdout as for all our output
        sys.exit(DONE)
    fold_traceback(error)
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(FAILED)


def is_closed_stdout_of_click(error: Exception) -> bool:
    """Return whether click could not print --help or --version."""
    if not isinstance(error, OSError):
        return False
    return extract_tb(error.__traceback__)[-1].filename == click.utils.__file__

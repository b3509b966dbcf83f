"""The only door. A command's file is imported when that command is called.

The summaries stand here so that `stepladder --help` imports nothing else (under 0.2 s).
"""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from traceback import extract_tb
from typing import Any, NoReturn

import click

from stepladder.cli.suggest import SuggestingGroup, refusal_of
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

COMMANDS = {
    "train": "Train a recipe or your own job file, on any number of processes.",
    "run": "Run any script on several processes or machines: torchrun's flags, and more.",
    "audit": "Prove from the ledger that every sample was trained exactly once per epoch.",
    "check": "Find the silent mistakes of distributed training in any script.",
    "verify": "Prove that a job gives the same bits on any number of processes.",
    "diff": "Find the first step at which two runs differ, and why.",
    "scale": "Measure the speed-up on more processes, and what limits it.",
    "profile": "Record where the time of a step goes, on every rank.",
    "watch": "Follow a run, or a batch job, in the terminal.",
    "report": "Write a page with a run's curves, ranks, restarts and ledger.",
    "lab": "Start a real Slurm cluster on this machine, to practise on.",
    "submit": "Submit a job to Slurm.",
    "status": "Show the state of batch jobs.",
    "logs": "Show what a batch job has printed.",
    "cancel": "Cancel a batch job.",
    "doctor": "Find what is wrong with this machine, or between machines.",
    "explain": "Say what an error message means, and what to type.",
    "recipe": "Use a model that a recipe has trained: recommend movies, write text.",
    "export": "Write a run's weights for Hugging Face's libraries or torch.distributed.checkpoint.",
    "import": "Begin a run with weights that they have written.",
    "data": "Fetch data sets with checksums, write them as shards, and inspect them.",
    "learn": "Take the lessons and exercises, from one all_reduce to a cluster.",
}
HIDDEN = ("after", "note")  # for batch scripts
# Old spellings that work for one release, with the spelling that replaces them.
OLD_SPELLINGS = {"recommend": "recipe recommend", "sample": "recipe sample"}
# files of several short commands, each under its name; any other command's file has its name
TOGETHER = {
    "run_dirs": ("audit", "diff", "watch", "report"),
    "exchange": ("export", "import"),
    "batch_jobs": ("submit", "status", "logs", "cancel", *HIDDEN),
}


class LazyGroup(SuggestingGroup):
    """A group whose commands live in `stepladder.cli.<name>`, each as `command`, or in a file of
    TOGETHER.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        successor = OLD_SPELLINGS.get(args[0])
        if successor is not None:
            if not ctx.resilient_parsing:
                print_message(
                    f"`stepladder {args[0]}` is deprecated: type `stepladder {successor}`"
                )
            args = [*successor.split(), *args[1:]]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS and cmd_name not in HIDDEN:
            return None
        file = next((file for file, names in TOGETHER.items() if cmd_name in names), cmd_name)
        module = importlib.import_module(f"stepladder.cli.{file}")
        if file == cmd_name:
            return module.command  # type: ignore[no-any-return]
        commands = [one for one in vars(module).values() if isinstance(one, click.Command)]
        return next(one for one in commands if one.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stepladder")
def cli() -> None:
    """One PyTorch training job, from one device to a cluster, with the same answer on every step."""
    with as_input_error(
        "the current folder cannot be used", "cd to another one"
    ):  # it may have been removed
        Path.cwd()


def refuse(error: str, speaks: bool | None = None) -> NoReturn:
    """One line, of all ranks that srun or torchrun has started."""
    from stepladder.launcher.nodes.refused import speaks_for_all

    if speaks_for_all(error) if speaks is None else speaks:
        echo(f"error: {error}", err=True)
    if (
        threading.active_count() > 1
    ):  # one that asks torch's store would abort at the interpreter's end
        from stepladder.launcher.nodes.own_node import end_process_if_waiting

        end_process_if_waiting(BAD_INPUT)
    sys.exit(BAD_INPUT)


def main(args: list[str] | None = None) -> Any:
    """Run the command line. Bad input becomes one line on stderr and exit code 2.

    args: by default those of this process, which then ends with the command.
    """
    try:
        run_command(sys.argv[1:] if args is None else args)
    finally:
        lifecycle = sys.modules.get("stepladder.rank.lifecycle")
        if args is None and lifecycle is not None:
            lifecycle.limit_exit_time()


def run_command(args: list[str]) -> NoReturn:
    """Run one command, and raise SystemExit with its exit code."""
    prepare_streams()
    try:
        with name_machine_errors():
            # obj: other nodes, or tasks of Slurm, get the same arguments.
            code = cli.main(args, "stepladder", standalone_mode=False, obj=args)
    except InputError as error:
        refuse(str(error), error.is_reporter)
    except (RanksDiffer, StorageFault) as error:
        echo(f"error: {make_readable(str(error))}", err=True)
        sys.exit(FAILED)
    except click.Abort as error:
        if isinstance(error.__cause__, EOFError):  # click takes any for the end of what is typed
            raise error.__cause__ from None
        echo("stopped", err=True)
        sys.exit(INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:  # `stepladder`, `stepladder data`
        echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        sys.exit(BAD_INPUT)
    except click.ClickException as error:
        refuse(make_readable(refusal_of(error)))
    except Exception as error:
        if (
            isinstance(error, OSError)
            and extract_tb(error.__traceback__)[-1].filename == click.utils.__file__
        ):
            echo(
                ""
                # --help and --version, which click prints: a stdout that takes no more is treated as
                # ours is
            )
            sys.exit(DONE)
        fold_traceback(error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(FAILED)
    sys.exit(code if isinstance(code, int) else DONE)

"""stepladder train RECIPE|FILE.py: the job's Config fields become flags, read from its text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from stepladder.core.errors import InputError
from stepladder.core.settings import LOG_TO, Settings
from stepladder.launcher.dispatch import dispatch
from stepladder.launcher.entry import Launch, start
from stepladder.launcher.local.group import say
from stepladder.launcher.topology import Topology
from stepladder.rank.fault_injection import parse_place
from stepladder.train.job_file import ConfigField, config_fields, find_job, has_build

SHARED = ("epochs", "global_batch", "lr", "seed", "data_dir")  # flags of train that set a field of that name
OF_JOBS = ("global_batch", "microbatch", "sync", "device", "precision", "data_dir")  # a script has its own
OWN = ("nproc", "max_restarts", "as_json")


class TrainCommand(click.Command):
    """`train`, with the flags of the job that the arguments name."""

    job: Path | None = None
    job_fields: tuple[ConfigField, ...] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["args"] = list(args)
        self.job, self.job_fields = None, ()
        name = self._job_name(ctx, args)
        if name is not None:
            self.job = self.find(name)
            self.job_fields = tuple(config_fields(self.job))
            refuse_clashes(self.job, self.job_fields, self.params)
        return super().parse_args(ctx, args)

    def find(self, name: str) -> Path:
        return find_job(name)

    def _job_name(self, ctx: click.Context, args: list[str]) -> str | None:
        """The first argument that is neither a flag nor a flag's value. Raises InputError for a flag of a job."""
        options = [p for p in self.params if isinstance(p, click.Option)]
        takes_value = {o for p in options if not p.is_flag for o in p.opts}
        alone = {o for p in options for o in (*p.opts, *p.secondary_opts)} - takes_value
        waiting = iter(args)
        for arg in waiting:
            if not arg.startswith("-"):
                return arg
            if arg in takes_value:
                next(waiting, None)
            elif arg not in {"--", *alone, *ctx.help_option_names} and "=" not in arg and any(waiting):
                found = f"{arg} stands before the job's name, and is no flag of {ctx.info_name}'s own"
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
            raise InputError(f"--lr {given['lr']:g} is no learning rate", "--lr 0.1")
        if "global_batch" in given and "batch_per_rank" in given:
            raise InputError("--global-batch and --batch-per-rank: one follows from the other", "leave one out")
        own = {field.name for field in fields(Settings)}
        config = {name: value for name, value in given.items() if name in names}
        return config, {name: value for name, value in given.items() if name in own}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return super().get_params(ctx) + [option(f) for f in self.job_fields if f.name not in SHARED]


class JobOrScript(TrainCommand):
    """A command with the flags of the job; of a script, which builds no job, it knows none and takes all."""

    is_script = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self.is_script, name = False, self._job_name(ctx, args)
        if name is None or has_build(found := self.find(name)):
            return super().parse_args(ctx, args)
        self.is_script, self.job, self.job_fields = True, found, ()
        ctx.ignore_unknown_options = True
        return click.Command.parse_args(self, ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [param for param in super().get_params(ctx) if not self.is_script or param.name not in OF_JOBS]


def job_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """What `train` has too, for commands that run a job in order to look at it."""
    for flag in (
        click.option("--data-dir", help="Where the job's data is."),
        click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="[default: fp32]"),
        click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="[default: auto]"),
        click.option("--microbatch", type=int, help="Samples per pass."),
    ):
        command = flag(command)
    return command


def option(field: ConfigField) -> click.Option:
    """One Config field as a flag. It stays unset if not given, so the file's own default counts."""
    kind: Any = click.Choice(field.choices) if field.choices else field.type
    name = field.name.replace("_", "-")
    text = "of the job" if field.default is None else f"of the job, default {field.default}"
    spelling = f"--{name}/--no-{name}" if field.type is bool else f"--{name}"
    return click.Option([spelling, field.name], type=kind, default=None, help=text)


def refuse_clashes(path: Path, job_fields: tuple[ConfigField, ...], params: list[click.Parameter]) -> None:
    own = [p for p in params if p.name not in SHARED]
    taken = {o for p in own for o in p.opts} | {p.name for p in own}
    for field in job_fields:
        if field.flag in taken or field.name in taken:
            raise InputError(
                f"{path.name}: Config.{field.name} clashes with train's own flag {field.flag}", "rename the field"
            )


@click.command(cls=TrainCommand, short_help="Train a recipe or your own job file.")
@click.argument("job", metavar="RECIPE|FILE.py")
@click.option(
    "--nproc",
    default="",
    metavar="N|A:B|auto|gpu|cpu",
    help="Processes on this machine; A:B starts B, and goes on with down to A.  [default: 1]",
)
@click.option(
    "--nodes",
    default="",
    metavar="N|A:B",
    help="Machines; start the same command on each, over one run directory.  [default: 1]",
)
@click.option("--hosts", default="", metavar="HOST,...", help="Start it on each, over SSH; the first leads.")
@click.option("--ssh", default="ssh", metavar="COMMAND", help="As in --ssh 'ssh -i KEY'.  [default: ssh]")
@click.option(
    "--rdzv-endpoint", default="", metavar="HOST:PORT", help="Where nodes first meet.  [default: anywhere]"
)
@click.option("--local-addr", default="", help="How other nodes reach this one.  [default: its host name]")
@click.option("--epochs", type=int, help="Passes over the training data.")
@click.option("--steps", type=int, help="Stop after so many optimizer steps, if that is earlier.")
@click.option("--global-batch", type=int, help="Samples per optimizer step, whatever the number of processes.")
@click.option("--microbatch", type=int, help="Samples per pass: results then agree on any number of processes.")
@click.option("--batch-per-rank", type=int, help="The classical way: samples per process instead.")
@click.option("--lr", type=float, help="Learning rate.")
@click.option(
    "--lr-scale", type=click.Choice(["none", "sqrt", "linear"]), help="With --batch-per-rank: lr x ranks."
)
@click.option("--warmup-steps", type=int, help="The learning rate grows linearly over these steps.")
@click.option("--seed", type=int, help="Everything random follows from it.")
@click.option("--sync", type=click.Choice(["manual", "ddp", "exact"]), help="How gradients meet.  [default: ddp]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="[default: auto]")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="[default: fp32]")
@click.option("--threads", type=int, help="Intra-op threads per process.  [default: cores shared out]")
@click.option("--run-dir", type=click.Path(path_type=Path), help="[default: runs/RECIPE]")
@click.option("--fresh", is_flag=True, default=None, help="Move an earlier run in that directory aside first.")
@click.option("--snapshot-every", type=int, metavar="STEPS", help="[default: each epoch's end and every 60 s]")
@click.option("--keep", type=int, help="Newest snapshots that stay, besides the best.  [default: 3]")
@click.option("--guard-every", type=int, metavar="STEPS", help="Compare the processes' weights.  [default: never]")
@click.option(
    "--log-to", multiple=True, type=click.Choice(LOG_TO), help="Who gets the curves, besides TensorBoard."
)
@click.option("--data-dir", help="Where the job's data is.")
@click.option("--max-restarts", type=int, default=3, show_default=True, help="Restarts after a lost process.")
@click.option(
    "--timeout", type=float, metavar="SECONDS", help="How long processes wait for each other.  [default: 600]"
)
@click.option(
    "--explain-after",
    type=float,
    metavar="SECONDS",
    help="Say why nothing moves, after so long.  [default: 60, at most half of --timeout]",
)
@click.option("--fail-at", multiple=True, metavar="RANK:STEP", help="Kill that rank once, to see a recovery.")
@click.option("--lock-wait", type=float, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="The last line on stdout is the result as one object.")
@click.pass_context
def command(ctx: click.Context, job: str, **flags: Any) -> int:
    """Train a recipe or your own job file, on any number of processes.

    Resumes from the run directory by itself. A job file has a dataclass Config, whose fields are flags,
    and build(config) -> stepladder.Job.
    """
    assert isinstance(ctx.command, TrainCommand) and ctx.command.job is not None
    path = ctx.command.job
    config, own = ctx.command.sort(flags)
    own["fail_at"] = tuple(map(parse_place, flags["fail_at"]))
    settings = Settings(**{"run_dir": Path("runs") / path.stem, **own})
    topology = Topology(flags["nodes"], flags["nproc"], flags["rdzv_endpoint"], flags["local_addr"]).completed()
    code = dispatch(["train", *ctx.meta["args"]], flags["hosts"], flags["ssh"], topology)
    if code is not None:
        return code
    if topology.note:
        say(topology.note)
    launch = Launch(
        topology.nproc or "1",
        topology.nodes or "1",
        flags["max_restarts"],
        topology.endpoint,
        topology.local_addr,
        flags["explain_after"],
    )
    return start(partial(work, path, config, flags["as_json"]), settings, launch)


def work(path: Path, config: dict[str, Any], as_json: bool, settings: Settings) -> int:
    """One rank's work; imports torch where the launcher does not."""
    from stepladder.train.run import train_file

    return train_file(path, config, settings, as_json)

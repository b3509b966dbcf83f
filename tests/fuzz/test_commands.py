"""Every command with odd values for every flag and argument that it has, as they say themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from hypothesis import strategies as st
from odd import prepare, values

from fuzzing import Fuzz
from stepladder.cli import COMMANDS, HIDDEN_COMMANDS, cli
from stepladder.cli.options import JobCommand, make_config_option
from stepladder.train.job_file import find_job
from stepladder.train.job_source import read_config_fields

pytestmark = pytest.mark.ranks

CHECKOUT = Path(__file__).parents[2]
NAMES = [*COMMANDS, *HIDDEN_COMMANDS]
QUICK = ("--warmup", "1", "--steps", "5", "--rounds", "1", "--nproc", "1", "--sync", "ddp")
# Words that a command needs in order to do little; what is drawn comes behind them, and counts.
NEEDED: dict[str, list[tuple[str, ...]]] = {
    "train": [("mlp", "--steps", "1"), ("augmented.py", "--steps", "1")],
    "scale": [("mlp", *QUICK)],
    "verify": [("mlp", "--steps", "2", "--nproc", "1"), ("run", "--steps", "2", "--nproc", "1")],
    "profile": [("mlp", "--warmup", "1", "--steps", "1")],
    "doctor": [("--load", "bundle.json"), ()],
    "data shard": [("--out", "o")],
    "data get": [("--from", "folder")],
    "recipe recommend": [("--user", "1")],
    "recipe sample": [("--prompt", "a")],
    "export": [("--to", "safetensors"), ("--to", "dcp")],
    "import": [("--run-dir", "o/new")],
    "submit": [("--dry-run",), ()],
    "after": [("--job-dir", "o", "--max-requeues", "3")],
    "watch": [("--once",)],
}
GOOD = {
    "run_dir": ["run", "new", "gone/new"], "first": ["run"], "second": ["run"],
    "job": ["mlp", "run", "script.py", "7"], "target": ["run", "7"],
    "script": ["script.py", "true"],
    "source": ["numbers.csv", "table.csv", "arrays.npz", "table.parquet", "huge"], "path_or_name": ["shards",
    "numbers.csv", "run"],
    "name": ["mnist", "movielens-small", "1", "2", "first_step"], "load": ["bundle.json"], "lint": ["job.sh"],
    "words": ["train", "true", "script.py"],
    "code": ["0", "1", "75"], "jobs": ["7"], "node": ["n1"], "out": ["o", "shards"], "output": ["o.html"],
    "save": ["o.json"], "ssh": ["ssh", "false", "'"],
}  # fmt: skip
WORKING = {
    "train",
    "run",
    "scale",
    "verify",
    "diff",
    "profile",
    "doctor",
    "watch",
    "learn run",
    "learn check",
    "lab up",
    "lab exec",
}
FOREIGN = {
    "run",
    "learn run",
    "learn check",
    "lab exec",
    "after",
}  # their exit code may be a program's


def leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        names = NAMES if command is cli else command.list_commands(click.Context(command))
        for word in names:
            below = command.get_command(click.Context(command), word)
            assert below is not None
            yield from leaves(below, f"{name} {word}".strip())
    else:
        yield name, command


def params_of(command: click.Command) -> list[click.Parameter]:
    own = (
        [make_config_option(field) for field in read_config_fields(find_job("mlp"))]
        if isinstance(command, JobCommand)
        else []
    )
    taken = {param.name for param in command.params}
    return [*command.params, *(field for field in own if field.name not in taken)]


@st.composite
def calls(draw: st.DrawFn, name: str, command: click.Command) -> tuple[str, ...]:
    params = params_of(command)
    options = [param for param in params if isinstance(param, click.Option)]
    given = list(draw(st.sampled_from(NEEDED.get(name, [()]))))
    for param in draw(st.lists(st.sampled_from(options), max_size=3)) if options else []:
        flag = draw(st.sampled_from([*param.opts, *param.secondary_opts]))
        given.append(flag)
        if not param.is_flag:
            given.append(draw(values(str(param.name), param.type, GOOD.get(str(param.name), ()))))
    words = []
    has_job = name in ("train", "scale", "verify", "profile")
    for param in params:
        if isinstance(param, click.Argument) and not (
            has_job and param.name == "job" and draw(st.booleans())
        ):
            drawn = values(str(param.name), param.type, GOOD.get(str(param.name), ()))
            words += draw(st.lists(drawn, min_size=1, max_size=3 if param.nargs == -1 else 1))
    return (*name.split(), *([*words, *given] if has_job and words else [*given, *words]))


LEAVES = dict(leaves(cli))


@pytest.mark.slow
def test_a_command_with_odd_values_ends_as_the_rule_says(fuzz: Fuzz) -> None:
    prepared = prepare(fuzz.sandbox, CHECKOUT)

    def attempt(args: tuple[str, ...]) -> str:
        fuzz.sandbox.reset(prepared)
        names = {" ".join(args[:count]) for count in (1, 2)}
        return fuzz.sandbox.call(args, works=bool(names & WORKING)).validate_end(
            foreign=bool(names & FOREIGN)
        )

    fuzz.each(st.one_of(*(calls(name, command) for name, command in LEAVES.items())), attempt)

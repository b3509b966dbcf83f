"""Numbers that are none are refused in one place, with one line, wherever they come from."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes import refused, run
from stepladder.core.address import parse_endpoint
from stepladder.core.errors import InputError
from stepladder.core.numbers import MAX_INTEGER, parse_whole_number
from stepladder.core.process_count import parse_process_count, parse_range
from stepladder.core.world import World
from stepladder.rank.preemption import parse_fail_at

STRANGE = [
    "",
    " 1",
    "1 ",
    "+1",
    "-1",
    "1_0",
    "1.0",
    "0x1",
    "²",
    "١",
    "nan",
    "9" * 400,
    "1" * 5000,
    "1\n",
    "\0",
]
READERS: list[Callable[[str], object]] = [
    lambda text: parse_range("--nodes", text),
    lambda text: parse_range("--nodes", f"1:{text}"),
    parse_process_count,
    lambda text: parse_endpoint(f"node1:{text}"),
    lambda text: parse_fail_at(f"{text}:1"),
    lambda text: parse_fail_at(f"1:{text}"),
    lambda text: World.detect({"RANK": text, "WORLD_SIZE": "1", "LOCAL_RANK": "0"}),
    lambda text: World.detect(
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": text}
    ),
    lambda text: World.detect(
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": text, "SLURM_JOB_ID": "7"}
    ),
]


@given(st.integers(0, MAX_INTEGER))
def test_a_number_is_read(number: int) -> None:
    assert parse_whole_number(str(number)) == number
    assert (
        parse_whole_number(str(number), minimum=number + 1) is None
        and parse_whole_number(str(number), maximum=number - 1) is None
    )


@given(st.text())
def test_no_text_is_more_than_a_number_or_none(text: str) -> None:
    assert parse_whole_number(text) is None or (
        text.isascii() and int(text) == parse_whole_number(text)
    )


@pytest.mark.parametrize(
    ("recipe", "field", "value"),
    [
        ("mlp", "hidden", -5),
        ("mlp", "features", 0),
        ("mlp", "samples", 0),
        ("mlp", "noise", math.inf),
        ("mlp", "hidden", 10**12),
        ("digits", "width", 0),
        ("digits", "dropout", 7.0),
        ("digits", "dropout", math.nan),
        ("mnist", "weight_decay", -1.0),
        ("movielens", "factors", -1),
        ("movielens", "reg", math.nan),
    ],
)
def test_a_recipes_flag_outside_its_bounds_is_refused(
    recipe: str, field: str, value: float
) -> None:
    config = importlib.import_module(f"stepladder.recipes.{recipe}").Config
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(InputError, match=rf"^{flag} \S+ is not from \S+ to \S+\. HINT: {flag} "):
        config(**{field: value})
    config()


@pytest.mark.parametrize("text", STRANGE)
@pytest.mark.parametrize("read", READERS)
def test_what_is_no_number_is_an_input_error(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(InputError):
        read(text)


FLAGS = [
    ("--nproc", "²"),
    ("--nodes", "²"),
    ("--nproc", "9" * 400),
    ("--fail-at", "1:²"),
    ("--fail-at", "²:1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS)
def test_a_command_says_so_in_one_line(tmp_path: Path, flags: tuple[str, str]) -> None:
    refused(run("train", "mlp", *flags, cwd=tmp_path), flags[0])
    assert not list(tmp_path.iterdir())

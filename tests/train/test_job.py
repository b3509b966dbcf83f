"""A job file's settings are read from its text; a file that cannot be a job is named before
anything runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from processes import JOBS
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.world import World
from stepladder.rank.exit_record import END_FILE_VARIABLE, find_end_file
from stepladder.train.job import mean_loss
from stepladder.train.job_file import find_job, load_job_file
from stepladder.train.job_runner import join_process_group, load_job, train_file
from stepladder.train.job_source import ConfigField, read_config_fields

GOOD = """
import os
from dataclasses import dataclass, field
from typing import Literal

raise SystemExit("reading the settings must not run the file")

@dataclass
class Config:
    epochs: int = 3
    lr: float = 1e-3
    offset: int = -2
    name: str = "a"
    shuffle: bool = True
    size: Literal["small", "large"] = "small"
    computed: int = os.cpu_count()
    made: float = field(default=0.5)
    needed: str
    UNTYPED = 3

    def method(self) -> None: ...

def build(config: Config):
    return None
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[[str], Path]:
    """Write a job file; returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "my_job.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def restored_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what loading a job file does to this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def with_field(line: str) -> str:
    return f"class Config:\n    {line}\n\ndef build(config):\n    ...\n"


def test_each_typed_field_is_read_with_its_type_and_default_without_running_the_file(
    job_file: Callable[[str], Path],
) -> None:
    assert read_config_fields(job_file(GOOD)) == [
        ConfigField("epochs", int, 3),
        ConfigField("lr", float, 1e-3),
        ConfigField("offset", int, -2),
        ConfigField("name", str, "a"),
        ConfigField("shuffle", bool, True),
        ConfigField("size", str, "small", ("small", "large")),
        ConfigField("computed", int, None),
        ConfigField("made", float, None),
        ConfigField("needed", str, None),
    ]


def test_a_literal_of_one_string_is_one_choice(job_file: Callable[[str], Path]) -> None:
    (field,) = read_config_fields(job_file(with_field('mode: Literal["only"] = "only"')))
    assert field.choices == ("only",)


@pytest.mark.parametrize(
    ("line", "help_text"),
    [
        ("width: int = 3  # channels, # of them", "channels, # of them"),
        ('name: str = "ä # b"  # with an ä', "with an ä"),
        ("width: int = (\n        3\n    )  # behind its end", "behind its end"),
        ("width: int = 3", ""),
        ("width: int = 3  # noqa: E501", ""),
    ],
)
def test_the_comment_behind_a_field_is_its_flags_help(
    job_file: Callable[[str], Path], line: str, help_text: str
) -> None:
    (field,) = read_config_fields(job_file(with_field(line)))
    assert field.help == help_text


def test_a_fields_flag_has_dashes() -> None:
    assert ConfigField("top_k_items", int, 1).flag == "--top-k-items"


@pytest.mark.parametrize(
    "annotation",
    [
        "list[int]",
        "float | None",
        "Path",
        "Literal[1, 2]",
        "Literal[NAMES]",
        "Literal[None]",
        "Literal['a', 1]",
    ],
)
def test_a_field_of_another_type_is_named_with_the_types_that_work(
    job_file: Callable[[str], Path], annotation: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_config_fields(job_file(with_field(f"width: {annotation} = 3")))
    assert caught.value.problem == f"my_job.py: Config.width has type {annotation}"
    assert "int, float, str, bool" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("class Config:\n    lr: float = 1.0\n", "no function build"),
        ("class Config: ...\nbuild = 3\n", "no function build"),
        ("def build(config): ...\n", "no dataclass Config"),
        ("def Config(): ...\ndef build(config): ...\n", "no dataclass Config"),
        (
            "from common import Config\ndef build(config): ...\n",
            "imports Config by `from common import Config`: it must be defined in the job file",
        ),
        (
            "from common import make as build\nclass Config: ...\n",
            "imports build by `from common import make as build`",
        ),
        ("def build(config:\n", "not valid Python"),
        ("class Config: ...\ndef build(): ...\n", "takes no parameters"),
        (
            f"class Config:\n    a: int = 0x{'f' * 5000}\ndef build(config): ...\n",
            "Config.a has 20000 bits",
        ),
        (
            "class Config:\n    __init__: int = 1\ndef build(config): ...\n",
            "Config.__init__ has a name of Python's",
        ),
        (
            "class Config:\n    __x: int = 1\ndef build(config): ...\n",
            "Config.__x has a name of Python's",
        ),
    ],
    ids=[
        "no build",
        "build no function",
        "no Config",
        "Config no class",
        "Config imported",
        "build imported",
        "syntax error",
        "build without config",
        "huge",
        "Python's own",
        "private",
    ],
)
def test_a_file_that_is_no_job_says_what_is_missing(
    job_file: Callable[[str], Path], text: str, problem: str
) -> None:
    with pytest.raises(InputError, match=f"my_job.py.*{problem}"):
        read_config_fields(job_file(text))


def test_a_file_that_is_no_text_is_not_valid_python(tmp_path: Path) -> None:
    (tmp_path / "my_job.py").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="not valid Python"):
        read_config_fields(tmp_path / "my_job.py")


def test_a_recipe_is_found_by_name_and_read_like_any_job() -> None:
    fields = {field.name: field for field in read_config_fields(find_job("mlp"))}
    assert {"epochs", "global_batch", "lr", "seed"} <= fields.keys()


def test_an_unknown_recipe_is_named_beside_those_there_are() -> None:
    with pytest.raises(InputError, match=r"'nosuch' is unknown; there are digits, .*mnist"):
        find_job("nosuch")


def test_a_job_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.py does not exist"):
        find_job(str(tmp_path / "nothing.py"))


def test_a_job_file_is_found_by_its_path(job_file: Callable[[str], Path]) -> None:
    path = job_file(GOOD)
    assert find_job(str(path)) == path


@pytest.mark.usefixtures("restored_imports")
def test_a_job_file_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_job.py").write_text("VALUE = 7\n")
    (tmp_path / "job_with_neighbour.py").write_text("from neighbour_of_job import VALUE\n")
    module = load_job_file(tmp_path / "job_with_neighbour.py")
    assert module.VALUE == 7
    assert load_job_file(tmp_path / "job_with_neighbour.py") is module


@pytest.mark.usefixtures("restored_imports")
def test_a_job_file_that_failed_to_load_is_loaded_anew_once_mended(tmp_path: Path) -> None:
    path = tmp_path / "job_to_mend.py"
    path.write_text("VALUE = 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_job_file(path)
    path.write_text("VALUE = 1\n")
    assert load_job_file(path).VALUE == 1


@pytest.mark.parametrize("length", [1, 3, 8])
def test_mean_loss_turns_a_criterions_mean_into_the_batchs_sum_and_count(length: int) -> None:
    x, y = torch.linspace(-2, 1, 4 * length).view(length, 4), torch.arange(length) % 4
    total, count = mean_loss(F.cross_entropy)(torch.nn.Identity(), (x, y))
    assert count == length
    torch.testing.assert_close(total, F.cross_entropy(x, y, reduction="sum"))


SIZES = """
from dataclasses import dataclass

@dataclass
class Config:
    lr: float
    global_batch: int = 64

def build(config):
    return None
"""


@pytest.mark.parametrize(
    ("text", "given", "problem"),
    [
        (SIZES.replace("@dataclass\n", ""), {}, "Config in my_job.py is not a dataclass"),
        (SIZES, {}, "Config.lr in my_job.py has no default"),
        (SIZES, {"lr": 0.1}, "has returned None"),
        (SIZES + "\ndel Config\n", {}, "Config in my_job.py is not a dataclass"),
        (SIZES, {"lr": 0.1, "global_batch": 8.5}, "global_batch .* is 8.5, not a whole number"),
        (SIZES, {"lr": 0.1, "global_batch": -3}, "--global-batch -3 is too small"),
        (SIZES.replace("= 64", "= 10**4000"), {"lr": 0.1}, "Config.global_batch has 13288 bits"),
        (
            SIZES + "raise SystemExit(0)",
            {},
            r"my_job.py has called sys.exit\(0\) before the training",
        ),
        (
            SIZES.replace("return None", "raise SystemExit"),
            {"lr": 0.1},
            "my_job.py has called sys.exit",
        ),
        (
            SIZES.replace("(config)", "(config, more)"),
            {"lr": 0.1},
            "build in my_job.py cannot be called",
        ),
    ],
    ids=[
        "no dataclass",
        "a field without a value",
        "nothing returned",
        "gone",
        "no whole number",
        "negative",
        "huge",
        "left",
        "left in build",
        "another argument",
    ],
)
def test_what_a_job_file_leaves_out_is_said(
    job_file: Callable[[str], Path],
    restored_imports: None,
    text: str,
    given: dict[str, Any],
    problem: str,
) -> None:
    with pytest.raises(InputError, match=problem):
        load_job(TrainRequest(job_file(text), given, Settings("runs")), World())[0]()


def test_weights_that_are_not_there_are_said_before_the_file_is_run(
    job_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its bytecode was left beside it."""
    settings = Settings(tmp_path / "run", init_from=str(tmp_path / "none"))
    with pytest.raises(InputError, match="none has no good snapshot"):
        load_job(TrainRequest(job_file("raise SystemExit"), {}, settings), World())


def test_a_frozen_config_s_rate_may_grow_with_the_processes(
    job_file: Callable[[str], Path], restored_imports: None
) -> None:
    text = SIZES.replace("@dataclass", "@dataclass(frozen=True)")
    settings = Settings("runs", batch_per_rank=5, lr_scale="linear")
    world = World(rank=1, world_size=3, local_rank=1, ranks_per_node=3)
    request = TrainRequest(job_file(text), {"lr": 0.5}, settings)
    assert load_job(request, world)[1].config["lr"] == 1.5
    with pytest.raises(InputError, match=r"Config\.lr is 'x'"):
        load_job(replace(request, config={"lr": "x"}), world)


def test_a_fixed_batch_per_rank_is_what_the_job_counts_its_steps_by(
    job_file: Callable[[str], Path], restored_imports: None
) -> None:
    world = World(rank=1, world_size=3, local_rank=1, ranks_per_node=3)
    request = TrainRequest(job_file(SIZES), {"lr": 0.1}, Settings("runs", batch_per_rank=5))
    assert load_job(request, world)[1].config["global_batch"] == 15


@pytest.mark.usefixtures("restored_imports")
@pytest.mark.parametrize("before", ["def build(", "    x = torch.arange("])
def test_a_job_that_goes_to_another_folder_takes_no_run_directory_along(
    job_file: Callable[[str], Path], before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(END_FILE_VARIABLE, "7:ended.json")
    indent = before[: len(before) - len(before.lstrip())]
    text = (JOBS / "plain.py").read_text(encoding="utf-8")
    path = job_file(text.replace(before, f"{indent}import os\n{indent}os.chdir('other')\n{before}"))
    assert train_file(TrainRequest(path, {}, Settings("run", progress=False))) == 0
    assert Path.cwd() == tmp_path / "other" and not list((tmp_path / "other").iterdir())
    assert (
        tmp_path / "run" / "result.json"
    ).exists() and find_end_file() == tmp_path / "ended.json"


@pytest.mark.parametrize(("sync", "sizes"), [("exact", "11"), ("ddp", "33")])
@pytest.mark.usefixtures("restored_imports")
def test_with_exact_a_job_is_told_that_there_is_one_rank(
    sync: Any, sizes: str, job_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    text = SIZES.replace("return None", "raise ValueError(READ + os.environ['WORLD_SIZE'])")
    path = job_file(f"import os\nREAD = os.environ['WORLD_SIZE']\n{text}")
    request = TrainRequest(path, {"lr": 0.1}, Settings("runs", sync=sync))
    build, _ = load_job(request, World())
    with pytest.raises(ValueError, match=sizes):
        build()
    assert os.environ["WORLD_SIZE"] == "3"


@pytest.mark.usefixtures("restored_imports")
def test_a_job_file_that_takes_the_ranks_variables_away_is_one_line(
    job_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    monkeypatch.setattr(os, "environ", {**os.environ, **rank})
    path = job_file(f"import os\nos.environ.clear()\n{SIZES}")
    with (
        pytest.raises(
            InputError, match="has changed the environment variables that say which rank"
        ),
        join_process_group(TrainRequest(path, {"lr": 0.1}, Settings("runs"))),
    ):
        raise AssertionError

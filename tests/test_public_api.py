"""What `from stepladder import ...` promises: names that resolve, explained, and all that the pages
need.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import stepladder

REPOSITORY = Path(__file__).parent.parent
every_name = pytest.mark.parametrize("name", stepladder.__all__)


@every_name
def test_a_public_name_resolves_is_documented_and_is_no_module(name: str) -> None:
    value = getattr(stepladder, name)
    assert not isinstance(value, ModuleType)
    assert inspect.getdoc(value)


@every_name
def test_what_a_public_class_offers_is_documented(name: str) -> None:
    silent = [member for member, value in members(getattr(stepladder, name)) if not value.__doc__]
    assert not silent, f"{name} has members without a docstring"


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class itself defines."""
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        if not name.startswith("_") and (
            inspect.isfunction(function) or isinstance(member, staticmethod)
        ):
            yield name, function


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    assert dir(stepladder) == sorted(stepladder.__all__) == sorted(set(stepladder.__all__))
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = stepladder.no_such_name


def test_the_package_says_its_version_once_and_that_it_has_types() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", stepladder.__version__)
    assert stepladder.__version__ not in (REPOSITORY / "pyproject.toml").read_text()
    assert (Path(stepladder.__file__).parent / "py.typed").is_file()


def make_job() -> stepladder.Job:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = stepladder.mean_loss(torch.nn.functional.mse_loss)
    return stepladder.Job(model, optimizer, loss, (torch.ones(8, 4), torch.ones(8, 1)))


DATA = torch.arange(8)
WRONG_CALLS: dict[str, Callable[[], object]] = {
    "Loader device": lambda: stepladder.Loader(DATA, 4, device=5),
    "Loader run_dir": lambda: stepladder.Loader(DATA, 4, run_dir=5),
    "Loader world": lambda: stepladder.Loader(DATA, 4, world=3),
    "Optimizers": lambda: stepladder.Optimizers(5),
    "Plan num_samples": lambda: stepladder.Plan("8", 4, 2),
    "Plan seed": lambda: stepladder.Plan(8, 4, 2, seed="0"),
    "PlanSampler": lambda: stepladder.PlanSampler(5, 3),
    "Recipe config": lambda: stepladder.Recipe("job", 5),
    "Recipe name": lambda: stepladder.Recipe(5),
    "Settings run_dir": lambda: stepladder.Settings(5),
    "Settings epochs": lambda: stepladder.Settings("run", epochs="2"),
    "Shards": lambda: stepladder.Shards(5),
    "Shards columns": lambda: stepladder.Shards("data", columns=5),
    "Snapshots": lambda: stepladder.Snapshots(5),
    "Trainer job": lambda: stepladder.Trainer(5, stepladder.Settings("run")),
    "Trainer settings": lambda: stepladder.Trainer(make_job(), "run"),
    "Trainer comm": lambda: stepladder.Trainer(make_job(), stepladder.Settings("run"), comm=2),
    "World rank": lambda: stepladder.World(rank="0"),
    "launch": lambda: stepladder.launch(5),
    "launch timeout": lambda: stepladder.launch(print, timeout="1"),
    "mean_loss": lambda: stepladder.mean_loss(5),
    "open_data": lambda: stepladder.open_data(5),
    "pick_device": lambda: stepladder.pick_device("cpu", 2),
    "process_group world": lambda: stepladder.process_group(world=3),
    "process_group device": lambda: stepladder.process_group(device="cpu"),
    "write_shards out": lambda: stepladder.write_shards([{"x": 1}], 5),
    "write_shards samples": lambda: stepladder.write_shards(5, "out"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_an_argument_of_a_wrong_type_is_one_line_with_a_hint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(stepladder.InputError) as raised:
        WRONG_CALLS[name]()
    assert ". HINT: " in str(raised.value) and "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir()), "it is refused before anything is written"


def test_numbers_of_numpy_and_paths_as_texts_are_accepted(tmp_path: Path) -> None:
    plan = stepladder.Plan(np.int64(8), np.int32(4), 2)
    assert plan.steps_per_epoch == 2
    assert stepladder.Snapshots(str(tmp_path)).folder == tmp_path
    assert stepladder.Settings("run", timeout=5).timeout == 5


def taught() -> dict[str, str]:
    """The Python that users read and copy, by where it stands."""
    files = [*REPOSITORY.glob("lessons/**/*.py"), *REPOSITORY.glob("docs/examples/*.py")]
    texts = {str(file.relative_to(REPOSITORY)): file.read_text() for file in files}
    for page in [
        REPOSITORY / "README.md",
        *REPOSITORY.glob("docs/*.md"),
        *REPOSITORY.glob("lessons/**/*.md"),
    ]:
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
        ):
            texts[f"{page.relative_to(REPOSITORY)}, block {number}"] = block
    return texts


def used_names(code: str) -> set[str]:
    """Names of `from stepladder import name` and `stepladder.name`; `module.name` of those from
    other modules.
    """
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stepladder":
            names |= {
                f"{node.module}.{alias.name}".removeprefix("stepladder.") for alias in node.names
            }
        elif isinstance(node, ast.Import):
            names |= {
                a.name.removeprefix("stepladder.")
                for a in node.names
                if a.name.startswith("stepladder.")
            }
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "stepladder"
        ):
            names.add(node.attr)
    return names


TESTING = ("testing.check_source", "testing.assert_same_on_ranks", "testing.assert_parity")


def test_documentation_lessons_and_examples_use_public_names_only() -> None:
    used = {location: used_names(code) for location, code in taught().items()}
    assert not {
        location: private
        for location, names in used.items()
        if (private := names - {*stepladder.__all__, *TESTING})
    }
    together = set().union(*used.values())
    assert {
        "Job",
        "Trainer",
        "Plan",
        "PlanSampler",
        "World",
        "process_group",
        "Shards",
        "launch",
    } <= together


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from stepladder import Job, Plan as P", {"Job", "Plan"}),
        ("from stepladder.core.plan import Plan", {"core.plan.Plan"}),
        ("import stepladder.train.comm", {"train.comm"}),
        ("import stepladder\nstepladder.launch(print)", {"launch"}),
        ("from os import path\nimport torch", set()),
    ],
)
def test_uses_are_found(code: str, names: set[str]) -> None:
    assert used_names(code) == names

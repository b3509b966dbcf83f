"""What `from stepladder import ...` promises: names that resolve, explained, and all that the pages
need.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
    assert re.fullmatch(r"\d+\.\d+\.\d+", stepladder.__version__)
    assert stepladder.__version__ not in (REPOSITORY / "pyproject.toml").read_text()
    assert (Path(stepladder.__file__).parent / "py.typed").is_file()


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


def test_documentation_lessons_and_examples_use_public_names_only() -> None:
    used = {location: used_names(code) for location, code in taught().items()}
    assert not {
        location: private
        for location, names in used.items()
        if (private := names - {*stepladder.__all__, "testing.check_source"})
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

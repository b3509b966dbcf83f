"""What the Tab key offers, by the script that bash itself calls; and no colours where nobody wants
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("stepladder tr", ["plain,train"]),
        pytest.param(
            "stepladder train m",
            ["plain,mlp", "plain,mnist", "plain,movielens"],
            marks=pytest.mark.slow,
        ),
        pytest.param("stepladder verify dig", ["plain,digits"], marks=pytest.mark.slow),
        ("stepladder train my_", ["file,my_"]),
        pytest.param("stepladder train mnist --ne", ["plain,--net"], marks=pytest.mark.slow),
        ("stepladder train mnist --sync e", ["plain,exact"]),
        ("stepladder audit ru", ["file,ru"]),
        pytest.param("stepladder lab d", ["plain,down"], marks=pytest.mark.slow),
        pytest.param("stepladder sample --te", ["plain,--temperature"], marks=pytest.mark.slow),
    ],
)
def test_the_tab_key_offers(line: str, offered: list[str], tmp_path: Path) -> None:
    asked = {
        "_STEPLADDER_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    command = Path(sys.executable).with_name("stepladder")
    done = subprocess.run(
        command, env=os.environ | asked, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == offered


TABLE = """\
from rich.table import Table
from stepladder.cli.options import print_tables
print_tables([Table("rank", "seconds", header_style="bold red")], 80)
"""


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_colours_can_be_turned_off(variables: dict[str, str]) -> None:
    env = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color"} | variables
    shown = subprocess.run(
        [sys.executable, "-c", TABLE], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert ("31m" in shown) == (not variables), shown

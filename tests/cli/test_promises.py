"""What scripts type and programs read stays, or names its successor: promises.toml lists it.

The pages are held against the code and against real output elsewhere (tests/docs/test_docs.py, and
the tests of each command), so that this file can read the pages alone.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from pages import JSON, REPOSITORY
from stepladder.cli import OLD_SPELLINGS
from stepladder.core.settings import LOGGER_GROUP

PROMISES = tomllib.loads(Path(__file__).with_name("promises.toml").read_text())
COMMANDS = REPOSITORY / "docs" / "reference" / "commands.md"


def read_sections(path: Path, heading: str) -> dict[str, list[str]]:
    """The table rows below each heading; a heading of another kind ends no section."""
    sections: dict[str, list[str]] = {}
    rows: list[str] = []
    for line in path.read_text().splitlines():
        if found := re.fullmatch(heading, line):
            rows = sections.setdefault(found[1], [])
        elif line.startswith("| `"):
            rows.append(line)
    return sections


FLAGS = read_sections(COMMANDS, "##+ stepladder (.+)")
KEYS = read_sections(JSON, "## (.+)")


def has_flag(rows: list[str], promised: str) -> bool:
    name, _, values = promised.partition(" ")
    names = [row for row in rows if re.search(rf"(?<![\w-]){name}(?![\w-])", row.split("` |")[0])]
    return any(
        all(re.search(rf"[\[|]{value}[\]\\]", row) for value in values.split("|") if value)
        for row in names
    )


@pytest.mark.parametrize("command", PROMISES["flags"])
def test_every_flag_that_a_command_had_is_there(command: str) -> None:
    rows = FLAGS[OLD_SPELLINGS.get(command, command)]
    assert [flag for flag in PROMISES["flags"][command] if not has_flag(rows, flag)] == []


@pytest.mark.parametrize("section", PROMISES["keys"])
def test_every_key_of_json_that_programs_read_is_there(section: str) -> None:
    names = set(re.findall(r"`([^`]+)`", "\n".join(KEYS[OLD_SPELLINGS.get(section, section)])))
    assert [key for key in PROMISES["keys"][section] if key not in names] == []


def test_every_exit_code_and_every_logger_is_there() -> None:
    text = COMMANDS.read_text().split("## ")[0] + JSON.read_text()
    codes = [code for code in PROMISES["exit_codes"] if not re.search(rf"\b{code}\b", text)]
    assert codes == []
    assert set(PROMISES["loggers"]) <= entry_points(group=LOGGER_GROUP).names


def test_a_flag_or_a_value_that_has_gone_is_found() -> None:
    rows = FLAGS["train"]
    assert has_flag(rows, "--shard none|optimizer|full") and has_flag(rows, "--lr")
    assert not has_flag(rows, "--l") and not has_flag(rows, "--lr-sca")
    assert not has_flag(rows, "--shard none|half") and not has_flag(rows, "--shard opt")

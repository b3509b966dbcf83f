"""What a terminal would obey is only shown: of a bundle, a run directory, a name, a job's output."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from processes import refused, run
from stepladder import cli
from stepladder.core import console
from stepladder.core.console import make_log_printable, make_printable, write_text
from stepladder.core.terminal import MAX_COLUMNS, make_console

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run_of_version_0_1"
EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\r"
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b31m\u202e\r"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def harmless(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of somebody else."""
    shutil.copytree(FIXTURE, tmp_path / "run")
    return tmp_path / "run"


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


@pytest.mark.slow
def test_a_bundle_s_texts_are_only_shown(tmp_path: Path) -> None:
    assert run("doctor", "--save", "bundle.json", cwd=tmp_path).returncode in (0, 1)
    file = tmp_path / "bundle.json"
    change(
        file,
        lambda bundle: bundle.update(
            host=EVIL, nodes=2, env={"MASTER_ADDR": f"localhost{EVIL}", "RANK": "0"}
        ),
    )
    change(file, lambda bundle: bundle["torch"].update(error=EVIL, version=""))
    done = run("doctor", "--load", "bundle.json", cwd=tmp_path)
    assert harmless(done.stdout + done.stderr)
    assert SHOWN in done.stdout


def test_a_run_directory_s_texts_are_only_shown(run_dir: Path) -> None:
    change(run_dir / "config.json", lambda config: config["definition"].update(recipe=EVIL))
    metrics = (run_dir / "metrics.jsonl").read_text()
    last = json.loads(metrics.splitlines()[-1])
    with (run_dir / "metrics.jsonl").open("a") as opened:
        opened.write(json.dumps({"step": last["step"], f"{EVIL}accuracy": 0.5}) + "\n")
    for command in (
        ("audit",),
        ("watch", "--once"),
        ("report", "-o", run_dir / "page.html"),
        ("recipe", "recommend", "--user", 1),
        ("recipe", "sample", "--prompt", "a"),
    ):
        done = run(*command, run_dir, cwd=run_dir.parent)
        assert harmless(done.stdout + done.stderr), command
        assert "Traceback" not in done.stderr, command
    assert SHOWN in run("watch", "--once", run_dir, cwd=run_dir.parent).stdout


def test_a_ledger_s_texts_are_only_shown(run_dir: Path) -> None:
    ledger = next((run_dir / "ledger").iterdir())
    ledger.rename(ledger.with_name(f"attempt-0001.rank-0{EVIL}.jsonl"))
    done = run("audit", run_dir, cwd=run_dir.parent)
    assert harmless(done.stdout + done.stderr)


@pytest.mark.parametrize(
    "arguments", [("train", f"{EVIL}.py"), ("report", EVIL), ("doctor", "--load", EVIL), (EVIL,)]
)
def test_a_name_in_an_error_is_only_shown(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert harmless(refused(done))
    assert SHOWN in done.stderr and done.stderr.count("\n") == 1


def test_names_that_a_locale_cannot_write_are_escaped(run_dir: Path) -> None:
    """Not a traceback from `print`."""
    change(run_dir / "config.json", lambda config: config["definition"].update(recipe="caf\xe9"))
    done = run("watch", "--once", run_dir, cwd=run_dir.parent, env=ASCII)
    assert done.returncode == 0, done.stderr
    assert r"caf\xe9" in done.stdout


def test_a_job_s_output_keeps_its_colours_and_no_more() -> None:
    colours = b"\x1b[1;31mred\x1b[0m\t50%\r100%\r\n\xc3\xa9"
    assert make_log_printable(colours) == colours
    assert (
        make_log_printable(b"\x1b]52;c;x\x07\x1b[2J\x7f\xc2\x9b\x1b")
        == rb"\x1b]52;c;x\x07\x1b[2J\x7f\xc2\x9b\x1b"
    )


def test_lines_and_letters_stay() -> None:
    text = "caf\xe9 \u2581 \t1\n2"
    assert make_printable(text) == text
    assert make_printable(text, allowed="") == "caf\xe9 \u2581 \\t1\\n2"
    assert make_printable("\udcff") == "\\udcff"


def test_commands_print_by_one_way() -> None:
    """`echo` of the house: click's own obeys what it is given."""
    for file in Path(cli.__file__).parent.glob("*.py"):
        assert not re.search(r"\bclick\.echo\b|^ *print\(", file.read_text(), re.MULTILINE), file


def test_what_a_job_has_closed_is_not_written_to(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        write_text("a", stream)
    write_text("b", stream)
    assert (tmp_path / "out").read_text() == "a\n"


@pytest.mark.parametrize("size", ["²", "٣", "0", "9" * 400, "-1", "x"])
def test_a_terminal_s_size_that_is_none_is_not_taken(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LINES", "COLUMNS"):
        monkeypatch.setenv(name, size)
    assert 0 < make_console(force_terminal=True).size.width <= MAX_COLUMNS
    monkeypatch.setenv("COLUMNS", "123")
    monkeypatch.setenv("LINES", "45")
    assert make_console().size == (123, 45)


def test_commands_have_a_console_by_one_way() -> None:
    for file in Path(cli.__file__).parents[1].rglob("*.py"):
        assert file.name == "terminal.py" or not re.search(
            r"\bConsole\((?!\))|get_console", file.read_text()
        ), file


def test_a_terminal_that_is_closed_under_the_bar_leaves_nothing_to_be_written() -> None:
    """What stayed in the buffer was tried again at the interpreter's end, whose exit code was 120
    then.
    """
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        console.draw_bar("step 1/9", terminal)
        os.close(ours)
        console.draw_bar("step 2/9", terminal)
        console.clear_bar()
        terminal.flush()


@pytest.mark.parametrize("group", ["data", "lab", "learn", "recipe"])
def test_a_group_s_help_shows_whole_sentences(group: str) -> None:
    text = CliRunner().invoke(cli.cli, [group, "--help"]).output
    assert "Commands:" in text
    assert "..." not in text.split("Commands:")[1]

"""The fenced blocks of a Markdown page, and running those that are marked for it.

The line above a block says what happens to it: `<!-- run -->`, `<!-- run with MNIST -->`, `<!--
run, saved as NAME -->` (a file that later blocks use), `<!-- run on the lab -->`, `<!-- copied from
FILE -->`, or `<!-- not run here: reason -->`. Lines of a block that begin with `#> ` show its output."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import SECONDS, run
from warm import SERVER

BIN = str(Path(sys.executable).parent)
REPOSITORY = Path(__file__).parent.parent
JSON = REPOSITORY / "docs" / "json.md"
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "CHANGELOG.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "docs/reference").glob("*.md")),
    REPOSITORY / "benchmarks/README.md",
    *sorted((REPOSITORY / "lessons").glob("**/README.md")),
]
EXAMPLES = REPOSITORY / "docs" / "examples"
SHOWN = "#> "
# Pages on which the indented lines below a block are compared with what it prints.
COMPARED = {"install.md", "training.md", "use.md"}
LESSONS = REPOSITORY / "lessons"
MARK = re.compile(
    r"<!-- (run|run with MNIST|run with the tutorial|run on the lab|run, saved as [\w.]+"
    r"|copied from [\w./-]+|not run here: .{10,}) -->"
)


@dataclass(frozen=True)
class Block:
    """A fenced block. mark: what the line above says, or "" where it says nothing of this."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def output(self) -> str:
        """The output that the page shows: the lines that begin with `#> `."""
        lines = self.text.splitlines()
        return "\n".join(line[len(SHOWN) :] for line in lines if line.startswith(SHOWN))


def blocks(page: Path) -> list[Block]:
    matches = []
    lines = page.read_text().splitlines()
    start = None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```"):
            start = number
        elif start is not None and line.startswith("```"):
            above = MARK.fullmatch(lines[start - 1]) if start else None
            text = "\n".join(lines[start + 1 : number]) + "\n"
            matches.append(
                Block(
                    page, start + 1, lines[start][3:].strip(), text, above.group(1) if above else ""
                )
            )
            start = None
    assert start is None, f"{page.name}:{start}: the block has no end"
    return matches


def run_blocks(page: Path, mark: str, folder: Path) -> None:
    """Run the page's blocks of this mark, in order, in `folder`, which then also holds the
    examples.

    Those of a lesson find the lessons there, as in the repository's root.
    """
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, folder)
    if page.is_relative_to(LESSONS):
        shutil.copytree(LESSONS, folder / "lessons", ignore=shutil.ignore_patterns("__pycache__"))
    for block in blocks(page):
        if block.mark.startswith("run, saved as ") and mark == "run":
            (folder / block.mark.split()[-1]).write_text(block.text)
        elif block.mark == mark:
            printed = run_block(block, folder)
            if page.name in COMPARED:
                missing = missing_lines("\n".join(shown_below(block)), printed)
                assert missing == [], f"{block} shows {missing}, and printed:\n{printed}"


def shown_below(block: Block) -> list[str]:
    """Return the indented lines that follow a block: the output that the page shows."""
    below = block.page.read_text().splitlines()[block.line + block.text.count("\n") + 1 :]
    end = next(
        (at for at, line in enumerate(below) if line and not line.startswith("    ")), len(below)
    )
    return [line for line in below[:end] if line]


def run_block(block: Block, folder: Path, setup: str = "", exit_code: int = 0) -> str:
    """Run one block in `folder`, and return what it printed; a shell's stderr is in its stdout.

    Args:
        block: A block of bash or Python.
        folder: Where it runs.
        setup: Shell code that runs before it, such as a function that stands for a program.
        exit_code: The exit code that the block must have.
    """
    command = (
        ("bash", "-euo", "pipefail", "-c") if block.language == "bash" else (sys.executable, "-c")
    )
    env = SERVER.ranks() | {
        "PATH": os.pathsep.join([str(SERVER.commands()), BIN, os.environ["PATH"]]),
        "XDG_STATE_HOME": str(folder / ".state"),  # what `stepladder learn` remembers
        "XDG_CACHE_HOME": str(folder / ".cache"),  # indexes of files that a page writes
        # on a busy machine, spinning threads keep others from working
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    in_order = "exec 2>&1\n" if block.language == "bash" else ""
    done = run(
        in_order + setup + block.text, cwd=folder, env=env, command=command, timeout=2 * SECONDS
    )
    assert done.returncode == exit_code, (
        f"{block} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    )
    return done.stderr + done.stdout


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the lines of a shown output that a command did not print in this order.

    A line that is indented further than the one above it may continue that line. Numbers that
    change from run to run are equal to each other: process ids, times, steps of a kill, decimals. A
    hash is equal to the hash at its position in order of first appearance.
    """
    text = " ".join(normalize(printed).split())
    position = 0
    missing = []
    for line in normalize(shown).splitlines():
        sought = " ".join(line.split())
        place = text.find(sought, position)
        if place < 0:
            missing.append(line)
        else:
            position = place + len(sought)
    return missing


def normalize(text: str) -> str:
    """Replace what differs between two runs or two machines by names."""
    hashes = list(dict.fromkeys(re.findall(r"\b[0-9a-f]{64}\b", text)))
    for number, digest in enumerate(hashes):
        text = text.replace(digest, f"HASH{number}")
    text = re.sub(r"\bpid \d+", "pid N", text)
    text = re.sub(r"\b\d+ steps? superseded", "N steps superseded", text)
    text = re.sub(r"\bresumed after step \d+", "resumed after step N", text)
    return re.sub(r"\b\d+\.\d+\b", "N.N", text)


def documented_rows(heading: str) -> dict[str, set[str]]:
    """By key of json.md's table under this heading: the words that its row explains."""
    part = JSON.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = {}
    for line in part.splitlines():
        for key in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else ""):
            rows[key] = set(re.findall(r"`(\w+)`", line.split("|", 2)[2]))
            if "as of `check`" in line and heading != "check":
                rows[key] |= documented_rows("check")[key]
    return rows


def documented_keys(heading: str) -> set[str]:
    """The keys in json.md's table under this heading."""
    return documented_rows(heading).keys() | set()


def expect_documented(value: dict[str, Any], heading: str, absent: tuple[str, ...] = ()) -> None:
    """An object has the keys of json.md's table, and each object in it those that its row names."""
    rows = documented_rows(heading)
    assert value.keys() == rows.keys() - set(absent)
    for key, found in value.items():
        for one in found if isinstance(found, list) else [found]:
            assert not isinstance(one, dict) or one.keys() <= rows[key], f"{heading}: {key}"

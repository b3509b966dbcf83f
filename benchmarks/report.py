"""Shared by the benchmark scripts: where and when a figure was measured, and the Markdown report."""

import datetime
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

NUMBER = re.compile(r"\W*\d.{0,16}")
RESULTS = Path(__file__).parent / "results"


def cores() -> int:
    """The CPU cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.processor() or platform.machine()


def os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def command(script: str) -> str:
    """The command line, with every absolute path replaced by the word DIR."""
    arguments = [re.sub(r"(^|=)/.*$", r"\1DIR", argument) for argument in sys.argv[1:]]
    return " ".join(["python", f"benchmarks/{script}", *arguments])


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: the first column and texts left, numbers right."""
    columns = list(zip(*rows, strict=True))
    lines = [header, ["---", *map(align, columns[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def align(cells: Sequence[str]) -> str:
    filled = [cell for cell in cells if cell]
    return "---:" if 2 * sum(map(bool, map(NUMBER.fullmatch, filled))) > len(filled) else "---"


def bar(name: str, measured: float, limit: float, at_most: bool, tried: str = "") -> str:
    """One line that says whether a ratio meets the project's bar for it; where not, another of what
    was tried.
    """
    passed = measured <= limit if at_most else measured >= limit
    sign = "<=" if at_most else ">="
    line = f"- {'PASS' if passed else 'FAIL'}: {name}: {measured:.2f}x (bar: {sign} {limit:.2f}x)"
    return line if passed or not tried else f"{line}\n- tried: {tried} (docs/log.md)"


class Report:
    """Start it before the first measurement: it keeps the date and the load the machine had then.

    name: of the file under results/, by default the script's.
    """

    def __init__(
        self, script: str, title: str, packages: list[str], cores_used: str, name: str | None = None
    ) -> None:
        self.name = name or Path(script).stem
        load = f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"
        versions = ", ".join(f"{package} {version(package)}" for package in packages)
        self.head = "\n".join(
            [
                f"# {title}",
                "",
                f"- Date: {datetime.date.today().isoformat()}",
                f"- Command: `{command(script)}`",
                f"- Versions: Python {platform.python_version()}, {versions}",
                f"- Machine: {cpu_model()}, {cores_used} of {cores()} core(s), {os_name()}; "
                f"load average at the start {load}",
            ]
        )

    def finish(self, sections: list[str], write: bool) -> None:
        """Print the report; with `write`, save it under results/ too, and its bars in README.md."""
        text = "\n\n".join([self.head, *sections]) + "\n"
        print(text)
        if write:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{self.name}.md").write_text(text, encoding="utf-8")
            import table as all_bars  # late: it reads this module

            all_bars.write()

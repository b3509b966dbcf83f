"""python benchmarks/playback.py [--write]: at which moment does a playback show a planted mistake?

The scripts are those of tests/check_corpus, the first one of each mistake of the course, and a few
without one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from report import Report, table

CORPUS = Path(__file__).parent.parent / "tests" / "check_corpus"
# The mistakes of the course's exercises that `check` names.
OF_THE_COURSE = [
    *("set-epoch", "same-samples", "padded-evaluation", "same-augmentation", "not-wrapped"),
    *("clip-before-average", "small-batch-norm", "accumulation-sync", "mean-of-means"),
    *("collective-order", "many-writers", "activation-twice", "missing-zero-grad", "no-eval-mode"),
]
CLEAN = ["bikes_spawn.py", "coins_rank0.py", "houses_by_hand.py"]


def choose_scripts() -> dict[str, str]:
    """Return the scripts, each with its mistake; "" for none."""
    entries = tomllib.loads((CORPUS / "corpus.toml").read_text(encoding="utf-8"))["script"]
    first = {rule: one["file"] for one in reversed(entries) for rule in one["rules"]}
    chosen = {first[rule]: rule for rule in OF_THE_COURSE}
    return chosen | dict.fromkeys(CLEAN, "")


def play_back(script: str) -> tuple[str, list[str]]:
    """Return the page, and the moments that have a mistake."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / script).write_bytes((CORPUS / script).read_bytes())
        command = [sys.executable, "-m", "stepladder", "playback", "-o", "page.html", script]
        subprocess.run(command, cwd=folder, capture_output=True, timeout=300)
        page = (Path(folder) / "page.html").read_text(encoding="utf-8")
    moments = []
    for section in re.findall(r"<section.*?</section>", page, re.DOTALL):
        rules = re.findall("<b>(.*?)</b>", section)
        if rules:
            where, title = re.findall(r'class="where">([^<]*)|<h2>([^<]*)', section)
            moments.append(f"{', '.join(rules)}: {where[0]}: {title[1]}")
    return page, moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    flags = parser.parse_args()
    title = "At which moment a playback shows a mistake"
    report = Report(Path(__file__).name, title, ["torch", "stepladder"], "2")
    rows = []
    for script, rule in choose_scripts().items():
        began = time.monotonic()
        page, moments = play_back(script)
        seconds = time.monotonic() - began
        size = f"{len(page.encode()) / 1000:.0f} KB"
        rows.append([script, rule or "none", "; ".join(moments) or "none", size, f"{seconds:.0f}"])
        print(*rows[-1], sep=" | ", flush=True)
    shown = sum(rule in moments if rule != "none" else True for _, rule, moments, *_ in rows)
    right = sum(moments == "none" for _, rule, moments, *_ in rows if rule == "none")
    summary = (
        f"{shown - len(CLEAN)} of {len(rows) - len(CLEAN)} mistakes are shown at a moment;"
        f" {right} of {len(CLEAN)} scripts without one have none."
    )
    header = ["script", "mistake", "shown at", "page", "seconds"]
    report.finish([summary, table(header, rows)], flags.write)


if __name__ == "__main__":
    main()

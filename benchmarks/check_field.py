"""What does `stepladder check` find in published scripts, and is it right? On copies that you have fetched.

    python benchmarks/check_field.py COPIES [--only NAME,...] [--jobs N] [--write]

COPIES holds a folder OWNER+NAME for each repository, at the commit that check_field.toml names. No script is changed: each runs in a
copy, with arguments alone, and with random pictures in place of its data set. check_field.toml also holds the judgement of a
person who has read the script. --write saves results/check_field.md and docs/checked-scripts.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pickle
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from report import Report, table

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "checked-scripts.md"
SECONDS = "300"
NOTES_ON_PORTABILITY = ("cuda-only", "no-destroy", "in-place-snapshot", "fixed-port")
HEAD = """\
# Scripts we checked

Published scripts, unchanged, under `stepladder check` on {date}. Each finding has its line at the commit, what was seen, and what a reader
of the script says. `python benchmarks/check_field.py COPIES` runs them again on copies that you have fetched
([how many were right, and what was wrong](../benchmarks/results/check_field.md)). Their data sets were random pictures of the same form. Notes on portability are left out.

Nothing here says that a project is bad: these are the scripts that people learn from, and each mistake is one that runs without
an error.
"""
ISSUE = """\
### {repository}

> Hello, and thank you for this script. I ran a checker for data-parallel training on it, on two CPU processes, at commit {commit}:
>
>     cd {folder}
>     stepladder check {command}
>
{findings}
> I have read the script, and think that the checker is right. I may have missed a reason for it; if so, I am sorry for the noise.
> I am glad to send a pull request.
"""

BLIND_TRIAL = """\
What the first run said, before anything was fixed (2026-11-26, on a machine with ten other jobs a core):

- 43 scripts that could be read: 18 ran to where they train, the others lacked data, packages or a network. 25 findings of errors and warnings, of which 23 were true and 2 false (a GPU for
  each rank where a rank is a node; an order of collectives where a rank only computed), and one had a fix for another cause. Three scripts could
  not run because `../data` led beside the copy. "Failed by itself" was false of 2 scripts that computed for long without an event.
- 12 scripts that nobody had read or run: 7 ran to where they train. 8 findings, of which 5 were true and 3 false (two on FSDP inside of
  another module, one on a script for one node alone). All 5 mistakes that a reader finds were named, with the right cause; of 4 scripts without
  one 3 were silent. Of the 5 that did not run, one lacked an address that the check now sets; four lack MPI, a hub's weights, a variable, a name of their own package.

All of these are fixed, each with a script of its own in tests/check_corpus or a test. Of the scripts that nobody had read the table
first held that first run; a later one is blind no longer."""


def random_numbers(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)


def write_mnist(folder: Path) -> None:
    """Write random pictures as MNIST is stored."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 600), ("t10k", 130)):
        pictures = random_numbers(count, 28, 28)
        for kind, values in (("images-idx3", pictures), ("labels-idx1", pictures[:, 0, 0] % 10)):
            head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            (raw / f"{name}-{kind}-ubyte").write_bytes(head + values.tobytes())


def write_cifar10(folder: Path) -> None:
    """Write random pictures as CIFAR-10 is stored."""
    target = folder / "cifar-10-batches-py"
    target.mkdir(parents=True, exist_ok=True)
    for name, count in [*((f"data_batch_{i}", 60) for i in range(1, 6)), ("test_batch", 70)]:
        pictures = random_numbers(count, 3072)
        labels = [int(label) for label in pictures[:, 0] % 10]
        (target / name).write_bytes(pickle.dumps({"data": pictures, "labels": labels}))
    (target / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))


WRITERS = {"mnist": write_mnist, "cifar10": write_cifar10}


@dataclass(frozen=True)
class CheckedScript:
    """A script, what was found in it, and how that is judged.

    Attributes:
        entry: Its table in check_field.toml.
        report: The JSON of the check.
    """

    entry: dict[str, Any]
    report: dict[str, Any]

    @cached_property
    def findings(self) -> list[dict[str, Any]]:
        """The findings, each with its judgement: true, false or None, and why."""
        judgements = {
            (judged["rule"], judged["line"]): judged for judged in self.entry.get("judged", [])
        }
        findings = []
        for finding in self.report["findings"]:
            location = f"{finding['file']}:{finding['line']}"
            judgement = judgements.get((finding["rule"], location), {"true": None, "why": ""})
            if finding["rule"] not in NOTES_ON_PORTABILITY:
                findings.append({**finding, **judgement, "line": location})
        return findings

    @property
    def has_run(self) -> bool:
        return self.report["not_checked"] is None

    @property
    def failure(self) -> str:
        """Why it could not run: what a person says, or else what the check says."""
        return str(self.entry.get("fault") or self.report["not_checked"]["line"])

    @property
    def mistakes(self) -> set[str]:
        """The rules whose mistake the script has, as a person says."""
        return set(self.entry.get("known", []))


def check_script(entry: dict[str, Any], copies: Path) -> CheckedScript:
    """Check one script in a copy of its repository."""
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / entry["repository"].rpartition("/")[2]
        shutil.copytree(copies / entry["repository"].replace("/", "+"), repository)
        (repository / ".git").mkdir(exist_ok=True)  # its root is found by it, as in a clone
        folder = repository / entry["folder"]
        for kind, places in entry.get("data", {}).items():
            for place in places:
                WRITERS[kind](folder / place)
        flags = ["check", "--json", "--timeout", SECONDS, *shlex.split(entry["command"])]
        ran = subprocess.run(
            [sys.executable, "-m", "stepladder", *flags],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    print(f"{entry['name']}: exit code {ran.returncode}", file=sys.stderr, flush=True)
    return CheckedScript(entry, json.loads(ran.stdout.splitlines()[-1]))


def describe_judgement(finding: dict[str, Any]) -> str:
    if finding["true"] is None:
        return "not judged"
    return f"{'true' if finding['true'] else 'FALSE'}: {finding['why']}"


def list_rows(script: CheckedScript) -> list[list[str]]:
    """Return the rows of one script: one for each finding, or one that says that there is none."""
    entry = script.entry
    name = f"{entry['repository']} {entry['folder']}".removesuffix(" .")
    columns = [f"{name}: `{entry['command']}`", entry["commit"][:8]]
    if not script.findings:
        outcome = "no finding" if script.has_run else f"did not run: {script.failure}"
        return [[*columns, "", outcome, ""]]
    rows = []
    for finding in script.findings:
        evidence = finding["evidence"].replace("|", "\\|")
        text = f"{finding['severity']} {finding['rule']}: {evidence}"
        rows.append([*columns, finding["line"], text, describe_judgement(finding)])
        columns = ["", ""]
    return rows


def count_results(scripts: list[CheckedScript], title: str) -> str:
    """Return the figures of some scripts, in one paragraph."""
    findings = [finding for script in scripts for finding in script.findings]
    runs = [script for script in scripts if script.has_run]
    faulty = [script for script in runs if script.mistakes]
    clean = [script for script in runs if not script.mistakes]
    rules = [(script, rule) for script in faulty for rule in script.mistakes]
    named = [rule for script, rule in rules if rule in {found["rule"] for found in script.findings}]
    return (
        f"{title}: {len(scripts)} scripts, of which {len(runs)} ran to where they train. Mistakes that a"
        f" person found or confirmed: {len(rules)}, named {len(named)}. Findings: {len(findings)}, true"
        f" {sum(found['true'] is True for found in findings)}, false"
        f" {sum(found['true'] is False for found in findings)}, not judged"
        f" {sum(found['true'] is None for found in findings)}. Scripts without a mistake:"
        f" {len(clean)}, without a finding {sum(not script.findings for script in clean)}."
    )


def write_issue(script: CheckedScript) -> str:
    """Return the text of an issue to the authors, with the findings that are true."""
    lines = [
        f"> - {finding['rule']}, {finding['line']}. Seen: {finding['evidence']}. What I read: {finding['why']}.\n>"
        f"   Perhaps: `{finding['fix']}`\n"
        for finding in script.findings
        if finding["true"]
    ]
    return ISSUE.format_map({**script.entry, "findings": "".join(lines) + ">"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("copies", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    report = Report(
        "check_field.py", "Published scripts under `stepladder check`", ["torch", "stepladder"], "2"
    )
    entries = tomllib.loads((FOLDER / "check_field.toml").read_text(encoding="utf-8"))["script"]
    if args.only:
        entries = [entry for entry in entries if entry["name"] in args.only.split(",")]
    with ThreadPoolExecutor(args.jobs) as pool:
        scripts = list(pool.map(lambda entry: check_script(entry, args.copies), entries))
    rows = [row for script in scripts for row in list_rows(script)]
    results = table(["script and arguments", "commit", "line", "found", "by reading"], rows)
    unread = [script for script in scripts if script.entry.get("blind")]
    figures = count_results(scripts, "All")
    figures_unread = count_results(unread, "Unread and not run before the end")
    report.finish([results, figures, figures_unread, BLIND_TRIAL], args.write)
    if args.write:
        faulty = [script for script in scripts if any(found["true"] for found in script.findings)]
        issues = "\n".join(map(write_issue, faulty))
        head = HEAD.format(date=datetime.date.today().isoformat())
        PAGE.write_text(f"{head}\n{results}\n\n## Texts for an issue\n\n{issues}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

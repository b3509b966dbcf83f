"""Does `stepladder diff` find where two runs diverge, and why?

    python benchmarks/diff.py [--only WORD] [--write]

Trains pairs of runs that differ in one planted thing (diff_plants.py), and asks `stepladder diff
--json` of each. A difference counts as named when its kind, its first step and its words are those
that the plant expects; a pair without a difference, when diff says equal. Takes some minutes."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from diff_plants import PLANTS, Plant, pair
from report import Report, table

import stepladder

SOURCE = str(Path(stepladder.__file__).parent.parent)


def called(folder: Path, argv: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "stepladder", *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def diff(name: str, folder: Path) -> dict[str, Any]:
    """Train the pair, and what diff says of it."""

    def train(argv: list[str], env: dict[str, str]) -> None:
        done = called(folder, argv, env)
        if done.returncode:
            raise SystemExit(
                f"{name}: {' '.join(argv)} ended with {done.returncode}:\n{done.stderr}"
            )

    done = called(folder, ["diff", *map(str, pair(name, folder, train)), "--json"], {})
    answer = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"sentence": done.stderr}
    return (
        {"kind": None, "step": None}
        | answer
        | {"sentence": answer["sentence"].replace(f"{folder}/", "")}
    )


def is_named(plant: Plant, answer: dict[str, Any]) -> bool:
    right = (answer["kind"] or "") == plant.kind and plant.step in (None, answer["step"])
    return right and re.search(plant.sentence, answer["sentence"]) is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="plants with this in their name")
    parser.add_argument(
        "--write", action="store_true", help="save the report in benchmarks/results"
    )
    args = parser.parse_args()
    report = Report(
        "diff.py", "Planted differences, and what diff says of them", ["torch", "stepladder"], "2"
    )
    different = []
    equal = []
    with tempfile.TemporaryDirectory() as folder:
        for name, plant in PLANTS.items():
            if args.only in name:
                answer = diff(name, Path(folder))
                right = is_named(plant, answer)
                row = [plant.planted, answer["sentence"], "yes" if right else "NO"]
                (different if plant.kind else equal).append(row)
                print(
                    "named" if right else "NOT NAMED",
                    name,
                    answer["sentence"],
                    sep=": ",
                    file=sys.stderr,
                    flush=True,
                )
    sections = [
        table(["planted", "diff says", "named"], different),
        "Pairs without a difference:",
        table(["planted", "diff says", "right"], equal),
        "\n".join(
            [
                verdict(different, "planted differences named"),
                verdict(equal, "equal pairs called equal"),
            ]
        ),
    ]
    report.finish(sections, args.write)
    return 0


def verdict(rows: list[list[str]], claim: str) -> str:
    right = sum(row[-1] == "yes" for row in rows)
    return (
        f"- {'PASS' if right == len(rows) else 'FAIL'}: {right} of {len(rows)} {claim} (bar: all)"
    )


if __name__ == "__main__":
    sys.exit(main())

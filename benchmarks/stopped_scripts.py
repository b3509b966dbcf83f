"""python benchmarks/stopped_scripts.py [--write]: do scripts of Accelerate, Lightning and Hugging Face's
Trainer survive preemption?

It runs tests of the examples in docs/preemption.md: a real Slurm on this machine takes the nodes of each
for a more urgent job; a signal asks each to stop, and a kill ends it, before it resumes on three ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from report import Report, table

TESTS = Path(__file__).parent.parent / "tests"
# What happens to a script, and the file of the tests.
TRIALS = {
    "preempted on Slurm, requeued": "slurm/test_preemption_lab.py",
    "asked to stop, resumed on 3 ranks": "docs/test_stopped_scripts.py",
    "killed, resumed on 3 ranks": "docs/test_any_loop.py",
}
SCRIPTS = ("loader_ddp", "loader_accelerate", "loader_lightning", "loader_trainer")
PACKAGES = ["torch", "stepladder", "accelerate", "lightning", "transformers"]


def run_tests(file: str) -> dict[str, str]:
    """Return, for each script, whether its test passed, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "report.xml"
        folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        command = [sys.executable, "-m", "pytest", "-q", "-k", "loader_", f"--junitxml={xml}"]
        subprocess.run(
            [*command, str(TESTS / file)], env={**os.environ, "PATH": folders}, check=False
        )
        cases = ET.parse(xml).getroot().iter("testcase")
        return {
            case.get("name", "").partition("[")[2].rstrip("]"): describe(case) for case in cases
        }


def describe(case: ET.Element) -> str:
    """Return how a test ended, and its seconds."""
    outcome = next((child.tag for child in case if child.tag != "properties"), "yes")
    return f"{outcome}, {float(case.get('time', 0)):.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    report = Report("stopped_scripts.py", "Scripts that a cluster preempts", PACKAGES, "2")
    results = {trial: run_tests(file) for trial, file in TRIALS.items()}
    rows = [
        [script, *(results[trial].get(script, "not run") for trial in TRIALS)] for script in SCRIPTS
    ]
    cells = [cell for row in rows for cell in row[1:]]
    passed = sum(cell.startswith("yes") for cell in cells)
    bar = f"- {'PASS' if passed == len(cells) else 'FAIL'}: {passed} of {len(cells)} lose and repeat no step that was saved (bar: all)"
    text = (
        "A script that was preempted or asked to stop ends with exit code 75, and repeats no step. A script that was killed repeats the"
        " steps since its checkpoint. The seconds are those of the test."
    )
    report.finish([table(["script", *TRIALS], rows), text, bar], options.write)


if __name__ == "__main__":
    main()

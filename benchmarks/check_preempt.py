"""python benchmarks/check_preempt.py [--write] [NAME ...]: does `check --preempt` name what a script
loses that a cluster interrupts?

The scripts are those of tests/preemptions.py: one that saves on the signal, the same with a mistake,
and twins without one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Report, table

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from preemptions import KINDS, write_script  # noqa: E402

MOMENTS = 6


def rehearse(kind: str) -> tuple[list[str], str, float]:
    """Return the evidence of findings, the line of the rehearsals, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        write_script(kind, Path(folder))
        command = [sys.executable, "-m", "stepladder", "check", "--json", "--preempt", MOMENTS]
        began = time.monotonic()
        done = subprocess.run(
            [*map(str, command), "train.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
    report = json.loads(done.stdout)
    seen = [f["evidence"] for f in report["findings"] if f["rule"] == "preempted"]
    line = next((line for line in report["held"] if line.startswith("preemption: ")), "")
    return seen, line.removeprefix("preemption: "), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    flags = parser.parse_args()
    title = "What check --preempt says of scripts that lose steps"
    report = Report(Path(__file__).name, title, ["torch", "stepladder"], "2")
    rows = []
    right = 0
    for kind in flags.names or KINDS:
        seen, line, seconds = rehearse(kind)
        is_clean = kind.startswith("right")
        right += bool(seen) != is_clean
        said = "silent" if not seen else seen[0]
        rows.append([kind, "silent" if is_clean else "named", said, line, f"{seconds:.0f}"])
        print(*rows[-1], sep=" | ", flush=True)
    header = ["script", "expected", "said", "lost", "seconds"]
    summary = f"{right} of {len(rows)} as expected, with `--preempt {MOMENTS}`."
    report.finish([summary, table(header, rows)], flags.write)


if __name__ == "__main__":
    main()

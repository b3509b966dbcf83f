"""Are hangs named? Plants each kind in a training on two processes, and shows what the launcher
says of it.

In a job under `stepladder train`, and in an unmodified script under `stepladder run`.

    python benchmarks/hangs.py [--write]

A fault counts as named when the sentence names the planted rank and place, within a minute.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from report import Report, table

JOBS = Path(__file__).parent.parent / "tests" / "jobs"
SECONDS = 60.0
# kind: (what is planted, what a right sentence holds)
IN_A_JOB = {
    "alone": ("a collective on rank 0 only", r"rank 0.* in all_reduce, called by hang\(\)"),
    "shapes": ("a model of another shape on rank 1", r"rank 1.* passes 7 numbers .*passes 6"),
    "data": ("a sample that rank 1's data loader never reads", r"rank 1.* __getitem__\(\)"),
    "lock": ("two locks in different orders on rank 1", r"rank 1.* deadlock\(\)"),
    "stop": ("SIGSTOP to rank 1", r"rank 1.* is stopped \(SIGSTOP\)"),
    "sleep": ("work that only rank 1 does", r"rank 1.* validate\(\)"),
    "build": ("rank 1 never comes out of build()", r"rank 1.* build\(\)"),
}
IN_A_SCRIPT = {
    "alone": ("a collective on rank 0 only", r"rank 0 .* in all_reduce, called by log_loss\(\)"),
    "shapes": ("an all_reduce of another shape on rank 1", r"different shapes"),
    "data": ("a sample that rank 1's data loader never reads", r"rank 1.* __getitem__\(\)"),
    "lock": ("a lock taken twice on rank 1", r"rank 1.* deadlock\(\)"),
    "stop": ("SIGSTOP to rank 1", r"rank 1.* is stopped \(SIGSTOP\)"),
    "sleep": ("work that only rank 1 does", r"rank 1.* validate\(\)"),
}


def in_a_job(kind: str) -> list[str]:
    return [
        "train",
        str(JOBS / "hangs.py"),
        "--nproc",
        "2",
        "--num-workers",
        str(int(kind == "data")),
    ]


def in_a_script(_kind: str) -> list[str]:
    return ["run", "--nproc", "2", str(JOBS / "hangs_script.py")]


def hang(command: list[str], kind: str, explain_after: float) -> tuple[str, float]:
    """What the launcher says, and the seconds from the start until it does."""
    flags = ["--max-restarts", "0", "--explain-after", str(explain_after)]
    command = [sys.executable, "-m", "stepladder", command[0], *flags, *command[1:]]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        began = time.monotonic()
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "HANG": f"{kind} 3"},
                stdout=stderr,
                stderr=stderr,
            )
        try:
            while time.monotonic() - began < SECONDS and process.poll() is None:
                if "nothing has moved" in log.read_text():
                    break
                time.sleep(0.05)
            seconds = time.monotonic() - began
            lines = [
                line for line in log.read_text().splitlines() if line.startswith("stepladder: ")
            ]
        finally:
            with suppress(
                psutil.NoSuchProcess
            ):  # a loader's worker that sleeps would not notice the launcher's end
                launcher = psutil.Process(process.pid)
                for child in [*launcher.children(recursive=True), launcher]:
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
            process.wait()
    sentences = [
        line for line in lines if re.search("nothing has moved| brings | was aborted ", line)
    ]
    sentence = (
        re.sub(r"^stepladder: (nothing has moved for \d+ s: )?", "", sentences[0])
        if sentences
        else "nothing"
    )
    return re.sub(r" \(pid \d+\)", "", sentence), seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--explain-after", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument(
        "--write", action="store_true", help="save the report in benchmarks/results"
    )
    args = parser.parse_args()
    report = Report(
        "hangs.py", "Planted hangs, and what is said of them", ["torch", "stepladder"], "2"
    )
    rows = []
    right = 0
    for where, command, faults in (
        ("job", in_a_job, IN_A_JOB),
        ("script", in_a_script, IN_A_SCRIPT),
    ):
        for kind, (planted, pattern) in faults.items():
            sentence, seconds = hang(command(kind), kind, args.explain_after)
            named = re.search(pattern, sentence) is not None
            right += named
            cell = sentence.replace("|", "\\|")
            rows.append([planted, where, cell, "yes" if named else "NO", f"{seconds:.1f}"])
    verdict = f"- {'PASS' if right == len(rows) else 'FAIL'}: {right} of {len(rows)} planted hangs named (bar: all)"
    waited = (
        f"Seconds are from the command on, whatever else the machine did; {args.explain_after:g} of them are"
        " `--explain-after`."
    )
    report.finish(
        [table(["planted", "in a", "said", "right", "s"], rows), waited, verdict], args.write
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

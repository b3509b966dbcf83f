"""python benchmarks/check_preempt.py [--write] [NAME ...]: does `check --preempt` name what a script
loses that a cluster interrupts?

The scripts are those of tests/preemptions.py: one that saves on the signal, the same with a mistake,
and twins without one. With `--lab` a real Slurm on this machine preempts some of them twice, at the
same steps, for a more urgent job: are the numbers of `check` those of the cluster?
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Report, table

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

sys.path.insert(0, str(REPOSITORY / "tests" / "slurm"))

from preemptions import KINDS, write_script  # noqa: E402
from processes import wait_until  # noqa: E402

MOMENTS = 7
ON_SLURM = [
    "right",
    "no handler",
    "ends without saving",
    "position in the epoch is not saved",
    "goes on with the next epoch",
]
UNBROKEN = [f"{epoch} {number}" for epoch in range(4) for number in range(10)]
STEP = "            optimizer.step()\n"
# Rank 0 notes each step. In step 20 of the first start, and step 2 of the second, it waits for the
# signal of the cluster, as the probe of `check` does.
PAUSES = """
import select
steps = 0
if os.environ["RANK"] == "0":
    with open("steps.txt", "a") as file:
        file.write("start\\n")

def pause(step):
    global steps
    if os.environ["RANK"] != "0":
        return
    steps += 1
    with open("steps.txt", "a") as file:
        file.write(f"{step}\\n")
    with open("steps.txt") as file:
        starts = file.read().count("start")
    if steps == {1: 20, 2: 2}.get(starts):
        read, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written)
        open(f"paused-{starts}", "w").close()
        select.select([read], [], [], 120)
"""


def rehearse(kind: str, moments: int = MOMENTS) -> tuple[list[str], list[str], float]:
    """Return the evidence of findings, the lines of the rehearsals, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        write_script(kind, Path(folder))
        command = [sys.executable, "-m", "stepladder", "check", "--json", "--preempt", moments]
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
    held = report["held"]
    first = next(i for i, line in enumerate(held) if line.startswith("preemption: "))
    lines = [line.removeprefix("preemption: ") for line in held[first : first + 1 + moments]]
    return seen, lines, seconds


def preempt_on_slurm(jobs: Any, kind: str) -> list[int]:
    """Have Slurm preempt a script twice, and return the steps lost in the second and third start.

    Args:
        jobs: Submits to the cluster of tests/slurm.
        kind: The script.
    """
    script = write_script(kind, jobs.folder)
    text = script.read_text().replace(STEP, STEP + '            pause(f"{epoch} {number}")\n')
    imports, main = text.split("stop = False\n")
    script.write_text(f"{imports}{PAUSES}\nstop = False\n{main}")
    job = jobs.submit("--nodes", 2, "--resume-from", "*.pt", "--", script.name)
    flags = "--nodes=4", "--exclusive", "--partition=urgent", "--output=/dev/null"
    for start in (1, 2):
        wait_until((jobs.folder / f"paused-{start}").exists, lambda: jobs.typed("logs", job))
        urgent = jobs.lab.slurm("sbatch", "--parsable", *flags, "--wrap", "true", cwd=jobs.folder)
        jobs.lab.await_job(urgent.strip(), "COMPLETED")
        jobs.is_requeued(job, start)
    jobs.lab.await_job(job, "COMPLETED", "FAILED")
    starts = [
        part.split("\n")[1:-1] for part in (jobs.folder / "steps.txt").read_text().split("start")
    ]
    done = 0
    lost_steps = []
    for index, steps in enumerate(starts[1:4]):
        begin = UNBROKEN.index(steps[0]) if steps else done
        if index:
            lost_steps.append(done - begin)
        done = begin + len(steps)
    return lost_steps


def compare_with_slurm(kinds: list[str]) -> tuple[str, str]:
    """Return a sentence and a table: the steps lost on Slurm, and what `check` says of them."""
    from test_submit_lab import Jobs

    from labs import lab_up

    rows = []
    equal = 0
    with lab_up("--nodes", 4) as lab:
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                real = preempt_on_slurm(Jobs(lab, Path(folder)), kind)
            said = rehearse(kind, moments=1)[1][1].partition(": ")[2]
            numbers = [
                int(count) * (-1 if "out" in what else 1)
                for count, what in re.findall(r"(\d+) steps? (lost|left out)", said)
            ]
            equal += real == numbers
            rows.append([kind, str(real), said])
            print(*rows[-1], sep=" | ", flush=True)
    header = ["script", "steps lost in the second and third start on Slurm", "check --preempt"]
    summary = f"The same numbers on Slurm and in `check` for {equal} of {len(rows)} scripts."
    return summary, table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--lab", action="store_true", help="compare with preemptions on Slurm")
    flags = parser.parse_args()
    if flags.lab:
        title = "Steps lost in preemptions on Slurm, and what check --preempt says of them"
        report = Report(
            Path(__file__).name, title, ["torch", "stepladder"], "2", "check_preempt_slurm"
        )
        report.finish(list(compare_with_slurm(flags.names or ON_SLURM)), flags.write)
        return
    title = "What check --preempt says of scripts that lose steps"
    report = Report(Path(__file__).name, title, ["torch", "stepladder"], "2")
    rows = []
    right = 0
    for kind in flags.names or KINDS:
        seen, lines, seconds = rehearse(kind)
        is_clean = kind.startswith("right")
        right += bool(seen) != is_clean
        said = "silent" if not seen else seen[0]
        rows.append([kind, "silent" if is_clean else "named", said, lines[0], f"{seconds:.0f}"])
        print(*rows[-1], sep=" | ", flush=True)
    header = ["script", "expected", "said", "lost", "seconds"]
    summary = f"{right} of {len(rows)} as expected, with `--preempt {MOMENTS}`."
    report.finish([summary, table(header, rows)], flags.write)


if __name__ == "__main__":
    main()

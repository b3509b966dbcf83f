"""python benchmarks/order.py [--write]

What does it cost to know which samples a step reads? For data sets of 10^6 to 10^9 samples: the
time to the first indices, the memory they take, and the time per 128 indices afterwards, with the
order that is computed where it is read (`feistel`) and with the one that is drawn whole (`sort`, up
to 10^8). Each row is from processes of its own. How well both shuffle is tested in
tests/core/test_feistel.py."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from report import Report, table

SIZES = [10**6, 10**7, 10**8, 10**9]
MOST_SORTED = 10**8  # 3 GB
TRIES = 5
MEASURE = """
import json, resource, sys, time
import numpy as np
from stepladder.core.plan import Plan
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start = peak(), time.perf_counter()
plan = Plan(int(sys.argv[1]), 128, 128, shuffle=sys.argv[2])
plan.indices(0, plan.share(0, 0, 1)[0])
first = time.perf_counter() - start
span, steps = plan.share(0, 0, 1)[0], plan.steps_per_epoch - 1
start = time.perf_counter()
for step in range(0, steps, max(1, steps // 2000)):
    plan.indices(step, span)
each = (time.perf_counter() - start) / len(range(0, steps, max(1, steps // 2000)))
print(json.dumps([first * 1e3, peak() - before, each * 1e6]))
"""
BARS = {"ms to the first indices": 5.0, "MB in the process": 50.0, "us per 128 indices": 50.0}


def measured(size: int, shuffle: str) -> list[float]:
    """Medians: milliseconds, megabytes, microseconds."""
    argv = [sys.executable, "-c", MEASURE, str(size), shuffle]
    tries = 1 if shuffle == "sort" and size == MOST_SORTED else TRIES
    values = [
        json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
        for _ in range(tries)
    ]
    return [statistics.median(column) for column in zip(*values, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    report = Report("order.py", "The order of an epoch", ["numpy", "stepladder"], "1")
    rows = []
    lines = []
    for size in SIZES:
        for shuffle in ("feistel", "sort") if size <= MOST_SORTED else ("feistel",):
            values = measured(size, shuffle)
            rows.append([f"{shuffle}, {size:,} samples", *(f"{value:,.2f}" for value in values)])
    for (name, limit), value in zip(BARS.items(), values, strict=True):
        verdict = "PASS" if value < limit else "FAIL"
        lines.append(f"- {verdict}: {SIZES[-1]:,} samples: {value:.2f} {name} (bar: < {limit:g})")
    report.finish([table(["order", *BARS], rows), "\n".join(lines)], args.write)


if __name__ == "__main__":
    main()

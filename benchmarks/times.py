"""python benchmarks/times.py --data-dir DIR [--device cpu] [--nproc 1,2,4] [--write]

What is one more process worth on MNIST, and where does a step go?

Both networks on each number of processes with `stepladder scale`, strong scaling: the global batch
stays. Then three steps of the small one on two processes under `stepladder profile`, as it prints
them."""

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

from report import Report, table

IMAGES = 60_000
GLOBAL_BATCH = 256
STEPS_PER_EPOCH = -(-IMAGES // GLOBAL_BATCH)
HEAD = [
    "network",
    "processes",
    "ms per step",
    "images/s",
    "seconds per epoch",
    "speed-up",
    "efficiency",
    "most lost to",
]
WIDTH = {"COLUMNS": "130"}  # of what is printed


def stepladder(*args: str, folder: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stepladder", *args],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | WIDTH,
    )
    if done.returncode:
        raise SystemExit(f"stepladder {' '.join(args)} ended with {done.returncode}")
    return done.stdout


def row(net: str, size: dict[str, Any]) -> list[str]:
    seconds = size["seconds_per_step"]
    largest = max(size["lost"], key=size["lost"].__getitem__)
    share = size["lost"][largest] / seconds
    loss = f"{largest}, {share:.0%} of a step" if share > 0.01 else ""
    return [
        net, str(size["nproc"]), f"{seconds * 1e3:.1f}", f"{size['samples_per_second']:,.0f}",
        f"{seconds * STEPS_PER_EPOCH:.1f}", f"{size['speedup']:.2f}", f"{size['efficiency']:.0%}", loss,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nproc", default="1,2,4")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    report = Report("times.py", "MNIST on several processes", ["torch", "stepladder"], "all")
    job = ["mnist", "--data-dir", str(args.data_dir.absolute()), "--device", args.device]
    rows = []
    for net in ("small", "classic"):
        result = stepladder("scale", *job, "--net", net, "--nproc", args.nproc, "--json")
        rows += [row(net, size) for size in json.loads(result.splitlines()[-1])["sizes"]]
    result = stepladder(
        "scale",
        *job,
        "--net",
        "classic",
        "--nproc",
        "1",
        "--global-batch",
        str(GLOBAL_BATCH // 2),
        "--json",
    )
    (half,) = json.loads(result.splitlines()[-1])["sizes"]
    with tempfile.TemporaryDirectory(prefix="times-") as folder:
        profile = stepladder(
            "profile", *job, "--nproc", "2", "--out", "profile", folder=Path(folder)
        )
    profile = re.sub(r" +$", "", profile, flags=re.MULTILINE).strip()
    text = (
        f"Every process has one thread. The global batch is {GLOBAL_BATCH} images, so an epoch has"
        f" {STEPS_PER_EPOCH} steps on any number of processes. More processes than cores share them."
        f" With {GLOBAL_BATCH // 2} images a step, one process takes {half['samples_per_second']:,.0f} images/s"
        " of the classic network: more than with all of them, so two can be more than twice as fast."
    )
    shown = f"## Where a step goes: `stepladder profile mnist --nproc 2`\n\n```text\n{profile}\n```"
    report.finish([table(HEAD, rows), text, shown], args.write)


if __name__ == "__main__":
    main()

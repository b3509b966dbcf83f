"""python benchmarks/exchange_scripts.py COPIES [--starts N] [--only NAME ...] [--torchrun] [--write]

Do published scripts train as on gloo when they exchange through shared memory, and how much faster?

COPIES holds a folder OWNER+NAME for each repository, at the commit that exchange_scripts.toml names. Each
script runs under `stepladder run --nproc 2`, with and without `--exchange gloo` in turn, one thread a
process; with --torchrun by torchrun, on the back ends `stepladder` and `gloo`. The loss of each backward
pass on each rank is compared by its bits, or by its value where they differ. Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from report import Report, table

FOLDER = Path(__file__).parent
RANK = FOLDER / "exchange_scripts_rank.py"
RANKS = 2
MEMORY, GLOO = "shared memory", "gloo"
FLAGS: dict[str, list[str]] = {MEMORY: [], GLOO: ["--exchange", "gloo"]}
BACKENDS = {MEMORY: "stepladder", GLOO: "gloo"}  # under torchrun
STEPLADDER = "stepladder", "run", "--nproc", str(RANKS)
TORCHRUN = "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)
# Without the second one, each rank of Accelerate trains alone on a machine without a GPU.
VARIABLES = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
NOTE = (
    "A difference of nan: FSDP2's example leaves the weights of its norms as the memory has them"
    " (`to_empty`), so its losses may be nan."
)
HEADER = [
    "script",
    "commit",
    "losses of both ranks",
    "largest difference",
    "seconds between the first and last backward pass on gloo (median)",
    "in shared memory (median)",
    "times faster (median)",
    "(least)",
]


@dataclass(frozen=True)
class Training:
    """What several starts of one script have given.

    Args:
        losses: The losses of all ranks in the first start, by the way of exchange.
        seconds: The seconds from the first backward pass to the last one of each start.
        faults: Why starts have failed.
    """

    losses: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in FLAGS})
    faults: list[str] = field(default_factory=list)


def copy_script(entry: dict[str, Any], copies: Path, scratch: Path) -> Path:
    """Copy the folder of a script and edit the script; return the folder."""
    folder = scratch / "script"
    script = folder / shlex.split(entry["command"])[0]
    if "folder" in entry:
        shutil.copytree(copies / entry["repository"].replace("/", "+") / entry["folder"], folder)
    else:  # one of ours, for a library without a small script
        folder.mkdir()
        shutil.copy(FOLDER / script.name, folder)
    text = script.read_text()
    for old, new in entry.get("edits", []):
        if old not in text:
            sys.exit(f"{entry['repository']}: {script.name} has no {old!r}")
        text = text.replace(old, new)
    script.write_text(text)
    data = folder / "data" / "random"
    data.mkdir(parents=True)
    for name in ("train", "val"):
        tokens = np.random.default_rng(0).integers(0, 64, 20_000)
        tokens.astype(np.uint16).tofile(data / f"{name}.bin")
    return folder


def train(
    entry: dict[str, Any], copies: Path, way: str, training: Training, by_torchrun: bool
) -> None:
    """Start the ranks of a script once."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = copy_script(entry, copies, scratch)
        launcher = TORCHRUN if by_torchrun else (*STEPLADDER, *FLAGS[way])
        backend = {"BACKEND": BACKENDS[way]} if by_torchrun else {}
        script = str(RANK), str(scratch), *shlex.split(entry["command"])
        done = subprocess.run(
            [sys.executable, "-m", *launcher, *script],
            cwd=folder,
            env=os.environ | VARIABLES | backend,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            training.faults.append(f"- {entry['name']}, {way}: {done.stderr[-2000:]}")
            return
        results = [json.loads((scratch / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    training.losses.setdefault(way, [loss for result in results for loss in result["losses"]])
    training.seconds[way].append(max(result["seconds"] for result in results))


def compare_losses(training: Training) -> tuple[str, str]:
    """Return how many losses there are, and how far they differ."""
    ours, theirs = training.losses[MEMORY], training.losses[GLOO]
    if len(ours) != len(theirs):
        return f"{len(ours)} and {len(theirs)}", ""
    difference = max(
        (abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)), default=0.0
    )
    return str(len(ours)), "the same bits" if ours == theirs else f"{difference:.1e}"


def make_row(entry: dict[str, Any], training: Training) -> list[str]:
    """Return a script's row of the table."""
    name = f"{entry['repository']}: `{entry.get('folder', '.')}/{shlex.split(entry['command'])[0]}`"
    columns = [name.replace("./", ""), entry["commit"][:8]]
    if training.faults:
        return [*columns, "did not run", "", "", "", "", ""]
    gloo, memory = training.seconds[GLOO], training.seconds[MEMORY]
    gains = [a / b for a, b in zip(gloo, memory, strict=True)]
    numbers = [
        f"{value:.2f}" for value in (median(gloo), median(memory), median(gains), min(gains))
    ]
    return [*columns, *compare_losses(training), *numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("copies", type=Path)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--torchrun", action="store_true", help="in place of stepladder run")
    parser.add_argument("--write", action="store_true", help="save the report")
    args = parser.parse_args()
    entries = tomllib.loads((FOLDER / "exchange_scripts.toml").read_text())["script"]
    report = Report(
        "exchange_scripts.py",
        "Published scripts in shared memory",
        ["torch", "stepladder", "lightning", "accelerate", "transformers"],
        "all",
    )
    rows = []
    faults = []
    for entry in entries:
        if args.only and entry["name"] not in args.only:
            continue
        training = Training()
        for number in range(args.starts):
            for way in list(FLAGS)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                train(entry, args.copies.absolute(), way, training, args.torchrun)
                seconds = time.perf_counter() - began
                print(f"{entry['name']}, {way}: {seconds:.1f} s", file=sys.stderr, flush=True)
        rows.append(make_row(entry, training))
        faults += training.faults
    report.finish([table(HEADER, rows), NOTE, *faults], args.write)


if __name__ == "__main__":
    main()

"""Does `--replay-every` find what computes wrongly, name it, and never a sound rank? What does it
cost?

    python benchmarks/recompute_check.py --data-dir data/mnist [--steps 10000] [--part PART] [--write]

Plants faults with the job of tests/jobs/corrupts.py on each rank of 2, 3 and 4 processes, trains
sound jobs with a replay in each step, and measures a step with and without one in the same ranks,
in turn. Takes about half an hour."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from report import RESULTS, Report, table

import stepladder

SOURCE = str(Path(stepladder.__file__).parent.parent)
JOB = str(Path(__file__).parent.parent / "tests" / "jobs" / "corrupts.py")
FLAGS = ["--sync", "exact", "--json", "--replay-every"]
SMALL = ["--microbatch", "2", "--max-restarts", "0"]
EARLIER = "The command and the load above are those of the part that was measured last."
TITLES = {"faults": "Planted", "sound": "Sound", "cost": "Cost"}
RANKS = 2, 3, 4
# from which step on there is a fault, and how many replays a run has to find it
STEP = 6
MOST = 60
KINDS = {
    "product": "a matrix product of forward",
    "backward": "a matrix product of backward",
    "weight": "a weight in memory",
    "batch": "a number of the batch in memory",
    "gradient": "a microbatch's gradient, before it is sent",
}
MODES = {"once": "once", "sometimes": "every third pass", "always": "always"}
SOUND: dict[str, tuple[int, list[str]]] = {  # processes, words
    "mlp": (2, ["mlp", "--microbatch", "16", "--epochs", "400"]),
    "batch norm and dropout": (3, [JOB, "--microbatch", "2", "--epochs", "10000"]),
    "MNIST, the small net": (2, ["mnist", "--microbatch", "16", "--epochs", "100"]),
}


def trained(folder: Path, argv: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "stepladder", "train", *argv, "--run-dir", "run"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, **env},
        capture_output=True,
        text=True,
        check=False,
    )


# -- planted faults --------------------------------------------------------------------------------


def find_reported_ranks(plant: str, nproc: int) -> tuple[str, int]:
    """Whom the run's last word names, "rank 1", "ranks 0, 1", or "", and after how many replays."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [JOB, *SMALL, *FLAGS, "1", "--nproc", str(nproc), "--steps", str(STEP + MOST - 1)]
        done = trained(Path(folder), argv, {"PLANT": plant})
    match = re.search(
        r"^stepladder: (ranks? [\d, ]+) on .* (?:is wrong|differ) at step (\d+)",
        done.stderr,
        re.MULTILINE,
    )
    if bool(match) == (done.returncode == 0):
        raise SystemExit(
            f"{plant} on {nproc} processes ended with {done.returncode}:\n{done.stderr}"
        )
    return (match[1], int(match[2]) - STEP + 1) if match else ("", MOST)


def planted(kind: str, mode: str, nproc: int) -> tuple[str, bool, int]:
    """Plant faults on each rank.

    Returns:
        How many were found and named, whether all were, and the most replays that it took.
    """
    named = both = longest = 0
    for rank in range(nproc):
        named_as, replays = find_reported_ranks(f"{kind} {mode} {rank} {STEP}", nproc)
        longest = max(longest, replays)
        named += named_as == f"rank {rank}"
        both += named_as == "ranks 0, 1" and nproc == 2
    text = f"{named + both} of {nproc}: " + ", ".join(
        filter(None, [f"{named} named" if named else "", f"{both} as one of two" if both else ""])
    )
    return text, named + both == nproc, longest


def faults() -> Iterator[str]:
    rows = []
    right = []
    waits = dict.fromkeys(MODES, 0)
    for kind, description in KINDS.items():
        for mode, often in MODES.items():
            ends = [planted(kind, mode, nproc) for nproc in RANKS]
            rows.append([f"{description}, {often}", *(text for text, *_ in ends)])
            right += [good for _, good, _ in ends]
            waits[mode] = max(waits[mode], *(replays for *_, replays in ends))
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    yield "## Planted faults: found, and the rank named\n\n" + table(
        ["a bit is wrong in", *(f"{n} processes" for n in RANKS)], rows
    )
    missed = sum(
        find_reported_ranks(f"product missed {rank} {STEP}", 3)[0] == "" for rank in range(3)
    )
    sentence = ", ".join(f"{waits[mode]} replays ({often})" for mode, often in MODES.items())
    yield (
        "Each fault was planted on each rank, in a run of its own, with a replay in each step. What strikes once"
        f" does so in a microbatch that is replayed. It took at most: {sentence}. Two processes that each repeat their"
        " own result cannot tell which is wrong: the message names both, and says so. What strikes once, but in a"
        f" microbatch that is not replayed, is not seen: {missed} of 3 runs with such a fault went through."
    )
    passed = "PASS" if all(right) else "FAIL"
    yield f"- {passed}: {sum(right)} of {len(right)} cells: all faults found, no sound rank blamed (bar: all)"


# -- sound runs ------------------------------------------------------------------------------------


def sound(steps: int, data_dir: str) -> Iterator[str]:
    rows = []
    alarms = 0
    for name, (nproc, argv) in SOUND.items():
        data = ["--data-dir", data_dir] if "mnist" in argv else []
        with tempfile.TemporaryDirectory() as folder:
            flags = [
                *data,
                "--steps",
                str(steps),
                *FLAGS,
                "1",
                "--nproc",
                str(nproc),
                "--max-restarts",
                "0",
            ]
            done = trained(Path(folder), [*argv, *flags], {"PLANT": "none never 0 0"})
        alarm = re.findall(
            r"^stepladder: .* (?:is wrong|differ) at step.*$", done.stderr, re.MULTILINE
        )
        if done.returncode and not alarm:
            raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr}")
        alarms += len(alarm)
        rows.append([name, str(nproc), str(steps), str(steps * nproc), str(len(alarm))])
        print(*rows[-1], *alarm, sep=" | ", file=sys.stderr, flush=True)
    yield "## Sound runs\n\n" + table(
        ["job", "processes", "steps", "microbatches computed again", "alarms"], rows
    )
    yield f"- {'FAIL' if alarms else 'PASS'}: {alarms} alarms in {steps * len(rows)} steps (bar: none)"


# -- cost ------------------------------------------------------------------------------------------

BLOCK = 10  # steps; with and without a replay take turns
NETS = "mlp", "small", "classic"
EVERY = 10, 100, 1000


def rank_work(net: str, data_dir: str, folder: str, rounds: int) -> int:
    """Time each block's steps on this rank; rank 0 writes the seconds to a file."""
    import torch

    from stepladder import World, process_group
    from stepladder.core.settings import Settings
    from stepladder.rank.preemption import StopSignals
    from stepladder.recipes import mlp, mnist
    from stepladder.train.determinism import deterministic
    from stepladder.train.job import Recipe
    from stepladder.train.opening import open_session
    from stepladder.train.run_spec import RunSpec
    from stepladder.train.trainer import TrainingLoop

    world = World.detect()
    with process_group(world, torch.device("cpu")) as comm, ExitStack() as stack:
        loops = []
        for every in (None, 1):
            config: Any = {} if net == "mlp" else {"net": net, "data_dir": data_dir}
            job = mnist.build(mnist.Config(**config)) if config else mlp.build(mlp.Config())
            options: Any = {
                "sync": "exact",
                "replay_every": every,
                "threads": 1,
                "epochs": 20,
                "progress": False,
            }
            options |= {"global_batch": 128, "microbatch": 16, "snapshot_every": 10**6}
            settings = Settings(Path(folder) / str(every), **options)
            session = stack.enter_context(
                open_session(RunSpec.make(job, settings, Recipe(net), comm), comm)
            )
            loops.append(stack.enter_context(TrainingLoop(session, StopSignals())))
        stack.enter_context(deterministic(True, comm.device))
        seconds: list[list[float]] = [[], []]
        for number in range(rounds + 1):  # the first block is a warm-up
            for which in (0, 1) if number % 2 else (1, 0):
                comm.gather_bytes(b"x")
                start = time.perf_counter()
                for _ in range(BLOCK):
                    loops[which].step()
                comm.gather_bytes(b"x")
                seconds[which].append((time.perf_counter() - start) / BLOCK)
        if world.is_first:
            Path(folder, "seconds.json").write_text(json.dumps([row[1:] for row in seconds]))
    return 0


def measured(net: str, data_dir: str, ranks: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds per step of each block, without a replay and with one."""
    from stepladder.launcher.local.local_group import LocalGroup
    from stepladder.launcher.local.supervisor import run_local

    with tempfile.TemporaryDirectory() as folder:
        code = run_local(
            LocalGroup(partial(rank_work, net, data_dir, folder, rounds), threads=1), ranks
        )
        if code:
            sys.exit(code)
        plain, replayed = json.loads(Path(folder, "seconds.json").read_text())
        return plain, replayed


def cost(data_dir: str, rounds: int) -> Iterator[str]:
    rows = []
    for net in NETS:
        plain, replayed = measured(net, data_dir, 2, rounds)
        more = median(b - a for a, b in zip(plain, replayed, strict=True))
        shares = [f"{100 * more / every / median(plain):.2f} %" for every in EVERY]
        rows.append([net, f"{1e3 * median(plain):.2f}", f"{1e3 * more:.2f}", *shares])
    head = ["net", "ms/step", "ms more, replayed", *(f"share at N = {every}" for every in EVERY)]
    yield "## Cost on 2 processes, 8 microbatches of 16\n\n" + table(head, rows)
    yield (
        "A replay is one forward and backward of a microbatch on each rank, at the same time, two hashes of the"
        " gradient, and one collective of 32 bytes per rank. The share is what it adds to the time of N steps."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, type=lambda text: str(Path(text).resolve()))
    parser.add_argument("--steps", type=int, default=10_000, help="of each sound run")
    parser.add_argument(
        "--rounds", type=int, default=20, help="blocks of steps, to measure the cost"
    )
    parser.add_argument(
        "--part",
        choices=["faults", "sound", "cost"],
        help="only this one; the sections of the others stay",
    )
    parser.add_argument(
        "--write", action="store_true", help="save the report in benchmarks/results"
    )
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = Report(
        "recompute_check.py",
        "Wrong results: found, named, and at what cost",
        ["torch", "stepladder"],
        "2",
    )
    parts = {
        "faults": faults,
        "sound": partial(sound, args.steps, args.data_dir),
        "cost": partial(cost, args.data_dir, args.rounds),
    }
    earlier = sections_of(RESULTS / "recompute_check.md") if args.part else {}
    chosen = {name: args.part in (None, name) for name in parts}
    texts = [
        "\n\n".join(part()) if chosen[name] else earlier.get(TITLES[name], "")
        for name, part in parts.items()
    ]
    if earlier:
        texts.append(EARLIER)
    report.finish([text for text in texts if text], args.write)
    return 0


def sections_of(path: Path) -> dict[str, str]:
    """Return the sections of an earlier report by the first word of their headings.

    What is not measured anew stays.
    """
    texts = path.read_text(encoding="utf-8").strip().split("\n\n## ")[1:] if path.exists() else []
    return {text.split()[0]: f"## {text}".removesuffix(f"\n\n{EARLIER}") for text in texts}


if __name__ == "__main__":
    sys.exit(main())

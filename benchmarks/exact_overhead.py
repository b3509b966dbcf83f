"""python benchmarks/exact_overhead.py --data-dir data/mnist [--write]

What does `--sync exact` cost per step against `--sync ddp`, and how much faster are two processes
than one?

Both modes are set up in the same ranks and take turns, block by block, on MNIST with a global batch
of 128 in microbatches of 16, one thread per process. ddp is measured as it is fastest (one pass per
process) and with the same microbatches. The speed-up compares blocks on one process with blocks on
two that follow them directly. How much the machine itself allows is measured too: two processes
that each train half of the batch, alone."""

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from report import Report, bar, table

BLOCK = 10  # steps; short, so that a drift of the machine's speed meets all modes alike
MODES = {
    "ddp, one pass": {"sync": "ddp"},
    "ddp, microbatches of 16": {"sync": "ddp", "microbatch": 16},
    "exact, microbatches of 16": {"sync": "exact", "microbatch": 16},
    "the machine: no communication": {"sync": "ddp", "microbatch": 16},
}

MACHINE = list(MODES)[-1]
TRIED = "views cut once per bucket, hooks in the last microbatch only, buckets in shared memory, microbatches by vmap"


def rank_work(net: str, data_dir: str, folder: str, rounds: int) -> int:
    """Time each mode's blocks of steps on this rank; rank 0 writes the seconds per step to a file."""
    import json

    import torch

    from stepladder import World, process_group
    from stepladder.core.settings import Settings
    from stepladder.rank.preemption import StopSignals
    from stepladder.recipes.mnist import Config, build
    from stepladder.train.comm import Comm
    from stepladder.train.determinism import deterministic
    from stepladder.train.job import Recipe
    from stepladder.train.opening import open_session
    from stepladder.train.run_spec import RunSpec
    from stepladder.train.trainer import TrainingLoop

    world = World.detect()
    with process_group(world, torch.device("cpu")) as comm, ExitStack() as stack:
        loops = {}
        for number, (name, mode) in enumerate(MODES.items()):
            alone = name == MACHINE
            batch = 128 // world.world_size if alone else 128
            job = build(Config(net=net, data_dir=data_dir, global_batch=batch))  # type: ignore[arg-type]
            run_dir = Path(folder) / (f"{number}-{world.rank}" if alone else str(number))
            settings: Any = {"run_dir": run_dir, "epochs": 2, "global_batch": batch, "threads": 1}
            settings = Settings(**settings, progress=False, snapshot_every=10**6, **mode)
            rank_comm = Comm(World(), comm.device) if alone else comm
            session = stack.enter_context(
                open_session(RunSpec.make(job, settings, Recipe(name), rank_comm), rank_comm)
            )
            loops[name] = stack.enter_context(TrainingLoop(session, StopSignals()))
        seconds: dict[str, list[float]] = {name: [] for name in MODES}
        for number in range(rounds + 1):  # the first block is a warm-up
            for name in list(MODES)[:: 1 if number % 2 else -1]:
                with deterministic("exact" in name, comm.device):
                    comm.gather_bytes(b"x")
                    start = time.perf_counter()
                    for _ in range(BLOCK):
                        loops[name].step()
                    comm.gather_bytes(b"x")
                    seconds[name].append((time.perf_counter() - start) / BLOCK)
        if world.is_first:
            Path(folder, "seconds.json").write_text(
                json.dumps({n: s[1:] for n, s in seconds.items()})
            )
    return 0


def measure(net: str, data_dir: str, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each mode and block, on `ranks` processes."""
    import json

    from stepladder.launcher.local.local_group import LocalGroup
    from stepladder.launcher.local.supervisor import run_local

    with tempfile.TemporaryDirectory() as folder:
        code = run_local(
            LocalGroup(partial(rank_work, net, data_dir, folder, rounds), threads=1), ranks
        )
        if code:
            sys.exit(code)
        return json.loads(Path(folder, "seconds.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True, type=lambda text: str(Path(text).resolve()))
    parser.add_argument("--rounds", type=int, default=6, help="blocks per mode and visit")
    parser.add_argument(
        "--visits", type=int, default=3, help="how often 1 and 2 processes take turns"
    )
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = Report(
        "exact_overhead.py", "Cost of exact mode", ["torch", "stepladder"], cores_used="2"
    )
    sections = []
    bars = []
    for net in ("classic", "small"):
        times: dict[int, dict[str, list[float]]] = {
            1: {n: [] for n in MODES},
            2: {n: [] for n in MODES},
        }
        speedups: dict[str, list[float]] = {name: [] for name in MODES}
        for _ in range(args.visits):
            visit = {ranks: measure(net, args.data_dir, ranks, args.rounds) for ranks in (1, 2)}
            for name in MODES:
                speedups[name].append(median(visit[1][name]) / median(visit[2][name]))
                for ranks in (1, 2):
                    times[ranks][name] += visit[ranks][name]
        fastest, same, exact, machine = MODES
        rows = []
        for name in MODES:
            ratio = [
                median(a / b for a, b in zip(times[r][name], times[r][fastest], strict=True))
                for r in (1, 2)
            ]
            cost = [f"{1e3 * median(times[r][name]):.1f}" for r in (1, 2)]
            rows.append(
                [
                    name,
                    cost[0],
                    f"{ratio[0]:.2f}",
                    cost[1],
                    f"{ratio[1]:.2f}",
                    f"{median(speedups[name]):.2f}",
                ]
            )
        head = ["mode", "ms/step, 1 process", "to ddp", "ms/step, 2", "to ddp", "speed-up"]
        sections.append(f"## --net {net}\n\n" + table(head, rows))
        to_same, to_fastest = (
            median(a / b for a, b in zip(times[2][exact], times[2][baseline], strict=True))
            for baseline in (same, fastest)
        )
        bars.append(
            bar(f"{net} net on 2 processes, exact against {same}", to_same, 1.05, True, TRIED)
        )
        alone = median(a / b for a, b in zip(times[2][machine], times[2][same], strict=True))
        bars.append(f"- the same passes on 2 processes that never communicate: {alone:.2f}x")
        bars.append(f"- {net} net on 2 processes, exact against {fastest}: {to_fastest:.2f}x")
        part = median(e / m for e, m in zip(speedups[exact], speedups[machine], strict=True))
        alone = "exact's speed-up, to that of two processes that never communicate"
        bars.append(bar(f"{net} net, {alone}", part, 0.95, at_most=False))
    report.finish([*sections, "\n".join(bars)], args.write)


if __name__ == "__main__":
    main()

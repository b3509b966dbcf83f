"""python benchmarks/shard_memory.py [--write] [--width 832]

What does a process hold of a large model with AdamW, on 1, 2 and 4 processes, with and without `--shard
optimizer`?

The model is recipe gpt's with 12 layers, 832 wide: about 105 million weights. Beside it stands the same model
in a loop written by hand, with torch's DistributedDataParallel and its ZeroRedundancyOptimizer, which shards by
whole weights. Each trains the same few steps of four rows of 64 tokens on one thread per process. With --sync
exact a row is a microbatch; the others take a process's share in one pass.

State: bytes of the optimizer's tensors, of the process that has most. Peak: how much more main memory the
process had at its highest, in these steps, than before the model was built; so it holds gradients, activations,
what is sent, and with --sync exact the partial sums. Time per step: the median, of the slowest process; all
processes share this machine's cores. The weights after the last step are compared by their SHA-256.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from report import Report, bar, cores, table

SIZES = (1, 2, 4)
ROWS, STEPS = 4, 4
MODES = ("ddp", "ddp, --shard optimizer", "exact", "exact, --shard optimizer", "ZeroRedundancyOptimizer by hand")
WHOLE = {MODES[1]: MODES[0], MODES[3]: MODES[2]}


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}")


def state_bytes(optimizer: Any) -> int:
    states = [state for state in optimizer.state.values() if hasattr(state, "values")]
    return sum(value.nbytes for state in states for value in state.values() if hasattr(value, "nbytes"))


def work(mode: str, folder: str, width: int) -> dict[str, Any]:
    """On each rank: what the steps took."""
    import torch

    torch.set_num_threads(1)
    from stepladder import World, process_group
    from stepladder.recipes.gpt import Config

    world = World.detect()
    config = Config(layers=12, heads=13, width=width, ngrams=2, global_batch=ROWS, data_dir=folder)
    with process_group(world, torch.device("cpu")) as comm:
        comm.gather_bytes(b"x")
        Path("/proc/self/clear_refs").write_text("5")  # the highest from here on
        before, by_hand = resident("VmRSS"), mode == MODES[-1]
        took = steps_by_hand(config, world) if by_hand else steps_of(mode, config, comm, folder)
        took["peak"] -= before
    return took


def steps_of(mode: str, config: Any, comm: Any, folder: str) -> dict[str, Any]:
    from stepladder.core.settings import Settings
    from stepladder.rank.preemption import StopSignals
    from stepladder.recipes.gpt import build
    from stepladder.storage.snapshot import weights_sha256
    from stepladder.train.determinism import deterministic
    from stepladder.train.job import Recipe
    from stepladder.train.session import Session
    from stepladder.train.spec import RunSpec
    from stepladder.train.trainer import Loop

    job, took = build(config), {"state": 0, "peak": 0}
    job.optimizer.register_step_post_hook(lambda optimizer, *_: took.update(state=state_bytes(optimizer)))
    sync, _, shard = mode.partition(", --shard ")
    options: Any = {"microbatch": 1} if sync == "exact" else {}
    options |= {"run_dir": Path(folder, f"{mode}-{comm.world.world_size}"), "global_batch": ROWS, "threads": 1}
    settings = Settings(**options, sync=sync, shard=shard or "none", progress=False, snapshot_every=10**6)
    with Session(RunSpec.of(job, settings, Recipe("gpt"), comm), comm) as session:
        with deterministic(sync == "exact", comm.device), Loop(session, StopSignals()) as loop:
            took["seconds"] = timed(loop.step)
        took |= {"peak": resident("VmHWM"), "weights": weights_sha256(job.model)}
    return took


def timed(step: Any) -> float:
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])  # the first makes the optimizer's state


def steps_by_hand(config: Any, world: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from stepladder.recipes.gpt import build, loss
    from stepladder.storage.snapshot import weights_sha256

    job = build(config)
    ddp = DistributedDataParallel(job.model) if world.world_size > 1 else job.model
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in job.optimizer.param_groups]
    kind: Any = ZeroRedundancyOptimizer if world.world_size > 1 else torch.optim.AdamW
    options = {"optimizer_class": torch.optim.AdamW} if world.world_size > 1 else {}
    optimizer = kind(groups, lr=1e-3, betas=(0.9, 0.99), fused=True, **options)
    mine = range(world.rank, ROWS, world.world_size)

    def step() -> None:
        optimizer.zero_grad()
        total, count = loss(ddp, torch.stack([job.train_data[row] for row in mine]))
        (total / count).backward()
        optimizer.step()

    took: dict[str, Any] = {
        "seconds": timed(step),
        "peak": resident("VmHWM"),
        "weights": weights_sha256(job.model),
    }
    return took | {"state": state_bytes(getattr(optimizer, "optim", optimizer))}


def measured(folder: str, width: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Of each mode and size: the most of all ranks."""
    from stepladder import launch

    found = {}
    for size in SIZES:
        for mode in MODES:
            ranks = launch(work, mode, folder, width, nproc=size)
            most = {name: max(rank[name] for rank in ranks) for name in ("state", "peak", "seconds")}
            found[mode, size] = most | {"weights": {rank["weights"] for rank in ranks}}
            print(f"{mode}, {size}: {most}", file=sys.stderr, flush=True)
    return found


def said(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


def sections(found: dict[tuple[str, int], dict[str, Any]], weights: int) -> list[str]:
    rows = [
        [mode, str(size), f"{one['state'] / 1e6:,.1f}", f"{one['peak'] / 1e6:,.0f}", f"{one['seconds']:.2f}"]
        for (mode, size), one in found.items()
    ]
    bars = []
    for mode, whole in WHOLE.items():
        for size in SIZES[1:]:
            share = found[mode, size]["state"] * size / found[whole, size]["state"]
            bars.append(
                bar(f"{mode}, {size} processes: state times {size}, of the whole", share, 1.1, at_most=True)
            )
    exact = set().union(*(one["weights"] for (mode, _), one in found.items() if mode.startswith("exact")))
    pairs = [(found[mode, size], found[whole, size]) for mode, whole in WHOLE.items() for size in SIZES]
    alike = all(one["weights"] == other["weights"] for one, other in pairs)
    bars.append(f"- {said(len(exact) == 1)}: exact: one hash of the weights in all six runs")
    bars.append(f"- {said(alike)}: with --shard optimizer the hash that is there without it, each time")
    return [
        f"{weights / 1e6:.1f} million weights, {4 * weights / 1e6:,.1f} MB in float32.",
        table(["mode", "processes", "state, MB", "peak, MB", "seconds per step"], rows),
        "\n".join(bars),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a process with and without a sharded optimizer.")
    parser.add_argument("--width", type=int, default=832, help="of the model, a multiple of 13")
    parser.add_argument("--write", action="store_true", help="save the report under benchmarks/results/")
    args = parser.parse_args()
    report = Report("shard_memory.py", "Memory with a sharded optimizer", ["torch", "stepladder"], str(cores()))
    with tempfile.TemporaryDirectory() as folder:
        text = "".join(random.Random(0).choices(string.ascii_letters + " \n", k=50_000))
        Path(folder, "input.txt").write_text(text, encoding="utf-8")
        from stepladder.recipes.gpt import Config, build

        model = build(Config(layers=12, heads=13, width=args.width, ngrams=2, data_dir=folder)).model
        weights = sum(weight.numel() for weight in model.parameters())
        del model
        found = measured(folder, args.width)
    report.finish(sections(found, weights), args.write)


if __name__ == "__main__":
    main()

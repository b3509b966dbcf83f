"""python benchmarks/shard_memory.py [--write] [--width 832]

What does a process hold of a large model with AdamW, on 1, 2 and 4 processes, with each `--shard`?

The model is recipe gpt's with 12 layers, 832 wide: about 105 million weights. Beside it stands the
same model in loops written by hand: with torch's DistributedDataParallel and its
ZeroRedundancyOptimizer, which shards by whole weights, and with torch's fully_shard (FSDP2), block
by block. On one process no --shard changes anything. Each trains the same few steps of four rows of
64 tokens on one thread per process. With --sync exact a row is a microbatch; the others take a
process's share in one pass.

State: bytes of the optimizer's tensors, of the process that has most. Peak: how much more main
memory the process had at its highest, in these steps, than before the model was built, with
everything imported; so it holds gradients, activations, what is sent, and with --sync exact the
partial sums. Tensors: of what is fully sharded, the most bytes that torch's allocator had given out
at one moment, in a run of their own. Time per step: the median, of the slowest process; all
processes share this machine's cores. The weights after the last step are compared by their SHA-256.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from dry_run import highest
from report import Report, bar, cores, table

SIZES = (1, 2, 4)
ROWS = 4
STEPS = 4
ZERO = "ZeroRedundancyOptimizer by hand"
FSDP = "fully_shard by hand"
SHARDED = {
    "ddp, --shard optimizer": "ddp",
    "exact, --shard optimizer": "exact",
}  # and what has the same bits
FULL = "ddp, --shard full"
FULL_EXACT = "exact, --shard full"
MODES = (
    "ddp",
    "exact",
    ZERO,
    "ddp, --shard optimizer",
    "exact, --shard optimizer",
    FULL,
    FULL_EXACT,
    FSDP,
)
ALONE = MODES[:3]  # on one process the others are the same
IMPORTED = (
    "stepladder.recipes.gpt",
    "stepladder.train.trainer",
    "stepladder.train.layout.fsdp",
    "torch.distributed.optim",
    "torch._dynamo",
    "tensorboard.summary.writer.event_file_writer",
)


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}")


def state_bytes(optimizer: Any) -> int:
    states = [state for state in optimizer.state.values() if hasattr(state, "values")]
    values = [value for state in states for value in state.values() if hasattr(value, "nbytes")]
    return sum(
        (value.to_local() if hasattr(value, "to_local") else value).nbytes for value in values
    )


def work(mode: str, folder: str, width: int) -> dict[str, Any]:
    """Take the steps on this rank, and return the memory that they took."""
    import torch

    torch.set_num_threads(1)
    from stepladder import World, process_group
    from stepladder.recipes.gpt import Config

    for name in IMPORTED:  # of each mode, so that none counts them
        import_module(name)
    world = World.detect()
    config = Config(layers=12, heads=13, width=width, ngrams=2, global_batch=ROWS, data_dir=folder)
    with process_group(world, torch.device("cpu")) as comm:
        comm.gather_bytes(b"x")
        Path("/proc/self/clear_refs").write_text("5")  # the highest from here on
        before = resident("VmRSS")
        hands = {ZERO: steps_by_zero, FSDP: steps_by_fsdp}
        took = hands[mode](config, world) if mode in hands else steps_of(mode, config, comm, folder)
        took["peak"] -= before
    return took


def tensors_of(mode: str, folder: str, width: int) -> int:
    """Return the most bytes that torch's allocator had given out at one moment on this rank, from
    before the model.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work(mode, folder, width)
    return highest(profiled.profiler.kineto_results.events())  # type: ignore[union-attr]


def steps_of(mode: str, config: Any, comm: Any, folder: str) -> dict[str, Any]:
    from stepladder.core.settings import Settings
    from stepladder.rank.preemption import StopSignals
    from stepladder.recipes.gpt import build
    from stepladder.storage.snapshot import hash_weights
    from stepladder.train.determinism import deterministic
    from stepladder.train.job import Recipe
    from stepladder.train.opening import open_session
    from stepladder.train.run_spec import RunSpec
    from stepladder.train.trainer import TrainingLoop

    job = build(config)
    took = {"state": 0, "peak": 0}
    kind: Any = type(job.optimizer)
    init_group = kind._init_group  # within a step: --shard refuses hooks of the optimizer

    def measure_state(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_group(optimizer, *args, **kwargs)
        took.update(state=state_bytes(optimizer))
        return result

    kind._init_group = measure_state
    sync, _, shard = mode.partition(", --shard ")
    options: Any = {"microbatch": 1} if sync == "exact" else {}
    options |= {
        "run_dir": Path(folder, f"{mode}-{comm.world.world_size}"),
        "global_batch": ROWS,
        "threads": 1,
    }
    settings = Settings(
        **options, sync=sync, shard=shard or "none", progress=False, snapshot_every=10**6
    )
    with open_session(RunSpec.make(job, settings, Recipe("gpt"), comm), comm) as session:
        with (
            deterministic(sync == "exact", comm.device),
            TrainingLoop(session, StopSignals()) as loop,
        ):
            took["seconds"] = timed(loop.step)
        took |= {"peak": resident("VmHWM"), "weights": hash_weights(job.model)}
    return took


def timed(step: Any) -> float:
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])  # the first makes the optimizer's state


def steps_by_zero(config: Any, world: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from stepladder.recipes.gpt import build

    job = build(config)
    ddp = DistributedDataParallel(job.model) if world.world_size > 1 else job.model
    kind: Any = ZeroRedundancyOptimizer if world.world_size > 1 else torch.optim.AdamW
    options = {"optimizer_class": torch.optim.AdamW} if world.world_size > 1 else {}
    return steps_by_hand(
        job, ddp, kind(groups_of(job), lr=1e-3, betas=(0.9, 0.99), fused=True, **options), world
    )


def steps_by_fsdp(config: Any, world: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    from stepladder.recipes.gpt import build

    job = build(config)
    for block in job.model.layers:
        fully_shard(block)
    fully_shard(job.model)
    optimizer = torch.optim.AdamW(groups_of(job), lr=1e-3, betas=(0.9, 0.99), fused=True)
    return steps_by_hand(job, job.model, optimizer, world)


def groups_of(job: Any) -> list[dict[str, Any]]:
    """Its parameters are those that the model has now."""
    decays = {
        param.ndim > 1: group["weight_decay"]
        for group in job.optimizer.param_groups
        for param in group["params"]
    }
    params = list(job.model.parameters())
    return [
        {"params": [p for p in params if (p.ndim > 1) == parameters], "weight_decay": d}
        for parameters, d in decays.items()
    ]


def steps_by_hand(job: Any, model: Any, optimizer: Any, world: Any) -> dict[str, Any]:
    import torch

    from stepladder.recipes.gpt import loss
    from stepladder.storage.snapshot import hash_weights

    job.optimizer.param_groups.clear()  # of the weights as they were built
    rows_of_rank = range(world.rank, ROWS, world.world_size)

    def step() -> None:
        optimizer.zero_grad()
        total, count = loss(model, torch.stack([job.train_data[row] for row in rows_of_rank]))
        (total / count).backward()
        optimizer.step()

    took: dict[str, Any] = {"seconds": timed(step), "peak": resident("VmHWM")}
    took |= {"weights": hash_weights(job.model)}
    return took | {"state": state_bytes(getattr(optimizer, "optim", optimizer))}


def measured(folder: str, width: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the largest figures of all ranks, for each mode and size."""
    from stepladder import launch

    results = {}
    for size in SIZES:
        for mode in MODES if size > 1 else ALONE:
            ranks = launch(work, mode, folder, width, nproc=size)
            peaks = {
                name: max(rank[name] for rank in ranks) for name in ("state", "peak", "seconds")
            }
            results[mode, size] = peaks | {"weights": {rank["weights"] for rank in ranks}}
            if mode in (FULL, FULL_EXACT, FSDP):
                results[mode, size]["tensors"] = max(
                    launch(tensors_of, mode, folder, width, nproc=size)
                )
            print(f"{mode}, {size}: {peaks}", file=sys.stderr, flush=True)
    return results


def format_verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


def sections(results: dict[tuple[str, int], dict[str, Any]], weights: int, block: int) -> list[str]:
    rows = []
    for (mode, size), result in results.items():
        amounts = [
            f"{result[key] / 1e6:,.0f}" if key in result else ""
            for key in ("state", "peak", "tensors")
        ]
        rows.append([mode, str(size), *amounts, f"{result['seconds']:.2f}"])
    bars = []
    for mode, label in SHARDED.items():
        for size in SIZES[1:]:
            share = results[mode, size]["state"] * size / results[label, size]["state"]
            bars.append(
                bar(
                    f"{mode}, {size} processes: state times {size}, of the whole",
                    share,
                    1.1,
                    at_most=True,
                )
            )
    for size in SIZES[1:]:  # weights, gradients, and two numbers of AdamW's for each
        limit = 16 * weights / size + 2 * 8 * block
        by_hand = results[FSDP, size]
        share = results[FULL, size]["tensors"] / limit
        claim = f"tensors, of everything / {size} and the weights and gradients of two blocks ({limit / 1e6:,.0f} MB)"
        bars.append(bar(f"{FULL}, {size} processes: {claim}", share, 1.1, at_most=True))
        for key in ("peak", "tensors", "seconds"):
            share = results[FULL, size][key] / by_hand[key]
            bars.append(
                bar(f"{FULL}, {size} processes: {key}, of {FSDP}", share, 1.1, at_most=True)
            )
    for size in SIZES[1:]:  # and a sum of this rank's rows after each round but the last
        limit = 16 * weights / size + 2 * 8 * block
        sums = len(range(1, ROWS // size)) * 4 * weights / size
        share = results[FULL_EXACT, size]["tensors"] / (limit + sums)
        claim = f"tensors, of {limit / 1e6:,.0f} MB and partial sums of {sums / 1e6:,.0f} MB"
        bars.append(bar(f"{FULL_EXACT}, {size} processes: {claim}", share, 1.1, at_most=True))
    exact = set().union(
        *(result["weights"] for (mode, _), result in results.items() if mode.startswith("exact"))
    )
    pairs = [
        (results[mode, size], results[label, size])
        for mode, label in SHARDED.items()
        for size in SIZES[1:]
    ]
    alike = all(result["weights"] == by_hand["weights"] for result, by_hand in pairs)
    bars.append(
        f"- {format_verdict(len(exact) == 1)}: exact: one hash of the weights in all seven runs"
    )
    bars.append(
        f"- {format_verdict(alike)}: with --shard optimizer the hash that is there without it, each time"
    )
    return [
        f"{weights / 1e6:.1f} million weights, {4 * weights / 1e6:,.1f} MB in float32.",
        table(
            ["mode", "processes", "state, MB", "peak, MB", "tensors, MB", "seconds per step"], rows
        ),
        "\n".join(bars),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a process with each --shard.")
    parser.add_argument("--width", type=int, default=832, help="of the model, a multiple of 13")
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    report = Report(
        "shard_memory.py", "Memory with a sharded optimizer", ["torch", "stepladder"], str(cores())
    )
    with tempfile.TemporaryDirectory() as folder:
        text = "".join(random.Random(0).choices(string.ascii_letters + " \n", k=50_000))
        Path(folder, "input.txt").write_text(text, encoding="utf-8")
        from stepladder.recipes.gpt import Config, build

        model = build(
            Config(layers=12, heads=13, width=args.width, ngrams=2, data_dir=folder)
        ).model
        weights = sum(weight.numel() for weight in model.parameters())
        block = sum(weight.numel() for weight in model.layers[0].parameters())
        del model
        results = measured(folder, args.width)
    report.finish(sections(results, weights, block), args.write)


if __name__ == "__main__":
    main()

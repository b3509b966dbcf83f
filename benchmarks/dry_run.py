"""python benchmarks/dry_run.py [--write] [--model NAME ...]

Does `stepladder train --dry-run` tell what a process needs of memory?

Nine models of different kinds (dry_run_models.py): their estimates are what the command prints with
--json. Beside it stands what training them takes: the most bytes that torch's allocator had given
out at one moment of two steps, from before the model was built, of the process that took most. It
sees also what a kernel takes for itself, as torch's LSTM does on a processor: its estimate must be
too low. Each model on one process, on two with each --shard, and with --sync exact on one and on
two."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Report, cores, table

MODELS = ("mlp", "cnn", "resnet", "encoder", "lstm", "recommender", "autoencoder", "tied", "gpt")
JOB = Path(__file__).with_name("dry_run_models.py")
CASES = (
    ("ddp", "none", 1),
    ("ddp", "none", 2),
    ("ddp", "optimizer", 2),
    ("ddp", "full", 2),
    ("exact", "none", 1),
    ("exact", "optimizer", 2),
    ("exact", "full", 2),
)
MICROBATCH = 8
STEPS = 2
BAR = 0.10
LEAST = 7


def options_of(sync: str) -> dict[str, Any]:
    return {"sync": sync} | ({"microbatch": MICROBATCH} if sync == "exact" else {})


def estimated(model: str) -> dict[tuple[str, str, int], int]:
    """Bytes at the peak, by sync, shard and processes."""
    estimates = {}
    for sync in ("ddp", "exact"):
        flags = [f"--{name}={value}" for name, value in options_of(sync).items()]
        argv = [
            "stepladder",
            "train",
            str(JOB),
            "--model",
            model,
            "--dry-run",
            "--json",
            "--threads=1",
            *flags,
        ]
        ended = subprocess.run(argv, capture_output=True, text=True, check=True)
        for row in json.loads(ended.stdout.splitlines()[-1])["memory"]:
            estimates[sync, row["shard"], row["nproc"]] = row["peak"]
    return estimates


def measured_here(model: str, sync: str, shard: str, folder: str) -> int:
    """Return the most bytes that torch's allocator had given out on this rank, with the gradients in
    shared memory.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    from stepladder import World, process_group
    from stepladder.core.settings import Settings, TrainRequest
    from stepladder.rank.preemption import StopSignals
    from stepladder.train.determinism import deterministic
    from stepladder.train.job_runner import load_job
    from stepladder.train.opening import open_session
    from stepladder.train.run_spec import RunSpec
    from stepladder.train.trainer import TrainingLoop

    world = World.detect()
    run_dir = Path(folder, f"{model}-{sync}-{shard}-{world.world_size}")
    settings = Settings(run_dir, threads=1, progress=False, shard=shard, **options_of(sync))  # type: ignore[arg-type]
    build, recipe = load_job(TrainRequest(JOB, {"model": model}, settings), world)
    with process_group(world, torch.device("cpu")) as comm:
        comm.gather_bytes(b"x")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            spec = RunSpec.make(build(), settings, recipe, comm)
            exact = deterministic(sync == "exact", comm.device)
            with (
                open_session(spec, comm) as session,
                exact,
                TrainingLoop(session, StopSignals()) as loop,
            ):
                for _ in range(STEPS):
                    session.state.step = 0  # never at an epoch's end, which would save
                    loop.step()
        shared = comm.shared_memory.arena_used_bytes if comm.shared_memory is not None else 0
    return shared + highest(profiled.profiler.kineto_results.events())  # type: ignore[union-attr]


def highest(events: list[Any]) -> int:
    """Return the most bytes that were given out and not yet given back."""
    now = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Memory as --dry-run computes it, and as it is measured."
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    report = Report(
        "dry_run.py", "Memory: computed and measured", ["torch", "stepladder"], str(cores())
    )
    from stepladder import launch

    rows: list[list[str]] = []
    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in args.model:
            known = estimated(model)
            off = 0.0
            for sync, shard, size in CASES:
                peak = max(launch(measured_here, model, sync, shard, folder, nproc=size))
                error = known[sync, shard, size] / peak - 1
                off = max(off, abs(error))
                amounts = [f"{number / 1e6:.1f}" for number in (known[sync, shard, size], peak)]
                rows.append([model, sync, shard, str(size), *amounts, f"{error:+.1%}"])
                print(*rows[-1], file=sys.stderr, flush=True)
            errors[model] = off
    near = [model for model, error in errors.items() if error <= BAR]
    sentence = f"- {'PASS' if len(near) >= LEAST else 'FAIL'}: {len(near)} models are within {BAR:.0%} (bar: >= {LEAST})"
    for model, error in errors.items():
        if model not in near:
            sentence += f"\n- {model} is up to {error:.0%} off"
    head = ["model", "--sync", "--shard", "processes", "computed, MB", "measured, MB", "error"]
    report.finish([table(head, rows), sentence], args.write)


if __name__ == "__main__":
    main()

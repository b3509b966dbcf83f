"""python benchmarks/compile_gain.py --data-dir DIR [--rounds 2] [--only RECIPE ...] [--write]

What does --compile bring a step of each recipe, on one process with one thread, in one pass (--sync
ddp) and in microbatches (--sync exact)?

DIR holds the folders mnist, movielens/ncf-ml-1m and shakespeare. Each run is a process of its own:
its first step, which compiles, and the median of those after the warm-up. What an earlier run has
compiled is kept, so the first step is that of a cold start in the first round only."""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from report import RESULTS, Report, table

WARM_UP = 3
RECIPES: dict[
    str, tuple[str, dict[str, Any], str, int]
] = {  # recipe, Config, folder of its data, steps
    "mlp": ("mlp", {}, "", 600),
    "digits": ("digits", {}, "", 300),
    "mnist, small net": ("mnist", {"net": "small"}, "mnist", 60),
    "mnist, classic net": ("mnist", {"net": "classic"}, "mnist", 15),
    "movielens": ("movielens", {}, "movielens/ncf-ml-1m", 60),
    "gpt": ("gpt", {}, "shakespeare", 15),
}
MODES = ("ddp", "exact")


def work(name: str, sync: str, compiles: bool, data_dir: str, folder: str) -> tuple[float, float]:
    """Seconds of the first step, and of a later one."""
    import torch

    from stepladder import Settings, process_group
    from stepladder.rank.preemption import StopSignals
    from stepladder.rank.torch_fixes import defer_dynamo
    from stepladder.train.determinism import deterministic
    from stepladder.train.job import Recipe
    from stepladder.train.opening import open_session
    from stepladder.train.run_spec import RunSpec
    from stepladder.train.trainer import TrainingLoop

    defer_dynamo()
    torch.set_num_threads(1)
    recipe, fields, data, steps = RECIPES[name]
    module = import_module(f"stepladder.recipes.{recipe}")
    config = module.Config(**fields | ({"data_dir": str(Path(data_dir, data))} if data else {}))
    took = []
    with process_group(device=torch.device("cpu")) as comm:
        options: dict[str, Any] = {"threads": 1, "progress": False, "snapshot_every": 10**6}
        settings = Settings(Path(folder, "run"), sync=sync, compile=compiles, **options)
        spec = RunSpec.make(module.build(config), settings, Recipe(recipe, config), comm)
        exact = deterministic(sync == "exact", comm.device)
        with (
            open_session(spec, comm) as session,
            exact,
            TrainingLoop(session, StopSignals()) as loop,
        ):
            for _ in range(steps + WARM_UP):
                start = time.perf_counter()
                loop.step()
                took.append(time.perf_counter() - start)
    return took[0], median(took[WARM_UP:])


def rows_of(name: str, data_dir: str, rounds: int) -> list[list[str]]:
    from stepladder import launch

    rows = []
    for sync in MODES:
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(rounds):
            for compiles in (False, True)[:: 1 if number % 2 == 0 else -1]:
                with tempfile.TemporaryDirectory() as folder:
                    times[compiles] += launch(work, name, sync, compiles, data_dir, folder, nproc=1)
        plain, fast = ([step for _, step in times[which]] for which in (False, True))
        gain = median(a / b for a, b in zip(plain, fast, strict=True))
        firsts = [first for first, _ in times[True]]
        rows.append(
            [
                name,
                sync,
                f"{1e3 * median(plain):.2f}",
                f"{1e3 * median(fast):.2f}",
                f"{gain:.2f}",
                f"{max(firsts):.1f}",
                f"{min(firsts):.1f}",
            ]
        )
    return rows


def kept_rows() -> dict[str, list[list[str]]]:
    """Return the rows of an earlier report, by recipe."""
    path = RESULTS / "compile_gain.md"
    rows = dict[str, list[list[str]]]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.startswith("| ") and not line.startswith(("| ---", "| recipe")):
            row = [cell.strip() for cell in line.strip("|").split("|")]
            rows.setdefault(row[0], []).append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True, type=lambda text: str(Path(text).resolve()))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(RECIPES),
        default=list(RECIPES),
        help="the rows of the others stay",
    )
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    report = Report(
        "compile_gain.py", "What --compile brings", ["torch", "stepladder"], cores_used="1"
    )
    earlier_rows = kept_rows() if len(args.only) < len(RECIPES) else {}
    earlier_rows |= {name: rows_of(name, args.data_dir, args.rounds) for name in args.only}
    rows = [row for name in RECIPES for row in earlier_rows.get(name, [])]
    head = [
        "recipe",
        "--sync",
        "ms/step",
        "with --compile",
        "times faster",
        "first step, s",
        "the same, kept, s",
    ]
    text = f"Medians of {args.rounds} interleaved rounds, ratios within a round. Exact has the default microbatches."
    report.finish([table(head, rows), text], args.write)


if __name__ == "__main__":
    main()

"""Does a finding of `stepladder check` depend on words? Each script of tests/check_corpus in two other texts.

    python benchmarks/check_words.py [--write] [--only NAME,...] [--jobs N] [--stored FILE]

First: eighty words of libraries, functions and arguments in comments, docstrings and unused strings. Second: v1, v2,
... in place of all names that its file binds (rename.py). A text counts as unchanged where the same rules have findings
of the same severity on the same lines, and, if renamed, where it prints the same numbers under the same launcher.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rename import Renamer
from report import Report, table

from check_corpus import CORPUS, checked, scripts

WORDS = [
    "lightning",
    "accelerate",
    "deepspeed",
    "transformers",
    "horovod",
    "fabric",
    "Trainer",
    "Accelerator",
    "pipeline",
    "DataLoader",
    "DistributedSampler",
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "fully_shard",
    "no_sync",
    "set_epoch",
    "drop_last",
    "shuffle",
    "all_reduce",
    "all_gather",
    "broadcast",
    "barrier",
    "reduce_scatter",
    "destroy_process_group",
    "init_process_group",
    "new_group",
    "get_rank",
    "get_world_size",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_PORT",
    "MASTER_ADDR",
    "tcp://10.0.0.1:29500",
    "spawn",
    "torchrun",
    "nccl",
    "gloo",
    "cuda:0",
    "set_device",
    "device_count",
    "is_available",
    "manual_seed",
    "seed_everything",
    "set_seed",
    "worker_init_fn",
    "generator",
    "augment",
    "jitter",
    "noise",
    "crop",
    "flip",
    "mixup",
    "dropout",
    "eval()",
    "train()",
    "no_grad",
    "inference_mode",
    "zero_grad",
    "unscale_",
    "GradScaler",
    "autocast",
    "clip_grad_norm_",
    "accumulate",
    "gradient_accumulation_steps",
    "backward",
    "retain_graph",
    "detach",
    "item()",
    "resume",
    "load_checkpoint",
    "checkpoint",
    "best",
    "best_model",
    ".tmp",
    "torch.load",
    "weights_only=False",
    "pickle.load",
    "state_dict",
    "module.",
    "optimizer",
    "scheduler",
    "last_epoch",
    "OneCycleLR",
    "CosineAnnealingLR",
    "rank==0",
    "is_main_process",
    "local_rank==0",
    "master",
    "Join",
    "divide_by_initial",
    "gather_for_metrics",
    "trim",
    "padding",
    "world_size",
]
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
TIMEOUT_S = 90
Mapped = tuple[str, list[int | None]]  # a text, and for each of its lines the line of the script


def with_words(text: str) -> Mapped:
    """A comment in each block, docstrings where there are none, and strings that nothing uses."""
    words = cycle(WORDS)
    tree = ast.parse(text)
    added: dict[int, list[str]] = {}  # above a line

    def add(first: ast.stmt, form: str) -> None:
        sentence = form.format(" ".join(islice(words, 8)))
        added.setdefault(first.lineno, []).append(" " * first.col_offset + sentence)

    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            not isinstance(node, ast.stmt)
            or not isinstance(body, list)
            or body[0].lineno == node.lineno
        ):
            continue
        is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
        is_documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        add(body[0], '"""{}"""' if is_definition and not is_documented else "# {}")
    for _ in range(0, len(WORDS), 8):
        add(tree.body[-1], '"{}"')
    lines: list[tuple[str, int | None]] = []
    for number, line in enumerate(text.splitlines(), 1):
        lines += [(above, None) for above in added.get(number, [])]
        lines.append((line, number))
    return "\n".join(line for line, _ in lines) + "\n", [number for _, number in lines]


def with_names(text: str) -> Mapped:
    renamed = Renamer([text]).rename(text)
    return renamed, list(range(1, len(text.splitlines()) + 1))


def findings(answer: dict[str, Any], origins: list[int | None] | None = None) -> list[list[Any]]:
    """Rule, severity and line of each finding, as a line of the script, and last the exit code."""
    found = [[f["rule"], f["severity"], f["line"]] for f in answer["findings"]]
    if origins is not None:
        found = [[rule, severity, origins[line - 1]] for rule, severity, line in found]
    return [*sorted(found, key=str), [answer["code"], "", 0]]


def numbers(script: dict[str, Any], text: str) -> list[str]:
    """What a script prints until it ends or its time is over, as numbers, and its exit code."""
    args = script.get("args", [])
    args = args.split() if isinstance(args, str) else [str(arg) for arg in args]
    nproc = str(script.get("nproc", 2))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc]
    start = [] if script.get("launcher") == "python" else start
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, script["file"]).write_text(text)
        output = Path(folder, "output")
        with output.open("w") as file:  # no pipe, which a rank that is left would hold open
            running = subprocess.Popen(
                [sys.executable, *start, script["file"], *args], cwd=folder, stdout=file,
                stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            try:
                code = str(running.wait(TIMEOUT_S))
            except subprocess.TimeoutExpired:
                running.terminate()  # torchrun ends its ranks
                running.wait()
                code = "late"
        return [*sorted(NUMBER.findall(output.read_text())), code]


def prints_the_same(script: dict[str, Any], text: str, renamed: str) -> bool:
    """Whether both print the same numbers, apart from those that differ between two runs of the script."""
    first, second = numbers(script, text), numbers(script, text)
    other = numbers(script, renamed)
    changing = set(first) ^ set(second)
    return [n for n in first if n not in changing] == [
        n for n in other if n in set(first) - changing
    ]


def compare(script: dict[str, Any]) -> dict[str, Any]:
    """The findings of a script and of its two other texts."""
    text = (CORPUS / script["file"]).read_text()
    original = findings(checked(script))
    result: dict[str, Any] = {"file": script["file"], "findings": original}
    for kind, change in (("words", with_words), ("names", with_names)):
        changed, origins = change(text)
        found = findings(checked(script, text=changed), origins)
        result[kind] = [f for f in [*found, *original] if (f in found) != (f in original)]
        if kind == "names" and not result[kind] and not prints_the_same(script, text, changed):
            result[kind] = "it prints other numbers"
    print(
        "ok   " if not result["words"] and not result["names"] else "OTHER",
        json.dumps(result),
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", metavar="NAME,...")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--stored", type=Path, help="JSON lines: results are added, and none is made again"
    )
    args = parser.parse_args()
    stored = args.stored.read_text().splitlines() if args.stored and args.stored.exists() else []
    results: list[dict[str, Any]] = [json.loads(line) for line in stored]
    done = {result["file"] for result in results}
    chosen = [
        script
        for script in scripts([n for n in args.only.split(",") if n])
        if script["file"] not in done
    ]
    report = Report(
        Path(__file__).name,
        "Findings of `stepladder check` that depend on words",
        ["torch", "libcst"],
        "2",
    )
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(compare, chosen):
            results.append(result)
            if args.stored:
                with args.stored.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    rows = []
    for kind in ("words", "names"):
        changed = [result["file"] for result in results if result[kind]]
        share = 100 * (len(results) - len(changed)) / len(results)
        rows.append([kind, str(len(results)), f"{share:.1f} %", ", ".join(changed)])
    report.finish(
        [table(["changed", "scripts", "same findings", "other findings"], rows)], args.write
    )


if __name__ == "__main__":
    main()

"""What do torch-preflight and TrainCheck find in tests/check_corpus, beside `stepladder check`?

    python benchmarks/check_peers.py --preflight BIN --traincheck BIN [--ours FILE] [--stored FILE]
    [--write]

BIN: the bin folder of an environment with torch-preflight, or traincheck. FILE of --ours: what
check_corpus.py --stored has written. torch-preflight reads all scripts. TrainCheck wants traces of
sound runs first: it gets those of REFERENCES, infers its invariants from them, and checks traces of
TRIED. A stage is ended after LIMIT seconds of processor time; times of the table are processor time
too."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Report, table

from check_corpus import CORPUS, scripts

LIMIT = 300
REFERENCES = ["coins_rank0.py"]
SHORTER = {
    "range(4)": "range(1)",
    "coins(400, 0)": "coins(160, 0)",
}  # else inferring takes the better part of an hour
TRIED = ["coins_rank0.py", "hospitals_join.py", "shares_by_hand.py", "churn_plain.py", "rainfall_loop.py",
         "wine_quality.py", "by_hand_gradients.py", "loans_default.py", "fashion_dropout.py"]  # fmt: skip
NOTE = """\
torch-preflight is 0.5.0. It reads the source alone, so it needs a second where the check needs two runs, and it
is right on the two scripts that keep graphs.

TrainCheck is 0.2.0. It infers invariants from traces of sound runs, and then says which of them another trace
breaks. The reference is coins_rank0.py with one epoch of 160 samples: from its four epochs of 400, inferring
would have taken 44 minutes. A broken invariant names functions and tensors, not a mistake; what is counted is
how many were broken."""
NAMES = {  # torch-preflight's rules, and those of ours that mean the same mistake
    "TG001": ["graph-kept"],
    "TG002": ["eval-keeps-graph"],
    "TG003": ["missing-zero-grad"],
    "TG005": ["activation-twice"],
    "TG006": ["activation-twice"],
    "TG011": ["eval-stays"],
    "TG012": ["same-samples", "overlapping-shards"],
    "TG014": ["accumulation-mean"],
}


def preflight(programs: Path) -> dict[str, Any]:
    """Return torch-preflight's findings by script.

    One call reads all scripts; each is given its part of the time.
    """
    began = time.monotonic()
    command = [programs / "torch-preflight", "check", "-f", "json", "-j", "1", CORPUS]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    listed = scripts([])
    seconds = (time.monotonic() - began) / len(listed)
    reported: dict[str, list[tuple[str, str]]] = {script["file"]: [] for script in listed}
    for diagnostic in json.loads(ran.stdout)["diagnostics"]:
        reported[Path(diagnostic["path"]).name].append((diagnostic["code"], diagnostic["severity"]))
    return {
        script["file"]: judged(script, reported[script["file"]]) | {"seconds": seconds}
        for script in listed
    }


def judged(script: dict[str, Any], reported: list[tuple[str, str]]) -> dict[str, Any]:
    """found: rules.  false: errors about something else.  minor: how many warnings and notes."""
    meant = {name for code, _ in reported for name in NAMES.get(code, [])}
    false_alarms = [(code, severity) for code, severity in reported if not hits(code, script)]
    false = [code for code, severity in false_alarms if severity == "error"]
    return {
        "found": sorted(meant & set(script["rules"])),
        "false": false,
        "minor": len(false_alarms) - len(false),
    }


def hits(code: str, script: dict[str, Any]) -> bool:
    return bool(set(NAMES.get(code, [])) & {*script["rules"], *script.get("also", [])})


def stage(command: list[Any], folder: Path) -> tuple[str, float, str]:
    """How it ended, its seconds, and the end of what it printed."""
    with (folder / "said").open("w+b") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, preexec_fn=bounded
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()[-2000:].decode(errors="replace")
    state = "done" if process.returncode == 0 else f"exit code {process.returncode}"
    state = (
        f"ended after {LIMIT} s"
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        else state
    )
    return state, used.ru_utime + used.ru_stime, text


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))


def collected(
    name: str, folder: Path, programs: Path, shorter: bool = False
) -> tuple[Path, str, float]:
    """Traces of one script on two ranks: where they are, how it ended, and its seconds."""
    text = (CORPUS / name).read_text()
    for long, short in SHORTER.items() if shorter else ():
        text = text.replace(long, short)
    (folder / name).write_text(text)
    traces = folder / f"{'reference-' if shorter else ''}{Path(name).stem}"
    start = folder / "start.sh"
    start.write_text(
        f"{programs}/python -m torch.distributed.run --standalone --nproc-per-node 2 {name}\n"
    )
    command = [
        programs / "traincheck-collect",
        "-p",
        name,
        "-s",
        "start.sh",
        "--models-to-track",
        "model",
    ]
    state, seconds, _ = stage([*command, "--output-dir", traces], folder)
    return traces, state, seconds


def traincheck(programs: Path, folder: Path) -> list[list[str]]:
    """A row for each stage: what was done, how it ended, its seconds."""
    rows = []
    references = []
    for name in REFERENCES:
        traces, state, seconds = collected(name, folder, programs, shorter=True)
        size = sum(p.stat().st_size for p in traces.glob("*")) >> 20
        references.append(traces)
        rows.append([f"trace of {name}, sound, shortened, {size} MiB", state, f"{seconds:.0f}"])
    state, seconds, _ = stage(
        [programs / "traincheck-infer", "-f", *references, "-o", "invariants.json"], folder
    )
    known = folder / "invariants.json"
    count = len(known.read_text().splitlines()) if known.exists() else 0
    rows.append([f"invariants that follow: {count}", state, f"{seconds:.0f}"])
    for name in TRIED if count else []:
        traces, state, seconds = collected(name, folder, programs)
        command = [
            programs / "traincheck-check",
            "-f",
            traces,
            "-i",
            known.name,
            "--no-html-report",
        ]
        verdict, more, output = stage([*command, "-o", f"of-{Path(name).stem}"], folder)
        broken = re.search(r"failed invariants: (\d+)/", output)
        planted = next((s["rules"] for s in scripts([]) if s["file"] == name), [])
        title = f"{name}, planted: {', '.join(planted) or 'nothing'}"
        end = f"{broken[1]} invariants broken" if broken else f"trace {state}, check {verdict}"
        rows.append([title, end, f"{seconds + more:.0f}"])
    return rows


def peers_table(results: dict[str, Any], ours: dict[str, Any]) -> str:
    planted = {s["file"]: s["rules"] for s in scripts([])}
    rows = []
    for name, by_file in [("stepladder check", ours), ("torch-preflight", results)]:
        judged_files = [
            (by_file[file], rules) for file, rules in planted.items() if file in by_file
        ]
        num_found = sum(len(result["found"]) for result, _ in judged_files)
        total = sum(len(rules) for _, rules in judged_files)
        clean = [result for result, rules in judged_files if not rules]
        alarms = sum(bool(result["false"]) for result in clean)
        num_false = sum(len(result["false"]) for result, rules in judged_files if rules)
        seconds = sum(result["seconds"] for result, _ in judged_files) / max(1, len(judged_files))
        rows.append(
            [
                name,
                str(len(judged_files)),
                f"{num_found} of {total}",
                f"{alarms} of {len(clean)}",
                str(num_false),
                f"{seconds:.1f}",
            ]
        )
    return table(
        ["tool", "scripts", "found", "clean scripts with an error", "other errors", "s per script"],
        rows,
    )


def by_rule(results: dict[str, Any]) -> str:
    planted = [(s["file"], rule) for s in scripts([]) for rule in s["rules"]]
    names = sorted({name for names in NAMES.values() for name in names})
    rows = []
    for name in names:
        files = [file for file, rule in planted if rule == name and file in results]
        rows.append(
            [name, str(len(files)), str(sum(name in results[file]["found"] for file in files))]
        )
    return table(["mistake that torch-preflight has a rule for", "scripts", "found"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preflight", type=Path, required=True, metavar="BIN")
    parser.add_argument("--traincheck", type=Path, metavar="BIN")
    parser.add_argument("--ours", type=Path, metavar="FILE")
    parser.add_argument("--stored", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    report = Report(
        Path(__file__).name, "The corpus of planted mistakes through other tools", ["torch"], "2"
    )
    stored = json.loads(args.stored.read_text()) if args.stored and args.stored.exists() else {}
    results = stored.get("preflight") or preflight(args.preflight.absolute())
    if args.stored:
        args.stored.write_text(json.dumps(stored | {"preflight": results}))
    rows = stored.get("traincheck", [])
    if args.traincheck and not rows:
        with tempfile.TemporaryDirectory() as folder:
            rows = traincheck(args.traincheck.absolute(), Path(folder))
        if args.stored:
            args.stored.write_text(json.dumps(stored | {"preflight": results, "traincheck": rows}))
    lines = args.ours.read_text().splitlines() if args.ours else []
    ours = {result["file"]: result for result in map(json.loads, lines)}
    minor = sum(result["minor"] for result in results.values())
    parts = [peers_table(results, ours), by_rule(results)]
    parts.append(
        f"torch-preflight also printed {minor} warnings and notes, which are not counted as errors here."
    )
    if rows:
        parts.append(table(["TrainCheck", "end", "s"], rows))
    parts.append(NOTE)
    report.finish(parts, args.write)


if __name__ == "__main__":
    main()

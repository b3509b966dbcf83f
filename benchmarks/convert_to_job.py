"""How many published scripts become a job by `stepladder convert --to job`? On fetched copies.

    python benchmarks/convert_to_job.py COPIES [--only NAME,...] [--stored FOLDER] [--write]

COPIES is that of convert.py, and the scripts are those of convert.toml. A job is offered where its losses are the script's, where two
halves of each batch have the mean gradient of the batch, and where one and two processes train the same bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path

from convert import FOLDER, ConvertedScript, convert_script
from report import Report, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("copies", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--stored", type=Path, help="A folder of reports: they are not run again")
    args = parser.parse_args()
    report = Report("convert_to_job.py", "Published scripts as jobs", ["torch", "stepladder"], "2")
    entries = tomllib.loads((FOLDER / "convert.toml").read_text(encoding="utf-8"))["script"]
    chosen = args.only.split(",") if args.only else [entry["name"] for entry in entries]
    scripts = []
    for entry in entries:
        if entry["name"] not in chosen:
            continue
        path = args.stored / f"{entry['name']}.json" if args.stored else None
        if path and path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            scripts.append(ConvertedScript(entry, stored["report"], stored["seconds"]))
            continue
        scripts.append(convert_script(entry, args.copies, ("--to", "job")))
        if path:
            stored = {"report": scripts[-1].report, "seconds": scripts[-1].seconds}
            path.write_text(json.dumps(stored), encoding="utf-8")
    rows = []
    for script in scripts:
        problem = script.report.get("failure") or script.report.get("not_offered", "")
        verdict = "yes" if script.report.get("rungs") else " ".join(problem.split())
        rows.append([script.entry["name"], script.entry["kind"], verdict, f"{script.seconds:.0f}"])
    made = [script for script in scripts if script.report.get("rungs")]
    texts = [
        table(["name", "kind", "a job, or why not", "seconds"], rows),
        f"- Jobs: {len(made)} of {len(scripts)}",
    ]
    report.finish(texts, args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())

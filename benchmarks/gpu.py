"""make gpu [PYTHON=python3] [PART=step] [MNIST=DIR] [MOVIELENS=DIR] [SHAKESPEARE=DIR] [DEVICE=cpu]

What does this machine's GPU make of it? Runs tests/gpu and the GPU's benchmarks with any torch from
2.11 on that has CUDA, from the source tree, without installing or fetching anything; what is
missing is skipped by name. Each part is a process of its own with a time limit, and the whole ends
within 9 minutes.

The report is results/gpu_<card>.md; with PART only that section is written anew. The exit code is 1
if a part failed, and 2 without a GPU. DEVICE=cpu rehearses on a CPU: the smallest sizes, printed
and not written."""

import argparse
import datetime
import importlib.util
import re
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from commands import Failed
from gpu_parts import PARTS, ROOT, Machine, Part, Skipped
from report import RESULTS, Report, cores

SECONDS = 525  # of all parts together; the rest of the 9 minutes is for what is between them
PLACES = ("data", "shared/data", "../shared/data")


def main() -> int:
    args = parsed()
    if trouble := what_is_wrong(args.device):
        print(f"error: {trouble}", file=sys.stderr)
        return 2
    machine = Machine(
        args.device,
        folder(args.mnist, "mnist", "train-images-idx3-ubyte.gz"),
        folder(args.movielens, "movielens/ncf-ml-1m", "ml-1m.train.pairs.gz"),
        folder(args.shakespeare, "shakespeare", "input.txt"),
    )
    parts = [part for part in PARTS if args.part in (None, part.name)]
    if args.inside is not None:
        return inside(parts[0], machine, args.inside)
    return run(parts, machine)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=[part.name for part in PARTS], help="only this one")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--mnist", type=Path, help="folder with the four MNIST files")
    parser.add_argument(
        "--movielens", type=Path, help="folder with the leave-one-out split of MovieLens 1M"
    )
    parser.add_argument("--shakespeare", type=Path, help="folder with input.txt")
    parser.add_argument(
        "--inside", type=Path, metavar="FILE", help=argparse.SUPPRESS
    )  # the part's own process
    return parser.parse_args()


def what_is_wrong(device: str) -> str | None:
    """Why nothing can be run, and what to type instead; or None."""
    try:
        import torch
    except ImportError:
        return f"{sys.executable} has no torch. HINT: make gpu PYTHON=/path/to/a/python/with/torch"
    if device == "cuda" and not torch.cuda.is_available():
        hint = f"a rehearsal on the CPU: make gpu DEVICE=cpu PART=step PYTHON={sys.executable}"
        return f"torch {torch.__version__} sees no CUDA GPU here. HINT: {hint}"
    if missing := not_installed():
        return f"{sys.executable} lacks {', '.join(missing)}. HINT: pip install {' '.join(missing)}"
    return None


def not_installed() -> list[str]:
    """What stepladder itself depends on and this Python has not: it is run from its source."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[<>=!~ \[]", requirement)[0] for requirement in project["dependencies"]]
    return [name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None]


def folder(given: Path | None, name: str, file: str) -> Path | None:
    """The first place that holds the file: the one given, or a usual one."""
    places = (
        [given]
        if given and (given / file).is_file()
        else [ROOT / parent / name for parent in PLACES]
    )
    return next((parent.resolve() for parent in places if (parent / file).is_file()), None)


def inside(part: Part, machine: Machine, file: Path) -> int:
    """Write a part's section to `file`, in the part's own process, and return 1 if it failed."""
    code = 0
    try:
        text = part.run(machine)
    except (Skipped, ModuleNotFoundError) as error:
        text = f"Skipped: {error}."
    except Failed as error:
        text = failed(str(error))
        code = 1
    file.write_text(text, encoding="utf-8")
    return code


def failed(output: str) -> str:
    """The machine's paths are nobody's business."""
    return f"FAIL:\n\n```text\n{output.replace(str(ROOT), '.')}\n```"


def run(parts: list[Part], machine: Machine) -> int:
    """Each part in turn, then the report. The exit code is 1 if one failed."""
    title = describe(machine)
    name = None
    at_end = time.monotonic() + SECONDS
    if not machine.is_trial_on_cpu:
        name = "gpu_" + re.sub(r"\W+", "_", title.partition(",")[0].lower()).strip("_")
    packages = ["torch", "accelerate", "lightning"]
    report = Report("gpu.py", f"On a GPU: {title}", packages, str(cores()), name)
    written = sections_of(RESULTS / f"{name}.md") if name else {}
    codes = []
    for part in parts:
        code, written[part.name] = section(
            part, machine, min(part.seconds, at_end - time.monotonic())
        )
        codes.append(code)
    order = [part.name for part in PARTS if part.name in written]
    report.finish([written[one] for one in order], write=name is not None)
    return max(codes)


def describe(machine: Machine) -> str:
    """The card first: it names the report."""
    import torch

    if machine.is_trial_on_cpu:
        return "rehearsal on a CPU, no result"
    card = torch.cuda.get_device_name(0)
    gigabytes = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{card}, {gigabytes:.0f} GiB, {torch.cuda.device_count()} of them, CUDA {torch.version.cuda}"


def section(part: Part, machine: Machine, seconds: float) -> tuple[int, str]:
    """The exit code and the section of one part, which is ended after so many seconds."""
    from stepladder.tools.learn.command import run_command

    head = f"## {part.name}\n\n{part.title} {datetime.date.today().isoformat()}"
    if seconds < 1:
        return 0, f"{head}.\n\nSkipped: no time left."
    print(f"-- {part.name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "section.md")
        began = time.monotonic()
        argv = [
            sys.executable,
            __file__,
            "--part",
            part.name,
            "--device",
            machine.device,
            "--inside",
            str(file),
        ]
        for name in ("mnist", "movielens", "shakespeare"):
            if where := getattr(machine, name):
                argv += [f"--{name}", str(where)]
        done = run_command(
            argv, ROOT, lambda line: print(line, file=sys.stderr, flush=True), seconds
        )
        took = time.monotonic() - began
        if file.is_file():
            return done.exit_code, f"{head}, {took:.0f} s.\n\n{file.read_text(encoding='utf-8')}"
    why = f"no end within {seconds:.0f} s" if done.timed_out else f"exit code {done.exit_code}"
    return (
        1,
        f"{head}, {took:.0f} s.\n\n{failed(chr(10).join([why, *done.output.splitlines()[-15:]]))}",
    )


def sections_of(report: Path) -> dict[str, str]:
    """The sections of a report that was written before, by part."""
    text = report.read_text(encoding="utf-8") if report.is_file() else ""
    sections = [section.strip() for section in re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]]
    return {section.split()[1]: section for section in sections}


if __name__ == "__main__":
    sys.exit(main())

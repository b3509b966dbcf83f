"""`stepladder convert SCRIPT`: the changes from one process to many, each with its proof."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import click

from stepladder.cli.check import validate_script
from stepladder.cli.flags import make_command, make_field_options
from stepladder.cli.types import AsJson, Count, Wait, Words
from stepladder.core.console import echo, echo_json
from stepladder.core.errors import InputError
from stepladder.core.output_file import write_output
from stepladder.tools.convert.convert import ConversionRequest, Conversions, ProvedRung, convert
from stepladder.tools.convert.ladder import RUNGS

TRAINS_ONE_MODEL = 3  # rungs: a, b and c
SUFFIXES = {"script": "ddp", "accelerate": "accelerate", "job": "job"}
NOT_COMPLETE = 1  # the exit code where a rung is not offered


@dataclass(frozen=True)
class _ConvertFlags:
    """The flags of `stepladder convert`.

    Args:
        rung: Stop after this rung.
        epochs: Training passes of each run.
        timeout: Seconds for one run of SCRIPT.
        write: Write the converted script beside SCRIPT: train_ddp.py for train.py, or a folder
            train_ddp if several files change.
        stop_signals: In rung h use stepladder.StopSignals, which stops before the time limit of a
            job of `submit` too. The converted script then imports stepladder.
        to: script: rung by rung as below, with torch alone. accelerate: the same rungs, with an
            Accelerator of Hugging Face. job: a file for `stepladder train`, which trains it with
            the same bits on any number of processes.
    """

    rung: Literal["a", "b", "c", "d", "e", "f", "g", "h"] = "h"
    epochs: Count = 2
    timeout: Wait = 120
    write: bool = False
    stop_signals: bool = False
    to: Literal["script", "accelerate", "job"] = "script"
    as_json: AsJson = False


@make_command(
    click.Command,
    *make_field_options(_ConvertFlags),
    context_settings={"allow_interspersed_args": False},
)
def command(script: Path, args: Words = (), **values: Any) -> int:
    """Propose how SCRIPT, which trains on one process, trains on many; prove each step.

    Runs SCRIPT with ARGS on one process, in a copy of the working folder, and proposes small
    changes, rung by rung. After each, the changed script runs on one and on two CPU processes, with
    frozen weights and some batches of each loader: samples, gradients and shown numbers must be
    those of SCRIPT. A rung that does not hold is not offered, and it is said why. Exit code 1 if
    a rung was not offered, else 0.
    """
    flags = _ConvertFlags(**values)
    validate_script(script, args)
    is_job = flags.to == "job"
    if is_job and (flags.rung != RUNGS[-1].letter or flags.stop_signals):
        raise InputError(
            "--to job has no rungs, and --rung and --stop-signals are of a script",
            f"stepladder convert --to job {script}",
        )
    if flags.to == "accelerate" and not find_spec("accelerate"):
        raise InputError("--to accelerate: accelerate is not installed", "pip install accelerate")
    target = _choose_target(script, SUFFIXES[flags.to]) if flags.write else None
    request = ConversionRequest(
        script, args, flags.rung, flags.epochs, flags.timeout, flags.stop_signals, flags.to
    )
    result = convert(request, (lambda _: None) if flags.as_json else _show_rung)
    is_partial = bool(result.stopped) and len(result.rungs) < TRAINS_ONE_MODEL and not is_job
    written = write_files(result, script, target) if target and not is_partial else []
    if flags.as_json:
        echo_json(_json_of(result, written))
    else:
        _show_end(result, request, written, is_partial)
    return NOT_COMPLETE if result.stopped else 0


def _choose_target(script: Path, suffix: str) -> Path:
    """Return the path beside a script that the converted one gets.

    Raises:
        InputError: The file, or the folder for several files, exists.
    """
    target = script.with_name(f"{script.stem}_{suffix}{script.suffix}")
    for path in (target, target.with_suffix("")):
        if path.exists():
            raise InputError(f"--write: {path} exists", f"mv {path} {path}.old")
    return target


def write_files(result: Conversions, script: Path, target: Path) -> list[Path]:
    """Write the converted files, the script first, and return their paths.

    A folder gets all files of the script, so that it can be started.
    """
    if not result.files:
        return []
    texts = result.files
    paths = dict.fromkeys(texts, target)
    if len(texts) > 1:
        texts = dict(result.sources)
        root = script.absolute().parents[len(Path(next(iter(texts))).parts) - 1]
        packages = {package for name in texts for package in Path(name).parents}
        for module in (package / "__init__.py" for package in packages):
            if str(module) not in texts and (root / module).is_file():
                texts[str(module)] = (root / module).read_text(encoding="utf-8")
        paths = {name: target.with_suffix("") / name for name in texts}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, texts[name], "--write")
    return list(paths.values())


def _show_rung(proved: ProvedRung) -> None:
    rung = proved.rung
    echo(f"{'rung ' * (len(rung.letter) == 1)}{rung.letter}: {rung.title}")
    echo(f"  {rung.change} Without it: {rung.without[0].lower()}{rung.without[1:]}")
    for text in proved.diffs:
        echo("".join(f"    {line}\n" for line in text.splitlines()).rstrip())
    if not proved.diffs:
        echo("    nothing to change")
    for line in proved.proof.holds:
        echo(f"  holds: {line}")
    for line in proved.proof.not_taken:
        echo(f"  another way fails: {line}")
    for line in proved.not_judged:
        echo(f"  not judged: {line}")
    echo("")


def _show_end(
    result: Conversions, request: ConversionRequest, written: list[Path], is_partial: bool
) -> None:
    arguments = "".join(f" {shlex.quote(text)}" for text in request.args)
    if result.stopped:
        what = "a job" if request.to == "job" else "rung"
        echo(f"not offered: {what} {result.stopped}")
    for path in written:
        echo(f"written: {path}")
    if request.to == "job" and written:
        echo(f"to train it on 2 processes: stepladder train {written[0]} --nproc 2 --sync exact")
    elif written:
        number = result.num_processes
        started = f"{written[0]}{arguments}"
        echo(f"to start it on {number} processes: stepladder run --nproc {number} {started}")
        if number == 2:  # a batch with shares for 2 has, as a rule, some for 4
            submit = "stepladder submit --dry-run --nodes 2 --nproc 2 -- run"
            echo(f"to see its batch script for two nodes: {submit} {started}")
    elif is_partial:
        echo("not written: without rung c each process would train a model of its own")
    elif result.files and not written:
        script, way = request.script, f" --to {request.to}" * (request.to != "script")
        way += f" --rung {request.last}" * (request.last != RUNGS[-1].letter)
        echo(f"to write it beside {script}: stepladder convert --write{way} {script}{arguments}")


def _json_of(result: Conversions, written: list[Path]) -> dict[str, Any]:
    return {
        "rungs": [
            {
                "rung": proved.rung.letter,
                "title": proved.rung.title,
                "diffs": proved.diffs,
                "held": proved.proof.holds,
                "not_judged": proved.not_judged,
                "not_taken": proved.proof.not_taken,
            }
            for proved in result.rungs
        ],
        "not_offered": result.stopped,
        "files": result.files,
        "written": [str(path) for path in written],
    }

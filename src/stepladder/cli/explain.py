"""`stepladder explain`: what an error message means, or why a running job does not move."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import click

from stepladder.cli.flags import make_command
from stepladder.cli.types import AsJson, Seconds
from stepladder.core.console import echo, echo_json
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.typed_file import open_to_read
from stepladder.tools.findings.finding import Finding

if TYPE_CHECKING:
    from stepladder.launcher.diagnose.explanation import Explanation
    from stepladder.launcher.diagnose.rank_status import RankStatus

MAX_LOG_LINE_BYTES = 1 << 16  # a log may hold anything
MAX_LOG_GIB = 64  # a hole in a file may be of any size, and reads as zeros
SHOWN_LINE_LENGTH = 200
EXPLAIN_RECORD_KEYS = {"line": "location.line", "text": "evidence", "cause": "cause", "do": "fix"}
NAME_OF_LOG = re.compile(r"\S+\.(log|out|err|txt)")
EXPLAIN_HINT = (
    "stepladder explain --list prints all known messages;"
    " in a log, look at the earliest error of all ranks"
)


@make_command()
def command(
    text: str | None = None,
    *,
    pid: int | None = None,
    job: str = "",
    seconds: Annotated[float, Seconds()] = 5.0,
    as_list: Annotated[bool, "--list"] = False,
    as_json: AsJson = False,
) -> int:
    """Explain an error message, or why a running job does not move.

    TEXT is a message of PyTorch, NCCL, gloo, CUDA, Slurm or SSH, a part of it, or some of its
    words. FILE is a log, which is searched for all known messages, or a dump of torch's flight
    recorder, beside the other ranks' dumps. Without either, a log is read from standard input. Exit
    code 1 if there is no known message in it.

    --pid is the process id of torchrun, srun, mpirun or a rank. The ranks on this machine are read
    by py-spy. Exit code 1 if no rank stands still.

    Args:
        text (TEXT|FILE): A message, or a log.
        pid (PID): Explain why the ranks of this process do not move.
        job (ID): The same for a Slurm job, on one of its nodes.
        seconds: For how long the ranks are watched.
        as_list: Print all known messages.
    """
    if as_list:
        _print_known_errors()
        return 0
    if sum([pid is not None, bool(job), text is not None]) > 1:
        raise InputError("TEXT, --pid and --job: each asks another question", "one of them")
    if pid is not None or job:
        return _explain_running_job(pid, job, seconds, as_json)
    if _explain_dumps(text, as_json):
        return 0
    return _explain_text(text, as_json)


def _explain_running_job(pid: int | None, job: str, seconds: float, as_json: bool) -> int:
    """Print why a job does not move, or that it moves; return the exit code."""
    from stepladder.tools.explain import running_job

    if pid is not None:
        processes = running_job.find_job(pid)
    else:
        processes = running_job.find_slurm_job(job)
    state = running_job.observe_job(running_job.find_ranks(processes), seconds)
    explanation = state.explanation
    if as_json:
        _print_ranks(state.statuses, explanation)
    elif explanation is not None:
        echo(explanation.format_report("a rank has not moved", seconds))
    else:
        echo(f"stepladder: no rank has stood still for {seconds:g} s: the job moves")
        for status in state.statuses:
            echo(f"  {status}: it is {status.describe_position()}")
    return int(explanation is None)


def _print_ranks(statuses: Sequence[RankStatus], explanation: Explanation | None) -> None:
    """Print what ranks do, and why, as JSON."""
    echo_json(
        {
            "stands_still": explanation is not None,
            "rank": explanation and explanation.rank,
            "sentence": explanation and explanation.sentence,
            "cause": explanation and explanation.cause,
            "ranks": [
                {"rank": status.rank, "pid": status.pid, "position": status.describe_position()}
                for status in statuses
            ],
        }
    )


def _explain_dumps(text: str | None, as_json: bool) -> bool:
    """Print why ranks waited, if the text names a dump of the flight recorder."""
    if not text or not is_file(text):
        return False
    from stepladder.tools.explain.flight_dumps import explain_dumps

    with as_input_error("a file beside it", "move it to another folder", (ValueError,)):
        explanation = explain_dumps(Path(text))
    if explanation is None:
        return False
    if as_json:
        _print_ranks(explanation.ranks, explanation)
    else:
        echo(f"stepladder: {explanation.with_cause}")
    return True


def _explain_text(text: str | None, as_json: bool) -> int:
    """Print what known messages in a text mean; return the exit code."""
    from stepladder.tools.explain.explain import explain, find_nearest
    from stepladder.tools.findings.render import as_record

    matches = list(explain(read_lines(text)))
    if text and not matches and not is_file(text):
        matches = list(find_nearest(text))
    if as_json:
        records = [as_record(match, EXPLAIN_RECORD_KEYS) for match in matches]
        for record in records:
            record["line"] = record["line"] or 1  # a text without a known message is one line
        echo_json({"found": records})
        return int(not matches)
    print_matches(matches)
    if not matches:
        where = "in it" if text else "on standard input"
        echo(f"stepladder: no known error message is {where}. HINT: {EXPLAIN_HINT}", err=True)
    return int(not matches)


def _print_known_errors() -> None:
    """Print a line for each message that `explain` knows."""
    from stepladder.tools.explain.explain import known_errors

    for error in known_errors():
        for message in error.texts:
            echo(f"{error.source}: {message}")


def print_matches(matches: Iterable[Finding], err: bool = False) -> None:
    """Print each message that was found, its cause and what to do."""
    for match in matches:
        number = match.location.line
        text = click.unstyle(match.evidence)[:SHOWN_LINE_LENGTH]
        found = f"line {number}: {text}" if number else f"perhaps: {match.evidence}"
        echo(f"{found}\n  cause: {match.cause}\n  do:    {match.fix}", err)


def is_file(text: str) -> bool:
    """Return whether the text is the path of something that exists."""
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # longer than a name may be
        return False


def read_lines(text: str | None) -> Iterator[str]:
    """Yield the lines of the argument, of the file that it names, or of standard input."""
    if text == "" or (text is None and (sys.stdin is None or sys.stdin.isatty())):
        raise InputError(
            "no text to explain", "stepladder explain 'Address already in use', or a log file"
        )
    if text is None:
        yield from _decode_lines(sys.stdin.buffer)
    elif NAME_OF_LOG.fullmatch(text) and not is_file(text):
        raise InputError(f"{text} is no file", "the path of a log, or the text of a message")
    elif is_file(text):
        hint = f"a text file of at most {MAX_LOG_GIB} GiB"
        with (
            as_input_error(f"{text} cannot be read", hint, (OSError, ValueError)),
            open_to_read(Path(text)) as file,
        ):
            if os.fstat(file.fileno()).st_size > MAX_LOG_GIB << 30:
                raise ValueError("it is larger than any log")
            yield from _decode_lines(file)
    else:
        yield from text.splitlines()


def _decode_lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of a file, the very long ones in parts."""
    for line in iter(lambda: file.readline(MAX_LOG_LINE_BYTES), b""):
        yield line.decode(errors="replace")

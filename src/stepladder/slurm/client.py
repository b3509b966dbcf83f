"""Running Slurm's commands, and reading what they print.

Every command has a time limit: on a broken cluster some of them wait for ever.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.folders import get_state_folder
from stepladder.core.numbers import parse_whole_number
from stepladder.core.paths import parse_path
from stepladder.core.waiting import retry

SLURM_TIMEOUT_S = 30.0
SLURM_BUSY_TIMEOUT_S = 120.0
SLURM_RETRY_INTERVAL_S = 1.0
SYSTEM_CONF = Path("/etc/slurm/slurm.conf")
NO_SLURM_HINT = "go to a login node of the cluster, or practise here: stepladder lab up --nodes 2"
NO_VALUES = ("(null)", "None", "Unknown", "N/A")  # what Slurm prints for an empty field


class SlurmRefusal(InputError):
    """Slurm answered that it does not do this, or does not know this."""


class SlurmBusy(InputError):
    """Slurm's controller runs, and had no time to answer: the question is still open."""


def lab_conf() -> Path:
    """Return the configuration of the user's `stepladder lab`, which exists while the lab is up."""
    return get_state_folder() / "lab" / "slurm.conf"


def slurm_environment() -> dict[str, str]:
    """Return SLURM_CONF for Slurm's commands if they would not find the user's lab without it."""
    if os.environ.get("SLURM_CONF") or SYSTEM_CONF.exists() or not lab_conf().exists():
        return {}
    return {"SLURM_CONF": str(lab_conf())}


def run_slurm(
    *command: str,
    text: str = "",
    seconds: float = SLURM_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run one of Slurm's commands.

    Args:
        *command: The command.
        text: Its standard input.
        seconds: Its time limit.
        env: Further environment variables.

    Returns:
        Its standard output.

    Raises:
        InputError: If there is no Slurm. `_make_error` lists other causes.
        SlurmBusy: If the controller did not answer in time.
    """
    conf = os.environ.get("SLURM_CONF")
    # Without this file, Slurm's commands would wait for a minute.
    if conf and not parse_path("SLURM_CONF", conf).exists():
        raise InputError(
            f"SLURM_CONF={conf} is not there", "unset SLURM_CONF, or stepladder lab up --nodes 2"
        )
    try:
        process = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, **slurm_environment(), **(env or {})},
        )
    except (FileNotFoundError, PermissionError) as error:
        what = "not found" if isinstance(error, FileNotFoundError) else "not yours to execute"
        raise InputError(
            f"there is no Slurm on this machine ({command[0]} is {what})", NO_SLURM_HINT
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmBusy(
            f"Slurm has not answered {command[0]} within {seconds:g} s", "scontrol ping"
        ) from error
    if process.returncode == 0:
        return process.stdout
    failure = _make_error(command[0], process)
    raise failure


def _make_error(program: str, process: subprocess.CompletedProcess[str]) -> InputError:
    """Return the error for a command that failed, by what it printed."""
    output = process.stderr
    lines = (re.sub(r"(^\w+: )?(error|fatal): ", "", line) for line in output.splitlines())
    messages = [line for line in lines if line and not line.startswith("Try ")]
    reason = "; ".join(messages) or f"exit code {process.returncode}"
    if re.search(r"configuration source|resolve_ctls|Could not open|slurm\.conf", output):
        return InputError(f"Slurm's commands are here, but no cluster ({reason})", NO_SLURM_HINT)
    if re.search(r"[Uu]nable to contact|Connection refused|connect failure", output):
        return InputError(f"Slurm's controller does not answer ({reason})", "scontrol ping")
    if re.search(r"timed out|Zero Bytes were transmitted", output):
        return SlurmBusy(f"Slurm's controller has not answered in time ({reason})", "scontrol ping")
    return SlurmRefusal(reason, f"{program} --help")


def show_job(job: str) -> str:
    """Return what `scontrol show job` prints, and retry while the controller is busy.

    Slurm knows a job while it waits or runs, and some minutes after; SlurmRefusal is raised for
    others.

    Args:
        job: The job's number.

    Returns:
        The output.

    Raises:
        InputError: If `job` is not a number.
        SlurmBusy: If the controller is busy for SLURM_BUSY_TIMEOUT_S.
    """
    if parse_whole_number(job) is None:
        raise InputError(f"{job!r} is not a job's number", "stepladder status")
    show = partial(run_slurm, "scontrol", "show", "job", job)
    return retry(show, SlurmBusy, SLURM_BUSY_TIMEOUT_S, SLURM_RETRY_INTERVAL_S)


def parse_field(text: str, name: str) -> str:
    """Return a field of what `scontrol show` prints, "" if there is none.

    Users choose the values of some fields, which could look like other fields. These fields are
    alone on their lines, and are not searched for others.
    """
    if name not in ("Command", "WorkDir"):
        user_field = re.compile(r"\s*(JobId|Command|WorkDir|Comment)=")
        text = "\n".join(line for line in text.splitlines() if not user_field.match(line))
    if name in ("StdOut", "Command", "WorkDir"):
        pattern = rf"^\s*{name}=(.*)$"
    else:
        pattern = rf"(?:^|\s){name}=(\S*)"
    match = re.search(pattern, text, re.MULTILINE)
    if match is None or match[1] in NO_VALUES:
        return ""
    return match[1]

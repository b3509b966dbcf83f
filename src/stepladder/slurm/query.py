"""Asking Slurm. Every question has a time limit: on a broken cluster some commands wait for ever."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.errors import InputError

SECONDS_TO_ANSWER = 30.0
SECONDS_WHILE_BUSY, SECONDS_BETWEEN_TRIES = 120.0, 1.0
SYSTEM_CONF = Path("/etc/slurm/slurm.conf")
NO_SLURM = "go to a login node of the cluster, or practise here: stepladder lab up --nodes 2"


class NotKnown(InputError):
    """Slurm answered, and said no."""


class Busy(InputError):
    """Slurm's controller is there, and had no time to answer: that says nothing of what was asked."""


def state_dir() -> Path:
    """Where the user's own state lives, beside any run."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "stepladder"


def lab_conf() -> Path:
    """The configuration of the user's `stepladder lab`, while it is up."""
    return state_dir() / "lab" / "slurm.conf"


def slurm_environment() -> dict[str, str]:
    """SLURM_CONF for Slurm's commands: the user's, else the system's, else that of `stepladder lab`."""
    if os.environ.get("SLURM_CONF") or SYSTEM_CONF.exists() or not lab_conf().exists():
        return {}
    return {"SLURM_CONF": str(lab_conf())}


def ask(*command: str, text: str = "", seconds: float = SECONDS_TO_ANSWER) -> str:
    """A Slurm command's answer. Raises InputError where there is no Slurm, no answer (Busy: not in time), or a
    refusal (NotKnown).

    text: its standard input.
    """
    conf = os.environ.get("SLURM_CONF")
    if conf and not Path(conf).exists():  # Slurm's commands would wait for a minute
        raise InputError(f"SLURM_CONF={conf} is not there", "unset SLURM_CONF, or stepladder lab up --nodes 2")
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, check=False,
            env={**os.environ, **slurm_environment()},
        )  # fmt: skip
    except FileNotFoundError as error:
        raise InputError(f"there is no Slurm on this machine ({command[0]} is not found)", NO_SLURM) from error
    except subprocess.TimeoutExpired as error:
        raise Busy(f"Slurm has not answered {command[0]} within {seconds:g} s", "scontrol ping") from error
    if done.returncode == 0:
        return done.stdout
    lines = (re.sub(r"(^\w+: )?(error|fatal): ", "", line) for line in done.stderr.splitlines())
    said = (
        "; ".join(line for line in lines if line and not line.startswith("Try ")) or f"exit code {done.returncode}"
    )
    if re.search(r"configuration source|resolve_ctls|Could not open|slurm\.conf", done.stderr):
        raise InputError(f"Slurm's commands are here, but no cluster ({said})", NO_SLURM)
    if re.search(r"[Uu]nable to contact|Connection refused|connect failure", done.stderr):
        raise InputError(f"Slurm's controller does not answer ({said})", "scontrol ping")
    if re.search(r"timed out|Zero Bytes were transmitted", done.stderr):
        raise Busy(f"Slurm's controller has not answered in time ({said})", "scontrol ping")
    raise NotKnown(said, f"{command[0]} --help")


# -- names of nodes, times --------------------------------------------------------------------------------


def hostnames(text: str) -> list[str]:
    """The nodes of a Slurm node list: `rack[1-2]n[03-04],login` names five. Raises InputError."""
    parts = re.findall(r"(?:[^,\[\]\s]|\[[\d,-]+\])+", text)
    if ",".join(parts) != text or not parts:
        raise InputError(f"{text!r} is not a node list", "names as in gpu[1-4,7],login")
    return [name for part in parts for name in _expand(part)]


def _expand(part: str) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)  # text, numbers, text, numbers, ..., text
    choices = [_numbers(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(text: str) -> list[str]:
    found = []
    for span in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        if match is None:
            raise InputError(f"[{text}] in a node list is not a range", "numbers as in gpu[1-4,7]")
        first, last = match.groups()
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return found


def seconds_of(text: str) -> float:
    """Slurm's way to write a time: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. Raises InputError."""
    if text.lower() in ("infinite", "unlimited", "n/a"):
        return math.inf
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise InputError(
            f"--time {text!r} is not a time as Slurm has it", "--time 30 (minutes), 2:00:00, 1-12:00:00"
        )
    days, _, rest = text.rpartition("-")
    numbers = list(map(int, rest.split(":")))
    if days:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *numbers, 0], 2: [0, *numbers]}.get(len(numbers), numbers)
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


# -- partitions -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nodes:
    """Nodes of one kind in a partition. gpus: Slurm's word for them, as in gpu:a100:4."""

    count: int
    cpus: int
    gpus: str

    def has_gpus(self, asked: str) -> bool:
        """Whether each has that many, as --gpus-per-node says it: N or TYPE:N."""
        kind, _, number = asked.rpartition(":")
        found = re.findall(r"gpu(?::([^:(,]+))?:(\d+)", self.gpus)
        return sum(int(n) for k, n in found if not kind or k == kind) >= int(number)


@dataclass(frozen=True)
class Partition:
    """seconds, most: its limits of time and of nodes per job; math.inf where there is none."""

    name: str
    is_default: bool
    is_up: bool
    seconds: float
    most: float
    nodes: tuple[Nodes, ...]

    @property
    def count(self) -> int:
        return sum(group.count for group in self.nodes)


def partitions() -> dict[str, Partition]:
    """Of this cluster, as sinfo knows them. Raises InputError without Slurm."""
    return read_partitions(ask("sinfo", "--noheader", "--format", "%P|%a|%l|%s|%D|%c|%G"))


def read_partitions(text: str) -> dict[str, Partition]:
    """From lines of sinfo: name, availability, time limit, job size, nodes, processors, generic resources."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, available, limit, size, count, cpus, gpus = line.split("|", 6)
        most = size.rpartition("-")[2]
        group = Nodes(int(count), int(cpus.rstrip("+")), gpus)
        known = found.get(name.rstrip("*"))
        found[name.rstrip("*")] = Partition(
            name.rstrip("*"), name.endswith("*"), available == "up", seconds_of(limit),
            math.inf if most == "infinite" else int(most), (*known.nodes, group) if known else (group,),
        )  # fmt: skip
    return found


# -- jobs -------------------------------------------------------------------------------------------------


def show_job(job: str) -> str:
    """`scontrol show job`: known while it waits or runs, and some minutes after. Raises NotKnown.

    Asks again for a while where the controller is busy.
    """
    if not re.fullmatch(r"\d+", job):
        raise InputError(f"{job!r} is not a job's number", "stepladder status")
    deadline = time.monotonic() + SECONDS_WHILE_BUSY
    while True:
        try:
            return ask("scontrol", "show", "job", job)
        except Busy:
            if time.monotonic() > deadline:
                raise
        time.sleep(SECONDS_BETWEEN_TRIES)


def field(shown: str, name: str) -> str:
    """A field of `scontrol show`, "" where it is not there. Fields named by users stand alone on their lines."""
    lines = [line for line in shown.splitlines() if not re.match(r"\s*(JobId|Command|WorkDir|Comment)=", line)]
    whole = rf"^\s*{name}=(.*)$" if name in ("StdOut", "Command", "WorkDir") else rf"(?:^|\s){name}=(\S*)"
    found = re.search(whole, shown if name in ("Command", "WorkDir") else "\n".join(lines), re.MULTILINE)
    return "" if found is None or found.group(1) in ("(null)", "None", "Unknown", "N/A") else found.group(1)

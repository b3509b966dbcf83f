"""Checks before a lab starts, and the layout that fits this machine."""

from __future__ import annotations

import getpass
import itertools
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from slurm_lab.accounting import ACCOUNTING_PROGRAMS
from slurm_lab.errors import LabError, as_lab_error
from slurm_lab.lab import LAB_RECORD_FILE, Lab
from slurm_lab.layout import MAX_NODES, Layout
from slurm_lab.machine import make_search_path

MAX_LAB_GPUS = 16
MAX_FOLDER_LENGTH = 70  # the path of a Unix socket in it must have at most 107 characters
# Below the range from which Linux gives ports to outgoing connections.
FREE_PORT_RANGE = range(20000, 32000)
SLURM_PROGRAMS = {
    "slurm-wlm": ("slurmctld", "slurmd", "sinfo", "scontrol", "srun", "sbatch"),
    "munge": ("munged",),
}
NETWORK_PROGRAMS = {"iproute2": ("ip",), "util-linux": ("nsenter", "unshare")}


@dataclass(frozen=True)
class LabSize:
    """What a person chooses of a lab.

    Args:
        nodes: Number of nodes.
        cpus: Processors that each node declares.
        gpus: Simulated GPUs of each node.
        plain: Whether all nodes have the loopback address, which needs no root.
        accounting: Whether finished jobs are recorded, for sacct.
    """

    nodes: int = 2
    cpus: int = 4
    gpus: int = 0
    plain: bool = False
    accounting: bool = False


def prepare_lab(size: LabSize, folder: Path) -> Lab:
    """Return a lab that can be started.

    Args:
        size: What it shall have.
        folder: The folder of all its files, which must not exist yet.

    Returns:
        The lab, not started.

    Raises:
        LabError: If this machine or this user cannot have it.
    """
    _validate_size("--nodes", size.nodes, 1, MAX_NODES)
    _validate_size("--cpus", size.cpus, 1, 1024)
    _validate_size("--gpus", size.gpus, 0, MAX_LAB_GPUS)
    validate_programs(size.plain, size.accounting)
    if not size.plain and os.geteuid() != 0:
        raise LabError(
            f"a network per node needs root, and you are user {os.geteuid()}",
            "slurm-lab up --plain, or the same command with sudo",
        )
    message = f"user {os.geteuid()} has no name, and Slurm asks for one"
    with as_lab_error(message, "a line for it in /etc/passwd", (KeyError, OSError)):
        user = getpass.getuser()
    _validate_folder(folder)
    _remove_stale_lab(folder)
    num_ports = 1 + size.nodes if size.plain else 1
    ports = _find_free_ports(num_ports + 1)
    layout = Layout(
        folder,
        size.nodes,
        size.cpus,
        size.gpus,
        memory=psutil.virtual_memory().total // 2**20,
        plain=size.plain,
        number=0,
        ports=ports[:num_ports],
        host=socket.gethostname().partition(".")[0],
        user=user,
        accounting_port=ports[num_ports] if size.accounting else 0,
    )
    return Lab(layout)


def validate_system() -> None:
    """Raise LabError where no lab can run."""
    if sys.platform != "linux":
        raise LabError(
            f"a lab needs Linux, and this is {sys.platform}",
            "a virtual machine with Debian or Ubuntu",
        )


def _validate_size(flag: str, value: int, minimum: int, maximum: int) -> None:
    """Raise LabError if a flag's value is out of range."""
    if not minimum <= value <= maximum:
        raise LabError(f"{flag} {value} is not between {minimum} and {maximum}", f"{flag} 2")


def validate_programs(plain: bool, accounting: bool = False) -> None:
    """Raise LabError if a program of Slurm, of the networks or of accounting is not installed."""
    missing = _find_missing(SLURM_PROGRAMS if plain else SLURM_PROGRAMS | NETWORK_PROGRAMS)
    if missing:
        raise LabError(
            f"{', '.join(missing.values())} not found: Slurm is not installed here",
            f"apt-get install {' '.join(missing)}",
        )
    missing = _find_missing(ACCOUNTING_PROGRAMS if accounting else {})
    if missing:
        raise LabError(
            f"--accounting: {', '.join(missing.values())} not found",
            f"apt-get install {' '.join(missing)}; or slurm-lab up without --accounting",
        )


def _find_missing(programs_by_package: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the packages that lack a program, each with the last one that it lacks."""
    missing = {}
    for package, programs in programs_by_package.items():
        for program in programs:
            if shutil.which(program, path=make_search_path()) is None:
                missing[package] = program
    return missing


def can_have_networks() -> bool:
    """Return whether this user may give each node a network of its own."""
    if os.geteuid() != 0 or _find_missing(NETWORK_PROGRAMS):
        return False
    command = ["unshare", "--net", "--uts", "--mount", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _find_free_ports(count: int) -> tuple[int, ...]:
    """Return several free TCP ports."""
    # A generator of its own: a seed that the user has set would choose the same ports for two labs.
    candidates = random.SystemRandom().sample(FREE_PORT_RANGE, len(FREE_PORT_RANGE))
    return tuple(itertools.islice(filter(_can_bind, candidates), count))


def _can_bind(port: int) -> bool:
    """Return whether this process could listen on a port of every address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _validate_folder(folder: Path) -> None:
    """Raise LabError if Slurm cannot use the path of the lab's folder."""
    text = str(folder)
    if len(text) > MAX_FOLDER_LENGTH or not re.fullmatch(r"[\w./+-]+", text):
        raise LabError(
            f"the lab's folder {text} is longer than {MAX_FOLDER_LENGTH} characters,"
            " or has others than Slurm allows",
            "export XDG_STATE_HOME=$(mktemp -d); slurm-lab up",
        )


def _remove_stale_lab(folder: Path) -> None:
    """Remove a lab whose processes have ended, as after a reboot.

    Raises:
        LabError: If the user's lab is up, or the folder has no record.
    """
    lab = Lab.load(folder)
    if lab is None:
        if folder.exists():
            raise LabError(f"{folder} is there without its {LAB_RECORD_FILE}", f"rm -r {folder}")
        return
    if any(map(lab.find_process, lab.daemons)):
        raise LabError(f"a lab is up already, with {lab.layout.nodes} nodes", "slurm-lab down")
    lab.down()

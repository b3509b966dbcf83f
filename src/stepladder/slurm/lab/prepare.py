"""Checks before a lab starts, and the layout that fits this machine."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
from pathlib import Path

import psutil

from stepladder.core.address import find_free_ports
from stepladder.core.errors import InputError, as_input_error
from stepladder.slurm.lab.lab import LAB_RECORD_FILE, Lab, get_lab_folder
from stepladder.slurm.lab.layout import MAX_NODES, Layout
from stepladder.slurm.lab.machine import make_search_path

MAX_LAB_GPUS = 16
MAX_FOLDER_LENGTH = 70  # the path of a Unix socket in it must have at most 107 characters
REQUIRED_PROGRAMS = {
    "slurm-wlm": ("slurmctld", "slurmd", "sinfo", "scontrol", "srun", "sbatch"),
    "munge": ("munged",),
    "iproute2": ("ip",),
    "util-linux": ("nsenter", "unshare"),
}
NETWORK_PACKAGES = ("iproute2", "util-linux")


def prepare_lab(nodes: int, cpus: int, gpus: int, plain: bool) -> Lab:
    """Return a lab that can be started.

    Args:
        nodes: Number of nodes.
        cpus: Processors that each node declares.
        gpus: Simulated GPUs of each node.
        plain: Whether all nodes have the loopback address, which needs no root.

    Returns:
        The lab, not started.

    Raises:
        InputError: If this machine or this user cannot have it.
    """
    _validate_size("--nodes", nodes, 1, MAX_NODES)
    _validate_size("--cpus", cpus, 1, 1024)
    _validate_size("--gpus", gpus, 0, MAX_LAB_GPUS)
    validate_programs(plain)
    if not plain and os.geteuid() != 0:
        raise InputError(
            f"a network per node needs root, and you are user {os.geteuid()}",
            "stepladder lab up --plain, or the same command with sudo",
        )
    message = f"user {os.geteuid()} has no name, and Slurm asks for one"
    with as_input_error(message, "a line for it in /etc/passwd", (KeyError, OSError)):
        user = getpass.getuser()
    folder = get_lab_folder()
    _validate_folder(folder)
    _remove_stale_lab(folder)
    layout = Layout(
        folder,
        nodes,
        cpus,
        gpus,
        memory=psutil.virtual_memory().total // 2**20,
        plain=plain,
        number=0,
        ports=find_free_ports(1 + nodes if plain else 1),
        host=socket.gethostname().partition(".")[0],
        user=user,
    )
    return Lab(layout)


def _validate_size(flag: str, value: int, minimum: int, maximum: int) -> None:
    """Raise InputError if a flag's value is out of range."""
    if not minimum <= value <= maximum:
        raise InputError(f"{flag} {value} is not between {minimum} and {maximum}", f"{flag} 2")


def validate_programs(plain: bool) -> None:
    """Raise InputError if a program of Slurm or of the networks is not installed."""
    missing = {}
    for package, programs in REQUIRED_PROGRAMS.items():
        if plain and package in NETWORK_PACKAGES:
            continue
        for program in programs:
            if shutil.which(program, path=make_search_path()) is None:
                missing[package] = program
    if missing:
        raise InputError(
            f"{', '.join(missing.values())} not found: Slurm is not installed here",
            f"apt-get install {' '.join(missing)}",
        )


def _validate_folder(folder: Path) -> None:
    """Raise InputError if Slurm cannot use the path of the lab's folder."""
    text = str(folder)
    if len(text) > MAX_FOLDER_LENGTH or not re.fullmatch(r"[\w./+-]+", text):
        raise InputError(
            f"the lab's folder {text} is longer than {MAX_FOLDER_LENGTH} characters,"
            " or has others than Slurm allows",
            "export XDG_STATE_HOME=$(mktemp -d); stepladder lab up",
        )


def _remove_stale_lab(folder: Path) -> None:
    """Remove a lab whose processes have ended, as after a reboot.

    Raises:
        InputError: If the user's lab is up, or the folder has no record.
    """
    lab = Lab.load()
    if lab is None:
        if folder.exists():
            raise InputError(f"{folder} is there without its {LAB_RECORD_FILE}", f"rm -r {folder}")
        return
    if any(map(lab.find_process, lab.daemons)):
        raise InputError(
            f"a lab is up already, with {lab.layout.nodes} nodes", "stepladder lab down"
        )
    lab.down()

"""What a lab needs before it starts, checked; and the layout that fits this machine."""

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
from stepladder.slurm.lab.cluster import STATE, Lab, lab_folder
from stepladder.slurm.lab.layout import MOST_NODES, Layout
from stepladder.slurm.lab.machine import search_path

MOST_GPUS = 16
LONGEST_FOLDER = 70  # a Unix socket's path, folder and step included, has at most 107 characters
PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", "sinfo", "scontrol", "srun", "sbatch"),
    "munge": ("munged",),
    "iproute2": ("ip",),
    "util-linux": ("nsenter", "unshare"),
}
ONLY_FOR_NETWORKS = ("iproute2", "util-linux")


def new_lab(nodes: int, cpus: int, gpus: int, plain: bool) -> Lab:
    """A lab that is not up yet. Raises InputError where it could not be."""
    check_size("--nodes", nodes, 1, MOST_NODES)
    check_size("--cpus", cpus, 1, 1024)
    check_size("--gpus", gpus, 0, MOST_GPUS)
    check_programs(plain)
    if not plain and os.geteuid() != 0:
        raise InputError(
            f"a network per node needs root, and you are user {os.geteuid()}",
            "stepladder lab up --plain, or the same command with sudo",
        )
    nameless = f"user {os.geteuid()} has no name, and Slurm asks for one"
    with as_input_error(nameless, "a line for it in /etc/passwd", (KeyError, OSError)):
        user = getpass.getuser()
    folder = lab_folder()
    check_folder(folder)
    remove_remains(folder)
    ports = find_free_ports(1 + nodes * plain)
    memory = psutil.virtual_memory().total // 2**20
    host = socket.gethostname().partition(".")[0]
    return Lab(Layout(folder, nodes, cpus, gpus, memory, plain, 0, ports, host, user))


def check_size(flag: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InputError(f"{flag} {value} is not between {least} and {most}", f"{flag} 2")


def check_programs(plain: bool) -> None:
    missing = {
        package: program
        for package, programs in PACKAGES.items()
        for program in programs
        if not (plain and package in ONLY_FOR_NETWORKS)
        and shutil.which(program, path=search_path()) is None
    }
    if missing:
        raise InputError(
            f"{', '.join(missing.values())} not found: Slurm is not installed here",
            f"apt-get install {' '.join(missing)}",
        )


def check_folder(folder: Path) -> None:
    text = str(folder)
    if len(text) > LONGEST_FOLDER or not re.fullmatch(r"[\w./+-]+", text):
        raise InputError(
            f"the lab's folder {text} is longer than {LONGEST_FOLDER} characters, or has others than Slurm allows",
            "export XDG_STATE_HOME=$(mktemp -d); stepladder lab up",
        )


def remove_remains(folder: Path) -> None:
    """Of a lab whose processes are gone, as after a reboot. Raises InputError where one is up."""
    lab = Lab.read()
    if lab is not None and any(map(lab.process, lab.daemons)):
        raise InputError(
            f"a lab is up already, with {lab.layout.nodes} nodes", "stepladder lab down"
        )
    if lab is not None:
        lab.down()
    elif folder.exists():
        raise InputError(f"{folder} is there without its {STATE}", f"rm -r {folder}")

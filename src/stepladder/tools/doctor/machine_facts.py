"""The facts of a machine as one value, which can be stored, and judged on another machine.

Nothing here judges the facts, and nothing fails because something is missing: unknown facts stay
empty.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from stepladder.core import typed_file
from stepladder.core.address import can_bind, resolve_host
from stepladder.core.errors import as_input_error
from stepladder.core.folders import get_file_system
from stepladder.core.numbers import MAX_PORT, parse_whole_number
from stepladder.core.output_file import write_output
from stepladder.core.process_count import count_cores
from stepladder.tools.doctor import network
from stepladder.tools.doctor.programs import (
    Gpus,
    Imports,
    Torch,
    find_gpus,
    inspect_script_imports,
    inspect_torch,
)
from stepladder.tools.doctor.variables import shown_variables

SHARED_MEMORY_FOLDER = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Folder:
    """The folder of runs.

    Args:
        kind: The kind of its file system: ext4, nfs4, lustre, ...
        skew: The seconds by which the file system's clock is ahead of this machine's.
    """

    path: str = ""
    kind: str = ""
    free_bytes: int | None = None
    writable: bool = True
    skew: float | None = None


@dataclass(frozen=True)
class Facts:
    """The facts of one machine at one moment.

    Args:
        nproc: The processes that the user wants to start here; 0 where that is not known.
        nodes: The machines that take part.
        env: The variables that start ranks.
        cores: The cores that this process may use.
        cores_quota: The cores that its control group may use, or None.
        shm_bytes: The size of /dev/shm.
        nofile: The soft limit of open files; -1 for none.
        memlock: The soft limit of locked memory in bytes; -1 for none.
        own_addresses: What this machine's name resolves to.
        port: The port that ranks would open here; None where none was tried.
        port_error: Why `port` cannot be opened here; empty where it can.
    """

    schema: Literal[2] = 2
    host: str = ""
    python: str = "3.11.0"
    executable: str = "python"
    nproc: int = 0
    nodes: int = 1
    env: dict[str, str] = field(default_factory=dict)
    torch: Torch = field(default_factory=Torch)
    script: Imports = field(default_factory=Imports)
    gpus: Gpus = field(default_factory=Gpus)
    cores: int = 1
    cores_quota: float | None = None
    shm_bytes: int | None = None
    nofile: int = -1
    nofile_hard: int = -1
    memlock: int = -1
    infiniband: bool = False
    folder: Folder = field(default_factory=Folder)
    interfaces: tuple[network.Interface, ...] = ()
    own_addresses: tuple[str, ...] = ()
    ipv6: bool = True
    peer: network.Peer = field(default_factory=network.Peer)
    port: int | None = None
    port_error: str = ""

    def __post_init__(self) -> None:
        network.check_addresses(*self.own_addresses)

    def parse_variable(self, variable: str) -> int:
        """Return the whole number in a variable; 0 where it has none."""
        return parse_whole_number(self.env.get(variable, "")) or 0

    @property
    def is_in_slurm_step(self) -> bool:
        """Whether this process is a task of a Slurm step with several tasks."""
        return self.parse_variable("SLURM_STEP_NUM_TASKS") > 1

    @property
    def tasks_on_node(self) -> int:
        """The tasks of this process's Slurm step on this node; 0 outside a step of several."""
        text = self.env.get("SLURM_STEP_TASKS_PER_NODE", "")
        first = re.match(r"[0-9]{1,9}", text)  # as in 2(x3),1
        if self.is_in_slurm_step and first:
            return int(first.group())
        return 0

    @property
    def planned_ranks(self) -> int:
        """The processes on this machine: those of `nproc`, else one per visible GPU, else one."""
        return self.nproc or self.torch.devices or len(self.gpus.found) or 1

    def save(self, path: Path) -> None:
        """Write the facts to a file, for `doctor --load`. Raises InputError."""
        write_output(path, json.dumps(asdict(self), indent=1) + "\n", "--save")

    @staticmethod
    def load(path: Path) -> Facts:
        """Read what `doctor --save` wrote. Raises InputError."""
        hint = "stepladder doctor --save FILE, on the machine in question"
        with as_input_error(f"--load {path}", hint, (OSError, ValueError)):
            text = typed_file.read_file(path)
        with as_input_error(f"--load {path} is not a bundle of this version", hint, (ValueError,)):
            bundle = typed_file.parse_json(text, dict[str, Any])
            facts: Facts = typed_file.convert(bundle, Facts)
            unequal_keys = set(bundle) ^ set(asdict(facts))
            if unequal_keys:
                raise ValueError(f"{min(unequal_keys)} is missing, or unknown to it")
        return facts


def gather_facts(
    nproc: int = 0,
    nodes: int = 1,
    folder: Path = Path("runs"),
    peer: str = "",
    port: int | None = None,
    script: Path | None = None,
) -> Facts:
    """Gather the facts of this machine, which takes as long as an import of torch.

    Args:
        nproc: The processes that the user wants to start here.
        nodes: The machines that take part.
        folder: The folder of runs.
        peer: Another machine to inspect.
        port: The port to open; None for MASTER_PORT. Inside a rank no port is tried by default,
            because MASTER_PORT is in use.
        script: A script whose imports are timed.
    """
    if port is None and "RANK" not in os.environ:
        port = parse_whole_number(os.environ.get("MASTER_PORT", ""), 1, MAX_PORT)
    import resource  # late: Windows has none

    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        host=platform.node(),
        python=platform.python_version(),
        executable=sys.executable,
        nproc=nproc,
        nodes=nodes,
        env=shown_variables(os.environ),
        torch=inspect_torch(),
        script=inspect_script_imports(script),
        gpus=find_gpus(),
        cores=count_cores(),
        cores_quota=read_cpu_quota(),
        shm_bytes=_read_shared_memory_bytes(),
        nofile=soft_limit,
        nofile_hard=hard_limit,
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=Path("/sys/class/infiniband").is_dir(),
        folder=inspect_folder(folder),
        interfaces=network.find_interfaces(),
        own_addresses=tuple(map(str, resolve_host(platform.node()))),
        ipv6=can_bind("::1", 0),
        peer=network.inspect_peer(peer),
        port=port,
        port_error=network.find_port_error(port),
    )


def _read_shared_memory_bytes() -> int | None:
    """Return the size of /dev/shm; None where there is none."""
    if not SHARED_MEMORY_FOLDER.is_dir():
        return None
    return shutil.disk_usage(SHARED_MEMORY_FOLDER).total


def read_cpu_quota(
    cgroups: Path = CGROUPS, cgroups_of_process: Path = CGROUPS_OF_PROCESS
) -> float | None:
    """Return the cores that this process's control group, and those above it, may use.

    Docker's --cpus and batch jobs set such a quota.

    Args:
        cgroups: The folder of control groups.
        cgroups_of_process: The file that lists those of this process. A line is 0::/path in
            version 2 of control groups, and number:cpu,cpuacct:/path in version 1.
    """
    try:
        text = cgroups_of_process.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    quotas = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        group = root / path.lstrip("/")
        groups = [parent for parent in (group, *group.parents) if parent.is_relative_to(root)]
        quotas += [_read_cgroup_quota(parent) for parent in groups]
    return min((quota for quota in quotas if quota is not None), default=None)


def _read_cgroup_quota(group: Path) -> float | None:
    """Return the cores that one control group may use; None where it has no quota."""
    with suppress(OSError, ValueError):
        limit, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        if limit == "max":
            return None
        return int(limit) / int(period)
    with suppress(OSError, ValueError):  # version 1
        limit_us = int((group / "cpu.cfs_quota_us").read_bytes())
        period_us = int((group / "cpu.cfs_period_us").read_bytes())
        return None if limit_us < 0 else limit_us / period_us
    return None


def inspect_folder(folder: Path) -> Folder:
    """Inspect a folder, or the nearest one above it that exists.

    One file is written into it, and removed again.
    """
    path = folder.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    skew = None
    is_writable = True
    probe = path / f".stepladder-doctor-{os.getpid()}"
    try:
        before = time.time()
        probe.touch(exist_ok=False)
        written = probe.stat().st_mtime
        after = time.time()
        skew = round(_compute_clock_skew(before, written, after), 3)
        probe.unlink()
    except OSError:
        is_writable = False
    free_bytes = shutil.disk_usage(path).free
    return Folder(str(folder), get_file_system(path), free_bytes, is_writable, skew)


def _compute_clock_skew(before: float, written: float, after: float) -> float:
    """Return the seconds by which the clock of a file system is ahead.

    Args:
        before: The time of this machine before a file was written.
        written: The time of the file.
        after: The time of this machine after that.
    """
    if written < before:
        return written - before
    return max(0.0, written - after)

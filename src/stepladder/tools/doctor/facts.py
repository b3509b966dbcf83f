"""What a machine is, as one value that can be stored and judged elsewhere.

Nothing here judges, and nothing may fail for something that is missing: what is not known stays
empty."""

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
    look_at_script,
    look_at_torch,
)
from stepladder.tools.doctor.variables import shown_variables


@dataclass(frozen=True)
class Folder:
    """Where runs are written. skew: seconds by which the file system's clock is ahead of this
    machine's.
    """

    path: str = ""
    kind: str = ""  # ext4, nfs4, lustre, ...
    free_bytes: int | None = None
    writable: bool = True
    skew: float | None = None


@dataclass(frozen=True)
class Facts:
    """One machine at one moment. nproc, nodes: what the user wants to start here; 0, 1: not said.

    cores: that this process may use.  cores_quota: of its control group, or None.  shm_bytes: size
    of /dev/shm.  nofile, memlock: soft limits, -1 for none.  env: of the variables that start
    ranks. own_addresses: what this machine's name resolves to.  port_error: why `port` cannot be
    opened here, or ""."""

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

    def number(self, variable: str) -> int:
        return parse_whole_number(self.env.get(variable, "")) or 0

    @property
    def in_step(self) -> bool:
        """Whether this process is a task of a Slurm step with several tasks."""
        return self.number("SLURM_STEP_NUM_TASKS") > 1

    @property
    def tasks_here(self) -> int:
        """Tasks on this node of the Slurm step that this process is in; 0 outside a step of
        several.
        """
        first = re.match(
            r"[0-9]{1,9}", self.env.get("SLURM_STEP_TASKS_PER_NODE", "")
        )  # as in 2(x3),1
        return int(first.group()) if self.in_step and first else 0

    @property
    def ranks_wanted(self) -> int:
        """Processes on this machine: as asked for, else one per GPU that is not hidden, else one."""
        return self.nproc or self.torch.devices or len(self.gpus.found) or 1

    def save(self, path: Path) -> None:
        """To be judged elsewhere. Raises InputError."""
        write_output(path, json.dumps(asdict(self), indent=1) + "\n", "--save")

    @staticmethod
    def load(path: Path) -> Facts:
        """What `doctor --save` wrote. Raises InputError."""
        hint = "stepladder doctor --save FILE, on the machine in question"
        with as_input_error(f"--load {path}", hint, (OSError, ValueError)):
            text = typed_file.read_file(path)
        with as_input_error(f"--load {path} is not a bundle of this version", hint, (ValueError,)):
            bundle = typed_file.parse_json(text, dict[str, Any])
            facts: Facts = typed_file.convert(bundle, Facts)
            if other := set(bundle) ^ set(asdict(facts)):
                raise ValueError(f"{min(other)} is missing, or not of it")
        return facts


def gather(
    nproc: int = 0,
    nodes: int = 1,
    folder: Path = Path("runs"),
    peer: str = "",
    port: int | None = None,
    script: Path | None = None,
) -> Facts:
    """Look at this machine. Takes as long as an import of torch does.

    port: None for MASTER_PORT, but inside a rank: there it is in use as it should be.
    """
    if port is None and "RANK" not in os.environ:
        port = parse_whole_number(os.environ.get("MASTER_PORT", ""), 1, MAX_PORT)
    import resource  # late: Windows has none

    (soft, hard), shm = resource.getrlimit(resource.RLIMIT_NOFILE), Path("/dev/shm")
    return Facts(
        host=platform.node(),
        python=platform.python_version(),
        executable=sys.executable,
        nproc=nproc,
        nodes=nodes,
        env=shown_variables(os.environ),
        torch=look_at_torch(),
        script=look_at_script(script) if script else Imports(),
        gpus=find_gpus(),
        cores=count_cores(),
        cores_quota=quota(),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        nofile=soft,
        nofile_hard=hard,
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=Path("/sys/class/infiniband").is_dir(),
        folder=look_at_folder(folder),
        interfaces=network.find_interfaces(),
        own_addresses=tuple(map(str, resolve_host(platform.node()))),
        ipv6=can_bind("::1", 0),
        peer=network.look_at_peer(peer) if peer else network.Peer(),
        port=port,
        port_error=network.look_at_port(port) if port is not None else "",
    )


def quota(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Cores that this process's control group and those above it may use: Docker's --cpus, a batch
    job's.

    A line of `own` is 0::/path in version 2 of control groups, and number:cpu,cpuacct:/path in
    version 1."""
    try:
        lines = [
            line.split(":", 2)
            for line in own.read_text(encoding="utf-8", errors="replace").splitlines()
        ]
    except OSError:
        return None
    limits = []
    for controllers, path in (line[1:] for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = groups / "cpu" if controllers else groups
        group = top / path.lstrip("/")
        limits += [_quota_of(one) for one in (group, *group.parents) if one.is_relative_to(top)]
    return min((limit for limit in limits if limit is not None), default=None)


def _quota_of(group: Path) -> float | None:
    with suppress(OSError, ValueError):
        limit, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        return None if limit == "max" else int(limit) / int(period)
    with suppress(OSError, ValueError):
        limit_v1, period_v1 = (
            int((group / f"cpu.cfs_{name}_us").read_bytes()) for name in ("quota", "period")
        )
        return None if limit_v1 < 0 else limit_v1 / period_v1
    return None


def look_at_folder(wanted: Path) -> Folder:
    """The folder, or the nearest above it that exists: nothing is made but one file, which goes
    again.
    """
    path = wanted.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    skew, writable, probe = None, True, path / f".stepladder-doctor-{os.getpid()}"
    try:
        before = time.time()
        probe.touch(exist_ok=False)
        written, after = probe.stat().st_mtime, time.time()
        skew = round(written - before if written < before else max(0.0, written - after), 3)
        probe.unlink()
    except OSError:
        writable = False
    return Folder(str(wanted), get_file_system(path), shutil.disk_usage(path).free, writable, skew)

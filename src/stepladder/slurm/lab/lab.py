"""The commands of a lab: up, status, fail, cut, heal, down.

The lab's folder exists only while the lab is up. It contains a record of the layout and the
daemons (lab.json), which every later command reads.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from stepladder.core import durable, typed_file
from stepladder.core.errors import InputError, as_input_error, get_reason
from stepladder.core.folders import get_state_folder, validate_ownership
from stepladder.core.waiting import wait_until
from stepladder.slurm.lab import machine
from stepladder.slurm.lab.layout import (
    LAB_UP,
    Layout,
    Node,
    make_gres_conf,
    make_hosts_file,
    make_slurm_conf,
)

LAB_RECORD_FILE = "lab.json"
LAB_START_TIMEOUT_S = 180.0  # for a busy machine; a daemon that ends is noticed at once
LAB_UP_HINT = "stepladder lab up --nodes 2"


def get_lab_folder() -> Path:
    """Return the folder of this user's lab."""
    return get_state_folder() / "lab"


@dataclass
class Lab:
    """A lab that is up or starting.

    Args:
        layout: Its layout.
        daemons: Its daemons by name; the name of a slurmd is its node's.
    """

    layout: Layout
    daemons: dict[str, machine.Daemon] = field(default_factory=dict)

    # -- the record --------------------------------------------------------------------------------

    @staticmethod
    def load() -> Lab | None:
        """Return this user's lab, None if it has none.

        Raises:
            InputError: If the record is damaged, or another user's.
        """
        file = get_lab_folder() / LAB_RECORD_FILE
        hint = f"rm -r {file.parent}, after its daemons: pgrep -af {file.parent}"
        try:
            validate_ownership(file)
            lab = typed_file.load_json(file, Lab, hint)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise InputError(
                f"{file} cannot be used: {get_reason(error)}", "export XDG_STATE_HOME=DIR"
            ) from error
        owner = file.stat().st_uid
        if owner != os.geteuid():
            raise InputError(f"{file} is of a lab of user {owner}", "the same command as that user")
        with as_input_error(f"{file} cannot be used", hint, (ValueError,)):
            lab.layout.validate(file.parent)
        return lab

    @staticmethod
    def load_running() -> Lab:
        """Return this user's lab.

        Raises:
            InputError: If it has none.
        """
        lab = Lab.load()
        if lab is None:
            file = get_lab_folder() / LAB_RECORD_FILE
            raise InputError(f"no lab is up: there is no {file}", LAB_UP_HINT)
        return lab

    def save(self) -> None:
        """Write the record."""
        record = json.dumps(asdict(self), indent=1, default=str)
        durable.write(self.layout.folder / LAB_RECORD_FILE, f"{record}\n", mode=0o644)

    # -- up and down -------------------------------------------------------------------------------

    def up(self) -> None:
        """Start everything, and wait until all nodes are idle; take it down again on an error."""
        hint = "export XDG_STATE_HOME=$(mktemp -d); stepladder lab up"
        with as_input_error(f"{self.layout.folder} cannot be made", hint):
            self.layout.folder.mkdir(parents=True, mode=0o755)
        try:
            self.daemons[LAB_UP] = machine.Daemon.from_pid(os.getpid())
            self.save()
            if not self.layout.plain:
                self._create_networks()
            self._write_files()
            self._start("munged", self._make_munged_command())
            while not self.layout.socket.exists():
                self._check_daemons()
                time.sleep(0.02)
            self._start("slurmctld", ["slurmctld", "-D", "-c"])
            for node in self.layout.all_nodes:
                self._start_node(node)
            self.await_idle()
            del self.daemons[LAB_UP]
            self.save()
        except BaseException:
            self.daemons.pop(LAB_UP, None)
            self.down()
            raise

    def down(self) -> None:
        """Remove everything: processes, namespaces, bridge, mounts and files.

        Raises:
            InputError: If another process is starting the lab.
        """
        if self.find_process(LAB_UP) is not None:
            pid = self.daemons[LAB_UP].pid
            raise InputError(f"process {pid} is starting this lab", f"wait for it, or kill {pid}")
        machine.kill_all(self._find_daemons)
        for node in self.layout.all_nodes:
            machine.kill_all(lambda node=node: self.find_processes(node))  # type: ignore[misc]
        if not self.layout.plain:
            with machine.lock_networks():
                machine.remove_networks(self.layout)
        shutil.rmtree(self.layout.folder)
        with suppress(OSError):  # not empty: stepladder has other files there
            self.layout.folder.parent.rmdir()

    def _create_networks(self) -> None:
        with machine.lock_networks():
            self.layout = replace(self.layout, number=machine.find_free_subnet())
            self.save()
            machine.create_networks(self.layout)

    def _write_files(self) -> None:
        layout = self.layout
        (layout.folder / "state").mkdir()
        key = layout.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        layout.hosts.write_text(make_hosts_file(layout), encoding="utf-8")
        (layout.folder / "gres.conf").write_text(make_gres_conf(layout), encoding="utf-8")
        layout.conf.write_text(make_slurm_conf(layout), encoding="utf-8")

    def _make_munged_command(self) -> list[str]:
        """Return the command of the lab's own munged: the system's need not run.

        The flag --force lets it use any folder.
        """
        files = {"key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        return [
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.layout.socket}",
            f"--log-file={self.layout.folder / 'munge.log'}",
            *(f"--{flag}={self.layout.folder / name}" for flag, name in files.items()),
        ]

    def _start(self, name: str, command: list[str], **env: str) -> None:
        variables = {"SLURM_CONF": str(self.layout.conf), **env}
        log = self.layout.folder / f"{name}.out"
        self.daemons[name] = machine.start_daemon(command, log, variables)
        self.save()

    def _start_node(self, node: Node) -> None:
        command = ["slurmd", "-D", "-N", node.name]
        if not self.layout.plain:
            command = machine.make_node_command(self.layout, node, command)
        # The tasks of the node's jobs inherit the variable, and are found by it.
        self._start(node.name, command, SLURMD_NODENAME=node.name)

    def await_idle(self) -> None:
        """Wait until slurmctld reports every node as idle.

        Raises:
            InputError: If a daemon ends, or a node is not idle in time.
        """
        if not wait_until(self._is_idle, LAB_START_TIMEOUT_S):
            raise InputError(
                f"after {LAB_START_TIMEOUT_S:g} s the nodes are {self.read_states()}",
                "try again, or --plain",
            )

    def _is_idle(self) -> bool:
        if set(self.read_states().values()) == {"idle"}:
            return True
        self._check_daemons()
        return False

    def _check_daemons(self) -> None:
        """Raise InputError with the last message of a daemon that has ended."""
        for name in self.daemons:
            if name != LAB_UP and self.find_process(name) is None:
                log = self.layout.folder / f"{name}.out"
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                errors = [line for line in lines if "fatal" in line or "rror" in line]
                message = (errors or lines or ["it said nothing"])[-1]
                raise InputError(f"{name} ended: {message}", "stepladder lab up --plain")

    # -- while it is up ----------------------------------------------------------------------------

    def run_slurm(self, *command: str) -> str:
        """Return the output of one of Slurm's commands, "" if it fails."""
        conf = {"SLURM_CONF": str(self.layout.conf), "PATH": machine.make_search_path()}
        env = {**os.environ, **conf}
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=20, env=env, check=False
            ).stdout
        except subprocess.TimeoutExpired:
            return ""

    def read_states(self) -> dict[str, str]:
        """Return each node's state in Slurm: idle, mixed, down; down* if it does not answer."""
        output = self.run_slurm(
            "sinfo", "--noheader", "--Node", "--partition=lab", "--format=%N %T"
        )
        states = dict(line.split() for line in output.splitlines())
        return {node.name: states.get(node.name, "unknown") for node in self.layout.all_nodes}

    def status(self) -> dict[str, Any]:
        """Return what `lab status --json` prints."""
        plain = self.layout.plain
        states = self.read_states()
        nodes = [
            {
                "name": node.name,
                "state": states[node.name],
                "address": node.address,
                "address6": node.address6,
                "port": node.port,
                "processes": len(self.find_processes(node)),
                "cut": not plain and not psutil.net_if_stats()[node.device].isup,
            }
            for node in self.layout.all_nodes
        ]
        return {"slurm_conf": str(self.layout.conf), "plain": plain, "nodes": nodes}

    def find_node(self, name: str) -> Node:
        """Return the node of a name.

        Raises:
            InputError: If there is none.
        """
        for node in self.layout.all_nodes:
            if node.name == name:
                return node
        names = ", ".join(node.name for node in self.layout.all_nodes)
        raise InputError(
            f"the lab has no node {name!r}; its nodes are {names}", "stepladder lab status"
        )

    def find_process(self, name: str) -> psutil.Process | None:
        """Return a daemon's process, None if it has ended."""
        if name not in self.daemons:
            return None
        is_node = name in {node.name for node in self.layout.all_nodes}
        return self.daemons[name].find_process("slurmd" if is_node else name, self.layout.conf)

    def _find_daemons(self) -> list[psutil.Process]:
        processes = map(self.find_process, self.daemons)
        return [process for process in processes if process is not None]

    def find_processes(self, node: Node) -> list[psutil.Process]:
        """Return all processes of a node."""
        if self.layout.plain:
            return machine.find_plain_node_processes(node.name, self.layout.folder)
        return machine.find_node_processes(node)

    def fail(self, name: str) -> int:
        """Kill all processes of a node, as if it lost power, and return their number."""
        node = self.find_node(name)
        count = len(self.find_processes(node))
        machine.kill_all(lambda: self.find_processes(node))
        self.daemons.pop(node.name, None)
        self.save()
        return count

    def cut(self, name: str) -> None:
        """Pull a node's network cable."""
        node = self.find_node(name)
        self._require_networks("cut")
        machine.set_cable(node, up=False)

    def heal(self, name: str) -> None:
        """Restore a node's power and network cable."""
        node = self.find_node(name)
        if not self.layout.plain:
            machine.set_cable(node, up=True)
        if self.find_process(node.name) is None:
            # As at a reboot: Slurm would otherwise wait for tasks that are gone.
            self.run_slurm(
                "scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=lab heal"
            )
            self._start_node(node)

    def run_command(self, command: list[str], name: str | None) -> None:
        """Replace this process by a command.

        Args:
            command: The command.
            name: The node to run it on; None for outside of all nodes, as on a login node.
        """
        if name is not None:
            self._require_networks("exec --node")
            command = machine.make_node_command(self.layout, self.find_node(name), command)
        os.environ["SLURM_CONF"] = str(self.layout.conf)
        with as_input_error(command[0], "stepladder lab exec -- srun -N2 hostname"):
            os.execvp(command[0], command)

    def _require_networks(self, subcommand: str) -> None:
        if self.layout.plain:
            raise InputError(
                f"`lab {subcommand}` needs a network per node, and this lab is --plain",
                f"stepladder lab down && {LAB_UP_HINT}, as root",
            )

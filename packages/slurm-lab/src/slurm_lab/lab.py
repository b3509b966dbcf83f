"""The commands of a lab: up, status, fail, cut, heal, exec, down.

The lab's folder exists only while the lab is up. It contains a record of the layout and the
daemons (lab.json), which every later command reads.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from slurm_lab import accounting, machine
from slurm_lab.errors import LabError, as_lab_error, get_reason
from slurm_lab.files import load_json, replace_file, validate_ownership
from slurm_lab.layout import (
    CLUSTER_NAME,
    LAB_PARTITION,
    LAB_UP,
    Layout,
    Node,
    make_gres_conf,
    make_hosts_file,
    make_slurm_conf,
    make_slurmdbd_conf,
)

LAB_RECORD_FILE = "lab.json"
LAB_START_TIMEOUT_S = 180.0  # for a busy machine; a daemon that ends is noticed at once
POLL_INTERVAL_S = 0.05
LAB_UP_HINT = "slurm-lab up --nodes 2"


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
    def load(folder: Path) -> Lab | None:
        """Return the lab of a folder, None if there is none.

        Args:
            folder: The folder of its files.

        Raises:
            LabError: If the record is damaged, or another user's.
        """
        file = folder / LAB_RECORD_FILE
        hint = f"rm -r {file.parent}, after its daemons: pgrep -af {file.parent}"
        try:
            validate_ownership(file)
            lab = load_json(file, Lab)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise LabError(f"{file} cannot be used: {get_reason(error)}", hint) from error
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise LabError(
                f"{file} cannot be used: {get_reason(error)}", "export XDG_STATE_HOME=DIR"
            ) from error
        owner = file.stat().st_uid
        if owner != os.geteuid():
            raise LabError(f"{file} is of a lab of user {owner}", "the same command as that user")
        with as_lab_error(f"{file} cannot be used", hint, (ValueError,)):
            lab.layout.validate(file.parent)
        return lab

    @staticmethod
    def load_running(folder: Path) -> Lab:
        """Return the lab of a folder.

        Args:
            folder: The folder of its files.

        Raises:
            LabError: If there is none.
        """
        lab = Lab.load(folder)
        if lab is None:
            file = folder / LAB_RECORD_FILE
            raise LabError(f"no lab is up: there is no {file}", LAB_UP_HINT)
        return lab

    def save(self) -> None:
        """Write the record."""
        record = json.dumps(asdict(self), indent=1, default=str)
        replace_file(self.layout.folder / LAB_RECORD_FILE, f"{record}\n", mode=0o644)

    # -- up and down -------------------------------------------------------------------------------

    def up(self) -> None:
        """Start everything, and wait until all nodes are idle; take it down again on an error."""
        hint = "export XDG_STATE_HOME=$(mktemp -d); slurm-lab up"
        with as_lab_error(f"{self.layout.folder} cannot be made", hint):
            self.layout.folder.mkdir(parents=True, mode=0o755)
        try:
            self.daemons[LAB_UP] = machine.Daemon.from_pid(os.getpid())
            self.save()
            if not self.layout.plain:
                self._create_networks()
            self._write_files()
            self._start("munged", self._make_munged_command())
            self._wait(self.layout.socket.exists, lambda: "munged has made no socket")
            if self.layout.accounting_port:
                self._start_accounting()
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
            LabError: If another process is starting the lab.
        """
        if self.find_process(LAB_UP) is not None:
            pid = self.daemons[LAB_UP].pid
            raise LabError(f"process {pid} is starting this lab", f"wait for it, or kill {pid}")
        machine.kill_all(self._find_daemons)
        for node in self.layout.all_nodes:
            machine.kill_all(lambda node=node: self.find_processes(node))  # type: ignore[misc]
        if not self.layout.plain:
            with machine.lock_networks():
                machine.remove_networks(self.layout)
        shutil.rmtree(self.layout.folder)
        with suppress(OSError):  # not empty: the program has other files there
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
        # Only slurmdbd reads it, and it reads none that others could read.
        if layout.accounting_port:
            replace_file(layout.folder / "slurmdbd.conf", make_slurmdbd_conf(layout), mode=0o600)

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

    def _start_accounting(self) -> None:
        """Start the database and slurmdbd, and register the lab there as a cluster."""
        accounting.create_database(self.layout)
        socket = self.layout.database / "socket"
        self._start("mariadbd", accounting.make_database_command(self.layout))
        self._wait(socket.exists, lambda: "the database has made no socket")
        # The client library of the database reads the variable; slurmdbd.conf has no such setting.
        self._start("slurmdbd", ["slurmdbd", "-D"], MYSQL_UNIX_PORT=str(socket))
        self._wait(self._register_cluster, lambda: "slurmdbd does not answer")

    def _register_cluster(self) -> bool:
        """Add the cluster to slurmdbd's database, and return whether it is there."""
        self.run_slurm("sacctmgr", "--immediate", "add", "cluster", CLUSTER_NAME)
        clusters = self.run_slurm("sacctmgr", "--noheader", "show", "cluster", "format=cluster")
        return CLUSTER_NAME in clusters.split()

    def _start_node(self, node: Node) -> None:
        command = ["slurmd", "-D", "-N", node.name]
        if not self.layout.plain:
            command = machine.make_node_command(self.layout, node, command)
        # The tasks of the node's jobs inherit the variable, and are found by it.
        self._start(node.name, command, SLURMD_NODENAME=node.name)

    def await_idle(self) -> None:
        """Wait until slurmctld reports every node as idle.

        Raises:
            LabError: If a daemon ends, or a node is not idle in time.
        """
        self._wait(
            lambda: set(self.read_states().values()) == {"idle"},
            lambda: f"the nodes are {self.read_states()}",
        )

    def _wait(self, predicate: Callable[[], bool], problem: Callable[[], str]) -> None:
        """Wait until something is the case.

        Args:
            predicate: What is asked, until it returns True.
            problem: Returns what is wrong if it takes longer than LAB_START_TIMEOUT_S.

        Raises:
            LabError: If a daemon ends, or it takes too long.
        """
        deadline = time.monotonic() + LAB_START_TIMEOUT_S
        while not predicate():
            self._check_daemons()
            if time.monotonic() > deadline:
                raise LabError(
                    f"after {LAB_START_TIMEOUT_S:g} s {problem()}", "try again, or --plain"
                )
            time.sleep(POLL_INTERVAL_S)

    def _check_daemons(self) -> None:
        """Raise LabError with the last message of a daemon that has ended."""
        for name in self.daemons:
            if name != LAB_UP and self.find_process(name) is None:
                log = self.layout.folder / f"{name}.out"
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                errors = [line for line in lines if "fatal" in line or "rror" in line]
                message = (errors or lines or ["it said nothing"])[-1]
                raise LabError(f"{name} ended: {message}", "slurm-lab up --plain")

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
            "sinfo", "--noheader", "--Node", f"--partition={LAB_PARTITION}", "--format=%N %T"
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

    def describe_nodes(self) -> list[str]:
        """Return a line for each node: its state, address and processes."""
        lines = []
        for node in self.status()["nodes"]:
            cut = ", cut off" if node["cut"] else ""
            lines.append(
                f"{node['name']}  {node['state']:<10} {node['address']}"
                f"  {node['processes']} processes{cut}"
            )
        return lines

    def find_node(self, name: str) -> Node:
        """Return the node of a name.

        Raises:
            LabError: If there is none.
        """
        for node in self.layout.all_nodes:
            if node.name == name:
                return node
        names = ", ".join(node.name for node in self.layout.all_nodes)
        raise LabError(f"the lab has no node {name!r}; its nodes are {names}", "slurm-lab status")

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
        with as_lab_error(command[0], "slurm-lab exec -- srun -N2 hostname"):
            os.execvp(command[0], command)

    def _require_networks(self, subcommand: str) -> None:
        if self.layout.plain:
            raise LabError(
                f"`lab {subcommand}` needs a network per node, and this lab is --plain",
                f"slurm-lab down && {LAB_UP_HINT}, as root",
            )

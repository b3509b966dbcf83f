"""The lab's life: up, status, fail, cut, heal, down. Its folder exists while it is up, and only
then.
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
from stepladder.slurm.lab import machine
from stepladder.slurm.lab.layout import UP, Layout, Node, gres_conf, hosts_file, slurm_conf

STATE = "lab.json"
SECONDS_TO_START = 180.0  # on a busy machine; a daemon that ends is noticed at once
HINT_UP = "stepladder lab up --nodes 2"


def lab_folder() -> Path:
    return get_state_folder() / "lab"


@dataclass
class Lab:
    """A lab that is up, or is on its way. daemons: by name; a failed node's is not there."""

    layout: Layout
    daemons: dict[str, machine.Daemon] = field(default_factory=dict)

    # -- the record --------------------------------------------------------------------------------

    @staticmethod
    def read() -> Lab | None:
        """The lab of this user, as its record has it. Raises InputError for one that is not of it,
        or damaged.
        """
        file = lab_folder() / STATE
        hint = f"rm -r {file.parent}, after its daemons: pgrep -af {file.parent}"
        try:
            validate_ownership(file)
            lab = typed_file.load_json(file, Lab, hint)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError) as error:  # a loop of links
            raise InputError(
                f"{file} cannot be used: {get_reason(error)}", "export XDG_STATE_HOME=DIR"
            ) from error
        if (owner := file.stat().st_uid) != os.geteuid():
            raise InputError(f"{file} is of a lab of user {owner}", "the same command as that user")
        with as_input_error(f"{file} cannot be used", hint, (ValueError,)):
            lab.layout.check(file.parent)
        return lab

    @staticmethod
    def find() -> Lab:
        """The lab that is up. Raises InputError where none is."""
        lab = Lab.read()
        if lab is None:
            raise InputError(f"no lab is up: there is no {lab_folder() / STATE}", HINT_UP)
        return lab

    def write(self) -> None:
        record = json.dumps(asdict(self), indent=1, default=str)
        durable.write(self.layout.folder / STATE, f"{record}\n", mode=0o644)

    # -- up and down -------------------------------------------------------------------------------

    def up(self) -> None:
        """Start everything and wait until all nodes are idle. What fails half-way is taken down
        again.
        """
        hint = "export XDG_STATE_HOME=$(mktemp -d); stepladder lab up"
        with as_input_error(f"{self.layout.folder} cannot be made", hint):
            self.layout.folder.mkdir(parents=True, mode=0o755)
        try:
            self.daemons[UP] = machine.Daemon.of(os.getpid())
            self.write()
            if not self.layout.plain:
                with machine.alone():
                    self.layout = replace(self.layout, number=machine.free_number())
                    self.write()
                    machine.connect(self.layout)
            self._write_files()
            self._start("munged", self._munged())
            while not self.layout.socket.exists():
                self._check_alive()
                time.sleep(0.02)
            self._start("slurmctld", ["slurmctld", "-D", "-c"])
            for node in self.layout.all_nodes:
                self._start_node(node)
            self.await_idle()
            del self.daemons[UP]
            self.write()
        except BaseException:
            self.daemons.pop(UP, None)
            self.down()
            raise

    def down(self) -> None:
        """End everything and leave nothing: no process, namespace, bridge, mount or file."""
        if self.process(UP) is not None:
            starting = self.daemons[UP].pid
            raise InputError(
                f"process {starting} is starting this lab", f"wait for it, or kill {starting}"
            )
        machine.end_all(
            lambda: [process for process in map(self.process, self.daemons) if process is not None]
        )
        for node in self.layout.all_nodes:
            machine.end_all(lambda node=node: self.processes_on(node))  # type: ignore[misc]
        if not self.layout.plain:
            with machine.alone():
                machine.disconnect(self.layout)
        shutil.rmtree(self.layout.folder)
        with suppress(OSError):  # other things of ours may be there
            self.layout.folder.parent.rmdir()

    def _write_files(self) -> None:
        layout = self.layout
        (layout.folder / "state").mkdir()
        key = layout.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        layout.hosts.write_text(hosts_file(layout), encoding="utf-8")
        (layout.folder / "gres.conf").write_text(gres_conf(layout), encoding="utf-8")
        layout.conf.write_text(slurm_conf(layout), encoding="utf-8")

    def _munged(self) -> list[str]:
        """A munged of our own: the system's may not run, or not be ours to start. --force: for any
        folder.
        """
        names = {"key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        files = [f"--{flag}={self.layout.folder / name}" for flag, name in names.items()]
        log = self.layout.folder / "munge.log"
        return [
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.layout.socket}",
            f"--log-file={log}",
            *files,
        ]

    def _start(self, name: str, command: list[str], **env: str) -> None:
        conf = {"SLURM_CONF": str(self.layout.conf)}
        self.daemons[name] = machine.start(command, self.layout.folder / f"{name}.out", conf | env)
        self.write()

    def _start_node(self, node: Node) -> None:
        command = ["slurmd", "-D", "-N", node.name]
        if not self.layout.plain:
            command = machine.on_node(self.layout, node, command)
        self._start(node.name, command, SLURMD_NODENAME=node.name)  # as in the tasks of its jobs

    def await_idle(self) -> None:
        """Until slurmctld has heard of every node. Raises InputError with a daemon's last words."""
        deadline = time.monotonic() + SECONDS_TO_START
        while set((states := self.states()).values()) != {"idle"}:
            self._check_alive()
            if time.monotonic() > deadline:
                raise InputError(
                    f"after {SECONDS_TO_START:g} s the nodes are {states}", "try again, or --plain"
                )
            time.sleep(0.1)

    def _check_alive(self) -> None:
        for name in self.daemons:
            if name != UP and self.process(name) is None:
                said = (self.layout.folder / f"{name}.out").read_text(
                    encoding="utf-8", errors="replace"
                )
                lines = said.strip().splitlines()
                fatal = [line for line in lines if "fatal" in line or "rror" in line]
                last = (fatal or lines or ["it said nothing"])[-1]
                raise InputError(f"{name} ended: {last}", "stepladder lab up --plain")

    # -- while it is up ----------------------------------------------------------------------------

    def slurm(self, *words: str) -> str:
        """The output of one of Slurm's commands, or "" if it failed."""
        env = {**os.environ, "SLURM_CONF": str(self.layout.conf), "PATH": machine.search_path()}
        try:
            return subprocess.run(
                words, capture_output=True, text=True, timeout=20, env=env, check=False
            ).stdout
        except subprocess.TimeoutExpired:
            return ""

    def states(self) -> dict[str, str]:
        """Slurm's word for each node, such as idle, mixed, down; a * behind it means no answer."""
        shown = self.slurm("sinfo", "--noheader", "--Node", "--partition=lab", "--format=%N %T")
        states = dict(line.split() for line in shown.splitlines())
        return {node.name: states.get(node.name, "unknown") for node in self.layout.all_nodes}

    def status(self) -> dict[str, Any]:
        """As `lab status --json` shows it."""
        plain, states = self.layout.plain, self.states()
        nodes = [
            {
                "name": node.name,
                "state": states[node.name],
                "address": node.address,
                "address6": node.address6,
                "port": node.port,
                "processes": len(self.processes_on(node)),
                "cut": not plain and not psutil.net_if_stats()[node.device].isup,
            }
            for node in self.layout.all_nodes
        ]
        return {"slurm_conf": str(self.layout.conf), "plain": plain, "nodes": nodes}

    def node(self, name: str) -> Node:
        """Raises InputError for a name that no node has."""
        for node in self.layout.all_nodes:
            if node.name == name:
                return node
        names = ", ".join(node.name for node in self.layout.all_nodes)
        raise InputError(
            f"the lab has no node {name!r}; its nodes are {names}", "stepladder lab status"
        )

    def process(self, name: str) -> psutil.Process | None:
        """The daemon, while it lives."""
        if name not in self.daemons:
            return None
        program = "slurmd" if name in {node.name for node in self.layout.all_nodes} else name
        return self.daemons[name].process(program, self.layout.conf)

    def processes_on(self, node: Node) -> list[psutil.Process]:
        if self.layout.plain:
            return machine.of_plain_node(node.name, self.layout.folder)
        return machine.processes_on(node)

    def fail(self, name: str) -> int:
        """As if the power went: all processes of the node are killed. Returns how many."""
        node = self.node(name)
        count = len(self.processes_on(node))
        machine.end_all(lambda: self.processes_on(node))
        self.daemons.pop(node.name, None)
        self.write()
        return count

    def cut(self, name: str) -> None:
        node = self.node(name)
        self._needs_network("cut")
        machine.set_cable(node, up=False)

    def heal(self, name: str) -> None:
        """Power and cable back."""
        node = self.node(name)
        if not self.layout.plain:
            machine.set_cable(node, up=True)
        if self.process(node.name) is None:
            # As at a reboot: else a node that is quickly back would keep Slurm waiting for tasks
            # that are gone.
            self.slurm(
                "scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=lab heal"
            )
            self._start_node(node)

    def become(self, command: list[str], name: str | None) -> None:
        """This process goes on as the command, on a node or, as a user at a login node, outside of
        all.
        """
        if name is not None:
            self._needs_network("exec --node")
            command = machine.on_node(self.layout, self.node(name), command)
        os.environ["SLURM_CONF"] = str(self.layout.conf)
        with as_input_error(command[0], "stepladder lab exec -- srun -N2 hostname"):
            os.execvp(command[0], command)

    def _needs_network(self, what: str) -> None:
        if self.layout.plain:
            raise InputError(
                f"`lab {what}` needs a network per node, and this lab is --plain",
                f"stepladder lab down && {HINT_UP}, as root",
            )

"""One machine of `--hosts`: its name for ssh, and what a failure to reach it means."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.masking import is_secret_name, mask_command
from stepladder.core.numbers import MAX_PORT, parse_whole_number

SSH_CONNECT_TIMEOUT_S = 10
NO_FOLDER_CODE = 41  # exit codes of a probe
NO_PYTHON_CODE = 42
# Variables of this machine that decide how a job computes, and are never secret.
FORWARDED_VARIABLES = re.compile(
    r"PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_(PREFIX|DEFAULT_ENV)"
    r"|(OMP|MKL|NCCL|GLOO|TORCH|PYTORCH|CUDA|CUBLAS)_\w+"
)
HOST_PATTERN = re.compile(
    r"(?P<user>\w[\w.-]*@)?"
    r"(?:\[(?P<bracketed>[\da-fA-F:.]+)\]"
    r"|(?P<ipv6>[\da-fA-F]*:[\da-fA-F:.]*:[\da-fA-F:.]*)"
    r"|(?P<name>\w[\w.-]*))"
    r"(?::(?P<port>\d+))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Host:
    """One entry of --hosts.

    Args:
        target: [USER@]HOST, as ssh takes it.
        port: The port of sshd, "" for ssh's default.
        ssh: The command of the SSH client.
    """

    target: str
    port: str
    ssh: tuple[str, ...] = ("ssh",)

    @staticmethod
    def parse_list(text: str, ssh: str) -> list[Host]:
        """Return the hosts of a list.

        Args:
            text: [USER@]HOST[:PORT],...; an IPv6 address with a port is in brackets.
            ssh: The command of the SSH client, quoted as for a shell.

        Raises:
            InputError: An entry is not a host, or is there twice.
        """
        client = _parse_client(ssh)
        hosts: list[Host] = []
        for entry in text.split(","):
            host = Host._parse(entry, client)
            if host.name in [earlier.name for earlier in hosts]:
                once = ",".join(dict.fromkeys(text.split(",")))
                hint = f"--hosts {once}; --nproc N for several processes on each"
                raise InputError(f"--hosts names {host.name} twice", hint)
            hosts.append(host)
        return hosts

    @staticmethod
    def _parse(entry: str, client: tuple[str, ...]) -> Host:
        match = HOST_PATTERN.fullmatch(entry)
        if match is None or (
            match["port"] and parse_whole_number(match["port"], 1, MAX_PORT) is None
        ):
            raise InputError(
                f"--hosts: {entry!r} is not a host", "--hosts node1,user@node2,user@node3:2222"
            )
        name = match["bracketed"] or match["ipv6"] or match["name"]
        return Host((match["user"] or "") + name, match["port"] or "", client)

    @property
    def name(self) -> str:
        """The host, and its port if it has one."""
        host = self.target.rpartition("@")[2]
        return f"{host}:{self.port}" if self.port else host

    def command(self, *options: str) -> list[str]:
        """Return the ssh command that ends with this host."""
        timeout = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_CONNECT_TIMEOUT_S}"]
        keepalive = ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
        fixed_options = ["-T", *timeout, *keepalive]
        return [*self.ssh, *fixed_options, *self._port_option, *options, self.target]

    @property
    def _port_option(self) -> list[str]:
        return ["-p", self.port] if self.port else []

    @property
    def test_command(self) -> str:
        """What to type to see what is wrong."""
        return mask_command([*self.ssh, *self._port_option, self.target, "true"])

    def explain_failure(self, code: int, error: str) -> InputError:
        """Return what a probe's failure means, with the command to try.

        Args:
            code: The exit code of ssh.
            error: What it printed on stderr.
        """
        if code == NO_FOLDER_CODE:
            return InputError(
                f"host {self.name} has no folder {Path.cwd()}",
                "the same path on all hosts: rsync, NFS",
            )
        if code == NO_PYTHON_CODE:
            return InputError(
                f"host {self.name} has no stepladder for {sys.executable}",
                "install it there at the same path",
            )
        lines = error.strip().splitlines() or [f"ssh ended with {code}"]
        last_line = to_one_line(lines[-1])
        if "Permission denied" in error:
            return InputError(
                f"host {self.name} refuses the SSH key ({last_line})",
                f"ssh-copy-id {self.target}, then {self.test_command}",
            )
        if "host key" in error.lower():
            problem = "has changed" if "CHANGED" in error else "is not known here"
            return InputError(
                f"host {self.name}: its SSH host key {problem}",
                f"{self.test_command}, and compare the fingerprint",
            )
        return InputError(f"host {self.name} cannot be reached ({last_line})", self.test_command)


def _parse_client(ssh: str) -> tuple[str, ...]:
    try:
        client = tuple(shlex.split(ssh))
    except ValueError as error:
        raise InputError(
            f"--ssh {ssh!r} is not a command: {error}", "--ssh 'ssh -i KEY'"
        ) from error
    if not client:
        raise InputError("--ssh names no command", "--ssh 'ssh -i KEY', or leave it out")
    return client


def make_environment_script() -> str:
    """Return shell text that sets the variables that decide how a job computes.

    It also puts the folder of this Python first in PATH.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if FORWARDED_VARIABLES.fullmatch(name) and not is_secret_name(name)
    }
    folder = shlex.quote(str(Path(sys.executable).parent))
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return f'export PATH={folder}:"$PATH" {settings}'

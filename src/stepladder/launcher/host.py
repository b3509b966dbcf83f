"""A machine of `--hosts`: its name as ssh has it, and what its failures mean."""

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

SECONDS_TO_CONNECT = 10
NO_FOLDER, NO_PYTHON = 41, 42
# Of this machine's environment, what decides how a job computes; nothing that may be a secret.
SENT = re.compile(
    r"PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_(PREFIX|DEFAULT_ENV)"
    r"|(OMP|MKL|NCCL|GLOO|TORCH|PYTORCH|CUDA|CUBLAS)_\w+"
)
HOST = re.compile(
    r"(?P<user>\w[\w.-]*@)?(?:\[(?P<six>[\da-fA-F:.]+)\]|(?P<bare>[\da-fA-F]*:[\da-fA-F:.]*:[\da-fA-F:.]*)"
    r"|(?P<name>\w[\w.-]*))(?::(?P<port>\d+))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Host:
    """One entry of --hosts. target: [user@]host, as ssh has it.  ssh: the client's command."""

    target: str
    port: str
    ssh: tuple[str, ...] = ("ssh",)

    @staticmethod
    def read_all(text: str, ssh: str) -> list[Host]:
        """[user@]host[:port], ... ; an IPv6 address with a port stands in brackets. Raises
        InputError.

        ssh: --ssh, as a shell takes it.
        """
        hosts: list[Host] = []
        try:
            client = tuple(shlex.split(ssh))
        except ValueError as error:
            raise InputError(
                f"--ssh {ssh!r} is not a command: {error}", "--ssh 'ssh -i KEY'"
            ) from error
        if not client:
            raise InputError("--ssh names no command", "--ssh 'ssh -i KEY', or leave it out")
        for entry in text.split(","):
            found = HOST.fullmatch(entry)
            if found is None or (
                found["port"] and parse_whole_number(found["port"], 1, MAX_PORT) is None
            ):
                raise InputError(
                    f"--hosts: {entry!r} is not a host", "--hosts node1,user@node2,user@node3:2222"
                )
            name = found["six"] or found["bare"] or found["name"]
            host = Host((found["user"] or "") + name, found["port"] or "", client)
            if host.name in [earlier.name for earlier in hosts]:
                once = ",".join(dict.fromkeys(text.split(",")))
                hint = f"--hosts {once}; --nproc N for several processes on each"
                raise InputError(f"--hosts names {host.name} twice", hint)
            hosts.append(host)
        return hosts

    @property
    def name(self) -> str:
        host = self.target.rpartition("@")[2]
        return f"{host}:{self.port}" if self.port else host

    def command(self, *options: str) -> list[str]:
        port = ["-p", self.port] if self.port else []
        keep = ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
        wait = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SECONDS_TO_CONNECT}"]
        return [*self.ssh, "-T", *wait, *keep, *port, *options, self.target]

    @property
    def tried(self) -> str:
        """What to type to see what is wrong."""
        return mask_command(
            [*self.ssh, *(["-p", self.port] if self.port else []), self.target, "true"]
        )

    def refused(self, code: int, error: str) -> InputError:
        """What a probe's failure means, with the command to try."""
        tried = self.tried
        if code == NO_FOLDER:
            return InputError(
                f"host {self.name} has no folder {Path.cwd()}",
                "the same path on all hosts: rsync, NFS",
            )
        if code == NO_PYTHON:
            return InputError(
                f"host {self.name} has no stepladder for {sys.executable}",
                "install it there at the same path",
            )
        last = to_one_line((error.strip().splitlines() or [f"ssh ended with {code}"])[-1])
        if "Permission denied" in error:
            return InputError(
                f"host {self.name} refuses the SSH key ({last})",
                f"ssh-copy-id {self.target}, then {tried}",
            )
        if "Host key verification failed" in error or "host key" in error.lower():
            why = "has changed" if "CHANGED" in error else "is not known here"
            return InputError(
                f"host {self.name}: its SSH host key {why}", f"{tried}, and compare the fingerprint"
            )
        return InputError(f"host {self.name} cannot be reached ({last})", tried)


def environment() -> str:
    """Shell text that sets there what decides here how a job computes; the same Python first in
    PATH.
    """
    sent = {
        name: value
        for name, value in os.environ.items()
        if SENT.fullmatch(name) and not is_secret_name(name)
    }
    folder = shlex.quote(str(Path(sys.executable).parent))
    return f'export PATH={folder}:"$PATH" ' + " ".join(
        f"{name}={shlex.quote(value)}" for name, value in sent.items()
    )

"""A private sshd on a free port, with a key of its own for host and user: the tests' other machine."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from processes import SECONDS, wait_until
from stepladder.core.address import find_free_ports

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")

MOST_HOSTS = 3


class Server:
    """A running sshd. hosts: for --hosts, as if there were several.  ssh: for --ssh, with the right
    key.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.ports = find_free_ports(MOST_HOSTS)
        self.port = self.ports[0]
        self.hosts = [f"{getpass.getuser()}@{address}:{port}" for port in self.ports]
        self.host = self.hosts[0]
        for name in ("host", "key", "wrong"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
            )
        (folder / "authorized").write_text((folder / "key.pub").read_text())
        (folder / "authorized").chmod(0o600)
        public = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known").write_text(
            "".join(f"[{address}]:{port} {public}\n" for port in self.ports)
        )
        lines = [
            *(f"Port {port}" for port in self.ports), f"ListenAddress {address}",
            f"HostKey {folder}/host", f"PidFile {folder}/pid",
            f"AuthorizedKeysFile {folder}/authorized", "UsePAM no", "StrictModes no", "PasswordAuthentication no",
            "KbdInteractiveAuthentication no", "PermitRootLogin yes",
            # else `train` notes jobs in the home folder
            f"SetEnv XDG_STATE_HOME={os.environ['XDG_STATE_HOME']}",
        ]  # fmt: skip
        (folder / "config").write_text("\n".join(lines) + "\n")

    @property
    def ssh(self) -> str:
        return self.with_key("key")

    def with_key(self, name: str, known: str = "known") -> str:
        options = f"-o IdentitiesOnly=yes -o UserKnownHostsFile={self.folder}/{known}"
        return f"ssh -F none -i {self.folder}/{name} {options}"

    def sessions(self) -> list[psutil.Process]:
        """What runs below the server now."""
        return psutil.Process(self.process.pid).children(recursive=True)

    @contextmanager
    def running(self) -> Iterator[Server]:
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [str(SSHD), "-D", "-e", "-f", str(self.folder / "config")], stderr=log
            )
        try:
            wait_until(self._answers, (self.folder / "log").read_text)
            yield self
        finally:
            family = self.sessions()
            self.process.terminate()
            self.process.wait(SECONDS)
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, SECONDS)

    def _answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex((self.address, self.port)) == 0


def own_address() -> str | None:
    """An IPv4 address of this machine that is not loopback."""
    entries = [entry for device in psutil.net_if_addrs().values() for entry in device]
    daemons = [
        e.address
        for e in entries
        if e.family == socket.AF_INET and not e.address.startswith("127.")
    ]
    return daemons[0] if daemons else None


@contextmanager
def private_sshd(folder: Path, address: str | None = None) -> Iterator[Server]:
    """Skips the test, with the reason, where there is none."""
    address = address or own_address()
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no sshd: apt-get install openssh-server")
    if address is None:
        pytest.skip("this machine has no address but loopback")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd, as root, separates its privileges
    with Server(folder, address).running() as server:
        yield server

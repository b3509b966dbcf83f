"""A real nginx on 127.0.0.1 that serves a folder, and what was asked of it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from processes import SECONDS, wait_until
from stepladder.core.address import find_free_ports

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
CONFIG = """
daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  log_format ranges '$request_method $status $uri $http_range'; access_log {folder}/access.log ranges;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{ listen 127.0.0.1:{port}; root {root}; autoindex on; {extra} }}
}}
"""


@dataclass
class Server:
    """url: of the folder that is served, with a slash at its end."""

    url: str
    log: Path

    def ranges(self) -> Counter[str]:
        """How often each part of each file was sent."""
        lines = [line.split(maxsplit=3) for line in self.log.read_text().splitlines()]
        return Counter(
            f"{uri} {part}" for method, _, uri, part in lines if method == "GET" and part != "-"
        )


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextmanager
def serve(root: Path, folder: Path, extra: str = "") -> Iterator[Server]:
    """Serve a folder. extra: directives of the server's block."""
    if NGINX is None:
        pytest.skip("needs nginx: apt-get install nginx-light")
    folder.mkdir()
    (port,) = find_free_ports(1)
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, root=root, port=port, extra=extra))
    process = subprocess.Popen([NGINX, "-e", folder / "error.log", "-c", config])
    try:
        wait_until(lambda: process.poll() is not None or answers(port))
        assert process.poll() is None, (folder / "error.log").read_text()
        yield Server(f"http://127.0.0.1:{port}/", folder / "access.log")
    finally:
        process.terminate()
        process.wait(SECONDS)

"""The accounting of a lab: slurmdbd, and the database server that it needs.

A lab has them only if it was asked for: the database takes several seconds, the rest of a lab two.
"""

from __future__ import annotations

import os
import subprocess

from slurm_lab.errors import LabError
from slurm_lab.layout import Layout
from slurm_lab.machine import make_search_path

ACCOUNTING_PROGRAMS = {
    "slurmdbd": ("slurmdbd",),
    "mariadb-server-core": ("mariadbd", "mariadb-install-db"),
    "slurm-client": ("sacctmgr",),
}
# It writes few megabytes at its start, and waits for no disk: the database ends with the lab.
DATABASE_SETTINGS = """\
[mariadbd]
innodb_log_file_size=8M
innodb_buffer_pool_size=32M
innodb_flush_log_at_trx_commit=0
innodb_doublewrite=0
innodb_flush_method=nosync
innodb_lock_wait_timeout=900
skip_name_resolve=1
"""


def create_database(layout: Layout) -> None:
    """Create the files of an empty database.

    Raises:
        LabError: The database server's own program for it fails.
    """
    layout.database.mkdir(mode=0o700)
    settings = layout.database / "my.cnf"
    settings.write_text(DATABASE_SETTINGS, encoding="utf-8")
    command = [
        "mariadb-install-db",
        f"--defaults-file={settings}",
        f"--datadir={layout.database / 'data'}",
        f"--user={layout.user}",
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
    ]
    env = {**os.environ, "PATH": make_search_path()}
    process = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if process.returncode != 0:
        lines = (process.stdout + process.stderr).splitlines()
        errors = [line for line in lines if "rror" in line]
        message = (errors or lines or ["it printed nothing"])[0]
        raise LabError(
            f"mariadb-install-db failed: {message}", "slurm-lab up, without --accounting"
        )


def make_database_command(layout: Layout) -> list[str]:
    """Return the command of the database server.

    It asks nobody for a password, and listens on a socket in a folder that is closed to others.
    """
    return [
        "mariadbd",
        f"--defaults-file={layout.database / 'my.cnf'}",
        f"--datadir={layout.database / 'data'}",
        f"--socket={layout.database / 'socket'}",
        f"--pid-file={layout.database / 'pid'}",
        f"--user={layout.user}",
        "--skip-networking",
        "--skip-grant-tables",
    ]

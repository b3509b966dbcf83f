"""What the processes of one launch tell each other over a network is signed with a secret that only
they have.

HMAC with SHA-256 (RFC 2104). The secret is a file that only its owner can read, or comes with the
environment."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.own_file import open_own

SECRET = "STEPLADDER_SECRET"  # in the environment of a launch that another one has started
DIGEST = hashlib.sha256().digest_size


class Forged(Exception):
    """Something else than this launch has written it."""


def new_secret() -> str:
    return secrets.token_hex(32)


@cache
def given_secret() -> str:
    """Take the launch's secret out of the environment: what this process starts then does not
    inherit it.

    Returns "" where nodes are started by hand and share none: then everybody who reaches the
    rendezvous can disturb the launch, but not run code in it."""
    return os.environ.pop(SECRET, "")


def sign(secret: str, key: str, data: bytes) -> bytes:
    """Return the data behind a signature that holds under this key alone."""
    return _digest(secret, key, data) + data


def verified(secret: str, key: str, signed: bytes) -> bytes:
    """Return the data that was signed for this key. Raises Forged."""
    digest, data = signed[:DIGEST], signed[DIGEST:]
    if not hmac.compare_digest(digest, _digest(secret, key, data)):
        raise Forged
    return data


def _digest(secret: str, key: str, data: bytes) -> bytes:
    name = key.encode()
    length = len(name).to_bytes(8, "big")  # or the end of a key could count as the data's begin
    return hmac.digest(secret.encode(), length + name + data, "sha256")


def secret_in(path: Path) -> str:
    """The secret that is kept in a file; the first one that asks makes it. Raises InputError,
    OSError.

    All who can read the folder may ask at once, on many nodes: the file gets its name with its
    contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(path):
        aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            refuse_shared_mount(os.fstat(file), path)
            os.write(file, new_secret().encode())
            with suppress(FileExistsError):
                os.link(aside, path)
        finally:
            os.close(file)
            aside.unlink()
    try:
        opened = open_own(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL):
            raise
        raise InputError(
            f"{path} is not used as a secret: {error.strerror}", f"rm {path}"
        ) from error
    with os.fdopen(opened, encoding="utf-8") as readable:
        about = os.fstat(readable.fileno())
        secret = readable.read()
    if not is_private(about) or not secret:
        raise InputError(
            f"{path} is not a secret of yours alone: others own it, or may read it", f"rm {path}"
        )
    return secret


def is_private(about: os.stat_result) -> bool:
    return about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077


def refuse_shared_mount(about: os.stat_result, path: Path) -> None:
    """Raise InputError where a file that this process has just made for itself alone looks like
    everybody's.
    """
    if not is_private(about):
        found = f"user {about.st_uid}'s with mode {stat.S_IMODE(about.st_mode):04o}"
        raise InputError(
            f"{path.parent} is on a mount that shows a new private file as {found}: the secret that several nodes"
            " need cannot be kept there",
            "--run-dir DIR on a file system with owners and modes, or --nodes 1",
        )

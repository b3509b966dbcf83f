"""Signatures of what the processes of one launch send each other over a network.

HMAC with SHA-256 (RFC 2104). The secret is a file that only its owner can read, or comes with the
environment.
"""

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
from stepladder.core.safe_open import open_without_links

# In the environment of a launch that another one has started.
SECRET_VARIABLE = "STEPLADDER_SECRET"
DIGEST_BYTES = hashlib.sha256().digest_size
SECRET_BYTES = 32
OTHERS_PERMISSIONS = 0o077


class ForgedError(Exception):
    """Data that no process of this launch has written."""


def make_secret() -> str:
    """Return a new secret."""
    return secrets.token_hex(SECRET_BYTES)


@cache
def take_secret_from_env() -> str:
    """Remove the launch's secret from the environment, so that child processes do not inherit it.

    Returns:
        The secret, or "" if nodes are started by hand and share none. Then everybody who reaches
        the rendezvous can disturb the launch, but not run code in it.
    """
    return os.environ.pop(SECRET_VARIABLE, "")


def sign(secret: str, key: str, data: bytes) -> bytes:
    """Return the data after a signature that is valid for this key alone."""
    return _compute_digest(secret, key, data) + data


def verify(secret: str, key: str, signed: bytes) -> bytes:
    """Return the data that was signed for this key.

    Raises:
        ForgedError: The signature is wrong.
    """
    digest = signed[:DIGEST_BYTES]
    data = signed[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _compute_digest(secret, key, data)):
        raise ForgedError
    return data


def _compute_digest(secret: str, key: str, data: bytes) -> bytes:
    name = key.encode()
    length = len(name).to_bytes(8, "big")  # or the end of a key could count as the data's begin
    return hmac.digest(secret.encode(), length + name + data, "sha256")


def load_or_make_secret(path: Path) -> str:
    """Return the secret in a file, which the first process that asks makes.

    All processes that can read the folder may ask at once, on many nodes: the file gets its name
    when it has its contents.

    Args:
        path: The file.

    Raises:
        InputError: The file is a link, or another user owns it or may read it.
        OSError: It cannot be written or read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(path):
        _make_secret_file(path)
    try:
        descriptor = open_without_links(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL):
            raise
        raise InputError(
            f"{path} is not used as a secret: {error.strerror}", f"rm {path}"
        ) from error
    with os.fdopen(descriptor, encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        secret = file.read()
    if not _is_private(status) or not secret:
        raise InputError(
            f"{path} is not a secret of yours alone: others own it, or may read it", f"rm {path}"
        )
    return secret


def _make_secret_file(path: Path) -> None:
    """Write a secret under a temporary name, and link it to `path` unless another one is there."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _validate_private_mount(os.fstat(file), path)
        os.write(file, make_secret().encode())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.close(file)
        temporary.unlink()


def _is_private(status: os.stat_result) -> bool:
    """Tell whether only this user owns a file and may read it."""
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & OTHERS_PERMISSIONS


def _validate_private_mount(status: os.stat_result, path: Path) -> None:
    """Raise InputError if a file that this process has just made looks public."""
    if _is_private(status):
        return
    owner_and_mode = f"user {status.st_uid}'s with mode {stat.S_IMODE(status.st_mode):04o}"
    raise InputError(
        f"{path.parent} is on a mount that shows a new private file as {owner_and_mode}: the secret"
        " that several nodes need cannot be kept there",
        "--run-dir DIR on a file system with owners and modes, or --nodes 1",
    )

"""What the processes of one launch tell each other over a network is signed with a secret that only they have.

HMAC with SHA-256 (RFC 2104). The secret is a file that only its owner can read, or comes with the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from stepladder.core.errors import InputError

SECRET = "STEPLADDER_SECRET"  # in the environment of a launch that another one has started
DIGEST = hashlib.sha256().digest_size


class Forged(Exception):
    """Something else than this launch has written it."""


def new_secret() -> str:
    return secrets.token_hex(32)


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
    """The secret that is kept in a file; the first one that asks makes it. Raises InputError, OSError.

    All who can read the folder may ask at once, on many nodes: the file gets its name with its contents.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(new_secret())
        with suppress(FileExistsError):
            os.link(aside, path)
        aside.unlink()
    with path.open(encoding="utf-8") as file:
        about, secret = os.fstat(file.fileno()), file.read()
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077 or not secret:
        raise InputError(f"{path} is not a secret of yours alone: others own it, or may read it", f"rm {path}")
    return secret

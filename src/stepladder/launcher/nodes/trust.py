"""Nothing that comes over the network is believed, or even read as a pickle, unless this launch has signed it."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from stepladder.core.signed import SECRET, Forged, secret_in, sign, verified
from stepladder.launcher.nodes.rendezvous import SECRET_FILE
from stepladder.rank.exit_record import end_file

STATE = {(dynamic_rendezvous.__name__, name) for name in ("_RendezvousState", "_NodeDesc")}
STATE |= {("datetime", "datetime"), ("datetime", "timezone"), ("datetime", "timedelta")}


def script_secret() -> str:
    """Of a script's launch: from the launcher on another host, or from the batch job's folder, which nodes share.

    "" where nodes are started by hand and share nothing: then who reaches the rendezvous may disturb the launch,
    but not run code in it.
    """
    if given := os.environ.pop(SECRET, ""):
        return given
    word = end_file()
    return secret_in(word.parent / SECRET_FILE) if word is not None else ""


class SignedBackend(RendezvousBackend):
    """torchelastic's backend, which unpickles what it finds: only what was signed gets there, and only states."""

    def __init__(self, backend: RendezvousBackend, secret: str) -> None:
        self.backend, self.secret = backend, secret

    @property
    def name(self) -> str:
        return self.backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self.backend.get_state()
        return None if found is None else (self._checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self.backend.set_state(sign(self.secret, state), token)
        return None if found is None else (self._checked(found[0]), *found[1:])

    def _checked(self, signed: bytes) -> bytes:
        state = verified(self.secret, signed)
        _State(io.BytesIO(state)).load()
        return state


class _State(pickle.Unpickler):
    """Loads a rendezvous' state. Raises Forged for all else, before it is made."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STATE:
            raise Forged
        return super().find_class(module, name)

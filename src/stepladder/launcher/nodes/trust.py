"""Nothing that comes over the network is believed, or even read as a pickle, unless this launch has
signed it.
"""

from __future__ import annotations

import io
import pickle
import threading
from typing import Any, ClassVar

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from stepladder.core.signing import ForgedError, sign, verify

STATE = {(dynamic_rendezvous.__name__, name) for name in ("_RendezvousState", "_NodeDesc")}
BYTES_OF_NUMBER = 8
STATE |= {("datetime", "datetime"), ("datetime", "timezone"), ("datetime", "timedelta")}
PythonsUnpickler: Any = pickle._Unpickler  # that in C keeps its own BUILD
FIELDS = {
    dynamic_rendezvous._RendezvousState: vars(dynamic_rendezvous._RendezvousState()).keys(),
    dynamic_rendezvous._NodeDesc: {"addr", "pid", "local_id"},
}
# Other ways to make objects and to ask for what pickle calls persistent: no state needs them.
REFUSED = {
    code[0]
    for code in (
        pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID,
        pickle.BINPERSID,
    )
}  # fmt: skip


class SignedBackend(RendezvousBackend):
    """torchelastic's backend, which unpickles what it finds: only what was signed gets there, and
    only states.

    Each state is signed with a number that is larger than that of the state before. A signed state
    of earlier that somebody puts back is noticed by its number.

    Attributes:
        backend: torchelastic's.
        secret: The launch's.
        key: What the states are signed for: the rendezvous' name.
        newest: The largest number seen.
    """

    def __init__(self, backend: RendezvousBackend, secret: str, name: str) -> None:
        self.backend = backend
        self.secret = secret
        self.key = f"rendezvous/{name}"
        self.newest = 0
        self.lock = threading.Lock()  # a thread of torchelastic's may ask meanwhile

    @property
    def name(self) -> str:
        return self.backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        with self.lock:
            found = self.backend.get_state()
            return None if found is None else (self._checked(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        with self.lock:
            number = (self.newest + 1).to_bytes(BYTES_OF_NUMBER, "big")
            found = self.backend.set_state(sign(self.secret, self.key, number + state), token)
            return None if found is None else (self._checked(found[0]), *found[1:])

    def _checked(self, signed: bytes) -> bytes:
        """Return the state. Raises Forged where it is not signed, or older than the state before."""
        data = verify(self.secret, self.key, signed)
        number = int.from_bytes(data[:BYTES_OF_NUMBER], "big")
        state = data[BYTES_OF_NUMBER:]
        if number < self.newest:
            raise ForgedError
        _State(io.BytesIO(state)).load()
        self.newest = number
        return state


class _State(PythonsUnpickler):  # type: ignore[misc]
    """Loads a rendezvous' state. Raises Forged for all else, before it is made."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: step for code, step in PythonsUnpickler.dispatch.items() if code not in REFUSED
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STATE:
            raise ForgedError
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Set the fields of a state or of a node in it; BUILD would also set attributes of a class."""
        fields, target = self.stack[-1], self.stack[-2]
        known = FIELDS.get(type(target))
        if known is None or type(fields) is not dict or not fields.keys() <= known:
            raise ForgedError
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def load(self) -> Any:
        try:
            state = super().load()
        except Exception as error:  # of any kind: a stranger has written it
            raise ForgedError from error
        if type(state) is not dynamic_rendezvous._RendezvousState:
            raise ForgedError
        return state

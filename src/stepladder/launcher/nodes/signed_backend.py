"""A rendezvous backend that reads only what this launch has signed.

Nothing that comes over the network is trusted, or even read as a pickle, without a signature.
"""

from __future__ import annotations

import io
import pickle
import threading
from typing import Any, ClassVar

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from stepladder.core.signing import ForgedError, sign, verify

STATE_NUMBER_BYTES = 8
STATE_CLASSES = {
    (dynamic_rendezvous.__name__, "_RendezvousState"),
    (dynamic_rendezvous.__name__, "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timezone"),
    ("datetime", "timedelta"),
}
STATE_FIELDS = {
    dynamic_rendezvous._RendezvousState: vars(dynamic_rendezvous._RendezvousState()).keys(),
    dynamic_rendezvous._NodeDesc: {"addr", "pid", "local_id"},
}
PythonUnpickler: Any = pickle._Unpickler  # the one in C does not let a subclass replace BUILD
# Opcodes that make objects in other ways, or load persistent ids: no state needs them.
REFUSED_OPCODES = {
    code[0]
    for code in (
        pickle.INST,
        pickle.OBJ,
        pickle.NEWOBJ_EX,
        pickle.EXT1,
        pickle.EXT2,
        pickle.EXT4,
        pickle.PERSID,
        pickle.BINPERSID,
    )
}


class SignedBackend(RendezvousBackend):
    """torchelastic's backend, with a signature around each state that it stores.

    torchelastic unpickles what the backend returns, so only signed data may get there, and it may
    only describe a state. Each state is signed together with a number that is larger than that of
    the state before, which exposes an old signed state that somebody puts back.

    Args:
        backend: The backend of torchelastic.
        secret: The secret of the launch.
        name: The name of the rendezvous.
    """

    def __init__(self, backend: RendezvousBackend, secret: str, name: str) -> None:
        self.backend = backend
        self.secret = secret
        # The key that states are signed for.
        self.key = f"rendezvous/{name}"
        # The largest number of a state so far.
        self.newest = 0
        self._lock = threading.Lock()  # torchelastic calls from two threads

    @property
    def name(self) -> str:
        """The name of torchelastic's backend."""
        return self.backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, as torchelastic's backend does."""
        with self._lock:
            stored = self.backend.get_state()
            if stored is None:
                return None
            signed, token = stored
            return self._verify(signed), token

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Sign and store a state, as torchelastic's backend does."""
        with self._lock:
            number = (self.newest + 1).to_bytes(STATE_NUMBER_BYTES, "big")
            signed = sign(self.secret, self.key, number + state)
            stored = self.backend.set_state(signed, token)
            if stored is None:
                return None
            stored_state, stored_token, was_set = stored
            return self._verify(stored_state), stored_token, was_set

    def _verify(self, signed: bytes) -> bytes:
        """Return the state, or raise Forged if it is unsigned or older than the newest state."""
        data = verify(self.secret, self.key, signed)
        number = int.from_bytes(data[:STATE_NUMBER_BYTES], "big")
        state = data[STATE_NUMBER_BYTES:]
        if number < self.newest:
            raise ForgedError
        _StateUnpickler(io.BytesIO(state)).load()
        self.newest = number
        return state


class _StateUnpickler(PythonUnpickler):  # type: ignore[misc]
    """Loads the state of a rendezvous, and raises Forged before it makes anything else."""

    dispatch: ClassVar[dict[int, Any]] = {
        opcode: load
        for opcode, load in PythonUnpickler.dispatch.items()
        if opcode not in REFUSED_OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STATE_CLASSES:
            raise ForgedError
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Set the fields of a state or a node: BUILD could also set attributes of a class."""
        fields = self.stack[-1]
        target = self.stack[-2]
        known = STATE_FIELDS.get(type(target))
        if known is None or type(fields) is not dict or not fields.keys() <= known:
            raise ForgedError
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def load(self) -> Any:
        try:
            state = super().load()
        except Exception as error:  # of any kind: the data may come from anybody
            raise ForgedError from error
        if type(state) is not dynamic_rendezvous._RendezvousState:
            raise ForgedError
        return state

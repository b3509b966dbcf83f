"""What the agents of a launch write into the store of their rendezvous: signed, each value under
its own key.

The store is open to everybody on the network, who may read, write and delete there. A signature
covers the key and the value, and each key names the start and the group that it is for. So nobody
without the secret can speak for a node: not by a value of their own, and not by a copy of a signed
one under another key. Nothing is a bare counter."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from stepladder.core.signing import ForgedError, sign, verify


class SignedBoard:
    """The signed values whose keys begin with a scope.

    Attributes:
        store: Where they are; it has no password.
        scope: What all keys begin with, such as "stepladder/start-3".
        secret: The launch's.
    """

    def __init__(self, store: Store, scope: str, secret: str) -> None:
        self.store = store
        self.scope = scope
        self.secret = secret

    def _key(self, key: str) -> str:
        return f"{self.scope}/{key}"

    def _signed(self, key: str, text: str) -> str:
        return b64encode(sign(self.secret, self._key(key), text.encode())).decode()

    def _verified(self, key: str, value: bytes) -> str:
        try:
            return verify(self.secret, self._key(key), b64decode(value)).decode()
        except ValueError as error:  # no base64, no text
            raise ForgedError from error

    def write(self, key: str, text: str = "") -> None:
        self.store.set(self._key(key), self._signed(key, text))

    def write_if_absent(self, key: str, text: str) -> str:
        """Write a value unless there is one. Returns what is there then. Raises Forged."""
        self.store.compare_set(self._key(key), "", self._signed(key, text))
        return self.read(key)

    def read(self, key: str) -> str:
        """Return a value; waits for it. Raises Forged where it was not signed for this key."""
        return self._verified(key, self.store.get(self._key(key)))

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """Return several values at the cost of one; waits for all of them. Raises Forged."""
        values = self.store.multi_get([self._key(key) for key in keys])
        return [self._verified(key, value) for key, value in zip(keys, values, strict=True)]

    def has(self, *keys: str) -> bool:
        """Return whether all of these keys have a value. Raises Forged where one was not signed for
        its key.
        """
        if not self.store.check([self._key(key) for key in keys]):
            return False
        self.read_all(keys)
        return True

"""Values that the agents of a launch write into the store of their rendezvous, each one signed.

The store has no password: everybody on the network may read, write and delete there. A signature
covers the key and the value, and each key names the start and the group that it is for. So nobody
without the secret can speak for a node: neither with a new value, nor with a copy of a signed value
under another key. The store's own counters are not used, because a number has no signature.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepladder.core.signing import ForgedError, sign, verify

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class SignedBoard:
    """The signed values whose keys begin with a scope.

    Args:
        store: Holds the values.
        scope: Prefix of all keys, such as "stepladder/start-3".
        secret: The secret of the launch, which signs the values.
    """

    def __init__(self, store: Store, scope: str, secret: str) -> None:
        self.store = store
        self.scope = scope
        self.secret = secret

    def _full_key(self, key: str) -> str:
        return f"{self.scope}/{key}"

    def _sign(self, key: str, text: str) -> str:
        signed = sign(self.secret, self._full_key(key), text.encode())
        return b64encode(signed).decode()

    def _verify(self, key: str, value: bytes) -> str:
        try:
            return verify(self.secret, self._full_key(key), b64decode(value)).decode()
        except ValueError as error:  # neither base64 nor text
            raise ForgedError from error

    def write(self, key: str, text: str = "") -> None:
        """Write a value."""
        self.store.set(self._full_key(key), self._sign(key, text))

    def write_if_absent(self, key: str, text: str) -> str:
        """Write a value unless the key has one.

        Returns:
            The key's value now.

        Raises:
            ForgedError: It was not signed for this key.
        """
        self.store.compare_set(self._full_key(key), "", self._sign(key, text))
        return self.read(key)

    def read(self, key: str) -> str:
        """Return a value, and wait until there is one.

        Raises:
            ForgedError: It was not signed for this key.
        """
        return self._verify(key, self.store.get(self._full_key(key)))

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """Return several values in one round trip, and wait until there are all of them.

        Raises:
            ForgedError: One was not signed for its key.
        """
        values = self.store.multi_get([self._full_key(key) for key in keys])
        return [self._verify(key, value) for key, value in zip(keys, values, strict=True)]

    def has(self, *keys: str) -> bool:
        """Return whether all of these keys have a value.

        Raises:
            ForgedError: One was not signed for its key.
        """
        if not self.store.check([self._full_key(key) for key in keys]):
            return False
        self.read_all(keys)
        return True

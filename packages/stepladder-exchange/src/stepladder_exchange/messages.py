"""Messages between two ranks: what `send` and `recv` return, and a message that arrives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch

from stepladder_exchange.channel import Channel
from stepladder_exchange.group_work import NO_TIMEOUT, GroupWork

GiveUp = Callable[["PeerMessage", timedelta], None]


class PeerMessage(GroupWork):
    """A message that this rank sends or receives; it may have ended already."""

    def __init__(
        self,
        tensor: torch.Tensor,
        peers: frozenset[int],
        tag: int,
        verb: str,
        timeout: timedelta,
        give_up: GiveUp,
    ) -> None:
        """Create a message that has not begun.

        Args:
            tensor: The tensor that is sent or received, in one row.
            peers: The rank that it is for, or the ranks that it may come from.
            tag: Its tag: a message is received with the tag with which it was sent.
            verb: What a peer does if all is well.
            timeout: How long to wait for it, if the caller of `wait` does not say.
            give_up: Called with the message and a timeout when it has not ended in that time. The
                message has ended when the function returns.
        """
        super().__init__([tensor])
        self.peers = peers
        self.tag = tag
        self.verb = verb
        self.data = _get_bytes(tensor)  # the bytes that are sent or overwritten
        self._timeout = timeout
        self._give_up = give_up

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the message is sent or received.

        Returns:
            True, as torch's own work does.

        Raises:
            RuntimeError: The rank is lost, or has not come in time.
        """
        limit = timeout if timeout > NO_TIMEOUT else self._timeout
        if not self.wait_for_end(limit):
            self._give_up(self, limit)
        return super().wait()


class SentMessage(PeerMessage):
    """A message that this rank sends."""

    def __init__(
        self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta, give_up: GiveUp
    ) -> None:
        """Create a message of which nothing is written; the arguments are those of PeerMessage."""
        super().__init__(tensor, frozenset([peer]), tag, "receive", timeout, give_up)
        header = torch.tensor([tag, len(self.data)], device="cpu")
        self._parts = [header.view(torch.uint8), self.data]

    @property
    def is_written(self) -> bool:
        """Whether nothing remains to be written."""
        return not self._parts

    def write_to(self, channel: Channel) -> bool:
        """Write what the channel has room for; return whether that was something."""
        total = 0
        while self._parts:
            count = channel.write(self._parts[0])
            total += count
            self._parts[0] = self._parts[0][count:]
            if not len(self._parts[0]):
                self._parts.pop(0)
            elif not count:
                break
        return total > 0


class ReceivedMessage(PeerMessage):
    """A message that this rank receives."""

    def __init__(
        self,
        tensor: torch.Tensor,
        peers: frozenset[int],
        tag: int,
        timeout: timedelta,
        give_up: GiveUp,
    ) -> None:
        """Create a message that has not come; the arguments are those of PeerMessage."""
        super().__init__(tensor, peers, tag, "send", timeout, give_up)
        self._source = -1

    def take(self, data: torch.Tensor, source: int) -> bool:
        """Take the bytes that a rank has sent, which may lie where they should already.

        Returns:
            Whether they fit.
        """
        self._source = source
        if len(data) > len(self.data):
            return False
        if data.data_ptr() != self.data.data_ptr():
            self.data[: len(data)].copy_(data)
        return True

    def _source_rank(self) -> int:
        """Return from which rank the message came, as torch asks for it."""
        return self._source


class Ending(NamedTuple):
    """The end of a message, of which those that wait for it are to be told."""

    message: PeerMessage
    error: RuntimeError | None = None


class Arrival:
    """A message of a peer whose bytes arrive: first its header, then its data."""

    def __init__(self) -> None:
        self._header = torch.empty(2, dtype=torch.int64, device="cpu")
        self._rest = self._header.view(torch.uint8)
        # Where the data go; None until the header is there.
        self.data: torch.Tensor | None = None
        # The message of this rank that gets them; None if this rank has not asked for it.
        self.taker: ReceivedMessage | None = None

    @property
    def tag(self) -> int:
        """The tag with which it was sent, once the header is there."""
        return int(self._header[0])

    @property
    def is_short(self) -> bool:
        """Whether bytes are missing of what arrives now, the header or the data."""
        return len(self._rest) > 0

    def read_from(self, channel: Channel) -> int:
        """Read bytes that have come; return how many."""
        count = channel.read(self._rest)
        self._rest = self._rest[count:]
        return count

    def open(self, taker: ReceivedMessage | None) -> None:
        """Go on with the data after the header, into the tensor of the taker if they fit."""
        self.taker = taker
        size = int(self._header[1])
        if taker is not None and size <= len(taker.data):
            self.data = taker.data[:size]
        else:
            self.data = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._rest = self.data

    def give_to(self, taker: ReceivedMessage) -> None:
        """Set who gets the data, also if they have come already."""
        self.taker = taker


def _get_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor that lies in one row, to be read or written."""
    size = tensor.numel() * tensor.element_size()
    begin = tensor.storage_offset() * tensor.element_size()
    data = torch.empty(0, dtype=torch.uint8, device="cpu")
    data.set_(tensor.untyped_storage(), begin, [size], [1])
    return data

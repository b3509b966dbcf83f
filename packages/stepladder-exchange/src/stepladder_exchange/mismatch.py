"""Ranks that call different collectives: each tells the others its call, so that errors name both.

Ranks compare only digests of their calls, which costs little. They describe a call only when the
digests differ. Then no rank can go on, so all find the difference, also those that wait for
another rank.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from stepladder_exchange.call_frame import CallFrame
from stepladder_exchange.shared_segment import WORDS_PER_SLOT
from stepladder_exchange.wait import CALL_WORD, SLOT_WORDS, CallMismatch, PeerWaiter
from stepladder_exchange.work import MessageFormat

MAX_ANSWER_S = 10.0  # a rank that is stopped does not answer
MAX_MESSAGES_NAMED = 3
CALL_SIZE = re.compile(r"(?<=\()\d+ ")  # of a call in words
TEXT_OFFSET = 8 * (CALL_WORD + 1)  # bytes from the beginning of a slot
MAX_CALL_BYTES = 8 * WORDS_PER_SLOT - TEXT_OFFSET


def describe_call(formats: Sequence[MessageFormat], caller: CallFrame | None) -> str:
    """Return in words what a rank calls.

    Args:
        formats: The format of each message of the exchange.
        caller: The user's call, None if it is not known.
    """
    parts = list(map(_describe_message, formats[:MAX_MESSAGES_NAMED]))
    remaining = len(formats) - len(parts)
    if remaining:
        parts.append(f"{remaining} more")
    text = ", ".join(parts)
    return text if caller is None else f"{text} in {caller}"


def _describe_message(message: MessageFormat) -> str:
    """Return in words what a rank contributes to a collective."""
    if not message.row_length or " of " in message.kind:
        return message.kind
    length = max(message.rows_per_rank) * message.row_length
    return f"{message.kind} ({length} {str(message.dtype).removeprefix('torch.')})"


def has_told_call(waiter: PeerWaiter, peer: int, count: int) -> bool:
    """Return whether a peer has told what it calls in an exchange."""
    return waiter.slots[SLOT_WORDS * peer + CALL_WORD] == count


def compare_calls(waiter: PeerWaiter, peer: int, count: int, call: str) -> CallMismatch:
    """Tell the peers what this rank calls, and learn it from a peer whose call differs.

    Args:
        waiter: How this rank waits for its peers.
        peer: The peer, which does the same.
        count: The number of the exchange.
        call: What this rank calls.

    Returns:
        The error that names both calls; only this rank's if the peer does not answer.
    """
    _write_call(waiter, count, call)
    own_name = waiter.names[waiter.rank]
    peer_name = waiter.names[peer]
    text = f"rank {peer_name} calls a different collective here than rank {own_name}"
    answer = _await_call(waiter, peer, count)
    if CALL_SIZE.sub("", answer) == CALL_SIZE.sub("", call):
        text = f"rank {peer_name} passes another size here than rank {own_name}"
    if answer:
        return CallMismatch(peer, f"{text}: {answer}, where rank {own_name} calls {call}")
    return CallMismatch(peer, f"{text}, which calls {call}")


def _write_call(waiter: PeerWaiter, count: int, call: str) -> None:
    text = call.encode()[:MAX_CALL_BYTES].ljust(MAX_CALL_BYTES, b"\0")
    begin = 8 * SLOT_WORDS * waiter.rank + TEXT_OFFSET
    waiter.slots.cast("B")[begin : begin + MAX_CALL_BYTES] = text
    waiter.slots[SLOT_WORDS * waiter.rank + CALL_WORD] = count
    waiter.wake_all_ranks()


def _await_call(waiter: PeerWaiter, peer: int, count: int) -> str:
    """Return what a peer calls; "" if it does not tell."""
    deadline = time.monotonic() + MAX_ANSWER_S
    while time.monotonic() < deadline:
        bell = waiter.get_bell()
        has_gone = waiter.has_gone(peer)
        if has_told_call(waiter, peer, count):
            begin = 8 * SLOT_WORDS * peer + TEXT_OFFSET
            text = bytes(waiter.slots.cast("B")[begin : begin + MAX_CALL_BYTES])
            return text.rstrip(b"\0").decode(errors="ignore")
        if has_gone:
            break
        waiter.sleep_at_bell(bell)
    return ""

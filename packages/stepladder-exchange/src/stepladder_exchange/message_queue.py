"""Messages of the ranks of one machine, `send` and `recv`, through the memory that they share.

gloo can leave a rank waiting for a message for ever: if a connection closes while a message is on
its way, gloo does not tell who waits for it. Here the kernel tells when the process of a rank ends.

Between two ranks there is a channel for each direction. A message of up to RING_BYTES is sent when
it lies in the channel, and a larger one when the receiver has taken so much that the rest does. A
rank takes messages from a channel while it waits for one of that peer. One with another tag is put
aside until it is asked for; so one tag's messages keep their order, and tags do not wait for one
another.

A call moves what can be moved at once. A thread, which the first call that has to wait starts,
moves the rest. It sleeps until a bell rings: a peer rings it after it has written to or read from a
channel of this rank, and so does the thread that learns of the end of a process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from stepladder_exchange.channel import Channel
from stepladder_exchange.group_work import ProcessGuard
from stepladder_exchange.messages import Arrival, Ending, PeerMessage, ReceivedMessage, SentMessage
from stepladder_exchange.queue_thread import QueueThread
from stepladder_exchange.runner import ExchangeRunner
from stepladder_exchange.wait import make_loss_error

Receivers = list[ReceivedMessage]  # calls of `recv` to which no message has come, oldest first
Endings = list[Ending]


class _Lane:
    """The messages between this rank and one peer."""

    def __init__(self, memory: ExchangeRunner, peer: int) -> None:
        """Create a lane without messages.

        Args:
            memory: The memory of the group.
            peer: The peer.
        """
        self._peer = peer
        self._names = memory.names
        self._rank = memory.rank
        self._waiter = memory.waiter
        self._outward = Channel(memory.memory, memory.rank, peer)
        self._inward = Channel(memory.memory, peer, memory.rank)
        self._outgoing: deque[SentMessage] = deque()
        self._arrival = Arrival()
        self._unclaimed: list[Arrival] = []  # those for which nobody has asked, oldest first

    def send(self, message: SentMessage) -> None:
        """Put a message after those that are to be sent."""
        self._outgoing.append(message)

    def claim(self, message: ReceivedMessage, endings: Endings) -> bool:
        """Take the oldest message with a tag that has come unasked; return whether there is one."""
        for arrival in self._unclaimed:
            if arrival.tag == message.tag:
                self._unclaimed.remove(arrival)
                arrival.give_to(message)
                if arrival is not self._arrival:
                    endings.append(self._deliver(arrival))
                return True
        return False

    @property
    def is_busy(self) -> bool:
        """Whether a message of this rank has begun and not ended."""
        return bool(self._outgoing) or self._arrival.taker is not None

    def expects_from(self, receivers: Receivers) -> bool:
        """Return whether a message of the peer is awaited."""
        has_receiver = any(self._peer in receiver.peers for receiver in receivers)
        return has_receiver or self._arrival.taker is not None

    def write(self, endings: Endings) -> None:
        """Send what can be sent now."""
        while self._outgoing:
            message = self._outgoing[0]
            if message.write_to(self._outward):
                self._waiter.ring(self._peer)
            if not message.is_written:
                return
            self._outgoing.popleft()
            endings.append(Ending(message))

    def read(self, receivers: Receivers, endings: Endings) -> None:
        """Receive what has come."""
        while self.expects_from(receivers):
            arrival = self._arrival
            count = arrival.read_from(self._inward)
            if arrival.is_short and not count:
                return
            if arrival.data is None and not arrival.is_short:
                self._open(arrival, receivers)
                continue
            if not arrival.is_short:
                self._arrival = Arrival()
                if arrival.taker is not None:
                    endings.append(self._deliver(arrival))
            self._waiter.ring(self._peer)  # it may wait for room

    def _open(self, arrival: Arrival, receivers: Receivers) -> None:
        """Find out who gets a message whose header has come."""
        for receiver in receivers:
            if self._peer in receiver.peers and receiver.tag == arrival.tag:
                receivers.remove(receiver)
                arrival.open(receiver)
                return
        arrival.open(None)
        self._unclaimed.append(arrival)

    def _deliver(self, arrival: Arrival) -> Ending:
        """Hand a message that has come whole to who has asked for it."""
        assert arrival.data is not None and arrival.taker is not None
        receiver = arrival.taker
        if receiver.take(arrival.data, self._peer):
            return Ending(receiver)
        error = RuntimeError(
            f"rank {self._names[self._peer]} sends {len(arrival.data)} bytes"
            f" to rank {self._names[self._rank]}, which expects {len(receiver.data)}"
        )
        return Ending(receiver, error)

    def fail(self, error: RuntimeError, endings: Endings) -> None:
        """End the messages that have begun with an error."""
        endings.extend(Ending(message, error) for message in self._outgoing)
        self._outgoing.clear()
        if self._arrival.taker is not None:
            endings.append(Ending(self._arrival.taker, error))
            self._arrival = Arrival()


class MessageQueue:
    """The messages of one rank, in a group whose ranks are all on its machine."""

    def __init__(self, memory: ExchangeRunner) -> None:
        """Create the queue of the rank that a memory belongs to."""
        self._names = memory.names
        self._rank = memory.rank
        self._waiter = memory.waiter
        self._lanes = {peer: _Lane(memory, peer) for peer in memory.peers}
        self._receivers: Receivers = []
        self._endings: Endings = []
        self._lock = threading.Lock()
        self._new_work = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None
        self._is_closed = False
        self._process = ProcessGuard()

    @torch.inference_mode(False)  # the thread could not write to tensors of an inference
    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> PeerMessage:
        """Start to send a tensor to a peer."""
        self._validate([peer])
        message = SentMessage(tensor, peer, tag, timeout, self._give_up)
        with self._moving():
            self._raise_error()
            self._lanes[peer].send(message)
        self._go_on(message)
        return message

    @torch.inference_mode(False)
    def receive(
        self, tensor: torch.Tensor, peers: list[int], tag: int, timeout: timedelta
    ) -> PeerMessage:
        """Start to receive a tensor from one of several peers; all of them, if none is named."""
        self._validate(peers)
        message = ReceivedMessage(
            tensor, frozenset(peers or self._lanes), tag, timeout, self._give_up
        )
        with self._moving():
            self._raise_error()
            lanes = [self._lanes[peer] for peer in sorted(message.peers)]
            if not any(lane.claim(message, self._endings) for lane in lanes):
                self._receivers.append(message)
        self._go_on(message)
        return message

    def _validate(self, peers: list[int]) -> None:
        self._process.validate()
        for peer in peers:
            if peer not in self._lanes:
                raise RuntimeError(f"rank {peer} of the group is this rank, or is not there")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(str(self._error))

    def _go_on(self, message: PeerMessage) -> None:
        """Leave a message to the thread, unless it has ended."""
        if message.has_ended:
            return
        with self._lock:
            if self._thread is None:
                self._thread = QueueThread(self._run, self.close, "messages")
                self._thread.start()
            self._new_work.notify()

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """After a block that has all to itself, move what can be moved, and tell who waits."""
        endings: Endings = []
        try:
            with self._lock:
                try:
                    yield
                    self._move()
                except BaseException as error:  # what was half moved is lost
                    self._fail(RuntimeError(f"{type(error).__name__} during a message: {error}"))
                    raise
                finally:
                    endings = self._endings
                    self._endings = []
        finally:
            for ending in endings:  # without the lock: who waits may start another
                ending.message.end(ending.error)

    def _move(self) -> None:
        """Send and receive what can be, and end the messages for which a rank is lost."""
        lost = {peer for peer in self._lanes if self._waiter.has_gone(peer)}
        for peer, lane in self._lanes.items():
            if peer not in lost:
                lane.write(self._endings)
            lane.read(self._receivers, self._endings)  # also what a lost rank had sent
            if peer in lost and lane.is_busy:
                lane.fail(self._find_loss(peer), self._endings)
        for receiver in list(self._receivers):
            if receiver.peers <= lost:
                self._receivers.remove(receiver)
                error = self._find_loss(min(receiver.peers))
                self._endings.append(Ending(receiver, error))

    def _find_loss(self, peer: int) -> RuntimeError:
        """Return the error that names the rank whose loss has taken a peer."""
        return make_loss_error(self._waiter.record_lost(peer))

    def _fail(self, error: RuntimeError) -> None:
        """End all messages with an error, and those that come later."""
        self._error = self._error or error
        for lane in self._lanes.values():
            lane.fail(self._error, self._endings)
        self._endings.extend(Ending(receiver, self._error) for receiver in self._receivers)
        self._receivers.clear()

    def _give_up(self, message: PeerMessage, timeout: timedelta) -> None:
        """End all messages because one has not ended in time, as gloo does."""
        names = ", ".join(f"rank {self._names[peer]}" for peer in sorted(message.peers))
        missing = f"{names} did not {message.verb} in {timeout.total_seconds():g} s, the timeout"
        with self._moving():
            if not message.has_ended:
                self._fail(RuntimeError(f"timed out: {missing}"))

    def _run(self) -> None:
        """Move messages until the queue is closed."""
        while True:
            with self._lock:
                while not self._is_closed and not self._is_busy():
                    self._new_work.wait()
                if self._is_closed:
                    return
            bell = self._waiter.get_bell()
            with self._moving():
                pass
            self._waiter.sleep_at_bell(bell)

    def _is_busy(self) -> bool:
        return bool(self._receivers) or any(lane.is_busy for lane in self._lanes.values())

    def close(self) -> None:
        """End all messages and the thread."""
        if self._is_closed or not self._process.is_here:
            return
        with self._moving():
            self._is_closed = True
            self._fail(RuntimeError("the process group was destroyed"))
            self._new_work.notify()
        self._waiter.ring(self._rank)

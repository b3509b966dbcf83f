"""The global random generators of torch, Python and NumPy, seeded for each pass."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from stepladder.core.host_generators import seed_host

# A Mersenne Twister is an array of this many words and an index in it.
NUM_WORDS = 624
State = Any  # equal for equal states of a generator


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed all global generators; torch.manual_seed would take a millisecond."""
    _seed_torch(seed, device)
    seed_host(seed)


def _seed_torch(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


class PassGenerators:
    """Seeds the global generators before each pass, those of Python and NumPy only if needed.

    Few jobs draw from Python's or NumPy's generator in a pass, and seeding them takes ten times as
    long as seeding torch's. So a pass only compares their states, and `was_drawn` says that a pass
    has drawn from them without a seed of its own. The training loop then calls
    `seed_host_generators` and repeats the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seeds_host = False
        self.was_drawn = False
        self.read_states = [_make_python_reader(), _make_numpy_reader()]
        # Also drops a second Gaussian number, which a draw would take without a trace.
        seed_host(0)
        self.states = self._read()

    def _read(self) -> list[State]:
        return [read() for read in self.read_states]

    def seed_host_generators(self) -> None:
        """Seed Python's and NumPy's generators, too, before each pass from now on."""
        self.seeds_host = True

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Forget the passes in the block, after which the caller restores the generators."""
        states = self.states
        was_drawn = self.was_drawn
        yield
        self.states = states
        self.was_drawn = was_drawn

    def begin_pass(self, seed: int) -> None:
        """Seed the generators."""
        _seed_torch(seed, self.device)
        # Something else has drawn from them since the last pass, such as a Dataset.
        is_changed = self._read() != self.states
        if self.seeds_host or is_changed:
            seed_host(seed)
            self.states = self._read()

    def begin_update(self, seed: int) -> None:
        """Seed the generators for a step of the optimizer and of the schedules.

        The last pass has left them in another state on each rank.
        """
        seed_generators(seed, self.device)
        self.states = self._read()

    def end_pass(self) -> None:
        """Note whether the pass has drawn from Python's or NumPy's generator."""
        states = self._read()
        if states != self.states:
            self.was_drawn = True
            self.states = states


def _make_python_reader() -> Callable[[], State]:
    """Return a function that reads the state of Python's generator.

    It reads two of its words in memory, which takes 0.1 us; random.getstate takes 10 us. If this
    Python has other objects, random.getstate is returned.
    """
    trial = random.Random(0)
    read_trial = _make_word_reader(id(trial) + object.__basicsize__, 0, 1)
    before = read_trial()
    trial.random()
    if (before[0], read_trial()[0]) != (NUM_WORDS, 2):
        return random.getstate
    return _make_word_reader(id(random._inst) + object.__basicsize__, 0, 1)


def _make_numpy_reader() -> Callable[[], State]:
    """Return a function that reads the state of NumPy's generator, likewise."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return lambda: repr(np.random.get_state(legacy=False))
    return _make_word_reader(generator.ctypes.state_address, 0, NUM_WORDS)


def _make_word_reader(address: int, first: int, second: int) -> Callable[[], tuple[int, int]]:
    """Return a function that reads two words of a Mersenne Twister, its index and one other.

    A draw moves the index; when all words are used, all of them change.
    """
    words = (ctypes.c_uint32 * (NUM_WORDS + 1)).from_address(address)
    return lambda: (words[first], words[second])

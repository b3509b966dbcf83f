"""The random generators of Python and NumPy, also those that NumPy makes without a seed."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np

BIT_GENERATOR: Any = np.random.bit_generator
_read_system: Any = getattr(BIT_GENERATOR, "randbits", None)  # by which NumPy seeds generators


def seed_host(seed: int) -> None:
    """Seed the global generators of Python and NumPy, which takes 15 us.

    From now on `np.random.default_rng()` takes its seed from NumPy's global generator, not from the
    operating system. In a process that is forked it does so once that is seeded, too: else all of
    them would draw the same numbers.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    BIT_GENERATOR.randbits = _draw_bits


def _draw_bits(count: int) -> int:
    return int.from_bytes(np.random.bytes(count // 8), "little")


def _forget() -> None:
    BIT_GENERATOR.randbits = _read_system


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)

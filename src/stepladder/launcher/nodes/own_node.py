"""This machine as one node of a launch. Imports no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepladder.launcher.local.group import LocalGroup


@dataclass(frozen=True)
class Introduction:
    """A node's word to the others before a start, and what they agree on by it.

    nproc: its ranks.  attempt: the number of the last start.  failed: attempt and step of the last failure in a
    step. Nodes that came later know less.
    """

    nproc: int
    attempt: int = -1
    failed: tuple[int, int] = (-1, 0)


@dataclass
class OwnNode:
    """A node over all starts of its ranks.

    group: starts the ranks, each of which does `work(*args)`.  restarts_left: of --max-restarts.
    """

    group: LocalGroup
    work: Callable[..., Any]
    args: tuple[Any, ...]
    known: Introduction
    restarts_left: int


def prepare_torchelastic() -> None:
    """Before it is imported. What matters is said by our agent."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store would print a page of C++ frames
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    # Ranks get a store of their own for each start: in the agents' they would find the addresses of the dead,
    # and nodes that stay would remember it when its node goes.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

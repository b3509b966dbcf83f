"""The start of the probe, once per process, after torch has been imported."""

from __future__ import annotations

import atexit
import os
import sys
import zlib
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path

from stepladder.rank.stacks import answer_stack_signal
from stepladder.rank.torch_fixes import defer_dynamo
from stepladder.rank.torch_fixes_groups import name_groups_in_stacks
from stepladder.rank.torch_fixes_store import bind_store_to_loopback
from stepladder.tools.check.events import LoadedLibraries, ProcessExit
from stepladder.tools.check.probe import (
    frozen,
    hooks_comm,
    hooks_data,
    hooks_files,
    hooks_model,
    hooks_names,
    hooks_random,
    hooks_shown,
    hooks_snapshot,
    hooks_statistics,
    hooks_train,
    noise,
)
from stepladder.tools.check.probe.libraries import list_loaded_libraries, list_other_modules
from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.check.probe_settings import STACKS_SUFFIX
from stepladder_exchange.torch_fixes_gloo import wait_for_gloo
from stepladder_exchange.torch_fixes_store import keep_stores_of_groups

FIRST_OWN_ADDRESS = IPv4Address("127.1.0.0")
NUM_OWN_ADDRESSES = 2**23


def attach() -> None:
    defer_dynamo()
    bind_store_to_loopback(choose_own_address())
    keep_stores_of_groups()
    name_groups_in_stacks()
    if current_log().settings.names:
        hooks_names.attach()
    hooks_comm.attach()
    hooks_data.attach()
    hooks_files.attach()
    hooks_model.attach()
    hooks_random.attach()
    hooks_shown.attach()
    hooks_snapshot.attach()
    hooks_statistics.attach()
    hooks_train.attach()
    if current_log().settings.frozen:
        frozen.attach(current_log().settings.frozen)
    if current_log().settings.neutral:
        noise.attach()
    atexit.register(record_exit)
    answer_stack_requests()
    os.register_at_fork(after_in_child=answer_stack_requests)


def choose_own_address() -> str:
    """Return a loopback address of this start alone, or "" where the system has just one.

    A port that is written into the script is free there, whatever else meets at this port.
    """
    if sys.platform != "linux":
        return ""
    folder = current_log().settings.folder
    number = zlib.crc32(folder.encode()) % NUM_OWN_ADDRESSES
    return str(FIRST_OWN_ADDRESS + number)


def answer_stack_requests() -> None:
    """Write this process's stacks into a file of its own, whenever the checker asks for them."""
    answer_stack_signal(Path(current_log().settings.folder) / f"{os.getpid()}{STACKS_SUFFIX}")


def record_exit() -> None:
    import torch.distributed as dist

    with suppress(Exception):
        has_group = dist.is_available() and dist.is_initialized()
        current_log().write(ProcessExit(group=has_group))
        if not current_log().settings.frozen:  # the first run
            names, others = list_loaded_libraries(), list_other_modules()
            current_log().write(LoadedLibraries(names=names, others=others))
    with suppress(Exception):
        wait_for_gloo()

"""torch's debug server: what a rank says of itself where its script has started one.

`torch.distributed.debug.start_debug_server` puts the address of each rank's server into the job's
store. It answers also where py-spy may not read the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from http.client import HTTPException
from typing import Any
from urllib.request import Request, urlopen

from stepladder.launcher.diagnose.flight_recorder import infer_progress
from stepladder.rank.progress import RankProgress
from stepladder.rank.stacks import Stack, parse_faulthandler

TIMEOUT_S = 5.0


def find_address(env: Mapping[str, str], rank: int) -> str:
    """Return the address of a rank's server; "" if the job has none.

    Args:
        env: The environment of a rank, which says where the store is.
        rank: The number of the rank.
    """
    host = env.get("MASTER_ADDR", "")
    port = env.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        return ""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    try:
        timeout = timedelta(seconds=TIMEOUT_S)
        store = TCPStore(host, int(port), is_master=False, timeout=timeout)
        servers = PrefixStore("debug_server", store)
        if not servers.check([f"rank{rank}"]):
            return ""
        address: bytes = servers.get(f"rank{rank}")
    except RuntimeError:  # no store answers there
        return ""
    return address.decode()


def read_stacks(address: str) -> list[Stack]:
    """Return the stacks of a rank's threads, the main thread first; none without an answer."""
    return parse_faulthandler(_ask(address, "dump_traceback"))


def read_progress(address: str) -> RankProgress:
    """Return the collectives of a rank that torch's flight recorder has, if it is on."""
    dump: dict[str, Any] = json.loads(_ask(address, "fr_trace_json") or "{}")
    if not dump.get("entries"):
        return RankProgress()
    return infer_progress({0: dump}).get(0, RankProgress())


def _ask(address: str, handler: str) -> str:
    if not address:
        return ""
    request = Request(f"{address}/handler/{handler}", method="POST")
    try:
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode(errors="replace")
    except (OSError, HTTPException, ValueError):  # what answers there may be no server of torch
        return ""
    return text

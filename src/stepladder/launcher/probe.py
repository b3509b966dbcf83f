"""What each of `--hosts` says of itself before anything starts there. Many are asked at a time,
none for ever.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.numbers import MAX_PORT, parse_whole_number
from stepladder.launcher.host import NO_FOLDER, NO_PYTHON, Host, environment
from stepladder.rank.lifecycle import die_with_parent

AT_ONCE = 32  # each is a process of ssh here, and a Python there
SECONDS_TO_ANSWER = 60.0  # where Python comes over a busy network file system
PORT = "PORT"
FREE_PORT = (
    f"from stepladder.core.address import find_free_port; print('{PORT}=%d' % find_free_port())"
)
# A rented machine's own address: sshd's sessions need not have the container's environment.
OWN_ADDRESS = (
    "{ env; tr '\\0' '\\n' < /proc/1/environ; } 2>/dev/null | grep -E '^(NODE_ADDR|RUNPOD_POD_ID)='"
)


def probe_all(hosts: list[Host]) -> list[tuple[str, int]]:
    """Each host's address, and a free port there. Raises InputError for one that cannot run the
    command.

    Signals end it, and whatever happens leaves no ssh behind.
    """
    return asyncio.run(_probe_all(hosts))


async def _probe_all(hosts: list[Host]) -> list[tuple[str, int]]:
    for number in (signal.SIGTERM, signal.SIGHUP):  # Ctrl-C cancels already
        asyncio.get_running_loop().add_signal_handler(number, sys.exit, 128 + number)
    turns = asyncio.Semaphore(AT_ONCE)
    probes = [asyncio.create_task(_probe(host, turns)) for host in hosts]
    try:
        return await asyncio.gather(*probes)
    finally:
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


async def _probe(host: Host, turns: asyncio.Semaphore) -> tuple[str, int]:
    steps = [
        f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null || exit {NO_FOLDER}",
        environment(),
        f"{shlex.quote(sys.executable)} -c 'import stepladder' 2>/dev/null || exit {NO_PYTHON}",
        f"{shlex.quote(sys.executable)} -c {shlex.quote(FREE_PORT)}",
        f"{OWN_ADDRESS} || true",
    ]
    async with turns:
        code, text, error = await _run(
            host, [*host.command(), f"sh -c {shlex.quote('; '.join(steps))}"]
        )
        if code:
            raise host.refused(code, error)
        told = dict(line.partition("=")[::2] for line in text.splitlines())
        port = parse_whole_number(told.get(PORT, ""), 1, MAX_PORT)
        if port is None:
            raise InputError(
                f"host {host.name} has not printed a free port",
                f"{host.tried}, which must print nothing",
            )
        return own_address(told) or await _known_as(host), port


async def _run(host: Host, command: list[str]) -> tuple[int, str, str]:
    """Its exit code and what it printed. Raises InputError where it does not end."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        async with asyncio.timeout(SECONDS_TO_ANSWER):
            said, error = await process.communicate()
    except TimeoutError:
        found = f"host {host.name} has not answered within {SECONDS_TO_ANSWER:g} s"
        raise InputError(found, host.tried) from None
    finally:
        await _ended(process)
    return process.returncode or 0, said.decode(errors="replace"), error.decode(errors="replace")


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Its end, and that of its pipes, also where this is cancelled once more."""
    while process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the helpers of a ProxyCommand
        with suppress(asyncio.CancelledError):
            await process.wait()
    process._transport.close()  # type: ignore[attr-defined]  # else its pipes outlive the loop


def own_address(told: dict[str, str]) -> str:
    """A RunPod machine's address in its cluster, or its name in the account's private network; ""
    elsewhere.
    """
    pod = told.get("RUNPOD_POD_ID")
    return told.get("NODE_ADDR", "") or (f"{pod}.runpod.internal" if pod else "")


async def _known_as(host: Host) -> str:
    """Its address, as ssh's configuration resolves the name."""
    _, shown, _ = await _run(host, host.command("-G"))
    found = re.search(r"^hostname (\S+)$", shown, re.MULTILINE)
    return found.group(1) if found else host.target.rpartition("@")[2]

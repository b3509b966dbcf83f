"""Probes of all `--hosts` before anything starts there: several at a time, each with a timeout."""

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
from stepladder.core.signals import die_with_parent
from stepladder.launcher.host import NO_FOLDER_CODE, NO_PYTHON_CODE, Host, make_environment_script

MAX_PARALLEL_PROBES = 32  # each one is an ssh process here, and a Python process there
PROBE_TIMEOUT_S = 60.0  # Python may load from a busy network file system
PORT_KEY = "PORT"
FREE_PORT_CODE = (
    f"from stepladder.core.address import find_free_port; print('{PORT_KEY}=%d' % find_free_port())"
)
# A rented machine's private address. Sessions of sshd may lack the container's environment.
ADDRESS_COMMAND = (
    "{ env; tr '\\0' '\\n' < /proc/1/environ; } 2>/dev/null | grep -E '^(NODE_ADDR|RUNPOD_POD_ID)='"
)

Endpoint = tuple[str, int]


def probe_all(hosts: list[Host]) -> list[Endpoint]:
    """Return each host's address, and a free port there.

    A signal ends the probes, and no ssh process remains in any case.

    Raises:
        InputError: A host cannot run the command.
    """
    return asyncio.run(_probe_all(hosts))


async def _probe_all(hosts: list[Host]) -> list[Endpoint]:
    for number in (signal.SIGTERM, signal.SIGHUP):  # asyncio handles Ctrl-C itself
        asyncio.get_running_loop().add_signal_handler(number, sys.exit, 128 + number)
    limit = asyncio.Semaphore(MAX_PARALLEL_PROBES)
    probes = [asyncio.create_task(_probe(host, limit)) for host in hosts]
    try:
        return await asyncio.gather(*probes)
    finally:
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


async def _probe(host: Host, limit: asyncio.Semaphore) -> Endpoint:
    python = shlex.quote(sys.executable)
    steps = [
        f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null || exit {NO_FOLDER_CODE}",
        make_environment_script(),
        f"{python} -c 'import stepladder' 2>/dev/null || exit {NO_PYTHON_CODE}",
        f"{python} -c {shlex.quote(FREE_PORT_CODE)}",
        f"{ADDRESS_COMMAND} || true",
    ]
    async with limit:
        script = shlex.quote("; ".join(steps))
        code, output, error = await _run(host, [*host.command(), f"sh -c {script}"])
        if code:
            raise host.explain_failure(code, error)
        values = dict(line.partition("=")[::2] for line in output.splitlines())
        port = parse_whole_number(values.get(PORT_KEY, ""), 1, MAX_PORT)
        if port is None:
            raise InputError(
                f"host {host.name} has not printed a free port",
                f"{host.test_command}, which must print nothing",
            )
        return find_private_address(values) or await _resolve_by_ssh(host), port


async def _run(host: Host, command: list[str]) -> tuple[int, str, str]:
    """Run a command that reaches a host, and wait until the command ends.

    Args:
        host: The host, for messages.
        command: The program and its arguments.

    Returns:
        The exit code, and what the command has written to stdout and to stderr.

    Raises:
        InputError: The command does not end within PROBE_TIMEOUT_S seconds.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            output, error = await process.communicate()
    except TimeoutError:
        message = f"host {host.name} has not answered within {PROBE_TIMEOUT_S:g} s"
        raise InputError(message, host.test_command) from None
    finally:
        await _end_process(process)
    return process.returncode or 0, output.decode(errors="replace"), error.decode(errors="replace")


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """Kill a process and close its pipes, also where this task is cancelled once more."""
    while process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the helpers of a ProxyCommand
        with suppress(asyncio.CancelledError):
            await process.wait()
    process._transport.close()  # type: ignore[attr-defined]  # else its pipes outlive the loop


def find_private_address(variables: dict[str, str]) -> str:
    """Return a RunPod machine's address for other machines, or "" elsewhere.

    It is the address in its cluster, or its name in the account's private network.
    """
    address = variables.get("NODE_ADDR", "")
    pod = variables.get("RUNPOD_POD_ID")
    if not address and pod:
        return f"{pod}.runpod.internal"
    return address


async def _resolve_by_ssh(host: Host) -> str:
    """Return the host's address, as ssh's configuration resolves its name."""
    _, config, _ = await _run(host, host.command("-G"))
    match = re.search(r"^hostname (\S+)$", config, re.MULTILINE)
    return match.group(1) if match else host.target.rpartition("@")[2]

"""`stepladder doctor`: find what is wrong with this machine, why, and what to type."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepladder.cli.findings import show_finding
from stepladder.cli.flags import make_command
from stepladder.cli.types import AsJson, Count, Port
from stepladder.core.address import validate_host_name
from stepladder.core.console import echo, echo_json
from stepladder.core.errors import InputError
from stepladder.core.numbers import MAX_PORT
from stepladder.core.output_file import validate_writable
from stepladder.core.process_count import parse_process_count
from stepladder.core.python_file import parse_source
from stepladder.core.world import World
from stepladder.launcher.allocation import exec_srun_step
from stepladder.tools.doctor.machine_facts import Facts, gather_facts
from stepladder.tools.doctor.rules import RULES, apply_rules
from stepladder.tools.findings.finding import Finding
from stepladder.tools.findings.render import as_record, count_severities

if TYPE_CHECKING:
    from stepladder.tools.doctor.link import Link, Speed

DOCTOR_RECORD_KEYS = {
    "severity": "severity",
    "found": "evidence",
    "cause": "cause",
    "fix": "fix",
    "rule": "rule",
}


@make_command()
def command(
    script: Path | None = None,
    *,
    nproc: str = "",
    nodes: Count = 1,
    peer: str = "",
    port: Port | None = None,
    run_dir: Path = Path("runs"),
    comm: bool = False,
    save: Path | None = None,
    load: Path | None = None,
    as_json: AsJson = False,
) -> int:
    """Find what is wrong with this machine, with the cause and what to type.

    Neither torch nor a GPU is needed. With SCRIPT.py, it also measures how long the imports of the
    script take; the script is not run. Exit code 1 if there is an error.

    Args:
        script ([SCRIPT.py]): A script whose imports are timed.
        nproc (N|auto|gpu|cpu): Processes that will run on this machine.
        nodes: Machines that will take part.
        peer (HOST): Another machine: check which network interface leads there.
        port: Port that the job will open on this machine.  [default: MASTER_PORT]
        comm: Measure all-reduce between the processes.
        save (FILE): Save the measurements to this file, to inspect them on another machine.
        load (FILE): Inspect a file of --save, instead of this machine.
    """
    if load and (save or comm or script):
        raise InputError("--load inspects a saved file, and nothing else", "--load alone")
    validate_host_name("--peer", peer)
    _validate_files_and_port(save, script, port)  # before anything that takes seconds
    ranks = parse_process_count(nproc) if nproc else 0
    if comm:
        exec_srun_step(click.get_current_context().obj, ranks)
        if ranks == 1 and World.detect().world_size == 1:
            raise InputError(
                "--comm measures between processes, and --nproc is 1", "--comm --nproc 2"
            )
    facts = Facts.load(load) if load else gather_facts(ranks, nodes, run_dir, peer, port, script)
    if save:
        facts.save(save)
    if not comm:
        return _show_report(facts, apply_rules(facts), None, as_json)
    link, link_findings = _measure_link(facts, ranks)
    if World.detect().is_first:
        return _show_report(facts, link_findings + apply_rules(facts), link, as_json)
    for finding in link_findings:
        show_finding(finding)
    return int(bool(link_findings))


def _validate_files_and_port(save: Path | None, script: Path | None, port: int | None) -> None:
    """Raise InputError where a file or the port cannot be used."""
    if save:
        validate_writable(save, "--save", b'"schema"')
    if port is not None and not 0 < port <= MAX_PORT:
        raise InputError(f"--port {port} is not a port", "--port 29500")
    if script:
        parse_source(script)


def _measure_link(facts: Facts, ranks: int) -> tuple[Link | None, list[Finding]]:
    """Return the first rank's measurements between processes, and what is wrong with them."""
    if not facts.torch.version:
        raise InputError(
            "--comm needs torch, which is not installed here",
            "pip install torch, or leave --comm out",
        )
    from stepladder.tools.doctor.link import measure_link as measure_among_ranks

    return measure_among_ranks(ranks or max(2, facts.torch.devices))


def _show_report(facts: Facts, findings: list[Finding], link: Link | None, as_json: bool) -> int:
    """Print the findings, and return exit code 1 if one is an error."""
    failed = any(finding.severity == "error" for finding in findings)
    if as_json:
        report = {
            "ok": not failed,
            "host": facts.host,
            "rules": len(RULES),
            "findings": [as_record(finding, DOCTOR_RECORD_KEYS) for finding in findings],
            "comm": asdict(link) if link else None,
        }
        echo_json(report)
        return int(failed)
    echo(_format_summary(facts))
    for finding in findings:
        show_finding(finding)
    if link is not None:
        _show_link(link)
    counts = count_severities(findings)
    echo(
        f"{counts}; {len(RULES)} rules; stepladder train JOB --dry-run: the memory that a job needs"
    )
    return int(failed)


def _format_summary(facts: Facts) -> str:
    """Return a line about the machine, and one about the script's imports."""
    torch = "no torch"
    if facts.torch.version:
        cuda = f" (CUDA {facts.torch.cuda})" if facts.torch.cuda else ""
        torch = f"torch {facts.torch.version}{cuda}, imported in {facts.torch.seconds:.1f} s"
    gpus = "no GPU"
    if facts.gpus.found:
        gpus = f"{len(facts.gpus.found)} GPUs, driver {facts.gpus.driver}"
    text = f"{facts.host}: Python {facts.python}, {torch}, {gpus}, {facts.cores} cores"
    script = facts.script
    if script.name and not script.error:
        slowest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in script.slowest)
        text += f"\n{script.name} imports for {script.seconds:.1f} s; slowest: {slowest}"
    return text


def _show_link(link: Link) -> None:
    """Print the speed of all-reduce."""
    limits = []
    if link.limit:
        limits.append(f"the link has {link.limit:.2f} GB/s by its driver")
    if link.stream:
        limits.append(f"one plain TCP connection carries {link.stream:.2f}")
    limit = ", ".join(limits) or "the link's limit is not known"
    nodes = f"over {link.nodes} nodes" if link.nodes > 1 else "on one node"
    echo(f"all_reduce {nodes}, {link.ranks} ranks, {link.backend}; {limit}")
    _show_speeds(link.speeds, link.reference_speed)
    if link.within:
        echo(f"all_reduce between the ranks of one node, {link.backend}")
        _show_speeds(link.within, None)


def _show_speeds(speeds: tuple[Speed, ...], bound: float | None) -> None:
    """Print a table of speeds.

    Args:
        speeds: Its rows.
        bound: The speed of the link in GB/s, or None.
    """
    echo(f"{'bytes':>12}{'us':>12}{'bus GB/s':>12}{'of the link' if bound else '':>14}".rstrip())
    for speed in speeds:
        share = f"{100 * speed.bus / bound:.0f} %" if bound else ""
        echo(f"{speed.bytes:>12}{speed.microseconds:>12.1f}{speed.bus:>12.3f}{share:>14}".rstrip())

"""stepladder doctor: what is wrong with this machine, why, and what to type."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepladder.cli.options import json_flag
from stepladder.cli.types import COUNT, PATH, PORT
from stepladder.core.address import validate_host_name
from stepladder.core.console import echo
from stepladder.core.errors import InputError
from stepladder.core.output_file import validate_writable
from stepladder.core.process_count import parse_process_count
from stepladder.core.python_file import parse_source
from stepladder.core.world import World
from stepladder.launcher.allocation import become_step
from stepladder.tools.doctor.facts import Facts, gather
from stepladder.tools.doctor.finding import Finding
from stepladder.tools.doctor.rules import RULES, judge

if TYPE_CHECKING:
    from stepladder.tools.doctor.link import Link, Speed

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@click.command()
@click.argument("script", required=False, type=PATH, metavar="[SCRIPT.py]")
@click.option(
    "--nproc", default="", metavar="N|auto|gpu|cpu", help="Processes that will run on this machine."
)
@click.option(
    "--nodes", type=COUNT, default=1, show_default=True, help="Machines that will take part."
)
@click.option(
    "--peer",
    default="",
    metavar="HOST",
    help="Another machine: check which network interface leads there.",
)
@click.option(
    "--port", type=PORT, help="Port that the job will open on this machine.  [default: MASTER_PORT]"
)
@click.option("--run-dir", type=PATH, default=Path("runs"), show_default=True)
@click.option("--comm", is_flag=True, help="Measure all-reduce between the processes.")
@click.option(
    "--save",
    type=PATH,
    metavar="FILE",
    help="Save what was found to this file, to look at it on another machine.",
)
@click.option(
    "--load", type=PATH, metavar="FILE", help="Look at a file of --save, instead of this machine."
)
@json_flag
@click.pass_context
def command(
    ctx: click.Context,
    script: Path | None,
    nproc: str,
    nodes: int,
    peer: str,
    port: int | None,
    run_dir: Path,
    comm: bool,
    save: Path | None,
    load: Path | None,
    as_json: bool,
) -> int:
    """Find what is wrong with this machine: each finding with its cause and what to type.

    Needs neither torch nor a GPU. SCRIPT.py: also how long its imports take (it is not run). Exit
    code 1 if there is an error."""
    if load and (save or comm or script):
        raise InputError(
            "--load judges a stored bundle, and nothing else can be looked at with it",
            "--load alone",
        )
    validate_host_name("--peer", peer)
    refuse_bad_places(save, script, port)  # before what takes seconds
    ranks = parse_process_count(nproc) if nproc else 0
    if comm:
        become_step(ctx.obj, ranks)
        if ranks == 1 and World.detect().world_size == 1:
            raise InputError(
                "--comm measures between processes, and --nproc is 1", "--comm --nproc 2"
            )
    facts = Facts.load(load) if load else gather(ranks, nodes, run_dir, peer, port, script)
    if save:
        facts.save(save)
    link, of_link = measured(facts, ranks) if comm else (None, [])
    if comm and not World.detect().is_first:
        for finding in of_link:
            show_finding(finding)
        return int(bool(of_link))
    return show(facts, of_link + judge(facts), link, as_json)


def refuse_bad_places(save: Path | None, script: Path | None, port: int | None) -> None:
    if save:
        validate_writable(save, "--save")
    if port is not None and not 0 < port < 65536:
        raise InputError(f"--port {port} is not a port", "--port 29500")
    if script:
        parse_source(script)


def measured(facts: Facts, ranks: int) -> tuple[Link | None, list[Finding]]:
    """What the first rank has measured, and what is wrong with it."""
    if not facts.torch.version:
        raise InputError(
            "--comm needs torch, which is not installed here",
            "pip install torch, or leave --comm out",
        )
    from stepladder.tools.doctor.link import measure

    return measure(ranks or max(2, facts.torch.devices))


def show(facts: Facts, findings: list[Finding], link: Link | None, as_json: bool) -> int:
    """The exit code: 1 where there is an error."""
    failed = any(finding.severity == "error" for finding in findings)
    if as_json:
        shown = {"schema": 1, "ok": not failed, "host": facts.host, "rules": len(RULES)}
        speeds = asdict(link) if link else None
        echo(json.dumps(shown | {"findings": [asdict(f) for f in findings], "comm": speeds}))
        return int(failed)
    echo(summary(facts))
    for finding in findings:
        show_finding(finding)
    if link is not None:
        show_link(link)
    counts = [f"{sum(f.severity == kind for f in findings)} {kind}s" for kind in COLOURS]
    echo(
        f"{', '.join(counts)}; {len(RULES)} rules; stepladder train JOB --dry-run: the memory that a job needs"
    )
    return int(failed)


def show_finding(finding: Finding) -> None:
    click.secho(finding.severity, fg=COLOURS[finding.severity], nl=False)
    echo(f" {finding.rule}: {finding.found}")
    echo(f"    why: {finding.cause}")
    echo(f"    fix: {finding.fix}")


def summary(facts: Facts) -> str:
    """What there is: the machine in a line, the script's imports in another."""
    torch = f"torch {facts.torch.version}" if facts.torch.version else "no torch"
    cuda = f" (CUDA {facts.torch.cuda})" if facts.torch.cuda else ""
    gpus = (
        f"{len(facts.gpus.found)} GPUs, driver {facts.gpus.driver}"
        if facts.gpus.found
        else "no GPU"
    )
    speed = f", imported in {facts.torch.seconds:.1f} s" if facts.torch.version else ""
    said = f"{facts.host}: Python {facts.python}, {torch}{cuda}{speed}, {gpus}, {facts.cores} cores"
    if facts.script.name and not facts.script.error:
        slowest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts.script.slowest)
        said += (
            f"\n{facts.script.name} imports for {facts.script.seconds:.1f} s; slowest: {slowest}"
        )
    return said


def show_link(link: Link) -> None:
    where = f"over {link.nodes} nodes" if link.nodes > 1 else "on one node"
    says = [f"the link has {link.limit:.2f} GB/s by its driver"] if link.limit else []
    says += [f"one plain TCP connection carries {link.stream:.2f}"] if link.stream else []
    limit = ", ".join(says) or "the link's limit is not known"
    echo(f"all_reduce {where}, {link.ranks} ranks, {link.backend}; {limit}")
    show_speeds(link.speeds, link.bound)
    if link.within:
        echo(f"all_reduce on one node, its own ranks alone, {link.backend}")
        show_speeds(link.within, None)


def show_speeds(speeds: tuple[Speed, ...], bound: float | None) -> None:
    echo(f"{'bytes':>12}{'us':>12}{'bus GB/s':>12}{'of the link' if bound else '':>14}".rstrip())
    for speed in speeds:
        share = f"{100 * speed.bus / bound:.0f} %" if bound else ""
        echo(f"{speed.bytes:>12}{speed.microseconds:>12.1f}{speed.bus:>12.3f}{share:>14}".rstrip())

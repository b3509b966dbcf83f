"""stepladder audit RUN_DIR: lost, repeated and never seen samples per epoch."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(short_help="Prove that every sample was trained exactly once per epoch.")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
def command(run_dir: Path, as_json: bool) -> int:
    """Prove from the ledger of RUN_DIR that every sample was trained exactly once per epoch.

    Exit code 1 if samples were lost or repeated, or if the ledger was altered.
    """
    from stepladder.storage.audit import audit

    found = audit(run_dir)
    if as_json:
        click.echo(json.dumps(found.as_json()))
        return int(not found.ok)
    for epoch in found.epochs:
        click.echo(
            f"epoch {epoch.epoch + 1}: lost {epoch.lost}, repeated {epoch.repeated}, never seen {epoch.never_seen}"
        )
    for problem in found.problems:
        click.echo(f"problem: {problem}")
    click.echo(
        f"{'ok' if found.ok else 'NOT ok'}: lost {found.lost}, repeated {found.repeated}"
        f" ({found.attempts} attempt{'s' * (found.attempts != 1)}, {found.superseded} steps superseded)"
    )
    return int(not found.ok)

"""`parity` on ranks that are forked from a process with torch, in place of new interpreters.

The probe, the scripts and the comparison are those of the command. Without its copy of the folder and
its isolation, a pair takes a few seconds.

    python parity_forks.py SCRIPT '[[1, "--batch 32"], [2, "--batch 16"]]'
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from stepladder.core.address import find_free_port
from stepladder.tools.check.check import Request
from stepladder.tools.check.probe_settings import PROBE_SETTINGS, ProbeSettings
from stepladder.tools.check.rank_processes import LaunchOutcome
from stepladder.tools.check.recording import read_recording
from stepladder.tools.check.script_runs import ScriptRun
from stepladder.tools.parity.formats import as_json_object
from stepladder.tools.parity.parity import NotJudged, Parity, ParityReport, ParityRequest, Size

EPOCHS = 2


class ForkedParity(Parity):
    """A comparison whose ranks are forks of this process."""

    def run_first(self, launch: Any) -> ScriptRun:
        return self.run_size("run", launch, self.request.compared, neutral=False)

    def run_size(
        self, name: str, launch: Any, size: Size, neutral: bool, perturbed: bool = False
    ) -> ScriptRun:
        with tempfile.TemporaryDirectory() as folder:
            source = str(self.request.check.script.parent)
            settings = ProbeSettings(
                folder,
                (source,),
                source,
                source,
                epochs=EPOCHS,
                neutral=neutral,
                perturbed=perturbed,
            )
            codes = run_forked(self.request.check.script, size, Path(folder), settings)
            outcome = LaunchOutcome(Path(folder), codes)
            recording = read_recording(Path(folder))
            if any(codes):
                print(outcome.output(codes.index(1)), file=sys.stderr)
                raise SystemExit(9)
        return ScriptRun(launch, outcome, recording)


def run_forked(script: Path, size: Size, folder: Path, settings: ProbeSettings) -> list[int | None]:
    port = find_free_port()
    pids = []
    for rank in range(size.nproc):
        pid = os.fork()
        if pid == 0:
            os._exit(run_rank(script, size, folder, settings, rank_variables(rank, size, port)))
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def rank_variables(rank: int, size: Size, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size.nproc, "LOCAL_RANK": rank, "MASTER_PORT": port}
    texts = {name: str(number) for name, number in numbers.items()}
    return {**texts, "MASTER_ADDR": "127.0.0.1"}


def run_rank(
    script: Path, size: Size, folder: Path, settings: ProbeSettings, variables: dict[str, str]
) -> int:
    output = os.open(folder / f"rank-{variables['RANK']}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables, **{PROBE_SETTINGS: settings.to_json()})
    torch.set_num_threads(1)
    sys.argv = [str(script), *size.args]
    os.chdir(script.parent)
    from stepladder.tools.check.probe import attach
    from stepladder.tools.parity import value_probe

    attach.attach()
    value_probe.attach()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def main(script: str, sizes: str) -> None:
    reference, compared = (
        Size(nproc, tuple(shlex.split(args))) for nproc, args in json.loads(sizes)
    )
    request = ParityRequest(Request(Path(script)), reference, compared)
    try:
        report = ForkedParity(request).compare(None)  # type: ignore[arg-type]
    except NotJudged as error:
        report = ParityReport(not_judged=error.reason)
    print(json.dumps({**as_json_object(report), "exit_code": report.exit_code}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Starts of a script, as it is or converted, each in a copy of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from stepladder.tools.check.fork_servers import ForkServers
from stepladder.tools.check.isolation.sandbox import Sandbox, SandboxFolders
from stepladder.tools.check.launch_style import LaunchStyle
from stepladder.tools.check.probe_settings import ProbeSettings
from stepladder.tools.check.rank_processes import LaunchOutcome, RankLaunch, run_together
from stepladder.tools.check.recording import Recording, read_recording
from stepladder.tools.check.script_runs import ScriptRun

# A mean and a smaller last batch show as much as all batches; accumulated gradients need more.
NUMBERS_OF_BATCHES = (9, 65, 0)
TRAININGS_OF_A_LINE = 8
Variant = Literal["", "plain", "shuffled", "reweighted"]


@dataclass(frozen=True)
class Start:
    """One start of the script.

    Args:
        files: The new text of files that are converted, by their path in the folder.
        nproc: The number of processes; 0 for one that torchrun has not started.
        frozen: Which run with frozen weights this is; empty where weights move.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    nproc: int = 0
    frozen: Variant = "plain"


@dataclass(frozen=True)
class Started:
    """A start that is over."""

    recording: Recording
    outcome: LaunchOutcome
    run: ScriptRun


class ScriptStarter:
    """Starts a script in copies of its folder.

    Args:
        style: How it is started.
        args: Its arguments.
        scratch: A folder for the copies.
        servers: The processes from which the ranks are forked.
        epochs: The training passes to watch; 0 for two, and more as long as the run is short.
        batches: The batches of each loader, beside a smaller last one.
        timeout_s: The seconds that a start may take.
    """

    def __init__(
        self,
        style: LaunchStyle,
        args: tuple[str, ...],
        scratch: Path,
        servers: ForkServers,
        epochs: int,
        timeout_s: float,
    ) -> None:
        self.style = style
        self.args = args
        self.scratch = scratch
        self.servers = servers
        self.epochs = epochs
        self.batches = 0  # of each loader, a smaller last one included; 0 for all
        self.timeout_s = timeout_s
        self.modules: dict[str, str] = {}  # of other folders: their texts, beside the script
        self.count = 0
        (scratch / "recordings").mkdir()

    def run_few_batches(self) -> Started:
        """Run the script as it is, with as few batches of each loader as it trains with."""
        for self.batches in NUMBERS_OF_BATCHES:
            started = self.run({"facts": Start(frozen="")})["facts"]
            if started.run.has_trained and not started.outcome.failed:
                break
        return started

    def take_more_batches(self) -> bool:
        """Take more batches of each loader from now on; return False where it gives all already."""
        following = NUMBERS_OF_BATCHES[NUMBERS_OF_BATCHES.index(self.batches) + 1 :]
        self.batches = next(iter(following), 0)
        return bool(following)

    def run(self, starts: Mapping[str, Start]) -> dict[str, Started]:
        """Run several starts at once; return how each has ended, by its name."""
        with ExitStack() as stack:
            launches = {}
            for name, start in starts.items():
                self.count += 1
                copy = self.scratch / f"copy-{self.count}"
                folders = self.folders_of(copy, start.files)
                sandbox = stack.enter_context(closing(Sandbox(folders)))
                launches[f"{self.count}-{name}"] = self.launch(start, sandbox)
            outcomes = run_together(launches)
            started = {}
            for name, (key, launch) in zip(starts, launches.items(), strict=True):
                settings = replace(launch.settings, folder=str(outcomes[key].folder))
                recording = read_recording(outcomes[key].folder, settings.original, settings.copy)
                run = ScriptRun(replace(launch, settings=settings), outcomes[key], recording)
                started[name] = Started(recording, outcomes[key], run)
                if not starts[name].frozen:
                    self.servers.preload(recording, launch.sandbox)
        return started

    def folders_of(self, copy: Path, texts: Mapping[str, str]) -> SandboxFolders:
        """Return the folders of a start with new texts, by their paths in the copy."""
        texts = {**self.modules, **texts}
        return SandboxFolders(self.scratch, copy, self.style.root, self.args, texts=texts)

    def launch(self, start: Start, sandbox: Sandbox) -> RankLaunch:
        root = self.style.root
        settings = ProbeSettings(
            str(self.scratch / "recordings"),
            roots=(str(self.scratch), str(root)),
            copy=str(sandbox.folders.copy),
            original=str(root),
            # Loops that are known make few turns; one function may train several models.
            epochs=(self.epochs or 2) * TRAININGS_OF_A_LINE if start.frozen else self.epochs,
            batches=self.batches,
            enough_after_s=-math.inf if start.frozen else self.timeout_s / 4,
            frozen=start.frozen,
            names=True,
        )
        return RankLaunch(
            self.style.python_args,
            self.args,
            max(1, start.nproc),
            settings,
            sandbox,
            self.servers,
            folder=self.style.subfolder,
            gpus_available=False,
            is_alone=not start.nproc,
            nodes=1,
            others=2,
            timeout_s=self.timeout_s,
        )

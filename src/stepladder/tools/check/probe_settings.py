"""The settings that the checker passes to the probes in the environment of the ranks.

Imported before torch, at the start of every interpreter.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Literal

PROBE_SETTINGS = "STEPLADDER_CHECK"
SIMULATED_GPUS = "STEPLADDER_PRETEND_GPUS"
# "1", "0", or "" where the first question decides.
SIMULATED_GPUS_AVAILABLE = "STEPLADDER_PRETEND_GPUS_ASKED"
STACKS_SUFFIX = ".stacks"  # of the file into which a process writes its stacks
SIGNALLED_FILE = "signalled"  # in the folder of recordings, once a signal was sent
RANK_AND_WORLD_SIZE = ("RANK", "WORLD_SIZE")
# What probes write into events, and rules look for.
WEIGHT_HAS_IT = "has it before this pass"
NO_LOGARITHM = "no logarithm"


@dataclass(frozen=True)
class ProbeSettings:
    """The settings of the probes of one start of the script.

    Args:
        folder: The folder of the recordings.
        roots: The folders of the user's own code.
        copy: The copy of the working folder, in which the script runs.
        original: The working folder.
        torchrun: Whether the ranks were started as torchrun starts them.
        port: The port at which ranks meet that the script makes itself, if it sets none.
        epochs: The number of epochs to run; 0 for two, and more as long as the run is short.
        steps: The number of steps of each epoch; 0 for all.
        batches: The number of batches of each loader, a smaller last one included; 0 for all.
        enough_after_s: The seconds until which more than two epochs are run.
        stop_at_snapshot: Whether ranks wait to be ended after their first snapshot.
        may_be_packed: Whether a large binary file of an unknown format may be a snapshot.
        pause_at: The moment at which rank 0 pauses for a signal, as "step:5"; or evaluation, save,
            rename, load. Empty for none.
        frozen: Which run with frozen weights this is; empty where weights move.
        neutral: Whether dropout, batch statistics and random augmentation have no effect.
        perturbed: Whether each activation and gradient is changed by one unit in its last place.
        names: Whether the names of models, loaders, optimizers and schedules are recorded.
        leaves: Whether the gradients of this rank alone are recorded at each step.
        mechanism: What protects the files outside the copy.
        writable: The folders that may be written.
    """

    folder: str
    roots: tuple[str, ...]
    copy: str
    original: str
    torchrun: bool = True
    port: int = 0
    epochs: int = 0
    steps: int = 0
    batches: int = 0
    enough_after_s: float = 20.0
    stop_at_snapshot: bool = False
    may_be_packed: bool = True
    pause_at: str = ""
    frozen: Literal["", "plain", "shuffled", "reweighted"] = ""
    neutral: bool = False
    perturbed: bool = False
    names: bool = False
    leaves: bool = False
    mechanism: str = ""
    writable: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_environment() -> ProbeSettings:
        fields = json.loads(os.environ[PROBE_SETTINGS])
        fields["roots"] = tuple(fields["roots"])
        fields["writable"] = tuple(fields["writable"])
        return ProbeSettings(**fields)

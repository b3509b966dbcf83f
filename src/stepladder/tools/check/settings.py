"""What the checker tells the probes, in their environment. Imported before torch, at every start."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

CHECK, PRETEND = "STEPLADDER_CHECK", "STEPLADDER_PRETEND_GPUS"
RANK_TEXT = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class ProbeSettings:
    """folder: of the recordings.  roots: where the user's own code lies.  copy: where the script
    works.

    original: the folder that the copy is of.  torchrun: the ranks were started as torchrun starts
    them. mechanism: what keeps the files outside the copy as they are.  writable: folders that may
    be written."""

    folder: str
    roots: tuple[str, ...]
    copy: str
    original: str
    torchrun: bool = True
    epochs: int = 0  # 0: two, and more as long as the run is short
    steps: int = 0  # per epoch; 0: all
    seconds: float = 20.0
    stop_at_snapshot: bool = False
    mechanism: str = ""
    writable: tuple[str, ...] = ()

    def variable(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_environment() -> ProbeSettings:
        fields = json.loads(os.environ[CHECK])
        fields["roots"] = tuple(fields["roots"])
        fields["writable"] = tuple(fields["writable"])
        return ProbeSettings(**fields)

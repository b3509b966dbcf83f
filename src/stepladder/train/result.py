"""What `fit()` returns, result.json stores and `train --json` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Best:
    """The best value of the metric that the job's `best` names, and the step it was reached at."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True)
class TrainResult:
    """The end of one attempt of a run.

    epochs: asked for.  steps: optimizer steps done, in all attempts.  train_loss: mean over the last epoch, None
    before its end or where it is not finite.  metrics: of the last evaluation, None where not finite.
    best: None where the job names no metric.  weights_sha256: over parameters and persistent buffers.
    samples_per_second, seconds: of this attempt.  stopped: by a signal or a time limit, to be resumed.
    """

    recipe: str
    world_size: int
    sync: str
    epochs: int
    steps: int
    train_loss: float | None
    metrics: dict[str, float | None]
    best: Best | None
    weights_sha256: str
    samples_per_second: float
    seconds: float
    resumed_from_step: int
    run_dir: str
    stopped: bool

    def as_json(self) -> dict[str, Any]:
        """What `train --json` prints and result.json holds."""
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(stored: dict[str, Any]) -> TrainResult:
        """The result of a result.json, also of one without `best`. KeyError or TypeError where it is none."""
        values = {name: value for name, value in stored.items() if name != "schema"}
        best = values.pop("best", None)
        return TrainResult(**values, best=Best(**best) if best else None)

    def summary(self) -> list[str]:
        """The lines for a person: the last values with the best one, and how it ended."""
        values = {"train_loss": self.train_loss, **self.metrics}
        known = {name: value for name, value in values.items() if value is not None}
        lines = ["  ".join(f"{name} {value:.4f}" for name, value in known.items())] if known else []
        if self.best is not None and lines:
            lines[0] += f"  (best {self.best.metric} {self.best.value:.4f}, after step {self.best.step})"
        end = f"stopped at step {self.steps}, to be resumed" if self.stopped else f"{self.steps} steps done"
        return [*lines, f"{end}; everything is in {self.run_dir}"]

"""The result of an attempt of a run, which `fit()` returns and result.json holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stepladder.core.typed_file import convert

RESULT_SCHEMA = 1  # of result.json, and of what `train --json` prints


@dataclass(frozen=True)
class Best:
    """The best value of the metric that the job's `best` names, and the step that reached it."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True)
class TrainResult:
    """The result of one attempt of a run.

    Args:
        recipe: The name of the job.
        world_size: The number of processes at the end.
        sync: The value of --sync.
        epochs: How many epochs the run has.
        steps: Optimizer steps done, in all attempts.
        train_loss: Mean over the last epoch, None before its end or if it is not finite.
        metrics: Of the last evaluation, None for one that is not finite.
        best: The best evaluation, None if the job names no metric.
        weights_sha256: Hash of the parameters and the persistent buffers.
        samples_per_second: Of this attempt.
        seconds: Of this attempt.
        resumed_from_step: Steps done by earlier attempts.
        run_dir: The run directory.
        stopped: Whether a signal or the time limit has stopped the attempt, so the run can be
            resumed.
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
        """Return what `train --json` prints and result.json holds."""
        return {"schema": RESULT_SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(stored: dict[str, Any]) -> TrainResult:
        """Return the result that a result.json holds; older ones have no `best`.

        Raises:
            ValueError: If it holds no result.
        """
        result: TrainResult = convert({"best": None, **stored}, TrainResult)
        return result

    def summary(self) -> list[str]:
        """Return the lines for a person: the last values, and how the attempt ended."""
        lines = []
        values = {"train_loss": self.train_loss, **self.metrics}
        texts = [f"{name} {value:.4f}" for name, value in values.items() if value is not None]
        if texts:
            line = "  ".join(texts)
            if self.best is not None:
                best = self.best
                line += f"  (best {best.metric} {best.value:.4f}, after step {best.step})"
            lines.append(line)
        end = f"{self.steps} steps done"
        if self.stopped:
            end = f"stopped at step {self.steps}, to be resumed"
        return [*lines, f"{end}; everything is in {self.run_dir}"]

"""The settings of a run that are not the job's own: the flags of `stepladder train`."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import MAX_INTEGER, validate_wait_time
from stepladder.core.plugins import find_plugin

LOGGER_GROUP = "stepladder.loggers"  # of entry points
# May change when a run is resumed: they say who computes and where, not what is computed.
CHANGEABLE_ON_RESUME = frozenset(
    (
        "checkpoint_blocks",
        "device",
        "fail_at",
        "fresh",
        "guard_every",
        "keep",
        "lock_wait",
        "log_to",
        "most_ranks",
        "progress",
        "replay_every",
        "run_dir",
        "shard",
        "shard_copies",
        "snapshot_every",
        "steps",
        "threads",
        "timeout",
    )
)


class LayoutEntry(NamedTuple):
    """A layout: its class in a module of train/layout, and whether the others survive a loss."""

    path: str
    survives_loss: bool


LAYOUTS = {  # by the values of --shard and --shard-copies
    ("none", 1): LayoutEntry("flat.Flat", survives_loss=True),
    ("optimizer", 1): LayoutEntry("zero1.Zero1", survives_loss=False),
    ("optimizer", 2): LayoutEntry("replicated.Replicated", survives_loss=True),
    ("full", 1): LayoutEntry("fsdp_exact.FullyShardedExactLayout", survives_loss=False),
}
MAX_THREADS = 4096  # with more, libgomp may find no memory for them, and ends the process
# The smallest and the largest value of each number.
SETTING_RANGES = {
    "epochs": (1, MAX_INTEGER),
    "steps": (1, MAX_INTEGER),
    "global_batch": (1, MAX_INTEGER),
    "microbatch": (1, MAX_INTEGER),
    "batch_per_rank": (1, MAX_INTEGER),
    "snapshot_every": (1, MAX_INTEGER),
    "keep": (1, MAX_INTEGER),
    "guard_every": (1, MAX_INTEGER),
    "replay_every": (1, MAX_INTEGER),
    "warmup_steps": (0, MAX_INTEGER),
    "threads": (1, MAX_THREADS),
    "seed": (0, 2**32 - 1),  # NumPy's limit
    "shard_copies": (1, 2),
}


def validate_run_dir(run_dir: Path) -> None:
    """Raise InputError for a run directory whose files would lie among the system's."""
    # RuntimeError: links in a circle.
    with as_input_error(f"--run-dir {run_dir}", "--run-dir runs/NAME", (OSError, RuntimeError)):
        absolute = run_dir.resolve()
    if absolute == Path(absolute.anchor):
        raise InputError(
            f"--run-dir {run_dir} is the root of the file system", "--run-dir runs/NAME"
        )


@dataclass(frozen=True)
class Settings:
    """How a job is trained. A job's Config that has epochs, global_batch or seed decides these.

    Attributes:
        run_dir: The run directory.
        epochs: Passes over the training data, 1 by default.
        steps: The number of optimizer steps after which to stop, if earlier.
        global_batch: Samples per optimizer step, whatever the number of processes; 64 by default.
        microbatch: Samples per pass, with randomness keyed to each pass; None for a rank's share in
            one pass.
        batch_per_rank: The samples of a step on each process, in place of the global batch, which
            then grows with the number of processes.
        lr_scale: How the learning rate grows with the number of processes, with batch_per_rank.
        warmup_steps: Steps over which the learning rate grows linearly.
        seed: The number from which everything random follows, 0 by default.
        sync: How gradients are added over ranks.
        device: Where to compute.
        precision: The precision of forward and backward.
        threads: Intra-op threads per process; None for an equal part of the cores.
        snapshot_every: Steps between snapshots; None for the end of each epoch and every 60
            seconds.
        keep: How many of the newest snapshots stay.
        progress: Whether to show the progress on the terminal.
        lock_wait: Seconds to wait for another run in the same directory to end.
        fresh: Move an earlier run directory away first.
        guard_every: Steps between comparisons of the ranks' weights; None for never.
        timeout: Seconds that ranks wait for a rank before it counts as lost.
        fail_at: (rank, step) pairs; that rank kills itself there once, to show a recovery.
        most_ranks: How many processes the group may grow to, if more than there are.
        log_to: Loggers that get the curves besides TensorBoard: names of entry points of the group
            `stepladder.loggers`, such as "wandb" and "mlflow".
        init_from: A run directory, or a snapshot in one, with whose weights the run begins.
        replay_every: Steps between those in which each rank recomputes a microbatch of another
            rank; None for never.
        shard: "optimizer" spreads the optimizer's state over the processes, which changes no bit of
            what is computed; "full" spreads weights and gradients too.
        compile: Whether torch.compile compiles the job's loss, for all passes but an epoch's last,
            shorter ones.
        capture: Whether these passes are recorded as CUDA graphs, forward and backward, and
            replayed.
        checkpoint_blocks: Whether activations within a block of the model are recomputed in
            backward instead of kept.
        shard_copies: With shard="optimizer", how many processes hold and step each slice: with 2
            one of them may be lost.
    """

    run_dir: Path
    epochs: int | None = None
    steps: int | None = None
    global_batch: int | None = None
    microbatch: int | None = None
    batch_per_rank: int | None = None
    lr_scale: Literal["none", "sqrt", "linear"] = "none"
    warmup_steps: int = 0
    seed: int | None = None
    sync: Literal["manual", "ddp", "exact"] = "ddp"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    threads: int | None = None
    snapshot_every: int | None = None
    keep: int = 3
    progress: bool = True
    lock_wait: float = 30.0
    fresh: bool = False
    guard_every: int | None = None
    timeout: float = 600.0
    fail_at: tuple[tuple[int, int], ...] = ()
    most_ranks: int = 0
    log_to: tuple[str, ...] = ()
    init_from: str | None = None
    replay_every: int | None = None
    shard: Literal["none", "optimizer", "full"] = "none"
    compile: bool = False
    capture: bool = False
    checkpoint_blocks: bool = False
    shard_copies: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_dir", Path(self.run_dir))  # a string is accepted from Python
        validate_run_dir(self.run_dir)
        self._validate_limits()
        validate_wait_time("--timeout", self.timeout)
        validate_wait_time("--lock-wait", self.lock_wait, minimum=0)
        for name in self.log_to:
            find_plugin(LOGGER_GROUP, name, "--log-to")
        if self.replay_every is not None and self.sync != "exact":
            raise InputError(
                f"--replay-every {self.replay_every} with --sync {self.sync}: a microbatch has the"
                " same bits on every process with --sync exact only",
                "--sync exact, or leave --replay-every out",
            )
        self._validate_shard()
        self._validate_checkpoint_blocks()
        if self.lr_scale != "none" and self.batch_per_rank is None:
            raise InputError(
                f"--lr-scale {self.lr_scale} without --batch-per-rank: the global batch does not"
                " grow with the number of processes, so the learning rate need not",
                "--batch-per-rank B, or leave --lr-scale out",
            )

    @property
    def is_round_robin(self) -> bool:
        """Whether ranks take turns in a step's microbatches.

        Then no rank holds the complete gradients of several neighbouring microbatches.
        """
        return self.sync == "exact" and self.shard == "full"

    @property
    def survives_loss(self) -> bool:
        """Whether the remaining ranks have the whole state between them, if one is lost."""
        return LAYOUTS[self.shard, self.shard_copies].survives_loss

    def validate_shard_copies(self, max_processes: int) -> None:
        """Raise InputError for more copies of a slice than there may be processes."""
        if self.shard_copies > max_processes:
            raise InputError(
                f"--shard-copies {self.shard_copies} on {max_processes} process: each copy lies on"
                " a process of its own",
                "--nproc 2 or more, or leave --shard-copies out",
            )

    def _validate_limits(self) -> None:
        for name, (minimum, maximum) in SETTING_RANGES.items():
            value = getattr(self, name)
            flag = "--" + name.replace("_", "-")
            if value is not None and value < minimum:
                raise InputError(f"{flag} {value} is too small", f"{flag} {minimum} or more")
            if value is not None and value > maximum:
                raise InputError(f"{flag} {value} is too large", f"{flag} {maximum} or less")

    def _validate_checkpoint_blocks(self) -> None:
        if not self.checkpoint_blocks:
            return
        if self.compile:
            raise InputError(
                "--compile with --checkpoint-blocks: the compiler decides by itself what is"
                " computed again",
                "one of the two",
            )
        if self.capture:
            raise InputError(
                "--capture with --checkpoint-blocks, which draws a block's random numbers again",
                "one of the two",
            )

    def _validate_shard(self) -> None:
        if (self.shard, self.shard_copies) not in LAYOUTS:
            raise InputError(
                f"--shard-copies {self.shard_copies} with --shard {self.shard}, which makes no"
                " slices to copy",
                "--shard optimizer, or leave --shard-copies out",
            )
        if self.shard == "full":
            self._validate_full_shard()

    def _validate_full_shard(self) -> None:
        if self.sync == "manual":
            raise InputError(
                "--shard full with --sync manual, whose gradients are whole", "--sync ddp, or exact"
            )
        if self.replay_every is not None:
            raise InputError(
                "--replay-every with --shard full: no process has a whole gradient to compare",
                "--shard optimizer, or leave --replay-every out",
            )
        if self.precision == "fp16":
            raise InputError(
                "--shard full with --precision fp16, whose scale needs whole gradients",
                "--precision bf16",
            )
        if self.compile:
            raise InputError(
                "--compile with --shard full, whose weights are slices", "leave --compile out"
            )
        if self.capture:
            raise InputError(
                "--capture with --shard full, whose weights come and go",
                "leave --capture out",
            )
        if self.guard_every is not None:
            raise InputError(
                "--guard-every with --shard full: no two processes have the same weights",
                "leave --guard-every out",
            )


@dataclass(frozen=True)
class TrainRequest:
    """The arguments of `stepladder train`, for every rank.

    Attributes:
        job: The job file.
        config: The fields of the job's Config that were set.
        settings: The run's settings.
        as_json: Whether the result is printed as JSON.
    """

    job: Path
    config: dict[str, Any]
    settings: Settings
    as_json: bool = False

    @property
    def fingerprint(self) -> str:
        """A short hash of what is to be computed, as far as it is known without the job.

        Nodes with different fingerprints were started for different runs. Where files lie is left
        out, since it may differ between nodes.
        """
        numbers = {
            name: value
            for name, value in self.config.items()
            if isinstance(value, (bool, int, float))
        }
        settings = {
            name: value
            for name, value in asdict(self.settings).items()
            if name not in CHANGEABLE_ON_RESUME
        }
        definition = repr(
            [self.job.stem, sorted(numbers.items()), sorted(settings.items()), self.settings.steps]
        )
        return hashlib.sha256(definition.encode()).hexdigest()[:16]

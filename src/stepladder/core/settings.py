"""The settings of a run that are not the job's own: the flags of `stepladder train`."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from stepladder.core.errors import InputError, naming
from stepladder.core.numbers import MOST, refuse_wait

LOG_TO = ("wandb", "mlflow")
# May change when a run is resumed: they say who computes and where, not what is computed.
FREE_ON_RESUME = frozenset(
    {
        "run_dir",
        "device",
        "snapshot_every",
        "keep",
        "progress",
        "steps",
        "threads",
        "lock_wait",
        "fresh",
    }
    | {
        "guard_every",
        "replay_every",
        "timeout",
        "fail_at",
        "most_ranks",
        "log_to",
        "shard",
        "shard_copies",
    }
    | {"checkpoint_blocks"}
)

MOST_THREADS = 4096  # libgomp ends the process where it finds no memory for them


def refuse_root(run_dir: Path) -> None:
    """Raises InputError for a run directory whose files would lie among the system's."""
    with naming(
        f"--run-dir {run_dir}", "--run-dir runs/NAME", (OSError, RuntimeError)
    ):  # a loop of links
        whole = run_dir.resolve()
    if whole == Path(whole.anchor):
        raise InputError(
            f"--run-dir {run_dir} is the root of the file system", "--run-dir runs/NAME"
        )


@dataclass(frozen=True)
class Settings:
    """How a job is trained.

    epochs: passes over the training data, 1 by default.  steps: stop after so many optimizer steps,
    if earlier. global_batch: samples per optimizer step, whatever the number of processes; 64 by
    default. seed: everything random follows from it; 0 by default. A job's Config that has one of
    these three decides it. microbatch: samples per pass, with randomness keyed to each pass; None:
    a share in one pass. batch_per_rank: the classical way, fixes this instead of the global batch;
    lr_scale then scales the
        learning rate with the number of processes.  warmup_steps: the rate grows linearly over
        them. snapshot_every: steps between snapshots; None: each epoch's end and every 60 seconds.
        keep: newest snapshots that stay.  threads: intra-op threads per process; None: cores shared
        out. lock_wait: seconds to wait for another run in the same directory to end. fresh: move an
        earlier run directory aside first. guard_every: steps between comparisons of the ranks'
        weights; None: never. timeout: seconds that ranks wait for each other before one counts as
        lost. fail_at: (rank, step) pairs; that rank kills itself there once, to see a recovery.
        most_ranks: how many processes the group may grow to, where that is more than there are.
        log_to: of "wandb" and "mlflow", who gets the curves besides TensorBoard. init_from: a run
        directory, or a snapshot in one, whose weights the run begins with. replay_every: steps
        between those in which each rank computes a microbatch of another one again; None: never.
        checkpoint_blocks: activations within a block of the model are computed again in backward,
        and not kept. compile: the job's loss is compiled by torch.compile, for all passes but an
        epoch's last, shorter ones. capture: these passes are recorded as CUDA graphs, forward and
        backward, and replayed. shard: "optimizer" spreads the optimizer's state over the processes;
        it changes no bit of what is computed.
        "full" spreads weights and gradients too. shard_copies: with shard="optimizer", how many
        processes hold and step each slice: of 2 one may be lost."""

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
        object.__setattr__(self, "run_dir", Path(self.run_dir))  # from Python a string will do
        refuse_root(self.run_dir)
        limits = dict.fromkeys(
            ("epochs", "steps", "global_batch", "microbatch", "batch_per_rank"), (1, MOST)
        )
        limits |= dict.fromkeys(
            ("snapshot_every", "keep", "guard_every", "replay_every"), (1, MOST)
        )
        limits |= {
            "warmup_steps": (0, MOST),
            "threads": (1, MOST_THREADS),
            "seed": (0, 2**32 - 1),
        }  # NumPy's
        limits["shard_copies"] = (1, 2)
        for name, (least, most) in limits.items():
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            if value is not None and value < least:
                raise InputError(f"{flag} {value} is too small", f"{flag} {least} or more")
            if value is not None and value > most:
                raise InputError(f"{flag} {value} is too large", f"{flag} {most} or less")
        refuse_wait("--timeout", self.timeout)
        refuse_wait("--lock-wait", self.lock_wait, least=0)
        for name in self.log_to:
            if name not in LOG_TO:
                raise InputError(
                    f"--log-to {name!r} is unknown", f"--log-to, one of {', '.join(LOG_TO)}"
                )
            spec = find_spec(name)
            if (
                spec is None or spec.origin is None
            ):  # without one: just a folder of that name, as W&B leaves them
                raise InputError(
                    f"--log-to {name}: it is not installed", f"pip install 'stepladder[{name}]'"
                )
        if self.replay_every is not None and self.sync != "exact":
            raise InputError(
                f"--replay-every {self.replay_every} with --sync {self.sync}: a microbatch has the same bits on"
                " every process with --sync exact only",
                "--sync exact, or leave --replay-every out",
            )
        self._refuse_with_shard()
        self._refuse_with_checkpoint_blocks()
        if self.lr_scale != "none" and self.batch_per_rank is None:
            raise InputError(
                f"--lr-scale {self.lr_scale} without --batch-per-rank: the global batch does not grow with the"
                " number of processes, so the learning rate need not",
                "--batch-per-rank B, or leave --lr-scale out",
            )

    @property
    def deals_in_rounds(self) -> bool:
        """Whether ranks take turns in a step's microbatches, so that none holds whole gradients of
        its own.
        """
        return self.sync == "exact" and self.shard == "full"

    def refuse_processes(self, most: int) -> None:
        """Raises InputError for more copies than processes. most: how many there may be."""
        if self.shard_copies > most:
            raise InputError(
                f"--shard-copies {self.shard_copies} on {most} process: each copy lies on a process of its own",
                "--nproc 2 or more, or leave --shard-copies out",
            )

    def _refuse_with_checkpoint_blocks(self) -> None:
        if not self.checkpoint_blocks:
            return
        if self.compile:
            raise InputError(
                "--compile with --checkpoint-blocks: the compiler decides by itself what is computed again",
                "one of the two",
            )
        if self.capture:
            raise InputError(
                "--capture with --checkpoint-blocks, which draws a block's random numbers again",
                "one of the two",
            )

    def _refuse_with_shard(self) -> None:
        if self.shard_copies > 1 and self.shard != "optimizer":
            raise InputError(
                f"--shard-copies {self.shard_copies} with --shard {self.shard}, which deals no slices to copy",
                "--shard optimizer, or leave --shard-copies out",
            )
        if self.shard == "full":
            self._refuse_with_full()

    def _refuse_with_full(self) -> None:
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
                "--capture with --shard full, whose weights come and go", "leave --capture out"
            )
        if self.guard_every is not None:
            raise InputError(
                "--guard-every with --shard full: no two processes have the same weights",
                "leave --guard-every out",
            )


@dataclass(frozen=True)
class TrainRequest:
    """What `train` was asked, for every rank. config: the fields of the job's Config that were set."""

    job: Path
    config: dict[str, Any]
    settings: Settings
    as_json: bool = False

    @property
    def asked(self) -> str:
        """Short for what is to be computed, as far as it is known without the job. Where files lie
        is left out.
        """
        numbers = {
            name: value
            for name, value in self.config.items()
            if isinstance(value, (bool, int, float))
        }
        settings = {
            name: value
            for name, value in asdict(self.settings).items()
            if name not in FREE_ON_RESUME
        }
        about = repr(
            [self.job.stem, sorted(numbers.items()), sorted(settings.items()), self.settings.steps]
        )
        return hashlib.sha256(about.encode()).hexdigest()[:16]

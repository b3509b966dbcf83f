"""The settings of a run that are not the job's own: the flags of `stepladder train`."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from stepladder.core.arguments import validate_types
from stepladder.core.errors import InputError
from stepladder.core.flag import FAULTS, MEMORY, OUTPUT, TRAINING, Flag
from stepladder.core.numbers import MIN_WAIT_S
from stepladder.core.paths import validate_run_dir
from stepladder.core.plugins import find_plugin
from stepladder.core.setting_conflicts import validate_no_conflict

LOGGER_GROUP = "stepladder.loggers"  # of entry points


class _LayoutEntry(NamedTuple):
    """A layout: its class in a module of train/layout, and whether the others survive a loss."""

    path: str
    survives_loss: bool


LAYOUTS = {  # by the values of --shard and --shard-copies
    ("none", 1): _LayoutEntry("flat.Flat", survives_loss=True),
    ("optimizer", 1): _LayoutEntry("zero1.Zero1", survives_loss=False),
    ("optimizer", 2): _LayoutEntry("replicated.Replicated", survives_loss=True),
    ("full", 1): _LayoutEntry("fsdp_exact.FullyShardedExactLayout", survives_loss=False),
}
MAX_THREADS = 4096  # with more, libgomp may find no memory for them, and ends the process
MAX_SEED = 2**32 - 1  # NumPy's limit


@dataclass(frozen=True)
class Settings:
    """How a job is trained. A job's Config that has epochs, global_batch or seed decides these.

    Each field is a flag of `stepladder train`, and of other commands that run a job. Its annotation
    says all about it: text and section of --help, limits, and whether it may change when a run is
    resumed, or differ between ranks.
    """

    run_dir: Annotated[
        Path,
        Flag(
            "Folder for everything that the run writes.",
            OUTPUT,
            default="runs/RECIPE",
            free_on_resume=True,
            may_differ=True,
        ),
    ]
    epochs: Annotated[
        int | None, Flag("The number of passes over the training data.", TRAINING, minimum=1)
    ] = None
    steps: Annotated[
        int | None,
        Flag(
            "Stop after this many optimizer steps, if --epochs would be longer.",
            TRAINING,
            minimum=1,
            free_on_resume=True,
        ),
    ] = None
    global_batch: Annotated[
        int | None,
        Flag("Samples per optimizer step, whatever the number of processes.", TRAINING, minimum=1),
    ] = None
    microbatch: Annotated[
        int | None,
        Flag(
            "Samples per forward pass. With it, results agree on any number of processes.",
            TRAINING,
            minimum=1,
        ),
    ] = None
    batch_per_rank: Annotated[
        int | None,
        Flag(
            "Samples per process, instead of --global-batch; the global batch then grows with the"
            " processes.",
            TRAINING,
            minimum=1,
        ),
    ] = None
    lr_scale: Annotated[
        Literal["none", "sqrt", "linear"],
        Flag(
            "With --batch-per-rank: multiply the learning rate by the processes, or by their root.",
            TRAINING,
        ),
    ] = "none"
    warmup_steps: Annotated[
        int,
        Flag(
            "Optimizer steps over which the learning rate grows linearly from 0.",
            TRAINING,
            minimum=0,
        ),
    ] = 0
    seed: Annotated[
        int | None, Flag("Seed of everything random.", TRAINING, minimum=0, maximum=MAX_SEED)
    ] = None
    sync: Annotated[
        Literal["manual", "ddp", "exact"],
        Flag(
            "How gradients are averaged: one all-reduce, DDP, or a fixed order of sums.", TRAINING
        ),
    ] = "ddp"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Flag("Where tensors live.", MEMORY, free_on_resume=True, may_differ=True),
    ] = "auto"
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], Flag("Type of the numbers in the forward pass.", MEMORY)
    ] = "fp32"
    threads: Annotated[
        int | None,
        Flag(
            "Intra-op threads of torch per process.",
            MEMORY,
            default="the cores divided by the processes; 1 with --sync exact",
            minimum=1,
            maximum=MAX_THREADS,
            free_on_resume=True,
            may_differ=True,
        ),
    ] = None
    snapshot_every: Annotated[
        int | None,
        Flag(
            "Steps between snapshots.",
            OUTPUT,
            metavar="STEPS",
            default="each epoch's end and every 60 s",
            minimum=1,
            free_on_resume=True,
        ),
    ] = None
    keep: Annotated[
        int,
        Flag(
            "Number of newest snapshots to keep, besides the best one.",
            OUTPUT,
            minimum=1,
            free_on_resume=True,
            may_differ=True,
        ),
    ] = 3
    progress: Annotated[
        bool,
        Flag(
            "Show the progress on the terminal.",
            python_only=True,
            free_on_resume=True,
            may_differ=True,
        ),
    ] = True
    lock_wait: Annotated[
        float,
        Flag(
            "Seconds to wait for another run in the same directory to end.",
            OUTPUT,
            minimum=0,
            is_wait=True,
            hidden=True,
            free_on_resume=True,
            may_differ=True,
        ),
    ] = 30
    fresh: Annotated[
        bool,
        Flag(
            "Move an earlier run in that directory aside first.",
            OUTPUT,
            free_on_resume=True,
            may_differ=True,
        ),
    ] = False
    guard_every: Annotated[
        int | None,
        Flag(
            "Check every STEPS steps that all processes have the same weights.",
            FAULTS,
            metavar="STEPS",
            default="never",
            minimum=1,
            free_on_resume=True,
        ),
    ] = None
    timeout: Annotated[
        float,
        Flag(
            "Seconds that processes wait for each other before they give up.",
            FAULTS,
            metavar="SECONDS",
            minimum=MIN_WAIT_S,
            is_wait=True,
            free_on_resume=True,
            may_differ=True,
        ),
    ] = 600
    fail_at: Annotated[
        tuple[tuple[int, int], ...],
        Flag(
            "Kill this rank at this step, once, to watch a recovery.",
            FAULTS,
            metavar="RANK:STEP",
            free_on_resume=True,
            may_differ=True,
        ),
    ] = ()
    most_ranks: Annotated[
        int,
        Flag(
            "The number of processes that the group may grow to, if more than there are.",
            python_only=True,
            free_on_resume=True,
            may_differ=True,
        ),
    ] = 0
    log_to: Annotated[
        tuple[str, ...],
        Flag(
            "Also log the curves to wandb, mlflow, or a logger of another package, besides"
            " TensorBoard.",
            OUTPUT,
            metavar="NAME",
            free_on_resume=True,
            may_differ=True,
        ),
    ] = ()
    init_from: Annotated[
        str | None,
        Flag(
            "Start from the weights of that run's newest snapshot.",
            TRAINING,
            metavar="RUN_DIR",
            is_path=True,
            may_differ=True,
        ),
    ] = None
    replay_every: Annotated[
        int | None,
        Flag(
            "Recompute a microbatch of each process on another one every STEPS steps, and compare"
            " the bits.",
            FAULTS,
            metavar="STEPS",
            default="never",
            minimum=1,
            free_on_resume=True,
        ),
    ] = None
    shard: Annotated[
        Literal["none", "optimizer", "full"],
        Flag(
            "Spread the optimizer's state over the processes (ZeRO stage 1): less memory, same"
            " bits. full: also weights and gradients (torch's fully_shard).",
            MEMORY,
            free_on_resume=True,
        ),
    ] = "none"
    compile: Annotated[
        bool,
        Flag(
            "Compile the model and its loss with torch.compile, for passes with a full microbatch.",
            MEMORY,
        ),
    ] = False
    capture: Annotated[
        bool,
        Flag(
            "On a GPU: record the passes with a full microbatch as CUDA graphs, and replay them.",
            MEMORY,
        ),
    ] = False
    checkpoint_blocks: Annotated[
        bool,
        Flag(
            "Recompute the activations in a block of the model in backward: less memory, same"
            " bits.",
            MEMORY,
            free_on_resume=True,
            may_differ=True,
        ),
    ] = False
    shard_copies: Annotated[
        int,
        Flag(
            "With --shard optimizer: processes that hold each slice; with 2, the others continue"
            " in place when one is lost.",
            MEMORY,
            minimum=1,
            maximum=2,
            free_on_resume=True,
        ),
    ] = 1

    def __post_init__(self) -> None:
        if isinstance(self.run_dir, str):  # which is accepted from Python
            object.__setattr__(self, "run_dir", Path(self.run_dir))
        validate_types(Settings, vars(self))
        validate_run_dir(self.run_dir)
        for name, setting in SETTING_FLAGS.items():
            setting.validate(name, getattr(self, name))
        for name in self.log_to:
            find_plugin(LOGGER_GROUP, name, "--log-to")
        validate_no_conflict(self)

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

    @property
    def has_layout(self) -> bool:
        """Whether there is a layout for --shard with --shard-copies."""
        return (self.shard, self.shard_copies) in LAYOUTS

    def validate_shard_copies(self, max_processes: int) -> None:
        """Raise InputError for more copies of a slice than there may be processes."""
        if self.shard_copies > max_processes:
            raise InputError(
                f"--shard-copies {self.shard_copies} on {max_processes} process: each copy lies on"
                " a process of its own",
                "--nproc 2 or more, or leave --shard-copies out",
            )


SETTING_FLAGS: dict[str, Flag] = {
    name: annotation.__metadata__[0]
    for name, annotation in get_type_hints(Settings, include_extras=True).items()
}


@dataclass(frozen=True)
class TrainRequest:
    """The arguments of `stepladder train`, for every rank.

    Args:
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
            if not SETTING_FLAGS[name].free_on_resume
        }
        definition = repr(
            [self.job.stem, sorted(numbers.items()), sorted(settings.items()), self.settings.steps]
        )
        return hashlib.sha256(definition.encode()).hexdigest()[:16]

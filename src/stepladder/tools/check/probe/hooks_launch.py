"""Hooks that record what a script knows of other ranks, and that start it as its launcher does.

Attached at the start of each interpreter, before torch: a script may read its rank first.
"""

from __future__ import annotations

import _collections_abc
import os
import sys
from itertools import islice
from types import FrameType

from stepladder.tools.check.events import (
    FabricStart,
    LibraryRankRead,
    OtherGroup,
    RankOption,
    RankRead,
)
from stepladder.tools.check.probe import patching
from stepladder.tools.check.probe.patching import WrappedCall, recorder, wrap, wrap_after_import
from stepladder.tools.check.probe.probe_log import CHECK_FOLDER, current_log
from stepladder_exchange.after_import import call_after_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VARIABLES_OF_RANKS = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
    )
)
# Those of frozen modules have names of their own.
FILES_OF_ENVIRONMENT = (
    patching.__file__,
    os.getenv.__code__.co_filename,
    _collections_abc.Mapping.get.__code__.co_filename,
    __file__,
)
LOCAL_RANK_OPTIONS = ("--local_rank", "--local-rank")
# Of a script that is started by hand, once for each rank.
RANK_OPTION = "--rank"
VARIABLES_OF_OPTIONS = {
    RANK_OPTION: "RANK",
    "--world-size": "WORLD_SIZE",
    "--world_size": "WORLD_SIZE",
}
CHOSEN_IN_FABRIC = ("accelerator", "strategy", "devices", "num_nodes")
# What ranks use that meet, or exchange gradients, without torch: a module, and a function of it.
OTHER_LIBRARIES = {
    "horovod.torch": "init",
    "deepspeed.runtime.engine": "DeepSpeedEngine.__init__",
    "torchft.manager": "Manager.__init__",
}
FABRICS = ("lightning.fabric.fabric", "lightning_fabric.fabric")


class EnvironmentReads:
    """The variables of ranks that this process has read."""

    def __init__(self) -> None:
        self.recorded: set[tuple[type[RankRead], str]] = set()
        # Where all variables are being copied, which asks for none of them.
        self.copying: tuple[Any, ...] | None = None

    def begin_copy(self, frame: FrameType) -> None:
        self.copying = locate(frame)

    def record(self, name: str, frame: FrameType) -> None:
        """Record the first read of a variable by the user's code, and the first by a library."""
        if locate(frame) == self.copying:
            return
        kind = kind_of_read(name, frame)
        if kind is not None and (kind, name) not in self.recorded:
            self.recorded.add((kind, name))
            current_log().write_with_line(kind(name=name))

    def has_read(self, name: str) -> bool:
        return (RankRead, name) in self.recorded


environment_reads = EnvironmentReads()
local_rank_options: set[str] = set()  # which the script has added to a parser


def attach() -> None:
    watch_environment(type(os.environ))
    # A script gets its local rank as torch.distributed.launch passes it, which came before
    # LOCAL_RANK, if its parser has an option for it, and it has not read the variable.
    wrap_after_import("argparse", "_ActionsContainer.add_argument", remember_option)
    wrap_after_import("argparse", "ArgumentParser.parse_known_args", parse_with_local_rank)
    call_after_import("mpi4py.MPI", record_other_library)  # its import joins the other ranks
    for name, function in OTHER_LIBRARIES.items():
        wrap_after_import(name, function, recorder(lambda _: OtherGroup(averages=True)))
    for name in FABRICS:
        wrap_after_import(name, "Fabric.__init__", init_with_variables)


def watch_environment(environment: Any) -> None:
    wrap(environment, "__getitem__", read_variable)
    wrap(environment, "__iter__", read_names)


def read_variable(call: WrappedCall) -> Any:
    name = call.args[1]
    if name in VARIABLES_OF_RANKS:
        environment_reads.record(name, reading_frame())
    return call.run()


def read_names(call: WrappedCall) -> Any:
    environment_reads.begin_copy(reading_frame())
    return call.run()


def reading_frame() -> FrameType:
    """Return the innermost frame outside of the classes of os.environ."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in FILES_OF_ENVIRONMENT:
        frame = frame.f_back
    return frame


def locate(frame: FrameType) -> tuple[Any, ...]:
    """Return the expression that a frame evaluates.

    Not its instruction: in Python 3.12 that of a loop over a generator moves after the first turn.
    """
    positions = frame.f_code.co_positions()
    return frame.f_code, next(islice(positions, frame.f_lasti // 2, None))


def kind_of_read(name: str, frame: FrameType) -> type[RankRead] | None:
    """Return who reads a variable: the user's code or a library; None of what asks nothing.

    The probe, torch as it makes a group, and the import of a library ask nothing for the script.
    """
    file = frame.f_code.co_filename
    if current_log().is_user_file(file):
        return RankRead
    makes_group = f"{os.sep}torch{os.sep}" in file and not name.startswith("LOCAL_")
    if file.startswith(CHECK_FOLDER) or makes_group or is_import(frame):
        return None
    return LibraryRankRead


def is_import(frame: FrameType | None) -> bool:
    """Return whether a frame runs within the import of a library."""
    while frame is not None and not current_log().is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def record_other_library(_: Any) -> None:
    current_log().write_with_line(OtherGroup())


def remember_option(call: WrappedCall) -> Any:
    if current_log().is_called_by_user():
        local_rank_options.update(set(LOCAL_RANK_OPTIONS).intersection(call.args[1:]))
    return call.run()


def parse_with_local_rank(call: WrappedCall) -> Any:
    args = call.argument(1, "args")
    if args is None or list(args) == sys.argv[1:]:
        options = set(call.args[0]._option_string_actions)
        pass_local_rank(options)
        pass_own_rank(options)
        call = call.with_argument(1, "args", sys.argv[1:])
    return call.run()


def pass_local_rank(options_of_parser: set[str]) -> None:
    options = sorted(local_rank_options & options_of_parser)
    is_passed = any(arg.startswith(LOCAL_RANK_OPTIONS) for arg in sys.argv[1:])
    is_rank = current_log().settings.torchrun
    if not options or not is_rank or is_passed or environment_reads.has_read("LOCAL_RANK"):
        return
    current_log().write_with_line(RankOption(option=options[0], variable="LOCAL_RANK"))
    sys.argv.insert(1, f"{options[0]}={os.environ['LOCAL_RANK']}")


def pass_own_rank(options_of_parser: set[str]) -> None:
    """Let a command line that names one rank, and the number of ranks, name those of this rank.

    A `--rank` alone may be that of matrices, as of LoRA.
    """
    is_rank = current_log().settings.torchrun and not environment_reads.has_read("RANK")
    given = options_of_parser.intersection(sys.argv[1:-1])
    variables = {VARIABLES_OF_OPTIONS[option] for option in given & VARIABLES_OF_OPTIONS.keys()}
    if not is_rank or variables != {"RANK", "WORLD_SIZE"}:
        return
    current_log().write_with_line(RankOption(option=RANK_OPTION, variable="RANK"))
    for index, arg in enumerate(sys.argv[1:-1], 1):
        if variable := VARIABLES_OF_OPTIONS.get(arg):
            sys.argv[index + 1] = os.environ[variable]


def init_with_variables(call: WrappedCall) -> None:
    """Set the variables of `fabric run` for a Fabric that leaves the number of devices to it."""
    is_rank = current_log().settings.torchrun
    if is_rank and len(call.args) == 1 and call.kwargs.keys().isdisjoint(CHOSEN_IN_FABRIC):
        current_log().write_with_line(FabricStart())
        os.environ.update(fabric_variables())
    call.run()


def fabric_variables() -> dict[str, str]:
    """Return the variables that `fabric run` sets."""
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return {
        "LT_CLI_USED": "1",
        "LT_ACCELERATOR": "cpu",
        "LT_STRATEGY": "ddp",
        "LT_DEVICES": str(ranks_per_node),
        "LT_NUM_NODES": str(int(os.environ["WORLD_SIZE"]) // ranks_per_node),
    }

"""`stepladder run`: ranks that are a script.

On one node the ranks are children of this process, on several those of an agent on each node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from stepladder.core.address import can_bind, validate_interface
from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.core.numbers import MAX_PORT, read_env_number
from stepladder.core.process_count import count_cores
from stepladder.core.world import World
from stepladder.launcher.local.group_spec import GroupSpec, read_stop_timeout
from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.outcome import Failure
from stepladder.launcher.local.output import Output
from stepladder.launcher.local.supervisor import run_local
from stepladder.launcher.nodes.local_node import open_local_node
from stepladder.launcher.options import Options, RendezvousSpec
from stepladder.launcher.script import Script, exec_program
from stepladder.launcher.topology import Topology
from stepladder.rank.preemption import TRAINING_STOP_SIGNALS, get_seconds_left

# torch._dynamo: a script's first optimizer imports it, which takes as long as torch itself.
SCRIPT_PRELOAD_MODULES = ("torch", "torch._dynamo", "stepladder_exchange.process_group")
NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def make_script_group(
    script: Script,
    options: Options,
    nproc: int,
    alone: bool,
    variables: dict[str, str] | None = None,
    report_failure: Callable[[Failure], None] | None = None,
) -> LocalGroup:
    """Make a group of ranks that run a script.

    Args:
        script: The program that the ranks run.
        options: How the ranks are started, shown and ended.
        nproc: The number of ranks on this node.
        alone: Whether there is one process in all, so its output needs no prefix.
        variables: Further environment variables of each rank.
        report_failure: Called with each failure; None prints it.

    Returns:
        The group, none of whose ranks is started yet.
    """
    os.environ["PYTHONUNBUFFERED"] = "1"
    spec = GroupSpec(
        preload_modules=SCRIPT_PRELOAD_MODULES if script.imports_torch else (),
        make_environment=lambda env: _torchrun_variables(options, env) | (variables or {}),
        output=Output(not alone, options.log_dir, options.is_shown),
        stop_signals=(*options.signals, *TRAINING_STOP_SIGNALS),
        stop_timeout=partial(read_stop_timeout, options.shutdown_timeout),
        report_failure=report_failure,
        is_script=True,
    )
    limits = Limits(options.timeout, options.explain_after, options.end_after)
    return LocalGroup(script.work, max(1, count_cores() // nproc), limits, spec)


def _torchrun_variables(options: Options, env: dict[str, str]) -> dict[str, str]:
    """Return the environment variables of a rank, completed by those that torchrun sets.

    Args:
        options: How the ranks are started.
        env: The variables of the rank so far; they take precedence.
    """
    single_node = {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    torchrun = {
        "ROLE_NAME": options.role,
        "ROLE_RANK": env["RANK"],
        "ROLE_WORLD_SIZE": env["WORLD_SIZE"],
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": options.run_id,
        NCCL_ERROR_HANDLING: os.environ.get(NCCL_ERROR_HANDLING, "1"),
    }
    env = single_node | torchrun | env
    if options.master_port is not None and env["GROUP_WORLD_SIZE"] == "1":
        env["MASTER_PORT"] = str(options.master_port)
    if options.virtual_local_rank:
        env |= _make_single_gpu_variables(int(env["LOCAL_RANK"]))
    return env


def _make_single_gpu_variables(local_rank: int) -> dict[str, str]:
    """Return variables with which a rank sees one GPU, as its first."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    has_list = local_rank < len(gpus) > 1
    gpu = gpus[local_rank] if has_list else str(local_rank)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpu}


def prepare_run(script: Script, options: Options, topology: Topology) -> Callable[[], int]:
    """Return a function that runs the script on this machine, and returns the exit code.

    This machine may be one of several nodes.

    Raises:
        InputError: Something that can be checked before the start is wrong.
    """
    get_seconds_left()  # raises InputError for an invalid time limit
    nodes, nproc = topology.parse_ranges()
    options.validate_local_ranks(nproc[1])
    validate_interface()
    if nodes[1] > 1:
        read_env_number(os.environ, "MASTER_PORT", 0, MAX_PORT)  # torch reads it too
        spec = RendezvousSpec.from_options(options, topology, nodes)
        return partial(_run_script_node, script, options, spec, nproc[1])
    has_topology = bool(topology.nodes or topology.nproc)
    world = World() if has_topology or "RANK" in os.environ else World.detect()
    if world.world_size > 1:
        return partial(_exec_rank, script, world, options.explain_after)
    port = options.master_port
    if port is not None and not can_bind("", port):
        raise InputError(
            f"--master-port {port} is in use", "leave it out for a free one, or another number"
        )
    group = make_script_group(script, options, nproc[1], alone=nproc[1] == 1)
    return lambda: run_local(group, nproc[1], options.max_restarts, nproc[0])


def _run_script_node(script: Script, options: Options, spec: RendezvousSpec, nproc: int) -> int:
    """Run this node's part of a script on several nodes, and return the exit code."""
    group = make_script_group(script, options, nproc, alone=False)
    with open_local_node(group, nproc, options.max_restarts) as node:
        from stepladder.launcher.nodes.launch import run_on_nodes  # torchelastic imports torch

        return run_on_nodes(node, spec)


def _exec_rank(script: Script, world: World, explain_after: float | None) -> int:
    """Become a rank that `srun -n N stepladder run SCRIPT` has started.

    The script reads torchrun's variables, which Slurm does not set.
    """
    if world.is_first:
        print_message(world.describe())
    host, port = world.endpoint
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.ranks_per_node),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
    exec_program(script.command(explain_after))

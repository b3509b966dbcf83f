"""`stepladder run`: ranks that are a script. One node under our own parent; several under
torchelastic's agent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from stepladder.core.address import can_bind, parse_endpoint, validate_interface
from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.core.numbers import MAX_PORT, read_env_number
from stepladder.core.process_count import count_cores
from stepladder.core.world import World
from stepladder.launcher.local.group_spec import GroupSpec
from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.outcome import Failure
from stepladder.launcher.local.output import Output
from stepladder.launcher.local.supervisor import run_local
from stepladder.launcher.nodes.own_node import as_node
from stepladder.launcher.options import Options, RendezvousSpec
from stepladder.launcher.script import Script, become
from stepladder.launcher.topology import Topology
from stepladder.rank.preemption import TRAINING_STOP_SIGNALS, get_seconds_left

# torch._dynamo: a script's first optimizer imports it, which takes as long as torch itself.
OF_SCRIPTS = "torch", "torch._dynamo"


def script_group(
    script: Script,
    options: Options,
    nproc: int,
    alone: bool,
    more: dict[str, str] | None = None,
    report_failure: Callable[[Failure], None] | None = None,
) -> LocalGroup:
    """A group of ranks that are a script.

    alone: there is one process in all, so its output needs no rank.  more: variables for each rank.
    report_failure: called with each failure; None prints it.
    """
    os.environ["PYTHONUNBUFFERED"] = "1"
    spec = GroupSpec(
        preload_modules=OF_SCRIPTS if script.imports_torch else (),
        make_environment=lambda env: torchruns_variables(options, env) | (more or {}),
        output=Output(not alone, options.log_dir, options.is_shown),
        stop_signals=(*options.signals, *TRAINING_STOP_SIGNALS),
        stop_timeout=lambda: options.shutdown_timeout,
        is_script=True,
        report_failure=report_failure,
    )
    limits = Limits(options.timeout, options.explain_after, options.end_after)
    return LocalGroup(script.work, max(1, count_cores() // nproc), limits, spec)


def torchruns_variables(options: Options, env: dict[str, str]) -> dict[str, str]:
    """What torchrun sets: `env`, and more."""
    alone = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    env = (
        alone
        | {
            "ROLE_NAME": options.role,
            "ROLE_RANK": env["RANK"],
            "ROLE_WORLD_SIZE": env["WORLD_SIZE"],
            "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
            "TORCHELASTIC_RUN_ID": options.run_id,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }
        | env
    )
    if options.master_port is not None and env["GROUP_WORLD_SIZE"] == "1":
        env["MASTER_PORT"] = str(options.master_port)
    if options.virtual_local_rank:  # each rank sees one GPU, as its first
        place = int(env["LOCAL_RANK"])
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        env |= {
            "LOCAL_RANK": "0",
            "CUDA_VISIBLE_DEVICES": gpus[place] if place < len(gpus) > 1 else str(place),
        }
    return env


def prepared(script: Script, options: Options, topology: Topology) -> Callable[[], int]:
    """Runs `script` on this machine, alone or as one node of several, and returns the exit code.

    Raises InputError here, before anything is made, for all that can be checked by then.
    """
    get_seconds_left()  # refuses a time limit that is none
    nodes, nproc = topology.ranges()
    options.refuse_absent_ranks(nproc[1])
    validate_interface()
    if nodes[1] > 1:
        read_env_number(os.environ, "MASTER_PORT", 0, MAX_PORT)  # torch reads it too
        return partial(
            run_node, script, options, RendezvousSpec.read(options, topology, nodes), nproc[1]
        )
    alone = not topology.nodes and not topology.nproc and "RANK" not in os.environ
    world = World.detect() if alone else World()
    if world.world_size > 1:
        return partial(be_rank, script, world, options.explain_after)
    port = options.master_port
    if port is not None and not can_bind("", port):
        raise InputError(
            f"--master-port {port} is in use", "leave it out for a free one, or another number"
        )
    group = script_group(script, options, nproc[1], alone=nproc[1] == 1)
    return lambda: run_local(group, nproc[1], options.max_restarts, nproc[0])


def run_node(script: Script, options: Options, spec: RendezvousSpec, nproc: int) -> int:
    group = script_group(script, options, nproc, alone=False)
    with as_node(group, nproc, options.max_restarts) as node:
        from stepladder.launcher.nodes.launch import run_on_nodes  # torchelastic is torch

        return run_on_nodes(node, spec)


def be_rank(script: Script, world: World, explain_after: float | None) -> int:
    """`srun -n N stepladder run SCRIPT`: Slurm has started the ranks; the script asks for
    torchrun's variables.
    """
    if world.is_first:
        print_message(world.describe())
    host, port = parse_endpoint(world.init_method.removeprefix("tcp://"))
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.ranks_per_node),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
    become(script.command(explain_after))

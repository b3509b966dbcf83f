"""`stepladder run SCRIPT`: an unmodified script on one node or several, with torchrun's flags."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import click

from stepladder.cli.flags import HIDDEN, make_command, make_field_options
from stepladder.cli.suggest import tell_misplaced_flags
from stepladder.cli.types import (
    Count,
    ExplainAfter,
    Hosts,
    Natural,
    PathName,
    Port,
    Seconds,
    Ssh,
    Wait,
    Words,
)
from stepladder.core.console import print_message
from stepladder.core.paths import validate_run_dir
from stepladder.launcher.allocation import start_elsewhere
from stepladder.launcher.nodes.local_node import exit_if_threads_wait
from stepladder.launcher.options import DEFAULT_SIGNALS, Options
from stepladder.launcher.run import prepare_run
from stepladder.launcher.script import Script
from stepladder.launcher.topology import Topology
from stepladder.rank.exchange_choice import EXCHANGE_VARIABLE
from stepladder.rank.exit_record import EndWriter
from stepladder.rank.separate_training import ONE_TRAINING_VARIABLE
from stepladder.train.job_source import validate_is_script

FLAGS_WITHOUT_EFFECT = (
    "event-log-handler",
    "logs-specs",
    "numa-binding",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "monitor-interval",
)


class _RunFlags:
    """The flags of `run`, mostly torchrun's. PET_<NAME> in the environment sets each of them.

    Args:
        nproc_per_node (N|A:B|auto|gpu|cpu): Processes per machine.  [default: 1]
        nnodes (N|A:B): Machines. Type the same command on each of them.  [default: 1]
        rdzv_endpoint (HOST:PORT): Address at which the machines meet: the host is one of them, the
            port is free.
        local_addr: Address under which other machines reach this one.  [default: of the interface
            that leads to them]
        module: SCRIPT is a module, as in `python -m`.
        no_python: SCRIPT is a command, not Python.
        max_restarts: How often to restart all ranks after a failure.  [default: 0; 3 where a range
            is given]
        run_dir: Folder for logs and for the times of optimizer steps, which `report` and `watch`
            read. A second launch is added to the first.
        log_dir: Folder for a copy of each rank's output.
        start_method: How ranks start. With spawn each is a new interpreter and imports torch
            itself.
        redirects: Streams that go to the log only: 1 stdout, 2 stderr, 3 both; 0:1,1:2 chooses by
            rank.
        local_ranks_filter (0,1): Local ranks whose output is shown.  [default: all]
        standalone: Use this machine alone, whatever the --rdzv-* flags say.
        rdzv_backend: c10d or static.  [default: c10d; static with --node-rank]
        rdzv_id: Name of the job, where several jobs meet at one endpoint.
        rdzv_conf (KEY=VALUE,...): Further rendezvous settings, as for torchrun.
        node_rank: Number of this machine, from 0; use it with --master-addr.
        master_addr: Address of machine 0; use it with --node-rank.
        master_port: [default: a free one; 29500 with --master-addr]
        role: Value of ROLE_NAME for the ranks.
        signals_to_handle: Signals on which the ranks are asked to end.
        shutdown_timeout: Seconds that the ranks may take to end.  [default: 30; in a batch job, all
            that remains of its time limit]
        virtual_local_rank: Give every rank LOCAL_RANK 0 and one visible GPU.
        timeout: Seconds that machines wait for each other.
        end_after: Seconds without progress after which the ranks are ended, or restarted.
            [default: never]
        exchange: How CPU ranks of one machine exchange tensors: memory that they share, or gloo.
        independent: Each rank trains a model of its own, without the others.
        pretend_gpus (N): Run a script for CUDA and NCCL on N CPU ranks, without a GPU.
    """

    nproc_per_node: Annotated[str, "--nproc", "--nproc-per-node"] = ""
    nnodes: Annotated[str, "--nodes", "--nnodes"] = ""
    hosts: Hosts = ""
    ssh: Ssh = "ssh"
    rdzv_endpoint: str = ""
    local_addr: str = ""
    module: Annotated[bool, "-m", "--module"] = False
    no_python: bool = False
    max_restarts: Natural | None = None
    run_dir: Path | None = None
    log_dir: Path | None = None
    start_method: Literal["forkserver", "fork", "spawn"] = "forkserver"
    redirects: Annotated[str, "-r", "--redirects"] = "0"
    tee: Annotated[str, "-t", "--tee", HIDDEN] = "0"
    local_ranks_filter: str = ""
    standalone: bool = False
    rdzv_backend: str = ""
    rdzv_id: str = "none"
    rdzv_conf: str = ""
    node_rank: Natural | None = None
    master_addr: str = ""
    master_port: Port | None = None
    role: str = "default"
    signals_to_handle: str = ",".join(DEFAULT_SIGNALS)
    shutdown_timeout: Annotated[float, Seconds(0)] | None = None
    virtual_local_rank: bool = False
    timeout: Wait = 600
    explain_after: ExplainAfter = None
    end_after: Wait | None = None
    exchange: Literal["memory", "gloo"] = "memory"
    pretend_gpus: Annotated[Count | None, "--simulate-gpus", "--pretend-gpus"] = None
    independent: bool = False
    run_path: Annotated[bool, HIDDEN] = False


@make_command(
    click.Command,
    *make_field_options(_RunFlags),
    *(click.Option([f"--{name}"], hidden=True) for name in FLAGS_WITHOUT_EFFECT),
    context_settings={
        "allow_interspersed_args": False,
        "auto_envvar_prefix": "PET",
        "token_normalize_func": lambda name: name.replace("_", "-"),  # torchrun's second spelling
    },
)
def command(script: PathName, args: Words = (), **flags: Any) -> int:
    """Run SCRIPT, unmodified, with ARGS on every process.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set for each process. All flags of
    torchrun are accepted, in both spellings. In a Slurm allocation the command starts itself on all
    nodes.
    """
    to_run = Script.from_arguments(
        script, args, flags["module"], flags["no_python"], flags["start_method"] == "spawn"
    )
    if to_run.kind == "file":
        validate_is_script(Path(to_run.name))
        tell_misplaced_flags(Path(to_run.name), args)
    if flags["pretend_gpus"]:
        _simulate_gpus(flags["pretend_gpus"])
    topology = _make_topology(flags)
    options = Options.from_flags(flags, elastic=":" in topology.nodes + topology.nproc)
    for name in FLAGS_WITHOUT_EFFECT:
        if flags[name.replace("-", "_")]:
            print_message(f"--{name} has no effect here")
    code = start_elsewhere(click.get_current_context().obj, flags["hosts"], flags["ssh"], topology)
    if code is not None:
        return code
    os.environ[EXCHANGE_VARIABLE] = flags["exchange"]
    os.environ[ONE_TRAINING_VARIABLE] = "" if flags["independent"] else "1"
    if topology.note:
        print_message(topology.note)
    if flags["run_dir"] is None:
        work = prepare_run(to_run, options, topology)
    else:
        from stepladder.tools.report.launches import run_recorded, validate_script_run_dir

        validate_run_dir(flags["run_dir"])
        validate_script_run_dir(flags["run_dir"])
        run_ranks = prepare_run(to_run, options, topology)
        work = partial(run_recorded, flags["run_dir"], to_run.name, run_ranks)
    with EndWriter() as end:
        end.code = work()
    return exit_if_threads_wait(end.code)


def _make_topology(flags: dict[str, Any]) -> Topology:
    """Return the nodes and processes that flags or a rented cluster's variables describe."""
    nproc = flags["nproc_per_node"]
    if flags["pretend_gpus"]:
        nproc = nproc or str(flags["pretend_gpus"])
    if flags["standalone"] or flags["pretend_gpus"]:
        topology = Topology("1", nproc)
    else:
        topology = Topology(
            flags["nnodes"],
            nproc,
            flags["rdzv_endpoint"],
            flags["local_addr"],
            hosts=flags["hosts"],
        ).with_cluster_variables()
    if flags["independent"] or flags["master_addr"]:
        return topology
    return topology.in_step()


def _simulate_gpus(gpus: int) -> None:
    """Print it, and let every Python process started from here simulate CUDA on the CPU."""
    from stepladder.tools.check.startup_variables import simulated_gpu_variables

    os.environ.update(simulated_gpu_variables(gpus))
    print_message(
        f"{gpus} GPUs are simulated: CUDA is the CPU, and nccl is gloo;"
        " times and memory mean nothing"
    )

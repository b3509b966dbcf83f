"""Variables that say who a process is: half set, set twice, or set for somebody else."""

from __future__ import annotations

from collections.abc import Iterator

from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.rules import Finding, rule, tasks_here


def number(facts: Facts, name: str, default: int = 0) -> int:
    text = facts.env.get(name, "")
    return int(text) if text.isdigit() else default


def in_step(facts: Facts) -> bool:
    """Whether this process is a task of a Slurm step with several tasks."""
    return number(facts, "SLURM_STEP_NUM_TASKS") > 1


@rule
def half_set(facts: Facts) -> Iterator[Finding]:
    env = dict(facts.env)
    if "RANK" not in env:
        return  # Slurm's own variables come whole
    try:
        World.detect(env)
    except InputError as error:
        yield Finding(
            "error", error.found, "a rank that does not know its place waits for others for ever", error.hint
        )


@rule
def slurm_and_torchrun(facts: Facts) -> Iterator[Finding]:
    tasks, here = number(facts, "SLURM_STEP_NUM_TASKS"), tasks_here(facts)
    if "TORCHELASTIC_RUN_ID" in facts.env and here > 1:
        yield Finding(
            "error",
            f"torchrun inside a Slurm step with {here} tasks per node",
            "each task starts its own torchrun: several groups of ranks on each node, and one port",
            "#SBATCH --ntasks-per-node=1 for torchrun; or srun without torchrun, one task per rank",
        )
    elif in_step(facts) and "RANK" in facts.env and "TORCHELASTIC_RUN_ID" not in facts.env:
        ranks = number(facts, "WORLD_SIZE")
        if (ranks and ranks != tasks) or facts.env["RANK"] != facts.env.get("SLURM_PROCID"):
            yield Finding(
                "error",
                f"RANK={facts.env['RANK']}, WORLD_SIZE={ranks} in task {facts.env.get('SLURM_PROCID')} of {tasks}",
                "exported in the batch script, where `$SLURM_PROCID` is 0, so every task gets the same rank",
                "leave RANK and WORLD_SIZE out: stepladder reads the Slurm step",
            )


@rule
def slurm_tasks_without_a_step(facts: Facts) -> Iterator[Finding]:
    if "RANK" in facts.env:
        return  # of torchrun: it says who this process is
    if number(facts, "SLURM_NTASKS") > 1 and "SLURM_JOB_ID" in facts.env and not in_step(facts):
        yield Finding(
            "note",
            f"an allocation of {number(facts, 'SLURM_NTASKS')} tasks, and this process is not in a step of them",
            "a batch script has the variables of rank 0 of N, but no other rank exists: plain `python` would wait",
            "srun python ..., or stepladder, which sees it",
        )


@rule
def slurm_cores(facts: Facts) -> Iterator[Finding]:
    wanted = number(facts, "SLURM_CPUS_PER_TASK")
    if in_step(facts) and wanted > facts.cores:
        yield Finding(
            "warning",
            f"SLURM_CPUS_PER_TASK={wanted}, but this task may use {facts.cores}",
            "srun of 22.05 and later does not take --cpus-per-task from sbatch",
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, before srun",
        )


@rule
def world_size_alone(facts: Facts) -> Iterator[Finding]:
    if "WORLD_SIZE" in facts.env and "RANK" not in facts.env:
        hosted = any(name.startswith("RUNPOD_") for name in facts.env)
        yield Finding(
            "warning",
            f"WORLD_SIZE={facts.env['WORLD_SIZE']} without RANK",
            ("RunPod presets it for every process" if hosted else "left over from another start")
            + ": stepladder ignores it, but scripts that read it wait for ranks that do not come",
            "unset WORLD_SIZE, or start with stepladder or torchrun",
        )


@rule
def local_master(facts: Facts) -> Iterator[Finding]:
    """Where every node says localhost, each waits for the others alone."""
    address = facts.env.get("MASTER_ADDR", "")
    nodes = max(facts.nodes, number(facts, "SLURM_STEP_NUM_NODES", 1), number(facts, "GROUP_WORLD_SIZE", 1))
    if nodes > 1 and (address in ("localhost", "::1") or address.startswith("127.")):
        yield Finding(
            "error",
            f"MASTER_ADDR={address} with {nodes} nodes",
            "every node takes itself for the meeting place, and waits alone",
            "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1), or none with stepladder",
        )

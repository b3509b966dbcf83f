"""Variables that say who a process is: half set, set twice, or set for somebody else."""

from __future__ import annotations

from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.finding import Findings, error, error_if, note_if, tasks_here, warning, warning_if


def number(facts: Facts, name: str, default: int = 0) -> int:
    text = facts.env.get(name, "")
    return int(text) if text.isdigit() else default


def in_step(facts: Facts) -> bool:
    """Whether this process is a task of a Slurm step with several tasks."""
    return number(facts, "SLURM_STEP_NUM_TASKS") > 1


def half_set(facts: Facts) -> Findings:
    if "RANK" not in facts.env:
        return  # Slurm's own variables come whole
    try:
        World.detect(dict(facts.env))
    except InputError as wrong:
        yield error(wrong.found, "a rank that does not know its place waits for others for ever", wrong.hint)


def slurm_and_torchrun(facts: Facts) -> Findings:
    tasks, here = number(facts, "SLURM_STEP_NUM_TASKS"), tasks_here(facts)
    if "TORCHELASTIC_RUN_ID" in facts.env and here > 1:
        yield error(
            f"torchrun inside a Slurm step with {here} tasks per node",
            "each task starts its own torchrun: several groups of ranks on each node, and one port",
            "#SBATCH --ntasks-per-node=1 for torchrun; or srun without torchrun, one task per rank",
        )
    elif in_step(facts) and "RANK" in facts.env and "TORCHELASTIC_RUN_ID" not in facts.env:
        ranks = number(facts, "WORLD_SIZE")
        if (ranks and ranks != tasks) or facts.env["RANK"] != facts.env.get("SLURM_PROCID"):
            yield error(
                f"RANK={facts.env['RANK']}, WORLD_SIZE={ranks} in task {facts.env.get('SLURM_PROCID')} of {tasks}",
                "exported in the batch script, where `$SLURM_PROCID` is 0, so every task gets the same rank",
                "leave RANK and WORLD_SIZE out: stepladder reads the Slurm step",
            )


def tasks_without_a_step(facts: Facts) -> int:
    """Where torchrun's variables do not say either who this process is."""
    alone = "SLURM_JOB_ID" in facts.env and "RANK" not in facts.env and not in_step(facts)
    tasks = number(facts, "SLURM_NTASKS")
    return tasks if alone and tasks > 1 else 0


def slurm_cores(facts: Facts) -> Findings:
    wanted = number(facts, "SLURM_CPUS_PER_TASK")
    if in_step(facts) and wanted > facts.cores:
        yield warning(
            f"SLURM_CPUS_PER_TASK={wanted}, but this task may use {facts.cores}",
            "srun of 22.05 and later does not take --cpus-per-task from sbatch",
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, before srun",
        )


def preset_by(facts: Facts) -> str:
    """Who has set WORLD_SIZE, where nobody has set RANK."""
    if "WORLD_SIZE" not in facts.env or "RANK" in facts.env:
        return ""
    hosted = any(name.startswith("RUNPOD_") for name in facts.env)
    return "RunPod presets it for every process" if hosted else "left over from another start"


def nodes_at_home(facts: Facts) -> int:
    """How many take this address for their own: each then waits for the others alone."""
    address = facts.env.get("MASTER_ADDR", "")
    nodes = max(facts.nodes, number(facts, "SLURM_STEP_NUM_NODES", 1), number(facts, "GROUP_WORLD_SIZE", 1))
    return nodes if nodes > 1 and (address in ("localhost", "::1") or address.startswith("127.")) else 0


RULES = {
    "half-set": half_set,
    "slurm-and-torchrun": slurm_and_torchrun,
    "slurm-tasks-without-a-step": note_if(
        tasks_without_a_step,
        "an allocation of {0} tasks, and this process is not in a step of them",
        "a batch script has the variables of rank 0 of N, but no other rank exists: plain `python` would wait",
        "srun python ..., or stepladder, which sees it",
    ),
    "slurm-cores": slurm_cores,
    "world-size-alone": warning_if(
        preset_by,
        "WORLD_SIZE={f.env[WORLD_SIZE]} without RANK",
        "{0}: stepladder ignores it, but scripts that read it wait for ranks that do not come",
        "unset WORLD_SIZE, or start with stepladder or torchrun",
    ),
    "local-master": error_if(
        nodes_at_home,
        "MASTER_ADDR={f.env[MASTER_ADDR]} with {0} nodes",
        "every node takes itself for the meeting place, and waits alone",
        "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1), or none with stepladder",
    ),
}

"""A batch script for Slurm, as a pure function of a frozen value. The files in slurm/ are its output.

The script starts one agent per node (or one task per rank), and afterwards asks `stepladder after` what the
end of the ranks means. It writes the number of nodes once; everything else reads it from Slurm.
"""

from __future__ import annotations

import shlex

from stepladder.rank.exit_record import END_FILE, NAME
from stepladder.slurm.job import CONTROL, BatchJob

CONTINUED = " \\\n    "

PORT = "$((20000 + SLURM_JOB_ID % 12000))"  # per job, below the range that Linux gives away itself
ADDRESS = r"""first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
"""
ENDPOINT = f"""[[ $address == *:* ]] && address="[$address]"  # IPv6
endpoint=$address:{PORT}

"""
LIMIT = """echo "stepladder: start $((SLURM_RESTART_COUNT + 1)) of job $SLURM_JOB_ID" >&2
end=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e)
export STEPLADDER_END_TIME=$(date --date "$end" +%s 2> /dev/null)
"""
AFTER = """code=$?

# What this end means: exit code 75 where the job is to go on from its snapshot.
{ timeout 60 scontrol show job "$SLURM_JOB_ID"; timeout 60 scontrol show node "$SLURM_JOB_NODELIST"; } |
    """
REQUEUE = """
meaning=$?
if [ "$meaning" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$meaning"
"""


def render(job: BatchJob) -> str:
    """The batch script."""
    container = f"{job.container} " if job.container else ""
    limits = f"--margin {job.margin} --max-requeues {job.max_requeues}"
    after = f'{container}stepladder after "$code" --job-dir {shlex.quote(job.job_dir)} {limits}'
    setup = "".join(f"{line}\n" for line in job.setup)
    limit = LIMIT + f"export {END_FILE}={end_file(job)}\n"
    return (
        directives(job)
        + "\n".join(["", *filter(None, [setup]), limit, start(job, container)])
        + AFTER
        + after
        + REQUEUE
    )


def end_file(job: BatchJob) -> str:
    """Where the ranks leave their word. A run directory is one job's; of a script, several may run at once."""
    if job.command[0] == "train":
        return shlex.quote(f"{job.job_dir}/{NAME}")
    return f"{shlex.quote(job.job_dir)}/ended-$SLURM_JOB_ID.json"


def directives(job: BatchJob) -> str:
    """What sbatch reads: everything up to the first command."""
    least, most = job.nodes
    tasks = job.nproc if job.per_rank else "" if job.elastic else "1"  # with a range, Slurm would take the least
    options = {
        "job-name": job.name, "partition": job.partition, "account": job.account, "qos": job.qos,
        "constraint": job.constraint, "reservation": job.reservation,
        "nodes": f"{least}-{most}" if job.elastic else str(least),
        "ntasks-per-node": tasks, "cpus-per-task": str(job.cpus_per_task),
        "gpus-per-node": job.gpus_per_node, "mem": job.mem, "time": job.time, "output": job.output,
        "open-mode": "append", "signal": f"TERM@{job.margin}",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items() if value]
    words += ["--requeue", *(["--no-kill"] if job.elastic else []), *job.sbatch_args]
    made_by = f"# Made by: {one_line(job.made_by)}\n" if job.made_by else ""
    return "#!/bin/bash\n" + made_by + "".join(f"#SBATCH {quote(word)}\n" for word in words)


def quote(word: str) -> str:
    """One word of an #SBATCH line: quoted as a shell has it, but for backslashes, which escape there too."""
    return shlex.quote(word.replace("\\", "\\\\"))


def one_line(text: str) -> str:
    """Harmless in a comment."""
    return CONTROL.sub("?", text)


def start(job: BatchJob, container: str) -> str:
    """The one `srun`, with its ranks or agents. srun does not take over --cpus-per-task by itself (22.05)."""
    tasks = job.nproc if job.per_rank else "1"
    ends = "--no-kill --kill-on-bad-exit=0" if job.elastic else "--kill-on-bad-exit=1"
    parts = [
        f'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node={tasks} --cpus-per-task="$SLURM_CPUS_PER_TASK"',
        f"{'--gpu-bind=none ' if job.gpus_per_node else ''}{ends}",
    ]
    kind, *rest = job.command
    if job.per_rank:
        parts.append(container + rank_command(job))
        return (ADDRESS if kind == "run" else "") + CONTINUED.join(parts) + "\n"
    nodes = f'{job.nodes[0]}:"$SLURM_JOB_NUM_NODES"' if job.elastic else '"$SLURM_JOB_NUM_NODES"'
    parts.append(f'{container}stepladder {kind} --nodes {nodes} --nproc {job.nproc} --rdzv-endpoint "$endpoint"')
    return ADDRESS + ENDPOINT + CONTINUED.join([*parts, shlex.join(rest)]) + "\n"


def rank_command(job: BatchJob) -> str:
    """`train` finds itself in a Slurm step; a script is told by the variables that torchrun would set.

    The shell around a script notes how it failed: srun's exit code may be that of a task which srun ended. It
    outlives a SIGTERM, which is for the script.
    """
    kind, *rest = job.command
    if kind == "train":
        return f"stepladder train {shlex.join(rest)}"
    who = f"RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={job.nproc}"
    then = "code=$?; [ $code -eq 0 ] || stepladder note $code; exit $code"
    where = f'MASTER_ADDR="$address" MASTER_PORT="{PORT}"'
    shell = f"env {where} bash -c 'trap : TERM; export {who}; \"$@\"; {then}' rank"
    return CONTINUED.join([shell, f"python -u {shlex.join(rest)}"])

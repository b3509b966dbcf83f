"""Rules for cores, shared memory, limits, and the folder of runs."""

from __future__ import annotations

from stepladder.core.numbers import parse_whole_number
from stepladder.tools.doctor.finding import (
    CLOCKS_DIFFER,
    Findings,
    error,
    error_if,
    note,
    warning,
    warning_if,
)
from stepladder.tools.doctor.machine_facts import Facts

MIB_BYTES = 2**20
GIB_BYTES = 2**30
MIN_SHARED_MEMORY_BYTES = 512 * MIB_BYTES
MIN_OPEN_FILES = 4096
MIN_FREE_BYTES = 2 * GIB_BYTES
MIN_LOCKED_BYTES = 64 * MIB_BYTES
MAX_SKEW_S = 1.0
MAX_SKEW_BETWEEN_NODES_S = 3.0
SHARED_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cephfs",
    "fuse.ceph",
    "glusterfs",
    "fuse.glusterfs",
    "smb3",
    "cifs",
    "afs",
    "orangefs",
    "pvfs2",
    "wekafs",
    "panfs",
    "9p",
    "virtiofs",
    "fuse.sshfs",
    "fuse.gcsfuse",
    "fuse.s3fs",
    "fuse.juicefs",
    "ocfs2",
    "gfs2",
)
IN_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def threads_and_cores(facts: Facts) -> Findings:
    text = facts.env.get("OMP_NUM_THREADS", "")
    ranks = facts.planned_ranks
    outermost = text.partition(",")[0].strip()  # of nested parallel regions, as in 4,1
    threads = parse_whole_number(outermost) or 0
    fix = f"export OMP_NUM_THREADS={max(1, facts.cores // ranks)}"
    if text and not threads:
        cause = "libgomp ignores it, and each process takes all cores"
        yield warning(f"OMP_NUM_THREADS={text} is not a number of threads", cause, fix)
    if not text and ranks > 1 and facts.cores > 1:
        yield note(
            f"OMP_NUM_THREADS is not set, for {ranks} processes on {facts.cores} cores",
            "`stepladder` shares the cores out; torchrun gives each process one thread, a plain "
            "start all",
            f"outside stepladder: {fix}",
        )
    if threads * ranks > facts.cores and threads > 1:
        processes = "1 process" if ranks == 1 else f"{ranks} processes"
        yield warning(
            f"OMP_NUM_THREADS={threads} with {processes} on {facts.cores} cores",
            "more threads than cores wait for each other, spinning: it can be several times slower",
            fix,
        )


def open_files(facts: Facts) -> Findings:
    fix = "ulimit -n 65536"
    if 0 <= facts.nofile_hard < MIN_OPEN_FILES:
        fix = (
            f"ask for a higher hard limit than {facts.nofile_hard} (limits.conf, or Docker's "
            "--ulimit)"
        )
    if 0 <= facts.nofile < MIN_OPEN_FILES:
        cause = (
            "each data loader worker, connection and shared tensor takes some: `Too many open "
            "files`"
        )
        yield warning(f"a process may have {facts.nofile} open files", cause, fix)


def run_folder(facts: Facts) -> Findings:
    folder = facts.folder
    free = folder.free_bytes
    if not folder.writable:
        fix = "--run-dir DIR, on a file system that this user may write to"
        yield error(f"{folder.path} cannot be written", "runs are stored there", fix)
    elif free is not None and free < MIN_FREE_BYTES:
        amount = f"{free // MIB_BYTES} MiB"
        if free >= GIB_BYTES:
            amount = f"{free / GIB_BYTES:.1f} GiB"
        text = f"{amount} are free for {folder.path}"
        fix = "--run-dir DIR on another file system, or --keep 1"
        if free < MIB_BYTES:
            yield error(text, "no run can be stored there", fix)
        else:
            cause = "a snapshot that does not fit leaves the one before it, but the run stops"
            yield warning(text, cause, fix)
    if folder.kind in IN_MEMORY_FILE_SYSTEMS:
        yield warning(
            f"{folder.path} is in memory ({folder.kind})",
            "snapshots take memory from the training, and are gone after a reboot",
            "--run-dir DIR on a disk",
        )


def clock_skew(facts: Facts) -> Findings:
    skew = facts.folder.skew or 0.0
    if abs(skew) <= MAX_SKEW_S:
        return
    direction = "ahead" if skew > 0 else "behind"
    text = f"the file system of {facts.folder.path} is {abs(skew):.1f} s {direction}"
    if facts.nodes > 1 and abs(skew) > MAX_SKEW_BETWEEN_NODES_S:
        yield error(text, *CLOCKS_DIFFER)
    else:
        yield warning(text, *CLOCKS_DIFFER)


def too_few_cores(facts: Facts) -> str:
    """Return the number of cores if there are fewer cores than processes."""
    if facts.planned_ranks <= facts.cores:
        return ""
    if facts.cores == 1:
        return "1 core"
    return f"{facts.cores} cores"


def smaller_quota(facts: Facts) -> int:
    """Return the cores of the control group's quota if they are fewer than the visible ones."""
    quota = facts.cores_quota
    if quota is not None and quota < 0.95 * facts.cores:
        return max(1, int(quota))
    return 0


def small_shared_memory(facts: Facts) -> str:
    size = facts.shm_bytes
    if size is None or size >= MIN_SHARED_MEMORY_BYTES:
        return ""
    return f"{size / MIB_BYTES:.0f} MiB"


def small_locked_memory(facts: Facts) -> str:
    """Return the limit of locked memory if InfiniBand needs more."""
    if not facts.infiniband or not 0 <= facts.memlock < MIN_LOCKED_BYTES:
        return ""
    return f"{facts.memlock // 1024} KiB"


def is_folder_unshared(facts: Facts) -> bool:
    kind = facts.folder.kind
    return facts.nodes > 1 and bool(kind) and kind not in SHARED_FILE_SYSTEMS


MACHINE_RULES = {
    "processes-and-cores": warning_if(
        too_few_cores,
        "{f.planned_ranks} processes on {0} that this process may use",
        "they take turns; under Slurm, srun of 22.05 and later does not pass on --cpus-per-task",
        "srun --cpus-per-task=N (and export SRUN_CPUS_PER_TASK=N), or fewer processes",
    ),
    "threads-and-cores": threads_and_cores,
    "core-quota": warning_if(
        smaller_quota,
        "{f.cores} cores are visible, but the control group may use {f.cores_quota:g}",
        "a limit of the container or the batch job: programs that count cores start too many "
        "threads, and the"
        " kernel then halts them all in turn",
        "--threads {0} in all, or docker run --cpuset-cpus instead of --cpus",
    ),
    "shared-memory": warning_if(
        small_shared_memory,
        "/dev/shm has {0}",
        "data loader workers and NCCL pass data through it: `Bus error`, `No space left` "
        "(Docker: 64 MiB)",
        "docker run --shm-size=8g, or --ipc=host",
    ),
    "open-files": open_files,
    "locked-memory": error_if(
        small_locked_memory,
        "InfiniBand, and {0} of memory may be locked",
        "it needs registered memory: NCCL fails with `ibv_reg_mr` or falls back to TCP",
        "ulimit -l unlimited (limits.conf; Slurm: LimitMEMLOCK=infinity in slurmd.service; "
        "Docker: --ulimit)",
    ),
    "run-folder": run_folder,
    "shared-folder": error_if(
        is_folder_unshared,
        "{f.nodes} nodes, and {f.folder.path} is on {f.folder.kind}, which only this machine sees",
        "all nodes use one run directory, to find each other and to resume",
        "--run-dir DIR on a shared file system (df -T lists them)",
    ),
    "clock-skew": clock_skew,
}

"""Cores, memory to share, limits, and the folder that runs are written to."""

from __future__ import annotations

from stepladder.core.numbers import parse_whole_number
from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.finding import (
    CLOCKS_APART,
    Findings,
    error,
    error_if,
    note,
    warning,
    warning_if,
)

MIB, GIB = 2**20, 2**30
LEAST_SHM, LEAST_FILES, LEAST_FREE, LEAST_LOCKED = 512 * MIB, 4096, 2 * GIB, 64 * MIB
SHARED = (
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
IN_MEMORY = ("tmpfs", "ramfs")


def threads_and_cores(facts: Facts) -> Findings:
    text, ranks = facts.env.get("OMP_NUM_THREADS", ""), facts.ranks_wanted
    first = text.partition(",")[0].strip()  # of nested parallel regions, as in 4,1
    threads = parse_whole_number(first) or 0
    fix = f"export OMP_NUM_THREADS={max(1, facts.cores // ranks)}"
    if text and not threads:
        cause = "libgomp ignores it, and each process takes all cores"
        yield warning(f"OMP_NUM_THREADS={text} is not a number of threads", cause, fix)
    if not text and ranks > 1 and facts.cores > 1:
        yield note(
            f"OMP_NUM_THREADS is not set, for {ranks} processes on {facts.cores} cores",
            "`stepladder` shares the cores out; torchrun gives each process one thread, a plain start all",
            f"outside stepladder: {fix}",
        )
    if threads * ranks > facts.cores and threads > 1:
        yield warning(
            f"OMP_NUM_THREADS={threads} with {ranks} process{'es' * (ranks > 1)} on {facts.cores} cores",
            "more threads than cores wait for each other, spinning: it can be several times slower",
            fix,
        )


def open_files(facts: Facts) -> Findings:
    fix = "ulimit -n 65536"
    if 0 <= facts.nofile_hard < LEAST_FILES:
        fix = f"ask for a higher hard limit than {facts.nofile_hard} (limits.conf, or Docker's --ulimit)"
    if 0 <= facts.nofile < LEAST_FILES:
        cause = "each data loader worker, connection and shared tensor takes some: `Too many open files`"
        yield warning(f"a process may have {facts.nofile} open files", cause, fix)


def run_folder(facts: Facts) -> Findings:
    folder, free = facts.folder, facts.folder.free_bytes
    if not folder.writable:
        fix = "--run-dir DIR, on a file system that this user may write to"
        yield error(f"{folder.path} cannot be written", "runs are stored there", fix)
    elif free is not None and free < LEAST_FREE:
        amount = f"{free / GIB:.1f} GiB" if free >= GIB else f"{free // MIB} MiB"
        found, fix = (
            f"{amount} are free for {folder.path}",
            "--run-dir DIR on another file system, or --keep 1",
        )
        if free < MIB:
            yield error(found, "no run can be stored there", fix)
        else:
            yield warning(
                found,
                "a snapshot that does not fit leaves the one before it, but the run stops",
                fix,
            )
    if folder.kind in IN_MEMORY:
        yield warning(
            f"{folder.path} is in memory ({folder.kind})",
            "snapshots take memory from the training, and are gone after a reboot",
            "--run-dir DIR on a disk",
        )


def clock_skew(facts: Facts) -> Findings:
    skew = facts.folder.skew or 0.0
    if abs(skew) > 1.0:
        way, say = (
            "ahead" if skew > 0 else "behind",
            error if facts.nodes > 1 and abs(skew) > 3.0 else warning,
        )
        yield say(
            f"the file system of {facts.folder.path} is {abs(skew):.1f} s {way}", *CLOCKS_APART
        )


RULES = {
    "processes-and-cores": warning_if(
        lambda f: f.ranks_wanted > f.cores and f"{f.cores} core{'s' * (f.cores > 1)}",
        "{f.ranks_wanted} processes on {0} that this process may use",
        "they take turns; under Slurm, srun of 22.05 and later does not pass on --cpus-per-task",
        "srun --cpus-per-task=N (and export SRUN_CPUS_PER_TASK=N), or fewer processes",
    ),
    "threads-and-cores": threads_and_cores,
    "core-quota": warning_if(
        lambda f: (
            f.cores_quota is not None
            and f.cores_quota < 0.95 * f.cores
            and max(1, int(f.cores_quota))
        ),
        "{f.cores} cores are visible, but the control group may use {f.cores_quota:g}",
        "a limit of the container or the batch job: programs that count cores start too many threads, and the"
        " kernel then halts them all in turn",
        "--threads {0} in all, or docker run --cpuset-cpus instead of --cpus",
    ),
    "shared-memory": warning_if(
        lambda f: (
            f.shm_bytes is not None and f.shm_bytes < LEAST_SHM and f"{f.shm_bytes / MIB:.0f} MiB"
        ),
        "/dev/shm has {0}",
        "data loader workers and NCCL pass data through it: `Bus error`, `No space left` (Docker: 64 MiB)",
        "docker run --shm-size=8g, or --ipc=host",
    ),
    "open-files": open_files,
    "locked-memory": error_if(
        lambda f: f.infiniband and 0 <= f.memlock < LEAST_LOCKED and f"{f.memlock // 1024} KiB",
        "InfiniBand, and {0} of memory may be locked",
        "it needs registered memory: NCCL fails with `ibv_reg_mr` or falls back to TCP",
        "ulimit -l unlimited (limits.conf; Slurm: LimitMEMLOCK=infinity in slurmd.service; Docker: --ulimit)",
    ),
    "run-folder": run_folder,
    "shared-folder": error_if(
        lambda f: f.nodes > 1 and f.folder.kind and f.folder.kind not in SHARED,
        "{f.nodes} nodes, and {f.folder.path} is on {f.folder.kind}, which only this machine sees",
        "nodes meet, and resume, in one run directory",
        "--run-dir DIR on a shared file system (df -T lists them)",
    ),
    "clock-skew": clock_skew,
}

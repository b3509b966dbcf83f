"""Cores, memory to share, limits, and the folder that runs are written to."""

from __future__ import annotations

from collections.abc import Iterator

from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.rules import Finding, nproc_wanted, rule

MIB, GIB = 2**20, 2**30
LEAST_SHM, LEAST_FILES, LEAST_FREE, LEAST_LOCKED = 512 * MIB, 4096, 2 * GIB, 64 * MIB
SHARED = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cephfs", "fuse.ceph", "glusterfs", "fuse.glusterfs",
    "smb3", "cifs", "afs", "orangefs", "pvfs2", "wekafs", "panfs", "9p", "virtiofs", "fuse.sshfs", "fuse.gcsfuse",
    "fuse.s3fs", "fuse.juicefs", "ocfs2", "gfs2",
)  # fmt: skip
IN_MEMORY = ("tmpfs", "ramfs")


@rule
def processes_and_cores(facts: Facts) -> Iterator[Finding]:
    ranks = nproc_wanted(facts)
    if ranks > facts.cores:
        yield Finding(
            "warning",
            f"{ranks} processes on {facts.cores} core{'s' * (facts.cores > 1)} that this process may use",
            "they take turns; under Slurm, srun of 22.05 and later does not pass on --cpus-per-task",
            "srun --cpus-per-task=N (and export SRUN_CPUS_PER_TASK=N), or fewer processes",
        )


@rule
def threads_and_cores(facts: Facts) -> Iterator[Finding]:
    text, ranks = facts.env.get("OMP_NUM_THREADS", ""), nproc_wanted(facts)
    first = text.partition(",")[0].strip()  # of nested parallel regions, as in 4,1
    threads = int(first) if first.isdigit() else 0
    if text and not threads:
        yield Finding(
            "warning",
            f"OMP_NUM_THREADS={text} is no number of threads",
            "libgomp ignores it, and each process takes all cores",
            f"export OMP_NUM_THREADS={max(1, facts.cores // ranks)}",
        )
    if not text and ranks > 1 and facts.cores > 1:
        yield Finding(
            "note",
            f"OMP_NUM_THREADS is not set, for {ranks} processes on {facts.cores} cores",
            "`stepladder` shares the cores out; torchrun gives each process one thread, a plain start all",
            f"outside stepladder: export OMP_NUM_THREADS={max(1, facts.cores // ranks)}",
        )
    if threads * ranks > facts.cores and threads > 1:
        yield Finding(
            "warning",
            f"OMP_NUM_THREADS={threads} with {ranks} process{'es' * (ranks > 1)} on {facts.cores} cores",
            "more threads than cores wait for each other, spinning: it can be several times slower",
            f"export OMP_NUM_THREADS={max(1, facts.cores // ranks)}",
        )


@rule
def core_quota(facts: Facts) -> Iterator[Finding]:
    if facts.cores_quota is not None and facts.cores_quota < 0.95 * facts.cores:
        yield Finding(
            "warning",
            f"{facts.cores} cores are visible, but the control group may use {facts.cores_quota:g}",
            "a limit of the container or the batch job: programs that count cores start too many threads, and the"
            " kernel then halts them all in turn",
            f"--threads {max(1, int(facts.cores_quota))} in all, or docker run --cpuset-cpus instead of --cpus",
        )


@rule
def shared_memory(facts: Facts) -> Iterator[Finding]:
    if facts.shm_bytes is not None and facts.shm_bytes < LEAST_SHM:
        yield Finding(
            "warning",
            f"/dev/shm has {facts.shm_bytes / MIB:.0f} MiB",
            "data loader workers and NCCL pass data through it: `Bus error`, `No space left` (Docker: 64 MiB)",
            "docker run --shm-size=8g, or --ipc=host",
        )


@rule
def open_files(facts: Facts) -> Iterator[Finding]:
    if 0 <= facts.nofile < LEAST_FILES:
        can = facts.nofile_hard < 0 or facts.nofile_hard >= LEAST_FILES
        yield Finding(
            "warning",
            f"a process may have {facts.nofile} open files",
            "each data loader worker, connection and shared tensor takes some: `Too many open files`",
            "ulimit -n 65536"
            if can
            else f"ask for a higher hard limit than {facts.nofile_hard} (limits.conf, or Docker's --ulimit)",
        )


@rule
def locked_memory(facts: Facts) -> Iterator[Finding]:
    if facts.infiniband and 0 <= facts.memlock < LEAST_LOCKED:
        yield Finding(
            "error",
            f"InfiniBand, and {facts.memlock // 1024} KiB of memory may be locked",
            "it needs registered memory: NCCL fails with `ibv_reg_mr` or falls back to TCP",
            "ulimit -l unlimited (limits.conf; Slurm: LimitMEMLOCK=infinity in slurmd.service; Docker: --ulimit)",
        )


@rule
def run_folder(facts: Facts) -> Iterator[Finding]:
    folder = facts.folder
    if not folder.writable:
        yield Finding(
            "error",
            f"{folder.path} cannot be written",
            "runs are stored there",
            "--run-dir DIR, on a file system that this user may write to",
        )
    elif folder.free_bytes is not None and folder.free_bytes < LEAST_FREE:
        full = folder.free_bytes < MIB
        free = (
            f"{folder.free_bytes / GIB:.1f} GiB" if folder.free_bytes >= GIB else f"{folder.free_bytes // MIB} MiB"
        )
        yield Finding(
            "error" if full else "warning",
            f"{free} are free for {folder.path}",
            "no run can be stored there"
            if full
            else "a snapshot that does not fit leaves the one before it, but the run stops",
            "--run-dir DIR on another file system, or --keep 1",
        )
    if folder.kind in IN_MEMORY:
        yield Finding(
            "warning",
            f"{folder.path} is in memory ({folder.kind})",
            "snapshots take memory from the training, and are gone after a reboot",
            "--run-dir DIR on a disk",
        )


@rule
def shared_folder(facts: Facts) -> Iterator[Finding]:
    folder = facts.folder
    if facts.nodes > 1 and folder.kind and folder.kind not in SHARED:
        yield Finding(
            "error",
            f"{facts.nodes} nodes, and {folder.path} is on {folder.kind}, which only this machine sees",
            "nodes meet, and resume, in one run directory",
            "--run-dir DIR on a shared file system (df -T lists them)",
        )


@rule
def clock_skew(facts: Facts) -> Iterator[Finding]:
    skew = facts.folder.skew
    if skew is not None and abs(skew) > 1.0:
        yield Finding(
            "error" if facts.nodes > 1 and abs(skew) > 3.0 else "warning",
            f"the file system of {facts.folder.path} is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}",
            "heartbeats of nodes are compared by clock: beyond 3 s a living node looks lost",
            "chronyc tracking, or systemctl restart systemd-timesyncd, on all nodes",
        )

"""Rules for cores, shared memory, limits, and the folder of runs."""

from __future__ import annotations

from stepladder.core.numbers import parse_whole_number
from stepladder.tools.doctor.finding import Findings, Rule, problem
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


def _threads_and_cores(facts: Facts) -> Findings:
    text = facts.env.get("OMP_NUM_THREADS", "")
    ranks = facts.planned_ranks
    outermost = text.partition(",")[0].strip()  # of nested parallel regions, as in 4,1
    threads = parse_whole_number(outermost) or 0
    share = max(1, facts.cores // ranks)
    if text and not threads:
        yield problem("threads-and-cores.no-number", facts, share=share)
    if not text and ranks > 1 and facts.cores > 1:
        yield problem("threads-and-cores.not-set", facts, share=share)
    if threads * ranks > facts.cores and threads > 1:
        processes = "1 process" if ranks == 1 else f"{ranks} processes"
        yield problem("threads-and-cores", facts, threads=threads, processes=processes, share=share)


def _open_files(facts: Facts) -> Findings:
    if 0 <= facts.nofile < MIN_OPEN_FILES:
        has_low_limit = 0 <= facts.nofile_hard < MIN_OPEN_FILES
        yield problem("open-files.hard-limit" if has_low_limit else "open-files", facts)


def _run_folder(facts: Facts) -> Findings:
    folder = facts.folder
    free = folder.free_bytes
    if not folder.writable:
        yield problem("run-folder", facts)
    elif free is not None and free < MIN_FREE_BYTES:
        amount = f"{free // MIB_BYTES} MiB"
        if free >= GIB_BYTES:
            amount = f"{free / GIB_BYTES:.1f} GiB"
        name = "run-folder.full" if free < MIB_BYTES else "run-folder.nearly-full"
        yield problem(name, facts, amount=amount)
    if folder.kind in IN_MEMORY_FILE_SYSTEMS:
        yield problem("run-folder.in-memory", facts)


def _clock_skew(facts: Facts) -> Findings:
    skew = facts.folder.skew or 0.0
    if abs(skew) <= MAX_SKEW_S:
        return
    delays_heartbeats = facts.nodes > 1 and abs(skew) > MAX_SKEW_BETWEEN_NODES_S
    yield problem(
        "clock-skew.of-nodes" if delays_heartbeats else "clock-skew",
        facts,
        skew=abs(skew),
        direction="ahead" if skew > 0 else "behind",
    )


def _too_few_cores(facts: Facts) -> str:
    """Return the number of cores if there are fewer cores than processes."""
    if facts.planned_ranks <= facts.cores:
        return ""
    if facts.cores == 1:
        return "1 core"
    return f"{facts.cores} cores"


def _smaller_quota(facts: Facts) -> int:
    """Return the cores of the control group's quota if they are fewer than the visible ones."""
    quota = facts.cores_quota
    if quota is not None and quota < 0.95 * facts.cores:
        return max(1, int(quota))
    return 0


def _small_shared_memory(facts: Facts) -> str:
    size = facts.shm_bytes
    if size is None or size >= MIN_SHARED_MEMORY_BYTES:
        return ""
    return f"{size / MIB_BYTES:.0f} MiB"


def _small_locked_memory(facts: Facts) -> str:
    """Return the limit of locked memory if InfiniBand needs more."""
    if not facts.infiniband or not 0 <= facts.memlock < MIN_LOCKED_BYTES:
        return ""
    return f"{facts.memlock // 1024} KiB"


def _is_folder_unshared(facts: Facts) -> bool:
    kind = facts.folder.kind
    return facts.nodes > 1 and bool(kind) and kind not in SHARED_FILE_SYSTEMS


MACHINE_RULES: dict[str, Rule] = {
    "processes-and-cores": _too_few_cores,
    "threads-and-cores": _threads_and_cores,
    "core-quota": _smaller_quota,
    "shared-memory": _small_shared_memory,
    "open-files": _open_files,
    "locked-memory": _small_locked_memory,
    "run-folder": _run_folder,
    "shared-folder": _is_folder_unshared,
    "clock-skew": _clock_skew,
}

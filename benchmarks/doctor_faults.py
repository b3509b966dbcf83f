"""What doctor.py plants: a fault, and the findings that name it. Nothing else may be found beside
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """planted: in words.  named: a pattern for each finding, as `severity rule: what was found`.

    args: of doctor.  shell: runs before it, in the same shell, in an empty folder; $T is one that
    goes afterwards. where: "here"; "mounts", "network": with some of its own, which end with the
    process; "bundle" of this machine; "gpus", a bundle of one with two GPUs.  facts: what is
    changed in a bundle, by section, "" for none. imitated: a program or a folder stands for
    hardware."""

    planted: str
    named: tuple[str, ...] | str
    args: str = ""
    shell: str = ""
    env: dict[str, str] = field(default_factory=dict)
    where: str = "here"
    facts: Changes = field(default_factory=dict)
    imitated: bool = False

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.named,) if isinstance(self.named, str) else self.named

    @property
    def rules(self) -> list[str]:
        return [pattern.split()[1].rstrip(":") for pattern in self.patterns]

    @property
    def how(self) -> str:
        return (
            "bundle"
            if self.where in ("bundle", "gpus")
            else "imitated"
            if self.imitated
            else "real"
        )


def network(
    planted: str, named: tuple[str, ...] | str, args: str = "--peer peer", shell: str = ""
) -> Fault:
    return Fault(planted, named, args, shell, where="network")


def gpus(planted: str, named: tuple[str, ...] | str, facts: Changes) -> Fault:
    return Fault(planted, named, where="gpus", facts=facts)


GPU = {
    "index": 0, "name": "NVIDIA H100 80GB HBM3", "driver": "580.82.07", "mig": False, "capability": "9.0",
}  # fmt: skip
WITH_GPUS: Changes = {
    "gpus": {"found": [GPU, GPU | {"index": 1}], "on_bus": 2, "smi_error": "", "nvcc": ""},
    "torch": {
        "version": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "devices": 2,
        "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    },
}  # fmt: skip

RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.9.0.2",
    "MASTER_PORT": "29500",
}
ELASTIC = RANK | {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = BATCH | {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
}  # fmt: skip
ONE = {"OMP_NUM_THREADS": "1"}

BARE = """was=$PYTHON; $was -m venv --without-pip $T/bare; PYTHON=$T/bare/bin/python
at=$($PYTHON -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for name in click psutil; do ln -s $($was -c "import $name; print($name.__path__[0])") $at; done"""
# A module in a folder that comes first: it waits, then makes way for the one that it hides, if
# there is one.
SLOW = """mkdir $T/slow; export PYTHONPATH=$T/slow:$PYTHONPATH; cat > $T/slow/{1}.py <<END
import importlib, sys, time
time.sleep({0})
sys.path.remove("$T/slow")
sys.modules.pop(__name__)
importlib.invalidate_caches()
sys.modules[__name__] = importlib.import_module({2})
END"""
PROGRAM = 'mkdir $T/bin; export PATH=$T/bin:$PATH; printf "#!/bin/sh\\n%s\\n" "{1}" > $T/bin/{0}; chmod +x $T/bin/{0}'
HOSTS = 'printf "127.0.0.1 localhost\\n{}\\n" > $T/hosts; '
GROUP = """mkdir $CPU_GROUP
if [ -e $CPU_GROUP/cpu.max ]; then echo 50000 100000 > $CPU_GROUP/cpu.max
else echo 50000 > $CPU_GROUP/cpu.cfs_quota_us; fi
echo $$ > $CPU_GROUP/cgroup.procs"""
DISK = (
    "truncate -s 16M $T/disk; mkfs.ext4 -q $T/disk; mkdir $T/full; mount -o loop $T/disk $T/full; "
)
TAP = """ip addr flush dev eth0; ip tuntap add tap0 mode tap; ip addr add 10.9.0.1/24 dev tap0; ip link set tap0 up
$PYTHON -c "
import array, fcntl, socket, struct
link = array.array('B', struct.pack('=IIIHBB', 2, 0, 0, 100, 1, 0).ljust(44, bytes(1)))  # ETHTOOL_SSET, 100 Mbit/s
fcntl.ioctl(socket.socket(), 0x8946, struct.pack('16sP', b'tap0', link.buffer_info()[0]))
" """
BRIDGE = "ip link add {0} type bridge; ip addr add 10.7.0.1/24 dev {0}; ip link set {0} up; "
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
NONE_SEEN = {"devices": 0, "architectures": []}
HALF = r"warning core-quota: \d+ cores are visible, but the control group may use 0\.5"
BUSY = r"error port-in-use: port \d+ cannot be opened here: Address already in use"

FAULTS = [
    # torch
    Fault("facts of Python 3.10", r"error python-version: Python 3\.10\.12 ", where="bundle",
          facts={"": {"python": "3.10.12"}}),
    Fault("a virtual environment without torch",
          r"error torch-missing: torch is not installed for .*bare/bin/python$", shell=BARE),
    Fault("a damaged libc10.so in LD_LIBRARY_PATH", r"error torch-missing: .*libc10\.so: file too short",
          shell="echo > $T/libc10.so; export LD_LIBRARY_PATH=$T"),
    Fault("a file torch.py in this folder", r"error torch-missing: .*/torch\.py comes before",
          shell="echo > torch.py"),
    Fault("a file random.py in this folder", r"error torch-missing: .*/random\.py comes before",
          shell="echo > random.py"),
    Fault("an import that never ends", r"error torch-missing: import torch: no answer within 120 s",
          shell=SLOW.format(1000, "typing_extensions", "__name__")),
    Fault("ulimit -v 300000", r"error torch-missing: .* failed to map segment", shell="ulimit -v 300000"),
    Fault("torch on a file system without exec", r"error torch-missing: .* failed to map segment", where="mounts",
          shell="at=$($PYTHON -c 'import torch; print(torch.__path__[0])'); mount --bind $at $at; "
          "mount -o remount,bind,noexec $at"),
    Fault("facts of torch 2.4.1", r"error torch-version: torch 2\.4\.1", where="bundle",
          facts={"torch": {"version": "2.4.1+cpu"}}),
    Fault("facts of a torch without distributed", r"error torch-without-distributed: torch", where="bundle",
          facts={"torch": {"distributed": False, "nccl": ""}}),
    Fault("a CPU build of torch, and an nvidia-smi that lists a GPU",
          r"error torch-cpu-only: torch \S+ is a CPU build, on a machine with 1 NVIDIA GPU$", imitated=True,
          shell=PROGRAM.format("nvidia-smi", "echo '0, NVIDIA L4, 580.82.07, [N/A], 8.9, 23034'")),
    gpus("a CPU build beside two GPUs", r"error torch-cpu-only: .* CPU build, on a machine with 2 NVIDIA GPUs$",
         {"torch": {"cuda": "", "nccl": "", "devices": 0, "architectures": []}}),
    Fault("a module of torch's that takes 11 s",
          r"warning torch-import-time: .*slowest: typing_extensions 1\d\.",
          shell=SLOW.format(11, "typing_extensions", "__name__")),
    Fault("a script that imports a module of 16 s",
          r"warning script-imports: .*train\.py.* slowest: slow_module 1\d\.", "train.py",
          "echo import slow_module > train.py; " + SLOW.format(16, "slow_module", "'json'")),
    Fault("a script that imports what is not installed", r"error script-imports: .*train\.py.*'not_installed'",
          "train.py", "echo import not_installed > train.py"),
    # gpu
    Fault("an nvidia-smi that meets another driver",
          r"error driver-missing: nvidia-smi: .* Driver/library version mismatch", imitated=True,
          shell=PROGRAM.format("nvidia-smi", f"echo {MISMATCH}; exit 18")),
    Fault("an nvidia-smi that does not answer", r"error driver-missing: nvidia-smi: no answer within 20 s",
          shell=PROGRAM.format("nvidia-smi", "exec sleep 1000"), imitated=True),
    gpus("GPUs on the bus, no nvidia-smi", r"error driver-missing: 2 NVIDIA GPUs, but nvidia-smi: missing",
         {"gpus": {"found": [], "smi_error": "missing"}, "torch": NONE_SEEN}),
    gpus("driver 535 for CUDA 13", r"error driver-too-old: driver 535\.104\.05 .* CUDA 13\.0",
         {"gpus": {"found": [GPU | {"driver": "535.104.05"}]}, "torch": NONE_SEEN}),
    gpus('CUDA_VISIBLE_DEVICES=""', r"error cuda-unavailable: 2 GPUs, but torch \S+ sees none",
         {"env": {"CUDA_VISIBLE_DEVICES": ""}, "torch": NONE_SEEN}),
    gpus("CUDA error 802", r"error cuda-unavailable: 2 GPUs, but torch \S+ sees none",
         {"torch": NONE_SEEN | {"cuda_error": "Error 802: system not yet initialized"}}),
    gpus("a GPU from before the build",
         r"error gpu-too-new-or-old: GPU 0 \(Tesla V100\) has compute capability 7\.0",
         {"gpus": {"found": [GPU | {"name": "Tesla V100", "capability": "7.0"}]}, "torch": {"devices": 1}}),
    gpus("a compiler of CUDA 12.4", r"warning nvcc-differs: nvcc is of CUDA 12\.4, torch is built for 13\.0",
         {"gpus": {"nvcc": "12.4"}}),
    gpus("MIG on the second GPU", r"warning mig: MIG divides GPU 1",
         {"gpus": {"found": [GPU, GPU | {"index": 1, "mig": True}]}}),
    gpus("CUDA_VISIBLE_DEVICES=0,5", r"error visible-devices: CUDA_VISIBLE_DEVICES=0,5, but .* GPUs 0 to 1",
         {"env": {"CUDA_VISIBLE_DEVICES": "0,5"}, "torch": {"devices": 1}}),
    gpus("4 processes", r"warning more-ranks-than-gpus: 4 processes on this machine, and 2 GPUs",
         {"": {"nproc": 4, "cores": 16}, "env": ONE}),
    gpus("a step of 2 tasks with --gpus-per-task=1",
         r"warning more-ranks-than-gpus: 2 processes on this machine, and 1 GPU that",
         {"env": STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}, "torch": {"devices": 1}}),
    gpus("torch with CUDA and without NCCL", r"error nccl-missing: torch \S+ has CUDA 13\.0, but no NCCL",
         {"torch": {"nccl": ""}}),
    # machine
    Fault("2 processes on one core (taskset)", r"warning processes-and-cores: 2 processes on 1 core ",
          "--nproc 2", "taskset -cp $CPU $$ > $T/log", ONE),
    Fault("OMP_NUM_THREADS not set, 2 processes",
          r"note threads-and-cores: OMP_NUM_THREADS is not set, for 2 processes", "--nproc 2"),
    Fault("OMP_NUM_THREADS=64, 2 processes", r"warning threads-and-cores: OMP_NUM_THREADS=64 with 2 processes",
          "--nproc 2", env={"OMP_NUM_THREADS": "64"}),
    Fault("OMP_NUM_THREADS=all", r"warning threads-and-cores: OMP_NUM_THREADS=all is no number",
          env={"OMP_NUM_THREADS": "all"}),
    Fault("half a core (cgroup of a batch job)", HALF, shell=GROUP),
    Fault("half a core (cgroup of a container)", HALF, where="mounts",
          shell=GROUP + """; exec unshare --cgroup sh -ec 'mount --bind $CPU_GROUP $CPU_ROOT; eval "$DOCTOR"' """),
    Fault("/dev/shm of 64 MiB", r"warning shared-memory: /dev/shm has 64 MiB", where="mounts",
          shell="mount -t tmpfs -o size=64m tmpfs /dev/shm"),
    Fault("ulimit -n 512", r"warning open-files: a process may have 512 open files", shell="ulimit -Sn 512"),
    Fault("ulimit -l 64, an InfiniBand card", r"error locked-memory: InfiniBand, and 64 KiB", where="mounts",
          shell="ulimit -l 64; mount -t tmpfs tmpfs /sys/class; mkdir /sys/class/infiniband", imitated=True),
    Fault("a run directory mounted read-only", r"error run-folder: .*ro/runs cannot be written",
          "--run-dir $T/ro/runs", "mkdir $T/ro; mount --bind $T/ro $T/ro; mount -o remount,bind,ro $T/ro",
          where="mounts"),
    Fault("a run directory that is a file", r"error run-folder: .*/runs cannot be written",
          "--run-dir $T/runs", "echo > $T/runs"),
    Fault("a run directory on a full disk", r"error run-folder: 0 MiB are free for .*full/runs",
          "--run-dir $T/full/runs", DISK + "cat /dev/zero > $T/full/zeros 2> $T/log || true", where="mounts"),
    Fault("a run directory on a disk of 16 MiB", r"warning run-folder: \d+ MiB are free for .*full/runs",
          "--run-dir $T/full/runs", DISK, where="mounts"),
    Fault("a run directory in /dev/shm", r"warning run-folder: /dev/shm/runs is in memory",
          "--run-dir /dev/shm/runs"),
    network("2 nodes, a run directory on a local disk", r"error shared-folder: 2 nodes, and runs is on",
            "--nodes 2"),
    Fault("a file system 4.2 s ahead", r"warning clock-skew: the file system of runs is 4\.2 s ahead",
          where="bundle", facts={"folder": {"skew": 4.2}}),
    # network
    network("a name that is 127.0.1.1 in /etc/hosts", r"error own-name: this machine's name \S+ is 127\.0\.1\.1,",
            shell=HOSTS.format("127.0.1.1 $NAME\\n10.9.0.2 peer")),
    network("a name without an address", r"warning own-name: this machine's name \S+ has no address",
            shell=HOSTS.format("10.9.0.2 peer")),
    network("a peer that does not resolve", r"error peer-unknown: no-such-host\.invalid: ",
            "--peer no-such-host.invalid"),
    network("a peer without a route", r"error peer-unknown: 203\.0\.113\.9: Network is unreachable",
            "--peer 203.0.113.9"),
    network("a peer that is 127.0.1.1 in /etc/hosts",
            r"error peer-route: peer resolves to 127\.0\.1\.1, this machine itself",
            shell=HOSTS.format("10.9.0.1 $NAME\\n127.0.1.1 peer")),
    network("a peer that has this machine's address",
            r"error peer-route: peer resolves to 10\.9\.0\.1, this machine itself",
            shell=HOSTS.format("10.9.0.1 $NAME peer")),
    network("a peer behind docker0", r"warning peer-route: the way to peer leads through docker0 \(10\.7\.0\.1\)",
            shell=BRIDGE.format("docker0") + HOSTS.format("10.9.0.1 $NAME\\n10.7.0.9 peer")),
    network("a peer behind podman0", r"warning peer-route: the way to peer leads through podman0 \(10\.7\.0\.1\)",
            shell=BRIDGE.format("podman0") + HOSTS.format("10.9.0.1 $NAME\\n10.7.0.9 peer")),
    network("a peer behind a card of 100 Mbit/s",
            r"warning peer-route: the way to peer leads through tap0, 100 Mbit/s", shell=TAP),
    Fault("GLOO_SOCKET_IFNAME=^lo", r"error named-interface: GLOO_SOCKET_IFNAME=\^lo",
          env={"GLOO_SOCKET_IFNAME": "^lo"}),
    network("GLOO_SOCKET_IFNAME=ib7", r"error named-interface: GLOO_SOCKET_IFNAME=ib7, and the interfaces are",
            shell="export GLOO_SOCKET_IFNAME=ib7"),
    network("NCCL_SOCKET_IFNAME=ib7", r"error named-interface: NCCL_SOCKET_IFNAME=ib7, and the interfaces are",
            shell="export NCCL_SOCKET_IFNAME=ib7"),
    network("NCCL_SOCKET_IFNAME=lo for a peer",
            r"warning named-interface: NCCL_SOCKET_IFNAME=lo, but eth0 leads to peer",
            shell="export NCCL_SOCKET_IFNAME=lo"),
    network("NCCL_SOCKET_IFNAME=^eth for a peer",
            r"warning named-interface: NCCL_SOCKET_IFNAME=\^eth, but eth0 leads to peer",
            shell="export NCCL_SOCKET_IFNAME=^eth"),
    network("GLOO_SOCKET_IFNAME=lo for a peer",
            r"warning named-interface: GLOO_SOCKET_IFNAME=lo, but eth0 leads to peer",
            shell="export GLOO_SOCKET_IFNAME=lo"),
    network("a second network card", r"note several-interfaces: of eth0, eth1, eth0 \(10\.9\.0\.1\) leads to peer",
            shell=BRIDGE.format("eth1")),
    network("IPv6 off, and a peer that has nothing else", r"error ipv6: peer has only IPv6 addresses",
            shell=HOSTS.format("10.9.0.1 $NAME\\n2001:db8::2 peer")
            + "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"),
    network("a peer by its link-local address", r"error ipv6: fe80::2%eth0 is fe80::2, a link-local address",
            "--peer fe80::2%eth0"),
    Fault("a port that another process holds", BUSY, "--port $PORT"),
    Fault("MASTER_PORT that another process holds", BUSY, shell="export MASTER_PORT=$PORT"),
    Fault("MASTER_PORT=99999", r"error port-in-use: port 99999 cannot be opened here: .* must be 0-65535",
          env={"MASTER_PORT": "99999"}),
    # launch
    Fault("RANK and WORLD_SIZE alone", r"error half-set: RANK=1 is set without LOCAL_RANK and MASTER_ADDR",
          env={"RANK": "1", "WORLD_SIZE": "2"}),
    Fault("RANK alone", r"error half-set: WORLD_SIZE is not set", env={"RANK": "0"}),
    Fault("RANK=2 with WORLD_SIZE=2", r"error half-set: RANK=2 with WORLD_SIZE=2", env=RANK | {"RANK": "2"}),
    Fault("srun -n 4 torchrun", r"error slurm-and-torchrun: torchrun inside a Slurm step with 4 tasks",
          env=STEP | ELASTIC),
    Fault("RANK=$SLURM_PROCID in the batch script",
          r"error slurm-and-torchrun: RANK=0, WORLD_SIZE=4 in task 1 of 4",
          env=STEP | RANK | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}),
    Fault("a batch script of 4 tasks, no srun", r"note slurm-tasks-without-a-step: an allocation of 4 tasks",
          env=BATCH),
    Fault("SLURM_CPUS_PER_TASK=8, one core (taskset)",
          r"warning slurm-cores: SLURM_CPUS_PER_TASK=8, but this task may use 1",
          shell="taskset -cp $CPU $$ > $T/log", env=STEP | {"SLURM_CPUS_PER_TASK": "8"}),
    Fault("WORLD_SIZE=1 of RunPod", r"warning world-size-alone: WORLD_SIZE=1 without RANK",
          env={"WORLD_SIZE": "1", "RUNPOD_POD_ID": "x"}),
    Fault("MASTER_ADDR=localhost on 2 nodes", r"error local-master: MASTER_ADDR=localhost with 2 nodes",
          env=ELASTIC | {"MASTER_ADDR": "localhost", "GROUP_WORLD_SIZE": "2"}),
    # two at once
    Fault("/dev/shm of 64 MiB, ulimit -n 512",
          (r"warning shared-memory: .* 64 MiB", r"warning open-files: .* 512 open"), where="mounts",
          shell="mount -t tmpfs -o size=64m tmpfs /dev/shm; ulimit -Sn 512"),
    Fault("no torch, RANK and WORLD_SIZE alone",
          (r"error torch-missing: torch is not installed", r"error half-set: RANK=1 is set without"),
          shell=BARE, env={"RANK": "1", "WORLD_SIZE": "2"}),
    network("a name that is 127.0.1.1, GLOO_SOCKET_IFNAME=ib7",
            (r"error own-name: .* 127\.0\.1\.1", r"error named-interface: GLOO_SOCKET_IFNAME=ib7"),
            shell=HOSTS.format("127.0.1.1 $NAME\\n10.9.0.2 peer") + "export GLOO_SOCKET_IFNAME=ib7"),
]  # fmt: skip

# What looks like a fault and is none: nothing may be said.
HARMLESS = [
    Fault("a rank of torchrun", (), env=ELASTIC),
    Fault("torchrun in a batch script of 4 tasks per node", (),
          env=BATCH | {"SLURM_NTASKS_PER_NODE": "4"} | ELASTIC),
    Fault("a task of a Slurm step", (), env=STEP),
    network("NCCL_SOCKET_IFNAME=^docker,lo for a peer", (), shell="export NCCL_SOCKET_IFNAME=^docker,lo"),
    network("docker0 beside the way to a peer", (), shell=BRIDGE.format("docker0")),
    Fault("OMP_NUM_THREADS=1,1, 2 processes", (), "--nproc 2", env={"OMP_NUM_THREADS": "1,1"}),
    Fault("ulimit -l 64 without InfiniBand", (), shell="ulimit -l 64"),
    gpus("CUDA_VISIBLE_DEVICES=1 of two GPUs", (),
         {"env": {"CUDA_VISIBLE_DEVICES": "1"}, "torch": {"devices": 1}}),
    gpus("a GPU older than the newest kernels", (),
         {"gpus": {"found": [GPU | {"capability": "8.9"}]}, "torch": {"devices": 1}}),
]  # fmt: skip

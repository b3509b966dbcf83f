"""Each rule on facts that make it fire, and on facts near by that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from machines import CPU, ETH, GPUS, H100, LO, PEER, TWO, WELL
from stepladder.tools.doctor.machine_facts import Facts
from stepladder.tools.doctor.network import Interface
from stepladder.tools.doctor.programs import SHADOWS_MODULE, Gpus, Imports
from stepladder.tools.doctor.rules import RULES, apply_rules
from stepladder.tools.findings.finding import SEVERITIES

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
}


def env(facts: Facts = WELL, **variables: str) -> Facts:
    return replace(facts, env=variables)


def folder(facts: Facts = WELL, **parts: Any) -> Facts:
    return replace(facts, folder=replace(facts.folder, **parts))


def torch(facts: Facts = GPUS, **parts: Any) -> Facts:
    return replace(facts, torch=replace(facts.torch, **parts))


def peer(**parts: Any) -> Facts:
    return replace(PEER, peer=replace(PEER.peer, **parts))


def gpu(**parts: Any) -> Facts:
    return replace(GPUS, gpus=replace(TWO, found=(replace(H100, **parts),)))


DOCKER = Interface("docker0", ("172.17.0.1",))
SLOW_ETH = replace(ETH, speed_mbit=100)
SLOWEST = (("scipy", 9.0), ("numpy", 2.5), ("re", 0.04))

# rule: facts that make it fire, a part of what it then says, and facts that do not
CASES: dict[str, list[tuple[Facts, str, Facts]]] = {
    "python-version": [
        (replace(WELL, python="3.10.12"), "Python 3.10.12", replace(WELL, python="3.12.0"))
    ],
    "torch-missing": [
        (
            torch(WELL, version="", error="ModuleNotFoundError: No module named 'torch'"),
            "not installed",
            WELL,
        ),
        (torch(WELL, version="", error="no answer within 120 s"), "no answer within 120 s", WELL),
        (
            torch(WELL, version="", error="libtorch_cpu.so: failed to map segment"),
            "failed to map",
            WELL,
        ),
        (
            torch(WELL, version="", error="/x/random.py" + SHADOWS_MODULE),
            "/x/random.py comes before the module",
            WELL,
        ),
        (
            torch(WELL, version="", error="OSError: libcudnn.so.9: cannot open"),
            "cannot be imported: OSError",
            WELL,
        ),
    ],
    "torch-version": [
        (torch(WELL, version="2.4.1+cpu"), "torch 2.4.1", torch(WELL, version="2.11.0"))
    ],
    "torch-without-distributed": [
        (torch(WELL, distributed=False), "without torch.distributed", WELL)
    ],
    "torch-cpu-only": [
        (replace(GPUS, torch=CPU), "CPU build, on a machine with 2 NVIDIA GPUs", GPUS),
        (replace(WELL, gpus=Gpus(on_bus=1, smi_error="missing")), "with 1 NVIDIA GPU", WELL),
    ],
    "torch-import-time": [
        (
            torch(WELL, seconds=40.0, slowest=SLOWEST),
            "(more than 10); slowest: scipy 9.0 s, numpy 2.5 s",
            WELL,
        )
    ],
    "script-imports": [
        (
            replace(WELL, script=Imports(20.0, SLOWEST, "", "a.py")),
            "what a.py imports takes 20 s",
            WELL,
        ),
        (
            replace(
                WELL,
                script=Imports(error="ModuleNotFoundError: No module named 'h5py'", name="a.py"),
            ),
            "what a.py imports fails: ModuleNotFoundError: No module named 'h5py'",
            replace(WELL, script=Imports(1.0, SLOWEST, "", "a.py")),
        ),
    ],
    "driver-missing": [
        (
            replace(WELL, gpus=Gpus(on_bus=2, smi_error="missing")),
            "2 NVIDIA GPUs, but nvidia-smi: missing",
            GPUS,
        ),
        (
            replace(
                WELL,
                gpus=Gpus(smi_error="Failed to initialize NVML: Driver/library version mismatch"),
            ),
            "version mismatch",
            replace(WELL, gpus=Gpus(smi_error="missing")),
        ),
        (
            replace(WELL, gpus=Gpus(on_bus=1, smi_error="No devices")),
            "1 NVIDIA GPU, but nvidia-smi: No",
            WELL,
        ),
    ],
    "driver-too-old": [
        (
            gpu(driver="470.82.01"),
            "driver 470.82.01 with torch 2.13.0+cu126",
            gpu(driver="525.60.13"),
        ),
        (torch(cuda="13.0"), "built for CUDA 13.0", torch(cuda="11.8")),
    ],
    "cuda-unavailable": [
        (replace(torch(devices=0), env={"CUDA_VISIBLE_DEVICES": ""}), "2 GPUs, but torch", GPUS),
        (
            torch(devices=0, cuda_error="CUDA error 802: system not yet initialized"),
            "sees none",
            GPUS,
        ),
    ],
    "gpu-too-new-or-old": [
        (gpu(capability="12.0"), "capability 12.0; torch has sm_80 sm_90", gpu(capability="8.6")),
        (
            gpu(capability="7.0"),
            "has compute capability 7.0",
            torch(gpu(capability="12.0"), architectures=("compute_90",)),
        ),
    ],
    "nvcc-differs": [
        (
            replace(GPUS, gpus=replace(TWO, nvcc="11.8")),
            "nvcc is of CUDA 11.8",
            replace(GPUS, gpus=replace(TWO, nvcc="12.1")),
        )
    ],
    "mig": [(gpu(mig=True), "MIG divides GPU 0", GPUS)],
    "visible-devices": [
        (
            env(GPUS, CUDA_VISIBLE_DEVICES="0,5"),
            "GPUs 0 to 1",
            env(GPUS, CUDA_VISIBLE_DEVICES="1,0"),
        ),
        (
            env(GPUS, CUDA_VISIBLE_DEVICES="2"),
            "CUDA_VISIBLE_DEVICES=2",
            env(GPUS, CUDA_VISIBLE_DEVICES="MIG-1"),
        ),
    ],
    "more-ranks-than-gpus": [
        (replace(GPUS, nproc=4), "4 processes on this machine, and 2 GPUs", replace(GPUS, nproc=2)),
        (
            env(torch(devices=1), **STEP, SLURM_STEP_TASKS_PER_NODE="2(x3),1"),
            "2 processes on this machine, and 1 GPU that torch sees",
            env(torch(devices=1), CUDA_VISIBLE_DEVICES="1"),
        ),
    ],
    "nccl-missing": [(torch(nccl=""), "but no NCCL", torch(WELL, cuda="12.6", nccl=""))],
    "processes-and-cores": [
        (replace(WELL, nproc=17), "17 processes on 16 cores", replace(WELL, nproc=16)),
        (replace(WELL, cores=1, nproc=2), "2 processes on 1 core that", replace(WELL, cores=1)),
    ],
    "threads-and-cores": [
        (
            replace(env(OMP_NUM_THREADS="8"), nproc=4),
            "OMP_NUM_THREADS=8 with 4 processes",
            env(OMP_NUM_THREADS="16"),
        ),
        (
            env(OMP_NUM_THREADS="all"),
            "OMP_NUM_THREADS=all is not a number",
            env(OMP_NUM_THREADS="4,1"),
        ),
        (
            replace(WELL, nproc=2),
            "OMP_NUM_THREADS is not set",
            replace(env(OMP_NUM_THREADS="1"), nproc=16),
        ),
    ],
    "core-quota": [(replace(WELL, cores_quota=2.0), "may use 2", replace(WELL, cores_quota=16.0))],
    "shared-memory": [
        (replace(WELL, shm_bytes=64 * 2**20), "/dev/shm has 64 MiB", replace(WELL, shm_bytes=None))
    ],
    "open-files": [
        (replace(WELL, nofile=1024), "1024 open files", replace(WELL, nofile=-1)),
        (replace(WELL, nofile=1024, nofile_hard=2048), "1024 open files", WELL),
    ],
    "locked-memory": [
        (
            replace(WELL, infiniband=True, memlock=65536),
            "64 KiB of memory may be locked",
            replace(WELL, memlock=65536),
        ),
        (
            replace(WELL, infiniband=True, memlock=0),
            "0 KiB",
            replace(WELL, infiniband=True, memlock=-1),
        ),
    ],
    "run-folder": [
        (folder(writable=False), "runs cannot be written", WELL),
        (folder(free_bytes=2**30), "1.0 GiB are free", folder(free_bytes=None)),
        (folder(free_bytes=4096), "0 MiB are free", folder(free_bytes=3 * 2**30)),
        (folder(kind="tmpfs"), "in memory", WELL),
    ],
    "shared-folder": [
        (
            replace(WELL, nodes=2),
            "2 nodes, and runs is on ext4",
            folder(replace(WELL, nodes=2), kind="nfs4"),
        ),
        (folder(replace(WELL, nodes=2), kind="overlay"), "overlay", WELL),
    ],
    "clock-skew": [
        (folder(skew=4.2), "4.2 s ahead", folder(skew=0.4)),
        (folder(replace(WELL, nodes=2), skew=-5.0), "5.0 s behind", folder(skew=None)),
    ],
    "own-name": [
        (
            replace(WELL, nodes=2, own_addresses=("127.0.1.1",)),
            "n1 is 127.0.1.1",
            replace(WELL, own_addresses=("127.0.1.1",)),
        ),
        (replace(PEER, own_addresses=()), "n1 has no address", PEER),
    ],
    "peer-unknown": [
        (
            peer(addresses=(), error="Name or service not known"),
            "n2: Name or service not known",
            replace(
                peer(addresses=("2001:db8::2",), error="Cannot assign requested address"),
                ipv6=False,
            ),
        )
    ],
    "peer-route": [
        (
            peer(addresses=("127.0.1.1",), source="127.0.0.1", interface="lo"),
            "n2 resolves to 127.0.1.1",
            PEER,
        ),
        (peer(addresses=("10.0.0.1",)), "n2 resolves to 10.0.0.1, this machine itself", PEER),
        (peer(source="10.88.0.1", interface="podman0"), "leads through podman0", PEER),
        (
            replace(peer(source="172.17.0.1", interface="docker0"), interfaces=(ETH, DOCKER, LO)),
            "leads through docker0 (172.17.0.1)",
            replace(PEER, interfaces=(ETH, DOCKER, LO)),
        ),
        (replace(PEER, interfaces=(SLOW_ETH, LO)), "eth0, 100 Mbit/s", PEER),
    ],
    "named-interface": [
        (env(GLOO_SOCKET_IFNAME="^lo"), "GLOO_SOCKET_IFNAME=^lo", env(NCCL_SOCKET_IFNAME="^lo")),
        (
            env(GLOO_SOCKET_IFNAME="eth1"),
            "the interfaces are eth0, lo",
            env(GLOO_SOCKET_IFNAME="eth0"),
        ),
        (env(NCCL_SOCKET_IFNAME="=eth"), "NCCL_SOCKET_IFNAME==eth", env(NCCL_SOCKET_IFNAME="eth")),
        (
            env(PEER, NCCL_SOCKET_IFNAME="lo"),
            "but eth0 leads to n2",
            env(PEER, NCCL_SOCKET_IFNAME="eth0"),
        ),
        (
            env(PEER, NCCL_SOCKET_IFNAME="^eth"),
            "but eth0 leads to n2",
            env(PEER, NCCL_SOCKET_IFNAME="^docker,lo"),
        ),
        (
            env(PEER, NCCL_SOCKET_IFNAME="^=eth0"),
            "but eth0 leads to n2",
            env(PEER, NCCL_SOCKET_IFNAME="^=eth"),
        ),
        (
            env(PEER, GLOO_SOCKET_IFNAME="lo"),
            "=lo, but eth0 leads to n2",
            env(PEER, GLOO_SOCKET_IFNAME="lo,eth0"),
        ),
    ],
    "several-interfaces": [
        (
            replace(PEER, interfaces=(ETH, Interface("ib0", ("10.1.0.1",)), LO)),
            "of eth0, ib0, eth0 (10.0.0.1) leads to n2",
            replace(PEER, interfaces=(ETH, DOCKER, LO)),
        )
    ],
    "ipv6": [
        (
            replace(peer(addresses=("2001:db8::2",)), ipv6=False),
            "n2 has only IPv6",
            peer(addresses=("2001:db8::2",)),
        ),
        (peer(addresses=("fe80::2%eth0",)), "n2 is fe80::2%eth0, a link-local", PEER),
    ],
    "port-in-use": [
        (
            replace(WELL, port=29500, port_error="Address already in use"),
            "port 29500",
            replace(WELL, port=29500),
        )
    ],
    "half-set": [(env(RANK="1", WORLD_SIZE="2"), "RANK=1 is set without", env(**TORCHRUN))],
    "slurm-and-torchrun": [
        (
            env(**TORCHRUN, TORCHELASTIC_RUN_ID="x", **STEP, SLURM_STEP_TASKS_PER_NODE="2"),
            "torchrun inside a Slurm step with 2 tasks",
            env(**TORCHRUN, TORCHELASTIC_RUN_ID="x", **STEP, SLURM_STEP_TASKS_PER_NODE="1(x2)"),
        ),
        (
            env(**TORCHRUN, TORCHELASTIC_RUN_ID="x", **STEP, SLURM_STEP_TASKS_PER_NODE="2"),
            "torchrun",
            env(**TORCHRUN, TORCHELASTIC_RUN_ID="x", SLURM_JOB_ID="7", SLURM_NTASKS_PER_NODE="2"),
        ),
        (
            env(**STEP, **TORCHRUN | {"RANK": "0"}),
            "RANK=0, WORLD_SIZE=2 in task 1 of 2",
            env(**STEP, **TORCHRUN),
        ),
    ],
    "slurm-tasks-without-a-step": [
        (env(SLURM_JOB_ID="7", SLURM_NTASKS="4"), "allocation of 4 tasks", env(**STEP)),
        (
            env(SLURM_JOB_ID="7", SLURM_NTASKS="4"),
            "of 4",
            env(SLURM_JOB_ID="7", SLURM_NTASKS="4", **TORCHRUN),
        ),
    ],
    "slurm-cores": [
        (
            replace(env(**STEP, SLURM_CPUS_PER_TASK="8"), cores=1),
            "task may use 1",
            env(**STEP, SLURM_CPUS_PER_TASK="8"),
        )
    ],
    "world-size-alone": [
        (env(WORLD_SIZE="1", RUNPOD_POD_ID="x"), "WORLD_SIZE=1 without RANK", env(**TORCHRUN)),
        (env(WORLD_SIZE="1"), "WORLD_SIZE=1 without RANK", WELL),
    ],
    "local-master": [
        (
            env(MASTER_ADDR="localhost", SLURM_STEP_NUM_NODES="2"),
            "localhost with 2 nodes",
            env(MASTER_ADDR="localhost"),
        ),
        (
            replace(env(MASTER_ADDR="127.0.0.1"), nodes=2),
            "127.0.0.1 with 2",
            replace(env(MASTER_ADDR="n1"), nodes=2),
        ),
    ],
}


def fired(facts: Facts) -> dict[str, str]:
    return {finding.rule: finding.evidence for finding in apply_rules(facts)}


@pytest.mark.parametrize(
    ("name", "fires", "says", "silent"),
    [
        pytest.param(name, *case, id=f"{name}-{n}")
        for name, cases in CASES.items()
        for n, case in enumerate(cases)
    ],
)
def test_the_rule_fires_and_does_not(name: str, fires: Facts, says: str, silent: Facts) -> None:
    assert says in fired(fires)[name]
    assert name not in fired(silent)


def test_every_rule_has_its_cases() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize(
    "facts", [WELL, GPUS, PEER, env(GPUS, **TORCHRUN)], ids=["cpu", "gpus", "peer", "torchrun"]
)
def test_a_machine_without_faults_has_no_findings(facts: Facts) -> None:
    assert [f for f in apply_rules(facts) if f.severity != "note"] == []


def test_findings_are_whole_and_errors_come_first() -> None:
    findings = [f for cases in CASES.values() for fires, _, _ in cases for f in apply_rules(fires)]
    assert all(f.evidence and f.cause and f.fix and f.rule for f in findings)
    assert {f.severity for f in findings} == set(SEVERITIES)
    order = [
        SEVERITIES.index(f.severity)
        for f in apply_rules(replace(env(WORLD_SIZE="1"), python="3.9.1", nproc=2))
    ]
    assert order == sorted(order) == [0, 1, 2]

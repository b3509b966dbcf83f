"""Machines as doctor sees them: with GPUs, without, and beside another one."""

from __future__ import annotations

from dataclasses import replace

from stepladder.tools.doctor.machine_facts import Facts, Folder
from stepladder.tools.doctor.network import Interface, Peer
from stepladder.tools.doctor.programs import Gpu, Gpus, Torch

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", "550.54.15", capability="9.0")
TWO = Gpus((H100, replace(H100, index=1)), on_bus=2)
CUDA = Torch(
    "2.13.0+cu126",
    cuda="12.6",
    nccl="2.27.5",
    devices=2,
    architectures=("sm_80", "sm_90"),
    seconds=2.0,
)
CPU = Torch("2.13.0+cpu", seconds=2.0)
ETH = Interface("eth0", ("10.0.0.1", "fe80::1"), True, 25_000)
LO = Interface("lo", ("127.0.0.1", "::1"))
WELL = Facts(
    host="n1",
    python="3.11.7",
    torch=CPU,
    cores=16,
    shm_bytes=8 * 2**30,
    nofile=65536,
    nofile_hard=65536,
    folder=Folder("runs", "ext4", 100 * 2**30, True, 0.0),
    interfaces=(ETH, LO),
    own_addresses=("10.0.0.1",),
)
GPUS = replace(WELL, torch=CUDA, gpus=TWO)
PEER = replace(WELL, peer=Peer("n2", ("10.0.0.2",), "10.0.0.1", "eth0"))

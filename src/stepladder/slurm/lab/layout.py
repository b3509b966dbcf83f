"""What a lab consists of, and the configuration files that say so to Slurm. Pure: nothing is
started here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PARTITION, URGENT = "lab", "urgent"
MOST_NODES = 64
UP = "up"  # among the daemons, the command that starts the others
SECONDS_UNTIL_DOWN = (
    10  # without a word from a node's slurmd; Slurm takes up to three times as long
)
SECONDS_TO_ANSWER = (
    15  # for a daemon without a core. A command waits as long for a controller that is not there
)
SECONDS_UNTIL_REQUEUED = (
    10  # a credential's life, which a requeued job waits for; Slurm's own default is 120
)

POLICY = f"""\
# No cgroups: the lab runs in containers too. More CPUs than the machine has may be declared.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
MailProg=/bin/true
GresTypes=gpu
ReturnToService=2
SlurmdTimeout={SECONDS_UNTIL_DOWN}
MessageTimeout={SECONDS_TO_ANSWER}
KillWait=10
MinJobAge=86400
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
PARTITIONS = f"""\
PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName={URGENT} Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Node:
    """One node. device: the host's end of its cable, and the name of its network namespace; "" if
    plain.
    """

    name: str
    address: str
    address6: str
    port: int
    device: str


@dataclass(frozen=True)
class Layout:
    """A lab, before anything of it exists.

    folder: where all its files are.  cpus, gpus: pretended, per node.  memory: MiB per node.
    plain: all nodes on the loopback address.  number: its subnet's, 1 to 254, so that several labs
    fit one machine; 0: none yet. ports: slurmctld's and then, if plain, one per node.  host, user:
    of this machine, for Slurm."""

    folder: Path
    nodes: int
    cpus: int
    gpus: int
    memory: int
    plain: bool
    number: int
    ports: tuple[int, ...]
    host: str
    user: str

    def check(self, folder: Path) -> None:
        """Raises ValueError where no lab of that folder can have it: `down` removes what it names."""
        if self.folder != folder:
            raise ValueError(f"it is of a lab in {self.folder}")
        ports = 1 + self.nodes * self.plain
        if not (
            0 < self.nodes <= MOST_NODES and 0 <= self.number < 255 and len(self.ports) == ports
        ):
            raise ValueError(
                f"no lab has {self.nodes} nodes, number {self.number} and {len(self.ports)} ports"
            )

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def hosts(self) -> Path:
        return self.folder / "hosts"

    @property
    def socket(self) -> Path:
        return self.folder / "munge.socket"

    @property
    def bridge(self) -> str:
        return f"sl{self.number}"

    @property
    def address(self) -> str:
        """The host's, as nodes reach it."""
        return "127.0.0.1" if self.plain else f"10.213.{self.number}.1"

    @property
    def address6(self) -> str:
        return "::1" if self.plain else f"fd00:213:{self.number:x}::1"

    @cached_property
    def all_nodes(self) -> tuple[Node, ...]:
        return tuple(self._node(place) for place in range(1, self.nodes + 1))

    def _node(self, place: int) -> Node:
        name = f"n{place}"
        if self.plain:
            return Node(name, "127.0.0.1", "::1", self.ports[place], "")
        subnet, subnet6 = self.address.rpartition(".")[0], self.address6.rpartition(":")[0]
        return Node(
            name, f"{subnet}.{10 + place}", f"{subnet6}:{10 + place}", 6818, f"{self.bridge}{name}"
        )


def slurm_conf(layout: Layout) -> str:
    folder = layout.folder
    gres = f" Gres=gpu:{layout.gpus}" if layout.gpus else ""
    nodes = "\n".join(
        f"NodeName={node.name} NodeHostname={layout.host if layout.plain else node.name} NodeAddr={node.address}"
        f" Port={node.port} CPUs={layout.cpus} RealMemory={layout.memory}{gres}"
        for node in layout.all_nodes
    )
    return f"""\
ClusterName=lab
SlurmctldHost={layout.host}({layout.address})
SlurmctldPort={layout.ports[0]}
SlurmUser={layout.user}
SlurmdUser={layout.user}
AuthType=auth/munge
AuthInfo=socket={layout.socket},cred_expire={SECONDS_UNTIL_REQUEUED}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
{POLICY}{nodes}
{PARTITIONS}"""


def gres_conf(layout: Layout) -> str:
    """The pretended GPUs. Slurm wants a device for each, under a name of its own: a count alone is
    refused.
    """
    return "".join(f"Name=gpu File=/dev/{'./' * place}null\n" for place in range(layout.gpus))


def hosts_file(layout: Layout) -> str:
    """/etc/hosts as the nodes see it. A node's name means its IPv4 address, as on most clusters.

    The third form of an address is what torch looks up for each connection; it warns where there is
    no answer."""
    machines = [("localhost", "127.0.0.1", "::1"), (layout.host, layout.address, layout.address6)]
    machines += [(node.name, node.address, node.address6) for node in layout.all_nodes]
    lines = [
        f"{address} {name}\n{address6} {name}-ip6\n::ffff:{address} {name}-mapped\n"
        for name, address, address6 in machines
    ]
    return "".join(lines)

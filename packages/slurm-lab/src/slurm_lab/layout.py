"""What a lab consists of, and Slurm's configuration files for it; nothing is started here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

CLUSTER_NAME = "lab"
LAB_PARTITION = "lab"
URGENT_PARTITION = "urgent"
MAX_NODES = 64
LAB_UP = "up"  # name, among the daemons, of the command that starts the others
# Without a message of a node's slurmd; Slurm takes up to three times as long.
SLURMD_TIMEOUT_S = 10
# For a daemon that waits for a core. A command waits as long for a controller that is down.
MESSAGE_TIMEOUT_S = 15
CREDENTIAL_LIFETIME_S = 10  # a requeued job waits for its end; Slurm's default is 120

SLURM_SETTINGS = f"""\
# No cgroups: the lab runs in containers too. More CPUs than the machine has may be declared.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
MailProg=/bin/true
GresTypes=gpu
ReturnToService=2
SlurmdTimeout={SLURMD_TIMEOUT_S}
MessageTimeout={MESSAGE_TIMEOUT_S}
KillWait=10
MinJobAge=86400
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
PARTITION_LINES = f"""\
PartitionName={LAB_PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP \
PriorityTier=1 GraceTime=20
PartitionName={URGENT_PARTITION} Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Node:
    """A node of a lab.

    Args:
        name: Its host name.
        address: Its IPv4 address.
        address6: Its IPv6 address.
        port: The port of its slurmd.
        device: The machine's end of its network cable, and the name of its network namespace; ""
            in a plain lab.
    """

    name: str
    address: str
    address6: str
    port: int
    device: str


@dataclass(frozen=True)
class Layout:
    """The plan of a lab.

    Args:
        folder: The folder of all its files.
        nodes: Number of nodes.
        cpus: Processors that each node declares.
        gpus: Simulated GPUs of each node.
        memory: Memory of each node, in MiB.
        plain: Whether all nodes have the loopback address, instead of networks.
        number: Number of its subnet, 1 to 254, so that a machine can have several labs; 0 if none
            is chosen yet.
        ports: The port of slurmctld, and in a plain lab one for each node.
        host: The machine's host name.
        user: The user who runs Slurm.
        accounting_port: The port of slurmdbd; 0 in a lab without accounting.
    """

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
    accounting_port: int = 0

    def validate(self, folder: Path) -> None:
        """Verify a layout that was read from a file: `lab down` removes what it names.

        Raises:
            ValueError: If no lab of that folder can have it.
        """
        if self.folder != folder:
            raise ValueError(f"it is of a lab in {self.folder}")
        num_ports = 1 + self.nodes if self.plain else 1
        has_valid_nodes = 0 < self.nodes <= MAX_NODES
        has_valid_number = 0 <= self.number < 255
        if not (has_valid_nodes and has_valid_number and len(self.ports) == num_ports):
            raise ValueError(
                f"no lab has {self.nodes} nodes, number {self.number} and {len(self.ports)} ports"
            )

    def describe(self) -> str:
        """Return what the lab has, for a person."""
        names = ", ".join(node.name for node in self.all_nodes)
        return f"{names} with {self.cpus} CPUs and {self.gpus} simulated GPUs each"

    @property
    def export_line(self) -> str:
        """The shell command that Slurm's own commands need."""
        return f"export SLURM_CONF={self.conf}"

    @property
    def conf(self) -> Path:
        """The path of slurm.conf."""
        return self.folder / "slurm.conf"

    @property
    def hosts(self) -> Path:
        """The path of the nodes' /etc/hosts."""
        return self.folder / "hosts"

    @property
    def socket(self) -> Path:
        """The path of munged's socket."""
        return self.folder / "munge.socket"

    @property
    def database(self) -> Path:
        """The folder of the accounting database and its socket, which only this user may enter."""
        return self.folder / "database"

    @property
    def bridge(self) -> str:
        """The name of the bridge that connects the nodes."""
        return f"sl{self.number}"

    @property
    def address(self) -> str:
        """The machine's IPv4 address, as nodes reach it."""
        return "127.0.0.1" if self.plain else f"10.213.{self.number}.1"

    @property
    def address6(self) -> str:
        """The machine's IPv6 address, as nodes reach it."""
        return "::1" if self.plain else f"fd00:213:{self.number:x}::1"

    @cached_property
    def all_nodes(self) -> tuple[Node, ...]:
        """The nodes: n1, n2, ..."""
        return tuple(self._make_node(number) for number in range(1, self.nodes + 1))

    def _make_node(self, number: int) -> Node:
        name = f"n{number}"
        if self.plain:
            return Node(name, "127.0.0.1", "::1", self.ports[number], "")
        subnet = self.address.rpartition(".")[0]
        subnet6 = self.address6.rpartition(":")[0]
        return Node(
            name,
            address=f"{subnet}.{10 + number}",
            address6=f"{subnet6}:{10 + number}",
            port=6818,
            device=f"{self.bridge}{name}",
        )


def make_slurm_conf(layout: Layout) -> str:
    """Return the content of slurm.conf."""
    folder = layout.folder
    gres = f" Gres=gpu:{layout.gpus}" if layout.gpus else ""
    nodes = "\n".join(
        f"NodeName={node.name} NodeHostname={layout.host if layout.plain else node.name}"
        f" NodeAddr={node.address} Port={node.port} CPUs={layout.cpus}"
        f" RealMemory={layout.memory}{gres}"
        for node in layout.all_nodes
    )
    return f"""\
ClusterName={CLUSTER_NAME}
SlurmctldHost={layout.host}({layout.address})
SlurmctldPort={layout.ports[0]}
SlurmUser={layout.user}
SlurmdUser={layout.user}
AuthType=auth/munge
AuthInfo=socket={layout.socket},cred_expire={CREDENTIAL_LIFETIME_S}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
{_make_accounting_settings(layout)}{SLURM_SETTINGS}{nodes}
{PARTITION_LINES}"""


def _make_accounting_settings(layout: Layout) -> str:
    """Return the lines of slurm.conf that say where finished jobs are recorded."""
    if not layout.accounting_port:
        return "JobAcctGatherType=jobacct_gather/none\n"
    return f"""\
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={layout.address}
AccountingStoragePort={layout.accounting_port}
AccountingStoragePass={layout.socket}
"""


def make_slurmdbd_conf(layout: Layout) -> str:
    """Return the content of slurmdbd.conf, the settings of Slurm's accounting daemon."""
    folder = layout.folder
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.socket}
DbdHost={layout.host}
DbdAddr={layout.address}
DbdPort={layout.accounting_port}
SlurmUser={layout.user}
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={layout.user}
StorageLoc=slurm_lab
"""


def make_gres_conf(layout: Layout) -> str:
    """Return the content of gres.conf, which declares the simulated GPUs.

    Slurm refuses a count alone: it needs a device for each GPU, with a different path.
    """
    return "".join(f"Name=gpu File=/dev/{'./' * number}null\n" for number in range(layout.gpus))


def make_hosts_file(layout: Layout) -> str:
    """Return /etc/hosts for the nodes; a node's name is its IPv4 address, as on most clusters.

    The third form of each address is what torch looks up for each connection, with a warning if
    there is no answer.
    """
    hosts = [("localhost", "127.0.0.1", "::1"), (layout.host, layout.address, layout.address6)]
    hosts += [(node.name, node.address, node.address6) for node in layout.all_nodes]
    lines = [
        f"{address} {name}\n{address6} {name}-ip6\n::ffff:{address} {name}-mapped\n"
        for name, address, address6 in hosts
    ]
    return "".join(lines)

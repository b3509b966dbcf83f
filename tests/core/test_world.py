"""Who am I: precedence of the launchers' variables, and half-set ones as errors, never as rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepladder.core.errors import InputError
from stepladder.core.world import World

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM_STEP = {
    "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "2",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_STEP_NODELIST": "gpu7",
}  # fmt: skip
SLURM_BATCH_SCRIPT = {
    "SLURM_JOB_ID": "1234", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4",
    "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "4", "SLURM_JOB_NODELIST": "gpu7",
}  # fmt: skip
FAKE_SCONTROL = """#!/bin/sh
case "$2 $3" in
    "hostnames gpu[9-10]") printf 'gpu9\\ngpu10\\n' ;;
    "hostnames gpu[7],gpu[9-10]") printf 'gpu7\\ngpu9\\ngpu10\\n' ;;
    "node gpu7") printf 'NodeName=gpu7 Arch=x86_64\\n   NodeAddr=10.0.0.7 NodeHostName=gpu7\\n' ;;
    "hostnames six[1-2]") printf 'six1\\nsix2\\n' ;;
    "node six1") printf 'NodeName=six1\\n   NodeAddr=fd00::7 NodeHostName=six1\\n' ;;
    "node gpu9") printf 'NodeName=gpu9 Arch=x86_64\\n   NodeAddr=10.0.0.9 NodeHostName=gpu9\\n' ;;
    *) echo "slurm_load_node error: $*" >&2; exit 1 ;;
esac
"""


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `scontrol` first on PATH that knows nodes gpu7, gpu9 and gpu10."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(FAKE_SCONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def test_no_variables_are_a_single_process() -> None:
    world = World.detect({})
    assert (world.rank, world.world_size, world.local_rank, world.num_nodes) == (0, 1, 0, 1)
    assert world.is_first and world.init_method == ""


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert World.detect() == World.detect(TORCHRUN)


def test_torchrun_variables_say_everything() -> None:
    world = World.detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (world.rank, world.world_size, world.local_rank, world.ranks_per_node) == (3, 4, 1, 2)
    assert (world.num_nodes, world.init_method, world.restart_count) == (2, "env://", 2)
    assert not world.is_first


def test_torchrun_variables_come_before_a_slurm_step() -> None:
    assert World.detect({**SLURM_STEP, **TORCHRUN}).rank == 3


def test_one_torchrun_rank_needs_no_address() -> None:
    world = World.detect({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert (world.world_size, world.init_method) == (1, "")


def test_world_size_alone_is_ignored_with_a_note() -> None:
    world = World.detect({"WORLD_SIZE": "8"})
    assert world.world_size == 1
    assert "WORLD_SIZE=8 without RANK ignored" in world.describe()


def test_world_size_beside_a_slurm_step_is_ignored_with_a_note() -> None:
    world = World.detect({**SLURM_STEP, "WORLD_SIZE": "8"})
    assert (world.rank, world.world_size) == (2, 4)
    assert "WORLD_SIZE=8" in world.note


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_set_torchrun_variables_are_an_error_that_names_the_missing_one(missing: str) -> None:
    with pytest.raises(InputError, match=missing) as caught:
        World.detect(without(TORCHRUN, missing))
    assert missing in caught.value.problem


def test_rank_alone_is_an_error() -> None:
    with pytest.raises(InputError, match="WORLD_SIZE is not set"):
        World.detect({"RANK": "0"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "two", "-1", "1.0"])
def test_a_value_that_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        World.detect({**TORCHRUN, name: value})
    assert f"{name} is {value!r}, not a number" in caught.value.problem


@pytest.mark.parametrize("port", ["many", "-1", "65536", "9007199254740993"])
def test_a_port_that_torch_would_refuse_is_refused_in_a_slurm_step(port: str) -> None:
    with pytest.raises(InputError, match="MASTER_PORT"):
        World.detect({**SLURM_STEP, "MASTER_PORT": port})


@pytest.mark.parametrize(
    "name", ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"]
)
def test_a_slurm_value_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(InputError, match=name):
        World.detect({**SLURM_STEP, name: "many"})


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"RANK": "4"}, "RANK=4 with WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
    ],
)
def test_a_rank_out_of_range_is_an_error_that_names_both(
    changed: dict[str, str], problem: str
) -> None:
    with pytest.raises(InputError) as caught:
        World.detect({**TORCHRUN, **changed})
    assert problem in caught.value.problem


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}])
def test_a_slurm_batch_script_is_a_single_process(step: dict[str, str]) -> None:
    """SLURM_NTASKS=4 is set there without four processes: a rank 0 of 4 would wait for ever."""
    world = World.detect({**SLURM_BATCH_SCRIPT, **step})
    assert (world.world_size, world.init_method) == (1, "")


def test_a_slurm_step_on_one_node_meets_on_the_loopback_without_scontrol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    world = World.detect(SLURM_STEP)
    assert (world.rank, world.world_size, world.local_rank, world.ranks_per_node) == (2, 4, 2, 4)
    assert world.num_nodes == 1
    assert world.init_method.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("nodes", "count", "address"),
    [("gpu[9-10]", 2, "10.0.0.9"), ("gpu[7],gpu[9-10]", 3, "10.0.0.7")],
)
def test_a_slurm_step_on_several_nodes_meets_on_the_first_ones_address(
    scontrol: None, nodes: str, count: int, address: str
) -> None:
    several = {
        "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_NUM_NODES": str(count), "SLURM_STEP_NUM_TASKS": str(2 * count),
        "SLURM_STEP_TASKS_PER_NODE": f"2(x{count})", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    }  # fmt: skip
    world = World.detect({**SLURM_STEP, **several})
    assert (world.rank, world.local_rank, world.ranks_per_node, world.num_nodes) == (3, 1, 2, count)
    assert world.init_method.startswith(f"tcp://{address}:2")


def test_all_tasks_of_a_slurm_step_agree_where_to_meet() -> None:
    places = {
        World.detect({**SLURM_STEP, "SLURM_PROCID": r, "SLURM_LOCALID": r}).init_method
        for r in "0123"
    }
    assert len(places) == 1


def test_two_steps_of_one_slurm_job_meet_on_different_ports() -> None:
    places = {World.detect({**SLURM_STEP, "SLURM_STEP_ID": step}).init_method for step in "0123"}
    assert len(places) == 4


@pytest.mark.parametrize("job", ["1", "999", "123456789012"])
def test_the_port_of_any_slurm_job_is_a_free_users_port(job: str) -> None:
    port = int(World.detect({**SLURM_STEP, "SLURM_JOB_ID": job}).init_method.rpartition(":")[2])
    assert 1024 < port < 32768, "the ports above are handed out by Linux for outgoing connections"


def test_a_node_list_that_scontrol_refuses_is_an_error_that_shows_it(scontrol: None) -> None:
    with pytest.raises(InputError, match=r"cpu\[1-2\].*MASTER_ADDR"):
        World.detect({**SLURM_STEP, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "cpu[1-2]"})


def test_a_step_of_two_nodes_without_scontrol_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="scontrol"):
        World.detect({**SLURM_STEP, "SLURM_STEP_NUM_NODES": "2"})


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "3211264001",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
CRAY = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "fd00::7", "MASTER_PORT": "29500"}


def test_ranks_of_open_mpi_on_one_machine_agree_on_a_port() -> None:
    world = World.detect(OPEN_MPI)
    assert (world.rank, world.world_size, world.local_rank, world.num_nodes) == (1, 2, 1, 1)
    assert world.init_method.startswith("tcp://127.0.0.1:2") and world.source == "Open MPI"
    first = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert World.detect({**OPEN_MPI, **first}).init_method == world.init_method
    other_run = World.detect({**OPEN_MPI, "PMIX_NAMESPACE": "3211264002"})
    assert other_run.init_method != world.init_method


@pytest.mark.parametrize("env", [OPEN_MPI, HYDRA, CRAY])
def test_ranks_of_mpi_connect_at_the_given_address(env: dict[str, str]) -> None:
    world = World.detect({**env, **ADDRESS})
    assert (world.rank, world.world_size) == (1, 2)
    assert world.init_method == "tcp://[fd00::7]:29500"


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), "OMPI_COMM_WORLD_LOCAL_RANK"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
        (without(HYDRA, "MPI_LOCALNRANKS"), "without MPI_LOCALNRANKS"),
        (without(HYDRA, "MPI_LOCALRANKID"), "PMI_RANK=1 is set without PMI_LOCAL_RANK"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "MASTER_ADDR"),
        ({**HYDRA, "MASTER_ADDR": "n1"}, "but MASTER_PORT is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2 with OMPI_COMM_WORLD_SIZE=2"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "many"}, "OMPI_COMM_WORLD_LOCAL_SIZE is 'many'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "OMPI_COMM_WORLD_LOCAL_SIZE=4"),
        ({**HYDRA, **ADDRESS, "MASTER_PORT": "none"}, "MASTER_PORT is 'none'"),
    ],
)  # fmt: skip
def test_half_set_or_contradicting_variables_of_mpi_are_one_line(
    env: dict[str, str], missing: str
) -> None:
    with pytest.raises(InputError) as caught:
        World.detect(env)
    assert missing in caught.value.problem and "\n" not in str(caught.value)
    assert caught.value.hint


def test_one_rank_of_mpi_is_a_single_process() -> None:
    assert World.detect({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) == World()
    assert World.detect({"PMI_RANK": "0", "PMI_SIZE": "1"}) == World()


def test_mpirun_s_ranks_come_before_the_slurm_step_of_its_daemons() -> None:
    """And the PMI of `srun --mpi=pmi2` says less than the step itself."""
    assert World.detect({**SLURM_STEP, **OPEN_MPI}).source == "Open MPI"
    assert World.detect({**SLURM_STEP, **HYDRA, **ADDRESS}).world_size == 2
    assert World.detect({**SLURM_STEP, "PMI_RANK": "2", "PMI_SIZE": "4"}).source == "Slurm step"
    assert World.detect({**OPEN_MPI, **TORCHRUN}).rank == 3


def test_the_place_in_a_subgroup_counts_the_ranks_with_the_same_label() -> None:
    labels = [b"a", b"b", b"a", b"b", b"b"]
    places = [World(rank, 5).within_subgroup(labels) for rank in range(5)]
    assert [(world.rank, world.world_size) for world in places] == [
        (0, 2), (0, 3), (1, 2), (1, 3), (2, 3),
    ]  # fmt: skip

"""Another cluster than Slurm: the example of docs/nodes.md, as a package that pip installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from installed import install_example
from processes import refused, run, wait_until
from stepladder.launcher import allocation
from stepladder.launcher.allocation import start_elsewhere
from stepladder.launcher.batch.cluster import Cluster
from stepladder.launcher.topology import Topology

TRAIN = "--", "train", "mlp", "--samples", 256, "--global-batch", 32


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install_example("local-cluster", tmp_path_factory.mktemp("local-cluster"))


@pytest.fixture
def local(package: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The variables of a user whose stepladder.toml, in tmp_path, chooses the cluster."""
    (tmp_path / "stepladder.toml").write_text('[submit]\ncluster = "local"\n')
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    return {**package, **state, "PATH": path}


def submit(env: dict[str, str], folder: Path, *arguments: object) -> str:
    done = run("submit", "--output", "job.out", "--json", *arguments, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["job_id"])


@pytest.mark.slow
@pytest.mark.ranks
def test_a_job_is_submitted_and_its_output_followed_to_its_end(
    local: dict[str, str], tmp_path: Path
) -> None:
    job = submit(local, tmp_path, *TRAIN, "--epochs", 2)
    done = run("logs", "-f", job, cwd=tmp_path, env=local)
    assert done.returncode == 0 and "step 16/16" in done.stdout, done.stderr
    status = json.loads(run("status", job, "--json", cwd=tmp_path, env=local).stdout)
    assert (status["name"], status["state"], status["step"]) == ("mlp", "COMPLETED", 16)
    assert status["run_dir"] == str(tmp_path / "runs/mlp")
    last = f"no job waits or runs. HINT: stepladder status {job}\n"
    assert run("status", cwd=tmp_path, env=local).stdout == last


@pytest.mark.ranks
def test_a_failed_job_s_known_message_is_explained(local: dict[str, str], tmp_path: Path) -> None:
    call = 'subprocess.run(["bash", "-c", "PATH=/nowhere apptainer exec a.sif"], check=True)'
    (tmp_path / "contained.py").write_text(f"import subprocess\n{call}\n")
    job = submit(local, tmp_path, "--", "run", "contained.py")
    logs = run("logs", "-f", job, cwd=tmp_path, env=local)
    assert logs.stdout == (tmp_path / "job.out").read_text()
    status = run("status", job, cwd=tmp_path, env=local)
    for shown in (logs.stderr, status.stdout):
        assert "apptainer: command not found\n  cause: The node has no such program" in shown
        assert '  do:    module avail apptainer singularity; then setup = ["module load' in shown


@pytest.mark.ranks
@pytest.mark.slow
def test_the_logs_of_a_job_that_has_ended_without_output_say_so(
    local: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "gone.py").write_text("import os\nos.remove('job.out')\n")
    job = submit(local, tmp_path, "--", "run", "gone.py")
    for flags in (["-f"], []):
        done = run("logs", *flags, job, cwd=tmp_path, env=local)
        assert done.returncode == 2
        assert f"job {job}" in done.stderr and "is not there" in done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_a_cancelled_job_has_saved_a_snapshot(local: dict[str, str], tmp_path: Path) -> None:
    job = submit(local, tmp_path, *TRAIN, "--epochs", 100_000, "--lr", 1e-6, "--snapshot-every", 50)
    wait_until(lambda: bool(list(tmp_path.glob("runs/mlp/snapshots/step_*"))))
    assert f"job {job} mlp: running" in run("status", cwd=tmp_path, env=local).stdout
    done = run("cancel", job, cwd=tmp_path, env=local)
    assert f"job {job}: cancelled; submitted again, it continues" in done.stdout, done.stderr
    wait_until(lambda: "to be resumed" in (tmp_path / "job.out").read_text())
    status = json.loads(run("status", job, "--json", cwd=tmp_path, env=local).stdout)
    assert status["state"] == "CANCELLED" and status["step"]
    refused(run("cancel", job, cwd=tmp_path, env=local), "has ended already (CANCELLED)")


@pytest.mark.slow
@pytest.mark.ranks
def test_jobs_are_cancelled_by_their_name(local: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import signal\nsignal.pause()\n")
    waits = "--", "run", "waits.py"
    first, second = (submit(local, tmp_path, "--name", name, *waits) for name in ("a", "b"))

    def states() -> list[str]:
        answers = [run("status", job, "--json", cwd=tmp_path, env=local) for job in (first, second)]
        return [json.loads(answer.stdout)["state"] for answer in answers]

    cancel = "from local_cluster import LocalCluster; LocalCluster().cancel([], name='a')"
    subprocess.run([sys.executable, "-c", cancel], env={**os.environ, **local}, check=True)
    assert states() == ["CANCELLED", "RUNNING"]
    assert run("cancel", second, cwd=tmp_path, env=local).returncode == 0
    assert states() == ["CANCELLED", "CANCELLED"]


def test_what_the_cluster_cannot_is_one_line(local: dict[str, str], tmp_path: Path) -> None:
    refused(run("submit", "--dry-run", *TRAIN, cwd=tmp_path, env=local), "shows no batch script")
    refused(run("status", "7", cwd=tmp_path, env=local), "there is no job 7")
    unknown = {"STEPLADDER_CLUSTER": "none"}
    refused(run("status", cwd=tmp_path, env={**local, **unknown}), "cluster 'none' is unknown")


class AllocationOnly(Cluster):
    def allocation(self, env: Any) -> Topology:
        return Topology("2", "4", note="two hosts of the test", hosts="a,b")

    submit = state = cancel = None  # type: ignore[assignment]


def test_train_starts_on_the_nodes_of_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setenv("STEPLADDER_CLUSTER", "test")
    monkeypatch.setattr("stepladder.launcher.batch.cluster.open_cluster", AllocationOnly)
    monkeypatch.setattr(allocation, "end_with_stdin", lambda: None)
    monkeypatch.setattr(
        "stepladder.launcher.ssh.run_on_hosts",
        lambda arguments, hosts, *_: started.append((arguments, hosts)) or 0,
    )
    assert start_elsewhere(["train", "mlp"], "", "ssh", Topology()) == 0
    assert started == [(["train", "--nodes", "2", "--nproc", "4", "mlp"], "a,b")]

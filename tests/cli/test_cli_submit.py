"""submit, status, logs and cancel as typed: what is refused, and what is printed without a cluster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from labs import TestLab
from processes import refused, run, started
from stepladder.cli import main
from stepladder.slurm.client import SYSTEM_CONF

Typed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Slurm, and a user in tmp_path without a site file."""
    (tmp_path / "bin").mkdir()
    for name in ("SLURM_CONF", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """A command, in this process: a new one takes its time."""

    def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code, shown.out, shown.err)  # type: ignore[arg-type]

    return run_here


def test_help_answers_on_a_login_node(tmp_path: Path) -> None:
    """No torch, and none of the commands' own machinery: that is what takes time."""
    for name in ("submit", "status", "logs", "cancel"):
        code = f"import sys; sys.argv = ['stepladder', '{name}', '--help']\n"
        code += "from stepladder.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        code += "assert not {'torch', 'numpy', 'multiprocessing'} & sys.modules.keys(), sys.modules.keys()"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0 and "Usage: " in done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "--", "train", "mlp"),
        ("status",),
        ("status", "7"),
        ("logs", "7"),
        ("cancel", "7"),
    ],
)
def test_no_slurm_here(
    arguments: tuple[str, ...], no_slurm: None, typed: Typed, tmp_path: Path
) -> None:
    refused(typed(*arguments), "there is no Slurm on this machine", "stepladder lab up")


def test_slurm_s_commands_are_there_and_not_the_user_s_to_execute(
    no_slurm: None, typed: Typed, tmp_path: Path
) -> None:
    (tmp_path / "bin" / "sinfo").write_text("")
    done = typed("submit", "--", "train", "mlp")
    refused(done, "there is no Slurm on this machine (sinfo is not yours to execute)")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["there is nothing to run"]),
        (["--", "missing.py"], ["script 'missing.py' does not exist"]),
        (["--", "run", "missing.py"], ["script 'missing.py' does not exist"]),
        (
            ["--", "run", "--nnodes", "2", "x.py"],
            ["--nodes stands after `--`", "submit --nodes N -- run"],
        ),
        (["--", "run", "--bogus", "x.py"], ["--bogus"]),
        (
            ["--task-per-rank", "--", "run", "--run-dir", "a", "-m", "x"],
            ["--run-dir with --task-per-rank"],
        ),
        (["--", "train", "missing.py"], ["job file missing.py does not exist"]),
        (["--", "train", "mnits"], ["recipe 'mnits' is unknown"]),
        (["--", "train", "mlp", "--epochz", "3"], ["--epochz"]),
        (["--", "train", "mlp", "--epochs", "many"], ["'many'"]),
        (["--", "train", "mlp", "--nproc", "2"], ["--nproc stands after `--`", "submit --nproc N"]),
        (["--", "train", "mlp", "--nodes", "2"], ["--nodes stands after `--`"]),
        (["--", "train", "mlp", "--rdzv-endpoint", "a:1"], ["--rdzv-endpoint stands after `--`"]),
        (["--nodes", "0", "--", "train", "mlp"], ["--nodes '0'"]),
        (["--nproc", "many", "--", "train", "mlp"], ["--nproc 'many'"]),
        (["--time", "soon", "--", "train", "mlp"], ["--time 'soon' is not a time"]),
        (["--gpus-per-node", "a100", "--", "train", "mlp"], ["--gpus-per-node a100"]),
        (["--name", "a\nb", "--", "train", "mlp"], ["holds a line break"]),
        (["--gpus-per-node", "a\n#SBATCH --uid=0:1", "--", "train", "mlp"], ["is not [TYPE:]N"]),
        (["--container", "a\nb", "--", "train", "mlp"], ["--container 'a\\nb' holds a line break"]),
        (["--gpus-per-node", "0", "--", "train", "mlp"], ["--gpus-per-node 0 is not [TYPE:]N"]),
        (["--mem", "-5G", "--", "train", "mlp"], ["--mem '-5G' is not an amount of memory"]),
        (
            ["--container", "docker '", "--", "train", "mlp"],
            ["--container docker ' is not a command: No clos"],
        ),
        (
            ["--sbatch-arg", "x", "--", "train", "mlp"],
            ["--sbatch-arg 'x' is not an option of sbatch"],
        ),
        (
            ["--sbatch-arg=--array=1-5", "--", "train", "mlp"],
            ["--array itself", "each job of an array"],
        ),
        (
            ["--sbatch-arg=-N2", "--", "train", "mlp"],
            ["-N2: submit sets --nodes", "submit has --nodes"],
        ),
        (["--sbatch-arg=-Hn 4", "--", "train", "mlp"], ["sets --ntasks itself", "--nproc"]),
        (["--sbatch-arg=--sig=B:USR1@60", "--", "train", "mlp"], ["sets --signal itself"]),
        (["--sbatch-arg=--signal USR1@60", "--", "train", "mlp"], ["sets --signal itself"]),
        (
            ["--sbatch-arg=--no-requeue", "--", "train", "mlp"],
            ["--no-requeue: submit sets", "--max-requeues"],
        ),
        (
            ["--output", "logs/%j.out", "--", "train", "mlp"],
            ["there is no such folder", "mkdir -p logs"],
        ),
        (
            ["--output", "/missing/x-%j.out", "--", "train", "mlp"],
            ["--output /missing/x-%j.out cannot", "mkdir -p /missing"],
        ),
        (["--account", "", "--", "train", "mlp"], ["--account is empty", "or no --account"]),
        (["--mem", "", "--", "train", "mlp"], ["--mem is empty"]),
        (["--container", "", "--", "train", "mlp"], ["--container is empty"]),
        (["--writes", ".", "--", "train", "mlp"], ["--writes without --rehearse"]),
        (["--rehearse", "--", "train", "mlp"], ["--rehearse with train", "submit -- SCRIPT.py"]),
        (["--rehearse", "--", "run", "-m", "json.tool"], ["--rehearse with -m or --no-python"]),
        (["--lint", "missing.sbatch"], ["missing.sbatch cannot be read"]),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], parts: list[str], no_slurm: None, typed: Typed, tmp_path: Path
) -> None:
    refused(typed("submit", *arguments), *parts)
    assert not list(tmp_path.glob("runs*"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[submit]\npartitoin = 'gpu'\n", ["partitoin is unknown", "partition"]),
        ("[slurm]\npartition = 'gpu'\n", ["slurm is unknown"]),
        (
            "[submit]\nsetup = 'module load cuda'\n",
            ["submit.setup is 'module load cuda', and not a list"],
        ),
        ("[submit]\naccount = 7\n", ["submit.account is 7, and not a text"]),
        ("[submit\n", ["cannot be used"]),
    ],
)
def test_a_site_file_with_a_mistake(
    text: str, parts: list[str], no_slurm: None, typed: Typed, tmp_path: Path
) -> None:
    (tmp_path / "stepladder.toml").write_text(text)
    done = typed("submit", "--dry-run", "--", "train", "mlp")
    refused(done, "stepladder.toml", *parts)


def test_flags_count_more_than_the_site_and_the_nearest_file_counts(
    no_slurm: None, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".config" / "stepladder").mkdir(parents=True)
    (tmp_path / ".config" / "stepladder" / "config.toml").write_text("[submit]\nqos = 'own'\n")
    below = tmp_path / "project" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)

    def dry(*arguments: str) -> str:
        return typed("submit", *arguments, "--dry-run", "--", "train", "mlp").stdout

    assert "#SBATCH --qos=own" in dry()
    (tmp_path / "project" / "stepladder.toml").write_text(
        "[submit]\npartition = 'gpu'\naccount = 'physics'\nsetup = ['module load cuda', 'source venv']\n"
    )
    shown = dry("--partition", "short")
    assert "--qos" not in shown.split("\n\n")[0]
    assert "#SBATCH --partition=short" in shown and "#SBATCH --account=physics" in shown
    assert "\nmodule load cuda\nsource venv\n" in shown


def test_what_is_linted_is_a_file_of_text(no_slurm: None, typed: Typed, tmp_path: Path) -> None:
    """Not waited for, nor read for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("pipe", "/dev/zero", "bytes", "."):
        refused(typed("submit", "--lint", name), "cannot be read")


def test_lint_names_file_line_and_fix(no_slurm: None, typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(
        "#!/bin/bash\n# SBATCH --nodes=2\nexport MASTER_PORT=29500\n"
    )
    done = typed("submit", "--lint", "job.sbatch")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[-1] == "4 found" and all(". HINT: " in line for line in lines[:-1])
    assert any(line.startswith("job.sbatch:2: '# SBATCH --nodes=2' is a comment") for line in lines)
    assert any(line.startswith("job.sbatch:3: port 29500 is fixed") for line in lines)


@pytest.mark.ranks
@pytest.mark.skipif(SYSTEM_CONF.exists(), reason=f"this machine has {SYSTEM_CONF}")
def test_slurm_s_commands_without_a_cluster(
    no_slurm: None, typed: Typed, lab: TestLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `lab down`: Slurm is installed, and nobody answers."""
    monkeypatch.setenv("PATH", lab.env["PATH"])
    refused(typed("status"), "no cluster", "stepladder lab up")
    conf = (lab.folder / "slurm.conf").read_text().replace("SlurmctldPort=", "SlurmctldPort=1 #")
    conf = re.sub(
        "MessageTimeout=.*", "MessageTimeout=3", conf
    )  # its commands go on trying for so long
    (tmp_path / "slurm.conf").write_text(conf)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    refused(typed("status"), "controller does not answer", "scontrol ping")


FOR_GPUS = """import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
data = TensorDataset(torch.arange(96.0).reshape(96, 1))
sampler = DistributedSampler(data)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5 * dist.get_world_size())
for epoch in range(50):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, 8, sampler=sampler):
        optimizer.zero_grad()
        (model(x.to(device)) - 1).square().mean().backward()
        optimizer.step()
print("trained on", device.type)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_with_a_finding_is_not_submitted_and_a_sound_one_is(
    typed: Typed, lab: TestLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in lab.env.items():
        monkeypatch.setenv(name, value)
    changes = {
        "faulty.py": ("(model(", "(model.module(", "error not-wrapped: faulty.py:18"),
        "fails.py": ("data = ", "assert device.type == 'cpu'\ndata = ", "AssertionError"),
    }
    for name, (old, new, part) in changes.items():
        (tmp_path / name).write_text(FOR_GPUS.replace(old, new))
        done = typed("submit", "--rehearse", "--gpus-per-node", "2", "--", name)
        assert (
            done.returncode == 1 and part in done.stdout and "nothing is submitted" in done.stderr
        ), done
    assert "no job waits or runs" in typed("status").stdout
    (tmp_path / "sound.py").write_text(FOR_GPUS)
    done = typed("submit", "--rehearse", "--gpus-per-node", "2", "--", "sound.py")
    assert done.returncode == 0 and "6 steps on each" in done.stdout and "job " in done.stdout, done
    typed("cancel", done.stdout.split("job ")[-1].partition(":")[0])


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_for_one_process_is_refused_for_several_ranks(
    typed: Typed, lab: TestLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in lab.env.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "plain.py").write_text(
        "import torch\nmodel = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(4):\n    optimizer.zero_grad()\n    model(torch.ones(1, 1)).backward()\n"
        "    optimizer.step()\n"
    )
    done = typed("submit", "--rehearse", "--nodes", "2", "--", "plain.py")
    assert done.returncode == 2, done
    assert "plain.py forms no process group" in done.stderr
    assert "run --independent plain.py" in done.stderr
    assert "no job waits or runs" in typed("status").stdout
    for arguments in (["--nodes", "2", "--", "run", "--independent"], ["--"]):
        done = typed("submit", "--rehearse", "--sbatch-arg=--hold", *arguments, "plain.py")
        assert done.returncode == 0, done
        typed("cancel", done.stdout.split("job ")[-1].partition(":")[0])


@pytest.mark.ranks
def test_a_rehearsal_that_is_stopped_submits_nothing(lab: TestLab, tmp_path: Path) -> None:
    begun = tmp_path / "outside" / "begun"
    begun.parent.mkdir()
    script = (
        f"import pathlib, time\npathlib.Path({str(begun)!r}).write_text('x')\ntime.sleep(600)\n"
    )
    (tmp_path / "sleeps.py").write_text(script)
    flags = "--rehearse", "--writes", begun.parent
    with started("submit", *flags, "--", "sleeps.py", cwd=tmp_path, env=lab.env) as running:
        running.wait_for(begun)
        running.signal_group(signal.SIGINT)
        assert running.end() == 130
        assert "stopped by Ctrl-C" in running.out.read_text()
        assert running.err.read_text().splitlines()[-1] == "stopped"
    status = run("status", cwd=tmp_path, env=lab.env)
    assert "no job waits or runs" in status.stdout


@pytest.mark.ranks
def test_what_the_cluster_does_not_have_is_one_line(
    typed: Typed, lab: TestLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in lab.env.items():
        monkeypatch.setenv(name, value)
    expected = {
        "--partition=gpux": ("partition gpux is unknown; there are",),
        "--nodes=5": ("--nodes 5, but partition", "at most 4", "--nodes 4"),
        "--gpus-per-node=3": ("--gpus-per-node 3 on 1 node,", "gpu:2"),
        "--cpus-per-task=64": ("--cpus-per-task 64",),
        "--sbatch-arg=--nodelist=n[3-5]": ("there is no node n5",),
        "--sbatch-arg=--nodelist=n[3-": ("'n[3-' is not a node list",),
        "--sbatch-arg=--no-such-option": ("no-such-option",),
    }
    for flag, parts in expected.items():
        refused(typed("submit", flag, "--", "train", "mlp"), *parts)
    for command in ("status", "logs", "cancel"):
        refused(typed(command, "99999"), "there is no job 99999", "stepladder status")
        refused(typed(command, "x7"), "'x7' is not a job's number")
    assert "no job waits or runs" in typed("status").stdout

"""`stepladder train` at the prompt: what bad input gets, and what a finished run prints."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import JOBS, SECONDS, refused, run, started, train
from stepladder.cli.flags import make_field_options
from stepladder.cli.options import TrainFlags
from stepladder.core.settings import SETTING_FLAGS

pytestmark = pytest.mark.ranks

TROUBLE = JOBS / "trouble.py"
PLAIN = JOBS / "plain.py"
MLP = ("mlp", "--samples", 100, "--global-batch", 16, "--epochs", 2)  # 7 steps per epoch
RANK_OF_2 = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a finished run in runs/mlp, and its result. Copied before it is changed."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, train(*MLP, "--snapshot-every", 5, cwd=folder)


@pytest.fixture
def copied(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


# -- refused before anything is written ------------------------------------------------------------

REFUSED: dict[str, tuple[tuple[object, ...], dict[str, str], tuple[str, ...]]] = {
    "unknown recipe": (("mlpp",), {}, ("'mlpp'", "digits, gpt, mlp, mnist")),
    "no recipe": ((), {}, ("Missing argument",)),
    "unknown flag": (("mlp", "--larning-rate", 1), {}, ("--larning-rate",)),
    "flag of another recipe": (("mlp", "--net", "classic"), {}, ("--net",)),
    "value of another type": (("mlp", "--epochs", "two"), {}, ("'two'", "--epochs")),
    "a count below one": (("mlp", "--epochs", 0), {}, ("--epochs 0",)),
    "missing job file": (("nowhere.py",), {}, ("nowhere.py",)),
    "RANK without WORLD_SIZE": (("mlp",), {"RANK": "0"}, ("WORLD_SIZE",)),
    "RANK beyond WORLD_SIZE": (("mlp",), {**RANK_OF_2, "RANK": "2"}, ("RANK=2", "WORLD_SIZE=2")),
    "WORLD_SIZE no number": (("mlp",), {**RANK_OF_2, "WORLD_SIZE": "two"}, ("WORLD_SIZE", "'two'")),
    "a job's flag before its name": (("--net", "classic", "mnist"), {}, ("--net is before the job's name",)),
    "another nproc inside torchrun": (("mlp", "--nproc", 3), RANK_OF_2, ("--nproc 3",)),
    "no processes": (("mlp", "--nproc", 0), {}, ("--nproc '0'",)),
    "more processes than a machine holds": (("mlp", "--nproc", 10**6), {}, ("--nproc 1000000 on a machine",)),
    "a range beyond a machine": (("mlp", "--nproc", "1:1000000"), {}, ("--nproc 1000000 on a machine",)),
    "less than no restarts": (("mlp", "--max-restarts", -1), {}, ("--max-restarts", "-1")),
    "more processes than microbatches": (
        ("mlp", "--nproc", 2, "--global-batch", 4, "--microbatch", 4), {}, ("2 processes for 1 microbatches",),
    ),
    "batch no multiple of microbatch": (
        ("mlp", "--global-batch", 10, "--microbatch", 4), {}, ("--global-batch 10", "HINT: --microbatch 2"),
    ),
    "more steps than the epochs hold": ((*MLP, "--steps", 15), {}, ("--steps 15", "(14)", "HINT: --epochs 3")),
    "a seed beyond NumPy's": (("mlp", "--seed", 2**32), {}, ("--seed 4294967296",)),
    "more threads than memory": (("mlp", "--threads", 10**9), {}, ("--threads 1000000000 is too large",)),
    "a batch beyond all data": (("mlp", "--global-batch", 10**30), {}, ("--global-batch 1", "is too large")),
    "a time too short to meet": (("mlp", "--timeout", "1e-9"), {}, ("--timeout", "1e-09")),
    "a wait that is not a number": (("mlp", "--lock-wait", "nan"), {}, ("--lock-wait", "nan")),
    "a learning rate below zero": (("mlp", "--lr", -0.1), {}, ("--lr -0.1",)),
    "a learning rate that is not a number": (("mlp", "--lr", "nan"), {}, ("'--lr'", "nan",)),
    "a timeout without end": (("mlp", "--timeout", "inf"), {}, ("--timeout", "inf")),
    "two global batches": (("mlp", "--global-batch", 8, "--batch-per-rank", 4), {}, ("--batch-per-rank: one",)),
    "MASTER_PORT no number": (("mlp",), {**RANK_OF_2, "MASTER_PORT": "any"}, ("MASTER_PORT", "'any'")),
    "no such interface": (
        (*MLP, "--nproc", 2), {"GLOO_SOCKET_IFNAME": "lo,{}"}, ("GLOO_SOCKET_IFNAME='lo,{}'", "one of"),
    ),
    "fresh where the command runs": (("mlp", "--fresh", "--run-dir", "."), {}, ("--fresh would move",)),
    "no data": (("mlp", "--samples", 0), {}, ("--samples 0 is not from 1",)),
    "lr for a job without": ((PLAIN, "--lr", 1), {}, ("--lr, ",)),
    "data-dir for a job without": ((PLAIN, "--data-dir", "x"), {}, ("--data-dir, ",)),
    "lr-scale without batch-per-rank": (("mlp", "--lr-scale", "linear"), {}, ("--batch-per-rank",)),
    "data folder missing": (("mnist", "--data-dir", "nowhere"), {}, ("nowhere", "stepladder data get mnist")),
    "run folder below a file": ((*MLP, "--run-dir", "file/run"), {}, ("file/run",)),
    "run folder in a read-only place": ((*MLP, "--run-dir", "/proc/run"), {}, ("/proc/run",)),
}  # fmt: skip


WAIT = (
    "another nproc inside torchrun"  # ten seconds for the other rank, for one of them is to say it
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == WAIT else ()) for case in REFUSED]
)
def test_bad_input_gets_one_line_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    args, env, parts = REFUSED[case]
    line = refused(run("train", *args, cwd=tmp_path, env=env), *parts)
    assert line.count("HINT") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_which_torch_this_is(tmp_path: Path) -> None:
    refused(
        run("train", *MLP, "--device", "cuda", cwd=tmp_path), "--device cuda", torch.__version__
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "train-images-idx3-ubyte.gz",
            gzip.compress(b"\0\0\x08\x03" + bytes(500))[:-200],
            "train-images",
        ),
        ("train-images-idx3-ubyte", b"\x89PNG\r\n\x1a\n" + bytes(50), "train-images"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x01\0\0\0\x02\x01\x02", "train-images"),
    ],
    ids=["truncated gzip", "wrong magic", "labels for images"],
)
def test_a_damaged_data_file_is_named(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for other in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{other}-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x01\x01")
    (folder / "train-images-idx3-ubyte").unlink()
    (folder / name).write_bytes(content)
    refused(
        run("train", "mnist", "--data-dir", "data", cwd=tmp_path),
        message,
        "stepladder data get mnist",
    )
    assert not (tmp_path / "runs").exists()


# -- the run directory -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, parts",
    [
        ((PLAIN,), ("recipe=mlp", "plain", "HINT: the recipe or job file mlp to resume")),
        ((*MLP, "--seed", 1), ("seed=0", "1")),
        ((*MLP, "--global-batch", 8), ("global_batch=16", "8")),
        ((*MLP, "--hidden", 8), ("hidden=64", "8", "HINT: --hidden 64")),
        ((*MLP, "--steps", 3), ("step 14", "past the 3")),
    ],
    ids=["recipe", "seed", "batch", "hidden", "steps"],
)
def test_the_run_directory_of_another_run_is_refused(
    args: tuple[object, ...], parts: tuple[str, ...], finished: tuple[Path, dict[str, Any]]
) -> None:
    before = contents(finished[0])
    refused(run("train", *args, "--run-dir", "runs/mlp", cwd=finished[0]), "runs/mlp", *parts)
    assert contents(finished[0]) == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_a_run_directory_in_use_is_refused_and_the_live_run_goes_on(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    env = {"TROUBLE": f"hold 0 7 {marker}"}
    with started("train", TROUBLE, "--snapshot-every", 2, cwd=tmp_path, env=env) as running:
        running.wait_for(marker)
        for more in ((), ("--fresh",)):
            second = run("train", TROUBLE, "--lock-wait", 0.5, *more, cwd=tmp_path)
            refused(second, "runs/trouble", f"in use by process {running.popen.pid}")
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["trouble"]
        running.process.terminate()
        assert running.end() == 75
    assert train(TROUBLE, cwd=tmp_path)["resumed_from_step"] == 7


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_snapshot_is_named_and_the_one_before_it_is_used(
    copied: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    (copied / "runs/mlp/result.json").unlink()
    flip(copied / "runs/mlp/snapshots/step_00000014/model.safetensors")
    done = run("train", *MLP, "--json", cwd=copied)
    assert "step_00000014 is damaged (model.safetensors" in done.stderr
    result = json.loads(done.stdout)
    assert (result["resumed_from_step"], result["weights_sha256"]) == (
        10,
        finished[1]["weights_sha256"],
    )


def test_nothing_but_damaged_snapshots_is_refused(copied: Path) -> None:
    (copied / "runs/mlp/result.json").unlink()
    for state in copied.rglob("state.pt"):
        flip(state)
    done = run("train", *MLP, cwd=copied)
    line = refused(
        done, "all 3 snapshots", "runs/mlp/snapshots", "state.pt: SHA-256 differs", "--fresh"
    )
    assert done.stderr == f"{line}\n"


@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_no_half_snapshot(tmp_path: Path) -> None:
    """`ulimit -f` refuses files beyond 200 kB, as a full disk would."""
    command = ("bash", "-c", 'ulimit -f 200; exec "$@"', "bash", sys.executable, "-m", "stepladder")
    done = run("train", *MLP, "--hidden", 20_000, "--steps", 3, cwd=tmp_path, command=command)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: snapshot in runs/mlp/snapshots could not be written: "
    )
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs/mlp/snapshots").iterdir())
    assert not (tmp_path / "runs/mlp/result.json").exists()


def test_a_disk_that_fills_up_while_steps_are_noted_is_one_line(tmp_path: Path) -> None:
    """No file may pass 4 kB: the ledger or the metrics do, in the first epochs."""
    command = ("bash", "-c", 'ulimit -f 4; exec "$@"', "bash", sys.executable, "-m", "stepladder")
    arguments = (*MLP[:3], "--global-batch", 4, "--snapshot-every", 1000)
    variables = {"PYTHONDONTWRITEBYTECODE": "1"}  # or Python caches half a module
    done = run("train", *arguments, cwd=tmp_path, command=command, env=variables)
    assert ".jsonl cannot be written: File too large" in refused(done, "error: runs/mlp/")
    assert not (tmp_path / "runs/mlp/result.json").exists()


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_loss_that_is_not_a_number_stops_the_run_at_its_step(nproc: int, tmp_path: Path) -> None:
    arguments = ("train", TROUBLE, "--nproc", nproc, "--snapshot-every", 2)
    refused(
        run(*arguments, cwd=tmp_path, env={"TROUBLE": "nan 0 7"}),
        "the loss of step 7 is nan",
        "--lr",
    )
    assert train(*arguments[1:], cwd=tmp_path)["resumed_from_step"] == 6


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_loss_that_counts_nothing_is_no_loss(nproc: int, tmp_path: Path) -> None:
    """It was divided by one, and trained with a gradient that was divided by nothing."""
    source = TROUBLE.read_text().replace("* factor, len(inputs)", "* factor, 0")
    (tmp_path / "job.py").write_text(source)
    refused(
        run("train", "job.py", "--nproc", nproc, cwd=tmp_path),
        "the loss of step 1 counts 0, over all ranks",
        "(sum, count)",
    )


# -- a finished run --------------------------------------------------------------------------------


def test_the_keys_of_json_are_frozen(finished: tuple[Path, dict[str, Any]]) -> None:
    assert {
        "schema", "recipe", "world_size", "sync", "epochs", "steps", "train_loss", "metrics", "weights_sha256",
        "samples_per_second", "seconds", "resumed_from_step",
    } <= set(finished[1])  # fmt: skip
    expected = {
        "schema": 1,
        "recipe": "mlp",
        "world_size": 1,
        "sync": "ddp",
        "epochs": 2,
        "steps": 14,
    }
    assert {name: finished[1][name] for name in expected} == expected
    assert list(finished[1]["metrics"]) == ["test_mse"]


def test_a_finished_run_prints_its_stored_result_again(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    before = contents(finished[0])
    assert train(*MLP, cwd=finished[0]) == finished[1]
    done = run("train", *MLP, cwd=finished[0])
    assert (done.returncode, done.stdout.splitlines()[-1]) == (
        0,
        "14 steps done; everything is in runs/mlp",
    )
    assert contents(finished[0]) == before


def test_fresh_moves_the_old_directory_aside(
    copied: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    before = contents(copied / "runs/mlp")
    result = train(*MLP, "--fresh", cwd=copied)
    assert (result["resumed_from_step"], result["weights_sha256"]) == (
        0,
        finished[1]["weights_sha256"],
    )
    assert sorted(path.name for path in (copied / "runs").iterdir()) == ["mlp", "mlp.old-1"]
    moved = contents(copied / "runs/mlp.old-1")
    assert list(moved.values()) == list(before.values())


# -- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [(), ("data",), ("lab",)], ids=["stepladder", "data", "lab"])
def test_a_group_without_a_command_shows_its_help(group: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*group, cwd=tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr.startswith("Usage: ")
        and f"{' '.join(('stepladder', *group))} [OPTIONS]" in done.stderr
    )
    assert "HINT" not in done.stderr


def test_help_shows_the_flags_of_the_recipe_and_imports_neither_torch_nor_psutil(
    tmp_path: Path,
) -> None:
    code = "import sys; from stepladder.cli import cli; cli.main({}, standalone_mode=False); {}"
    quiet = "assert not {'torch', 'psutil'} & sys.modules.keys()"
    for args, flags in (
        ([], ("train", "audit", "data")),
        (["train"], ("--nproc", "--global-batch", "--fresh")),
        (
            ["train", "mnist"],
            ("--net [small|classic]", "--weight-decay FLOAT", "L2 penalty [default: 0.0001]"),
        ),
    ):
        shown = subprocess.run(
            [sys.executable, "-c", code.format([*args, "--help"], quiet)],
            cwd=tmp_path,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        for flag in flags:
            assert flag in shown.stdout


def titles_of(shown: str) -> list[str]:
    return [line[:-1] for line in shown.splitlines() if re.fullmatch(r"\w.*:", line)]


def flags_below(shown: str, title: str) -> list[str]:
    section = shown.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
    return re.findall(r"^  (--[\w-]+)", section, re.MULTILINE)


def test_help_lists_commands_by_purpose_and_all_of_them_on_demand(tmp_path: Path) -> None:
    sections = ["Train", "Inspect", "Compare", "Find faults", "Speed", "Learn"]
    shown = run("--help", cwd=tmp_path).stdout
    assert titles_of(shown) == ["Options", *sections]
    assert shown.endswith("\nMore (--help-all): export, import, data, recipe.\n")
    everything = run("--help-all", cwd=tmp_path).stdout
    assert titles_of(everything) == ["Options", *sections, "More"]
    assert "\n  export    Write a run's weights" in everything


def test_help_of_train_begins_with_the_jobs_flags_and_those_of_a_first_run(tmp_path: Path) -> None:
    sections = [
        "Flags to start with",
        "Training",
        "Memory and speed",
        "Processes and machines",
        "Faults and checks",
        "Snapshots and output",
    ]
    shown = run("train", "--help", cwd=tmp_path).stdout
    assert titles_of(shown) == sections[:1]
    names = "nproc epochs global-batch lr sync run-dir fresh device precision dry-run help-all"
    assert flags_below(shown, sections[0]) == [f"--{name}" for name in names.split()]
    more = shown.partition("\nMore flags (--help-all): ")[2]
    assert " ".join(more.split()) == f"{', '.join(sections[1:])}."
    assert titles_of(run("train", "--help-all", cwd=tmp_path).stdout) == sections
    shown = run("train", "mnist", "--help-all", cwd=tmp_path).stdout
    assert titles_of(shown) == ["Flags of this job", *sections]
    assert flags_below(shown, "Flags of this job") == ["--net", "--weight-decay"]


def test_each_setting_is_a_flag_with_its_help_or_of_python_alone() -> None:
    options = {option.name: option for option in make_field_options(TrainFlags)}
    for name, setting in SETTING_FLAGS.items():
        assert setting.python_only != (name in options), name
        assert setting.help.endswith("."), name
        if name in options:
            assert (options[name].help or "").startswith(setting.help)

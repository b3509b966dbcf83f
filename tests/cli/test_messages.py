"""What a user reads after a mistake: one line with the cause and what to type, or the frames of the
own job.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from processes import refused, run
from stepladder.cli import main
from stepladder.train.gpu_setup import GpuSetup, read_driver_version

JOB = """
from dataclasses import dataclass
import torch
from stepladder import Job

@dataclass
class Config:
    lr: float = 0.1

def loss(model, batch):
    return model(batch).square().sum(), len(batch)

def build(config):
    model = MODEL
    return Job(model, torch.optim.SGD(model.parameters(), lr=config.lr), loss, torch.ones(8, 4))
"""
WRAPPED = "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))"
MISMATCH = "torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(4, 2))"
PLAIN = "torch.nn.Linear(4, 4)"
TRAIN = ("train", "my_job.py", "--global-batch", "8", "--steps", "1", "--run-dir", "new")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def job(folder: Path, model: str, name: str = "my_job.py") -> Path:
    path = folder / name
    path.write_text(JOB.replace("MODEL", model))
    return path


# -- the words that were typed ---------------------------------------------------------------------

Typed = Callable[..., str]


@pytest.fixture
def typed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Typed:
    """The line that refuses a command, in this process, which takes no time to start."""
    monkeypatch.chdir(tmp_path)

    def refusal(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        shown = capsys.readouterr()
        assert (ended.value.code, shown.out) == (2, "")
        assert (
            shown.err.startswith("error: ")
            and shown.err.count("\n") == 1
            and ". HINT: " in shown.err
        )
        return shown.err

    return refusal


TYPED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a command": (("trian", "mlp"), ("No such command 'trian'", "did you mean train? stepladder --help")),
    "a command of a group": (("data", "gte"), ("No such command 'gte'", "did you mean get? stepladder data")),
    "a file in place of a command": (("my_job.py",), ("stepladder train my_job.py, or stepladder run my_job.py",)),
    "a command like no other": (("zzz",), ("No such command 'zzz'. HINT: stepladder --help",)),
    "a flag": (("train", "mlp", "--lrr", "1"), ("No such option '--lrr'", "did you mean --lr? stepladder train")),
    "a flag that is not needed": (("train", "mlp", "--resume"), ("No such option '--resume'", "a run resumes by itself")),
    "a flag whose value was forgotten": (("submit", "--account", "--", "train", "mlp"), ("'--account' needs a value",)),
    "the beginning of a flag": (("train", "mlp", "--epoch", "1"), ("did you mean --epochs? stepladder train",)),
    "another program's flag": (("train", "mlp", "--learning-rate", "1"), ("did you mean --lr?",)),
    "a flag that means nothing here": (("train", "mlp", "--batch_size", "1"), ("did you mean --global-batch?",)),
    "a flag of submit after the command": (("submit", "--", "train", "mlp", "--account", "physics"), ("--account is a flag of submit", "submit --account ... -- train")),
    "GPUs of a job": (("submit", "--gpus", "4", "--", "train", "mlp"), ("did you mean --gpus-per-node?",)),
    "a flag like no other": (("diff", "--steps", "a", "b"), ("No such option '--steps'. HINT: stepladder diff --help",)),
    "an argument that is missing": (("import", "out"), ("Missing argument 'JOB'. HINT: stepladder import DIR JOB --run-dir PATH",)),
    "a flag that is missing": (("import", "out", "mlp"), ("HINT: stepladder import DIR JOB --run-dir PATH",)),
    "a file for its folder": (("import", __file__, "mlp", "--run-dir", "r"), ("is a file. HINT: its folder",)),
    "a recipe": (("train", "diggits"), ("recipe 'diggits' is unknown", "HINT: did you mean digits?")),
    "a wait": (("train", "mlp", "--timeout", "soon"), ("'soon' is not a valid number of seconds",)),
    "a flag without its value": (("learn", "check", "--report"), ("HINT: stepladder learn check --help",)),
    "a choice that is missing": (("export", "runs/x", "out"), ("Choose from: safetensors, dcp. HINT",)),
    "a time": (("submit", "--time", "tomorrow", "--", "train", "mlp"), ("--time 'tomorrow' is not a time limit",)),
    "a host twice": (("run", "--hosts", "a,b,a", "x"), ("--hosts names a twice", "HINT: --hosts a,b; --nproc N")),
    "a name with an empty part": (("doctor", "--peer", "a..b"), ("--peer 'a..b' cannot be the name of a host",)),
    "a full stop for a name": (("doctor", "--peer", "."), ("--peer '.' cannot be the name of a host",)),
    "a name of 300 letters": (("doctor", "--peer", "a" * 300), ("cannot be the name of a host",)),
}  # fmt: skip


@pytest.mark.parametrize("case", TYPED)
def test_a_mistyped_command_is_answered_with_what_was_meant(case: str, typed: Typed) -> None:
    arguments, parts = TYPED[case]
    if arguments[:2] == ("run", "--hosts"):
        Path("x").write_text("")
    line = typed(*arguments)
    assert all(part in line for part in parts), line
    assert "\\n" not in line


def test_a_file_of_weights_is_answered_with_the_folder_to_make(
    typed: Typed, tmp_path: Path
) -> None:
    (tmp_path / "waves.safetensors").touch()
    error = typed("import", "waves.safetensors", "mlp", "--run-dir", "new")
    assert "HINT: mkdir weights && cp waves.safetensors weights/model.safetensors && " in error
    assert [path.name for path in tmp_path.iterdir()] == ["waves.safetensors"]


@pytest.mark.parametrize("name", ["recommend", "sample"])
def test_an_old_spelling_works_and_names_its_successor(name: str, tmp_path: Path) -> None:
    old = run(name, "--help", cwd=tmp_path)
    assert (
        old.stderr
        == f"stepladder: `stepladder {name}` is deprecated: type `stepladder recipe {name}`\n"
    )
    assert old.stdout == run("recipe", name, "--help", cwd=tmp_path).stdout
    assert f"  {name} " not in run("--help", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    "content", ["print()\n", "#!/usr/bin/env python3\nprint()\n"], ids=["name", "first line"]
)
def test_python_is_not_linted_as_a_batch_script(content: str, typed: Typed) -> None:
    name = "batch" if content.startswith("#!") else "my_job.py"
    Path(name).write_text(content)
    line = typed("submit", "--lint", name)
    assert (
        f"{name} is Python, not a batch script" in line and f"HINT: stepladder check {name}" in line
    )


# -- the job file ----------------------------------------------------------------------------------

FILES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a script": (
        "plain.py",
        "print('hello')\n",
        ("plain.py has no function build", "stepladder run plain.py"),
    ),
    "a build without parameters": (
        "my_job.py",
        JOB.replace("build(config)", "build()").replace("config.lr", "0.1"),
        ("build() in my_job.py takes no parameters", "HINT: def build(config: Config)"),
    ),
    "torch's name": (
        "torch.py",
        JOB,
        ("torch.py hides the module torch", "HINT: mv torch.py my_torch.py"),
    ),
    "numpy's name": (
        "numpy.py",
        JOB,
        ("numpy.py hides the module numpy", "HINT: mv numpy.py my_numpy.py"),
    ),
    "a name of Python's": ("random.py", JOB, ("random.py hides the module random",)),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_job_is_one_line(case: str, typed: Typed, tmp_path: Path) -> None:
    name, content, parts = FILES[case]
    (tmp_path / name).write_text(content)
    line = typed("train", name)
    assert all(part in line for part in parts), line
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.ranks
def test_ranks_do_not_import_what_lies_in_the_current_folder(tmp_path: Path) -> None:
    """The process that they are forked from took these files for the modules that torch imports."""
    job(tmp_path, PLAIN)
    for name in ("cuda.py", "random.py", "numpy.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported by mistake')\n")
    done = run(*TRAIN, "--nproc", 2, cwd=tmp_path)
    assert done.returncode == 0 and "by mistake" not in done.stderr, done.stderr


# -- what build does -------------------------------------------------------------------------------

BUILDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "wraps the model": (WRAPPED, ("in DistributedDataParallel", "HINT: give Job the plain model")),
    "wraps a part of it": (
        "torch.nn.Sequential(torch.nn.DataParallel(torch.nn.Linear(4, 4)))",
        ("in DataParallel",),
    ),
    "asks for a petabyte": (
        "torch.nn.Linear(10**7, 10**8)",
        ("not enough memory in my_job.py, line 14: a tensor of 4,000,000.0 GB", "HINT: a smaller model"),
    ),
    "asks for a GPU": (
        "torch.nn.Linear(4, 4).cuda()",
        ("build asks for a GPU (my_job.py, line 14), but torch", "leave .cuda() and .to(device) out of build"),
    ),
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [*[*BUILDS][:3], pytest.param([*BUILDS][3], marks=NO_GPU)])
def test_what_build_cannot_do_is_one_line(case: str, nproc: int, tmp_path: Path) -> None:
    model, parts = BUILDS[case]
    job(tmp_path, model)
    done = run(*TRAIN, "--nproc", nproc, cwd=tmp_path)
    line = refused(done, *parts)
    assert done.stderr == f"{line}\n" and "ulimit -n" not in line
    assert not (tmp_path / "new").exists()


PARTS: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "a weight in channels_last": (
        "torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last))",
        "torch.optim.SGD",
        ("--shard", "full"),
        "--shard full: the weight 0.weight does not lie in memory row by row (as in channels_last)",
    ),
    "Adafactor with an empty weight": (
        "torch.nn.ParameterList([torch.ones(4, 4), torch.ones(0, 4)])",
        "torch.optim.Adafactor",
        (),
        "Adafactor cannot step a weight without elements, such as the one of shape [0, 4]",
    ),
    "the same in slices": (
        "torch.nn.ParameterList([torch.ones(4, 4), torch.ones(0, 4)])",
        "torch.optim.Adafactor",
        ("--shard", "optimizer"),
        "Adafactor cannot step a weight without elements, such as the one of shape [0, 4]",
    ),
    "a frozen model": (
        "torch.nn.Linear(4, 4).requires_grad_(False)",
        "torch.optim.SGD",
        (),
        "no parameter of the model has requires_grad, so there is nothing to train",
    ),
    "LBFGS": (
        "torch.nn.Linear(4, 4)",
        "torch.optim.LBFGS",
        (),
        "a step of LBFGS wants a closure, which computes the loss several times",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", PARTS)
def test_parts_that_do_not_go_together_are_one_line_on_any_number_of_processes(
    case: str, nproc: int, tmp_path: Path
) -> None:
    """One left a run directory without a ledger, the others failed on one process and trained on
    three.
    """
    model, optimizer, flags, cause = PARTS[case]
    path = job(tmp_path, model)
    path.write_text(path.read_text().replace("torch.optim.SGD", optimizer))
    refused(run(*TRAIN, *flags, "--nproc", nproc, cwd=tmp_path), cause)
    assert not (tmp_path / "new").exists()


# -- an error of the job's own ---------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
def test_an_error_in_a_layer_shows_the_frames_of_the_user_s_files_alone(
    nproc: int, tmp_path: Path
) -> None:
    """It was 65 lines on one process, three of them the user's."""
    path = job(tmp_path, MISMATCH)
    done = run(*TRAIN, "--nproc", nproc, "--max-restarts", 0, cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    frames = [line for line in lines if '  File "' in line]
    assert len(frames) == 1 and f'File "{path}", line 11, in loss' in frames[0]
    assert lines[lines.index(frames[0]) - 1].endswith("Traceback (most recent call last):")
    assert done.stderr.count("Traceback") == 1
    folded = [
        line
        for line in lines
        if line.endswith("frames of torch and stepladder are folded: --traceback shows all")
    ]
    assert len(folded) == 1
    shown = sum("mat1 and mat2 shapes cannot be multiplied" in line for line in lines)
    assert shown == nproc  # with ranks also in the line that says which of them failed


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_traceback_shows_all_frames(nproc: int, tmp_path: Path) -> None:
    job(tmp_path, MISMATCH)
    done = run(*TRAIN, "--nproc", nproc, "--max-restarts", 0, "--traceback", cwd=tmp_path)
    assert done.returncode == 1 and "are folded" not in done.stderr
    assert (
        "torch/nn/modules/linear.py" in done.stderr and "stepladder/train/trainer.py" in done.stderr
    )


@pytest.mark.ranks
def test_an_error_in_a_loading_worker_shows_the_worker_s_frames_alone(tmp_path: Path) -> None:
    dataset = "class Data(torch.utils.data.Dataset):\n    __len__ = lambda self: 8\n"
    dataset += "    def __getitem__(self, index):\n        raise KeyError('of mine')\n\n\n"
    text = JOB.replace("MODEL", PLAIN).replace("torch.ones(8, 4))", "Data(), num_workers=1)")
    (tmp_path / "my_job.py").write_text(text.replace("def loss", f"{dataset}def loss"))
    done = run(*TRAIN, "--nproc", 2, "--max-restarts", 0, cwd=tmp_path)
    assert done.returncode == 1
    assert "in __getitem__" in done.stderr and "of mine" in done.stderr
    assert "stepladder/train/trainer.py" not in done.stderr


# -- GPUs ------------------------------------------------------------------------------------------

SETUPS: dict[str, tuple[GpuSetup, str, str]] = {
    "a build without CUDA": (
        GpuSetup("2.13.0+cpu", None, None, 13000),
        "torch 2.13.0+cpu is a build without CUDA",
        "install a CUDA build of torch",
    ),
    "no driver": (
        GpuSetup("2.15.0+cu132", "13.2", None, 0),
        "torch 2.15.0+cu132 is built for CUDA 13.2, but there is no NVIDIA driver here",
        "install the driver",
    ),
    "no driver, and none to be seen": (
        GpuSetup("2.15.0+cu132", "13.2", "", 0),
        "there is no NVIDIA driver here",
        "docker run --gpus all",
    ),
    "an old driver": (
        GpuSetup("2.15.0+cu132", "13.2", None, 12040),
        "the NVIDIA driver is too old: it supports CUDA up to 12.4",
        "a build of torch for CUDA 12.4",
    ),
    "GPUs that are hidden": (
        GpuSetup("2.15.0+cu132", "13.2", "", 13020),
        "CUDA_VISIBLE_DEVICES='' hides all GPUs",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "a number of no GPU": (
        GpuSetup("2.15.0+cu132", "13.2", "7", 13020),
        "CUDA_VISIBLE_DEVICES='7' names no GPU of this machine",
        "nvidia-smi -L",
    ),
    "a driver whose GPU has gone": (
        GpuSetup("2.15.0+cu132", "13.2", None, 13020),
        "is built for CUDA 13.2, and sees no GPU",
        "stepladder doctor",
    ),
}


@pytest.mark.parametrize("case", SETUPS)
def test_why_there_is_no_gpu_is_told_by_the_build_the_driver_and_the_variable(case: str) -> None:
    setup, cause, hint = SETUPS[case]
    absence = setup.explain_absence()
    assert cause in absence[0] and hint in absence[1]
    assert ("a CUDA build" in absence[1]) == (setup.cuda is None)


@NO_GPU
def test_a_gpu_that_is_not_here_is_one_line_with_this_machine_s_cause(tmp_path: Path) -> None:
    job(tmp_path, PLAIN)
    cause = (
        "is a build without CUDA"
        if torch.version.cuda is None
        else "no NVIDIA driver" * (not read_driver_version())
    )
    refused(run(*TRAIN, "--device", "cuda", cwd=tmp_path), "--device cuda, but ", cause)
    assert not (tmp_path / "new").exists()


# -- a flag of the command after the script ---------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "args", "named"),
    [
        ("check --static", "--resume --timeout=3 --other", ["--resume", "--timeout"]),
        ("parity --steps 1 --at 1 '' --at 1 ''", "--resume --patience 9", ["--patience"]),
        ("run", "--nproc 2 --run-dir new", ["--nproc"]),
        ("submit --dry-run", "--account physics --resume", ["--account"]),
    ],
)
def test_a_flag_of_the_command_that_the_script_gets_is_told(
    command: str, args: str, named: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import options, sys\nsys.exit(2)\n")
    (tmp_path / "options.py").write_text("FLAGS = '--run_dir', '--other'\n")
    name = command.split()[0]
    done = run(*shlex.split(command), "train.py", *args.split(), cwd=tmp_path)
    told = [line for line in done.stderr.splitlines() if "stands after train.py" in line]
    assert told == [
        f"stepladder: {flag} stands after train.py, so the script gets it: {name}'s own flags"
        f" stand before. HINT: stepladder {name} {flag} ... train.py"
        for flag in named
    ]


# -- a snapshot of another model -------------------------------------------------------------------


@pytest.mark.ranks
def test_a_snapshot_of_another_model_is_told_by_names_and_shapes(tmp_path: Path) -> None:
    job(tmp_path, "torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))", "first.py")
    first = ("train", "first.py", "--global-batch", "8", "--steps", "1", "--run-dir", "first")
    assert run(*first, cwd=tmp_path).returncode == 0
    job(
        tmp_path,
        "torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4), torch.nn.Linear(4, 4))",
    )
    done: subprocess.CompletedProcess[str] = run(*TRAIN, "--init-from", "first", cwd=tmp_path)
    refused(
        done,
        "is of another model: 0.weight is [3, 4] in the model and [2, 4] in the snapshot",
        "0.bias is [3] in the model and [2] in the snapshot",
        "; and 2 more. HINT: --init-from a run of this very model",
    )
    assert not (tmp_path / "new").exists()

"""`stepladder check` on scripts that run: one with a tutorial's faults, a clean one, and the
exercises.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import pytest

from pages import REPOSITORY, expect_documented
from processes import refused, run, started, wait_until
from stepladder.tools.check.check import Request
from stepladder.tools.check.check import check as run_check
from stepladder.tools.check.rules.evidence import CHECK_TEXTS

SCRIPTS = Path(__file__).parent / "scripts"
CORPUS = REPOSITORY / "tests" / "check_corpus"
EXERCISES = REPOSITORY / "lessons" / "exercises"
STORED_NUMBERS = {
    "for graphs": "__import__('torch.utils.tensorboard').utils.tensorboard.SummaryWriter("
    "'graphs').add_scalar('loss', total / count, epoch)",
    "in a file": "__import__('json').dump({'loss': (total / count).item()}, open('log', 'a'))",
}


def check(script: Path, folder: Path, *flags: str, args: tuple[str, ...] = ()) -> tuple[int, dict]:  # type: ignore[type-arg]
    shutil.copy(script, folder / script.name)
    command = [sys.executable, "-m", "stepladder", "check", "--json", *flags, script.name, *args]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.stdout, ran.stderr
    report = json.loads(ran.stdout)
    expect_documented(report, "check", ("isolation",) if "--static" in flags else ())
    return ran.returncode, report


def rules(report: dict) -> set[str]:  # type: ignore[type-arg]
    return {finding["rule"] for finding in report["findings"]}


@pytest.mark.ranks
def test_a_clean_script_has_no_finding_and_its_folder_stays_as_it_was(tmp_path: Path) -> None:
    code, report = check(SCRIPTS / "clean.py", tmp_path)
    assert (code, report["findings"], report["failed"]) == (0, [], "")
    assert [path.name for path in tmp_path.iterdir()] == ["clean.py"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_check_that_is_ended_leaves_no_process_and_no_copy(number: int, tmp_path: Path) -> None:
    """The temporary directory lies in the folder that is copied."""
    temporary = tmp_path / "t"
    marker = tmp_path / "real" / "here"
    temporary.mkdir()
    marker.parent.mkdir()
    script = (
        f"import pathlib, time\npathlib.Path({str(marker)!r}).write_text('x')\ntime.sleep(600)\n"
    )
    (tmp_path / "sleeps.py").write_text(script)
    env = {"TMPDIR": str(temporary)}
    with started(
        "check", "--writes", marker.parent, tmp_path / "sleeps.py", cwd=tmp_path, env=env
    ) as running:
        running.wait_for(marker)
        # With two ranks, and the processes from which they are forked.
        wait_until(lambda: running.record_family() or len(running.family) == 5)
        running.process.send_signal(number)
        assert running.end() == (128 + number if number == signal.SIGTERM else -number)
    assert number == signal.SIGKILL or not list(
        temporary.iterdir()
    )  # else the next start clears up


SLEEPS = """
import pathlib, sys, time, torch
marker, where = pathlib.Path(sys.argv[1]), sys.argv[2]
snapshot = pathlib.Path("model.pt")
is_resumed = snapshot.exists()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if is_resumed:
    model.load_state_dict(torch.load(snapshot, weights_only=True))
for epoch in range(2):
    for batch in torch.utils.data.DataLoader(torch.rand(8, 1), 2, shuffle=True):
        model(batch).square().mean().backward()
        optimizer.step()
    if is_resumed == (where == "resumed"):
        marker.write_text("x")
        time.sleep(600)
    torch.save(model.state_dict(), snapshot)
"""


@pytest.mark.parametrize(
    ("where", "rules"),
    [
        ("first", {"missing-zero-grad"}),
        pytest.param(
            "resumed", {"missing-zero-grad", "incomplete-snapshot"}, marks=pytest.mark.slow
        ),
    ],
)
def test_ctrl_c_reports_what_was_found_and_leaves_nothing(
    where: str, rules: set[str], tmp_path: Path
) -> None:
    """What is certain during the first start is reported, and after its end all that it shows."""
    temporary = tmp_path / "t"
    marker = tmp_path / "real" / "here"
    temporary.mkdir()
    marker.parent.mkdir()
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    flags = "--resume", "--writes", marker.parent
    with started(
        *("check", *flags, "sleeps.py", marker, where), cwd=tmp_path, env={"TMPDIR": str(temporary)}
    ) as running:
        running.wait_for(marker)
        if where == "first":
            wait_until(lambda: "found already" in running.err.read_text(), running.err.read_text)
        running.signal_group(signal.SIGINT)
        assert running.end() == 130
        report = running.out.read_text()
    assert set(re.findall(r"^(?:error|warning) ([\w-]+): ", report, re.MULTILINE)) == rules
    assert "\nstopped by Ctrl-C: " in report
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_a_script_that_fails_by_itself_shows_its_own_traceback(tmp_path: Path) -> None:
    script = tmp_path / "from" / "wrong.py"
    script.parent.mkdir()
    script.write_text(
        "import os\nprint('rank', os.environ['RANK'])\nraise RuntimeError('no data here')\n"
    )
    code, report = check(script, tmp_path)
    assert (code, report["findings"]) == (3, [])
    assert "RuntimeError: no data here" in report["failed"]


def test_a_static_check_compares_no_resumed_run(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "clean.py", tmp_path)
    done = run("check", "--static", "--resume", "clean.py", cwd=tmp_path)
    refused(done, "--resume with --static, which runs nothing")


def test_a_static_check_runs_nothing(tmp_path: Path) -> None:
    script = tmp_path / "from" / "port.py"
    script.parent.mkdir()
    text = "import os\nos.environ['MASTER_PORT'] = '12355'\nopen('made', 'w').close()\nraise SystemExit(9)\n"
    script.write_text(text)
    code, report = check(script, tmp_path, "--static", "--sarif", "out.sarif")
    assert (code, [f["line"] for f in report["findings"]], report["ran"]) == (0, [2], "")
    sarif = json.loads((tmp_path / "out.sarif").read_text())
    assert sarif["version"] == "2.1.0"
    assert [result["ruleId"] for result in sarif["runs"][0]["results"]] == ["fixed-port"]
    assert not (tmp_path / "made").exists()


ONLY_TORCH = "import torch\nx = torch.ones(3, requires_grad=True).sum()\nx.backward()\n"
PREPARES = """\
from torch import nn
from common import Config

def build(config):
    return nn.Linear(config.width, 1)
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it imports no torch"),
        ("# later\n", "it imports no torch"),
        ('{"cells": []}', "it imports no torch"),
        ("import sys, helper\nprint(sys.argv)\n", "it imports no torch"),
        (PREPARES, "it defines functions and classes, and calls none"),
        (ONLY_TORCH, None),
        ("import helper_of_somebody\nhelper_of_somebody.main()\n", None),
    ],
)
@pytest.mark.slow
def test_a_source_without_training_is_not_checked(
    text: str, reason: str | None, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "helper.py").touch()
    done = run("check", "--static", "script.py", cwd=tmp_path)
    assert done.returncode == (3 if reason else 0), done.stdout
    assert (
        reason is None
        or f"no training was seen in the source of script.py: {reason}" in done.stdout
    )


SAVE = "                self._save(epoch)\n"
MAIN = 'if __name__ == "__main__":\n'
SLOWLY = SAVE.replace("self", "(self if int(os.environ['RANK']) else Slow(self))", 1)
SLOW = """
class Slow:
    def __init__(self, trainer):
        self.trainer = trainer

    def _save(self, epoch):  # as one that the system interrupts in the middle of its write
        while not os.path.exists(self.trainer.path) or not os.path.getsize(self.trainer.path):
            pass
        open(self.trainer.path, "wb").close()
        __import__("time").sleep(0.6)
        self.trainer._save(epoch)

"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("save", [SAVE, SLOWLY], ids=["at once", "first rank last"])
def test_the_tutorials_kind_of_script_is_named_in_all_its_faults_with_their_lines(
    save: str, tmp_path: Path
) -> None:
    """Also where a rank is in the middle of its snapshot when another one has stopped after its
    own.
    """
    text = (SCRIPTS / "tutorial.py").read_text()
    assert SAVE in text and MAIN in text
    script = tmp_path / "from" / "tutorial.py"
    script.parent.mkdir()
    script.write_text(text.replace(SAVE, save).replace(MAIN, SLOW + MAIN))
    code, report = check(script, tmp_path, "--resume", "--notes", args=("4", "1"))
    lines = text.splitlines()
    lines_by_rule = {finding["rule"]: lines[finding["line"] - 1] for finding in report["findings"]}
    assert code == 1
    assert "torch.save" in lines_by_rule["in-place-snapshot"]
    assert "torch.save" in lines_by_rule["incomplete-snapshot"]
    assert "torch.save" in lines_by_rule["resume-epoch"]
    assert "backward" in lines_by_rule["learns-nothing"]
    assert "nccl" in lines_by_rule["cuda-only"]
    assert "torch.rand" in lines_by_rule["own-task"]
    assert set(lines_by_rule) == {
        "in-place-snapshot", "incomplete-snapshot", "resume-epoch", "learns-nothing", "cuda-only", "own-task",
        *(["many-writers"] if "RANK'" in save else []),  # only a script that asks for its rank runs on two nodes
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.ranks
def test_the_seven_faults_of_the_classic_trainer_are_named_in_one_run(tmp_path: Path) -> None:
    code, report = check(SCRIPTS / "classic.py", tmp_path, "--resume", args=("4",))
    severities = {finding["rule"]: finding["severity"] for finding in report["findings"]}
    assert code == 1
    assert severities == {
        "learns-nothing": "error",
        "resume-epoch": "error",
        "incomplete-snapshot": "error",
        "in-place-snapshot": "note",
        "many-writers": "error",
        "set-epoch": "error",
        "padded-evaluation": "warning",
        "eval-keeps-graph": "note",
    }
    assert report["findings"][0]["severity"] == "error"


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.ranks
def test_the_eighth_fault_of_the_classic_trainer_shows_when_its_loss_is_not_0(
    tmp_path: Path,
) -> None:
    """With one class each loss is 0, and so is each mean of means."""
    script = tmp_path / "from" / "classic.py"
    script.parent.mkdir()
    text = (SCRIPTS / "classic.py").read_text()
    script.write_text(text.replace("F.cross_entropy", "F.mse_loss"))
    _, report = check(script, tmp_path, args=("4",))
    assert "mean-of-means" in rules(report)
    assert "learns-nothing" not in rules(report)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_classic_trainer_without_a_fault_has_no_finding(tmp_path: Path) -> None:
    code, report = check(SCRIPTS / "classic_clean.py", tmp_path, "--resume", args=("4",))
    assert (code, report["findings"], report["not_checked"]) == (0, [], None)


LOST_MOMENTS = """
import os
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
first = 0
if os.path.exists("s.pt"):
    state = torch.load("s.pt")
    model.load_state_dict(state_dict=state["model"])
    first = state["step"]
x = torch.randn(40, 8, 4)
for step in range(first, 40):
    optimizer.zero_grad()
    model(x[step]).square().mean().backward()
    optimizer.step()
    if step % 10 == 9:
        torch.save({"model": model.state_dict(), "step": step + 1}, "s.tmp")
        os.replace("s.tmp", "s.pt")
"""


@pytest.mark.slow
def test_an_incomplete_snapshot_whose_damage_a_resume_has_measured_is_an_error(
    tmp_path: Path,
) -> None:
    script = tmp_path / "from" / "train.py"
    script.parent.mkdir()
    script.write_text(LOST_MOMENTS)
    code, report = check(script, tmp_path, "--resume")
    findings = {finding["rule"]: finding for finding in report["findings"]}
    assert (code, set(findings)) == (1, {"incomplete-snapshot"})
    incomplete = findings["incomplete-snapshot"]
    assert incomplete["severity"] == "error"
    assert (
        "missing: the optimizer (it has state: momentum or moments); then after step 11"
        in (incomplete["evidence"])
    )


def test_a_note_that_many_sound_scripts_get_is_shown_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ['MASTER_PORT'] = '12355'\n")
    text = replace(CHECK_TEXTS.texts["fixed-port"], on_request=True)
    monkeypatch.setitem(CHECK_TEXTS.texts, "fixed-port", text)
    request = Request(script, static=True, root=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_check(request).findings == []
    (finding,) = run_check(replace(request, shows_notes=True)).findings
    assert finding.rule == "fixed-port"


# One of each kind of mistake and of script, and three clean ones; the whole corpus is `make
# corpus`.
TWELVE = (
    "patches_trainer",
    "trees_validate",
    "games_pickle",
    "cells_conv",
    "gestures_dropout",
    "churn_plain",
    "intents_transformer",
    "shapes_trainer",
    "clicks_files",
    "hospitals_join",
    "shares_by_hand",
    "cats_padded",
)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", TWELVE)
def test_a_planted_mistake_is_found_and_nothing_else(name: str, tmp_path: Path) -> None:
    scripts = tomllib.loads((CORPUS / "corpus.toml").read_text())["script"]
    script = next(entry for entry in scripts if entry["file"] == f"{name}.py")
    flags = ["--notes", *(["--resume"] if script.get("resume") else [])]
    _, report = check(CORPUS / script["file"], tmp_path, *flags)
    planted = set(script["rules"])
    assert planted <= rules(report) <= planted | set(script.get("also", []))


def corpus() -> list[dict]:  # type: ignore[type-arg]
    scripts: list[dict] = tomllib.loads((CORPUS / "corpus.toml").read_text())["script"]  # type: ignore[type-arg]
    return scripts


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", [entry["file"] for entry in corpus() if "twin" in entry])
def test_a_script_and_its_fixed_twin_are_told_apart(name: str, tmp_path: Path) -> None:
    script = next(entry for entry in corpus() if entry["file"] == name)
    fixed_text = (CORPUS / name).read_text()
    edits = iter(script["twin"])
    for faulty, fixed in zip(edits, edits, strict=True):
        assert fixed_text.count(faulty) == 1
        fixed_text = fixed_text.replace(faulty, fixed)
    twin = tmp_path / "from" / name
    twin.parent.mkdir()
    twin.write_text(fixed_text)
    flags = ["--notes", *(["--resume"] if script.get("resume") else [])]
    _, report = check(CORPUS / name, tmp_path, *flags)
    planted = set(script["rules"])
    assert planted <= rules(report) <= planted | set(script.get("also", []))
    code, report = check(twin, tmp_path, *flags)
    assert (code, report["findings"], report["not_checked"]) == (0, [], None)


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("exercise", "rule"),
    [
        ("accumulate", "accumulation-sync"),
        ("batch-norm", "small-batch-norm"),
        ("clip-before-average", "clip-before-average"),
        ("collective-on-one-rank", "collective-order"),
        ("early-stop", "collective-order"),
        ("hdf5-fork", "file-over-fork"),
        ("mean-of-means", "mean-of-means"),
        ("module-prefix", "module-prefix"),
        ("one-class", "learns-nothing"),
        ("optimizer-left-out", "incomplete-snapshot"),
        ("resume-repeats-epoch", "resume-epoch"),
        ("save-by-local-rank", "many-writers"),
        ("schedule", "schedule-per-rank"),
        ("set-epoch", "set-epoch"),
        ("torn-snapshot", "in-place-snapshot"),
        ("uneven-batches", "uneven-steps"),
    ],
)
def test_the_silent_bugs_of_the_exercises_are_found(
    exercise: str, rule: str, tmp_path: Path
) -> None:
    _, report = check(EXERCISES / exercise / "exercise.py", tmp_path, "--notes")
    assert rule in rules(report)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("stored", STORED_NUMBERS)
def test_a_number_that_is_stored_is_shown_like_one_that_is_printed(
    stored: str, tmp_path: Path
) -> None:
    lines = (CORPUS / "tidepools.py").read_text().splitlines()
    text = [
        line[: line.index("print(")] + STORED_NUMBERS[stored] if "print(" in line else line
        for line in lines
    ]
    script = tmp_path / "from" / "stores.py"
    script.parent.mkdir()
    script.write_text("\n".join(text))
    _, report = check(script, tmp_path)
    assert rules(report) == {"one-rank-loss"}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_for_gpus_alone_runs_on_simulated_ones(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "cuda_only.py", tmp_path)
    command = [sys.executable, "-m", "stepladder", "run", "--simulate-gpus", "2", "cuda_only.py"]
    ran = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    assert "2 GPUs are simulated" in ran.stderr
    assert ran.stdout.count("True simulated GPU False") == 2
    assert "moves to a simulated GPU on rank 0" in ran.stderr


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.ranks
def test_a_parent_that_misses_what_ended_ranks_would_have_left_does_not_fail(
    tmp_path: Path,
) -> None:
    """The check ends the ranks after two of three epochs, before they write their result."""
    script = CORPUS / "geysers_profiled.py"
    code, report = check(script, tmp_path, "--epochs", "2")
    assert (code, report["findings"], report["not_checked"]) == (0, [], None)
    assert report["ran"].endswith("then the check ended it")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["patches_trainer", "stop_early", "flowers_keep", "birds_resume"])
def test_a_script_that_is_checked_again_gets_the_same_report(name: str, tmp_path: Path) -> None:
    """One that hangs, two ranks that write one file, and one that is ended and resumed, are among
    them.
    """
    script = CORPUS / f"{name}.py"
    # Without a number of epochs their number depends on the time that two of them take.
    flags = ("--notes", "--epochs", "5", *(["--resume"] if name.endswith("resume") else []))
    _, report = check(script, tmp_path, *flags)
    assert report["findings"]
    assert check(script, tmp_path, *flags)[1] == report


SEEDS_NOTHING = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if dist.get_rank() == 0:
        print("loss", total / len(loader))
dist.destroy_process_group()
"""
STORE = '"gloo", "tcp://localhost:29517", rank=rank, world_size=2'


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("start", ["torchrun", "spawn"])
def test_the_losses_of_a_script_that_seeds_nothing_are_the_same_in_each_check(
    start: str, tmp_path: Path
) -> None:
    """Ranks still draw other numbers than each other, as they do without a check."""
    text = SEEDS_NOTHING
    if start == "spawn":
        imports, _, body = text.partition("dist.init_process_group")
        body = f"dist.init_process_group{body}".replace('"gloo"', STORE)
        spawn = "torch.multiprocessing.spawn(main, nprocs=2)"
        main = "if __name__ == '__main__':"
        text = f"{imports}def main(rank):\n{indent(body, '    ')}\n{main}\n    {spawn}\n"
    script = tmp_path / "made" / "unseeded.py"
    script.parent.mkdir()
    script.write_text(text)
    _, report = check(script, tmp_path, "--notes", "--epochs", "2")
    assert {"one-rank-loss", "own-task"} <= rules(report)
    assert check(script, tmp_path, "--notes", "--epochs", "2")[1] == report


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_that_makes_its_ranks_gets_the_number_that_the_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "made" / "counted.py"
    script.parent.mkdir()
    text = SEEDS_NOTHING.replace('"gloo"', STORE)
    imports, _, body = text.partition("data = ")
    script.write_text(
        f"import os\n{imports.replace('dist.init', '# dist.init')}"
        f"def main(rank):\n    dist.init_process_group({STORE})\n{indent(f'data = {body}', '    ')}"
        "\nif __name__ == '__main__':\n"
        "    torch.multiprocessing.spawn(main, nprocs=int(os.environ['WORLD_SIZE']))\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, report = check(script, tmp_path, "--epochs", "2")
    assert (report["failed"], report["not_checked"]) == ("", None)
    assert report["ran"].startswith("2 ranks")


RESUMES_WITH_A_FLAG = """import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if "--resume" in sys.argv:
    snapshot = torch.load("snapshot.pt", weights_only=True)
    model.module.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    first = snapshot["step"]
for step in range(first, 6):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step + 1}, "snapshot.pt.new")
        os.replace("snapshot.pt.new", "snapshot.pt")
dist.barrier()
dist.destroy_process_group()
"""
RAISES = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (x,) in enumerate(DataLoader(data, 8, sampler=DistributedSampler(data))):
    if number == 2 and dist.get_rank() == 1:
        raise ValueError("no such label")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_that_resumes_only_with_an_argument_is_told_how_to_give_it(tmp_path: Path) -> None:
    script = tmp_path / "from" / "train.py"
    script.parent.mkdir()
    script.write_text(RESUMES_WITH_A_FLAG)
    _, report = check(script, tmp_path, "--resume")
    line = report["not_checked"]["line"]
    assert "has loaded no snapshot" in line and "--resume-args '--resume snapshot.pt'" in line
    _, report = check(script, tmp_path, "--resume", "--resume-args", "--resume")
    assert report["not_checked"] is None


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_raises_is_not_said_to_have_left_the_loop(tmp_path: Path) -> None:
    script = tmp_path / "from" / "train.py"
    script.parent.mkdir()
    script.write_text(RAISES)
    code, report = check(script, tmp_path)
    assert (code, report["findings"]) == (3, [])
    assert "ValueError: no such label" in report["failed"]
    assert report["ran"] == "2 ranks, 2 steps on each, then it failed in epoch 1"

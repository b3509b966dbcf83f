"""`check --fix`: a patch of the user's own lines, which is applied and does what the finding says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from processes import refused, run
from stepladder.tools.check.fixes import make_patch
from stepladder.tools.check.rules.evidence import CHECK_TEXTS
from stepladder.tools.findings.finding import Location

EPOCHS = """for epoch in range(3):
    for x, y in tqdm(loader):
        train(x, y)
"""
EXAMPLES = {
    "set-epoch, never called": (
        "set-epoch",
        EPOCHS,
        "    for x, y in",
        EPOCHS.replace("    for x", "    loader.sampler.set_epoch(epoch)\n    for x"),
    ),
    "set-epoch, a constant": (
        "set-epoch",
        "def run(self, epoch):\n    self.sampler.set_epoch(0)\n",
        "set_epoch(0)",
        "def run(self, epoch):\n    self.sampler.set_epoch(epoch)\n",
    ),
    "missing-zero-grad": (
        "missing-zero-grad",
        "for x in loader:\n    loss(x).backward()\n    optimizer.step()\n",
        "optimizer.step()",
        "for x in loader:\n    loss(x).backward()\n    optimizer.step()\n    optimizer.zero_grad()\n",
    ),
    "missing-zero-grad, scaled": (
        "missing-zero-grad",
        "if x:\n    scaler.step(self.optimizer)\n    scaler.update()\n",
        "scaler.step",
        "if x:\n    scaler.step(self.optimizer)\n    self.optimizer.zero_grad()\n    scaler.update()\n",
    ),
    "in-place-snapshot": (
        "in-place-snapshot",
        'import torch\ndef save():\n    torch.save(\n        {"ä": 1}, "s.pt"\n    )\n',
        "torch.save(",
        'import os\nimport torch\ndef save():\n    torch.save(\n        {"ä": 1}, str(\'s.pt\') + ".tmp"\n    )\n'
        "    os.replace(str('s.pt') + \".tmp\", 's.pt')\n",
    ),
    "unsafe-load": (
        "unsafe-load",
        "s = torch.load(path, weights_only=False)\n",
        "torch.load",
        "s = torch.load(path, weights_only=True)\n",
    ),
    "many-writers": (
        "many-writers",
        "import torch.distributed as dist\nif self.local_rank == 0 and ready:\n    torch.save(s, p)",
        "torch.save",
        "import torch.distributed as dist\nif dist.get_rank() == 0 and ready:\n    torch.save(s, p)",
    ),
    "eval-keeps-graph": (
        "eval-keeps-graph",
        "class T:\n    def test(self):\n        return self.model(x)\n",
        "self.model",
        "class T:\n    @torch.no_grad()\n    def test(self):\n        return self.model(x)\n",
    ),
    "graph-kept": ("graph-kept", "total += loss\n", "total", "total += loss.item()\n"),
}
NOT_MECHANICAL = {
    "no loop over epochs": ("set-epoch", "for x in loader:\n    train(x)\n", "for x"),
    "an evaluation within the training": (
        "eval-keeps-graph",
        "def f():\n    loss.backward()\n    model(x)\n",
        "model(x)",
    ),
    "a rank of another name": ("many-writers", "if main:\n    torch.save(s, p)\n", "torch.save"),
    "another rule": ("same-samples", "loader = DataLoader(data)\n", "loader"),
}


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def patch_of(folder: Path, rule: str, text: str, part: str) -> str:
    (folder / "train.py").write_text(text)
    finding = CHECK_TEXTS.finding(rule, Location("train.py", line_of(text, part)), "seen")
    return make_patch([finding], folder).text


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_patch_is_applied_to_the_users_own_lines(name: str, tmp_path: Path) -> None:
    rule, text, part, expected = EXAMPLES[name]
    patch = patch_of(tmp_path, rule, text, part)
    assert (tmp_path / "train.py").read_text() == text
    subprocess.run(["git", "apply"], cwd=tmp_path, input=patch, text=True, check=True)
    assert (tmp_path / "train.py").read_text() == expected


@pytest.mark.parametrize("name", NOT_MECHANICAL)
def test_a_fix_that_needs_a_thought_is_in_no_patch(name: str, tmp_path: Path) -> None:
    rule, text, part = NOT_MECHANICAL[name]
    assert patch_of(tmp_path, rule, text, part) == ""


def test_one_patch_holds_the_fixes_of_several_findings(tmp_path: Path) -> None:
    text = "import torch\nfor epoch in range(3):\n    for x in loader:\n        optimizer.step()\n"
    (tmp_path / "train.py").write_text(text)
    findings = [
        CHECK_TEXTS.finding(rule, Location("train.py", line), "seen")
        for rule, line in (("missing-zero-grad", 4), ("set-epoch", 3), ("set-epoch", 3))
    ]
    patch = make_patch(findings, tmp_path)
    assert [finding.rule for finding in patch.fixed] == ["missing-zero-grad", "set-epoch"]
    subprocess.run(["git", "apply"], cwd=tmp_path, input=patch.text, text=True, check=True)
    assert (tmp_path / "train.py").read_text() == (
        "import torch\nfor epoch in range(3):\n    loader.sampler.set_epoch(epoch)\n"
        "    for x in loader:\n        optimizer.step()\n        optimizer.zero_grad()\n"
    )


def test_the_command_writes_the_patch_and_not_the_source(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\ns = torch.load('s.pt', weights_only=False)\n")
    before = script.read_bytes()
    command = [sys.executable, "-m", "stepladder", "check", "--static", "--fix", "f.patch"]
    ran = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, script.read_bytes()) == (1, before)
    assert "1 of 1 findings have a fix in f.patch: patch -p1 < f.patch" in ran.stderr
    patch = (tmp_path / "f.patch").read_text()
    subprocess.run(["git", "apply"], cwd=tmp_path, input=patch, text=True, check=True)
    assert "weights_only=True" in script.read_text()


@pytest.mark.parametrize("flag", ["--fix", "--sarif"])
@pytest.mark.parametrize("name", ["train.py", "notes.txt"])
def test_a_file_of_the_users_is_not_replaced(flag: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "notes.txt").write_text("mine\n")
    before = (tmp_path / name).read_bytes()
    done = run("check", "--static", flag, name, "train.py", cwd=tmp_path)
    refused(done, f"{flag} {name} is there already, and is no earlier output of stepladder")
    assert (tmp_path / name).read_bytes() == before


def test_an_earlier_patch_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.load('s', weights_only=False)\n")
    codes = [
        run("check", "--static", "--fix", "f", "train.py", cwd=tmp_path).returncode
        for _ in range(2)
    ]
    assert codes == [1, 1]

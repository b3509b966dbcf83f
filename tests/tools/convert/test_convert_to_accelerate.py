"""`convert --to accelerate`: the same rungs, with an accelerator in place of torch.distributed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from processes import refused, run
from stepladder.tools.check.events import Backward, NamesWhereBuilt
from stepladder.tools.check.recording import RankLog, Recording
from stepladder.tools.convert.accelerate import HELPERS_IN_ACCELERATE, prepare_steps, translate
from stepladder.tools.convert.conversion import Conversion
from stepladder.tools.convert.convert import ConversionRequest, convert
from stepladder.tools.convert.facts import ScriptFacts
from stepladder.tools.convert.helpers import HELPERS
from stepladder.tools.convert.ladder import compose
from stepladder.tools.convert.source import SourceText
from stepladder.tools.probe.events import CodeLine

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "one_process.py"

ranks = pytest.mark.ranks


@pytest.mark.parametrize("name", sorted(HELPERS.keys() - {"inner_model"}))
def test_no_function_of_a_converted_script_needs_a_process_group(name: str) -> None:
    text = translate((HELPERS | HELPERS_IN_ACCELERATE)[name], is_main=True)
    assert "dist." not in text
    compile(text, name, "exec")


def test_a_wrapper_with_arguments_takes_them_from_the_accelerator() -> None:
    text = translate("    m = DistributedDataParallel(m, broadcast_buffers=False)\n", is_main=False)
    assert text == (
        "    started_accelerator().ddp_handler = "
        "DistributedDataParallelKwargs(broadcast_buffers=False)\n"
        "    m = started_accelerator().prepare(m)\n"
    )


def test_steps_are_made_by_the_accelerator(tmp_path: Path) -> None:
    lines = [
        "optimizer = SGD(model.parameters())",
        "(a + b).backward()",
        "scaler.scale(loss).backward(retain_graph=True)",
        "loss.backward(",
        ")",
    ]
    (tmp_path / "train.py").write_text("\n".join(lines) + "\n")
    events = [
        NamesWhereBuilt(places=[("train.py", 1, "<module>", [])]),
        *(Backward(at=CodeLine("train.py", line)) for line in (2, 3, 4)),
    ]
    files = {"train.py": SourceText.read(tmp_path / "train.py", "train.py")}
    facts = ScriptFacts(Recording([RankLog(0, events)], 1))
    conversion = Conversion("train.py", files, facts, by_accelerate=True)
    text = compose(conversion, [list(prepare_steps(conversion))])["train.py"].text
    assert text.splitlines() == [
        "optimizer = accelerator.prepare(SGD(model.parameters()))",
        "accelerator.backward((a + b))",
        "accelerator.backward(scaler.scale(loss), retain_graph=True)",
        "accelerator.backward(loss)",
    ]


@ranks
def test_accelerate_must_be_installed(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    # A module of None in sys.modules is one that cannot be found.
    code = (
        "import sys; sys.modules['accelerate'] = None; from stepladder.__main__ import main; main()"
    )
    command = [sys.executable, "-c", code, "convert", "--to", "accelerate", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    refused(done, "--to accelerate: accelerate is not installed. HINT: pip install accelerate")


@ranks
@pytest.mark.slow
def test_a_script_of_accelerate_shows_the_numbers_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    shutil.copy(EXAMPLE, tmp_path / "train.py")
    monkeypatch.chdir(tmp_path)
    result = convert(ConversionRequest(tmp_path / "train.py", to="accelerate"))
    assert result.stopped == ""
    assert "dist." not in result.files["train.py"]
    (tmp_path / "train_accelerate.py").write_text(result.files["train.py"])
    alone = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=60)
    expected = alone.stdout.splitlines()
    assert expected
    done = run("run", "--nproc", 2, "train_accelerate.py", cwd=tmp_path)
    assert done.stdout.splitlines() == [f"[rank 0] {line}" for line in expected]

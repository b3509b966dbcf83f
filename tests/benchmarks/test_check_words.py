"""The two other texts of a script that benchmarks/check_words.py checks: other words, other names."""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from stepladder.tools.check.rules.all_rules import apply_source_rules
from stepladder.tools.check.script_source import read_source

CORPUS = Path(__file__).parents[1] / "check_corpus"
COUNTS = '''
import argparse, math as arithmetic
from dataclasses import dataclass, field
from torch.nn import Module as Base

@dataclass
class Settings:
    """What is counted."""
    rank: int
    best: list = field(default_factory=list)

class Net(Base):
    def __init__(self, width, depth=2):
        super().__init__()
        self.width, self.depth = width, depth
    def forward(self, batch, *, scale):
        return self.area(batch=batch) * scale
    def area(self, batch):
        return self.width * self.depth * sum(x for x in batch) + arithmetic.floor(2.5)

def main(settings, resume=None):
    net = Net(width=3)
    total = 0
    for rank in range(settings.rank):
        total += net([rank, 1], scale=2)
        settings.best.append(total)
    print(total, settings.best, len(list(net.parameters())), getattr(net, "width"), resume)

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int, default=4)
parser.add_argument("path", nargs="?")
options = parser.parse_args([])
main(Settings(rank=options.local_rank), resume=options.path)
'''
STATES = """
import torch
class Trainer(torch.optim.lr_scheduler.LambdaLR):
    def step(self, epoch=None):
        self.count = getattr(self, "count", 0) + 1
    @property
    def is_master(self):
        return self.count > 1
class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(2, 1)
        self.scale = torch.nn.Parameter(torch.ones(1))
    def forward(self, input):
        return self.encoder(input) * self.scale
torch.manual_seed(0)
pair = Pair()
trainer = Trainer(torch.optim.SGD(pair.parameters(), lr=0.1), lr_lambda=float)
state = {"encoder.weight": torch.ones(1, 2), "encoder.bias": torch.zeros(1)}
print(pair.load_state_dict(state, strict=False).missing_keys.__len__())
for lr in (1, 2):
    pair(input=torch.ones(1, 2)).sum().backward()
    lr_lambda = 1
    trainer.step()
    rank = lr
def show(*values, **named):
    global shown
    shown = [round(float(v), 4) for v in values]
    return shown, trainer.is_master, [group["lr"] for group in trainer.optimizer.param_groups]
with torch.no_grad() as nothing:
    print(show(pair.scale, pair.encoder.bias, rank=3), [e for e in shown if (late := e) > 0], late)
"""


@pytest.fixture(scope="module")
def check_words() -> Iterator[ModuleType]:
    pytest.importorskip("libcst")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        import check_words

        yield check_words


def output_of(text: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    return shown.getvalue()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            COUNTS,
            {
                "rank",
                "argparse",
                "dataclass",
                "field",
                "forward",
                "path",
                "width",
                "batch",
                "scale",
            },
        ),
        (
            STATES,
            {
                "torch",
                "step",
                "epoch",
                "lr_lambda",
                "forward",
                "input",
                "encoder",
                "count",
                "scale",
            },
        ),
    ],
)
@pytest.mark.slow
def test_a_script_with_other_names_does_the_same(
    check_words: ModuleType, text: str, kept: set[str]
) -> None:
    renamed, _ = check_words.with_names(text)
    assert output_of(renamed) == output_of(text)
    nodes = list(ast.walk(ast.parse(renamed)))
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    bound |= {
        n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    own = {name for name in bound if not name.startswith(("v", "__")) and name != "self"}
    assert own <= kept


@pytest.mark.parametrize("name", ["brooks.py", "stamps_gpu.py"])
def test_a_script_with_words_is_the_same_but_for_comments_and_strings(
    check_words: ModuleType, name: str, tmp_path: Path
) -> None:
    text = (CORPUS / name).read_text()
    changed, lines = check_words.with_words(text)
    assert all(word in changed for word in check_words.WORDS) and len(check_words.WORDS) >= 80
    kept = [changed.splitlines()[n] for n, line in enumerate(lines) if line is not None]
    assert kept == text.splitlines()
    script = tmp_path / name
    findings = []
    for version in (text, changed):
        script.write_text(version)
        findings.append(apply_source_rules(read_source(script, tmp_path)))
    rules = [[(f.rule, f.severity) for f in found] for found in findings]
    assert rules[0] == rules[1]
    assert [lines[f.location.line - 1] for f in findings[1]] == [
        f.location.line for f in findings[0]
    ]

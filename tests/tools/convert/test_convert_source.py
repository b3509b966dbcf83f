"""Edits of a script keep everything that they do not change."""

from __future__ import annotations

import ast
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stepladder.tools.check.events import Print
from stepladder.tools.check.recording import RankLog, Recording
from stepladder.tools.convert.conversion import Conversion
from stepladder.tools.convert.facts import ScriptFacts
from stepladder.tools.convert.helpers import HELPERS
from stepladder.tools.convert.ladder import compose
from stepladder.tools.convert.loops import arguments_of_range
from stepladder.tools.convert.rungs import find_joined, find_lines_not_judged
from stepladder.tools.convert.rungs_files import write_once
from stepladder.tools.convert.shortening import FIRST_STEPS, shorten_epochs
from stepladder.tools.convert.shown_expressions import (
    find_deciding_value,
    find_shown_expression,
    take_of_all,
)
from stepladder.tools.convert.source import CannotConvert, SourceText, diff
from stepladder.tools.probe.events import CodeLine

TEXT = """\
import torch  # the only import


@decorated
def train(model):  # é
    for epoch in range(3):
        for batch in loader:  # all of them
            loss = model(batch); loss.backward()
        print("Ω", loss)

train(model)
"""


@pytest.fixture
def source(tmp_path: Path) -> SourceText:
    path = tmp_path / "train.py"
    path.write_text(TEXT)
    return SourceText.read(path, "train.py")


def test_no_edit_changes_nothing(source: SourceText) -> None:
    edited = source.apply([])
    assert edited.text == TEXT
    numbers = [number for number in edited.original_lines if number]
    assert numbers == [1, 4, 5, 6, 7, 8, 9, 11]


def test_lines_come_before_and_after_a_statement_with_its_indentation(source: SourceText) -> None:
    loop = source.statement_at(7)
    edits = [source.insert_before(loop, "begin()"), source.insert_after(loop, "end()\nlog()")]
    text = source.apply(edits).text
    assert "        begin()\n        for batch in loader:  # all of them\n" in text
    assert "loss.backward()\n        end()\n        log()\n        print" in text


def test_a_decorated_function_keeps_its_decorator(source: SourceText) -> None:
    edits = [source.insert_before(source.tree.body[1], "x = 1")]
    assert "x = 1\n@decorated\ndef train" in source.apply(edits).text


def test_an_expression_is_wrapped_beside_letters_of_several_bytes(source: SourceText) -> None:
    (call,) = [one for one in source.nodes_at(ast.Call, 9) if len(one.args) == 2]
    edited = source.apply(source.wrap(call.args[1], "mean("))
    assert 'print("Ω", mean(loss))' in edited.text


def test_each_line_knows_its_original(source: SourceText) -> None:
    edits = source.guard(source.statement_at(9), "is_first")
    edited = source.apply([source.insert_before(source.statement_at(7), "begin()"), *edits])
    lines = edited.text.splitlines()
    by_text = {line.strip(): edited.original_lines[n] for n, line in enumerate(lines)}
    assert by_text['print("Ω", loss)'] == 9
    assert by_text["begin()"] is None and by_text["if is_first:"] is None
    assert by_text["train(model)"] == 11
    assert '            print("Ω"' in edited.text


def test_what_ends_a_loop_comes_before_what_is_put_around_the_next_statement(
    source: SourceText,
) -> None:
    train, loop = source.statement_at(11), source.statement_at(6)
    edits = [
        *source.guard(train, "is_first"),
        source.insert_before(train, "begin()"),
        source.insert_after(loop, "end()"),
        source.replace(train, "run(model)"),
    ]
    text = source.apply(edits).text
    assert text.endswith("    end()\n\nbegin()\nif is_first:\n    run(model)\n")


def test_inner_blocks_end_before_outer_ones(source: SourceText) -> None:
    function, loop = source.tree.body[1], source.statement_at(9)
    edits = [source.insert_after(function, "outer()"), source.insert_after(loop, "inner()")]
    assert "        inner()\nouter()\n" in source.apply(edits).text


SHARED = """\
x = f(
  1); y = 2; z = 3
if x: y = 4; z = 5  # both
else: z = 6
for i in range(3): x += 1
while y: y = 0
"""


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("y", 2, "x = f(\n  1)\nbegin()\nif rank:\n    y = 2\nend()\nz = 3\nif x: y"),
        ("z", 2, "y = 2\nbegin()\nif rank:\n    z = 3\nend()\nif x: y = 4"),
        ("y", 3, "if x:\n    begin()\n    if rank:\n        y = 4\n    end()\n    z = 5  # both\n"),
        (
            "z",
            3,
            "if x:\n    y = 4\n    begin()\n    if rank:\n        z = 5\n    end()  # both\nelse",
        ),
        ("z", 4, "else:\n    begin()\n    if rank:\n        z = 6\n    end()\nfor"),
        ("y", 6, "while y:\n    begin()\n    if rank:\n        y = 0\n    end()\n"),
    ],
)
def test_statements_of_one_line_get_lines_of_their_own_where_one_changes(
    name: str, line: int, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SHARED)
    source = SourceText.read(path, "train.py")
    (statement,) = [
        item
        for item in source.nodes(ast.Assign)
        if item.lineno == line and source.text_of(item.targets[0]) == name
    ]
    edits = [source.insert_after(statement, "end()"), source.insert_before(statement, "begin()")]
    edited = source.apply([*edits, *source.guard(statement, "rank")])
    ast.parse(edited.text)
    assert expected in edited.text
    changed = (
        edited.text.splitlines().index(next(t for t in edited.text.splitlines() if "if rank" in t))
        + 1
    )
    assert edited.original_lines[changed] == line


def test_a_loop_of_one_line_is_around_its_body_and_a_with_of_one_line_opens_its_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.py"
    path.write_text("for i in range(3): train()\nwith open('log') as file: write(file)\n")
    source = SourceText.read(path, "train.py")
    assert source.loops_around(source.statement_at(1)) == source.tree.body[:1]
    assert source.statement_at(2) is source.tree.body[1]


@pytest.mark.parametrize(
    ("value", "is_joined"),
    [
        ("torch.cat((all, x))", True),
        ("x if all is None else np.concatenate([all, x], axis=0)", True),
        ("torch.cat([all, x], 1)", False),
        ("torch.cat([x, x])", False),
        ("np.hstack((all, x))", False),
    ],
)
def test_a_variable_is_joined_if_a_loop_adds_rows_to_it(
    value: str, is_joined: bool, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"all = None\nfor x in loader:\n    all = {value}\nprint(all)\n")
    source = SourceText.read(path, "train.py")
    (loop,) = source.nodes(ast.For)
    assert find_joined(source, loop) == ({"all"} if is_joined else set())


def test_a_text_of_several_lines_is_not_indented(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text('print("""a\nb""")\n')
    source = SourceText.read(path, "train.py")
    with pytest.raises(CannotConvert, match="text of several lines"):
        source.guard(source.tree.body[0], "is_first")


def test_two_changes_of_one_place_are_refused(source: SourceText) -> None:
    call = source.nodes_at(ast.Call, 11)[0]
    with pytest.raises(CannotConvert, match="two changes"):
        source.apply([source.replace(call, "a"), source.replace(call.args[0], "b")])


def test_a_diff_shows_what_changes_alone() -> None:
    text = diff("train.py", "a\nb\nc\nd\n", "a\nb\nx\nd\n")
    assert text.splitlines()[2:] == ["@@ -2,3 +2,3 @@", " b", "-c", "+x", " d"]


@pytest.mark.parametrize(
    ("line", "text", "shown"),
    [
        ('print(f"{name} of 10000: {hits} %")', "model 2 of 10000: 7 %", ["name", None, "hits"]),
        ('print("Epoch: ", epoch, "| %.4f" % loss)', "Epoch:  3 | 0.5000", ["epoch", "loss"]),
        ('print("[%s/%d] %5.2f%%" % (step, n, x))', "[4/10]  7.00%", ["step", "n", "x"]),
        ('print({"epoch": epoch, "x": x.item()})', "{'epoch': 1, 'x': 2.5}", ["epoch", "x.item()"]),
        ('print("{e} {:.2f} {:.1f}".format(a, b, e=c))', "1 2.00 3.0", ["c", "a", "b"]),
        ('writer.add_scalar("loss 1", x, global_step=n)', "loss 1 0.5 20", [None, "x", "n"]),
        ("print(text)\nprint(x)", "3 of 4", ["text", "text"]),
        ("print(text)\ntext = f'{n}/{m} ' + f'loss: {x:.4f}'", "1/3 loss: 0.5000", ["n", "m", "x"]),
        ("print(a + b, 'of', n)", "3.5 of 4", ["a + b", "n"]),
        ("print(f'{total:.2f}')", "3.50", ["total"]),
        ('log.info("step %d loss %.4f", n, x.item())', "step 2 loss 0.5000", ["n", "x.item()"]),
    ],
)
def test_each_number_that_was_shown_has_its_expression(
    line: str, text: str, shown: list[str | None], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(line)
    source = SourceText.read(tmp_path / "train.py", "train.py")
    found = [find_shown_expression(source, 1, text, number) for number in range(len(shown))]
    assert [item and source.text_of(item) for item in found] == shown


@pytest.mark.parametrize(
    ("turns", "args"),
    [
        ("range(3)", ["3"]),
        ("tqdm.tqdm(range(first, 9), leave=False)", ["first", "9"]),
        ("trange(n, desc='epochs')", ["n"]),
        ("reversed(range(3))", []),  # its first turn is not the first of the range
        ("epochs", []),
    ],
)
def test_a_loop_over_a_range_may_show_its_progress(turns: str, args: list[str]) -> None:
    (loop,) = ast.parse(f"for epoch in {turns}: pass").body
    assert isinstance(loop, ast.For)
    assert list(map(ast.unparse, arguments_of_range(loop))) == args


def test_a_snapshot_has_what_an_object_changes() -> None:
    names: dict[str, Any] = {"json": json, "torch": torch}
    exec(HELPERS["Attributes"], names)  # as the converted script does
    fixed = {"epochs": 3, "data": torch.ones(3), "model": torch.nn.Linear(1, 1)}

    def make() -> tuple[SimpleNamespace, Any]:
        owner = SimpleNamespace(best=math.inf, step=0, history=[], mean=torch.zeros(2), **fixed)
        return owner, names["Attributes"](owner)

    owner, attributes = make()
    assert attributes.state_dict() == {}
    owner.best, owner.step = np.float32(0.5), 7
    owner.history.append({"loss": 0.25})
    owner.mean += 1  # in place
    owner.last = torch.ones(1, requires_grad=True) * 2
    state = attributes.state_dict()
    assert state.keys() == {"best", "step", "history", "mean", "last"}
    resumed, parts = make()
    parts.load_state_dict(state)
    assert (resumed.best, resumed.step, resumed.history) == (0.5, 7, [{"loss": 0.25}])
    assert torch.equal(resumed.mean, torch.ones(2)) and resumed.last.item() == 2
    assert parts.state_dict().keys() == state.keys()  # the next snapshot has them too


@pytest.mark.parametrize(
    ("lines", "deciding"),
    [
        (["x = mean(loader)", "print(x)", "if x < best: stop()"], "mean(loader)"),
        (["y = mean(loader)", "x = y", "print(x)", "if x < y: stop()"], "mean(loader)"),
        (["x = mean(loader)", "print(x)"], None),
        (["x = mean(loader)", "print(x)", "schedule.step(x)"], "mean(loader)"),
        (["x = mean(loader)", "print(x)", "early_stopping(x.item(), net)"], "mean(loader)"),
        (["x = mean(loader)", "print(x)", "history.append(x)"], None),
        (["x = loss(net)", "print(x)", "x.backward()", "schedule.step(x)"], None),
        (["x = mean(loader)", "x = y = mean(test)", "print(x)", "if x < best: stop()"], None),
        (["y = x", "x = y", "print(x)", "if x < y: stop()"], None),
        (["x = mean(loader)", "print(x)", "if x < 9: x.backward()"], None),
        (["x = 0.0", "x += mean(loader)", "print(x)", "if x < best: stop()"], None),
        (["x.add(loader)", "print(x.mean)", "if x.mean < best: stop()"], "x.mean"),
        (["x.add(loader)", "print(x.mean)", "if x.sum < best: stop()"], None),
    ],
)
def test_the_value_by_which_a_script_decides_is_that_of_all(
    lines: list[str], deciding: str | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("\n".join(lines))
    source = SourceText.read(tmp_path / "train.py", "train.py")
    [shown] = [
        call.args[0] for call in source.nodes(ast.Call) if source.text_of(call.func) == "print"
    ]
    value = find_deciding_value(source, shown, {"early_stopping"})
    assert (value and source.text_of(value)) == deciding


@pytest.mark.parametrize("is_shown_first", [True, False])
def test_an_attribute_by_which_a_script_decides_becomes_that_of_all_before_it_is_read(
    is_shown_first: bool, tmp_path: Path
) -> None:
    readers = ["print(x.mean)\n", "if x.mean < best:\n    best = x.mean\n"]
    lines = "".join(readers if is_shown_first else reversed(readers))
    (tmp_path / "train.py").write_text(f"x.add(loader)\n{lines}")
    source = SourceText.read(tmp_path / "train.py", "train.py")
    [shown] = [
        call.args[0] for call in source.nodes(ast.Call) if source.text_of(call.func) == "print"
    ]
    edits = take_of_all(source, shown, "mean_of")
    assert source.apply(edits).text == f"x.add(loader)\nx.mean = mean_of(x.mean)\n{lines}"


def test_lines_that_no_run_has_shown_or_that_showed_a_0_are_not_judged(tmp_path: Path) -> None:
    lines = ["step", '"done"', "loss", "x if y else z"]
    (tmp_path / "train.py").write_text("\n".join(f"print({line})" for line in lines))
    printed = [
        Print(at=CodeLine("train.py", 1), text="0"),
        Print(at=CodeLine("train.py", 3), text="7"),
    ]
    found = find_lines_not_judged(convert_printed(tmp_path / "train.py", printed))
    assert [call.lineno for _, call in found] == [1, 4]


def test_what_prints_in_rare_steps_and_was_not_judged_prints_in_the_first_steps(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(
        "if (step + 1) % every == 0 and verbose:\n    print(loss)\n"
        "if step % 2 == 0:\n    print(step)\n"
    )
    printed = [Print(at=CodeLine("train.py", 4), text="2")] * 10
    conversion = convert_printed(tmp_path / "train.py", printed)
    text = compose(conversion, [shorten_epochs(conversion, 2)])["train.py"].text
    assert text.splitlines()[::2] == [
        f"if ((step + 1) % every == 0 or (step + 1) % every < {FIRST_STEPS}) and verbose:",
        "if step % 2 == 0:",
    ]


def test_each_process_may_make_a_folder_unless_the_script_asks_whether_it_was_there(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    kept = "import os\ntry:\n    os.mkdir(a)\nexcept FileExistsError:\n    n += 1\n"
    script.write_text(f"{kept}os.mkdir(b)\nos.makedirs(c,)\nos.makedirs(d, exist_ok=False)\n")
    conversion = convert_printed(script, [])
    text = compose(conversion, [list(write_once(conversion))])["train.py"].text
    assert text == (
        f"{kept}os.makedirs(b, exist_ok=True)\nos.makedirs(c,exist_ok=True)\n"
        "os.makedirs(d, exist_ok=False)\n"
    )


def convert_printed(script: Path, printed: list[Print]) -> Conversion:
    """Return the conversion of a script whose run has printed some lines."""
    facts = ScriptFacts(Recording([RankLog(0, [*printed])], 1))
    return Conversion(script.name, {script.name: SourceText.read(script, script.name)}, facts)


def test_a_module_that_a_helper_imports_takes_no_name_from_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from time import time\nprint(time())\n")
    conversion = convert_printed(tmp_path / "train.py", [])
    file = conversion.files["train.py"]
    edits = [file.insert_before(file.tree.body[1], "save_without_barrier(1, time.ctime())")]
    text = compose(conversion, [edits])["train.py"].text
    assert "import time as time_module\n" in text
    assert "time_module.sleep(0.01)" in text and "time_module.ctime()" in text
    assert "\nprint(time())\n" in text


def test_a_sum_over_processes_of_what_has_a_gradient_can_be_changed_in_place() -> None:
    group = SimpleNamespace(
        get_world_size=lambda: 1, all_gather_object=lambda parts, value: parts.__setitem__(0, value)
    )
    names: dict[str, Any] = {"torch": torch, "dist": group}
    for name in ("gather_objects", "sum_over_processes"):
        exec(HELPERS[name], names)
    total = names["sum_over_processes"](torch.ones((), requires_grad=True))
    total /= 2
    assert total.item() == 0.5


def test_a_variable_named_as_a_function_of_accelerate_imports_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("broadcast = 1\nprint(broadcast)\n")
    conversion = convert_printed(tmp_path / "train.py", [])
    file = conversion.files["train.py"]
    edits = [file.insert_before(file.tree.body[1], "broadcast = sum_over_processes(broadcast)")]
    assert "accelerate" not in compose(conversion, [edits])["train.py"].text


def test_outputs_of_different_shapes_are_never_gathered() -> None:
    names: dict[str, Any] = {
        "torch": torch,
        "sys": sys,
        "gather_objects": lambda shape: [shape, (2, 7)],
    }
    exec(HELPERS["gather_rows"], names)
    with pytest.raises(SystemExit, match="pad all batches to one length"):
        names["gather_rows"](torch.ones(2, 5))

"""`stepladder.Filtered` and `stepladder.Mapped`: what is kept is found once, and again after a change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from processes import wait_until
from stepladder import Filtered, InputError, Loader, Mapped, Packed, World, open_data
from stepladder.data.function_key import make_function_key
from stepladder.data.readers.files import DataFile, LocalFile
from stepladder.data.readers.record_index import load_index
from stepladder.storage.audit import audit
from stepladder.testing import check_source

LIMIT = 100
NAMES = {"a", "b", "c"}
SHORT = np.array([1, 2, 3])


class Numbers:
    """A Source of the numbers 0 to 239 in chunks of 20, which cannot tell whether it has changed."""

    chunk_edges = range(0, 241, 20)

    def __len__(self) -> int:
        return 240

    def read(self, indices: NDArray[np.int64]) -> dict[str, Any]:
        return {"id": indices.copy()}


@pytest.fixture(autouse=True)
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/stepladder/indexes"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": i, "x": i % 7}) + "\n" for i in range(240)))
    return path


def is_small(batch: dict[str, Any]) -> Any:
    return batch["id"] < LIMIT


def test_what_is_kept_is_in_its_chunks_and_read_once(tmp_path: Path) -> None:
    kept = Filtered(Numbers(), lambda batch: batch["id"] % 3 == 0)
    assert kept.chunk_edges is not None
    assert kept.chunk_edges.tolist() == [len(range(0, edge, 3)) for edge in range(0, 241, 20)]
    check_source(kept)
    states: list[Any] = [None]
    ids: list[int] = []
    for ranks, steps in ((2, 3), (3, 99)):
        for rank in range(ranks):
            loader = Loader(kept, 12, world=World(rank, ranks, rank, ranks))
            if states[0]:
                loader.load_state_dict(states[0])
            for _, batch in zip(range(steps), loader, strict=False):
                ids += batch["id"].tolist()
            loader.close()
            last = loader.state_dict()
        states = [last]
    assert sorted(ids) == list(range(0, 240, 3))
    loader = Loader(kept, 7, run_dir=tmp_path / "run")
    assert sum(len(batch["id"]) for batch in loader) == 80
    loader.close()
    assert audit(tmp_path / "run").ok


def test_chunks_of_which_nothing_is_kept_are_gone() -> None:
    kept = Filtered(Numbers(), lambda batch: (batch["id"] < 5) | (batch["id"] > 230))
    assert kept.chunk_edges is not None
    assert kept.chunk_edges.tolist() == [0, 5, 14]


def test_an_index_is_made_once_and_anew_after_a_change(
    file: Path, indexes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Filtered(open_data(file), is_small).read(np.array([99]))["id"].tolist() == [99]
    count = len(list(indexes.iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(Filtered, "_find_kept", None)
        assert len(Filtered(open_data(file), is_small)) == 100
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "LIMIT", 50)
        assert len(Filtered(open_data(file), is_small)) == 50
    file.write_text(file.read_text() + '{"id": 7, "x": 7}\n')
    assert len(Filtered(open_data(file), is_small)) == 101
    assert len(Filtered(open_data(file, columns=("id",)), lambda batch: batch[0] < 3)) == 3
    assert len(list(indexes.iterdir())) == count + 4, "three indexes of Filtered, one of lines"


def test_a_filter_of_what_a_function_makes(file: Path) -> None:
    def double(batch: dict[str, Any]) -> dict[str, Any]:
        return {"double": 2 * batch["id"]}

    doubled = Mapped(open_data(file), double)
    check_source(doubled)
    kept = Filtered(doubled, lambda batch: batch["double"] > 470)
    assert kept.read(np.arange(len(kept)))["double"].tolist() == [472, 474, 476, 478]
    assert kept.fingerprint != Filtered(open_data(file), is_small).fingerprint


def test_documents_that_are_kept_are_packed() -> None:
    documents = Mapped(Numbers(), lambda batch: [np.arange(n % 5 + 1) for n in batch["id"]])
    kept = Filtered(documents, lambda batch: np.array([len(text) > 3 for text in batch]))
    assert len(kept) == 2 * 48
    assert Packed(kept, 9).fill == 1.0


def same(batch: Any) -> Any:
    return [name for name in NAMES if len(name) < LIMIT and name not in {"x", "y"}], SHORT, np.sum


def made_of(number: int) -> Callable[[Any], Any]:
    return lambda batch: batch["id"] < number


def test_a_key_has_the_code_and_the_values_that_a_function_uses() -> None:
    first, second = (lambda batch: batch["id"] > 1), (lambda batch: batch["id"] > 2)
    assert len({make_function_key(function) for function in (first, second, same)}) == 3
    assert make_function_key(made_of(3)) == make_function_key(made_of(3))
    assert make_function_key(made_of(3)) != make_function_key(made_of(4))

    def calls_another(batch: Any) -> Any:
        return is_small(batch)

    before = make_function_key(calls_another)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "LIMIT", 7)
        assert make_function_key(calls_another) != before
        patch.setitem(globals(), "SHORT", np.array([1, 2, 4]))
        assert make_function_key(same) != make_function_key(calls_another)


def uses_module(least: int) -> Any:
    module = ModuleType("filters")
    exec(f"LEAST = {least}\ndef keep(batch): return batch > LEAST", vars(module))
    variables: dict[str, Any] = {"filters": module, "json": json}
    exec("def function(batch): return filters.keep(json.loads(batch))", variables)
    return variables["function"]


def test_a_key_has_what_is_used_of_the_users_own_modules() -> None:
    assert make_function_key(uses_module(1)) == make_function_key(uses_module(1))
    assert make_function_key(uses_module(1)) != make_function_key(uses_module(2))


IMPORTS = {
    "a module": "import own_filters; return own_filters.keep(batch)",
    "a function": "from own_filters import keep; return [keep(one) for one in batch]",
    "a module in a package": "import own_rules.sizes; return own_rules.sizes.keep(batch)",
    "by another name": "import own_rules.sizes as sizes; return (lambda: sizes.keep(batch))()",
    "from a package": "from own_rules import sizes; return sizes.keep(batch)",
    "from its own package": "from . import sizes; return sizes.keep(batch)",
}


@pytest.mark.parametrize("kind", IMPORTS)
def test_a_key_has_what_a_function_imports_itself(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rules").mkdir()
    (tmp_path / "own_rules/__init__.py").touch()
    paths = [tmp_path / "own_filters.py", tmp_path / "own_rules/sizes.py"]
    keys = []
    for least in (1, 2, 1):
        for path in paths:
            path.write_text(f"LEAST = {least}\ndef keep(batch): return batch > LEAST\n")
        for name in ("own_filters", "own_rules", "own_rules.sizes"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of files of one second and size
        variables: dict[str, Any] = {"__package__": "own_rules"}
        exec(f"def function(batch): {IMPORTS[kind]}", variables)
        keys.append(make_function_key(variables["function"]))
    assert keys[0] == keys[2] != keys[1]


def test_a_key_has_the_names_of_installed_modules_and_no_import_of_them() -> None:
    def function(batch: Any) -> Any:
        try:
            import module_that_nobody_has
        except ImportError:
            from wave import open as module_that_nobody_has
        return module_that_nobody_has

    sys.modules.pop("wave", None)
    assert make_function_key(function).endswith("None 'wave'")
    assert "wave" not in sys.modules


def test_a_key_of_functions_with_very_many_paths_is_short() -> None:
    lines = ["def f0(x): return x"]
    for level in range(1, 41):
        lines.append(f"def a{level}(x): return f{level - 1}(x)")
        lines.append(f"def f{level}(x): return a{level}(x) + f{level - 1}(x)")
    variables: dict[str, Any] = {}
    exec("\n".join(lines), variables)
    assert len(make_function_key(variables["f40"])) < 20_000
    exec("def pair(x): return first(x), second(x)", variables)
    variables |= {"first": variables["f0"], "second": variables["f0"]}
    same_twice = make_function_key(variables["pair"])
    variables["second"] = variables["a1"]
    assert make_function_key(variables["pair"]) != same_twice


def test_an_error_of_the_users_function_is_not_one_of_the_index(file: Path) -> None:
    def keep(batch: Any) -> Any:
        Path("words.txt").read_text()

    with pytest.raises(RuntimeError, match=r"has raised FileNotFoundError: .*'words\.txt'"):
        Filtered(open_data(file), keep, key="v1")


def test_a_value_that_holds_itself_needs_a_key(file: Path) -> None:
    values: list[Any] = []
    values.append(values)
    with pytest.raises(InputError, match="a value that holds itself"):
        Filtered(open_data(file), lambda batch: [value is batch for value in values])


SCRIPT = """
from stepladder.data.function_key import make_function_key
NAMES = {"a", "b", "c", "d", "e"}
key = make_function_key(lambda batch: [n for n in NAMES if n in {"f", "g", "h", "i", "j"}])
"""


def test_a_key_is_the_same_in_every_process() -> None:
    here: dict[str, Any] = {}
    exec(SCRIPT, here)
    other = subprocess.run(
        [sys.executable, "-c", f"{SCRIPT}print(key)"],
        env=os.environ | {"PYTHONHASHSEED": "1"},  # texts have other hashes in this process
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == f"{here['key']}\n"


def test_a_long_search_says_what_it_does(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stepladder.core.console.SLOW_S", 0)
    monkeypatch.setattr("stepladder.data.filtered.SAMPLES_PER_READ", 100)
    shown = [""]

    def read_shown(text: str) -> bool:
        shown[0] += capsys.readouterr().err
        return text in shown[0]

    def keep(batch: dict[str, Any]) -> Any:
        wait_until(lambda: read_shown("Filtered reads all 240 samples to find"))
        return is_small(batch)

    for source in (open_data(file), Numbers()):
        Filtered(source, keep, key="small")
        assert shown[0].count("Filtered reads") == 1
        shown[0] = ""

    def find_offsets(data: DataFile) -> Iterator[NDArray[np.int64]]:
        wait_until(lambda: read_shown(f"{file} is read once, to find where its records begin"))
        yield np.array([0, data.size])

    file.write_text('{"id": 1}\n')
    assert load_index(LocalFile(file), find_offsets, "kind").tolist() == [0, 10]


class Keep:
    """A filter with a state that may change unseen."""

    def __call__(self, batch: dict[str, Any]) -> Any:
        return batch["id"] < LIMIT


KEEP = Keep()


def test_what_may_change_unseen_needs_a_key(file: Path) -> None:
    with pytest.raises(InputError, match="Filtered depends on a Keep, which may change") as caught:
        Filtered(open_data(file), KEEP)
    assert 'Filtered(..., key="v1")' in str(caught.value)
    with pytest.raises(InputError, match="depends on KEEP, a Keep"):
        Filtered(open_data(file), lambda batch: KEEP(batch))
    assert len(Filtered(open_data(file), KEEP, key="below 100")) == 100
    assert len(Filtered(Numbers(), KEEP)) == 100, "nothing is cached, so no key is needed"
    decoded = open_data(file, decode=Keep())
    assert decoded.fingerprint is None


@pytest.mark.parametrize(
    ("source", "keep", "message"),
    [
        (Numbers(), lambda batch: batch["id"] < 0, "Filtered keeps none of 240 samples"),
        (Numbers(), lambda batch: batch["id"], r"returns int64 of shape \[240\] for 240 samples"),
        (Numbers(), lambda batch: True, r"returns bool of shape \[\] for 240 samples"),
        ([1, 2], is_small, "the source of Filtered is a list"),
        (Numbers(), LIMIT, "the function of Filtered is a int"),
    ],
)
def test_what_cannot_be_filtered_is_refused(source: Any, keep: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Filtered(source, keep)

"""A package that few commands need is missing: one line, with what to type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stepladder import InputError, Shards
from stepladder.core.extras import import_extra
from stepladder.tools.pages.page import render_page
from stepladder.train.metrics.loggers import SafeLogger, TensorBoard


def open_shards(folder: Path) -> object:
    (folder / "data.h5").write_bytes(b"")
    return Shards(folder / "data.h5")


NEEDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "hdf5": ("h5py", open_shards),
    "report": ("jinja2", lambda _: render_page("page.html")),
    "tensorboard": ("tensorboard", lambda folder: TensorBoard(folder).log(1, {"loss": 1.0})),
}


@pytest.mark.parametrize("extra", NEEDS)
def test_it_is_named_with_the_extra_that_brings_it(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, use = NEEDS[extra]
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=f"need {package}|needs {package}") as error:
        use(tmp_path)
    assert error.value.hint == f"pip install 'stepladder[{extra}]'"


def test_a_training_goes_on_without_its_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    logger = SafeLogger("tensorboard", lambda: TensorBoard(tmp_path), {}, lambda: None)
    for step in (1, 2):
        logger.log(step, {"loss": 1.0})
    logger.close()
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        "stepladder: tensorboard is off, training goes on: the curves need tensorboard. HINT:"
        " pip install 'stepladder[tensorboard]'"
    )


def test_a_package_that_is_there_is_imported() -> None:
    assert import_extra("json", "", "") is sys.modules["json"]

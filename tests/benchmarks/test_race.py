"""A few rounds of the race for one directory; `make chaos` runs a hundred."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from processes import start

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def race() -> Iterator[ModuleType]:
    """The script as a module, with quicker starts."""
    with pytest.MonkeyPatch.context() as patch, Path(os.devnull).open("w") as nowhere:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        import race

        def begin(command, env, err):
            return start(command, Path.cwd(), env, nowhere, err, new_session=True)

        patch.setattr(race, "begin", begin)
        yield race


@pytest.fixture(scope="module")
def references(race: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[int, object]:
    """What each seed's unbroken run leaves."""
    return {seed: race.reference(tmp_path_factory.mktemp("unbroken"), seed) for seed in race.SEEDS}


KILLED = ("a killed run", 1, 0)
LIVE = ("a live run", 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "nproc", "number"), [KILLED, LIVE])
def test_one_run_writes_a_directory_that_several_want(
    before: str,
    nproc: int,
    number: int,
    race: ModuleType,
    references: dict[int, object],
    tmp_path: Path,
) -> None:
    assert race.play(tmp_path, (before, nproc), random.Random(number), references) == []

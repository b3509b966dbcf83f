"""The first failure of several ranks ends the others, but not before they have said and written
what they must.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import refused, run

pytestmark = pytest.mark.ranks

# Rank 0 fails at once, rank 1 a while later, as a busy machine may keep it from its core.
SCRIPT = """
import os, pathlib, time
from stepladder import InputError
if os.environ["RANK"] == "0":
    raise FIRST
time.sleep(SECONDS)
pathlib.Path("written").touch()
raise SECOND
"""


def run_script(folder: Path, first: str, second: str, seconds: float = 1.5) -> str:
    text = SCRIPT.replace("FIRST", first).replace("SECONDS", str(seconds)).replace("SECOND", second)
    (folder / "script.py").write_text(text)
    done = run("run", "--nproc", 2, "script.py", cwd=folder)
    if "InputError" in first:
        refused(done, "found")
    else:
        assert done.returncode == 1, done.stderr
    return done.stderr


def test_the_cause_is_waited_for_where_its_consequence_was_quicker(tmp_path: Path) -> None:
    output = run_script(
        tmp_path, "RuntimeError('Connection closed by peer')", "KeyError('the cause')"
    )
    assert "rank 1 failed: KeyError: 'the cause'" in output and output.count("Traceback") == 1


def test_bad_input_that_all_have_found_lets_all_leave(tmp_path: Path) -> None:
    """The first rank may be writing a snapshot."""
    run_script(tmp_path, *["InputError('found', 'mend it')"] * 2)
    assert (tmp_path / "written").exists()


def test_another_failure_ends_the_others(tmp_path: Path) -> None:
    output = run_script(tmp_path, "KeyError('the cause')", "ValueError('late')", seconds=200)
    assert "rank 0 failed: KeyError: 'the cause'" in output
    assert not (tmp_path / "written").exists()

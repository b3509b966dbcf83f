"""Commands on machines that lack something: each tried for real, skipped by name where this one
cannot lack it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

from processes import COMMAND, JOBS, SECONDS, audited, refused, run, started, train
from stepladder.core.errors import InputError
from stepladder.core.machine_limits import validate_fork_server
from stepladder.tools.check.isolation import kernel

SHORT = "train", "mlp", "--steps", "3", "--run-dir", "run"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: another user's number, or a mount"
)


def under(*arguments: str, cwd: Path, **env: str | None) -> subprocess.CompletedProcess[str]:
    """A command of these words in a new process. A variable that is None is not set."""
    variables = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    return subprocess.run(
        arguments,
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"this machine has no {program}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "mlp"),
        ("run", "s.py"),
        *(
            pytest.param(arguments, marks=pytest.mark.slow)
            for arguments in (("audit", "/r"), ("doctor",), ("learn",), ("verify", "mlp"))
        ),
    ],
)
def test_a_working_folder_that_was_removed_is_one_line(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    missing = tmp_path / "gone"
    missing.mkdir()
    command = ["bash", "-c", 'rmdir "$PWD"; exec "$@"', "bash", *COMMAND, *arguments]
    refused(under(*command, cwd=missing), "the current folder cannot be used")


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.slow
def test_a_locale_of_ascii_alone_shows_the_numbers_of_other_letters(tmp_path: Path) -> None:
    done = under(*COMMAND, *SHORT, "--nproc", "2", cwd=tmp_path, **ASCII)
    assert done.returncode == 0, done.stderr
    done = under(*COMMAND, "watch", "run", "--once", cwd=tmp_path, **ASCII)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2588" in done.stdout  # the highest bar


HELPER = """
from stepladder import process_group

def meet():
    with process_group() as comm:
        assert comm.sum([1.0]) == 2.0
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["é", os.fsdecode(b"\xff")], ids=["letters", "bytes"])
def test_a_collectives_place_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Where a rank notes it for its launcher, whatever the locale can write."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "helper.py").write_text(HELPER)
    (folder / "s.py").write_text("from helper import meet\nmeet()\n")
    command = *COMMAND, "run", "--nproc", "2", "--exchange", "gloo", "s.py"  # else a line says how
    done = under(*command, cwd=folder, **ASCII)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_long_name_of_the_temporary_folder_takes_no_socket_away(
    nproc: int, tmp_path: Path
) -> None:
    """Neither from ranks nor from data loaders' workers, which wait for each other in vain."""
    folder = tmp_path / ("t" * 200)
    folder.mkdir()
    flags = "--workers", "1", "--epochs", "1", "--nproc", nproc
    done = run(
        "train",
        JOBS / "augmented.py",
        *flags,
        cwd=tmp_path,
        env={"TMPDIR": str(folder)},
        timeout=SECONDS / 3,
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("stepladder*"))


@pytest.mark.slow
@needs_root
def test_without_a_home_and_a_users_entry_only_lessons_need_one(tmp_path: Path) -> None:
    needs("setpriv")
    tmp_path.chmod(0o777)
    rights = "+dac_read_search,+dac_override"  # Python may lie where only root comes
    user = [
        "setpriv",
        "--reuid=12345",
        "--clear-groups",
        f"--inh-caps={rights}",
        f"--ambient-caps={rights}",
    ]
    nowhere = {
        "HOME": None,
        "XDG_STATE_HOME": None,
        "USER": None,
        "LOGNAME": None,
        "TORCHINDUCTOR_CACHE_DIR": None,
    }
    done = under(*user, *COMMAND, *SHORT, cwd=tmp_path, **nowhere)
    assert done.returncode == 0, done.stderr
    refused(
        under(*user, *COMMAND, "learn", cwd=tmp_path, **nowhere),
        "no home folder",
        "12345",
        "export HOME",
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_64_open_files_are_enough(tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *COMMAND]
    for arguments in ((*SHORT, "--nproc", "3"), ("audit", "run"), ("report", "run")):
        done = under(*limited, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("train", "--help")], ids=" ".join
)
def test_help_that_stdout_does_not_take_is_no_error(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    full = ["bash", "-c", '"$@" > /dev/full', "bash", *COMMAND]
    done = under(*full, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_where_no_file_can_be_written_it_is_one_line(tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *COMMAND]
    refused(
        under(*limited, *SHORT, "--nproc", "2", cwd=tmp_path),
        "No usable temporary directory",
        "TMPDIR=",
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("files", [16, 20, 47])
def test_too_few_open_files_for_ranks_are_one_line(files: int, tmp_path: Path) -> None:
    limited = "bash", "-c", f'ulimit -n {files}; exec "$@"', "bash"
    refused(
        under(*limited, *COMMAND, *SHORT, "--nproc", "2", cwd=tmp_path),
        f"a limit of this machine, {files} open files, is too low for 2 processes",
        "ulimit -n 48",
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.ranks
@needs_root
def test_a_server_for_ranks_that_cannot_live_is_one_line(tmp_path: Path) -> None:
    """Of a stranger: root may do more."""
    needs("setpriv")
    tmp_path.chmod(0o777)
    rights = "+dac_read_search,+dac_override"
    user = [
        "setpriv",
        "--reuid=54321",
        "--clear-groups",
        f"--inh-caps={rights}",
        f"--ambient-caps={rights}",
    ]
    limited = [*user, "bash", "-c", 'ulimit -v 550000; exec "$@"', "bash", *COMMAND]
    done = under(*limited, *SHORT, "--nproc", "2", cwd=tmp_path)
    refused(done, "the process that ranks are forked from ends again and again", "-u for processes")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("limit", ["-u 1", "-v 100000", "-v 150000", "-v 520000"])
def test_one_process_that_cannot_live_is_one_line(limit: str, tmp_path: Path) -> None:
    """Its libraries printed pages, or aborted."""
    needs("setpriv")
    tmp_path.chmod(0o777)
    rights = "+dac_read_search,+dac_override"
    user = [
        "setpriv",
        "--reuid=54321",
        "--clear-groups",
        f"--inh-caps={rights}",
        f"--ambient-caps={rights}",
    ]
    done = under(
        *user, "bash", "-c", f'ulimit {limit}; exec "$@"', "bash", *COMMAND, *SHORT, cwd=tmp_path
    )
    of_memory = "not enough memory", "ulimit -v a limit on it"
    refused(
        done,
        *of_memory if limit.startswith("-v") else ("a limit of this machine is reached", "ulimit"),
    )
    assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_root
def test_a_home_that_nobody_can_write_is_one_line_for_what_is_kept_there(tmp_path: Path) -> None:
    needs("unshare")
    home = tmp_path / "home"
    work = tmp_path / "work"
    home.mkdir()
    work.mkdir()
    mounted = (
        'mount --bind "$HOME" "$HOME" && mount -o remount,ro,bind "$HOME" || exit 77; exec "$@"'
    )
    apart = ["unshare", "-m", "bash", "-c", mounted, "bash", *COMMAND]
    env = {"HOME": str(home), "XDG_STATE_HOME": None}
    done = under(*apart, "learn", "start", cwd=work, **env)
    if done.returncode == 77:
        pytest.skip("this machine binds no folder")
    refused(done, "learn.json cannot be written: Read-only file system", "XDG_STATE_HOME=")
    assert not list(work.iterdir())
    assert under(*apart, *SHORT, cwd=work, **env).returncode == 0


@pytest.mark.slow
@needs_root
def test_a_run_directory_on_a_read_only_mount_is_one_line(tmp_path: Path) -> None:
    needs("unshare")
    (tmp_path / "place").mkdir()
    mounted = 'mount -t tmpfs none place && mount -o remount,ro place || exit 77; exec "$@"'
    arguments = "train", "mlp", "--steps", "3", "--run-dir", "place/run"
    done = under("unshare", "-m", "bash", "-c", mounted, "bash", *COMMAND, *arguments, cwd=tmp_path)
    if done.returncode == 77:
        pytest.skip("this machine mounts no tmpfs")
    refused(done, "place/run cannot be written: Read-only file system")


CONTAINER = sys.executable, str(Path(__file__).parents[1] / "as_container.py")
WRITES_OUTSIDE = """
import sys, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
open(sys.argv[1], "w").write("changed")
"""


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [
        ("docker", "landlock"),
        ("docker on an old kernel", "audit"),
        ("useless namespaces", "landlock"),
    ],
)
def test_in_a_container_jobs_train_and_check_changes_no_file(
    kind: str, mechanism: str, tmp_path: Path
) -> None:
    needs("setpriv")
    if find_library("seccomp") is None:
        pytest.skip("this machine has no libseccomp")
    if mechanism == "landlock" and not kernel.landlock_abi():
        pytest.skip("this kernel has no Landlock")
    command = *CONTAINER, kind, *COMMAND
    done = under(*command, *SHORT, "--nproc", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert audited(tmp_path / "run")["ok"]
    (script := tmp_path / "script.py").write_text(WRITES_OUTSIDE)
    # On a disk: Landlock leaves /dev/shm open, where the folders of tests lie.
    with tempfile.NamedTemporaryFile("w+", dir="/var/tmp") as theirs:
        theirs.write("theirs")
        theirs.flush()
        flags = ["--unsafe"] * (mechanism == "audit")
        check = *command, "check", *flags, "--json", str(script), theirs.name
        done = under(*check, cwd=tmp_path)
        assert Path(theirs.name).read_text() == "theirs"
    assert json.loads(done.stdout)["isolation"]["mechanism"] == mechanism


@pytest.mark.slow
def test_a_jobs_own_end_of_file_is_no_end_of_what_is_typed(tmp_path: Path) -> None:
    job = (
        (JOBS / "trouble.py")
        .read_text()
        .replace("    trouble(0)\n", '    raise EOFError("a torn file")\n')
    )
    (tmp_path / "torn.py").write_text(job)
    done = run("train", "torn.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "EOFError: a torn file" in done.stderr


def test_the_python_whose_fork_server_anybody_reaches_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    validate_fork_server()
    monkeypatch.setattr("sys.version_info", (3, 11, 0, "final", 0))
    with pytest.raises(InputError, match="CVE-2022-42919"):
        validate_fork_server()


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

/* The clock on the wall jumps by a day once the file JUMPS exists; others go on. */
static long jump(void) { struct stat s; return stat(getenv("JUMPS"), &s) ? 0 : 86400; }

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += jump();
    return code;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose clock jumps."""
    needs("gcc")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    arguments = ["gcc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"]
    if subprocess.run(arguments, cwd=folder, check=False).returncode:
        pytest.skip("gcc compiles no library here")
    return folder / "clock.so"


@pytest.mark.slow
@pytest.mark.ranks
def test_a_clock_that_jumps_by_a_day_stops_no_run_and_names_no_hang(
    clock: Path, tmp_path: Path
) -> None:
    """Neither forward nor back again; with a batch job's time limit, which is an hour away."""
    jumps = tmp_path / "jumps"
    marks = tmp_path / "marks"
    marks.mkdir()
    env = {
        "LD_PRELOAD": str(clock),
        "JUMPS": str(jumps),
        "GATES": f"{marks} 7 14",
        "ENDS_IN": "3600",
    }
    flags = "--nproc", 2, "--explain-after", 60, "--sync", "exact", "--microbatch", 4
    with started("train", JOBS / "gates.py", *flags, cwd=tmp_path, env=env) as running:
        running.wait_for(marks / "at-7")
        jumps.touch()
        assert clock_of(env) > clock_of({}) + 80000
        (marks / "open-7").touch()
        running.wait_for(marks / "at-14")
        jumps.unlink()
        (marks / "open-14").touch()
        assert running.end() == 0, running.err.read_text()
    assert "stepladder:" not in running.err.read_text()
    audit: dict[str, Any] = audited(tmp_path / "runs/gates")
    assert (audit["ok"], audit["attempts"]) == (True, 1)


def clock_of(env: dict[str, str]) -> float:
    arguments = [sys.executable, "-c", "import time; print(time.time())"]
    return float(
        subprocess.run(arguments, env={**os.environ, **env}, capture_output=True, check=True).stdout
    )


@pytest.mark.slow
@needs_root
def test_other_clocks_than_the_machines_change_nothing(tmp_path: Path) -> None:
    """In a time namespace, as a container that was moved to another machine may have it."""
    needs("unshare")
    apart = ["unshare", "--time", "--fork", "--monotonic", "100000", "--boottime", "100000"]
    if under(*apart, "true", cwd=tmp_path).returncode:
        pytest.skip("this kernel has no time namespaces")
    done = under(*apart, *COMMAND, *SHORT, "--nproc", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert train("mlp", "--steps", "4", "--run-dir", "run", cwd=tmp_path)["resumed_from_step"] == 3


def test_a_script_has_no_run_directory_among_the_systems_files(tmp_path: Path) -> None:
    refused(
        run("run", "--run-dir", "/", "true", cwd=tmp_path),
        "--run-dir / is the root of the file system",
    )


@pytest.mark.parametrize("place", ["/dev/null", "loop"])
def test_a_state_folder_that_is_none_is_named(place: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    state = {"XDG_STATE_HOME": str(tmp_path / place)}
    refused(run("lab", "status", cwd=tmp_path, env=state), "lab.json cannot be used: ")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_what_a_job_file_closes_is_not_the_next_file_s_number(nproc: int, tmp_path: Path) -> None:
    """The run's lock was opened as stderr: what was printed went into it, and the run ended with 2
    and no word.
    """
    job = (JOBS / "plain.py").read_text(encoding="utf-8")
    job = job.replace("def build(", "import os\nos.close(2)\ndef build(").replace(
        "Job:\n", "Job:\n    os.close(2)\n"
    )
    (tmp_path / "job.py").write_text(job)
    done = run("train", "job.py", "--nproc", nproc, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0 and "run directory run, new run" in done.stderr, done.stderr


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_job_file_that_closes_python_s_own_streams_trains(nproc: int, tmp_path: Path) -> None:
    """It ended with `lost sys.stderr`."""
    job = (JOBS / "plain.py").read_text(encoding="utf-8")
    closing = "import sys\nsys.stderr.close()\nsys.stdout.close()\ndef build("
    (tmp_path / "job.py").write_text(job.replace("def build(", closing))
    done = under(
        *COMMAND, "train", "job.py", "--nproc", str(nproc), "--run-dir", "run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists()

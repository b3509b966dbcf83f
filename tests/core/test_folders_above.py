"""Files that are looked for above the current folder do what they say with our rights: only ours
are used.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from processes import refused, run
from stepladder.core.errors import InputError
from stepladder.core.folders import find_file_above, list_folders_above, validate_ownership

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
SITE = "[submit]\nsetup = ['touch owned']\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A stepladder.toml above the folder tmp_path/project/deep."""
    (tmp_path / "project" / "deep").mkdir(parents=True)
    file = tmp_path / "project" / "stepladder.toml"
    file.write_text(SITE)
    return file


def submit(folder: Path, **env: str):  # type: ignore[no-untyped-def]
    return run(
        "submit", "--dry-run", "--", "train", "mlp", cwd=folder, env={"HOME": "/nonexistent", **env}
    )


def test_a_file_above_is_used_and_named(site: Path) -> None:
    done = submit(site.parent / "deep")
    assert "touch owned" in done.stdout
    assert done.stderr == f"stepladder: {site} is used\n"
    assert submit(site.parent).stderr == "", "here everybody sees it"


@pytest.mark.parametrize("of", ["file", "folder"])
def test_a_file_that_others_may_write_is_not_used(site: Path, of: str) -> None:
    part = site if of == "file" else site.parent
    if os.geteuid() == 0:
        os.chown(part, -1, 100)
    for bits in (0o020, 0o002):
        part.chmod(0o755 | bits)
        for folder in (site.parent, site.parent / "deep"):
            refused(
                submit(folder),
                f"{site} is not used, because others may write to {part}",
                f"chmod go-w {part}",
            )


@ROOT
def test_the_group_of_root_may_write(site: Path) -> None:
    """An archive that root unpacks has such files."""
    site.chmod(0o664)
    assert f"{site} is used" in submit(site.parent / "deep").stderr


@ROOT
def test_a_file_in_a_folder_of_another_user_is_refused(site: Path) -> None:
    os.chown(site.parent, 65534, 65534)
    hint = f"cp {site} to a folder of your own"
    refused(
        submit(site.parent / "deep"),
        f"{site} is not used, because user 65534 owns {site.parent}",
        hint,
    )


@ROOT
@pytest.mark.parametrize("how", ["a file", "a link to their file", "their link to ours"])
def test_a_stranger_s_file_is_said_and_passed_over(site: Path, how: str) -> None:
    """Anybody may put one into /tmp: nobody's `submit` is stopped by it."""
    above = site.parent.parent / "stepladder.toml"
    above.write_text("[submit]\nsetup = ['touch above']\n")
    if how == "a file":
        os.chown(site, 65534, 65534)
    else:
        (site.parent / "file").write_text(SITE)
        site.unlink()
        site.symlink_to("file")
        os.chown(
            site.parent / "file" if how == "a link to their file" else site,
            65534,
            65534,
            follow_symlinks=False,
        )
    for folder in (site.parent, site.parent / "deep"):
        done = submit(folder)
        assert done.returncode == 0, done.stderr
        assert "touch owned" not in done.stdout and "touch above" in done.stdout
        assert f"stepladder: {site} is not used, because user 65534 owns it\n" in done.stderr


@ROOT
def test_a_link_is_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    os.chown(tmp_path / "theirs", 65534, 65534)
    (tmp_path / "mine").symlink_to("theirs/file")
    with pytest.raises(InputError, match=r"user 65534 owns .*theirs"):
        validate_ownership(tmp_path / "mine")


def test_in_a_folder_as_tmp_nobody_replaces_our_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tmp_path.chmod(0o1777)
    validate_ownership(tmp_path / "file")
    (tmp_path / "file").chmod(0o1666)
    with pytest.raises(InputError, match="others may write"):
        validate_ownership(tmp_path / "file")


def test_above_the_home_folder_nothing_is_looked_for(site: Path) -> None:
    home = site.parent / "deep"
    assert submit(home, HOME=str(home)).stdout.count("touch owned") == 0
    assert submit(home, HOME=str(site.parent)).stdout.count("touch owned") == 1


def test_a_file_system_s_border_ends_the_search() -> None:
    assert Path("/") not in list(list_folders_above(Path("/proc/self").resolve()))
    assert Path("/proc") in list(list_folders_above(Path("/proc/self").resolve()))


def test_the_user_s_own_file_counts_only_if_it_is_theirs(tmp_path: Path) -> None:
    user_config = tmp_path / "stepladder" / "config.toml"
    user_config.parent.mkdir()
    user_config.write_text(SITE)
    assert "touch owned" in submit(tmp_path, XDG_CONFIG_HOME=str(tmp_path)).stdout
    user_config.chmod(0o666)
    refused(submit(tmp_path, XDG_CONFIG_HOME=str(tmp_path)), "others may write")


def test_the_course_above_is_ours_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lessons" / "deep").mkdir(parents=True)
    ladder = tmp_path / "lessons" / "ladder.toml"
    ladder.touch(0o666)
    ladder.chmod(0o666)
    refused(run("learn", cwd=tmp_path / "lessons" / "deep"), "ladder.toml is not used")
    monkeypatch.chdir(tmp_path)
    assert find_file_above("lessons/none.toml") is None


@pytest.mark.parametrize(
    "arguments",
    [("submit", "--dry-run", "--", "train", "mlp"), ("learn",), ("train", "mlp"), ("doctor",)],
)
def test_a_current_folder_that_was_removed_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    command = (
        "sh",
        "-c",
        'mkdir gone && cd gone && rmdir ../gone && exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "stepladder",
    )
    refused(
        run(*arguments, cwd=tmp_path, command=command),
        "the current folder cannot be used: No such file",
        "cd to",
    )

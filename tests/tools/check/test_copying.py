"""What of a working folder is copied for a check."""

from __future__ import annotations

from pathlib import Path

from stepladder.tools.check.copying import copy_folder


def test_a_virtual_environment_of_any_name_is_not_copied(tmp_path: Path) -> None:
    project = tmp_path / "project"
    environment = project / "my-env"
    package = environment / "lib" / "python3.11" / "site-packages" / "large.py"
    package.parent.mkdir(parents=True)
    package.write_text("")
    (environment / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (project / "train.py").write_text("")
    copy_folder(project, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["train.py"]

"""make images

Build the Dockerfile as it is, run a training in the image, and work on a checkout in it.

Without Docker and without a registry: mmdebstrap makes what the FROM line names, a Debian with Python, and buildah
builds and runs. Both are packages of Debian, and need root here. pip's settings in the image are this machine's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
CONTAINER = REPOSITORY / ".devcontainer" / "devcontainer.json"
TOOLS = "buildah", "mmdebstrap"
MINUTES = 20

Buildah = Callable[..., str]

missing = [tool for tool in TOOLS if not shutil.which(tool)]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"apt-get install {' '.join(missing)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mmdebstrap and buildah need root here"),
    pytest.mark.timeout(3 * MINUTES * 60),
]


def call(*words: str | Path) -> str:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=MINUTES * 60, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Its images and containers live in a folder of the test, and go with it."""
    folder = tmp_path_factory.mktemp("images")
    place = ["--root", folder / "root", "--runroot", folder / "run", "--storage-driver", "vfs"]

    def run(command: str, *words: str | Path) -> str:
        own = ["--isolation", "chroot"] if command in ("run", "build") else []
        return call("buildah", *place, command, *own, *words)

    yield run
    run("rm", "--all")
    run("rmi", "--all", "--force")
    shutil.rmtree(folder, ignore_errors=True)


def base() -> str:
    """The image that the Dockerfile begins with."""
    text = DOCKERFILE.read_text()
    (version,) = re.findall(r"^ARG PYTHON=(\S+)$", text, re.MULTILINE)
    (name,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    return "docker.io/library/" + name.replace("${PYTHON}", version)


def settings_of_pip() -> list[str]:
    """As flags: its files, and the folders that they name, where they are on this machine."""
    found = call(sys.executable, "-m", "pip", "config", "debug")
    files = {Path(path) for path in re.findall(r"^ +(/\S+), exists: True$", found, re.MULTILINE)}
    named = call(sys.executable, "-m", "pip", "config", "list")
    paths = {
        Path(path) for path in re.findall(r"(?:^|[\s'/])(/[^\s']+)", named.replace("file://", " "))
    }
    # A folder "simple" is an index, whose links lead to files beside it.
    paths = {path.parent if path.name == "simple" else path for path in paths}
    wanted = sorted(path for path in files | paths if path.exists())
    return [f"--volume={path}:{path}:ro" for path in wanted]


@pytest.fixture(scope="module")
def image(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Built for development: the extra packages are those of the container for an editor."""
    tar = tmp_path_factory.mktemp("base") / "base.tar"
    packages = "--include=python3,python3-venv,python3-pip,ca-certificates"
    call("mmdebstrap", "--variant=apt", packages, "bookworm", tar)
    made = buildah("from", "scratch").strip()
    buildah("add", made, tar, "/")
    # As in the image that it stands for: `python`, and a pip that may install.
    buildah(
        "run",
        made,
        "--",
        "sh",
        "-c",
        "ln -s python3 /usr/bin/python; rm /usr/lib/python3*/EXTERNALLY-MANAGED",
    )
    buildah("commit", "--rm", made, base())
    tar.unlink()
    arguments = [
        f"--build-arg={name}={value}" for name, value in development()["build"]["args"].items()
    ]
    flags = ["--pull=never", *settings_of_pip(), *arguments, "-f", DOCKERFILE, "-t", "stepladder"]
    buildah("build", *flags, REPOSITORY)
    return "stepladder"


def development() -> dict[str, dict[str, str] | str]:
    return json.loads(CONTAINER.read_text())


@pytest.fixture
def container(buildah: Buildah, image: str) -> Iterator[str]:
    name = buildah("from", "--pull=never", image).strip()
    yield name
    buildah("rm", name)


def test_the_image_trains_on_two_processes(buildah: Buildah, container: str) -> None:
    command = "cd /tmp && stepladder train digits --nproc 2 --epochs 2 --json && stepladder audit runs/digits && id -u"
    said = buildah("run", container, "--", "sh", "-c", command)
    assert '"world_size": 2' in said or '"nproc": 2' in said
    assert "lost 0" in said and "repeated 0" in said
    assert said.splitlines()[-1] == "1000"


def test_an_edit_of_the_checkout_counts_in_the_container(
    buildah: Buildah, container: str, tmp_path: Path
) -> None:
    """As the container for an editor has it: the checkout mounted, and before the installed package."""
    tree = tmp_path / "tree"
    for name in ("src", "packages", "tests", "pyproject.toml"):
        source = REPOSITORY / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tree / name)
    version = tree / "src" / "stepladder" / "__init__.py"
    version.write_text(version.read_text() + "\nEDITED = True\n")
    call("chmod", "-R", "a+rX", tmp_path)
    variables = [f"--env={name}={value}" for name, value in development()["containerEnv"].items()]
    variables = [one.replace("${containerWorkspaceFolder}", "/work") for one in variables]
    inside = [
        *variables,
        f"--volume={tree}:/work:ro",
        "--workingdir=/work",
        container,
        "--",
        "python",
    ]
    assert "True" in buildah("run", *inside, "-c", "import stepladder; print(stepladder.EDITED)")
    assert " passed" in buildah(
        "run", *inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/core/test_plan.py"
    )

"""The images' files are sound, and their steps work: run as a script, for there may be no container
engine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pages import REPOSITORY
from processes import SECONDS, run

DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
DEFINITION = REPOSITORY / "docker" / "stepladder.def"
INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "CMD"}
SECTIONS = {
    "arguments",
    "help",
    "files",
    "post",
    "environment",
    "runscript",
    "test",
}  # of Apptainer 1.2 and later


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def sections() -> dict[str, list[str]]:
    """The definition's lines by section; "" is its head."""
    found: dict[str, list[str]] = {"": []}
    for line in DEFINITION.read_text().splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            found[name] = []
        elif line.strip():
            found[name if len(found) > 1 else ""].append(line.strip())
    return found


def files_of_dockerfile() -> list[tuple[str, str]]:
    """Pairs of a path in the repository and one in the image's folder."""
    pairs = []
    for words in [value.split() for name, value in instructions() if name == "COPY"]:
        *sources, target = words
        pairs += [(source, f"{source}" if target == "./" else target) for source in sources]
    return pairs


def files_of_definition() -> list[tuple[str, str]]:
    pairs = [line.split() for line in sections()["files"]]
    return [(source, target.removeprefix("/opt/stepladder/")) for source, target in pairs]


def test_the_dockerfile_has_only_instructions_with_a_meaning() -> None:
    names = [name for name, _ in instructions()]
    assert set(names) == INSTRUCTIONS
    assert names[:2] == ["ARG", "FROM"] and names.count("CMD") == 1
    text = DOCKERFILE.read_text()
    declared = [value.split("=")[0] for name, value in instructions() if name == "ARG"]
    for name in declared:
        assert re.search(rf"\$\{{?{name}\b", text), f"ARG {name} is not used"
    used = set(re.findall(r"\$\{?([A-Z]+)", "".join(value for _, value in instructions())))
    assert used == set(declared)
    (base,) = [value for name, value in instructions() if name == "FROM"]
    assert ":" in base and "latest" not in base


def test_the_image_s_user_is_not_root() -> None:
    """By number, for Kubernetes does not believe a name. What needs root comes before."""
    names = [name for name, _ in instructions()]
    (user,) = [value for name, value in instructions() if name == "USER"]
    assert all(int(number) > 0 for number in user.split(":"))
    assert names.index("USER") > max(
        place for place, name in enumerate(names) if name in ("RUN", "COPY")
    )


def test_apt_leaves_no_lists_in_the_image() -> None:
    (apt,) = [value for name, value in instructions() if name == "RUN" and "apt-get" in value]
    assert apt.startswith("apt-get update && ") and apt.endswith("&& rm -rf /var/lib/apt/lists/*")
    assert "-y --no-install-recommends" in apt


def test_the_definition_has_only_sections_with_a_meaning() -> None:
    assert set(sections()) == SECTIONS | {""}
    assert sections()[""][0] == "Bootstrap: docker"
    declared = [line.split("=")[0] for line in sections()["arguments"]]
    assert set(re.findall(r"{{ (\w+) }}", DEFINITION.read_text())) == set(declared)


def test_both_take_the_same_files_and_defaults() -> None:
    assert sorted(files_of_dockerfile()) == sorted(files_of_definition())
    defaults = {value.replace('"', "") for name, value in instructions() if name == "ARG"}
    assert set(sections()["arguments"]) <= defaults


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    allowed = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    for source, _ in files_of_dockerfile():
        assert (REPOSITORY / source).exists()
        assert f"!{source}" in allowed


def test_shell_steps_can_be_parsed() -> None:
    steps = [value for name, value in instructions() if name == "RUN"]
    steps += ["\n".join(sections()[name]) for name in ("post", "environment", "runscript", "test")]
    for step in steps:
        done = subprocess.run(["sh", "-n"], input=step, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def step_of_dockerfile() -> str:
    (step,) = [value for name, value in instructions() if name == "RUN" and "install.sh" in value]
    return step


def test_both_take_the_same_step() -> None:
    cd, step = sections()["post"]
    assert cd == "cd /opt/stepladder" and ("WORKDIR", "/opt/stepladder") in instructions()
    assert re.sub(r"{{ (\w+) }}", r"$\1", step) == step_of_dockerfile()


@pytest.mark.slow
def test_the_step_installs_a_stepladder_that_trains(tmp_path: Path) -> None:
    """In a virtual environment that sees this one's packages, so that torch is not fetched again."""
    image = tmp_path / "image"
    venv = tmp_path / "venv"
    copy_into(image, files_of_dockerfile())
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "known.pth").write_text(sysconfig.get_path("purelib") + "\n")
    env = {
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
        "PYTHONPATH": "",
        "WHEELS": "",
        "EXTRAS": "recipes",
    }
    done = run(
        step_of_dockerfile(), cwd=image, env=env, command=("sh", "-euc"), timeout=2 * SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^Successfully installed slurm-lab-\S+ stepladder-\S+ stepladder-exchange-",
        done.stdout,
        re.MULTILINE,
    )

    trained = run(
        "train", "mlp", "--steps", 2, cwd=tmp_path, env=env, command=(f"{venv}/bin/stepladder",)
    )
    assert trained.returncode == 0, trained.stderr
    code = "import stepladder; print(stepladder.__file__)"
    where = run("-c", code, cwd=tmp_path, env=env, command=(f"{venv}/bin/python",))
    assert where.stdout.startswith(str(site))


def copy_into(image: Path, pairs: list[tuple[str, str]]) -> None:
    for source, target in pairs:
        whole = REPOSITORY / source
        place = image / target
        place.parent.mkdir(parents=True, exist_ok=True)
        if whole.is_dir():
            shutil.copytree(
                whole, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(whole, place)

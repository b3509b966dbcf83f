"""What is read from the machine and from tools: formats of other programs, and bundles that travel."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from stepladder.core.errors import InputError
from stepladder.tools.doctor import programs
from stepladder.tools.doctor.machine_facts import (
    Facts,
    gather_facts,
    inspect_folder,
    read_cpu_quota,
)
from stepladder.tools.doctor.network import find_port_error, inspect_peer
from stepladder.tools.doctor.programs import (
    Gpu,
    Gpus,
    find_gpus,
    find_last_error,
    find_slowest_packages,
    inspect_script_imports,
    inspect_torch,
    list_imports,
    parse_nvcc,
    parse_smi,
    sum_import_times,
)
from stepladder.tools.doctor.rules import apply_rules

SMI = """\
0, NVIDIA A100-SXM4-40GB, 535.104.05, Enabled, 8.0
1, NVIDIA A100-SXM4-40GB, 535.104.05, Disabled, 8.0
2, Tesla V100-PCIE-16GB, 535.104.05, [N/A], [Not Supported]
"""
IMPORTTIME = """\
import time: self [us] | cumulative | imported package
import time:     30000 |      30000 |     numpy.core
import time:     20000 |      50000 |   numpy
import time:   1000000 |    1050000 | torch
import time:      5000 |       5000 | json
"""


def test_nvidia_smi_s_table_is_read_with_what_a_card_does_not_have() -> None:
    assert parse_smi(SMI) == (
        Gpu(0, "NVIDIA A100-SXM4-40GB", "535.104.05", True, "8.0"),
        Gpu(1, "NVIDIA A100-SXM4-40GB", "535.104.05", False, "8.0"),
        Gpu(2, "Tesla V100-PCIE-16GB", "535.104.05", False, ""),
    )
    assert parse_smi("No devices were found\n") == ()


def on_path(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_an_old_nvidia_smi_is_asked_for_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One from before driver 510 refuses a query with compute_cap."""
    text = 'case "$1" in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; esac\n'
    on_path(tmp_path, "nvidia-smi", text + "echo '0, Tesla T4, 450.51.06, [N/A]'", monkeypatch)
    assert find_gpus().found == (Gpu(0, "Tesla T4", "450.51.06", False, ""),)


def test_a_driver_that_does_not_answer_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path(
        tmp_path,
        "nvidia-smi",
        "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
        monkeypatch,
    )
    assert find_gpus().smi_error == "Failed to initialize NVML: Driver/library version mismatch"
    on_path(tmp_path, "nvidia-smi", "exec sleep 60", monkeypatch)
    monkeypatch.setattr(programs, "TOOL_TIMEOUT_S", 0.2)
    assert find_gpus().smi_error == "no answer within 0.2 s"


def test_nvcc_s_version_is_read() -> None:
    assert (
        parse_nvcc("Cuda compilation tools, release 12.4, V12.4.131\nBuild cuda_12.4\n") == "12.4"
    )
    assert parse_nvcc("command not found") == ""


def test_import_times_are_added_up_by_package() -> None:
    seconds = sum_import_times(IMPORTTIME)
    assert find_slowest_packages(seconds) == (("torch", 1.0), ("numpy", 0.05), ("json", 0.005))
    assert sum(seconds.values()) == pytest.approx(1.05 + 0.005), (
        "what its top level takes with all below it"
    )


def test_a_script_s_imports_are_made_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import time\ntime.sleep(0.2)\n")
    (tmp_path / "train.py").write_text(
        "from __future__ import annotations\nimport json, beside\nfrom . import no\nraise SystemExit('it ran')\n"
    )
    imports = inspect_script_imports(tmp_path / "train.py")
    assert imports.error == "" and imports.name == "train.py"
    assert imports.slowest[0][0] == "beside" and imports.slowest[0][1] >= 0.2
    assert imports.seconds >= 0.2
    assert list_imports(ast.parse("import a\nif x:\n    import b\nfrom c import d")) == [
        "import a",
        "from c import d",
    ]


def test_an_import_that_fails_is_told_by_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import json, not_a_module_of_anybody\n")
    error = inspect_script_imports(tmp_path / "train.py").error
    assert error == "ModuleNotFoundError: No module named 'not_a_module_of_anybody'"
    assert find_last_error("import time: 1 | 2 | x\n") == "ended without output"


def test_a_script_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (\n")
    for name in ("broken.py", "missing.py"):
        with pytest.raises(InputError, match=r"(is not valid Python|cannot be read): .*\. HINT: "):
            inspect_script_imports(tmp_path / name)


def test_the_folder_s_clock_and_rights_are_seen_and_nothing_stays(tmp_path: Path) -> None:
    inspected = inspect_folder(tmp_path / "runs" / "mnist")
    assert inspected.writable and inspected.kind and inspected.free_bytes
    assert inspected.skew is not None and abs(inspected.skew) < 2.0
    assert list(tmp_path.iterdir()) == []
    assert not inspect_folder(Path("/proc/nowhere")).writable


@pytest.mark.parametrize(
    ("line", "limits", "expected"),
    [
        ("0::/a/b", {"cpu.max": "max 100000", "a/b/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        ("0::/", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/", {"cpu.max": "max 100000"}, None),
        (
            "3:cpu,cpuacct:/a",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_quota_us": "25000"},
            0.25,
        ),
        ("3:cpu:/of/the/host", {"cpu/cpu.cfs_quota_us": "50000"}, 0.5),
        ("4:memory:/a", {"cpu/a/cpu.cfs_quota_us": "25000"}, None),
    ],
)
def test_the_quota_is_that_of_the_process_s_own_group_and_of_those_above(
    line: str, limits: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(line + "\n")
    for name, text in limits.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
        if "cfs" in name:
            file.with_name("cpu.cfs_period_us").write_text("100000\n")
    assert read_cpu_quota(tmp_path / "cgroup", tmp_path / "own") == expected
    assert read_cpu_quota(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize("name", ["random.py", "torch.py"])
def test_a_file_that_hides_a_module_of_torch_s_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert inspect_torch().error == f"{tmp_path / name} comes before the module of that name"


def test_a_port_that_is_taken_says_so() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(1)
        number = listener.getsockname()[1]
        assert find_port_error(number) == "Address already in use"
    assert find_port_error(number) == ""


def test_the_way_to_a_peer_is_the_kernel_s_route() -> None:
    peer = inspect_peer("127.0.0.1")
    assert (peer.source, peer.interface, peer.error) == ("127.0.0.1", "lo", "")
    assert inspect_peer("no-such-host.invalid").error


@pytest.fixture(scope="module")
def facts() -> Facts:
    return gather_facts(nproc=2, peer="127.0.0.1", port=1)


def test_a_bundle_is_the_same_after_a_journey(facts: Facts, tmp_path: Path) -> None:
    assert facts.torch.version and facts.torch.seconds > 0 and facts.torch.slowest
    assert facts.cores >= 1 and facts.nofile > 0 and facts.interfaces
    (tmp_path / "link.json").symlink_to("bundle.json")
    facts.save(tmp_path / "link.json")
    assert Facts.load(tmp_path / "bundle.json") == facts
    assert (tmp_path / "link.json").is_symlink()


def test_a_bundle_that_is_none_is_refused(facts: Facts, tmp_path: Path) -> None:
    stored = asdict(facts)
    wrong = (
        {"schema": 99},
        {"more": 1},
        {"torch": []},
        {"env": {"RANK": 0}},
        {"port": "x"},
        {"interfaces": [7]},
    )
    wrong += {"cores": 1e400}, {"gpus": {"found": [{}]}}, {"folder": {"kind": None}}  # type: ignore[assignment]
    bad = ["no json", "[]", "{}", "[" * 10_000, json.dumps(stored)[:-9]]
    for text in bad + [json.dumps(stored | entry) for entry in wrong]:
        (tmp_path / "bundle.json").write_text(text)
        with pytest.raises(InputError, match="is not a bundle of this version"):
            Facts.load(tmp_path / "bundle.json")
    (tmp_path / "bundle.json").write_text(" " * 2**25)
    with pytest.raises(InputError, match="it is larger than 16 MiB"):
        Facts.load(tmp_path / "bundle.json")
    with pytest.raises(InputError, match="No such file"):
        Facts.load(tmp_path / "missing.json")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the texts and numbers of a bundle stand."""
    if isinstance(value, (dict, list)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, (*path, key))
    elif not isinstance(value, bool):
        yield path


@pytest.mark.slow
def test_a_bundle_with_odd_texts_and_numbers_is_judged_or_refused(
    facts: Facts, tmp_path: Path
) -> None:
    ranks = {
        "RANK": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
        "SLURM_PROCID": "0",
    }
    ranks |= {
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0",
        "MASTER_ADDR": "a",
        "SLURM_CPUS_PER_TASK": "3",
    }
    bundle = json.loads(
        json.dumps(
            asdict(replace(facts, env=ranks, gpus=Gpus((Gpu(0, "A100", "535.1"),)), nodes=2))
        )
    )
    for *folders, last in leaves(bundle):
        folder = reduce(lambda value, key: value[key], folders, bundle)
        before = folder[last]
        for odd in (
            ("", "\xb2", "1.", "::1", "{0}") if isinstance(before, str) else (0, -1, 2**63, 0.5)
        ):
            folder[last] = odd
            (tmp_path / "bundle.json").write_text(json.dumps(bundle))
            with suppress(InputError):
                apply_rules(Facts.load(tmp_path / "bundle.json"))
        folder[last] = before


def test_nothing_secret_is_in_a_bundle() -> None:
    code = "from stepladder.tools.doctor.variables import *; import os; print(shown_variables(os.environ))"
    env = {
        "RUNPOD_API_KEY": "x",
        "SLURM_JWT_TOKEN": "x",
        "HOME_ADDRESS": "x",
        "SLURM_JOB_ID": "1",
        "RANK": "0",
    }
    env |= {
        "GROUP_WORLD_SIZE": "2",
        "SLURM_JWT": "x",
        "NUM_PWD": "x",
        "NODE_DB": "x",
        "TORCH_HUB_PAT": "x",
    }
    env |= {"TORCH_HOME": "https://me:x@host"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (
        "{'GROUP_WORLD_SIZE': '2', 'RANK': '0', 'SLURM_JOB_ID': '1', 'TORCH_HOME': 'https://me:***@host'}\n"
    )

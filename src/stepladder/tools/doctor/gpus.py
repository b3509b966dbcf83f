"""NVIDIA's GPUs as the system shows them, without torch: nvidia-smi, nvcc, the PCI bus."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SECONDS = 20.0
QUERY = ("index", "name", "driver_version", "mig.mode.current", "compute_cap", "memory.total")
NVIDIA, DISPLAY = "0x10de", "0x03"


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi --query-gpu`. mig: whether it is divided.  capability: as in 9.0, "" if not said."""

    index: int
    name: str
    driver: str
    mig: bool = False
    capability: str = ""
    memory_mib: int | None = None


@dataclass(frozen=True)
class Gpus:
    """on_bus: NVIDIA devices on the PCI bus.  smi_error: what nvidia-smi said instead; "missing" without one.

    nvcc: version of the CUDA compiler, or "".
    """

    found: tuple[Gpu, ...] = ()
    on_bus: int = 0
    smi_error: str = ""
    nvcc: str = ""

    @property
    def exist(self) -> bool:
        return bool(self.found or self.on_bus)

    @property
    def driver(self) -> str:
        return self.found[0].driver if self.found else ""


def find_gpus() -> Gpus:
    found, error = _ask_smi()
    return Gpus(found, _on_bus(), error, _nvcc())


def _ask_smi() -> tuple[tuple[Gpu, ...], str]:
    if shutil.which("nvidia-smi") is None:
        return (), "missing"
    error = ""
    for query in (
        QUERY,
        [name for name in QUERY if name != "compute_cap"],
    ):  # drivers before 510 know no compute_cap
        command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return (), f"no answer within {SECONDS:g} s"
        except (OSError, subprocess.SubprocessError) as failure:
            return (), type(failure).__name__
        if done.returncode == 0:
            return parse_smi(done.stdout, query), ""
        error = (done.stdout + done.stderr).strip().partition("\n")[0]
    return (), error or "no answer"


def parse_smi(text: str, query: tuple[str, ...] | list[str] = QUERY) -> tuple[Gpu, ...]:
    """`--format=csv,noheader,nounits`. A value that a device does not have is [N/A] or [Not Supported]."""
    gpus = []
    for line in text.splitlines():
        values = dict(zip(query, (part.strip() for part in line.split(",")), strict=False))
        if not values.get("index", "").isdigit():
            continue
        capability, memory = values.get("compute_cap", ""), values.get("memory.total", "")
        gpus.append(
            Gpu(
                int(values["index"]), values["name"], values["driver_version"],
                values.get("mig.mode.current") == "Enabled",
                capability if re.fullmatch(r"\d+\.\d+", capability) else "",
                int(memory) if memory.isdigit() else None,
            )
        )  # fmt: skip
    return tuple(gpus)


def _on_bus() -> int:
    """Display devices (class 0x03....) of NVIDIA, which are there even without a driver."""
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
        except OSError:
            continue
        count += vendor == NVIDIA and kind.startswith(DISPLAY)
    return count


def _nvcc() -> str:
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        return ""
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return parse_nvcc(said)


def parse_nvcc(text: str) -> str:
    """`Cuda compilation tools, release 12.4, V12.4.131` as 12.4."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else ""

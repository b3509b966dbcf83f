"""Are faults of a machine named? Plants them, one after the other, and asks `stepladder doctor
--json` each time.

    python benchmarks/doctor.py [--only WORD] [--write]

Most are planted for real: variables, limits, a cgroup, mounts and networks of their own (Linux, as
root, with iproute2), ports that are held. What needs other hardware is changed in a bundle that
`doctor --save` wrote here. A fault counts as named when doctor finds it in the words that
doctor_faults.py expects, finds nothing else beyond what it finds without the fault, and ends with
the right exit code. Takes ten minutes and more."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from doctor_faults import FAULTS, HARMLESS, WITH_GPUS, Changes, Fault, network
from report import Report, table

import stepladder
from stepladder.tools.doctor.rules import RULES
from stepladder.tools.doctor.variables import shown_variables

Finding = dict[str, str]
SECONDS = 300.0
TRIES = 6
PAUSE = 20.0
SOURCE = str(Path(stepladder.__file__).parent.parent)
# A network of its own: one card, whose other end stays without an address, and names for both
# machines.
NETWORK = """ip link set lo up
ip link add eth0 type veth peer name far0
ip link set far0 addrgenmode none; ip link set far0 up
ip addr add 10.9.0.1/24 dev eth0; ip link set eth0 up
printf "127.0.0.1 localhost\\n10.9.0.1 $NAME\\n10.9.0.2 peer\\n" > $T/hosts; echo hosts: files > $T/nsswitch.conf
mount --bind $T/hosts /etc/hosts; mount --bind $T/nsswitch.conf /etc/nsswitch.conf"""
OWN = {"mounts": ["--mount"], "network": ["--mount", "--net"]}
CPU_ROOT = next(
    (d for d in map(Path, ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup")) if d.is_dir()), Path("/nowhere")
)
CLEAN = {
    where: Fault("nothing", (), where=where) for where in ("here", "mounts", "bundle", "gpus")
} | {"network": network("nothing", ())}


def ended(process: subprocess.Popen[str]) -> None:
    """End it and all that it started."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(process.pid)
        for child in [*first.children(recursive=True), first]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


@contextmanager
def planted(
    fault: Fault, bundle: dict[str, Any] | None
) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """The command, its variables and its folder. Whatever is planted outside its process goes at
    the end.
    """
    with tempfile.TemporaryDirectory(prefix="planted-") as name, socket.socket() as holder:
        folder = Path(name)
        group = CPU_ROOT / f"planted-{os.getpid()}"
        (folder / "here").mkdir()
        args = fault.args
        if bundle is not None:
            (folder / "bundle.json").write_text(json.dumps(changed(bundle, fault)))
            args = "--load $T/bundle.json"
        holder.bind(("", 0))
        holder.listen(1)
        left_out = {*shown_variables(os.environ), "PYTHONUNBUFFERED"}
        env = {name: value for name, value in os.environ.items() if name not in left_out}
        env |= {
            "PYTHONPATH": os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")])),
            "T": name, "PYTHON": sys.executable, "NAME": platform.node(), "PORT": str(holder.getsockname()[1]),
            "CPU": str(min(os.sched_getaffinity(0))), "CPU_ROOT": str(CPU_ROOT), "CPU_GROUP": str(group),
        }  # fmt: skip
        # -P: as the command `stepladder` does, it takes no module from the folder that it is called
        # in.
        env["DOCTOR"] = f"exec $PYTHON -P -m stepladder doctor --json {args}"
        before = NETWORK if fault.where == "network" else ""
        script = "\n".join(["set -e", before, fault.shell, 'eval "$DOCTOR"'])
        prefix = (
            ["unshare", *OWN[fault.where], "--fork", "--kill-child"] if fault.where in OWN else []
        )
        try:
            yield [*prefix, "sh", "-c", script], env | fault.env, folder
        finally:
            until = time.monotonic() + 10
            while group.is_dir() and time.monotonic() < until:
                with suppress(OSError):  # busy until the kernel has forgotten its last process
                    group.rmdir()
                    break
                time.sleep(0.1)


def changed(bundle: dict[str, Any], fault: Fault) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(json.dumps(bundle))
    changes: list[Changes] = [WITH_GPUS] if fault.where == "gpus" else []
    for section, values in (item for change in [*changes, fault.facts] for item in change.items()):
        (facts[section] if section else facts).update(values)
    return facts


def doctor(fault: Fault, bundle: dict[str, Any] | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. Again after a while where torch is slow to import, and not by
    the fault.
    """
    for _ in range(TRIES):
        code, out, error = doctor_once(fault, bundle)
        if "torch-import-time" in fault.rules or '"rule": "torch-import-time"' not in out:
            break
        time.sleep(PAUSE)  # the machine had something else to do
    return code, out, error


def doctor_once(fault: Fault, bundle: dict[str, Any] | None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, with the name of the fault's folder taken out."""
    with planted(fault, bundle) as (command, env, folder):
        process = subprocess.Popen(
            command,
            cwd=folder / "here",
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, error = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            out = ""
            error = f"no answer within {SECONDS:g} s"
        finally:
            ended(process)
    return process.returncode, *(text.replace(str(folder), "DIR") for text in (out, error))


def findings(out: str) -> list[Finding]:
    lines = out.splitlines()
    return json.loads(lines[-1])["findings"] if lines else []


def format_finding(finding: Finding) -> str:
    return f"{finding['severity']} {finding['rule']}: {finding['found']}"


def judge_fault(
    fault: Fault, clean: list[Finding], bundle: dict[str, Any] | None
) -> tuple[bool, str]:
    """Whether it is named, and what was found beyond `clean`."""
    code, out, error = doctor(fault, bundle)
    new = [format_finding(finding) for finding in findings(out) if finding not in clean]
    errors = [*fault.patterns, *map(format_finding, clean)]
    right = code == any(line.startswith("error") for line in errors) and not error
    right &= len(new) == len(fault.patterns)
    right &= all(any(re.match(pattern, line) for line in new) for pattern in fault.patterns)
    if not right:
        new = [*new, f"exit code {code}", *error.splitlines()[-1:]]
    return right, "; ".join(new) or "nothing"


def possible(fault: Fault) -> bool:
    """Whether this machine lets it be planted."""
    if fault.where in OWN and not (
        os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    ):
        return False
    if "CPU_GROUP" in fault.shell:
        on_v2 = CPU_ROOT / "cgroup.subtree_control"
        enabled = "cpu" in on_v2.read_text().split() if on_v2.exists() else CPU_ROOT.name == "cpu"
        return enabled and os.access(CPU_ROOT, os.W_OK)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="WORD", help="faults with this in their words or rule"
    )
    parser.add_argument(
        "--write", action="store_true", help="save the report in benchmarks/results"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is planted goes then too
    report = Report(
        "doctor.py", "Planted faults, and what doctor says of them", ["torch", "stepladder"], "2"
    )
    _, saved, _ = doctor(Fault("nothing", (), "--save /dev/stdout"))
    bundle: dict[str, Any] = json.loads("\n".join(saved.splitlines()[:-1]))
    clean: dict[str, list[Finding]] = {}
    rows: list[tuple[Fault, bool, str]] = []
    left_out = []
    for fault in [*FAULTS, *HARMLESS]:
        if args.only not in " ".join([fault.planted, *fault.rules]):
            continue
        if not possible(fault):
            left_out.append(fault.planted)
            continue
        of = bundle if fault.how == "bundle" else None
        if fault.where not in clean:
            clean[fault.where] = findings(doctor(CLEAN[fault.where], of)[1])
        right, fault_findings = judge_fault(fault, clean[fault.where], of)
        for text, word in (
            (sys.executable, "PYTHON"),
            (sys.prefix, "PREFIX"),
            (f" {platform.node()} ", " HOST "),
        ):
            fault_findings = fault_findings.replace(text, word)
        rows.append((fault, right, fault_findings))
        print(
            "named" if right else "NOT NAMED",
            fault.planted,
            fault_findings,
            sep=": ",
            file=sys.stderr,
            flush=True,
        )
    report.finish(sections(rows, clean, left_out), args.write)
    return 0


def sections(
    rows: list[tuple[Fault, bool, str]], clean: dict[str, list[Finding]], left_out: list[str]
) -> list[str]:
    faults = [row for row in rows if row[0].patterns]
    harmless = [row for row in rows if not row[0].patterns]
    shown = [
        [", ".join(f.rules), f.planted, f.how, findings, "yes" if ok else "NO"]
        for f, ok, findings in faults
    ]
    quiet = [[f.planted, f.how, findings, "yes" if ok else "NO"] for f, ok, findings in harmless]
    real = sum(fault.how == "real" for fault, ok, _ in faults if ok)
    before = sorted(
        {format_finding(finding) for findings in clean.values() for finding in findings}
    )
    missing = sorted(RULES.keys() - {rule for fault, _, _ in faults for rule in fault.rules})
    verdicts = [
        verdict(
            sum(ok for _, ok, _ in faults),
            len(faults),
            f"planted faults named, {real} of them real",
        ),
        verdict(sum(ok for _, ok, _ in harmless), len(harmless), "harmless conditions left alone"),
        verdict(len(RULES) - len(missing), len(RULES), ", ".join(["rules with a fault", *missing])),
    ]
    return [
        f"Without a fault doctor says: {'; '.join(before) or 'nothing'}.",
        table(["rule", "planted", "how", "doctor says", "named"], shown),
        "real: this machine had the fault; imitated: a program or a folder stood for hardware; bundle: `doctor"
        " --load` judged facts that `doctor --save` had written here, with that change.",
        "What looks like a fault and is none:",
        table(["planted", "how", "doctor says", "right"], quiet),
        *([f"Could not be planted here: {'; '.join(left_out)}."] if left_out else []),
        "\n".join(verdicts),
    ]


def verdict(right: int, all_of: int, claim: str) -> str:
    return f"- {'PASS' if right == all_of else 'FAIL'}: {right} of {all_of} {claim} (bar: all)"


if __name__ == "__main__":
    sys.exit(main())

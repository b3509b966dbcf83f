"""Mistakes in batch scripts that Slurm accepts: `stepladder submit --lint FILE`.

Looked for in the text alone. What stands in single quotes or comments is not taken for a command,
for a shell does not expand it; a rule that is not sure says nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepladder.core import typed_file
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import parse_whole_number

AGENT = r"\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate\s+launch|stepladder\s+(?:train|run))\b"
LONG = 1 << 14  # characters: for a word of N, shlex takes N * N
SHORT = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-c": "--cpus-per-task",
    "-t": "--time",
    "-p": "--partition",
}


@dataclass(frozen=True)
class Violation:
    """line: counted from 1.  evidence: what was found.  fix: what to write instead."""

    rule: str
    line: int
    evidence: str
    fix: str


class BatchScript:
    """A batch script, read. options: of its #SBATCH lines, by long name: (line, value).

    commands: each with its continuation lines, as a match in the whole text.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        self.code = blank_quoted(text)
        self.options = {
            name: (number, value)
            for number, line in enumerate(text.splitlines(), 1)
            if line.startswith("#SBATCH")
            for name, value in options_of(line.removeprefix("#SBATCH"))
        }
        found = re.finditer(r"(?:[^\n\\]|\\.|\\\n)+", self.code)
        self.commands = [command for command in found if command[0].strip()]

    def line(self, place: int) -> int:
        return self.text.count("\n", 0, place) + 1

    def option(self, name: str) -> str:
        return self.options.get(name, (0, ""))[1]


def options_of(text: str) -> Iterator[tuple[str, str]]:
    """Options of a command or an #SBATCH line, long name and value; both `--name=value` and `-N
    value`.
    """
    try:
        words = shlex.split(text, comments=True) if len(text) < LONG else text.split()
    except ValueError:  # an open quote
        words = text.split()
    for word, after in zip(words, [*words[1:], ""], strict=False):
        name, sign, value = word.partition("=")
        if re.fullmatch(r"-\w\d+", word):
            name, sign, value = word[:2], "=", word[2:]
        if name.startswith("-"):
            yield SHORT.get(name, name), value if sign else "" if after.startswith("-") else after


def blank_quoted(text: str) -> str:
    """The script with blanks for what a shell does not expand: single quotes, comments, escaped
    characters.
    """
    kept = list(text)
    pattern = r"""\\[^\n]|'[^']*'|"(?:[^"\\]|\\.)*"|(?:(?<=\s)|^)\#[^\n]*|<<-?\s*(['"])(\w+)\1.*?^\s*\2$"""
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        inner = re.finditer(r"\\[^\n]", match.group()) if match.group().startswith('"') else [match]
        start = match.start() if match.group().startswith('"') else 0
        for gone in inner:
            for place in range(start + gone.start(), start + gone.end()):
                kept[place] = "\n" if kept[place] == "\n" else " "
    return "".join(kept)


def lint(path: Path) -> list[Violation]:
    """What is wrong in the script, by line. Raises InputError where it cannot be read."""
    with as_input_error(
        f"{path} cannot be read", "stepladder submit --lint FILE", (OSError, ValueError)
    ):
        script = BatchScript(path, typed_file.read_file(path).decode())
    first_line = script.text.partition("\n")[0]
    if path.suffix == ".py" or re.match(r"#!.*\bpython", first_line):
        hint = f"stepladder check {path}; --lint reads a shell script with #SBATCH lines"
        raise InputError(f"{path} is Python, not a batch script of a shell", hint)
    return sorted(
        (violation for rule in RULES for violation in rule(script)),
        key=lambda violation: violation.line,
    )


# -- rules -----------------------------------------------------------------------------------------


def lines_that_are_comments(script: BatchScript) -> Iterator[Violation]:
    for number, line in enumerate(script.text.splitlines(), 1):
        if re.match(r"#\s+SBATCH\b", line):
            yield Violation(
                "comment",
                number,
                f"{line.strip()!r} is a comment for Slurm",
                "#SBATCH, without a space",
            )
    first = next((script.line(c.end() - len(c[0].lstrip())) for c in script.commands), None)
    for name, (number, _) in script.options.items():
        if first is not None and number > first:
            what = f"{name} stands after the first command (line {first}), where Slurm does not read it"
            yield Violation("too late", number, what, "all #SBATCH lines at the top")


def words_that_are_wrong_anywhere(script: BatchScript) -> Iterator[Violation]:
    for rule, pattern, what, fix in (
        (
            "expanded early",
            r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b",
            "${} is expanded by the batch script, where it is 0 for all tasks",
            "srun bash -c '... ${} ...' in single quotes, or an agent with a c10d rendezvous",
        ),
        (
            "fixed port",
            r"MASTER_PORT=[\"']?(\d+)|--(?:master|main_process)[-_]port[ =](\d+)|--rdzv[-_]endpoint[ =]\S*?:(\d+)",
            "port {} is fixed: two jobs on one node meet there",
            "$((20000 + SLURM_JOB_ID % 12000))",
        ),
    ):
        for match in re.finditer(pattern, script.code):
            word = match[match.lastindex or 0]
            yield Violation(rule, script.line(match.start()), what.format(word), fix.format(word))


def node_counts(script: BatchScript) -> Iterator[Violation]:
    if "--nodes" not in script.options:
        return
    line, count = script.options["--nodes"]
    pattern = (
        r"--(?:nnodes|num_machines)[ =](\d+)|\bNNODES=(\d+)"
        r"|\b(?:srun|stepladder)\b[^\n;|&]*?\s(?:--nodes[ =]|-N\s?)(\d+)"
    )
    for match in re.finditer(pattern, script.code.replace("\\\n", "  ")):
        again = next(filter(None, match.groups()))
        what = f"the number of nodes stands here ({again}) and in line {line} ({count})"
        yield Violation("two counts", script.line(match.end() - 1), what, '"$SLURM_JOB_NUM_NODES"')


def warnings_before_the_end(script: BatchScript) -> Iterator[Violation]:
    if "--signal" not in script.options:
        what = "no --signal: at the time limit Slurm kills, and all steps since the last snapshot are lost"
        yield Violation("no signal", 1, what, "#SBATCH --signal=TERM@120")
    if "--requeue" not in script.options:
        what = "no --requeue: after a lost node or a preemption the job is gone"
        yield Violation("no requeue", 1, what, "#SBATCH --requeue")


def agents(script: BatchScript) -> Iterator[Violation]:
    for command in script.commands:
        agent = re.search(AGENT, command[0])
        if agent is None:
            continue
        line = script.line(command.start() + agent.start())
        srun = re.search(r"\bsrun\b", command[0][: agent.start()])
        own = dict(options_of(command[0][srun.end() : agent.start()])) if srun else {}
        nodes = script.option("--nodes") or "1"
        tasks = own.get("--ntasks-per-node") or script.option("--ntasks-per-node")
        total = "" if tasks else own.get("--ntasks") or script.option("--ntasks")
        if srun is None and nodes not in ("1", "1-1"):
            what = f"{agent.group()} without srun runs on the first node only, and waits there for the others"
            yield Violation("no srun", line, what, f"srun --ntasks-per-node=1 {agent.group()} ...")
        ranks = re.search(r"\bstepladder\s+train\b", agent.group()) and "--nproc" not in command[0]
        too_many = (parse_whole_number(tasks) or 0) > 1 or (parse_whole_number(total) or 0) > (
            parse_whole_number(nodes) or 1
        )
        if srun and not ranks and too_many:
            many = f"{tasks} tasks per node" if tasks else f"{total} tasks"
            what = f"{many} start as many agents, each with all ranks"
            yield Violation(
                "tasks and agents", line, what, "--ntasks-per-node=1: the agent starts the ranks"
            )


def hidden_gpus(script: BatchScript) -> Iterator[Violation]:
    pattern = r"--gpus-per-task\b|--gpu-bind[ =](?:single|closest|map_gpu|mask_gpu|per_task)"
    places = [
        (number, name)
        for name, (number, value) in script.options.items()
        if re.match(pattern, f"{name}={value}")
    ]
    places += [
        (script.line(match.start()), match.group()) for match in re.finditer(pattern, script.code)
    ]
    for number, name in places:
        what = f"{name} shows each task only its own GPU: device LOCAL_RANK is not there, NCCL loses its fast paths"
        yield Violation("hidden GPUs", number, what, "--gpus-per-node=N, and srun --gpu-bind=none")


def processors(script: BatchScript) -> Iterator[Violation]:
    if "--cpus-per-task" not in script.options or "SRUN_CPUS_PER_TASK" in script.code:
        return
    for command in script.commands:
        srun = re.search(r"(?:^|[;&|(]|\btime)\s*srun\b", command[0])
        if srun and "--cpus-per-task" not in command[0] and not re.search(r"\s-c\s?\S", command[0]):
            what = "srun does not take over --cpus-per-task (since Slurm 22.05): every task has one processor"
            fix = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'
            yield Violation(
                "one processor", script.line(command.start() + srun.end() - 1), what, fix
            )


def missing_files(script: BatchScript) -> Iterator[Violation]:
    folders = [Path.cwd(), script.path.parent]
    for command in script.commands:
        moved = re.match(r"\s*cd\s+(\S+)", command[0])
        if moved:
            if re.search(r"[$`~]", moved.group(1)):
                return  # from here on, relative to what is not known before the job runs
            folders = [folder / moved.group(1).strip("\"'") for folder in folders]
        for match in re.finditer(r"(?<![\w$}/=.-])[\"']?([\w./-]+\.(?:py|sh))\b", command[0]):
            name = match.group(1)
            before = command[0][: match.start()]
            runs = re.search(
                rf"(?:\b(?:python3?|bash|sh|source)|{AGENT}|\s\.)\s(?:[^;&|]*\s)?$", f" {before}"
            )
            if runs and not any((folder / name).exists() for folder in folders):
                line = script.line(command.start() + match.start(1))
                yield Violation(
                    "no file", line, f"there is no {name}", f"a path seen from {folders[0]}"
                )
                break


RULES = (
    lines_that_are_comments,
    words_that_are_wrong_anywhere,
    node_counts,
    warnings_before_the_end,
    agents,
    hidden_gpus,
    processors,
    missing_files,
)

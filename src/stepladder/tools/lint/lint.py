"""Mistakes in batch scripts that Slurm accepts: `stepladder submit --lint FILE`.

The rules search the text of the script. What a shell does not expand (single quotes, comments) is
no command and is left out. A rule that is not certain reports nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepladder.core import typed_file
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import parse_whole_number
from stepladder.tools.findings.finding import Catalogue, Finding, Location

AGENT_COMMAND = (
    r"\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate\s+launch"
    r"|stepladder\s+(?:train|run))\b"
)
MAX_SPLIT_LENGTH = 1 << 14  # characters; shlex takes quadratic time
LONG_NAMES = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-c": "--cpus-per-task",
    "-t": "--time",
    "-p": "--partition",
}
# Escaped characters, quoted texts, comments, and here-documents whose end is quoted. Of a text in
# double quotes a shell leaves only the escaped characters unexpanded.
UNEXPANDED = re.compile(
    r"""\\[^\n]|'[^']*'|"(?:[^"\\]|\\.)*"|(?:(?<=\s)|^)\#[^\n]*"""
    r"""|<<-?\s*(['"])(\w+)\1.*?^\s*\2$""",
    re.MULTILINE | re.DOTALL,
)
LINT_TEXTS = Catalogue("stepladder.tools.lint")


class BatchScript:
    """A parsed batch script."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.code = blank_unexpanded(text)
        # The line and the value of each option of the #SBATCH lines, by its long name.
        self.options: dict[str, tuple[int, str]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("#SBATCH"):
                for name, value in parse_options(line.removeprefix("#SBATCH")):
                    self.options[name] = (number, value)
        # Each command with its continuation lines, as a match in `code`.
        matches = re.finditer(r"(?:[^\n\\]|\\.|\\\n)+", self.code)
        self.commands = [match for match in matches if match[0].strip()]

    def find_line(self, offset: int) -> int:
        """Return the line number of an offset in the text."""
        return self.text.count("\n", 0, offset) + 1

    def make_finding(self, rule: str, line: int, **values: Any) -> Finding:
        """Return the finding of a rule on a line."""
        return LINT_TEXTS.finding(rule, Location(str(self.path), line), values=values)

    def get_option(self, name: str) -> str:
        """Return the value of an #SBATCH option, "" if there is none."""
        return self.options.get(name, (0, ""))[1]


def parse_options(text: str) -> Iterator[tuple[str, str]]:
    """Yield the long name and the value of each option of a command or an #SBATCH line.

    `--name=value`, `--name value`, `-N value` and `-N4` are recognized.
    """
    arguments = _split_arguments(text)
    for argument, next_argument in zip(arguments, [*arguments[1:], ""], strict=False):
        if not argument.startswith("-"):
            continue
        name, sign, value = argument.partition("=")
        if re.fullmatch(r"-\w\d+", argument):  # -N4
            name = argument[:2]
            value = argument[2:]
        elif not sign and not next_argument.startswith("-"):
            value = next_argument
        yield LONG_NAMES.get(name, name), value


def _split_arguments(text: str) -> list[str]:
    if len(text) < MAX_SPLIT_LENGTH:
        with suppress(ValueError):  # a quote that is not closed
            return shlex.split(text, comments=True)
    return text.split()


def blank_unexpanded(text: str) -> str:
    """Return the script with blanks for what a shell does not expand, in lines of the same length.

    These are texts in single quotes, comments, quoted here-documents and escaped characters.
    """
    characters = list(text)
    for match in UNEXPANDED.finditer(text):
        if match[0].startswith('"'):  # the rest of it is expanded
            spans = [
                (match.start() + escape.start(), match.start() + escape.end())
                for escape in re.finditer(r"\\[^\n]", match[0])
            ]
        else:
            spans = [match.span()]
        for start, end in spans:
            for index in range(start, end):
                if characters[index] != "\n":
                    characters[index] = " "
    return "".join(characters)


def lint_script(path: Path) -> list[Finding]:
    """Return the mistakes in a script, in the order of its lines.

    Raises:
        InputError: If the file cannot be read, or is a Python script.
    """
    hint = "stepladder submit --lint FILE"
    with as_input_error(f"{path} cannot be read", hint, (OSError, ValueError)):
        script = BatchScript(path, typed_file.read_file(path).decode())
    first_line = script.text.partition("\n")[0]
    if path.suffix == ".py" or re.match(r"#!.*\bpython", first_line):
        raise InputError(
            f"{path} is Python, not a batch script of a shell",
            f"stepladder check {path}; --lint reads a shell script with #SBATCH lines",
        )
    findings = [finding for rule in LINT_RULES for finding in rule(script)]
    return sorted(findings, key=lambda finding: finding.location.line)


# -- rules -----------------------------------------------------------------------------------------


def check_comments(script: BatchScript) -> Iterator[Finding]:
    """Find #SBATCH lines that Slurm does not read."""
    for number, line in enumerate(script.text.splitlines(), 1):
        if re.match(r"#\s+SBATCH\b", line):
            yield script.make_finding("comment", number, text=line.strip())
    if not script.commands:
        return
    command = script.commands[0]
    first_line = script.find_line(command.end() - len(command[0].lstrip()))
    for name, (number, _) in script.options.items():
        if number > first_line:  # Slurm reads no option after the first command
            yield script.make_finding("too late", number, option=name, first=first_line)


def check_early_expansion(script: BatchScript) -> Iterator[Finding]:
    """Find variables of a task that the batch script expands before srun starts the tasks."""
    for match in re.finditer(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b", script.code):
        yield script.make_finding(
            "expanded early", script.find_line(match.start()), variable=match[1]
        )


def check_fixed_port(script: BatchScript) -> Iterator[Finding]:
    """Find ports that two jobs on one node would both use."""
    pattern = (
        r"MASTER_PORT=[\"']?(\d+)|--(?:master|main_process)[-_]port[ =](\d+)"
        r"|--rdzv[-_]endpoint[ =]\S*?:(\d+)"
    )
    for match in re.finditer(pattern, script.code):
        port = match[match.lastindex or 0]
        yield script.make_finding("fixed port", script.find_line(match.start()), port=port)


def check_node_counts(script: BatchScript) -> Iterator[Finding]:
    """Find a second number of nodes, which has to be changed whenever the first one is."""
    if "--nodes" not in script.options:
        return
    line, count = script.options["--nodes"]
    pattern = (
        r"--(?:nnodes|num_machines)[ =](\d+)|\bNNODES=(\d+)"
        r"|\b(?:srun|stepladder)\b[^\n;|&]*?\s(?:--nodes[ =]|-N\s?)(\d+)"
    )
    for match in re.finditer(pattern, script.code.replace("\\\n", "  ")):
        second_count = next(filter(None, match.groups()))
        yield script.make_finding(
            "two counts",
            script.find_line(match.end() - 1),
            second=second_count,
            first=count,
            at=line,
        )


def check_signal_and_requeue(script: BatchScript) -> Iterator[Finding]:
    """Find missing options without which a job loses work at its time limit or a preemption."""
    if "--signal" not in script.options:
        yield script.make_finding("no signal", 1)
    if "--requeue" not in script.options:
        yield script.make_finding("no requeue", 1)


def check_agents(script: BatchScript) -> Iterator[Finding]:
    """Find agents (torchrun and the like) that run too seldom or too often."""
    for command in script.commands:
        agent = re.search(AGENT_COMMAND, command[0])
        if agent is not None:
            yield from _check_agent(script, command, agent)


def _check_agent(
    script: BatchScript, command: re.Match[str], agent: re.Match[str]
) -> Iterator[Finding]:
    line = script.find_line(command.start() + agent.start())
    nodes = script.get_option("--nodes") or "1"
    srun = re.search(r"\bsrun\b", command[0][: agent.start()])
    if srun is None:
        if nodes not in ("1", "1-1"):
            yield script.make_finding("no srun", line, agent=agent.group())
        return
    is_training = re.search(r"\bstepladder\s+train\b", agent.group())
    if is_training and "--nproc" not in command[0]:
        return  # each task is a rank, without agents
    options = dict(parse_options(command[0][srun.end() : agent.start()]))
    per_node = options.get("--ntasks-per-node") or script.get_option("--ntasks-per-node")
    total = options.get("--ntasks") or script.get_option("--ntasks")
    if per_node:
        tasks = f"{per_node} tasks per node"
        has_too_many = (parse_whole_number(per_node) or 0) > 1
    else:
        tasks = f"{total} tasks"
        has_too_many = (parse_whole_number(total) or 0) > (parse_whole_number(nodes) or 1)
    if has_too_many:
        yield script.make_finding("tasks and agents", line, tasks=tasks)


def check_hidden_gpus(script: BatchScript) -> Iterator[Finding]:
    """Find options with which a task sees only its own GPU."""
    pattern = r"--gpus-per-task\b|--gpu-bind[ =](?:single|closest|map_gpu|mask_gpu|per_task)"
    matches = [
        (number, name)
        for name, (number, value) in script.options.items()
        if re.match(pattern, f"{name}={value}")
    ]
    for match in re.finditer(pattern, script.code):
        matches.append((script.find_line(match.start()), match[0]))
    for number, name in matches:
        yield script.make_finding("hidden GPUs", number, option=name)


def check_processors(script: BatchScript) -> Iterator[Finding]:
    """Find srun without --cpus-per-task: srun does not use the value of the job's option."""
    if "--cpus-per-task" not in script.options or "SRUN_CPUS_PER_TASK" in script.code:
        return
    for command in script.commands:
        srun = re.search(r"(?:^|[;&|(]|\btime)\s*srun\b", command[0])
        has_flag = "--cpus-per-task" in command[0] or re.search(r"\s-c\s?\S", command[0])
        if srun and not has_flag:
            yield script.make_finding(
                "one processor", script.find_line(command.start() + srun.end() - 1)
            )


def check_missing_files(script: BatchScript) -> Iterator[Finding]:
    """Find Python and shell scripts that are run and do not exist."""
    folders = [Path.cwd(), script.path.parent]
    for command in script.commands:
        change = re.match(r"\s*cd\s+(\S+)", command[0])
        if change:
            if re.search(r"[$`~]", change[1]):
                return  # the folder is not known before the job runs
            folders = [folder / change[1].strip("\"'") for folder in folders]
        for match in re.finditer(r"(?<![\w$}/=.-])[\"']?([\w./-]+\.(?:py|sh))\b", command[0]):
            name = match[1]
            # It follows python, a shell, `source`, `.` or an agent, perhaps after options.
            is_run = re.search(
                rf"(?:\b(?:python3?|bash|sh|source)|{AGENT_COMMAND}|\s\.)\s(?:[^;&|]*\s)?$",
                f" {command[0][: match.start()]}",
            )
            if is_run and not any((folder / name).exists() for folder in folders):
                line = script.find_line(command.start() + match.start(1))
                yield script.make_finding("no file", line, name=name, folder=folders[0])
                break


LINT_RULES = (
    check_comments,
    check_early_expansion,
    check_fixed_port,
    check_node_counts,
    check_signal_and_requeue,
    check_agents,
    check_hidden_gpus,
    check_processors,
    check_missing_files,
)

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
        # Line and value of each option of the #SBATCH lines, by its long name.
        self.options: dict[str, tuple[int, str]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("#SBATCH"):
                for name, value in parse_options(line.removeprefix("#SBATCH")):
                    self.options[name] = (number, value)
        # Each command with its continuation lines, as a match in `code`.
        matches = re.finditer(r"(?:[^\n\\]|\\.|\\\n)+", self.code)
        self.commands = [match for match in matches if match[0].strip()]

    def line(self, offset: int) -> int:
        """Return the line number of an offset in the text."""
        return self.text.count("\n", 0, offset) + 1

    def finding(self, rule: str, line: int, **values: Any) -> Finding:
        """Return the finding of a rule on a line."""
        return LINT_TEXTS.finding(rule, Location(str(self.path), line), values=values)

    def option(self, name: str) -> str:
        """Return the value of an #SBATCH option, "" if there is none."""
        return self.options.get(name, (0, ""))[1]


def parse_options(text: str) -> Iterator[tuple[str, str]]:
    """Yield the options of a command or an #SBATCH line: long name and value.

    Both `--name=value` and `-N value` are recognized.
    """
    words = _split_words(text)
    for word, next_word in zip(words, [*words[1:], ""], strict=False):
        if not word.startswith("-"):
            continue
        name, sign, value = word.partition("=")
        if re.fullmatch(r"-\w\d+", word):  # -N4
            name = word[:2]
            value = word[2:]
        elif not sign and not next_word.startswith("-"):
            value = next_word
        yield LONG_NAMES.get(name, name), value


def _split_words(text: str) -> list[str]:
    if len(text) < MAX_SPLIT_LENGTH:
        with suppress(ValueError):  # a quote that is not closed
            return shlex.split(text, comments=True)
    return text.split()


def blank_unexpanded(text: str) -> str:
    """Return the script with blanks for what a shell does not expand, in lines of the same length.

    These are single quotes, comments, quoted here-documents and escaped characters.
    """
    characters = list(text)
    for match in UNEXPANDED.finditer(text):
        if match[0].startswith('"'):  # only escaped characters inside
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
    """Return the mistakes in a script, by line.

    Raises:
        InputError: If it cannot be read, or is a Python script.
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
            yield script.finding("comment", number, text=line.strip())
    if not script.commands:
        return
    command = script.commands[0]
    first = script.line(command.end() - len(command[0].lstrip()))
    for name, (number, _) in script.options.items():
        if number > first:
            yield script.finding("too late", number, option=name, first=first)


def check_early_expansion(script: BatchScript) -> Iterator[Finding]:
    """Find variables of a task that the batch script expands."""
    for match in re.finditer(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b", script.code):
        yield script.finding("expanded early", script.line(match.start()), variable=match[1])


def check_fixed_port(script: BatchScript) -> Iterator[Finding]:
    """Find ports that two jobs on one node would both use."""
    pattern = (
        r"MASTER_PORT=[\"']?(\d+)|--(?:master|main_process)[-_]port[ =](\d+)"
        r"|--rdzv[-_]endpoint[ =]\S*?:(\d+)"
    )
    for match in re.finditer(pattern, script.code):
        port = match[match.lastindex or 0]
        yield script.finding("fixed port", script.line(match.start()), port=port)


def check_node_counts(script: BatchScript) -> Iterator[Finding]:
    """Find a second number of nodes, which has to be changed with the first."""
    if "--nodes" not in script.options:
        return
    line, count = script.options["--nodes"]
    pattern = (
        r"--(?:nnodes|num_machines)[ =](\d+)|\bNNODES=(\d+)"
        r"|\b(?:srun|stepladder)\b[^\n;|&]*?\s(?:--nodes[ =]|-N\s?)(\d+)"
    )
    for match in re.finditer(pattern, script.code.replace("\\\n", "  ")):
        second_count = next(filter(None, match.groups()))
        yield script.finding(
            "two counts", script.line(match.end() - 1), second=second_count, first=count, at=line
        )


def check_signal_and_requeue(script: BatchScript) -> Iterator[Finding]:
    """Find missing options without which work is lost at the end."""
    if "--signal" not in script.options:
        yield script.finding("no signal", 1)
    if "--requeue" not in script.options:
        yield script.finding("no requeue", 1)


def check_agents(script: BatchScript) -> Iterator[Finding]:
    """Find agents (torchrun and the like) that run too seldom or too often."""
    for command in script.commands:
        agent = re.search(AGENT_COMMAND, command[0])
        if agent is not None:
            yield from _check_agent(script, command, agent)


def _check_agent(
    script: BatchScript, command: re.Match[str], agent: re.Match[str]
) -> Iterator[Finding]:
    line = script.line(command.start() + agent.start())
    nodes = script.option("--nodes") or "1"
    srun = re.search(r"\bsrun\b", command[0][: agent.start()])
    if srun is None:
        if nodes not in ("1", "1-1"):
            yield script.finding("no srun", line, agent=agent.group())
        return
    is_training = re.search(r"\bstepladder\s+train\b", agent.group())
    if is_training and "--nproc" not in command[0]:
        return  # each task is a rank, without agents
    options = dict(parse_options(command[0][srun.end() : agent.start()]))
    per_node = options.get("--ntasks-per-node") or script.option("--ntasks-per-node")
    total = options.get("--ntasks") or script.option("--ntasks")
    if per_node:
        tasks = f"{per_node} tasks per node"
        has_too_many = (parse_whole_number(per_node) or 0) > 1
    else:
        tasks = f"{total} tasks"
        has_too_many = (parse_whole_number(total) or 0) > (parse_whole_number(nodes) or 1)
    if has_too_many:
        yield script.finding("tasks and agents", line, tasks=tasks)


def check_hidden_gpus(script: BatchScript) -> Iterator[Finding]:
    """Find options with which a task sees only its own GPU."""
    pattern = r"--gpus-per-task\b|--gpu-bind[ =](?:single|closest|map_gpu|mask_gpu|per_task)"
    matches = [
        (number, name)
        for name, (number, value) in script.options.items()
        if re.match(pattern, f"{name}={value}")
    ]
    for match in re.finditer(pattern, script.code):
        matches.append((script.line(match.start()), match[0]))
    for number, name in matches:
        yield script.finding("hidden GPUs", number, option=name)


def check_processors(script: BatchScript) -> Iterator[Finding]:
    """Find srun without --cpus-per-task, which it does not take over from the job."""
    if "--cpus-per-task" not in script.options or "SRUN_CPUS_PER_TASK" in script.code:
        return
    for command in script.commands:
        srun = re.search(r"(?:^|[;&|(]|\btime)\s*srun\b", command[0])
        has_flag = "--cpus-per-task" in command[0] or re.search(r"\s-c\s?\S", command[0])
        if srun and not has_flag:
            yield script.finding("one processor", script.line(command.start() + srun.end() - 1))


def check_missing_files(script: BatchScript) -> Iterator[Finding]:
    """Find scripts that are run and do not exist."""
    folders = [Path.cwd(), script.path.parent]
    for command in script.commands:
        change = re.match(r"\s*cd\s+(\S+)", command[0])
        if change:
            if re.search(r"[$`~]", change[1]):
                return  # the folder is not known before the job runs
            folders = [folder / change[1].strip("\"'") for folder in folders]
        for match in re.finditer(r"(?<![\w$}/=.-])[\"']?([\w./-]+\.(?:py|sh))\b", command[0]):
            name = match[1]
            is_run = re.search(
                rf"(?:\b(?:python3?|bash|sh|source)|{AGENT_COMMAND}|\s\.)\s(?:[^;&|]*\s)?$",
                f" {command[0][: match.start()]}",
            )
            if is_run and not any((folder / name).exists() for folder in folders):
                line = script.line(command.start() + match.start(1))
                yield script.finding("no file", line, name=name, folder=folders[0])
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

"""Mistakes in batch scripts that Slurm accepts: `stepladder submit --lint FILE`.

The rules read the script as a shell runs it: which commands run in the batch step, which in the
tasks of srun, and who gets the job's signal. What a shell does not expand (single quotes, comments)
is no command and is left out. A rule that is not certain reports nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stepladder.core import typed_file
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import parse_whole_number
from stepladder.tools.findings.finding import Catalogue, Finding, Location

BATCH_SUFFIXES = (".sbatch", ".slurm", ".sh", ".batch")
TORCH_AGENT = r"\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate\s+launch)\b"
AGENT_COMMAND = rf"(?:{TORCH_AGENT}|\bstepladder\s+(?:train|run)\b)"
PROGRAM = re.compile(rf"{AGENT_COMMAND}|\b(?:python3?|bash|sh)\b")
MAX_SPLIT_LENGTH = 1 << 14  # characters; shlex takes quadratic time
LONG_NAMES = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-c": "--cpus-per-task",
    "-t": "--time",
    "-p": "--partition",
    "-o": "--output",
    "-e": "--error",
    "-D": "--chdir",
}
# Escaped characters, quoted texts, comments, and here-documents whose end is quoted. Of a text in
# double quotes a shell leaves only the escaped characters unexpanded.
UNEXPANDED = re.compile(
    r"""\\[^\n]|'[^']*'|"(?:[^"\\]|\\.)*"|(?:(?<=\s)|^)\#[^\n]*"""
    r"""|<<-?\s*(['"])(\w+)\1.*?^\s*\2$""",
    re.MULTILINE | re.DOTALL,
)
# What hides the end of a command: an escaped character, a text in double quotes, and the lines of a
# here-document.
HIDES_END = re.compile(
    r"""\\.|"(?:[^"\\]|\\.)*"|(?<=<<)-?\s*(\w+)[^\n]*\n.*?^\s*\1$""", re.MULTILINE | re.DOTALL
)
OWN_ADDRESS = re.compile(
    r"""MASTER_ADDR=["']?(?:\$\(hostname|\$\{?(?:HOSTNAME|SLURMD_NODENAME)|localhost|127\.)"""
)
COMMAND = re.compile(r"(?:[<>]&|&>|[^\n;&|])+")
LINT_TEXTS = Catalogue("stepladder.tools.lint")


@dataclass(frozen=True)
class _Command:
    """A command of a script, with its continuation lines.

    Args:
        text: The command, with blanks for what no shell expands.
        line: Its line.
        step: What srun runs in its tasks, after its options; None in the batch step.
        options: The options of srun.
        in_background: Whether the shell goes on at once.
    """

    text: str
    line: int
    step: str | None
    options: dict[str, str]
    in_background: bool


class _BatchScript:
    """A parsed batch script."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.code = _blank_unexpanded(text)
        # The line and the value of each option of the #SBATCH lines, by its long name.
        self.options: dict[str, tuple[int, str]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if re.match(r"#SBATCH\s+(?:het|pack)job", line):
                break  # the options of another part of the job follow
            if line.startswith("#SBATCH"):
                for name, value in _parse_options(line.removeprefix("#SBATCH")):
                    self.options[name] = (number, value)
        self.commands = list(self._find_commands())
        # Where a relative path may lead to: where the script is submitted is not known.
        self.bases = [Path.cwd() / self.get_option("--chdir"), path.parent]

    def _find_commands(self) -> Iterator[_Command]:
        joined = self.code.replace("\\\n", "  ")
        ends = HIDES_END.sub(lambda match: "_" * len(match[0]), joined)
        for match in COMMAND.finditer(ends):
            words = match[0].split()
            if not words:
                continue
            start, end = match.span()
            is_text = words[0] in ("echo", "printf", "cat")
            srun = None if is_text else re.search(r"\bsrun\b", match[0])
            program = PROGRAM.search(self.text, start + srun.end() if srun else end, end)
            step_start = program.start() if program else end
            yield _Command(
                "" if is_text else joined[start:end],
                self.find_line(start + len(match[0]) - len(match[0].lstrip())),
                self.text[step_start:end] if srun else None,
                dict(_parse_options(joined[start + srun.end() : step_start])) if srun else {},
                re.match("&(?!&)", ends[end:]) is not None,
            )

    def find_line(self, offset: int) -> int:
        """Return the line number of an offset in the text."""
        return self.text.count("\n", 0, offset) + 1

    def make_finding(self, rule: str, line: int, **values: Any) -> Finding:
        """Return the finding of a rule on a line."""
        return LINT_TEXTS.finding(rule, Location(str(self.path), line), values=values)

    def get_nodes(self, command: _Command) -> str:
        """Return the number of nodes of a command of srun, or else of the job."""
        return command.options.get("--nodes") or self.get_option("--nodes") or "1"

    def is_on_nodes(self, command: _Command) -> bool:
        """Return whether a command runs on several nodes, in the batch step if it starts them."""
        return self.get_nodes(command) not in ("1", "1-1")

    def get_option(self, name: str) -> str:
        """Return the value of an #SBATCH option, "" if there is none."""
        return self.options.get(name, (0, ""))[1]


def _parse_options(text: str) -> Iterator[tuple[str, str]]:
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


def _blank_unexpanded(text: str) -> str:
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
        script = _BatchScript(path, typed_file.read_file(path).decode())
    first_line = script.text.partition("\n")[0]
    if path.suffix == ".py" or re.match(r"#!.*\bpython", first_line):
        raise InputError(
            f"{path} is Python, not a batch script of a shell",
            f"stepladder check {path}; --lint reads a shell script with #SBATCH lines",
        )
    findings = [finding for rule in LINT_RULES for finding in rule(script)]
    return sorted(findings, key=lambda finding: finding.location.line)


def find_warning_signal(script: Path) -> str:
    """Return the signal by which a batch script beside a Python script warns it; "" without one.

    That is one of the first batch script, by name, that names the Python script and has a warning
    signal.
    """
    for path in sorted(script.absolute().parent.iterdir()):
        if path.suffix not in BATCH_SUFFIXES or not path.is_file():
            continue
        with suppress(OSError, ValueError):
            batch_script = _BatchScript(path, typed_file.read_file(path).decode())
            name = _split_signal(batch_script.get_option("--signal"))[1]
            if name and script.name in batch_script.code:
                return name
    return ""


def _split_signal(value: str) -> tuple[str, str]:
    """Return who gets the signal of an option --signal, such as "B", and the signal's name."""
    target, _, name = value.partition("@")[0].replace("SIG", "").rpartition(":")
    return target, name


# -- rules -----------------------------------------------------------------------------------------


def _check_comments(script: _BatchScript) -> Iterator[Finding]:
    """Find #SBATCH lines that Slurm does not read."""
    for number, line in enumerate(script.text.splitlines(), 1):
        if re.match(r"#\s+SBATCH\b", line):
            yield script.make_finding("comment", number, text=line.strip())
    if not script.commands:
        return
    first_line = script.commands[0].line
    for name, (number, _) in script.options.items():
        if number > first_line:  # Slurm reads no option after the first command
            yield script.make_finding("too late", number, option=name, first=first_line)


def _check_early_expansion(script: _BatchScript) -> Iterator[Finding]:
    """Find variables of a task that the batch script expands before srun starts the tasks."""
    for match in re.finditer(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b", script.code):
        yield script.make_finding(
            "expanded early", script.find_line(match.start()), variable=match[1]
        )


def _check_fixed_port(script: _BatchScript) -> Iterator[Finding]:
    """Find ports that two jobs on one node would both use."""
    pattern = (
        r"MASTER_PORT=[\"']?(\d+)|--(?:master|main_process)[-_]port[ =](\d+)"
        r"|--rdzv[-_]endpoint[ =]\S*?:(\d+)"
    )
    for match in re.finditer(pattern, script.code):
        port = match[match.lastindex or 0]
        yield script.make_finding("fixed port", script.find_line(match.start()), port=port)


def _check_node_counts(script: _BatchScript) -> Iterator[Finding]:
    """Find a second number of nodes, which has to be changed whenever the first one is."""
    if "--nodes" not in script.options:
        return
    line, count = script.options["--nodes"]
    pattern = (
        r"--(?:nnodes|num_machines)[ =](\d+)|\bNNODES=(\d+)"
        rf"|\b(?:srun|stepladder)\b[^\n;|&]*?\s(?:--nodes[ =]|-N\s?)({re.escape(count)})\b"
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


def _check_signal_and_requeue(script: _BatchScript) -> Iterator[Finding]:
    """Find missing options without which a job loses work at its time limit or a preemption."""
    if "--signal" not in script.options:
        yield script.make_finding("no signal", 1)
    if "--requeue" not in script.options:
        yield script.make_finding("no requeue", 1)


def _check_agents(script: _BatchScript) -> Iterator[Finding]:
    """Find agents (torchrun and the like) that run too seldom or too often."""
    for command in script.commands:
        agent = re.search(AGENT_COMMAND, command.text)
        if agent is not None:
            yield from _check_agent(script, command, agent.group())


def _check_agent(script: _BatchScript, command: _Command, agent: str) -> Iterator[Finding]:
    find = partial(script.make_finding, line=command.line)
    is_ours = agent.startswith("stepladder")
    if command.step is None:
        if script.is_on_nodes(command) and not is_ours:  # ours starts itself on all nodes
            yield find("no srun", agent=agent)
        return
    if is_ours and "--nproc" not in command.text:
        return  # each task is a rank, without agents
    total = command.options.get("--ntasks") or script.get_option("--ntasks")
    per_node = command.options.get("--ntasks-per-node")
    if not per_node and "--ntasks" not in command.options:
        per_node = script.get_option("--ntasks-per-node")
    if per_node:
        tasks = f"{per_node} tasks per node"
        has_too_many = (parse_whole_number(per_node) or 0) > 1
    else:
        tasks = f"{total} tasks"
        nodes = parse_whole_number(script.get_nodes(command)) or 1
        has_too_many = (parse_whole_number(total) or 0) > nodes
    if has_too_many:
        yield find("tasks and agents", tasks=tasks)
    elif agent.endswith("train") and script.is_on_nodes(command) and "--nodes" not in command.step:
        yield find("ranks and tasks")


def _check_signal(script: _BatchScript) -> Iterator[Finding]:
    """Find a warning signal that ends a job, or that nothing sees in time."""
    line, value = script.options.get("--signal", (1, ""))
    target, name = _split_signal(value)
    programs = [command for command in script.commands if PROGRAM.search(command.text)]
    is_replaced = any(command.text.lstrip().startswith("exec ") for command in programs)
    if is_replaced or not programs or not name.isalnum() or name.isdigit():
        return
    last = programs[-1]
    if "B" not in target:
        has_steps = any(command.step is not None for command in programs)
        may_start_steps = re.search(r"\b(?:bash|sh)\s|\./|mpi|submitit", script.code)
        if not has_steps and not may_start_steps and not script.is_on_nodes(last):
            yield script.make_finding("unseen signal", line, signal=name)
        for command in programs:
            is_agent = re.search(TORCH_AGENT, command.step or "")
            if name.startswith("USR") and is_agent and "--signals-to" not in command.text:
                yield script.make_finding("deadly signal", command.line, signal=name)
    elif not re.search(rf"\btrap\b.*\b(?:SIG)?{name}\b", script.text):
        yield script.make_finding("no trap", line, signal=name)
    elif not any(command.in_background for command in script.commands):
        yield script.make_finding("late trap", last.line, signal=name)


def _check_master_address(script: _BatchScript) -> Iterator[Finding]:
    """Find tasks of several nodes that each take their own node for the first one."""
    for command in script.commands:
        if script.is_on_nodes(command) and OWN_ADDRESS.search(command.step or ""):
            yield script.make_finding("own master", command.line)


def _check_batch_file(script: _BatchScript) -> Iterator[Finding]:
    """Find what sbatch refuses, and folders that Slurm does not make."""
    if not script.text.startswith("#!"):
        yield script.make_finding("no shell", 1)
    if "\r" in script.text:
        yield script.make_finding("line ends", 1)
    for name in ("--output", "--error"):
        line, value = script.options.get(name, (0, ""))
        folder = Path(value).parent
        if "%" not in str(folder) and not any(
            base.joinpath(folder).is_dir() for base in script.bases
        ):
            yield script.make_finding("no folder", line, option=name, folder=folder)


def _check_hidden_gpus(script: _BatchScript) -> Iterator[Finding]:
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


def _check_processors(script: _BatchScript) -> Iterator[Finding]:
    """Find srun without --cpus-per-task: srun does not use the value of the job's option."""
    if "--cpus-per-task" not in script.options or "SRUN_CPUS_PER_TASK" in script.code:
        return
    for command in script.commands:
        has_flag = "--cpus-per-task" in command.text or re.search(r"\s-c\s?\S", command.text)
        if command.step is not None and not has_flag:
            yield script.make_finding("one processor", command.line)


def _check_missing_files(script: _BatchScript) -> Iterator[Finding]:
    """Find Python and shell scripts that are run and do not exist."""
    folders = script.bases
    for command in script.commands:
        change = re.match(r"\s*cd\s+(\S+)", command.text)
        if change:
            if re.search(r"[$`~]", change[1]):
                return  # the folder is not known before the job runs
            folders = [folder / change[1].strip("\"'") for folder in folders]
        for match in re.finditer(r"(?<![\w$}/=.-])[\"']?([\w./-]+\.(?:py|sh))\b", command.text):
            name = match[1]
            # It follows python, a shell, `source`, `.` or an agent, perhaps after options.
            is_run = re.search(
                rf"(?:\b(?:python3?|bash|sh|source)|{AGENT_COMMAND}|\s\.)\s(?:[^;&|]*\s)?$",
                f" {command.text[: match.start()]}",
            )
            if is_run and not any((folder / name).exists() for folder in folders):
                yield script.make_finding("no file", command.line, name=name, folder=folders[0])
                break


LINT_RULES = (
    _check_comments,
    _check_early_expansion,
    _check_fixed_port,
    _check_node_counts,
    _check_signal_and_requeue,
    _check_agents,
    _check_signal,
    _check_master_address,
    _check_batch_file,
    _check_hidden_gpus,
    _check_processors,
    _check_missing_files,
)

"""`stepladder convert`: propose the changes from one process to many, and prove each."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.python_file import parse_source
from stepladder.core.scratch import temporary_folder
from stepladder.core.signals import exit_on_signals
from stepladder.tools.check import check as checking
from stepladder.tools.check.events import LoadedLibraries
from stepladder.tools.check.failure import choose_exit_code
from stepladder.tools.check.fork_servers import ForkServers
from stepladder.tools.check.launch_style import LaunchStyle, find_modules_elsewhere, find_styles
from stepladder.tools.check.resume import NO_COMPARISON
from stepladder.tools.check.script_source import read_source
from stepladder.tools.convert.conversion import Conversion
from stepladder.tools.convert.facts import ScriptFacts
from stepladder.tools.convert.ladder import RUNGS, Rung, compose
from stepladder.tools.convert.loops import find_loops_by_hand, find_loops_that_train
from stepladder.tools.convert.proof import (
    RungProof,
    prove,
    read_original,
    starts_of_converted,
    starts_of_original,
    why_failed,
)
from stepladder.tools.convert.rungs import is_of_evaluation, share_evaluation
from stepladder.tools.convert.rungs_files import describe_not_judged, write_once
from stepladder.tools.convert.rungs_snapshot import STEPS_BETWEEN_SNAPSHOTS
from stepladder.tools.convert.shortening import shorten_epochs
from stepladder.tools.convert.shown_expressions import (
    find_deciding_value,
    find_given,
    find_shown_expression,
    take_of_all,
)
from stepladder.tools.convert.source import CannotConvert, Edit, EditedText, Loop, SourceText, diff
from stepladder.tools.convert.starts import ScriptStarter, Started
from stepladder.tools.convert.to_job import JOB, write_job
from stepladder.tools.findings.finding import Finding

JOIN = "join_processes()\n"
# Two starts of a script without a seed cannot be compared.
SEEDED_JOIN = (
    "join_processes(); torch.manual_seed(0); random.seed(0); "
    "'numpy' in sys.modules and sys.modules['numpy'].random.seed(0)\n"
)
EPOCHS_UNTIL_TRAINING = 100  # of a script that begins to train late, as once a memory is full
OrderedWays = dict[tuple[SourceText, ast.expr], tuple[str, ...]]
TriedWay = tuple[list[Edit], dict[str, EditedText], RungProof]
# Processes evaluate different numbers of batches; the difference may be too small to be seen.
WAYS_TO_MEND_EVALUATION = ("mean_by_batches", "mean_over_processes", "sum_over_processes")
WAYS_TO_MEND = ("sum_over_processes", "mean_by_batches", "mean_over_processes")


@dataclass(frozen=True)
class ConversionRequest:
    """What to convert.

    Args:
        script: The script.
        args: Its arguments.
        last: The letter of the last rung.
        epochs: The training passes of each run; 0 for two.
        timeout: The seconds that one run may take.
        imports_stepladder: Whether the converted script may import stepladder.
        to: What it becomes: "script", which uses torch alone, "accelerate" or "job".
    """

    script: Path
    args: tuple[str, ...] = ()
    last: str = RUNGS[-1].letter
    epochs: int = 0
    timeout: float = 120.0
    imports_stepladder: bool = False
    to: str = "script"


@dataclass(frozen=True)
class ProvedRung:
    """A rung that holds.

    Args:
        rung: The rung.
        diffs: The unified diff of each file; empty where nothing changes.
        proof: What runs have shown.
        not_judged: What no run has come to.
    """

    rung: Rung
    diffs: list[str]
    proof: RungProof
    not_judged: list[str]


@dataclass(frozen=True)
class Conversions:
    """The result.

    Args:
        rungs: The rungs that hold, in their order.
        files: The new text of each file that changes, by its path in the folder.
        stopped: Why the next rung is not offered; empty if all hold.
        sources: The text of each file of the script, as it is then.
        num_processes: The number of processes of the proof.
    """

    rungs: list[ProvedRung] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    stopped: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    num_processes: int = 2


def convert(
    request: ConversionRequest, on_rung: Callable[[ProvedRung], None] = lambda _: None
) -> Conversions:
    """Run a script on one process, and convert it rung by rung as far as each is proved.

    Args:
        request: What to convert.
        on_rung: Called with each rung that holds.

    Raises:
        InputError: The script does not run, or trains nothing, on one process.
    """
    parse_source(request.script)
    style = find_styles(request.script.absolute(), Path.cwd(), None)[0]
    with exit_on_signals(), temporary_folder() as folder, closing(ForkServers()) as servers:
        starter = ScriptStarter(
            style, request.args, folder.resolve(), servers, request.epochs, request.timeout
        )
        converter = Converter(request, style, starter)
        return converter.make_job(on_rung) if request.to == "job" else converter.climb(on_rung)


class Converter:
    """Converts one script.

    Args:
        request: What to convert.
        style: How the script is started.
        starter: Starts it.
    """

    def __init__(
        self, request: ConversionRequest, style: LaunchStyle, starter: ScriptStarter
    ) -> None:
        self.request = request
        self.style = style
        self.starter = starter
        self.shortening: list[Edit] = []
        self.files_once: list[Edit] = []
        self.started_texts: dict[str, str] = {}
        self.started: dict[str, Started] = {}
        self.ahead: dict[str, TriedWay] = {}

    def climb(self, on_rung: Callable[[ProvedRung], None]) -> Conversions:
        conversion = self.observe()
        proved: list[ProvedRung] = []
        steps: list[list[Edit]] = []
        texts = _texts_of(conversion.files)
        files: dict[str, str] = {}
        for rung in RUNGS:
            try:
                way = self.ahead.get(rung.letter) or self.choose_way(conversion, rung, steps)
                if conversion.ways.get("d") is share_evaluation and rung.letter == "d":
                    way = self.look_ahead(conversion, steps, way)
            except CannotConvert as reason:
                stopped = f"{rung.letter}, {rung.title}: {reason}"
                return Conversions(proved, files, stopped, texts, self.num_processes)
            edits, edited, proof = way
            steps.append(edits)
            files = _texts_of(edited)
            diffs = [diff(name, texts[name], text) for name, text in files.items()]
            texts |= files
            not_judged = [*describe_not_judged(conversion, rung.letter), *proof.not_judged]
            proved.append(ProvedRung(rung, list(filter(None, diffs)), proof, not_judged))
            on_rung(proved[-1])
            if rung.letter == self.request.last:
                break
        return Conversions(proved, files, "", texts, self.num_processes)

    def make_job(self, on_rung: Callable[[ProvedRung], None]) -> Conversions:
        conversion = self.observe()
        try:
            text, proof, not_judged = write_job(conversion, self.original, self.starter)
        except CannotConvert as reason:
            return Conversions(stopped=str(reason))
        proved = ProvedRung(JOB, [text], proof, not_judged)
        on_rung(proved)
        return Conversions([proved], {conversion.main: text})

    def observe(self) -> Conversion:
        """Run the script as it is, on one process.

        Raises:
            InputError: It does not run, or trains nothing.
        """
        recorded = self.starter.run_few_batches()
        self.require_training(recorded)
        source = read_source(self.style.script, self.style.root)
        # Those that links lead to have absolute names: they are read, and never written.
        paths = {item.name: item.path for item in source.files if not Path(item.name).is_absolute()}
        loaded = recorded.recording.ranks[0].select(LoadedLibraries)
        elsewhere = find_modules_elsewhere(self.style, *(event.others for event in loaded))
        files = {name: SourceText.read(path, name) for name, path in (paths | elsewhere).items()}
        if elsewhere:
            self.starter.modules = {name: files[name].text for name in elsewhere}
            recorded = self.starter.run_few_batches()
            self.require_training(recorded)
        main = str(self.style.script.relative_to(self.style.root))
        conversion = Conversion(main, files, ScriptFacts(recorded.recording))
        for epochs in (self.request.epochs or 2, EPOCHS_UNTIL_TRAINING):
            started = self.shorten(conversion, epochs)
            if all(item.outcome.has_stepped for item in started.values()):
                break
        for item in started.values():
            self.require_training(item)
        self.original = read_original(started)
        facts = ScriptFacts(started["reference"].recording)
        self.num_processes = facts.num_processes
        to_accelerate = self.request.to == "accelerate"
        conversion = Conversion(main, files, facts, self.request.imports_stepladder, to_accelerate)
        with suppress(CannotConvert):
            self.files_once = list(write_once(conversion, "save_without_barrier"))
        return conversion

    def shorten(self, conversion: Conversion, epochs: int) -> dict[str, Started]:
        """Run the script with a few turns of each loop that trains, until no further one is met."""
        loops: set[tuple[SourceText, Loop]] = set()
        shortening: dict[Edit, None] = {}
        while True:
            loops.update(find_loops_that_train(conversion))
            shortening |= dict.fromkeys(shorten_epochs(conversion, epochs))
            self.shortening = list(shortening)
            texts = _texts_of(compose(conversion, [self.shortening]))
            started = self.starter.run(starts_of_original(texts))
            # What comes after the training may need the results of all batches.
            has_failed = any(item.outcome.failed for item in started.values())
            if has_failed and self.starter.take_more_batches():
                continue
            facts = ScriptFacts(started["reference"].recording)
            conversion = replace(conversion, facts=facts)
            if loops.issuperset(find_loops_that_train(conversion)):
                return started

    def require_training(self, started: Started) -> None:
        """Raise an InputError if the script fails or trains nothing, or asks for its rank."""
        script, outcome = self.style.script.name, started.outcome
        problem, hint = why_failed(started), f"python {script}"
        if outcome.knows_other_ranks:
            problem, hint = "asks for its rank by itself", f"stepladder check {script}"
        elif outcome.late:
            hint = f"--timeout {2 * self.request.timeout:g}"
        if problem:
            raise InputError(f"{script}, on one process, {problem}", hint)

    def choose_way(self, conversion: Conversion, rung: Rung, steps: list[list[Edit]]) -> TriedWay:
        """Return the first way to make a rung that its proof confirms.

        Raises:
            CannotConvert: No way holds.
        """
        reason = ""
        for alternative in rung.alternatives:
            try:
                edits = list(alternative(conversion))
            except CannotConvert as problem:
                reason = reason or str(problem)
                continue
            edited, proof = self.try_edits(conversion, rung, [*steps, edits])
            if shared := proof.shared_twice - conversion.shared_before:
                conversion.shared_before.update(shared)
                return self.choose_way(conversion, rung, steps)
            if proof.wrong_numbers and "shown-numbers" in rung.judged:
                edits, edited, proof = self.mend_numbers(conversion, rung, steps, edits, proof)
            if not proof.broken and "resume" in rung.judged:
                # A check cuts loaders short, and no other loops.
                shortening = self.shortening * any(find_loops_by_hand(conversion))
                ran = compose(conversion, [*steps, edits, shortening])
                self.check_resume(ran, proof)
            if not proof.broken:
                proof.not_taken.extend([reason] * bool(reason))
                conversion.ways[rung.letter] = alternative
                return edits, edited, proof
            reason = reason or "; ".join(proof.broken)
        raise CannotConvert(reason)

    def look_ahead(
        self, conversion: Conversion, steps: list[list[Edit]], shared: TriedWay
    ) -> TriedWay:
        """Return how each process evaluates everything, if no numbers of shares are right.

        Args:
            conversion: The script.
            steps: The edits of the rungs before the evaluation is shared.
            shared: How it is shared, which is returned if its numbers are right.
        """
        sharing, showing = (rung for rung in RUNGS if rung.letter in "de")
        try:
            self.ahead["e"] = self.choose_way(conversion, showing, [*steps, shared[0]])
        except CannotConvert as reason:
            other = replace(sharing, alternatives=sharing.alternatives[1:])
            with suppress(CannotConvert):
                way = self.choose_way(conversion, other, steps)
                way[2].not_taken.append(str(reason))
                return way
        return shared

    def check_resume(self, edited: dict[str, EditedText], proof: RungProof) -> None:
        """Check the converted script as a user would, with a resumed run, and add what it says.

        What is no fault of a resume is one of the script as it was.
        """
        seeded = {
            name: text.replace(JOIN, SEEDED_JOIN) for name, text in _texts_of_run(edited).items()
        }
        request = checking.Request(
            self.style.script,
            self.request.args,
            nproc=self.num_processes,
            batches=self.starter.batches,
            resume=True,
            timeout=self.request.timeout,
            texts=self.starter.modules | seeded,
        )
        report, findings = _check_snapshots(request)
        if request.batches and any(item.rule == "resume-differs" for item in findings):
            # Few batches may leave what whole epochs do not, as half of an accumulated gradient.
            report, findings = _check_snapshots(replace(request, batches=0))
        failure = report.not_checked
        if choose_exit_code(findings, failure):
            texts = [(failure.output or failure.line).strip().splitlines()[-1]] if failure else []
            for item in findings:
                texts.append(f"{item.rule}: {to_one_line(item.evidence or item.what)}")
            proof.broken.append(f"check --resume: {'; '.join(texts)}")
        else:
            proof.holds.extend(report.held)
            proof.not_judged.extend(note for note in report.notes if note == NO_COMPARISON)

    def try_edits(
        self, conversion: Conversion, rung: Rung, steps: list[list[Edit]]
    ) -> tuple[dict[str, EditedText], RungProof]:
        edited = compose(conversion, steps)
        # Files that several processes write at once cannot be read back, in the rungs before.
        unoffered = [self.shortening, *[self.files_once] * ("files" not in rung.judged)]
        ran = compose(conversion, [*steps, *unoffered])
        # Each process shows its numbers in a proof, so that they can be compared.
        texts = {
            name: text.replace("show_on_one_process()\n", "pass\n")
            for name, text in _texts_of_run(ran).items()
        }
        if texts != self.started_texts:  # a rung may change nothing
            self.started = self.starter.run(starts_of_converted(texts, self.num_processes))
            self.started_texts = texts
        judged = rung.judged
        if conversion.gathered:  # then rows are those of the whole batch
            judged -= {"values-of-sums"}
        return edited, prove(self.original, self.started, ran, judged)

    def mend_numbers(
        self,
        conversion: Conversion,
        rung: Rung,
        steps: list[list[Edit]],
        edits: list[Edit],
        proof: RungProof,
    ) -> TriedWay:
        """Show the mean, or the sum, over all processes of each number that is wrong."""
        ways: OrderedWays = {}  # that are left
        unchanged = edits, compose(conversion, [*steps, edits]), proof
        numbers = proof.wrong_numbers
        while numbers:
            wrong: OrderedWays = {}  # several numbers may be one expression
            deciding: OrderedWays = {}
            for number in numbers:
                location, position = number.location, number.position
                file = conversion.files.get(location.file)
                node = file and find_shown_expression(file, location.line, number.text, position)
                if not file or not node:
                    return unchanged
                objects = conversion.facts.names_of_objects
                origin = find_deciding_value(file, node, objects)
                order: tuple[str, ...] = WAYS_TO_MEND if number.is_counter else WAYS_TO_MEND[::-1]
                if is_of_evaluation(conversion, file, origin or node):
                    order = WAYS_TO_MEND_EVALUATION
                values = find_given(file, node, objects) or [node]
                wrong |= dict.fromkeys(product([file], values), order)
                if origin is not None:
                    deciding[file, origin] = order
            for key, order in (deciding or wrong).items():  # others may follow from what decides
                ways[key] = ways[key][1:] if key in ways else order
            if not all(ways.values()):
                return unchanged
            changes = [take_of_all(file, node, names[0]) for (file, node), names in ways.items()]
            candidate = [*edits, *chain.from_iterable(changes)]
            edited, proof = self.try_edits(conversion, rung, [*steps, candidate])
            # A way that fails, with a dict for example, leaves the numbers as they were.
            numbers = proof.wrong_numbers or numbers * bool(proof.broken)
        return candidate, edited, proof


def _check_snapshots(request: checking.Request) -> tuple[checking.Report, list[Finding]]:
    """Check a script; return the report, and its findings of snapshots and of a resume."""
    report = checking.check(request)
    return report, [item for item in report.findings if checking.family_of(item) == "snapshots"]


def _texts_of(files: Mapping[str, SourceText] | Mapping[str, EditedText]) -> dict[str, str]:
    return {name: file.text for name, file in files.items()}


def _texts_of_run(files: Mapping[str, EditedText]) -> dict[str, str]:
    """Return the texts for a run of some steps, each of which is to save a snapshot."""
    often = STEPS_BETWEEN_SNAPSHOTS.replace("100", "1")
    return {name: file.text.replace(STEPS_BETWEEN_SNAPSHOTS, often) for name, file in files.items()}

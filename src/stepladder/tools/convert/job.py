"""A Stepladder job made of a script's own lines, which `stepladder train` trains exactly."""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from symtable import symtable

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import BeforeStep
from stepladder.tools.check.script_source import (
    argument_of,
    find_nodes,
    last_name,
    parameters_of,
    stored_names,
)
from stepladder.tools.convert.facts import ScriptFacts, Use
from stepladder.tools.convert.rungs import Conversion, find_epoch_loops
from stepladder.tools.convert.source import INDENT, LOOPS, CannotConvert, Scope, SourceText

DEFINITIONS = ast.FunctionDef | ast.ClassDef
IMPORTS = ast.Import | ast.ImportFrom
RECOGNIZED = {"zero_grad", "backward", "step", "train", "unscale_", "update"}
CLIPPING = "clip_grad_norm_"
SAMPLERS = {"sampler", "batch_sampler"}
IMPORT_OF_JOB = "from stepladder import Job"
OWN_NAMES = {"build", "Config", "Job"}
CONFIG = """\
@dataclass
class Config:
    epochs: int = {}
    global_batch: int = {}
    seed: int = 0"""
WHOLE_LOOP = """\
for _ in range({passes}):
    {model}.train()
    for batch in {loader}:
        {optimizer}.zero_grad()
        loss({model}, batch).backward()
        {step}
"""
HALVED_LOOP = """\
weights = None
for _ in range({passes}):
    {model}.train()
    for batch in {loader}:
        weights = weights or weigh(loss, {model}, batch)
        {optimizer}.zero_grad()
        for (part, share), weight in zip(halves(batch), weights):
            (loss({model}, part) * (weight / share)).backward(torch.tensor(share))
        {step}
"""
COMPARED = """\
{0}.eval()
with torch.no_grad():
    batch = next(iter({1}))
    whole = metrics({0}, batch)
    for part, share in halves(batch):
        for name, (value, _) in metrics({0}, part).items():
            print("part", name, share, float(value), float(whole[name][0]))
"""
HALVES = """\
def size_of(item):
    parts = item.values() if isinstance(item, dict) else item
    return len(item) if torch.is_tensor(item) else size_of(next(iter(parts)))

def take(item, part):
    if isinstance(item, dict):
        return {key: take(value, part) for key, value in item.items()}
    if isinstance(item, (list, tuple)) and not isinstance(item[0], (str, int, float)):
        return [take(value, part) for value in item]
    return item[part]

def halves(batch):
    size = size_of(batch)
    for part in (slice(size // 2), slice(size // 2, size)):
        if share := len(range(size)[part]) / size:
            yield take(batch, part), share

def weigh(loss, model, batch):
    model.eval()
    with torch.no_grad():
        parts = [(float(loss(model, part)), share) for part, share in halves(batch)]
        whole = float(loss(model, batch))
    model.train()
    total = sum(value for value, _ in parts)
    mean = sum(value * share for value, share in parts)
    is_sum = abs(total - whole) < abs(mean - whole)  # noise is drawn in both
    print("loss is sum" if is_sum else "loss is mean")
    return [1.0 if is_sum else share for _, share in parts]
"""


@dataclass(frozen=True)
class Piece:
    """A statement of the job.

    Args:
        text: Its lines, without indentation.
        line: Its line in the script; 0 for what the script says in another way.
        is_of_module: Whether it is outside of all functions.
    """

    text: str
    line: int = 0
    is_of_module: bool = False

    @cached_property
    def statement(self) -> ast.stmt:
        return ast.parse(self.text).body[0]

    @cached_property
    def loads(self) -> set[str]:
        """The names from outside of its functions that it reads or binds, but for Python's own."""
        module = symtable(self.text, "", "exec")
        names = set(module.get_identifiers())
        tables = module.get_children()
        while tables:
            table = tables.pop()
            names |= {item.get_name() for item in table.get_symbols() if item.is_global()}
            tables += table.get_children()
        return names - vars(builtins).keys()

    @cached_property
    def changes(self) -> set[str]:
        """The names that it binds, and those of what it changes: `args` in `args.lr = 1`."""
        item = self.statement
        if isinstance(item, DEFINITIONS):
            return {item.name}
        if isinstance(item, IMPORTS):
            names = {(alias.asname or alias.name).partition(".")[0] for alias in item.names}
            return names | ({"annotations"} if "__future__" in self.text else set())
        names = set(stored_names(item))
        for node in ast.walk(item):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                names.add(_root(node.value.func))
            elif isinstance(node, ast.Attribute | ast.Subscript):
                names |= {_root(node)} if isinstance(node.ctx, ast.Store) else set()
        return names

    @property
    def may_change(self) -> set[str]:
        """The names that it changes, and those that it gives to calls without a result."""
        statements = find_nodes(self.statement, ast.Expr)
        calls = [item.value for item in statements if isinstance(item.value, ast.Call)]
        given = [
            {node.id for node in find_nodes(call, ast.Name)}
            for call in calls
            if last_name(call.func) not in vars(builtins)
        ]
        return self.changes.union(*given)


@dataclass(frozen=True)
class Frame:
    """A function that runs during the training.

    Args:
        scope: The function, or the module.
        bound: What its parameters are given, by their names.
        before: The statements before the training that are done once.
        in_epoch: Those that are done in each epoch.
        is_in_epoch: Whether it is called in each epoch.
    """

    scope: Scope
    bound: dict[str, str]
    before: list[ast.stmt]
    in_epoch: list[ast.stmt]
    is_in_epoch: bool


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def keep_needed(pieces: list[Piece], names: set[str], given: str = "") -> list[Piece]:
    """Return the statements that make or change what is named, and what these need.

    Args:
        pieces: The statements in their order.
        names: The names that are needed after them.
        given: The parameter of a function that they become, which changes nothing else that a call
            gets; empty where they are done once.
    """
    needed, kept = {*names, "annotations"} - {given}, []
    for piece in reversed(pieces):
        if (piece.changes if given else piece.may_change) & needed:
            if isinstance(piece.statement, ast.Assign):
                needed -= set(stored_names(piece.statement))  # no earlier value is used
                needed |= free_names([piece]) - {given}
            else:
                needed |= piece.loads - {given}
            kept.append(piece)
    return kept[::-1]


def free_names(pieces: list[Piece]) -> set[str]:
    """Return the names that statements read before they bind them."""
    free: set[str] = set()
    bound: set[str] = set()
    for piece in pieces:
        item = piece.statement
        names = find_nodes(item, ast.Name)
        read = {node.id for node in names if not isinstance(node.ctx, ast.Store)}
        inner = [item] if hasattr(item, "body") else find_nodes(item, ast.comprehension)
        free |= read - vars(builtins).keys() - bound.union(*map(stored_names, inner))
        bound |= set(stored_names(item))
    return free


class BatchLoop:
    """A `for` over the batches of a loader, with the functions that lead to it.

    Args:
        file: The script.
        uses: The functions that use the loader, from the innermost outwards.
        epoch_loop: The loop over the epochs, if there is one.
        args: The arguments of the script.

    Raises:
        CannotConvert: A job cannot have such a loop.
    """

    def __init__(
        self,
        file: SourceText,
        uses: tuple[Use, ...],
        epoch_loop: ast.For | None,
        args: tuple[str, ...],
    ) -> None:
        self.file = file
        self.epoch_loop = epoch_loop
        self.args = args
        if others := [use.location.file for use in uses if use.location.file != file.name]:
            raise CannotConvert(f"the training is in {others[0]}: a job is made of one file")
        line = uses[0].location.line
        loop = file.statement_at(line)
        if not isinstance(loop, ast.For) or not uses[0].name:
            raise self.refusal(line, "is no `for` over a loader that has a name")
        self.loop = loop
        self.scope = file.scope_of(loop)
        self.frames = list(self.find_frames(uses))
        self.loader = self.resolve(uses[0].name)
        self.counters = set[str]()
        self.target: ast.expr = loop.target
        if any(last_name(call.func) == "enumerate" for call in _calls(loop.iter)):
            assert isinstance(loop.target, ast.Tuple)
            counter, self.target = loop.target.elts
            self.counters = set(stored_names(counter))

    def refusal(self, line: int, what: str) -> CannotConvert:
        return CannotConvert(f"{self.file.name}:{line} {what}")

    def find_frames(self, uses: tuple[Use, ...]) -> Iterator[Frame]:
        """Yield the functions that run during the loop, the module first."""
        caller: ast.stmt | None = None
        is_in_epoch = False
        for use in reversed(uses):
            statement = self.file.statement_at(use.location.line)
            scope = self.file.scope_of(statement)
            path = [statement, *self.file.parents_of(statement)]
            path = path[: path.index(scope)]
            begin = path.index(self.epoch_loop) if self.epoch_loop in path else 0
            before: list[ast.stmt] = []
            in_epoch: list[ast.stmt] = []
            for depth, node in enumerate(path):
                if isinstance(node, (ast.With, *LOOPS)) and depth > begin and not is_in_epoch:
                    raise self.refusal(node.lineno, "is around the training, and not in a job")
                if isinstance(node, ast.stmt):
                    block = self.file.block_of(node)
                    earlier = in_epoch if is_in_epoch or depth < begin else before
                    earlier[:0] = block[: block.index(node)]
            bound = self.bind(caller, scope) if caller else {}
            yield Frame(scope, bound, before, in_epoch, is_in_epoch)
            is_in_epoch |= self.epoch_loop in path
            caller = statement

    def bind(self, caller: ast.stmt, scope: Scope) -> dict[str, str]:
        """Return what the parameters of a function are given where it is called."""
        assert not isinstance(scope, ast.Module)
        calls = [call for call in _calls(caller) if last_name(call.func) == scope.name]
        if len(calls) != 1:
            raise self.refusal(caller.lineno, f"does not call {scope.name} once by its name")
        [call] = calls
        positional = [item.arg for item in (*scope.args.posonlyargs, *scope.args.args)]
        of_keywords = [item.arg for item in scope.args.kwonlyargs]
        defaults = dict(zip(positional[::-1], scope.args.defaults[::-1], strict=False))
        given = dict(zip(of_keywords, scope.args.kw_defaults, strict=True)) | defaults
        names = parameters_of(scope)
        given |= {name: value for name in names if (value := argument_of(call, names, name))}
        if positional[:1] == ["self"] and isinstance(call.func, ast.Attribute):
            given["self"] = call.func.value
        return {name: self.file.text_of(value) for name, value in given.items() if value}

    def resolve(self, text: str) -> str:
        """Return the name before the first epoch of what the loop calls `text`."""
        for frame in reversed(self.frames):
            root, dot, rest = text.partition(".")
            if frame.is_in_epoch and root in frame.bound:
                text = f"{frame.bound[root]}{dot}{rest}"
        return text

    @property
    def count(self) -> str:
        """How many samples a batch has."""
        first = self.target.elts[0] if isinstance(self.target, ast.Tuple) else self.target
        return f"len({self.file.text_of(first)})"

    def name_of(self, model: int, facts: ScriptFacts) -> str:
        """Return the name of a model in the function of the loop.

        Raises:
            CannotConvert: It has none.
        """
        for use in chain(*facts.uses_of("model", model)):
            if use.location.file != self.file.name or not use.name:
                continue
            if self.file.scope_of(self.file.statement_at(use.location.line)) is self.scope:
                return use.name
        raise self.refusal(self.loop.lineno, "has no name for the model that it trains")

    def before_epochs(self) -> list[Piece]:
        """Return what is done once, before the first epoch."""
        pieces: list[Piece] = []
        for frame in self.frames:
            if not frame.is_in_epoch:
                pieces += [*_bindings(frame), *map(self.piece, frame.before)]
        return pieces

    def in_epoch(self, body: list[ast.stmt]) -> list[Piece]:
        """Return what is done in each epoch before the loop, and in it."""
        pieces: list[Piece] = []
        for frame in self.frames:
            pieces += [*_bindings(frame) * frame.is_in_epoch, *map(self.piece, frame.in_epoch)]
        batch = f"{self.file.text_of(self.target).strip('()')} = batch"
        return [*pieces, Piece(batch), *map(self.piece, body)]

    def piece(self, statement: ast.stmt) -> Piece:
        """Return a statement with the comments above it, and with the script's arguments."""
        begin = self.file.first_line(statement)
        while self.file.line(begin - 1).strip().startswith("#"):
            begin -= 1
        assert statement.end_lineno is not None
        self.file.indentation(statement)  # it has lines of its own
        text = textwrap.dedent("\n".join(self.file.lines[begin - 1 : statement.end_lineno]))
        source = SourceText(self.file.path, self.file.name, ast.parse(text), text)
        edits = [
            source.replace(call, f"{source.text_of(call)[:-1]}{list(self.args)})")
            for call in source.nodes(ast.Call)
            if last_name(call.func) == "parse_args" and not (call.args or call.keywords)
        ]
        is_of_module = isinstance(self.file.scope_of(statement), ast.Module)
        return Piece(source.apply(edits).text, statement.lineno, is_of_module)

    def make_function(
        self, name: str, model: str, pieces: list[Piece], returned: str
    ) -> MadeFunction:
        """Return a function of a model and a batch, made of what the loop does before a place.

        Raises:
            CannotConvert: It needs what only the loop has.
        """
        parameter = model if model.isidentifier() else "model"
        end = Piece(f"return_value = {returned}")
        kept = [p for p in keep_needed(pieces, end.loads, parameter) if p.text != "batch = batch"]
        needed = free_names([*kept, end]) - {parameter, "batch"}
        loops = [self.loop, *([self.epoch_loop.target] if self.epoch_loop else [])]
        unknown = needed & self.counters.union(*map(stored_names, loops))
        if unknown - {model.partition(".")[0]}:
            what = f"needs {min(unknown)} for its {name}, which a job does not know"
            raise self.refusal(self.loop.lineno, what)
        lines = [line for piece in kept for line in piece.text.splitlines()]
        lines.append(f"return {returned}")
        inner = [f"{INDENT}{line}".rstrip() for line in lines]
        text = "\n".join([f"def {name}({parameter}, batch):", *inner])
        if parameter != model:
            source = SourceText(self.file.path, self.file.name, ast.parse(text), text)
            found = [n for n in source.nodes(ast.Attribute) if source.text_of(n) == model]
            text = source.apply([source.replace(node, parameter) for node in found]).text
        return MadeFunction(text, needed, {piece.line for piece in kept})


@dataclass(frozen=True)
class MadeFunction:
    """A function of the job.

    Args:
        text: Its text.
        needed: The names that it needs from outside.
        lines: The lines of the script that it has.
    """

    text: str
    needed: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)


class JobWriter:
    """Writes the job of a script whose training has one model, one optimizer and one loss.

    Args:
        conversion: The script, and what a run of it has shown.
        args: The arguments that it was given.
        passes: The epochs of the scripts that prove it.

    Raises:
        CannotConvert: The training is none that a job can have.
    """

    def __init__(self, conversion: Conversion, args: tuple[str, ...], passes: int) -> None:
        self.facts = conversion.facts
        self.file: SourceText = conversion.files[conversion.main]
        self.epochs = 1
        self.passes = passes
        if not self.facts.training_stacks:
            raise CannotConvert("the training reads no torch DataLoader")
        if len(self.facts.trained_models) != 1:
            count = format_count(len(self.facts.trained_models), "model")
            raise CannotConvert(f"it trains {count}, and a job one")
        loops = [loop for file, loop in find_epoch_loops(conversion) if file is self.file]
        epoch_loop = loops[0] if loops else None
        self.training = BatchLoop(self.file, self.facts.training_stacks[0], epoch_loop, args)
        self.model_here = self.training.name_of(self.facts.trained_models[0], self.facts)
        self.model = self.training.resolve(self.model_here)
        self.make_loss()
        self.find_loader(conversion)
        self.find_schedules()
        self.metrics: dict[str, str] = {}
        self.evaluation: BatchLoop | None = None
        try:
            self.find_metrics(epoch_loop, args)
        except CannotConvert:
            self.evaluation = None

    def call_in_loop(self, name: str, lines: Container[int]) -> ast.Call:
        loop = self.training.loop
        calls = [
            call
            for call in self.file.nodes(ast.Call, loop)
            if last_name(call.func) == name and call.lineno in lines
        ]
        if len(calls) != 1 or self.file.statement_at(calls[0].lineno) not in loop.body:
            line = calls[0].lineno if calls else loop.lineno
            raise self.training.refusal(line, f"does not call {name} once for each batch")
        return calls[0]

    def make_loss(self) -> None:
        """Make the loss of what the loop does before it calls backward; find the optimizer.

        Raises:
            CannotConvert: A batch does not make one step with one loss.
        """
        places = dict.fromkeys(event.at for event in self.facts.log.select(BeforeStep) if event.at)
        steps = [self.facts.location(place).line for place in places]
        backward = self.call_in_loop("backward", range(len(self.file.lines) + 1))
        step = self.call_in_loop("step", steps)
        assert isinstance(backward.func, ast.Attribute) and isinstance(step.func, ast.Attribute)
        value = backward.func.value
        if isinstance(value, ast.Call) and last_name(value.func) == "scale":  # of a GradScaler
            value = value.args[0]
        self.optimizer_here = self.file.text_of(step.args[0] if step.args else step.func.value)
        self.optimizer = self.training.resolve(self.optimizer_here)
        body = self.training.loop.body
        pieces = self.training.in_epoch(body[: body.index(self.file.statement_at(backward.lineno))])
        self.made = pieces
        self.value = self.file.text_of(value)
        self.is_sum = False
        self.loss = self.make_loss_function()

    def make_loss_function(self, is_sum: bool = False) -> MadeFunction:
        """Return the function for the loss, which may be a sum over the batch."""
        returned = self.value
        if is_sum:  # a step has the gradient of a batch's sum
            returned = f"{self.value}, {self.training.count} / config.global_batch"
        return self.training.make_function("loss", self.model_here, self.made, returned)

    def find_loader(self, conversion: Conversion) -> None:
        """Find what the loader is made with.

        Raises:
            CannotConvert: It has an order or batches of its own.
        """
        [loader] = [item for item in self.facts.loaders if item.is_training][:1]
        self.start = loader.passes[0].start
        calls = conversion.calls(loader.built, "DataLoader")
        keywords = {keyword.arg for call in calls for keyword in call.keywords}
        if self.start.iterable or not self.start.batch_size or keywords & SAMPLERS:
            what = "reads samples in an order of its own: a job shuffles all of a data set"
            raise self.training.refusal(loader.built.line, what)
        names = {"collate_fn": "collate", "num_workers": "num_workers"}
        name = self.training.loader
        self.of_loader = [f"{names[key]}={name}.{key}" for key in names if key in keywords]

    def find_schedules(self) -> None:
        """Find the schedules, whether they step per "step" or "epoch", and the largest norm.

        Raises:
            CannotConvert: A schedule steps in some epochs alone.
        """
        training = self.training
        self.schedules: dict[str, str] = {}
        for call, per in self.calls_per_epoch():
            assert isinstance(call.func, ast.Attribute)
            texts = [self.file.text_of(item) for item in (call.func.value, *call.args)]
            if self.optimizer_here in texts:
                continue
            if isinstance(self.file.parents[self.file.statement_at(call.lineno)], ast.If):
                raise training.refusal(call.lineno, "steps a schedule now and then")
            self.schedules.setdefault(training.resolve(texts[0]), per)
        if len(set(self.schedules.values())) > 1:
            raise CannotConvert("it has schedules per step and per epoch, and a job has one kind")
        self.norm = ""
        for call in self.file.nodes(ast.Call, training.loop):
            norm = argument_of(call, ["parameters", "max_norm"], "max_norm")
            if last_name(call.func) == CLIPPING and norm:
                self.norm = training.resolve(self.file.text_of(norm))

    def calls_per_epoch(self) -> Iterator[tuple[ast.Call, str]]:
        """Yield the calls of `step` methods, and whether they are done per "step" or "epoch"."""
        training = self.training
        of_epochs = [training.epoch_loop, *(f.scope for f in training.frames if f.is_in_epoch)]
        for block in filter(None, [training.loop, *of_epochs]):
            for call in self.file.nodes(ast.Call, block):
                if isinstance(call.func, ast.Attribute) and call.func.attr == "step":
                    yield call, "step" if block is training.loop else "epoch"

    def find_metrics(self, epoch_loop: ast.For | None, args: tuple[str, ...]) -> None:
        """Find the sums of an evaluation that depend on the model.

        Raises:
            CannotConvert: A job has no such evaluation.
        """
        uses = [uses for item in self.facts.loaders if not item.is_training for uses in item.uses]
        if not uses:
            return
        loop = BatchLoop(self.file, uses[0], epoch_loop, args)
        self.model_in_evaluation = loop.name_of(self.facts.trained_models[0], self.facts)
        pieces = loop.in_epoch(loop.loop.body)
        for node in self.file.nodes(ast.AugAssign, loop.loop):
            if not isinstance(node.op, ast.Add) or not isinstance(node.target, ast.Name):
                continue
            value: ast.expr = node.value
            while isinstance(value, ast.Call) and last_name(value.func) == "item":
                assert isinstance(value.func, ast.Attribute)
                value = value.func.value
            text = self.file.text_of(value)
            names = {*Piece(f"_ = {text}").loads}
            made = [piece for piece in pieces if node.target.id not in piece.changes]
            used = [f"_ = {text}", *(piece.text for piece in keep_needed(made, names))]
            if any(self.model_in_evaluation in each for each in used):
                self.metrics[node.target.id] = text
        self.evaluation = loop if self.metrics else None
        if self.metrics:
            self.make_metrics(())

    def make_metrics(self, means: Container[str]) -> MadeFunction:
        """Return the function for the metrics, of which some are means and others sums."""
        loop = self.evaluation
        assert loop is not None
        sums = [
            f'"{name}": ({text}{f" * {loop.count}" * (name in means)}, {loop.count})'
            for name, text in self.metrics.items()
        ]
        pieces = [
            piece
            for piece in loop.in_epoch(loop.loop.body)
            if not piece.changes & self.metrics.keys()
        ]
        returned = f"{{{', '.join(sums)}}}"
        return loop.make_function("metrics", self.model_in_evaluation, pieces, returned)

    def write(self, means: Container[str] = ()) -> str:
        """Return the job.

        Args:
            means: The metrics that are means over a batch.
        """
        names = [*self.schedules]
        of_schedule = []
        if names:
            value = names[0] if len(names) == 1 else f"({', '.join(names)})"
            of_schedule = [f"schedule={value}", f'schedule_per="{self.schedules[names[0]]}"']
        functions, of_evaluation = [self.loss], []
        if self.evaluation:
            functions.append(self.make_metrics(means))
            of_evaluation = [f"{self.evaluation.loader}.dataset", "metrics"]
        arguments = [
            *(self.model, self.optimizer, "loss", f"{self.training.loader}.dataset"),
            *of_evaluation,
            *self.of_loader,
            *of_schedule,
            *[f"clip_norm={self.norm}"] * bool(self.norm),
        ]
        end = "\n".join(["return Job(", *(f"{INDENT}{item}," for item in arguments), ")"])
        return self.compose(functions, end, Piece(f"_ = Job({', '.join(arguments)})").loads)

    def write_proof(self, is_halved: bool = False, is_whole: bool = True) -> str:
        """Return a script that trains by the job's functions, over the script's own loader.

        Args:
            is_halved: Whether each batch has two parts.
            is_whole: Whether it has all that the script does before, so that it draws what that
                draws.
        """
        step = [f"torch.nn.utils.{CLIPPING}({self.model}.parameters(), {self.norm})"]
        step = step * bool(self.norm) + [f"{self.optimizer}.step()"]
        step += [f"{name}.step()" for name, per in self.schedules.items() if per == "step"]
        names = {"model": self.model, "loader": self.training.loader, "passes": self.passes}
        names |= {"optimizer": self.optimizer, "step": f"\n{INDENT * 2}".join(step)}
        end = (HALVED_LOOP if is_halved else WHOLE_LOOP).format(**names)
        functions = [self.loss]
        used = {"torch"}
        if self.evaluation and is_halved:
            functions.append(self.make_metrics(()))
            used.add(self.evaluation.loader.partition(".")[0])
            end += COMPARED.format(self.model, self.evaluation.loader)
        texts = [self.model, self.optimizer, self.training.loader, self.norm, *self.schedules]
        used |= {name for text in texts if text for name in Piece(f"_ = {text}").loads}
        text = self.compose(functions, end, used, is_whole)
        return f"{text}\n\nimport torch\n{HALVES}\nbuild(Config())\n"

    def compose(
        self, functions: list[MadeFunction], end: str, used: set[str], is_whole: bool = False
    ) -> str:
        """Return a job file whose `build` has functions, and ends with some lines.

        Args:
            functions: The functions.
            end: The lines.
            used: The names that they need.
            is_whole: Whether it has also what nothing needs.
        """
        pieces = self.training.before_epochs()
        if self.evaluation:
            known = {piece.line for piece in pieces}
            pieces += [p for p in self.evaluation.before_epochs() if p.line not in known]
        needed = used.union(*(item.needed for item in functions)) - {"Job", "loss", "metrics"}
        kept = pieces if is_whole else keep_needed(pieces, needed)
        self.check_names(kept)
        top = _find_top(kept)
        imports = [piece.text for piece in top if isinstance(piece.statement, IMPORTS)]
        defined = [piece.text for piece in top if not isinstance(piece.statement, IMPORTS)]
        inner = [piece.text for piece in kept if piece not in top]
        inner = ["\n".join(inner), *(item.text for item in functions), end]
        build = textwrap.indent("\n\n".join(filter(None, inner)), INDENT)
        settings = CONFIG.format(self.epochs, self.start.batch_size)
        imports += ["from dataclasses import dataclass", "", IMPORT_OF_JOB]
        texts = ["\n".join(imports), *defined, settings, f"def build(config):\n{build}"]
        return "\n\n\n".join(texts) + "\n"

    def check_names(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if names := OWN_NAMES & piece.changes:
                raise self.training.refusal(
                    piece.line, f"defines {min(names)}, a name of the job itself"
                )
            if any(find_nodes(piece.statement, ast.Global)):
                raise self.training.refusal(piece.line, "changes a global variable")

    def left_out(self) -> list[int]:
        """Return the lines of each epoch that are neither in the job nor done by it."""
        training = self.training
        blocks = [training.loop.body, training.epoch_loop.body if training.epoch_loop else []]
        blocks += [frame.scope.body for frame in training.frames if frame.is_in_epoch]
        called = {getattr(frame.scope, "name", "") for frame in training.frames}
        if self.evaluation:
            called |= {getattr(frame.scope, "name", "") for frame in self.evaluation.frames}
        lines = set()
        for statement in chain(*blocks):
            names = {last_name(call.func) for call in _calls(statement)}
            is_call = isinstance(statement, ast.Expr)
            is_text = is_call and not names
            leads = training.loop in ast.walk(statement) or names & called
            is_done = is_call and names & (RECOGNIZED | {CLIPPING})
            if not (is_done or leads or is_text or statement.lineno in self.loss.lines):
                lines.add(statement.lineno)
        return sorted(lines)


def _bindings(frame: Frame) -> list[Piece]:
    return [Piece(f"{name} = {text}") for name, text in frame.bound.items() if name != text]


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return find_nodes(node, ast.Call)


def _find_top(pieces: list[Piece]) -> list[Piece]:
    """Return the imports, and the definitions and constants that need nothing made in `build`."""
    top = [
        piece
        for piece in pieces
        if piece.is_of_module
        and (
            isinstance(piece.statement, DEFINITIONS | IMPORTS)
            or (isinstance(piece.statement, ast.Assign) and not any(_calls(piece.statement)))
        )
    ]
    imported = {name for p in top if isinstance(p.statement, IMPORTS) for name in p.changes}
    while True:
        made = {name for piece in pieces if piece not in top for name in piece.changes} - imported
        kept = [p for p in top if isinstance(p.statement, IMPORTS) or not p.loads & made]
        if len(kept) == len(top):
            return top
        top = kept

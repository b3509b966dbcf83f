"""A Stepladder job made of a script's own lines, which `stepladder train` trains exactly."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Container, Iterator
from functools import cached_property
from itertools import chain

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import BeforeStep
from stepladder.tools.check.script_source import argument_of, find_nodes, last_name
from stepladder.tools.convert.batch_loop import BatchLoop, MadeFunction, find_calls
from stepladder.tools.convert.conversion import Conversion
from stepladder.tools.convert.job_fragments import IMPORTED, Fragment, find_top, keep_needed
from stepladder.tools.convert.loops import arguments_of_range, find_epoch_loops
from stepladder.tools.convert.source import INDENT, CannotConvert, SourceText

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
# An iterator draws a number: the next pass has the order that it has after an evaluation.
WHOLE_LOOP = """\
for _ in range({passes}):
    {model}.train()
    for batch in {loader}:
        {optimizer}.zero_grad()
        loss({model}, batch).backward()
        {step}
    iter({evaluated})
show_sum(loss, {model}, next(iter({loader})), {loader})
"""
HALVED_LOOP = """\
for _ in range({passes}):
    {model}.train()
    for batch in {loader}:
        {optimizer}.zero_grad()
        for part, share in halves(batch):
            (loss({model}, part) / (share if {is_sum} else 1)).backward(torch.tensor(share))
        {step}
    iter({evaluated})
"""
COMPARED = """\
{0}.eval()
with torch.no_grad():
    batch = next(iter({1}))
    size_of(batch, {1})
    whole = metrics({0}, batch)
    for part, share in halves(batch):
        for name, (value, _) in metrics({0}, part).items():
            print("part", name, share, float(value), float(whole[name][0]))
"""
HALVES = """\
def path_of(item, path="batch"):
    if isinstance(item, dict):
        key = next(iter(item))
        return path_of(item[key], f"{path}[{key!r}]")
    if isinstance(item, (list, tuple)) and not isinstance(item[0], (str, int, float)):
        return path_of(item[0], f"{path}[0]")
    return path

def size_of(batch, loader=None):
    path = path_of(batch)
    size = len(eval(path))
    if loader:
        print("samples", path)
        if size != min(loader.batch_size, len(loader.dataset)):
            raise ValueError(f"a batch has {size} times {path}, and not {loader.batch_size}")
    return size

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

def show_sum(loss, model, batch, loader):
    size_of(batch, loader)
    model.eval()
    with torch.no_grad():
        parts = [(float(loss(model, part)), share) for part, share in halves(batch)]
        whole = float(loss(model, batch))
    total = sum(value for value, _ in parts)
    mean = sum(value * share for value, share in parts)
    if abs(total - whole) < abs(mean - whole):  # noise is drawn in both
        print("loss is sum")
"""


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
        self.passes = passes
        self.is_sum = False  # whether the loss is, as soon as a run has shown it
        if not self.facts.training_stacks:
            raise CannotConvert("the training reads no torch DataLoader")
        if len(self.facts.trained_models) != 1:
            count = format_count(len(self.facts.trained_models), "model")
            raise CannotConvert(f"it trains {count}, and a job one")
        loops = [loop for file, loop in find_epoch_loops(conversion) if file is self.file]
        epoch_loop = next(iter(loops), None)
        self.training = BatchLoop(self.file, self.facts.training_stacks[0], epoch_loop, args)
        self.model_here = self.training.name_of(self.facts.trained_models[0], self.facts)
        self.model = self.training.resolve(self.model_here)
        loader = next(item for item in self.facts.loaders if item.is_training)
        self.start = loader.passes[0].start
        calls = conversion.calls(loader.built, "DataLoader")
        self.sizes = [argument_of(call, ["dataset", "batch_size"], "batch_size") for call in calls]
        self.keywords = {keyword.arg for call in calls for keyword in call.keywords}
        if self.start.iterable or not self.start.batch_size or self.keywords & SAMPLERS:
            what = "reads samples in an order of its own: a job shuffles all of a data set"
            raise self.training.refusal(loader.built.line, what)
        self.evaluation, self.metrics = self.find_evaluation(args)

    def call_in_loop(self, name: str, lines: Container[int]) -> ast.Call:
        loop = self.training.loop
        calls = [
            call
            for call in self.file.nodes(ast.Call, loop)
            if last_name(call.func) == name and call.lineno in lines
        ]
        if len(calls) != 1 or self.file.statement_at(calls[0].lineno) not in loop.body:
            line, *_ = [*(call.lineno for call in calls), loop.lineno]
            raise self.training.refusal(line, f"does not call {name} once for each batch")
        return calls[0]

    @cached_property
    def optimizer_here(self) -> str:
        """The name of the optimizer in the training loop.

        Raises:
            CannotConvert: A batch does not make one step.
        """
        places = dict.fromkeys(event.at for event in self.facts.log.select(BeforeStep) if event.at)
        step = self.call_in_loop("step", [self.facts.location(place).line for place in places])
        assert isinstance(step.func, ast.Attribute)
        return self.file.text_of([*step.args, step.func.value][0])  # a GradScaler's has it as args

    @cached_property
    def optimizer(self) -> str:
        return self.training.resolve(self.optimizer_here)

    def make_loss(self, with_count: bool = False) -> MadeFunction:
        """Return the function for the loss; a sum over the batch with its count.

        Raises:
            CannotConvert: A batch does not have one loss, or it needs what only the loop has.
        """
        backward = self.call_in_loop("backward", range(len(self.file.lines) + 1))
        assert isinstance(backward.func, ast.Attribute)
        value = backward.func.value
        if isinstance(value, ast.Call) and last_name(value.func) == "scale":  # of a GradScaler
            value = value.args[0]
        body = self.training.loop.body
        before = body[: body.index(self.file.statement_at(backward.lineno))]
        returned = self.file.text_of(value)
        if with_count:  # a step has the gradient of a batch's sum
            returned += f", len({self.training.samples}) / config.global_batch"
        made = self.training.in_loop(before)
        return self.training.make_function("loss", self.model_here, made, returned)

    @cached_property
    def of_loader(self) -> list[str]:
        """The arguments of a job that its loader has."""
        names = {"collate_fn": "collate", "num_workers": "num_workers"}
        loader = self.training.loader
        return [f"{names[key]}={loader}.{key}" for key in names if key in self.keywords]

    @cached_property
    def schedules(self) -> dict[str, str]:
        """The names of the schedules, each with its period, "step" or "epoch".

        Raises:
            CannotConvert: A schedule steps in some epochs alone.
        """
        schedules: dict[str, str] = {}
        for call, per in self.calls_per_epoch():
            assert isinstance(call.func, ast.Attribute)
            texts = [self.file.text_of(item) for item in (call.func.value, *call.args)]
            if self.optimizer_here in texts:
                continue
            if isinstance(self.file.parents[self.file.statement_at(call.lineno)], ast.If):
                raise self.training.refusal(call.lineno, "steps a schedule now and then")
            schedules.setdefault(self.training.resolve(texts[0]), per)
        if len(set(schedules.values())) > 1:
            raise CannotConvert("it has schedules per step and per epoch, and a job has one kind")
        return schedules

    @cached_property
    def norm(self) -> str:
        """The largest norm of the gradients, or ""."""
        for call in self.file.nodes(ast.Call, self.training.loop):
            norm = argument_of(call, ["parameters", "max_norm"], "max_norm")
            if last_name(call.func) == CLIPPING and norm:
                return self.training.resolve(self.file.text_of(norm))
        return ""

    def calls_per_epoch(self) -> Iterator[tuple[ast.Call, str]]:
        """Yield the calls of `step` without a result, each with its period, "step" or "epoch"."""
        training = self.training
        of_epochs = [training.epoch_loop, *(f.scope for f in training.frames if f.is_in_epoch)]
        for block in filter(None, [training.loop, *of_epochs]):
            period = "step" if block is training.loop else "epoch"
            for item in self.file.nodes(ast.Expr, block):
                if isinstance(item.value, ast.Call) and last_name(item.value.func) == "step":
                    yield item.value, period

    def find_evaluation(self, args: tuple[str, ...]) -> tuple[BatchLoop | None, dict[str, str]]:
        """Return the loop that evaluates, and the sums in it that depend on the model."""
        uses = [uses for item in self.facts.loaders if not item.is_training for uses in item.uses]
        try:
            loop = BatchLoop(self.file, uses[0], self.training.epoch_loop, args)
            metrics = dict(self.find_metrics(loop))
            self.make_metrics(loop, metrics)
        except (CannotConvert, IndexError):  # or there is none
            return None, {}
        return loop, metrics

    def model_in(self, loop: BatchLoop) -> str:
        return loop.name_of(self.facts.trained_models[0], self.facts)

    def find_metrics(self, loop: BatchLoop) -> Iterator[tuple[str, str]]:
        """Yield the names and the terms of the sums over batches that depend on the model.

        Raises:
            CannotConvert: There is none.
        """
        model = self.model_in(loop).partition(".")[0]
        fragments = [*loop.before_loop(), *loop.in_loop(loop.loop.body)]
        number = 0
        for node in self.file.nodes(ast.AugAssign, loop.loop):
            if not isinstance(node.op, ast.Add) or not isinstance(node.target, ast.Name):
                continue
            value: ast.expr = node.value
            while isinstance(value, ast.Call) and last_name(value.func) == "item":
                assert isinstance(value.func, ast.Attribute)
                value = value.func.value
            text = self.file.text_of(value)
            end = Fragment(f"_ = {text}")
            made = [fragment for fragment in fragments if node.target.id not in fragment.changes]
            if any(model in item.loads for item in [end, *keep_needed(made, end.loads)]):
                number += 1
                yield node.target.id, text
        if not number:
            raise loop.refusal(loop.loop.lineno, "adds nothing up")

    def make_metrics(
        self, loop: BatchLoop, metrics: dict[str, str], means: Container[str] = ()
    ) -> MadeFunction:
        """Return the function for the metrics, of which some are means and others sums."""
        count = f"len({loop.samples})"
        sums = [
            f'"{name}": ({text}{f" * {count}" * (name in means)}, {count})'
            for name, text in metrics.items()
        ]
        fragments = [
            fragment
            for fragment in loop.in_loop(loop.loop.body)
            if not fragment.changes & metrics.keys()
        ]
        returned = f"{{{', '.join(sums)}}}"
        return loop.make_function("metrics", self.model_in(loop), fragments, returned)

    def take_sum(self) -> None:
        """Take the loss for a sum over the batch."""
        self.is_sum = True

    @property
    def loops(self) -> list[BatchLoop]:
        return [loop for loop in (self.training, self.evaluation) if loop]

    def leave_out_metrics(self, names: set[str]) -> None:
        """Leave metrics out of the job, and the evaluation if none is left."""
        for name in names:
            del self.metrics[name]
        if not self.metrics:
            self.evaluation = None

    def write(self, epochs: int, means: Container[str]) -> str:
        """Return the job.

        Args:
            epochs: The number of epochs.
            means: The metrics that are means over a batch.
        """
        names = [*self.schedules]
        of_schedule = []
        if names:
            value = ", ".join(names)
            if len(names) > 1:
                value = f"({value})"
            of_schedule = [f"schedule={value}", f'schedule_per="{self.schedules[names[0]]}"']
        functions, of_evaluation = [self.make_loss(self.is_sum)], []
        if self.evaluation:
            functions.append(self.make_metrics(self.evaluation, self.metrics, means))
            of_evaluation = [f"{self.evaluation.loader}.dataset", "metrics"]
        arguments = [
            *(self.model, self.optimizer, "loss", f"{self.training.loader}.dataset"),
            *of_evaluation,
            *self.of_loader,
            *of_schedule,
            *[f"clip_norm={self.norm}"] * bool(self.norm),
        ]
        end = "\n".join(["return Job(", *(f"{INDENT}{item}," for item in arguments), ")"])
        used = Fragment(f"_ = Job({', '.join(arguments)})").loads
        return self.compose(functions, end, used, epochs)

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
        evaluated = "[]"
        if self.evaluation:
            evaluated = self.evaluation.loader
        names = {
            "model": self.model,
            "loader": self.training.loader,
            "evaluated": evaluated,
            "passes": self.passes,
            "optimizer": self.optimizer,
            "is_sum": self.is_sum,
            "step": f"\n{INDENT * 2}".join(step),
        }
        end = WHOLE_LOOP.format(**names)
        if is_halved:
            end = HALVED_LOOP.format(**names)
        functions = [self.make_loss()]
        used = {"torch"}
        if self.evaluation and is_halved:
            functions.append(self.make_metrics(self.evaluation, self.metrics))
            end += COMPARED.format(self.model, evaluated)
        texts = [self.model, self.optimizer, self.training.loader, evaluated, self.norm]
        texts += self.schedules
        used |= {name for text in texts if text for name in Fragment(f"_ = {text}").loads}
        text = self.compose(functions, end, used, is_whole=is_whole)
        return f"{text}\n\nimport torch\n{HALVES}\nbuild(Config())\n"

    def compose(
        self,
        functions: list[MadeFunction],
        end: str,
        used: set[str],
        epochs: int = 0,
        *,
        is_whole: bool = False,
    ) -> str:
        """Return a job file whose `build` has functions, and ends with some lines.

        Args:
            functions: The functions.
            end: The lines.
            used: The names that they need.
            epochs: The number of epochs of a job that flags may change; 0 of a proof.
            is_whole: Whether it has also what nothing needs.
        """
        fragments = self.training.before_epochs()
        if self.evaluation:
            fragments += [item for item in self.evaluation.before_epochs() if item not in fragments]
        needed = used.union(*(item.needed for item in functions)) - {"Job", "loss", "metrics"}
        kept = fragments
        if not is_whole:
            kept = keep_needed(fragments, needed)
        self.check_names(kept)
        top = find_top(kept)
        imports = [item.text for item in top if isinstance(item.statement, IMPORTED)]
        defined = [item.text for item in top if not isinstance(item.statement, IMPORTED)]
        made = [fragment for fragment in kept if fragment not in top]
        if epochs:
            made = list(self.with_settings(top, made))
        inner = ["\n".join(item.text for item in made), *(item.text for item in functions), end]
        build = textwrap.indent("\n\n".join(filter(None, inner)), INDENT)
        settings = CONFIG.format(epochs or 1, self.start.batch_size)
        imports += ["from dataclasses import dataclass", "", IMPORT_OF_JOB]
        texts = ["\n".join(imports), *defined, settings, f"def build(config):\n{build}"]
        return "\n\n\n".join(texts) + "\n"

    def with_settings(self, top: list[Fragment], made: list[Fragment]) -> Iterator[Fragment]:
        """Yield the statements of `build`, in which what flags may set has the value of the Config.

        A schedule, say, has the length of the training: both follow from one number.

        Args:
            top: The statements before `build`.
            made: Those in it.
        """
        args = arguments_of_range(self.training.epoch_loop)
        ends = args * (len(args) == 1)
        settings = {
            self.training.resolve(self.file.text_of(value)): field
            for field, values in (("epochs", ends), ("global_batch", self.sizes))
            for value in values
            if isinstance(value, ast.Name | ast.Attribute)
        }
        for item in [None, *made]:
            if item:
                yield item
            changed = item.changes if item else {name for each in top for name in each.changes}
            for name, field in settings.items():
                if name.partition(".")[0] in changed:
                    yield Fragment(f"{name} = config.{field}")

    def check_names(self, fragments: list[Fragment]) -> None:
        for fragment in fragments:
            if names := OWN_NAMES & fragment.changes:
                raise self.training.refusal(
                    fragment.line, f"defines {min(names)}, a name of the job itself"
                )
            if any(find_nodes(fragment.statement, ast.Global)):
                raise self.training.refusal(fragment.line, "changes a global variable")

    def left_out(self) -> list[int]:
        """Return the lines of each epoch that are neither in the job nor done by it."""
        training = self.training
        blocks = [training.loop.body, getattr(training.epoch_loop, "body", [])]
        blocks += [frame.scope.body for frame in training.frames if frame.is_in_epoch]
        taken = self.make_loss().lines
        called = {getattr(frame.scope, "name", "") for frame in training.frames}
        if self.evaluation:
            called |= {getattr(frame.scope, "name", "") for frame in self.evaluation.frames}
        lines: set[int] = set()
        for statement in chain(*blocks):
            names = {last_name(call.func) for call in find_calls(statement)}
            is_call = isinstance(statement, ast.Expr)
            is_text = is_call and not names
            leads = training.loop in ast.walk(statement) or names & called
            is_done = is_call and names & (RECOGNIZED | {CLIPPING})
            if not (is_done or leads or is_text or statement.lineno in taken):
                lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
        return sorted(lines)

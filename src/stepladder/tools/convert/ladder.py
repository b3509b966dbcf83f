"""The ladder: rungs in their order, and the files of a script up to one of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from stepladder.tools.check.script_source import stored_names
from stepladder.tools.convert import rungs, rungs_batches, rungs_files, rungs_losses, rungs_snapshot
from stepladder.tools.convert.accelerate import (
    HELPERS_IN_ACCELERATE,
    IMPORTS_IN_ACCELERATE,
    translate,
)
from stepladder.tools.convert.conversion import Conversion, Edits
from stepladder.tools.convert.helpers import HELPERS, IMPORTS
from stepladder.tools.convert.source import Edit, EditedText, SourceText


@dataclass(frozen=True)
class Rung:
    """One small change.

    Args:
        letter: Its place in the ladder.
        title: What it does, in some words.
        change: What changes, a sentence.
        without: What would go wrong without it, a sentence.
        alternatives: Functions that return its edits; the first that is proved is taken.
        judged: The relations that hold from this rung on.
    """

    letter: str
    title: str
    change: str
    without: str
    alternatives: tuple[Callable[[Conversion], Edits], ...]
    judged: frozenset[str] = frozenset()


ALL_OF_A_RUN = frozenset({"samples", "gradients", "shown-numbers", "files"})
RUNGS = (
    Rung(
        "a",
        "join the other processes",
        "The script joins the processes that torchrun starts, each with a GPU of its own; "
        "started by python alone it is the only one.",
        "Each process would train by itself, and know of no other.",
        (rungs.join_processes,),
    ),
    Rung(
        "b",
        "share the training samples",
        "Each process reads its share of each batch, and batches together are as large as before. "
        "A loss that compares samples with each other gets the rows of all.",
        "Each process would read all samples: the same work, done several times.",
        (
            rungs_batches.share_training_samples,
            partial(rungs_batches.share_training_samples, divides=True),
        ),
        frozenset({"samples", "values-of-sums"}),
    ),
    Rung(
        "c",
        "average the gradients",
        "The model is wrapped, so that all processes make the same step; its attributes are read "
        "from the model inside. If its parts are called alone, each gradient is averaged. Batch "
        "norm, if there is any, sees the whole batch; under torchrun that needs GPUs.",
        "Each process would train another model, on its share alone.",
        (
            rungs.wrap_models,
            rungs_losses.scale_summed_loss,
            rungs_losses.weigh_losses,
            rungs_losses.divide_by_sums_of_all,
            partial(rungs.wrap_models, arguments=", find_unused_parameters=True"),
            partial(rungs.wrap_models, arguments=", broadcast_buffers=False"),
            rungs.average_by_hooks,
            partial(rungs_losses.scale_summed_loss, average=rungs.average_by_hooks),
            partial(rungs.wrap_models, draws_alike=True),
        ),
        frozenset({"samples", "gradients"}),
    ),
    Rung(
        "d",
        "share the evaluation",
        "Each process evaluates whole batches, each sample once, and the results are added up.",
        "Each process would evaluate everything, which takes as long as on one.",
        (rungs.share_evaluation, rungs.keep_evaluation),
        frozenset({"samples", "gradients"}),
    ),
    Rung(
        "e",
        "show the numbers of all processes",
        "Sums and means are those of all processes, and one process prints and logs.",
        "Each process would print its own numbers, of its share alone.",
        (
            rungs.sum_numbers_of_training,
            rungs.keep_numbers_of_training,
            rungs_losses.keep_shown_losses,
        ),
        frozenset({"samples", "gradients", "shown-numbers"}),
    ),
    Rung(
        "f",
        "write files once",
        "One process writes each file, and a snapshot is there whole or not at all.",
        "All processes would write the same file at once, and could leave half of it.",
        (rungs_files.write_once,),
        ALL_OF_A_RUN,
    ),
    Rung(
        "g",
        "save and resume",
        "All training state is saved at the end of each epoch, or every 100 steps of a training "
        "without epochs, and the next start continues there.",
        "A start after a failure would begin at the first epoch, or with another state.",
        (rungs_snapshot.save_and_resume,),
        ALL_OF_A_RUN | {"resume"},
    ),
    Rung(
        "h",
        "stop when asked",
        "After SIGTERM the script ends at the next snapshot, with exit code 75, after "
        "which `stepladder submit` starts it again.",
        "A cluster that takes its nodes back would end it without a snapshot of the last steps.",
        (rungs_snapshot.stop_when_asked,),
        ALL_OF_A_RUN,
    ),
)


def compose(conversion: Conversion, steps: Sequence[list[Edit]]) -> dict[str, EditedText]:
    """Return the files with the edits of rungs, and with the functions that these call."""
    composed = {}
    for name, file in conversion.files.items():
        edits = [edit for step in steps for edit in dict.fromkeys(step) if edit.file == name]
        imports: Mapping[str, str] = IMPORTS
        helpers: Mapping[str, str] = HELPERS
        if conversion.by_accelerate:
            translated = partial(translate, is_main=name == conversion.main)
            edits = [replace(edit, text=translated(edit.text)) for edit in edits]
            imports = IMPORTS | IMPORTS_IN_ACCELERATE
            own = HELPERS | HELPERS_IN_ACCELERATE
            helpers = {key: translated(text) for key, text in own.items()}
        if edits:
            added = [*definitions(file, imports, helpers, edits), *edits]
            composed[name] = file.apply(_rename_modules(file, added))
    return composed


def _rename_modules(file: SourceText, edits: list[Edit]) -> list[Edit]:
    """Return edits with other names for the modules whose names mean something else in a file.

    With `from time import time` in the file, `import time` would take the function away from it.
    """
    stored = {*stored_names(file.tree), *(item.name for item in file.nodes(ast.FunctionDef))}
    for name, line in IMPORTS.items():
        _, module, *_ = line.split()
        is_other = name in stored or file.imported_names.get(name, module) != module
        if line.startswith("import") and line not in file.lines and is_other:
            other = f"{name}_module"
            for pattern, text in (
                (rf"(?m)^{line}$", f"import {module} as {other}"),
                (rf"(?<![.\w]){name}(?=\.)", other),
            ):
                edits = [replace(edit, text=re.sub(pattern, text, edit.text)) for edit in edits]
    return edits


def definitions(
    file: SourceText, imports: Mapping[str, str], helpers: Mapping[str, str], edits: list[Edit]
) -> list[Edit]:
    """Return the edits that import and define what edits use, and a file does not have yet."""
    used: set[str] = set()
    texts = [edit.text for edit in edits]
    while texts:
        words = set(re.findall(r"(?<!\.)\b\w+", "\n".join(texts)))
        new = words & (imports.keys() | helpers.keys()) - used
        used |= new
        texts = [helpers.get(name, "") for name in new]
    last = last_import(file)
    known = {
        f"{source}import {alias.name}" + f" as {alias.asname}" * bool(alias.asname)
        for item in file.tree.body
        if isinstance(item, ast.Import | ast.ImportFrom) and item.lineno <= last.lineno
        for source in [f"from {item.module} " if isinstance(item, ast.ImportFrom) else ""]
        for alias in item.names
    }
    lines = [line for name, line in imports.items() if name in used and line not in known]
    text = "".join(f"{line}\n" for line in lines)
    text += "".join(f"\n\n{body}\n" for name, body in helpers.items() if name in used)
    return [file.insert_after(last, text)] if text else []


def last_import(file: SourceText) -> ast.stmt:
    """Return the last of the imports with which a file begins, or its first statement."""
    last = file.tree.body[0]
    for statement in file.tree.body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not isinstance(statement, ast.Import | ast.ImportFrom) and not is_docstring:
            break
        last = statement
    return last

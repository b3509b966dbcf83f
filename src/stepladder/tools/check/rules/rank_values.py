"""Which expressions are computed from the rank or the number of ranks, by what is called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from stepladder.tools.check.script_source import ScriptSource, constant_value, find_nodes, last_name

# What libraries and launchers call it: functions, variables of the environment, and properties.
Words = frozenset[str]
LOCAL_RANK: Words = frozenset(
    (
        "get_local_rank",
        "get_node_local_rank",
        "LOCAL_RANK",
        "SLURM_LOCALID",
        "--local_rank",
        "--local-rank",
        "is_local_main_process",
        "local_process_index",
    )
)
RANK: Words = LOCAL_RANK.union(
    ("get_rank", "RANK", "SLURM_PROCID", "is_main_process", "process_index", "is_global_zero")
)
WORLD_SIZE: Words = frozenset(("get_world_size", "device_count", "WORLD_SIZE", "SLURM_NTASKS"))
SPAWNS = ("spawn", "start_processes")
KEEPS_VALUE = ("int", "bool", "str", "float", "max", "min", "sqrt", "get", "getenv")
COMBINES = (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp, ast.IfExp, ast.NamedExpr)
MAX_ROUNDS = 6  # of following names through assignments and calls


def depends_on(value: ast.AST, words: Words, source: ScriptSource) -> bool:
    """Return whether an expression is computed from what libraries call by these words."""
    return is_computed(value, names_of(words, source))


@lru_cache(maxsize=8)
def names_of(words: Words, source: ScriptSource) -> Words:
    """Return the words, and the names that the source gives to such values."""
    names = set(words)
    known = 0
    for _ in range(MAX_ROUNDS):
        if len(names) == known:
            break
        known = len(names)
        for _, node in source.nodes(ast.AST):
            names.update(names_given(node, names, source))
        names.discard("")
    return frozenset(names)


def is_computed(value: ast.AST | None, names: set[str] | Words) -> bool:
    """Return whether a value is one of these, or a number, a text or a comparison made of it."""
    parts: list[ast.AST] = []
    if isinstance(value, ast.Constant):
        return value.value in names
    if isinstance(value, ast.Call):
        if last_name(value.func) in names:
            return True
        parts += value.args if last_name(value.func) in KEEPS_VALUE else []
    elif isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        parts.append(value.slice)
    elif isinstance(value, COMBINES):
        parts += ast.iter_child_nodes(value)
    return last_name(value or ast.Pass()) in names or any(is_computed(p, names) for p in parts)


def names_given(node: ast.AST, names: set[str], source: ScriptSource) -> Iterator[str]:
    """Yield the names that a node gives such a value: targets, functions and their parameters."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from targets_given(target, node.value, names)
    elif isinstance(node, ast.FunctionDef):
        returned = (part.value for part in find_nodes(node, ast.Return))
        if any(is_computed(value, names) for value in returned):
            yield node.name
    elif isinstance(node, ast.Call):
        yield from parameters_given(node, names, source)


def targets_given(target: ast.expr, value: ast.expr | None, names: set[str]) -> Iterator[str]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for part, part_value in zip(target.elts, value.elts, strict=False):
            yield from targets_given(part, part_value, names)
    elif is_computed(value, names):
        yield from {last_name(part) for part in ast.walk(target)} - {"", "self"}


def parameters_given(call: ast.Call, names: set[str], source: ScriptSource) -> Iterator[str]:
    """Yield the parameters of the source's own functions that a call gives such values.

    Also what a process group is told, and what a parser reads as an option of a launcher.
    """
    called = last_name(call.func)
    first = call.args[0] if call.args else ast.Constant(None)
    keywords = [word for word in call.keywords if word.arg]
    if called == "init_process_group":
        yield from (last_name(w.value) for w in keywords if str(w.arg).upper() in names)
    if called == "add_argument" and constant_value(first) in names:
        yield str(constant_value(first)).lstrip("-").replace("-", "_")
        yield from (str(constant_value(word.value)) for word in keywords if word.arg == "dest")
    for _, function in source.nodes(ast.FunctionDef):
        parameters = [part.arg for part in function.args.args if part.arg != "self"]
        if function.name == called:
            given = zip(parameters, call.args, strict=False)
            yield from (name for name, value in given if is_computed(value, names))
            yield from (str(word.arg) for word in keywords if is_computed(word.value, names))
        elif function.name == last_name(first) and called in SPAWNS and "RANK" in names:
            yield from parameters[:1]


def chooses_ranks(test: ast.expr, words: Words, source: ScriptSource) -> bool:
    """Return whether the test of an `if` is true on some ranks alone.

    Not if it asks whether there are ranks at all, as `rank >= 0` and `rank != -1` do.
    """
    for part in find_nodes(test, ast.Compare):
        is_negative = isinstance(part.comparators[0], ast.UnaryOp)
        if is_negative or isinstance(part.ops[0], ast.GtE):
            return False
    return depends_on(test, words, source)

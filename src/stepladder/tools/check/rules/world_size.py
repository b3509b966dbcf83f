"""Which values of a source come from the number of ranks: by calls and variables, not by names."""

from __future__ import annotations

import ast

from stepladder.tools.check.script_source import ScriptSource, last_name

FUNCTIONS = ("get_world_size", "device_count")
VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS")
MAX_ROUNDS = 6  # of following names through assignments and calls


def depends_on_world_size(value: ast.AST, source: ScriptSource) -> bool:
    """Return whether an expression is computed from the number of ranks."""
    names: set[str] = set()
    for _ in range(MAX_ROUNDS):
        known = len(names)
        for _, node in source.nodes(ast.AST):
            names |= names_given(node, names, source)
        if len(names) == known:
            break
    return is_computed(value, names)


def is_computed(value: ast.AST, names: set[str]) -> bool:
    for node in ast.walk(value):
        if last_name(node) in names or last_name(node) in FUNCTIONS:
            return True
        if isinstance(node, ast.Constant) and node.value in VARIABLES:
            return True
    return False


def names_given(node: ast.AST, names: set[str], source: ScriptSource) -> set[str]:
    """Return the names that a node gives such a value: targets, functions and their parameters."""
    if isinstance(node, ast.Assign | ast.AugAssign) and is_computed(node.value, names):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {last_name(part) for target in targets for part in ast.walk(target)} - {"", "self"}
    if isinstance(node, ast.FunctionDef):
        returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
        return {node.name} if any(v and is_computed(v, names) for v in returned) else set()
    if isinstance(node, ast.Call):
        return parameters_given(node, names, source)
    return set()


def parameters_given(call: ast.Call, names: set[str], source: ScriptSource) -> set[str]:
    """Return the parameters of the source's own functions that a call gives such values."""
    given = {word.arg for word in call.keywords if word.arg and is_computed(word.value, names)}
    for _, function in source.nodes(ast.FunctionDef):
        if function.name == last_name(call.func):
            parameters = [part.arg for part in function.args.args if part.arg != "self"]
            pairs = zip(parameters, call.args, strict=False)
            given |= {name for name, value in pairs if is_computed(value, names)}
    return given

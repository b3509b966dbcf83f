"""Patterns in the source for which rules on recordings ask."""

from __future__ import annotations

import ast

from stepladder.tools.check.script_source import SourceFile, find_nodes, lines_of


def prints_its_arguments(file: SourceFile, line: int) -> bool:
    """Return whether a line prints arguments of its function, and nothing that this computes."""
    for call in find_nodes(file.tree, ast.Call):
        function = file.enclosing_function(call)
        if line not in lines_of(call) or not isinstance(function, ast.FunctionDef):
            continue
        arguments = {node.arg for node in find_nodes(function.args, ast.arg)}
        computed = {
            node.id for node in find_nodes(function, ast.Name) if isinstance(node.ctx, ast.Store)
        }
        names = {node.id for part in call.args for node in find_nodes(part, ast.Name)}
        if names & arguments and not names & computed:
            return True
    return False

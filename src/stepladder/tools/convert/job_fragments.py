"""Statements of a script, and the ones that names need."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from functools import cached_property
from symtable import symtable

from stepladder.tools.check.script_source import find_nodes, last_name, stored_names

ALWAYS = "*"  # stands for names that nobody knows
NAMED = ast.FunctionDef | ast.ClassDef
IMPORTED = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Fragment:
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
        if isinstance(item, NAMED):
            return {item.name}
        if isinstance(item, ast.ImportFrom) and item.names[0].name == "*":
            return {ALWAYS}
        if isinstance(item, IMPORTED):
            return {(alias.asname or alias.name).partition(".")[0] for alias in item.names}
        names = set(stored_names(item))
        for node in ast.walk(item):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                names.add(_root(node.value.func))
            elif isinstance(node, ast.Attribute | ast.Subscript) and _is_stored(node):
                names.add(_root(node))
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


def _is_stored(node: ast.Attribute | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Store)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return last_name(node)


def keep_needed(fragments: list[Fragment], names: set[str], given: str = "") -> list[Fragment]:
    """Return the statements that make or change what is named, and what these need.

    Args:
        fragments: The statements in their order.
        names: The names that are needed after them.
        given: The parameter of a function that they become, which changes nothing else that a call
            gets; empty where they are done once.
    """
    needed, kept = {*names, "annotations", ALWAYS} - {given}, []
    for fragment in reversed(fragments):
        if (fragment.changes if given else fragment.may_change) & needed:
            if isinstance(fragment.statement, ast.Assign):
                needed -= set(stored_names(fragment.statement))  # no earlier value is used
                needed |= free_names([fragment]) - {given}
            else:
                needed |= fragment.loads - {given}
            kept.append(fragment)
    return kept[::-1]


def free_names(fragments: list[Fragment]) -> set[str]:
    """Return the names that statements read before they bind them."""
    free: set[str] = set()
    bound: set[str] = set()
    for fragment in fragments:
        item = fragment.statement
        names = find_nodes(item, ast.Name)
        read = {node.id for node in names if not isinstance(node.ctx, ast.Store)}
        inner = [*[item] * hasattr(item, "body"), *find_nodes(item, ast.comprehension)]
        free |= read - vars(builtins).keys() - bound.union(*map(stored_names, inner))
        bound |= set(stored_names(item))
    return free


def find_top(fragments: list[Fragment]) -> list[Fragment]:
    """Return the imports, and the definitions and constants that need nothing made in `build`."""
    of_module = [item for item in fragments if item.is_of_module]
    imports = [item for item in of_module if isinstance(item.statement, IMPORTED)]
    imported = {name for item in imports for name in item.changes}
    top = [
        item
        for item in of_module
        if isinstance(item.statement, NAMED | IMPORTED)
        or (
            isinstance(item.statement, ast.Assign) and not any(find_nodes(item.statement, ast.Call))
        )
    ]
    while True:
        made = {name for item in fragments if item not in top for name in item.changes} - imported
        kept = [item for item in top if item in imports or not item.loads & made]
        if len(kept) == len(top):
            return top
        top = kept

"""The user's source: files that a script consists of, parsed, and questions that several rules ask
of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.python_file import parse_source

SUPPRESS = re.compile(r"#\s*stepladder:\s*ignore\[([\w, -]+)\]\s*(.*)")


@dataclass(frozen=True)
class CodeFile:
    path: Path
    name: str  # as findings show it
    tree: ast.Module
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def line(self, number: int) -> str:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def ignored(self, rule: str, line: int) -> bool:
        """By a comment with a reason on the line, or alone on the line above."""
        above = self.line(line - 1).strip()
        for text in [self.line(line), above if above.startswith("#") else ""]:
            if (found := SUPPRESS.search(text)) and found[2].strip():
                return rule in [name.strip() for name in found[1].split(",")]
        return False

    def calls(self, *names: str) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and last_name(node.func) in names:
                yield node

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function(self, node: ast.AST) -> ast.AST:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((one for one in self.around(node) if isinstance(one, kinds)), self.tree)


@dataclass(frozen=True)
class Code:
    files: tuple[CodeFile, ...]

    @cached_property
    def text(self) -> str:
        return "\n".join(file.text for file in self.files)

    def has(self, *words: str) -> bool:
        return any(word in self.text for word in words)

    def imports(self, *names: str) -> bool:
        """Whether any file imports one of these packages, or a part of it."""
        found = {top for file in self.files for top in imported_names(file.tree)}
        return any(name in found for name in names)

    def calls(self, *names: str) -> list[tuple[CodeFile, ast.Call]]:
        return [(file, call) for file in self.files for call in file.calls(*names)]

    def ignored(self, rule: str, name: str, line: int) -> bool:
        return any(file.name == name and file.ignored(rule, line) for file in self.files)

    def file(self, name: str) -> CodeFile | None:
        return next((file for file in self.files if file.name == name), None)


def last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def full_name(node: ast.AST) -> str:
    """dist.all_reduce for such a call's function; the parts that are no names are left out."""
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value)}.{node.attr}".strip(".")
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((word.value for word in call.keywords if word.arg == name), None)


def constant(node: ast.AST | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def read_source(script: Path, folder: Path) -> Code:
    """The script, and the modules beside it that it imports, and those that they import."""
    found: dict[Path, CodeFile] = {}
    waiting = [script]
    while waiting:
        path = waiting.pop()
        if path in found or len(found) > 60:
            continue
        try:
            tree = parse_source(path)
        except InputError:
            if path == script:
                raise
            continue
        name = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
        found[path] = CodeFile(path, name, tree, path.read_text(encoding="utf-8", errors="replace"))
        waiting += imported(tree, path.parent)
    return Code(tuple(found.values()))


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Top packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def imported(tree: ast.Module, folder: Path) -> list[Path]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names += [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
    paths = [folder / (name.replace(".", "/") + ".py") for name in names if name]
    paths += [folder / name.replace(".", "/") / "__init__.py" for name in names if name]
    return [path.resolve() for path in paths if path.is_file()]

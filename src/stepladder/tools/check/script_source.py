"""The source of the user's script: its files, parsed, and questions that several rules ask."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar

from stepladder.core.errors import InputError
from stepladder.core.python_file import parse_source
from stepladder.tools.findings.finding import Location

Node = TypeVar("Node", bound=ast.AST)

SUPPRESSION = re.compile(r"#\s*stepladder:\s*ignore\[(?P<rules>[\w, -]+)\]\s*(?P<reason>.*)")
MAX_SOURCE_FILES = 60


@dataclass(frozen=True)
class SourceFile:
    """One file of the source; findings show it by its name."""

    path: Path
    name: str
    tree: ast.Module
    text: str

    @classmethod
    def read(cls, path: Path, name: str) -> Self:
        """Read a file, and parse it.

        Raises:
            InputError: It cannot be read, or is no Python.
        """
        tree = parse_source(path)
        return cls(path, name, tree, path.read_text(encoding="utf-8", errors="replace"))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def line(self, number: int) -> str:
        """Return the text of a line; empty where the file does not have it."""
        if 0 < number <= len(self.lines):
            return self.lines[number - 1]
        return ""

    def is_suppressed(self, rule: str, line: int) -> bool:
        """Return whether a comment suppresses the findings of a rule on a line.

        The comment has a reason, and is on the line, or alone on the line above.
        """
        candidates = [self.line(line)]
        line_above = self.line(line - 1).strip()
        if line_above.startswith("#"):
            candidates.append(line_above)
        for text in candidates:
            comment = SUPPRESSION.search(text)
            if comment and comment["reason"].strip():
                rules = comment["rules"].split(",")
                return rule in [name.strip() for name in rules]
        return False

    @cached_property
    def imported_names(self) -> dict[str, str]:
        """What the names stand for that the file imports: `torch.distributed` for `dist`."""
        names: dict[str, str] = {}
        for node in find_nodes(self.tree, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            names |= {a.asname or a.name: f"{package}.{a.name}" for a in node.names}
        for statement in find_nodes(self.tree, ast.Import):
            names |= {a.asname: a.name for a in statement.names if a.asname}
            roots = [a.name.partition(".")[0] for a in statement.names if not a.asname]
            names |= dict(zip(roots, roots, strict=True))
        return names

    def qualified_name(self, node: ast.AST) -> str:
        """Return `torch.distributed.all_reduce` of `dist.all_reduce`, by what is imported."""
        root, dot, rest = dotted_name(node).partition(".")
        return f"{self.imported_names.get(root, root)}{dot}{rest}"

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        parents = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                parents[child] = node
        return parents

    def parents_of(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node


@dataclass(frozen=True)
class ScriptSource:
    """The script, and the modules next to it that it imports."""

    files: tuple[SourceFile, ...]

    def nodes(self, kind: type[Node]) -> Iterator[tuple[SourceFile, Node]]:
        """Yield the nodes of one type, each with its file."""
        for file in self.files:
            for node in find_nodes(file.tree, kind):
                yield file, node

    @cached_property
    def defined_names(self) -> set[str]:
        """The functions and classes that the script defines itself."""
        names = {node.name for _, node in self.nodes(ast.FunctionDef)}
        return names | {node.name for _, node in self.nodes(ast.ClassDef)}

    def calls(self, *names: str) -> list[tuple[SourceFile, ast.Call]]:
        """Return the calls of what libraries name so, and not the script itself."""
        return [
            (file, call)
            for file, call in self.nodes(ast.Call)
            if file.qualified_name(call.func).rpartition(".")[2] in names
            and (last_name(call.func) not in self.defined_names or self.is_library(file, call.func))
        ]

    def is_library(self, file: SourceFile, node: ast.AST) -> bool:
        """Return whether an expression begins with something that a library defines."""
        root = dotted_name(node).partition(".")[0]
        package = file.qualified_name(ast.Name(root)).partition(".")[0]
        own_modules = {own.path.stem for own in self.files}
        return root in file.imported_names and package not in own_modules | {""}

    def is_suppressed(self, rule: str, name: str, line: int) -> bool:
        file = self.file(name)
        return file is not None and file.is_suppressed(rule, line)

    def file(self, name: str) -> SourceFile | None:
        return next((file for file in self.files if file.name == name), None)


def find_nodes(tree: ast.AST, kind: type[Node]) -> Iterator[Node]:
    """Yield the nodes of one type in a tree, in the order of ast.walk."""
    for node in ast.walk(tree):
        if isinstance(node, kind):
            yield node


def lines_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def last_name(node: ast.AST) -> str:
    """Return `all_reduce` of `dist.all_reduce`; empty where a node is no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted_name(node: ast.AST) -> str:
    """Return `dist.all_reduce` of that expression, without the parts that are no names."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}".strip(".")
    return node.id if isinstance(node, ast.Name) else ""


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the parameters that a call gives."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return [item.arg for item in arguments if item.arg != "self"]


def argument_of(call: ast.Call, parameters: list[str], name: str) -> ast.expr | None:
    """Return what a call gives for a parameter, which may be a dict of all that have names."""
    given = dict(zip(parameters, call.args, strict=False))
    given |= {item.arg or name: item.value for item in call.keywords}
    return given.get(name)


def stored_names(tree: ast.AST) -> list[str]:
    """Return the variables that are assigned in a tree, but for those of comprehensions in it."""
    inner = [node.target for node in find_nodes(tree, ast.comprehension) if node is not tree]
    of_inner = {name for target in inner for name in find_nodes(target, ast.Name)}
    names = (node for node in find_nodes(tree, ast.Name) if node not in of_inner)
    return [node.id for node in names if isinstance(node.ctx, ast.Store)]


def keyword_value(call: ast.Call, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return None


def constant_value(node: ast.AST | None) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    return None


def locations_of(file: SourceFile, node: ast.expr | ast.stmt) -> set[Location]:
    return {Location(file.name, line) for line in lines_of(node)}


def read_source(script: Path, folder: Path) -> ScriptSource:
    """Read a script, the modules next to it that it imports, and the modules that those import."""
    files: dict[Path, SourceFile] = {}
    paths = [script]
    while paths:
        path = paths.pop()
        if path in files or len(files) > MAX_SOURCE_FILES:
            continue
        is_in_folder = path.is_relative_to(folder)
        name = str(path.relative_to(folder) if is_in_folder else path)
        try:
            files[path] = SourceFile.read(path, name)
        except InputError:
            if path == script:
                raise
            continue
        paths += imported_paths(files[path].tree, path.parent, script.parent)
    return ScriptSource(tuple(files.values()))


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a file imports, and what it imports from them, which may be modules.

    The names of relative ones begin with dots.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_paths(tree: ast.Module, folder: Path, script_folder: Path) -> list[Path]:
    """Return the files that a file in a folder imports, from there and from that of the script.

    A link to a file is in the folder, as in a copy of it; what a link to a folder holds is not.
    """
    targets: list[Path] = []
    for name in imported_modules(tree):
        parts = name.strip(".").split(".")
        dots = len(name) - len(name.lstrip("."))
        beginnings = [Path(*parts[:count]) for count in range(1, len(parts) + 1)]
        folders = [folder, script_folder] if not dots else [[folder, *folder.parents][dots - 1]]
        targets += [base / beginning for base in folders for beginning in beginnings if name]
    paths = [target.with_name(f"{target.name}.py") for target in targets]
    paths += [target / "__init__.py" for target in targets]
    return [path.parent.resolve() / path.name for path in paths if path.is_file()]

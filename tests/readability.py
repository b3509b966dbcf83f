"""Measures of how easily Python code is read by somebody who has not seen it before.

`measure` reads one file and returns its `Gauges`: counts, and the places behind them. The limits are in
test_readability.py.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Pronouns, participles and adverbs, which name nothing.
DIALECT = frozenset(
    """
    found said told tell say one other others own here there place look seen words ways about beside
    asked wanted held whole rest bring take level settle deal mine lying kept keep met meet leave
    left gone lost back again further far many much most least who what anew
    """.split()  # noqa: SIM905 - a list of a word a line would be longer than this file
)
# What files, classes and functions were called before they got the field's terms.
RETIRED = frozenset(
    """
    Agreement again bell books bring copies council deal ends forgive found given is_bug judge
    keepsake leaving level lifelines look mailbox meet meeting mend NodeWord other own piece place
    rest room said seats seen told weightless why_in_vain word words
    """.split()  # noqa: SIM905 - as above
)
# First words of docstrings that are no sentence: prepositions and relatives.
FRAGMENTS = frozenset(
    """
    Of That Where With Also For Without As By From In To On Until Those Whose Around Past Between
    Beside Not Instead Through After Before At There
    """.split()  # noqa: SIM905
)
PARAMETERS_IN_A_LINE = re.compile(r"^\s*\w+: .+\.\s+\w+: ", re.MULTILINE)
COUNTED_TOKENS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
# Attributes that torch and Python mean to be set: a gradient, and notes on an exception that is raised on.
SET_BY_DESIGN = ("grad", "data")
EXCEPTIONS = ("error", "exc", "e")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Gauges:
    """Counts of one file, or of several added up, and where each counted thing is."""

    lines: int = 0
    tokens: int = 0
    statements: int = 0
    names: int = 0
    docstrings: int = 0
    conditional_expressions: int = 0
    function_sizes: list[int] = field(default_factory=list)  # statements of each function
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    constants: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def __add__(self, other: Gauges) -> Gauges:
        """Return the sums of both, with the places of both."""
        total = Gauges(
            *(getattr(self, name) + getattr(other, name) for name in COUNTS),
            function_sizes=self.function_sizes + other.function_sizes,
        )
        for part in (self, other):
            for kind, places in part.places.items():
                total.places[kind] += places
            for name, values in part.constants.items():
                total.constants[name] |= values
        return total

    def count(self, kind: str) -> int:
        return len(self.places[kind])

    def percent_of_names(self, kind: str) -> float:
        return 100 * self.count(kind) / max(1, self.names)

    def tokens_per_statement(self) -> float:
        return self.tokens / max(1, self.statements)

    def statements_per_function(self) -> float:
        return sum(self.function_sizes) / max(1, len(self.function_sizes))

    def statements_of_a_long_function(self) -> int:
        """Return the 90th percentile of the functions' sizes."""
        return sorted(self.function_sizes)[int(0.9 * len(self.function_sizes))]


COUNTS = ("lines", "tokens", "statements", "names", "docstrings", "conditional_expressions")


def measure(path: Path, text: str | None = None) -> Gauges:
    """Return the gauges of one file, or of `text` in its place."""
    if text is None:
        text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    counter = GaugeCounter(path.as_posix(), tree)
    counter.visit(tree)
    gauges = counter.gauges
    gauges.lines = len(text.splitlines())
    gauges.tokens = count_tokens(text)
    statements = list(walk_statements(tree))
    gauges.statements = len(statements)
    gauges.function_sizes = [
        count_statements(node) for node in statements if isinstance(node, Function)
    ]
    return gauges


def count_tokens(text: str) -> int:
    """Return the number of names, operators, numbers and strings.

    Python 3.12 splits an f-string into tokens of its parts. It counts as one string here, as on
    Python 3.11.
    """
    count = 0
    depth = 0  # of nested f-strings
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            count += depth == 0
            depth += 1
        elif kind == "FSTRING_END":
            depth -= 1
        elif depth == 0:
            count += token.type in COUNTED_TOKENS
    return count


def walk_statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements below a node. No expression is looked into: it holds none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.expr):
            yield from walk_statements(child)


def count_statements(tree: ast.AST) -> int:
    return sum(1 for _ in walk_statements(tree))


class GaugeCounter(ast.NodeVisitor):
    """Visits each node of a file, and knows the class and the function around it."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path = path
        self.gauges = Gauges()
        self.classes: list[ast.ClassDef] = []
        self.declared: dict[ast.ClassDef, set[str]] = {}
        self.modules = set(imported_modules(tree))
        for statement in tree.body:
            self.note_constant(statement)

    def note(self, kind: str, node: ast.AST, text: str = "") -> None:
        line = getattr(node, "lineno", 1)
        self.gauges.places[kind].append(f"{self.path}:{line} {text}".rstrip())

    def note_constant(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    self.gauges.constants[target.id].add(ast.unparse(statement.value))

    def note_name(self, name: str, node: ast.AST) -> None:
        self.gauges.names += 1
        if name.strip("_") in DIALECT:
            self.note("dialect", node, name)

    def note_definition(self, name: str, node: ast.AST) -> None:
        if {name.strip("_"), name.lower()} & RETIRED:
            self.note("retired name", node, name)

    def note_docstring(self, node: Documented) -> None:
        docstring = ast.get_docstring(node)
        if docstring is None:
            return
        self.gauges.docstrings += 1
        first = re.match(r"[`'\"(]*([A-Za-z-]+)", docstring)
        if first and first[1] in FRAGMENTS:
            self.note("fragment", node, docstring.splitlines()[0])
        if PARAMETERS_IN_A_LINE.search(docstring) and "Args:" not in docstring:
            self.note("home-made parameter list", node)

    def visit_Module(self, node: ast.Module) -> None:
        self.note_definition(Path(self.path).stem, node)
        self.note_docstring(node)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.note_name(node.name, node)
        self.note_definition(node.name, node)
        self.note_docstring(node)
        self.declared[node] = set(declared_attributes(node))
        self.classes.append(node)
        self.generic_visit(node)
        self.classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.note_name(node.name, node)
        self.note_definition(node.name, node)
        self.note_docstring(node)
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self.note_name(node.arg, node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.note_name(node.id, node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.gauges.conditional_expressions += 1
        inner = [part for part in ast.walk(node) if isinstance(part, ast.IfExp)]
        if len(inner) > 1:
            self.note("conditional expression in another", node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            self.note("tuple assignment", node)
            if any(isinstance(element, ast.Attribute) for element in target.elts):
                self.note("tuple assignment to attributes", node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self.note_name(node.attr, node)
            self.note_store(node)
        self.generic_visit(node)

    def note_store(self, node: ast.Attribute) -> None:
        owner = ast.unparse(node.value)
        if owner == "self":
            if self.classes and node.attr not in self.declared[self.classes[-1]]:
                self.note("late attribute", node, f"{self.classes[-1].name}.{node.attr}")
        elif (
            owner not in ("cls", *EXCEPTIONS)
            and owner.split(".")[0] not in self.modules
            and node.attr not in SET_BY_DESIGN
        ):
            self.note("attribute of another object", node, f"{owner}.{node.attr}")


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in walk_statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0]


def declared_attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of a class's fields, and of the attributes that its constructor sets."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.FunctionDef) and statement.name in CONSTRUCTORS:
            for inner in ast.walk(statement):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield inner.attr

"""Other names for all that a script's files bind, but for what a library calls or what the outside knows.

`Renamer(texts).rename(text)` gives a file of the script with v1, v2, ... in place of its names. One text is one name
in all files and scopes, which keeps what the script does. It keeps a name where another may not be the same for a
library: an import without `as`, a builtin, a method or an attribute that a class of a library has, a keyword of a call
whose function is not the script's own, and a name within a string that is read as a name (`getattr`, "layer.weight").
"""

from __future__ import annotations

import builtins
import importlib.util
import re
from collections.abc import Iterable
from functools import cache

import libcst as cst
from libcst import matchers as m

LIBRARIES = (
    "torch", "torch.nn", "torch.optim", "torch.optim.lr_scheduler", "torch.utils.data", "torch.distributed",
    "torch.utils.data.distributed", "torch.nn.parallel", "torch.autograd", "argparse", "pathlib", "logging", "threading",
    "multiprocessing", "multiprocessing.process", "collections", "enum", "dataclasses", "contextlib", "random", "types",
    "io", "accelerate", "lightning", "numpy", "builtins",
)  # fmt: skip
# Functions of libraries that pass their keywords to a function of the script, or read names of its attributes.
PASS_KEYWORDS = ("partial", "replace", "make_dataclass", "namedtuple", "wraps")
READ_NAMES = ("getattr", "hasattr", "setattr", "delattr", "attrgetter")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+\.?")


@cache
def classes_of_libraries(packages: frozenset[str]) -> dict[str, frozenset[str]]:
    """The attributes of each class of the libraries, and what it sets on `self`, by its name."""
    classes: dict[str, frozenset[str]] = {}
    for library in LIBRARIES:
        package = library.partition(".")[0]
        if package not in packages or importlib.util.find_spec(package) is None:
            continue
        members = vars(importlib.import_module(library)).copy()
        members.pop("reduce_op", None)  # which is deprecated, and says so
        for value in members.values():
            if isinstance(value, type):
                inits = [vars(cls).get("__init__") for cls in value.__mro__]
                codes = [code for init in inits if (code := getattr(init, "__code__", None))]
                names = [name for code in codes for name in code.co_names]
                classes[value.__name__] = frozenset([*dir(value), *names])
    return classes


def root_of(node: cst.BaseExpression) -> str:
    """Return `dist` of `dist.all_reduce`; empty where an expression begins with no name."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node.value if isinstance(node, cst.Name) else ""


def last_of(node: cst.BaseExpression) -> str:
    """Return `all_reduce` of `dist.all_reduce`."""
    name = node.attr if isinstance(node, cst.Attribute) else node
    return name.value if isinstance(name, cst.Name) else ""


class Bindings(cst.CSTVisitor):
    """What the files of a script bind, and what must keep its name."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.own_modules = set(modules)
        self.variables: set[str] = set()
        self.attributes: set[str] = set()
        self.classes: set[str] = set()
        self.decorated: set[str] = set()  # classes whose arguments are their fields
        self.functions: set[str] = set()  # and classes that take arguments of their own
        self.imported: set[str] = set()
        self.packages: set[str] = set()
        self.of_libraries: set[str] = set()  # names that stand for a library or for what is in it
        self.kept: set[str] = set()
        self.keywords: list[
            tuple[str, str, str]
        ] = []  # root and last name of what is called, and keyword
        self.used_beyond_self: set[str] = set()  # attributes of other objects than `self`
        self.bases: set[str] = set()
        self.depth: list[str] = []  # of classes and functions

    def bind(self, name: str) -> None:
        in_class = bool(self.depth) and self.depth[-1] == "class"
        (self.attributes if in_class else self.variables).add(name)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.bind(node.name.value)
        self.classes.add(node.name.value)
        if node.decorators:
            self.decorated.add(node.name.value)
        if node.decorators or m.findall(node.body, m.FunctionDef(m.Name("__init__"))):
            self.functions.add(node.name.value)  # else its keywords are those of a library's class
        self.bases.update(last_of(base.value) for base in node.bases)
        self.depth.append("class")

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self.depth.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.bind(node.name.value)
        self.functions.add(node.name.value)
        self.depth.append("function")

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self.depth.pop()

    def visit_Lambda(self, node: cst.Lambda) -> None:
        self.depth.append("function")

    def leave_Lambda(self, original_node: cst.Lambda) -> None:
        self.depth.pop()

    def visit_Param(self, node: cst.Param) -> None:
        self.variables.add(node.name.value)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if not m.matches(node.value, m.Name("self")):
            self.used_beyond_self.add(node.attr.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self.visit_target(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self.visit_target(node.target)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self.visit_target(node.target)

    def visit_For(self, node: cst.For) -> None:
        self.visit_target(node.target)

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self.variables.update(
            n.value for n in m.findall(node.target, m.Name()) if isinstance(n, cst.Name)
        )

    def visit_AsName(self, node: cst.AsName) -> None:
        self.visit_target(node.name)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self.visit_target(node.target)

    def visit_target(self, target: cst.BaseExpression) -> None:
        """Bind the names of a target, and the attributes that are set on `self` or another object."""
        if isinstance(target, cst.Tuple | cst.List):
            for element in target.elements:
                self.visit_target(element.value)
        elif isinstance(target, cst.StarredElement):
            self.visit_target(target.value)
        elif isinstance(target, cst.Name):
            self.bind(target.value)
        elif isinstance(target, cst.Attribute):
            self.attributes.add(target.attr.value)

    def visit_ImportAlias(self, node: cst.ImportAlias) -> bool:
        name = root_of(node.name)
        self.packages.add(name)
        bound = (
            node.asname.name.value
            if node.asname and isinstance(node.asname.name, cst.Name)
            else name
        )
        self.imported.add(bound)
        if node.asname:
            self.variables.add(bound)
        else:
            self.kept.add(bound)
        self.of_libraries.add(bound)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        if node.module:
            self.packages.add(root_of(node.module))
        is_own = bool(node.relative) or (
            node.module is not None and root_of(node.module) in self.own_modules
        )
        if is_own and not isinstance(node.names, cst.ImportStar):
            for alias in node.names:
                if alias.asname and isinstance(alias.asname.name, cst.Name):
                    self.variables.add(alias.asname.name.value)
            return False
        return True

    def visit_Call(self, node: cst.Call) -> None:
        last = last_of(node.func)
        for argument in node.args:
            if argument.keyword:
                self.keywords.append((root_of(node.func), last, argument.keyword.value))
            elif last in READ_NAMES and isinstance(argument.value, cst.SimpleString):
                self.kept.add(str(argument.value.evaluated_value))

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        text = node.evaluated_value
        if isinstance(text, str):
            for dotted in DOTTED.findall(text) if " " not in text else ():
                self.kept.update(dotted.split("."))

    def decide(self) -> tuple[set[str], set[str]]:
        """Return the variables and the attributes that get another name."""
        classes = classes_of_libraries(frozenset(self.packages | {"builtins"}))
        names_of_libraries = frozenset[str]().union(*classes.values())
        kept = self.kept | set(dir(builtins)) | self.own_modules | {"self", "cls"}
        for root, last, keyword in self.keywords:
            is_own = last in self.functions and last not in names_of_libraries
            if last in PASS_KEYWORDS or not (is_own or root in self.of_libraries):
                kept.add(keyword)
        variables = {name for name in self.variables - kept if not name.startswith("__")}
        kept |= self.used_beyond_self & names_of_libraries
        for base in self.bases - self.classes:
            kept |= classes.get(base, names_of_libraries)
        attributes = {name for name in self.attributes - kept if not name.startswith("__")}
        return variables, attributes


class Renamer(cst.CSTTransformer):
    """Renames one script. `modules` are the names of its files, which keep theirs."""

    def __init__(self, texts: Iterable[str], modules: Iterable[str] = ()) -> None:
        super().__init__()
        self.bindings = Bindings(modules)
        for text in texts:
            cst.parse_module(text).visit(self.bindings)
        self.variables, self.attributes = self.bindings.decide()
        ordered = sorted(self.variables | self.attributes)
        self.names = {name: f"v{number}" for number, name in enumerate(ordered, 1)}
        self.depth: list[str] = []

    def rename(self, text: str) -> str:
        return cst.parse_module(text).visit(self).code

    def substitute(self, name: cst.Name, names: set[str]) -> cst.Name:
        return name.with_changes(value=self.names[name.value]) if name.value in names else name

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.depth.append("class")

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.depth.append("function")

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        return self.leave_definition(original_node, updated_node)

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        return self.leave_definition(original_node, updated_node)

    def leave_definition(self, original: cst.CSTNode, updated: cst.CSTNode) -> cst.CSTNode:
        self.depth.pop()
        in_class = bool(self.depth) and self.depth[-1] == "class"
        names = self.attributes if in_class else self.variables
        return updated.with_changes(name=self.substitute(original.name, names))

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        # Fields of a class, and its methods, which its body may name.
        in_class = bool(self.depth) and self.depth[-1] == "class"
        is_attribute = in_class and original_node.value in self.bindings.attributes
        return self.substitute(updated_node, self.attributes if is_attribute else self.variables)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.Attribute:
        attr = original_node.attr
        root = root_of(original_node.value)
        if root in self.bindings.own_modules:
            return updated_node.with_changes(attr=self.substitute(attr, self.variables))
        is_of_library = root in self.bindings.of_libraries
        return updated_node.with_changes(
            attr=attr if is_of_library else self.substitute(attr, self.attributes)
        )

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return (
            updated_node.with_changes(keyword=original_node.keyword)
            if original_node.keyword
            else updated_node
        )

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        last = last_of(original_node.func)
        if last == "add_argument":
            return self.with_other_dest(original_node, updated_node)
        if (
            last not in self.bindings.functions
            or root_of(original_node.func) in self.bindings.imported
        ):
            return updated_node
        names = self.attributes if last in self.bindings.decorated else self.variables
        args = [
            arg.with_changes(keyword=self.substitute(arg.keyword, names)) if arg.keyword else arg
            for arg in updated_node.args
        ]
        return updated_node.with_changes(args=args)

    def with_other_dest(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        """Return the call of add_argument for an attribute of another name, where its name is given."""
        options = [
            a.value.evaluated_value
            for a in original.args
            if isinstance(a.value, cst.SimpleString) and not a.keyword
        ]
        longs = [option for option in options if str(option).startswith("--")]
        dest = str((longs or options or [""])[0]).lstrip("-").replace("-", "_")
        has_dest = any(a.keyword and a.keyword.value == "dest" for a in original.args)
        if dest not in self.attributes or has_dest or not longs:
            return updated
        name = cst.Arg(cst.SimpleString(f'"{self.names[dest]}"'), cst.Name("dest"))
        return updated.with_changes(args=[*updated.args, name])

    def leave_ImportAlias(
        self, original_node: cst.ImportAlias, updated_node: cst.ImportAlias
    ) -> cst.ImportAlias:
        return updated_node.with_changes(name=original_node.name)

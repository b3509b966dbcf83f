"""Limits of what makes code hard to read, measured by readability.py over the whole source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import stepladder
from readability import Gauges, measure

pytestmark = pytest.mark.every_case

SOURCE = Path(stepladder.__file__).parent
REPOSITORY = Path(__file__).parents[1]
WORD = re.compile(r"\w+")

# No formatting changes these. click has 9.5 and 6.8 (15), pytest 9.2 and 6.8 (16), httpx 11.4 and 5.4 (14).
TOKENS_A_STATEMENT = 9.5
STATEMENTS_A_FUNCTION = 7.0
STATEMENTS_OF_A_LONG_FUNCTION = 15  # the 90th percentile
PERCENT_OF_DIALECT = {
    "src/stepladder": 1.0,
    "packages/slurm-lab": 1.0,
    "packages/stepladder-exchange/src": 1.0,
    "packages/stepladder-exchange/tests": 2.0,
    "lessons": 1.0,
    "benchmarks": 1.0,
    "tests": 2.0,
}
TUPLE_ASSIGNMENTS = 2  # in a thousand lines
CONDITIONAL_EXPRESSIONS = 10  # in a thousand lines
PERCENT_OF_FRAGMENTS = 1.0
LATE_ATTRIBUTES = 40
ATTRIBUTES_OF_OTHERS = 80

# What is set from outside of its object, each with its reason.
SET_FROM_OUTSIDE = {
    "BIT_GENERATOR.randbits": "a patch of NumPy",
    "BatchIterator.__next__": "the iterator of a user's DataLoader, timed from outside",
    "DistributedDataParallel._passing_sync_batchnorm_handle": "a patch of torch",
    "Queue._on_queue_feeder_error": "a patch of multiprocessing",
    "_syscall.argtypes": "ctypes declares a C function so",
    "_syscall.restype": "the same",
    "block.forward": "a block of the user's model, whose activations are recomputed",
    "block.total": "in each step: a method call would cost",
    "bucket.filled": "in each step: a method call would cost",
    "bucket.leaf_observer": "in each step: a method call would cost",
    "bucket.pending": "in each step: a method call would cost",
    "c10d._rank_not_in_group": "a patch of torch",
    "capture._global_capturing": "pytest's capture, which a fork does not share",
    "comm.members": "the group's members, known once ranks have agreed",
    "self.comm.phases.observer": "a tool that measures a job's phases",
    "config.data_dir": "a job's own Config",
    "ctx.group": "the context of an autograd function",
    "worker._worker_info": "what a Dataset sees of the DataLoader, for a check",
    "ctx.ignore_unknown_options": "click's context",
    "cudnn.allow_tf32": "a switch of torch",
    "cudnn.benchmark": "a switch of torch",
    "dynamo_config.fail_on_recompile_limit_hit": "a switch of torch",
    "end.code": "the exit code that EndWriter writes when its block ends",
    "failure.__cause__": "the chain of a copied exception",
    "item.session.shouldstop": "pytest's way to end a session",
    "job.optimizer.state": "torch's optimizer, whose state is put back after a trial step",
    "killer.daemon": "threading.Timer takes no such argument",
    "layer.momentum": "of a batch norm of the user's model",
    "loader.num_workers": "few batches of a script's loader are read by few workers",
    "logger.propagate": "a logger of torchelastic",
    "matmul.allow_tf32": "a switch of torch",
    "memory.fill_uninitialized_memory": "a switch of torch",
    "module.training": "of a module of the user's model",
    "optimizer.state": "torch's optimizer, whose state is exchanged for a step",
    "owner.seed": "a sampler of the user's gets another order",
    "phases.column": "in each step: a method call would cost",
    "rendezvous.TCPStore": "a patch of torch",
    "rendezvous._create_c10d_store": "a patch of torch",
    "report.longrepr": "a report of pytest's, which gets a first line",
    "self.starter.modules": "known only after its first start",
    "self._optimizer._opt_called": "torch's scheduler looks for it",
    "self.optimizer.state": "torch's optimizer, whose state is exchanged for a step",
    "server._forkserver_address": "multiprocessing has no public name for it",
    "sharer._address": "multiprocessing has no public name for it",
    "source.num_workers": "a recomputed batch is read without workers",
    "spec.loader.exec_module": "the import system calls it",
    "storage._new_using_fd_cpu": "a patch of torch",
    "storage._share_fd_cpu_": "a patch of torch",
    "timer.daemon": "threading.Timer takes no such argument",
    "torch._C._stash_obj_in_tls": "a patch of torch",
    "work.has_result": "in each exchange: a method call would cost",
    "work.is_finished": "in each exchange: a method call would cost",
}
# Written as strangers write: the input of tests, not code of this project.
STRANGERS = ("tests/check_corpus/", "tests/parity_corpus/", "tests/tools/check/scripts/")


@cache
def gauges_of(folder: str) -> dict[str, Gauges]:
    """Return the gauges of each Python file below a folder of the repository, by its path."""
    paths = sorted((REPOSITORY / folder).rglob("*.py"))
    names = {path: path.relative_to(REPOSITORY).as_posix() for path in paths}
    return {name: measure(path) for path, name in names.items() if not name.startswith(STRANGERS)}


@cache
def total(folder: str) -> Gauges:
    return sum(gauges_of(folder).values(), Gauges())


def source() -> Gauges:
    return total("src/stepladder") + total("packages/stepladder-exchange/src")


def in_a_thousand_lines(count: int, gauges: Gauges) -> float:
    return 1000 * count / gauges.lines


@pytest.mark.slow
def test_a_statement_has_few_tokens() -> None:
    assert source().tokens_per_statement() <= TOKENS_A_STATEMENT


@pytest.mark.slow
def test_a_function_has_few_statements() -> None:
    assert source().statements_per_function() <= STATEMENTS_A_FUNCTION
    assert source().statements_of_a_long_function() <= STATEMENTS_OF_A_LONG_FUNCTION


@pytest.mark.slow
@pytest.mark.parametrize("folder", PERCENT_OF_DIALECT)
def test_names_say_what_a_thing_is(folder: str) -> None:
    gauges = total(folder)
    assert gauges.percent_of_names("dialect") <= PERCENT_OF_DIALECT[folder], gauges.places[
        "dialect"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("folder", PERCENT_OF_DIALECT)
def test_files_classes_and_functions_have_the_field_s_terms(folder: str) -> None:
    assert total(folder).places["retired name"] == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", PERCENT_OF_DIALECT)
def test_a_statement_assigns_one_value(folder: str) -> None:
    gauges = total(folder)
    tuples = gauges.places["tuple assignment"]
    assert in_a_thousand_lines(len(tuples), gauges) <= TUPLE_ASSIGNMENTS, tuples


@pytest.mark.slow
def test_a_statement_has_one_idea() -> None:
    gauges = source()
    assert in_a_thousand_lines(gauges.conditional_expressions, gauges) <= CONDITIONAL_EXPRESSIONS
    assert gauges.places["conditional expression in another"] == []
    assert gauges.places["tuple assignment to attributes"] == []


@pytest.mark.slow
def test_docstrings_are_sentences() -> None:
    gauges = source()
    fragments = gauges.places["fragment"]
    assert 100 * len(fragments) / gauges.docstrings <= PERCENT_OF_FRAGMENTS, fragments
    assert gauges.places["home-made parameter list"] == []


@pytest.mark.slow
def test_a_constant_has_one_value() -> None:
    several = {name: values for name, values in source().constants.items() if len(values) > 1}
    assert several == {}


@pytest.mark.slow
def test_attributes_are_born_in_the_constructor() -> None:
    late = source().places["late attribute"]
    assert len(late) <= LATE_ATTRIBUTES, late


@pytest.mark.slow
def test_attributes_are_set_by_their_own_object() -> None:
    set_from_outside = source().places["attribute of another object"]
    assert len(set_from_outside) <= ATTRIBUTES_OF_OTHERS, set_from_outside
    names = {place.split()[-1] for place in set_from_outside}
    assert names == SET_FROM_OUTSIDE.keys(), "each has a reason"


HARD_TO_READ = '''
LIMIT = 1
LIMIT = 2

class Judge:
    """Where it stands."""

    def look(self, one):
        """Looks.

        one: the first.  other: the next.
        """
        found, self.seen = one, (1 if one else 2 if self.place else 3)
        one.state = found
'''


@pytest.mark.slow
def test_the_gauges_see_what_they_count() -> None:
    """So that the tests above cannot pass because nothing is counted."""
    gauges = measure(Path("hard.py"), HARD_TO_READ)
    counts = {kind: len(places) for kind, places in gauges.places.items()}
    assert counts == {
        "dialect": 4,
        "retired name": 2,
        "fragment": 1,
        "home-made parameter list": 1,
        "tuple assignment": 1,
        "tuple assignment to attributes": 1,
        "late attribute": 1,
        "conditional expression in another": 1,
        "attribute of another object": 1,
    }
    assert gauges.constants["LIMIT"] == {"1", "2"}
    assert gauges.conditional_expressions == 2
    assert gauges.statements == 8
    assert gauges.function_sizes == [3]


@pytest.mark.slow
def test_an_f_string_is_one_token() -> None:
    """On each version of Python: the limits must not depend on its tokenizer."""
    assert measure(Path("f.py"), 'x = f"{a + b:{width}} and {c!r}"\n').tokens == 3


# Found by their files and decorators; and the commands beside them.
WITH_RULES = (
    "src/stepladder/tools/check/",
    "src/stepladder/tools/parity/",
    "src/stepladder/tools/findings/",
    "src/stepladder/cli/__init__.py",
    "src/stepladder/pytest_plugin.py",  # pytest calls its hooks
    "src/stepladder/cli/check.py",
    "src/stepladder/cli/suggest.py",
)
# What makes a function of another one, and registers it nowhere.
PLAIN_DECORATORS = {"cache", "contextmanager", "dataclass", "lru_cache", "validate_arguments"}


def public_definitions(path: Path) -> set[str]:
    """The public functions and classes of a module, but for those that a decorator registers."""
    definitions = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    )
    return {
        node.name
        for node in definitions
        if all(PLAIN_DECORATORS & set(WORD.findall(ast.unparse(d))) for d in node.decorator_list)
    }


@pytest.mark.slow
def test_what_its_own_module_alone_uses_has_a_private_name() -> None:
    """A public name stands in another file as well, be it a test or a page."""
    paths = [
        path
        for folder in ("src", "packages", "tests", "benchmarks", "lessons", "docs")
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".py", ".md", ".toml") and path.stem not in ("log", "log-archive")
    ]
    paths.append(REPOSITORY / "pyproject.toml")  # its entry points
    words = {
        path.relative_to(REPOSITORY).as_posix(): set(WORD.findall(path.read_text()))
        for path in paths
    }
    files = Counter(word for found in words.values() for word in found)
    lonely = {
        f"{name}: {definition}"
        for name in words
        if name.startswith(("src/", "packages/")) and "/tests/" not in name
        if name.endswith(".py") and not name.startswith(WITH_RULES)
        for definition in public_definitions(REPOSITORY / name)
        if files[definition] == 1
    }
    assert lonely == set()

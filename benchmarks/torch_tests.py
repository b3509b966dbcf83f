"""python benchmarks/torch_tests.py [--ranks 2 3] [--only NAME ...] [--write]

Do torch's own tests of torch.distributed pass on shared memory as they pass on gloo?

They are the tests of torch.testing._internal.distributed.distributed_test, which is in torch's
wheel. All run with gloo, and those that pass with `stepladder_exchange` in gloo's place. Needs the
package expecttest, which is in the extra `dev`. About ten minutes for each number of ranks.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

from report import Report, table

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"


class Outcomes(unittest.TestResult):
    """Notes for each test how it ended and why, and prints it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.started = 0.0

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self.started = time.perf_counter()

    def note(self, test: Any, outcome: str, reason: str = "") -> None:
        """Keep the outcome of a test, unless it has failed already."""
        name = test._testMethodName
        self.outcomes.setdefault(name, (outcome, reason))
        seconds = time.perf_counter() - self.started
        print(f"{seconds:7.1f} s  {outcome:8} {name}", file=sys.stderr, flush=True)

    def addSuccess(self, test: Any) -> None:
        self.note(test, PASSED)

    def addSkip(self, test: Any, reason: str) -> None:
        self.note(test, SKIPPED, reason)

    def addFailure(self, test: Any, err: Any) -> None:
        self.note(test, FAILED, self._exc_info_to_string(err, test))

    addError = addFailure


def run_tests(names: list[str], file: Path) -> None:
    """Run tests in this process, and write their outcomes to a file."""
    from torch_distributed import TorchTests

    outcomes = Outcomes()
    unittest.TestSuite(TorchTests(name) for name in names).run(outcomes)
    file.write_text(json.dumps(outcomes.outcomes))


def find_outcomes(way: str, ranks: int, names: list[str]) -> dict[str, tuple[str, str]]:
    """Return how torch's tests end on one backend, by their names.

    Args:
        way: gloo, or what takes its place.
        ranks: The number of ranks.
        names: The tests; none: all.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        env = {
            **os.environ,
            "EXCHANGE": way,
            "WORLD_SIZE": str(ranks),
            "TEMP_DIR": folder,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = [sys.executable, __file__, "--to", str(file), "--only", *names]
        subprocess.run(command, env=env, check=True)
        return {name: tuple(outcome) for name, outcome in json.loads(file.read_text()).items()}


def compare(ranks: int, names: list[str]) -> tuple[list[str], list[str]]:
    """Return a row of the table, and lines for the tests that pass on gloo alone."""
    gloo = find_outcomes("gloo", ranks, names)
    counts = Counter(outcome for outcome, _ in gloo.values())
    passing = [name for name, (outcome, _) in gloo.items() if outcome == PASSED]
    ours = find_outcomes("stepladder", ranks, passing) if passing else {}
    lost = [name for name in passing if ours[name][0] != PASSED]
    numbers = [*(counts[end] for end in (PASSED, FAILED, SKIPPED)), len(passing) - len(lost)]
    lines = []
    for name in lost:
        reason = ours[name][1].strip().splitlines()
        lines.append(f"- {ranks} ranks, `{name}`: {reason[-1] if reason else 'no reason'}")
    return [str(ranks), *map(str, numbers)], lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    from torch_distributed import list_tests

    names = args.only or list_tests()
    if args.to:
        run_tests(names, args.to)
        return
    report = Report(
        "torch_tests.py", "Torch's own tests, on shared memory", ["torch", "stepladder"], "all"
    )
    header = [
        "ranks",
        *(f"gloo: {end}" for end in (PASSED, FAILED, SKIPPED)),
        "of the passed ones, in shared memory",
    ]
    rows = []
    differences = []
    for ranks in args.ranks:
        row, lines = compare(ranks, names)
        rows.append(row)
        differences += lines
    lost = "\n".join(differences) or "Every test that passes on gloo passes on shared memory."
    report.finish([table(header, rows), lost], args.write)


if __name__ == "__main__":
    main()

"""A logger in a package of its own: the curves as lines of step, name and value in curves.csv."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any


class CsvLogger:
    def __init__(self, state: dict[str, Any], run_dir: Path, config: dict[str, Any]) -> None:
        # What is put into `state` comes back at the next start in the same run directory.
        state["starts"] = state.get("starts", 0) + 1
        self.file = (run_dir / "curves.csv").open("a", newline="", encoding="utf-8")
        self.writer = csv.writer(self.file)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.writer.writerows((step, name, value) for name, value in values.items())

    def close(self) -> None:
        self.file.close()

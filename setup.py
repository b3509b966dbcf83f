"""The build: the course in lessons/ goes into the wheel, as stepladder/lessons."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithLessons(build_py):
    """Builds the package, and lays the course beside it. An editable install uses the checkout."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                Path(__file__).parent / "lessons",
                Path(self.build_lib, "stepladder", "lessons"),
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )


setup(cmdclass={"build_py": BuildWithLessons})

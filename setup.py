"""The build: the course in lessons/ and its pictures go into the wheel, below stepladder/."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithLessons(build_py):
    """Builds the package, and lays the course beside it. An editable install uses the checkout."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for folder, ignored in (("lessons", "*.pyc"), ("docs/pictures", "*.py")):
                shutil.copytree(
                    Path(__file__).parent / folder,
                    Path(self.build_lib, "stepladder", folder),
                    ignore=shutil.ignore_patterns("__pycache__", ignored),
                    dirs_exist_ok=True,
                )


setup(cmdclass={"build_py": BuildWithLessons})

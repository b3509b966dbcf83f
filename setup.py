"""The build: the course in lessons/ goes into the wheel, below stepladder/.

So do its pictures, the pages of docs/ that it links to, and the examples that these name.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent.resolve()
# A block of code, in which nothing is a link; or the text and the file of a link.
LINK = re.compile(
    r"^```.*?^```|\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)[^)]*\)", re.MULTILINE | re.DOTALL
)


def find_course():
    """Return the course with its pictures, the pages that lessons link to, and their examples."""
    lessons = HERE.joinpath("lessons").rglob("*")
    course = {file for file in lessons if file.is_file() and file.suffix != ".pyc"}
    targets = set()
    for page in course:
        if page.suffix == ".md":
            links = LINK.finditer(page.read_text(encoding="utf-8"))
            targets |= {page.parent.joinpath(link[2]).resolve() for link in links if link[2]}
    linked = {page for page in HERE.joinpath("docs").glob("*.md") if page in targets}
    pictures = HERE.joinpath("docs", "pictures").glob("*.svg")
    examples = HERE.joinpath("docs", "examples").glob("*.py")
    return course | linked | {*pictures, *examples}


def unlink(page, files):
    """Return a page on which a link to none of the files is only its text."""

    def keep(link):
        is_there = not link[2] or page.parent.joinpath(link[2]).resolve() in files
        return link[0] if is_there else link[1]

    return LINK.sub(keep, page.read_text(encoding="utf-8"))


class BuildWithLessons(build_py):
    """Builds the package, and lays the course beside it. An editable install uses the checkout."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        files = find_course()
        for file in files:
            target = Path(self.build_lib, "stepladder", file.relative_to(HERE))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
            if file.suffix == ".md":
                target.write_text(unlink(file, files), encoding="utf-8")


setup(cmdclass={"build_py": BuildWithLessons})

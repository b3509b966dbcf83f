"""Paths that people give, checked in one place before anything is done with them."""

from __future__ import annotations

from pathlib import Path

from stepladder.core.errors import InputError, as_input_error, get_reason

PATH_HINT = (
    "a path of printable characters, shorter than 4,096, with fewer than 256 names shorter than 256"
)
# Python's variable that keeps the current folder, and a script's, out of sys.path.
SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
FORK_SERVER_VALUE = "of stepladder's fork server"  # its value if the user has not set it
# The recipe that config.json names where a script's own Loader keeps its ledger.
LOADER_RECIPE = "Loader"
MAX_PATH_PARTS = 256  # Python makes nested folders by recursion


def parse_path(label: str, text: str) -> Path:
    """Return the path that a text is, whether or not something exists there.

    Args:
        label: The flag or argument, for the message.
        text: What the user typed.

    Raises:
        InputError: Nothing can exist at the path, or nothing can be known about it. Without this
            each later question about the path would be an error of its own.
    """
    if not text.strip() or not text.isprintable():
        raise InputError(f"{label} {text!r} is not a path", PATH_HINT)
    path = Path(text)
    if len(path.parts) > MAX_PATH_PARTS:
        raise InputError(f"{label} is a path of {len(path.parts)} names", PATH_HINT)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise InputError(f"{label} {text}: {get_reason(error)}", PATH_HINT) from error
    return path


def validate_run_dir(run_dir: Path) -> None:
    """Raise InputError for a run directory whose files would lie among the system's."""
    # RuntimeError: links in a circle.
    with as_input_error(f"--run-dir {run_dir}", "--run-dir runs/NAME", (OSError, RuntimeError)):
        absolute = run_dir.resolve()
    if absolute == Path(absolute.anchor):
        raise InputError(
            f"--run-dir {run_dir} is the root of the file system", "--run-dir runs/NAME"
        )

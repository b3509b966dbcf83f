"""Records that cannot be read, by file and number."""

from __future__ import annotations

from dataclasses import dataclass

from stepladder.core.errors import InputError, to_one_line

DAMAGE_HINT = "correct the file, or copy it again; stepladder data check PATH lists such records"
ENCODING_HINT = "iconv -f LATIN1 -t UTF-8 FILE > NEW_FILE if it is Latin-1; or copy the file again"


@dataclass(frozen=True)
class Damage:
    """Records of one file that cannot be read.

    Args:
        file: The file's name.
        first: The number of the first of them in that file.
        count: How many there are.
        reason: Why they cannot be read.
    """

    file: str
    first: int
    count: int
    reason: str

    def __str__(self) -> str:
        place = f"record {self.first}"
        if self.count > 1:
            place = f"records {self.first} to {self.first + self.count - 1}"
        return f"{self.file}: {place}: {to_one_line(self.reason)}"

    def as_error(self) -> InputError:
        """Return the error that ends a run."""
        return InputError(str(self), DAMAGE_HINT)


def describe_error(file: str, row: int, error: Exception) -> Damage:
    """Return the damage that an error of reading one record of a file tells."""
    return Damage(file, row, 1, getattr(error, "problem", None) or str(error))


def locate_error(file: str, row: int, error: Exception, hint: str = DAMAGE_HINT) -> InputError:
    """Return the error of one record of a file, with its own HINT if it has one."""
    if isinstance(error, UnicodeDecodeError):
        hint = ENCODING_HINT
    return InputError(str(describe_error(file, row, error)), getattr(error, "hint", hint))

"""The header of NumPy's .npy files, which also lie in .npz and tar files."""

from __future__ import annotations

from tokenize import TokenError
from typing import IO, Any, NamedTuple

import numpy as np

from stepladder.data.table import MAX_NUMBER_BYTES

NPY_HINT = "save np.ascontiguousarray(x, x.dtype.newbyteorder('=')), where x are rows of numbers"


class _NpyHeader(NamedTuple):
    """The header of an array in a .npy file."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]

    @property
    def problem(self) -> str:
        """Why it has no rows of this machine's numbers, one after the other; "" if it has."""
        is_number = self.dtype.kind in "biuf" and self.dtype.itemsize <= MAX_NUMBER_BYTES
        if not (self.shape and is_number):
            return f"holds {self.dtype} {list(self.shape)}, not rows of numbers"
        if self.is_fortran and len(self.shape) > 1:
            return "is in Fortran order, column after column"
        return "" if self.dtype.isnative else f"holds {self.dtype}, in another order of bytes"


def read_npy_header(stream: IO[bytes]) -> _NpyHeader:
    """Return the header of a .npy file, which is read from its begin; the numbers follow.

    Raises:
        ValueError: It is no such file.
    """
    try:
        if np.lib.format.read_magic(stream) == (1, 0):
            return _NpyHeader(*np.lib.format.read_array_header_1_0(stream))
        return _NpyHeader(*np.lib.format.read_array_header_2_0(stream))
    except TokenError as error:  # NumPy reads it as Python
        raise ValueError(f"its header is damaged: {error}") from error

"""The data sets of `stepladder data get`: where their files are, and how to check them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.data.local_files import Feedback


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch.

    Args:
        name: Its name in the data folder.
        bytes: Its exact size.
        sha256: Its SHA-256 in hexadecimal digits.
        urls: Its mirrors, best first.
        unpack: Whether it is an archive to be unpacked.
    """

    name: str
    bytes: int
    sha256: str
    urls: tuple[str, ...]
    unpack: bool = False


@dataclass(frozen=True)
class DataSet:
    """A set of files with its licence and citation.

    Args:
        name: The name that users type.
        files: The files to fetch.
        licence: The terms of use.
        citation: The paper to cite.
        build: Called with the folder when all files are in it; makes further files of them.
    """

    name: str
    files: tuple[RemoteFile, ...]
    licence: str
    citation: str
    build: Callable[[Path, Feedback], Any] | None = None


def _build_leave_one_out(folder: Path, feedback: Feedback) -> None:
    """Make the leave-one-out files of MovieLens 1M."""
    # Imported here, because it needs NumPy, and most users of the catalog do not.
    from stepladder.data.movielens.one_million import write_1m_files

    write_1m_files(folder, feedback)


# -- MNIST -----------------------------------------------------------------------------------------

MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)


def _mnist_file(name: str, size: int, sha256: str) -> RemoteFile:
    return RemoteFile(name, size, sha256, tuple(mirror + name for mirror in MNIST_MIRRORS))


MNIST = DataSet(
    name="mnist",
    files=(
        _mnist_file(
            "train-images-idx3-ubyte.gz",
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        _mnist_file(
            "train-labels-idx1-ubyte.gz",
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        _mnist_file(
            "t10k-images-idx3-ubyte.gz",
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        _mnist_file(
            "t10k-labels-idx1-ubyte.gz",
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    licence=(
        "copyright Yann LeCun and Corinna Cortes; free to pass on, commonly given as CC BY-SA 3.0"
    ),
    citation=(
        'LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition"'
        ", Proc. IEEE 86(11), 1998"
    ),
)

# -- MovieLens -------------------------------------------------------------------------------------

MOVIELENS_URL = "https://files.grouplens.org/datasets/movielens/"
MOVIELENS_CITATION = (
    'F. M. Harper, J. A. Konstan, "The MovieLens Datasets: History and Context", '
    "ACM TiiS 5(4), Article 19, 2015, https://doi.org/10.1145/2827872"
)


def _movielens_zip(name: str, size: int, sha256: str) -> RemoteFile:
    return RemoteFile(name, size, sha256, (MOVIELENS_URL + name,), unpack=True)


MOVIELENS_SMALL = DataSet(
    name="movielens-small",
    files=(
        _movielens_zip(
            "ml-latest-small.zip",
            978202,
            "696d65a3dfceac7c45750ad32df2c259311949efec81f0f144fdfb91ebc9e436",
        ),
    ),
    licence=(
        "research use only, no commercial use without GroupLens' permission; "
        "may be passed on under the same terms (see README.txt in the archive)"
    ),
    citation=MOVIELENS_CITATION,
)

MOVIELENS_1M = DataSet(
    name="movielens-1m",
    files=(
        _movielens_zip(
            "ml-1m.zip", 5917549, "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20"
        ),
    ),
    licence=(
        "research use only, no commercial use and no passing on without GroupLens' permission "
        "(see README in the archive)"
    ),
    citation=MOVIELENS_CITATION,
    build=_build_leave_one_out,
)

# -- texts -----------------------------------------------------------------------------------------

SHAKESPEARE = DataSet(
    name="shakespeare",
    files=(
        RemoteFile(
            "input.txt",
            1115394,
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            (
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
                "input.txt",
            ),
        ),
    ),
    licence="the plays are in the public domain",
    citation=(
        "William Shakespeare, parts of several plays, put together for A. Karpathy,"
        ' "char-rnn", 2015'
    ),
)

CATALOG = {dataset.name: dataset for dataset in (MNIST, MOVIELENS_SMALL, MOVIELENS_1M, SHAKESPEARE)}


def find_dataset(name: str) -> DataSet:
    """Return the data set of a name. Raises InputError, which lists the names, if there is none."""
    if name not in CATALOG:
        known = ", ".join(CATALOG)
        raise InputError(
            f"there is no data set {name!r}, known are: {known}", "stepladder data get mnist"
        )
    return CATALOG[name]

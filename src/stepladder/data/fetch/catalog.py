"""The data sets `stepladder data get` knows: where their files are, and how to check them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.data.disk import Feedback


@dataclass(frozen=True)
class RemoteFile:
    """One file to fetch: its exact size in bytes, its sha256 (hex) and its mirrors, best first."""

    name: str
    bytes: int
    sha256: str
    urls: tuple[str, ...]
    unpack: bool = False


@dataclass(frozen=True)
class DataSet:
    """A named set of files with the terms they come under. build: makes more of what the folder
    holds then.
    """

    name: str
    files: tuple[RemoteFile, ...]
    licence: str
    citation: str
    build: Callable[[Path, Feedback], Any] | None = None


def build_leave_one_out(folder: Path, feedback: Feedback) -> None:
    from stepladder.data.movielens.leave_one_out import (
        build_1m,
    )  # late: NumPy, which most that ask do without

    build_1m(folder, feedback)


MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)


def mnist_file(part: str, dimensions: int, size: int, sha256: str) -> RemoteFile:
    name = f"{part}-idx{dimensions}-ubyte.gz"
    return RemoteFile(name, size, sha256, tuple(mirror + name for mirror in MNIST_MIRRORS))


MNIST = DataSet(
    name="mnist",
    files=(
        mnist_file(
            "train-images",
            3,
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        mnist_file(
            "train-labels",
            1,
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        mnist_file(
            "t10k-images",
            3,
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        mnist_file(
            "t10k-labels",
            1,
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    licence="copyright Yann LeCun and Corinna Cortes; free to pass on, commonly given as CC BY-SA 3.0",
    citation=(
        'LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", '
        "Proc. IEEE 86(11), 1998"
    ),
)


def movielens_zip(name: str, size: int, sha256: str) -> tuple[RemoteFile]:
    url = f"https://files.grouplens.org/datasets/movielens/{name}"
    return (RemoteFile(name, size, sha256, (url,), unpack=True),)


MOVIELENS_SMALL = DataSet(
    name="movielens-small",
    files=movielens_zip(
        "ml-latest-small.zip",
        978202,
        "696d65a3dfceac7c45750ad32df2c259311949efec81f0f144fdfb91ebc9e436",
    ),
    licence=(
        "research use only, no commercial use without GroupLens' permission; "
        "may be passed on under the same terms (see README.txt in the archive)"
    ),
    citation=(
        'F. M. Harper, J. A. Konstan, "The MovieLens Datasets: History and Context", '
        "ACM TiiS 5(4), Article 19, 2015, https://doi.org/10.1145/2827872"
    ),
)

MOVIELENS_1M = DataSet(
    name="movielens-1m",
    files=movielens_zip(
        "ml-1m.zip", 5917549, "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20"
    ),
    licence=(
        "research use only, no commercial use and no passing on without GroupLens' permission "
        "(see README in the archive)"
    ),
    citation=MOVIELENS_SMALL.citation,
    build=build_leave_one_out,
)

SHAKESPEARE = DataSet(
    name="shakespeare",
    files=(
        RemoteFile(
            "input.txt",
            1115394,
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            (
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            ),
        ),
    ),
    licence="the plays are in the public domain",
    citation='William Shakespeare, parts of several plays, put together for A. Karpathy, "char-rnn", 2015',
)

CATALOG = {dataset.name: dataset for dataset in (MNIST, MOVIELENS_SMALL, MOVIELENS_1M, SHAKESPEARE)}


def find(name: str) -> DataSet:
    """The data set of that name. InputError lists the known names when there is none."""
    if name not in CATALOG:
        known = ", ".join(CATALOG)
        raise InputError(
            f"there is no data set {name!r}, known are: {known}", "stepladder data get mnist"
        )
    return CATALOG[name]

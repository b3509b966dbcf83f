"""Folders of images: each folder is a class, as torchvision's _ImageFolder has it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.order import IndexArray
from stepladder.data.readers.batches import Sample, decode_image, stack_values
from stepladder.data.readers.damage import Damage
from stepladder.data.readers.file_rows import OpenedSource
from stepladder.data.readers.files import Contents, DataFile, hash_files, is_url
from stepladder.data.readers.listing import HIDDEN_NAME, is_folder, relate, validate_one_set
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.table import select_columns

IMAGE_COLUMNS = ("image", "label", "path")
OPEN_IMAGES = 64  # at once; a URL is asked for its size when it is opened


class _ImageFiles(Sequence[DataFile]):
    """Files of which only some are open, because there may be a million."""

    def __init__(self, count: int, get_path: Callable[[int], str], options: OpenOptions) -> None:
        self.indices = range(count)
        self.open_again = lru_cache(OPEN_IMAGES)(lambda index: options.open_file(get_path(index)))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        """Return the file with an index, or those of a slice."""
        if isinstance(index, slice):
            return [self.open_again(number) for number in self.indices[index]]
        return self.open_again(self.indices[index])


class _ImageFolder(OpenedSource):
    """Images by the names of their folders: image (height, width, 3), label, path."""

    format = "images"

    def __init__(self, folder: str, paths: list[str], options: OpenOptions) -> None:
        """Sort images by class.

        Args:
            folder: The folder, or its URL, with a slash at the end.
            paths: The images below it, relative to it.
            options: What the caller of `open_data` has set.
        """
        self.folder = folder
        self.names = select_columns(options.columns or ("image", "label"), IMAGE_COLUMNS, folder)
        # The first folder of each path; "" for an image in none.
        classes = [path[: path.find("/") + 1].rstrip("/") for path in paths]
        self.classes = sorted(set(classes))
        self.labels: IndexArray = np.searchsorted(self.classes, classes)
        # An array of bytes: a million Python strings would need 100 MB.
        self.paths = np.array(list(map(os.fsencode, paths)))
        files = _ImageFiles(len(paths), self.get_path, options)
        super().__init__(files, np.array([0, len(paths)]), options)

    @property
    def chunk_edges(self) -> None:
        """None: any order is as fast, because each image is a file."""
        return None

    @cached_property
    def contents(self) -> Contents:
        """The folder, with a hash of the names and of samples of some images."""
        names = hashlib.blake2b(b"".join(self.paths), digest_size=8).hexdigest()
        step = -(-len(self) // OPEN_IMAGES)
        return [[self.folder, names], *hash_files(self.files[::step])]

    @property
    def columns(self) -> dict[str, str]:
        """The name and the type of each column, as texts to print."""
        label = f"int64, {len(self.classes)} classes"
        types = {"image": "height x width x 3 uint8", "label": label, "path": "str"}
        return {name: types[name] for name in self.names}

    def read_samples(self, indices: IndexArray) -> list[Sample]:
        """Return each of these images with its label and path; the image only if it is needed."""
        return [self._read_sample(index) for index in indices.tolist()]

    def read_columns(self, indices: IndexArray) -> dict[str, Any]:
        """Return these images, their labels or paths by column."""
        samples = self.read_samples(indices)
        columns = {}
        for name in self.names:
            values = [sample[name] for sample in samples]
            columns[name] = stack_values(name, values, values[0])
        return columns

    def find_damage(self) -> Iterator[Damage]:
        """Read all images, and yield those that cannot be read."""
        for index in range(len(self)):
            try:
                self._read_image(index)
            except ValueError as error:
                yield self._make_damage(index, error)

    def _read_sample(self, index: int) -> Sample:
        sample = {"label": self.labels[index], "path": self.get_path(index)}
        if self.decode is not None or "image" in self.names:
            try:
                sample["image"] = self._read_image(index)
            except ValueError as error:
                raise self._make_damage(index, error).as_error() from error
        return sample

    def _read_image(self, index: int) -> np.ndarray:
        try:
            file = self.files[index]
            data = file.read(0, file.size)
        except InputError as error:
            raise ValueError(error.problem) from error
        return decode_image(data)

    def _make_damage(self, index: int, error: ValueError) -> Damage:
        return Damage(self.get_path(index), index, 1, str(error))

    def get_path(self, index: int) -> str:
        """Return the path of an image."""
        return self.folder + os.fsdecode(self.paths[index].item())


def open_images(
    paths: list[str], names: list[str], options: OpenOptions, is_given: bool
) -> _ImageFolder:
    """Return the images below a folder.

    Args:
        paths: The folder.
        names: The images.
        options: What the caller of `open_data` has set.
        is_given: Whether the caller says that it is a folder of images.

    Raises:
        InputError: It is not one folder of images, each in the folder of its class.
    """
    folder = paths[0]
    if len(paths) != 1 or not is_folder(folder):
        raise InputError(
            f"{folder} is not one folder of images", "a folder, or a URL with / at its end"
        )
    folder = f"{folder.rstrip('/')}/"
    source = _ImageFolder(folder, relate(names, folder), options)
    if not is_given:
        validate_one_set(folder, [f"{name}/" for name in source.classes])
    if "label" in source.names:
        _validate_classes(source)
    return source


def _validate_classes(source: _ImageFolder) -> None:
    """Validate that classes have the numbers that their folders have in order.

    Raises:
        InputError: An image is beside the folders; or a folder has no images, without which those
            after it have the numbers of other classes.
    """
    hint = 'a folder of folders with images, as of a class each; or columns=["image", "path"]'
    if "" in source.classes:
        image = source.get_path(source.labels.tolist().index(0))
        raise InputError(f"{image} is in no folder of a class", hint)
    if is_url(source.folder):
        return
    for entry in sorted(Path(source.folder).iterdir()):
        is_class = entry.is_dir() and not HIDDEN_NAME.match(entry.name)
        if is_class and entry.name not in source.classes:
            raise InputError(f"{entry} is a folder without images", hint)

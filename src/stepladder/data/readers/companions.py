"""Names of files that hold samples, and of those that lie beside them and hold none."""

from __future__ import annotations

from pathlib import Path

INDEX_SUFFIX = ".stepladder-index"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
# Of files beside those of a data set that hold no samples of it, as names without a dot.
COMPANIONS = (
    *(".md", ".rst", ".txt", ".pdf", ".html", ".bib", ".log"),
    *(".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".py", ".sh", ".ipynb"),
    *(".crc", ".md5", ".sha1", ".sha256", ".idx", ".index", ".lock", INDEX_SUFFIX, "thumbs.db"),
)


def has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    """Return whether the name of a file has one of the suffixes, in any case of letters."""
    return name.lower().endswith(suffixes)


def is_companion(name: str, has_images: bool = False) -> bool:
    """Return whether a file may lie beside those of a data set, and holds no samples.

    Args:
        name: The name of the file.
        has_images: Whether the samples are images.
    """
    if "." not in Path(name).name or has_suffix(name, COMPANIONS):
        return True
    return not has_images and has_suffix(name, IMAGE_SUFFIXES)

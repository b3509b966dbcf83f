"""Writers of small random stand-ins for the data sets of the scripts in convert.toml."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch
from check_field import WRITERS, random_numbers, write_mnist
from PIL import Image


def write_jokes(folder: Path) -> None:
    """Write random words as the jokes of a table, with those that its script begins a text with."""
    folder.mkdir(parents=True, exist_ok=True)
    jokes = [" ".join(f"w{number}" for number in line) for line in random_numbers(90, 16)]
    rows = [
        f'"{number}","{joke}"' for number, joke in enumerate(["Knock knock. Whos there?", *jokes])
    ]
    (folder / "reddit-cleanjokes.txt").write_text("\n".join(["ID,Joke", *rows]), encoding="utf-8")


def write_tiles(folder: Path) -> None:
    """Write random pictures, each with a mask of three colors."""
    colors = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0]], dtype=np.uint8)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(random_numbers(44, 16, 16, 3)):
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        Image.fromarray(colors[pixels[:, :, 0] % 3]).save(folder / "masks" / f"{number}.png")


def write_clicks(folder: Path) -> None:
    """Write random rows as Criteo stores clicks."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for numbers in random_numbers(1000, 40):
        counts = [str(number % 9) for number in numbers[1:14]]
        categories = [f"{number % 5:08x}" for number in numbers[14:]]
        lines.append("\t".join([str(numbers[0] % 2), *counts, *categories]))
    (folder / "train.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_movielens(folder: Path) -> None:
    """Write random ratings as MovieLens stores them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = random_numbers(3000, 3)
    ratings = (f"{user}::{movie}::{1 + rating % 5}::0" for user, movie, rating in rows)
    (folder / "ratings.dat").write_text("\n".join(ratings), encoding="utf-8")
    movies = (f"{number}::Movie {number}::Drama" for number in range(256))
    (folder / "movies.dat").write_text("\n".join(movies), encoding="utf-8")


def write_masks(folder: Path) -> None:
    """Write random pictures, each with a mask of two classes."""
    for kind in ("imgs", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(random_numbers(20, 32, 32, 3)):
        Image.fromarray(pixels).save(folder / "imgs" / f"{number}.png")
        mask = (pixels[:, :, 0] > 127).astype("uint8") * 255
        Image.fromarray(mask).save(folder / "masks" / f"{number}_mask.png")


def _draw_picture(random: np.random.Generator, label: int, size: int) -> Image.Image:
    """Return noise with a bright bar whose place mostly says the class."""
    pixels = random.integers(0, 120, (size, size, 3)).astype(np.uint8)
    shown = label if random.random() > 0.15 else int(random.integers(0, 6))
    begin = (shown + 1) * size // 8
    pixels[begin : begin + size // 10, :, shown % 3] = 250
    return Image.fromarray(pixels)


def write_pizza(folder: Path) -> None:
    """Write pictures in a folder for each class, as torchvision's ImageFolder reads them."""
    random = np.random.default_rng(0)
    for part, count in (("train", 220), ("test", 25)):
        for label, name in enumerate(("pizza", "steak", "sushi")):
            target = folder / part / name
            target.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                _draw_picture(random, label, 72).save(target / f"{number}.jpg", quality=90)


def write_movielens_small(folder: Path) -> None:
    """Write random ratings as ml-latest-small stores them: each user and movie has its own mean."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    users, movies = random.normal(0, 0.6, 150), random.normal(0, 0.6, 300)
    rows = ["userId,movieId,rating,timestamp"]
    pairs = random.permutation(150 * 300)[:3200]
    for pair in sorted(pairs.tolist()):
        user, movie = divmod(pair, 300)
        score = 3.3 + users[user] + movies[movie] + random.normal(0, 0.4)
        rating = float(np.clip(np.round(score * 2) / 2, 0.5, 5))
        rows.append(f"{user + 1},{movie * 7 + 1},{rating},{964982703 + pair}")
    (folder / "ratings.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def write_play(folder: Path) -> None:
    """Write a text of random words in lines, each after a speaker's name, as a play is printed."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [
        "".join(letters[i] for i in random.integers(0, 26, n)) for n in random.integers(2, 8, 90)
    ]
    lines = ["O God, O God!"]
    for number in range(900):
        if number % 5 == 0:
            lines.append(f"\n{words[int(random.integers(0, 12))].upper()}:")
        chosen = [words[min(int(k), 89)] for k in random.exponential(18, 7)]
        lines.append(" ".join(chosen).capitalize() + ",.;!?:"[int(random.integers(0, 6))])
    (folder / "input.txt").write_text("\n".join(lines), encoding="utf-8")


def write_cells(folder: Path) -> None:
    """Write grey pictures of discs, each with the mask of its discs, as arrays."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:32, :32]
    for part, count in (("train", 60), ("val", 9), ("test", 6)):
        target = folder / part
        target.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            mask = np.zeros((32, 32), dtype=bool)
            for row, column, radius in zip(
                *random.integers(4, 28, (2, 3)), random.integers(3, 7, 3), strict=True
            ):
                mask |= (rows - row) ** 2 + (columns - column) ** 2 < radius**2
            picture = np.where(mask, 150, 60) + random.integers(-40, 40, (32, 32))
            np.save(target / f"input_{number:03d}.npy", picture.astype(np.uint8))
            np.save(target / f"label_{number:03d}.npy", mask.astype(np.uint8) * 255)


def write_reviews(folder: Path) -> None:
    """Write token numbers of random reviews, and vectors of the words, as its repository stores them."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    names = ["[PAD]", "[UNK]", *(f"word{number}" for number in range(500))]
    (folder / "vocab.dict").write_bytes(pickle.dumps({name: i for i, name in enumerate(names)}))
    for part, count in (("train", 640), ("test", 100)):
        labels = np.arange(count) % 2
        tokens = np.zeros((count, 40), dtype=np.int64)
        for number, label in enumerate(labels):
            length = int(random.integers(12, 41))
            words = random.integers(42, len(names), length)
            places = random.random(length) < 0.15
            words[places] = 2 + label * 20 + random.integers(0, 20, int(places.sum()))
            tokens[number, :length] = words
        torch.save(torch.from_numpy(tokens), folder / f"{part}_tokens.pt")
        torch.save(torch.from_numpy(labels), folder / f"{part}_labels.pt")
    vectors = random.normal(0, 0.4, (len(names), 50)).astype(np.float32)  # GloVe's, of 50 numbers
    torch.save(torch.from_numpy(vectors), folder / "embedding.pt")


def write_stock(folder: Path) -> None:
    """Write the daily highs of a random walk, the newest first, in the encoding that is read."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    prices = 3000 * np.exp(np.cumsum(random.normal(0, 0.012, 2100)))
    days = np.datetime64("2010-01-04") + np.arange(2100)
    rows = [f"{day},{price:.2f}" for day, price in zip(days, prices, strict=True)]
    text = "\n".join(["日期,最高价", *reversed(rows)]) + "\n"
    (folder / "dataset_1.csv").write_bytes(text.encode("gb2312"))


def write_signs(folder: Path) -> None:
    """Write pictures of hands whose name begins with the class, as SIGNS stores them."""
    random = np.random.default_rng(0)
    for part, count in (("train", 200), ("val", 45)):
        target = folder / f"{part}_signs"
        target.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            label = number % 6
            _draw_picture(random, label, 64).save(
                target / f"{label}_IMG_{number:04d}.jpg", quality=90
            )


def write_patches(folder: Path) -> None:
    """Write pairs of blurred and sharp patches, as the preparation of SRCNN stores them."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)

    def draw(size: int) -> tuple[np.ndarray, np.ndarray]:
        sharp = np.kron(random.integers(0, 256, (size // 3, size // 3)), np.ones((3, 3)))
        sharp = sharp.astype(np.float32)
        blurred = (sharp + np.roll(sharp, 1, 0) + np.roll(sharp, 1, 1)) / 3
        return blurred, sharp

    pairs = [draw(33) for _ in range(200)]
    with h5py.File(folder / "train.h5", "w") as file:
        file.create_dataset("lr", data=np.stack([pair[0] for pair in pairs]))
        file.create_dataset("hr", data=np.stack([pair[1] for pair in pairs]))
    with h5py.File(folder / "eval.h5", "w") as file:
        low, high = file.create_group("lr"), file.create_group("hr")
        for number in range(5):
            blurred, sharp = draw(48)
            low.create_dataset(str(number), data=blurred)
            high.create_dataset(str(number), data=sharp)


def write_sensors(folder: Path) -> None:
    """Write rows of eight numbers and a class in the last column."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for part, count in (("train", 300), ("test", 75)):
        labels = random.integers(0, 4, count)
        numbers = random.normal(0, 1, (count, 8)) + np.eye(4, 8)[labels] * 2
        lines = [",".join([*(f"f{i}" for i in range(8)), "label"])]
        for row, label in zip(numbers, labels, strict=True):
            lines.append(",".join([*(f"{number:.4f}" for number in row), str(label)]))
        (folder / f"{part}_dataset.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_headlines(folder: Path) -> None:
    """Write headlines with the number of their class, as THUCNews stores them."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "saved_dict").mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    letters = [chr(0x4E00 + number) for number in range(400)]
    for part, count in (("train", 400), ("dev", 140), ("test", 150)):
        lines = []
        for number in range(count):
            label = number % 10
            text = []
            for _ in range(int(random.integers(10, 24))):
                own = random.random() < 0.15
                text.append(
                    letters[
                        label * 10 + int(random.integers(0, 10))
                        if own
                        else int(random.integers(100, 400))
                    ]
                )
            lines.append("".join(text) + f"\t{label}")
        (folder / "data" / f"{part}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_criteo_numbers(folder: Path) -> None:
    """Write rows of numbers of Criteo's features and the click, with the count of each feature."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    numbers = random.integers(0, 9, (10_000, 13))
    categories = random.integers(0, 20, (10_000, 26))
    score = numbers[:, 0] - 4 + (categories[:, 0] - 10) / 3
    clicks = (random.random(10_000) < 1 / (1 + np.exp(-score))).astype(int)
    rows = np.column_stack([numbers, categories, clicks])
    lines = [",".join(map(str, row)) for row in rows.tolist()]
    header = ",".join(f"c{number}" for number in range(40))
    (folder / "train.txt").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    sizes = ["1"] * 13 + ["20"] * 26
    (folder / "feature_sizes.txt").write_text(",".join(sizes), encoding="utf-8")


def write_flowers(folder: Path) -> None:
    """Write pictures in a folder for each kind of flower."""
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 5)):
        for label, name in enumerate(("daisy", "dandelion", "roses", "sunflowers", "tulips")):
            target = folder / part / name
            target.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                _draw_picture(random, label, 120).save(target / f"{number}.jpg", quality=90)


def write_nuclei(folder: Path) -> None:
    """Write pictures of discs, each with the mask of its discs under the same name."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:32, :32]
    for part, count in (("train", 50), ("val", 13)):
        for kind in ("images", "masks"):
            (folder / part / kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            mask = np.zeros((32, 32), dtype=bool)
            for _ in range(3):
                row, column, radius = (
                    random.integers(4, 28),
                    random.integers(4, 28),
                    random.integers(3, 7),
                )
                mask |= (rows - row) ** 2 + (columns - column) ** 2 < radius**2
            picture = np.where(mask, 150, 60)[:, :, None] + random.integers(-40, 40, (32, 32, 3))
            name = f"{number:03d}.png"
            Image.fromarray(picture.astype(np.uint8)).save(folder / part / "images" / name)
            Image.fromarray(mask.astype(np.uint8)).save(folder / part / "masks" / name)


DATA: dict[str, Callable[[Path], None]] = {
    **WRITERS,
    "mnist-more": partial(write_mnist, training_count=1300),  # lines of each tenth batch come again
    "jokes": write_jokes,
    "tiles": write_tiles,
    "clicks": write_clicks,
    "movielens": write_movielens,
    "masks": write_masks,
    "stock": write_stock,
    "cells": write_cells,
    "reviews": write_reviews,
    "pizza": write_pizza,
    "movielens-small": write_movielens_small,
    "play": write_play,
    "signs": write_signs,
    "patches": write_patches,
    "sensors": write_sensors,
    "headlines": write_headlines,
    "criteo-numbers": write_criteo_numbers,
    "flowers": write_flowers,
    "nuclei": write_nuclei,
}

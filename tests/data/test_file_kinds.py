"""Files as an adversary would give them: each has the right rows, or is refused in one line."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_files import write_mds
from file_makers import (
    ONE,
    TWO,
    Make,
    array,
    csv,
    cut,
    files,
    hard_link,
    image,
    jsonl,
    link,
    mds,
    pages,
    photo,
    read_all,
    saved,
    steps,
    table,
    tar,
    tar_link,
    to_list,
    tokens,
    write_split,
)
from stepladder import InputError, open_data


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


SAMPLES = (("0.txt", b"zero"), ("0.cls", b"0"), ("1.txt", b"one"), ("1.cls", b"1"))

# What makes the files, arguments of open_data, and the columns of all rows.
RIGHT: dict[str, tuple[Make, dict[str, Any], dict[str, list[Any]]]] = {
    "byte order mark, JSON": (jsonl(b"\xef\xbb\xbf" + ONE.encode()), {}, {"x": [1]}),
    "byte order mark, CSV": (csv(b"\xef\xbb\xbfx\n1\n"), {}, {"x": [1]}),
    "carriage returns": (csv("x,y\r\n1,a\r\n"), {}, {"x": [1], "y": ["a"]}),
    "no line end": (jsonl('{"x": 1}\n{"x": 2}'), {}, {"x": [1, 2]}),
    "blank lines": (jsonl("\n\n" + ONE + "\r\n\n" + TWO), {}, {"x": [1, 2]}),
    "not a number": (jsonl('{"x": NaN}\n{"x": 1.5}\n'), {}, {"x": [np.nan, 1.5]}),
    "a line break in a value": (csv('x,y\n1,"a\nb"\n2,c\n'), {}, {"x": [1, 2], "y": ["a\nb", "c"]}),
    "a line break in the header": (csv('x,"y\nz"\n1,a\n'), {}, {"x": [1], "y\nz": ["a"]}),
    "a long field": (csv("x\n" + '"' + "a" * 200_000 + '"\n'), {}, {"x": ["a" * 200_000]}),
    "leading zeros": (csv("x\n00123\n45\n"), {}, {"x": ["00123", "45"]}),
    "underscores": (csv("x\n1_000\n"), {}, {"x": ["1_000"]}),
    "other digits": (csv("x\n٣\n"), {}, {"x": ["٣"]}),
    "decimal commas": (csv('x,y\n"1,5",2\n'), {}, {"x": ["1,5"], "y": [2]}),
    "dates": (csv("x\n2024-01-02\n"), {}, {"x": ["2024-01-02"]}),
    "numbers in many forms": (
        csv("x\n 1\n+2\n.5\n1e2\nnan\n-inf\n"),
        {},
        {"x": [1, 2, 0.5, 100, np.nan, -np.inf]},
    ),
    "an empty column": (csv("x,y\n1,\n2,\n"), {}, {"x": [1, 2], "y": ["", ""]}),
    "the index of pandas": (csv(",x\n0,5\n"), {}, {"": [0], "x": [5]}),
    "NUL bytes": (csv("x,y\na\0b,1\n"), {}, {"x": ["a\0b"], "y": [1]}),
    "tabs": (csv("x\ty\n1,5\t2\n", "a_dot_tsv"), {}, {"x": ["1,5"], "y": [2]}),
    "names for a file without a header": (
        csv("1,a\n2,b\n"),
        {"header": ["x", "y"]},
        {"x": [1, 2], "y": ["a", "b"]},
    ),
    "a header of numbers": (csv("0,1\n5,6\n"), {"header": ["0", "1"]}, {"0": [5], "1": [6]}),
    "upper-case suffix": (files(a_dot_JSONL=ONE), {}, {"x": [1]}),
    "wrong suffix": (files(a_dot_dat=ONE), {"format": "jsonl"}, {"x": [1]}),
    "an empty file beside others": (files(a_dot_jsonl="", b_dot_jsonl=ONE), {}, {"x": [1]}),
    "a readme, checksums and hidden files": (
        files(
            README="x",
            a_dot_jsonl=ONE,
            _dot_b_dot_jsonl=TWO,
            LICENSE_dot_md="",
            a_dot_sha256="",
            __MACOSX___dot_a_dot_jsonl="x",
        ),
        {},
        {"x": [1]},
    ),
    "notes of other programs": (
        steps(table(x=[1]), files(_SUCCESS="", _metadata="", _dot_DS_Store="x")),
        {},
        {"x": [1]},
    ),
    "thumbnails of other programs": (
        steps(image("a/0.png"), files(a__Thumbs_dot_db="x", __MACOSX__a__b="x")),
        {"columns": ["label"]},
        {"label": [0]},
    ),
    "other names of Arrow": (
        saved("a.feather", "b.ipc", listed=("a.feather", "b.ipc")),
        {},
        {"x": [0, 1]},
    ),
    "links, as of a cache": (
        steps(
            files(blobs__0a=ONE, blobs__1b=TWO),
            link("s/a.jsonl", "../blobs/0a"),
            link("s/b.jsonl", "../blobs/1b"),
        ),
        {},
        {"x": [1, 2]},
    ),
    "a link to a folder elsewhere": (
        steps(files(_dot_store__a_dot_jsonl=ONE), link("now", ".store")),
        {},
        {"x": [1]},
    ),
    "numbers of files in the order of texts": (
        files(**{f"{n}_dot_jsonl": f'{{"x": {n}}}\n' for n in (1, 2, 10)}),
        {},
        {"x": [1, 10, 2]},
    ),
    "a folder as save_to_disk has written it": (
        saved("old.arrow", "cache-1.arrow", "b.arrow", "a.arrow", listed=("b.arrow", "a.arrow")),
        {},
        {"x": [2, 3]},
    ),
    "a tar file": (
        tar(*SAMPLES),
        {"columns": ["txt", "cls"]},
        {"txt": ["zero", "one"], "cls": [0, 1]},
    ),
    "long names in a tar file": (
        tar((f"{'é' * 150}/0.cls", b"4")),
        {"columns": ["cls"]},
        {"cls": [4]},
    ),
    "names with one underscore in a tar file": (
        tar(("_0.cls", b"4"), ("._0.cls", b"")),
        {"columns": ["cls"]},
        {"cls": [4]},
    ),
    "True and False in lists": (
        jsonl('{"x": [true], "y": [[true, 2]]}\n' * 2),
        {},
        {"x": [[True]] * 2, "y": [[[True, 2]]] * 2},
    ),
    "colons in texts and in objects": (
        jsonl('{"x": "\\":, \\" :", "y": {"a": {"b": 1}}}\n'),
        {},
        {"x": ['":, " :'], "y": [{"a": {"b": 1}}]},
    ),
    "nulls among texts": (table(x=["a", None]), {}, {"x": ["a", None]}),
    "lists of several lengths": (jsonl('{"x": [1]}\n{"x": []}\n'), {}, {"x": [[1], []]}),
    "nested columns": (table(x=[{"a": 1}]), {}, {"x": [{"a": 1}]}),
    "a categorical column": (table(x=pa.array(["a"]).dictionary_encode()), {}, {"x": ["a"]}),
    "an empty array beside others": (
        lambda folder: [np.save(folder / f"{n}.npy", np.arange(n)) for n in (0, 2)] and None,
        {},
        {"array": [0, 1]},
    ),
    "images of other modes": (
        steps(image("a/0.png", "P"), image("b/1.jpg", "CMYK"), image("b/2.PNG", "LA")),
        {"columns": ["label"]},
        {"label": [0, 1, 1]},
    ),
    "a photo with a smaller copy of itself": (
        photo((8, 4)),
        {"columns": ["label"]},
        {"label": [0]},
    ),
    "tokens whose last ones fill no block": (
        tokens(*range(7)),
        {"block": 2},
        {"tokens": [[0, 1, 2], [2, 3, 4], [4, 5, 6]]},
    ),
    "an empty file of tokens beside others": (
        steps(tokens(1, 2, 3), files(b_dot_bin="")),
        {"block": 2},
        {"tokens": [[1, 2, 3]]},
    ),
    "files of a pattern": (
        files(train_1_dot_jsonl=ONE, test_1_dot_jsonl=TWO),
        {"path": "train*"},
        {"x": [1]},
    ),
    "splits in a list": (
        files(train__a_dot_jsonl=ONE, test__a_dot_jsonl=TWO),
        {"path": ["train", "test"]},
        {"x": [1, 2]},
    ),
    "partitions by a pattern": (
        steps(table("y=1/a.parquet", x=[1]), table("y=2/a.parquet", x=[2])),
        {"path": "**/*.parquet"},
        {"x": [1, 2]},
    ),
}

# What makes the files, arguments of open_data, and what the line must hold.
REFUSED: dict[str, tuple[Make, dict[str, Any], str]] = {
    "an empty folder": (lambda folder: None, {}, "is of no format"),
    "an empty file": (jsonl(""), {}, "has no samples"),
    "an empty CSV file": (csv(""), {}, "its first line has no names"),
    "an empty tar file": (tar(cut=0), {}, "empty file"),
    "an empty Parquet file": (files(a_dot_parquet=b""), {}, "cannot use"),
    "semicolons": (csv("x;y\n1;2\n"), {}, "'x;y', not several between ','"),
    "a file without a header": (csv("1,a\n2,b\n"), {}, r"'1', a value and no name.*header="),
    "a file without a header, equal values": (csv("a,a\nb,c\n"), {}, "2 columns"),
    "two columns of one name": (csv("x,x\n1,2\n"), {}, "2 columns"),
    "too many values": (csv("x,y\n1,2\n1,2,3\n"), {}, "record 1: it has 3 values, the header 2"),
    "too few names": (csv("1,2\n"), {"header": ["x"]}, "it has 2 values, the header 1"),
    "names in a text": (csv("1,2\n"), {"header": "xy"}, r"header=\['xy'\]"),
    "a quotation mark that stays open": (csv('x,y\n1,"a\n2,b\n'), {}, "a quotation mark in it"),
    "a later value with leading zeros": (
        csv("x\n" + "1\n" * 256 + "007\n"),
        {},
        "record 256: x: '007' is no whole number",
    ),
    "a later empty value": (
        csv("x\n" + "1\n" * 256 + '""\n'),
        {},
        "record 256: x: '' is no whole number",
    ),
    "a number too large for float32, CSV": (csv("x\n1e39\n"), {}, "too large for float32"),
    "a number too large for float32, JSON": (jsonl('{"x": 1e39}\n'), {}, "too large for float32"),
    "two values of one name": (jsonl('{"x": 1, "x": 2}\n'), {}, "two values have the same name"),
    "a late value of a name that is there twice": (
        jsonl(ONE * 300 + '{"x": 1, "\\u0078": 2}\n'),
        {},
        "record 300: two values have the same name, of x",
    ),
    "an object in a list with two values of one name": (
        jsonl('{"x": []}\n' * 300 + '{"x": [{"a:": 1, "a:": 2}]}\n'),
        {},
        "record 300: two values have the same name, of a:",
    ),
    "two hard links of a file": (
        steps(jsonl(ONE), hard_link("b.jsonl", "a.jsonl")),
        {},
        "a.jsonl and .*b.jsonl are one file",
    ),
    "two hard links of a file and a link": (
        steps(files(a__a_dot_jsonl=ONE), hard_link("b", "a/a.jsonl"), link("c.jsonl", "b")),
        {},
        "a.jsonl and .*c.jsonl are one file",
    ),
    "a shard that the index of MDS does not name": (
        mds(names=1, shards=2),
        {},
        "index.json does not name .*shard.00001.mds",
    ),
    "the same, of a given format": (
        mds(names=1, shards=2),
        {"format": "mds"},
        "index.json does not name .*shard.00001.mds",
    ),
    "a shard that the index of MDS names twice": (mds(names=2, shards=1), {}, "are one file"),
    "two pictures in a photo": (photo((16, 8)), {}, "it has 2 pages, of which one would be read"),
    "a file with too few tokens for a block": (
        steps(tokens(1, 2, 3), files(b_dot_bin=b"\1\0\2\0")),
        {"block": 2},
        "b.bin has 2 tokens, too few for one sample of block=2",
    ),
    "a type that pyarrow does not select rows of": (
        table(x=pa.array(["a"], pa.string_view())),
        {},
        "a.parquet: .*string_view",
    ),
    "two values of one name in a tar file": (
        tar(("0.json", b'{"x": 1, "x": 1}')),
        {},
        "record 0: two values have the same name",
    ),
    "a table of Delta": (
        steps(table(x=[1]), files(_delta_log__0_dot_json="{}")),
        {},
        "_delta_log/0.json in .* unfinished or internal",
    ),
    "a number of 65 bits, CSV": (csv(f"x\n{2**64}\n"), {}, "too large for int64"),
    "a number of 65 bits, JSON": (jsonl(f'{{"x": {2**64}}}\n'), {}, "too large for int64"),
    "a number of 65 bits in a tar file": (
        tar(("0.cls", b"18446744073709551616")),
        {},
        "column cls",
    ),
    "other columns in a second CSV file": (
        files(a_dot_csv="x,y\n1,2\n", b_dot_csv="y,x\n1,2\n"),
        {},
        "b.csv has other columns",
    ),
    "rows that are lists": (jsonl("[1]\n"), {}, "it is no JSON object"),
    "a JSON file of several lines": (jsonl('{\n"x": 1\n}\n'), {}, "record 0"),
    "a later key": (jsonl(ONE + '{"x": 1, "y": 2}\n'), {}, "record 1 has y, and the first"),
    "a missing key": (jsonl(ONE + '{"y": 2}\n'), {}, "record 1 has no x"),
    "a null among numbers": (jsonl(ONE + '{"x": null}\n'), {}, "column x .*has an empty value"),
    "UTF-16": (
        csv("x,y\n1,2\n".encode("utf-16")),
        {"header": ["x", "y"]},
        "it is UTF-16, not UTF-8. HINT: iconv -f UTF-16 -t UTF-8 .*a.csv > new-a.csv",
    ),
    "UTF-16 without a mark": (jsonl(ONE.encode("utf-16-le")), {}, "it is UTF-16, not UTF-8"),
    "lines of old Macs": (
        csv("x,y\r1,2\r"),
        {},
        r"its lines end with CR alone, as on old Macs. HINT: tr '.r' '.n' < .*a.csv > new-a.csv",
    ),
    "JSON lines of old Macs": (jsonl(ONE[:-1] + "\r" + TWO[:-1]), {}, "lines end with CR alone"),
    "Latin 1": (csv("x\nJosé\n".encode("latin1")), {}, "record 0: .*utf-8.* HINT: iconv -f LATIN1"),
    "Latin 1 in JSON": (jsonl(b'{"x": "\xe9"}\n'), {}, "record 0: .*utf-8.* HINT: iconv -f LATIN1"),
    "Latin 1 in names": (csv("José\n1\n".encode("latin1")), {}, "utf-8.* HINT: iconv -f LATIN1"),
    "the separator, for Excel": (
        csv("sep=,\r\nx,y\r\n1,2\r\n"),
        {},
        r"it tells Excel the separator. HINT: tail -n .2 .*a.csv > new-a.csv",
    ),
    "a cut line": (jsonl(ONE + '{"x": 1'), {}, "record 1"),
    "a compressed file beside others": (
        files(a_dot_jsonl=ONE, b_dot_jsonl_dot_gz=gzip.compress(TWO.encode())),
        {},
        "b.jsonl.gz is no file of jsonl.*gzip",
    ),
    "gzip": (files(a_dot_jsonl_dot_gz=gzip.compress(b"{}")), {}, "is compressed"),
    "xz": (files(a_dot_csv_dot_xz=lzma.compress(b"{}")), {}, "is compressed"),
    "bzip2 twice": (files(a_dot_csv_dot_bz2_dot_bz2=bz2.compress(b"")), {}, "is compressed"),
    "gzip with a wrong suffix": (
        jsonl(gzip.compress(ONE.encode(), mtime=13)),
        {},
        "record 0",
    ),  # 13: CR
    "a compressed tar file": (files(a_dot_tar=gzip.compress(b"")), {}, "a.tar: record 0"),
    "a file of another format beside others": (
        files(a_dot_jsonl=ONE, b_dot_csv="x\n1\n"),
        {},
        "is no file of ",
    ),
    "a file of an unknown format beside others": (
        files(a_dot_jsonl=ONE, b_dot_h5="x"),
        {},
        "b.h5 is no file of jsonl",
    ),
    "a link that leads nowhere": (
        steps(files(a_dot_jsonl=ONE), link("b.jsonl", "gone")),
        {},
        "b.jsonl is a link to gone, which is not there",
    ),
    "a loop of links": (
        steps(files(d__a_dot_jsonl=ONE), link("d/loop", "..")),
        {},
        "d/loop is a link to a folder that it is in",
    ),
    "a link to itself": (
        steps(files(a_dot_jsonl=ONE), link("b.jsonl", "b.jsonl")),
        {},
        "which is not there",
    ),
    "two links to one file": (
        steps(files(a_dot_jsonl=ONE), link("b.jsonl", "a.jsonl")),
        {},
        "are one file",
    ),
    "one folder by two links": (
        steps(files(d__a_dot_jsonl=ONE), link("e", "d")),
        {},
        "are one file",
    ),
    "one file twice": (jsonl(ONE), {"path": ["a.jsonl", "a.jsonl"]}, "are one file"),
    "a pattern that matches a folder": (
        files(a_dot_jsonl=ONE, d__b_dot_jsonl=TWO),
        {"path": "*"},
        r"matches the folder .*\*\*",
    ),
    "a pipe": (
        steps(files(a_dot_jsonl=ONE), lambda folder: os.mkfifo(folder / "b.jsonl")),
        {},
        "it is not a file",
    ),
    "a device": (jsonl(ONE), {"path": "/dev/zero", "format": "jsonl"}, "it is not a file"),
    "folders of splits": (
        files(train__a_dot_jsonl=ONE, test__a_dot_jsonl=TWO),
        {},
        "several splits: test/a.jsonl, train/a.jsonl",
    ),
    "files of splits": (files(train_0_dot_jsonl=ONE, val_0_dot_jsonl=TWO), {}, "several splits"),
    "splits of images": (
        steps(image("train/a/0.png"), image("val/a/0.png")),
        {},
        "several splits: train/, val/",
    ),
    "splits of MDS": (
        lambda folder: [write_split(folder / name) for name in ("train", "test")] and None,
        {},
        "several splits: test/index.json, train/index.json",
    ),
    "partitions": (table("year=2024/a.parquet", x=[1]), {}, "is partitioned by year"),
    "unfinished files": (
        steps(table("a.parquet", x=[1]), table("_temporary/b.parquet", x=[1])),
        {},
        "unfinished or internal",
    ),
    "a file of save_to_disk that is gone": (
        saved("a.arrow", listed=("a.arrow", "b.arrow")),
        {},
        "b.arrow, which is not there",
    ),
    "save_to_disk with an index of rows": (
        saved("a.arrow", listed=("a.arrow",), _indices_data_files=[{"filename": "i.arrow"}]),
        {},
        "has an index of rows",
    ),
    "a damaged state.json": (
        steps(saved("a.arrow", listed=()), files(state_dot_json="{")),
        {},
        "state.json cannot be used",
    ),
    "two samples of one key": (
        tar(("0.txt", b"a"), ("0.cls", b"1"), ("0.txt", b"b"), ("0.cls", b"2")),
        {},
        "0.txt is there twice",
    ),
    "suffixes that differ in case": (tar(("0.txt", b"a"), ("0.TXT", b"b")), {}, "is there twice"),
    "samples that a sorted tar file has torn": (
        tar(("0.cls", b"1"), ("1.cls", b"1"), ("0.txt", b"a"), ("1.txt", b"b")),
        {},
        "record 2 has no cls",
    ),
    "a tar file without its end": (tar(*SAMPLES, cut=8 * 512), {}, "nor its end at byte 4,096"),
    "a tar file with half its end": (tar(*SAMPLES, cut=9 * 512), {}, "nor its end at byte 4,096"),
    "a tar file that ends in a header": (
        tar(*SAMPLES, cut=6 * 512 + 100),
        {},
        "nor its end at byte",
    ),
    "a tar file that ends in contents": (
        tar(("0.txt", b"a" * 900), cut=1024),
        {},
        "unexpected end",
    ),
    "two tar files in one": (tar(*SAMPLES, tail=b"x" * 512), {}, "more follows after the end"),
    "a damaged header": (
        tar(*SAMPLES[:2], cut=4 * 512, tail=b"x" * 1024),
        {},
        "nor its end at byte",
    ),
    "a hard link in a tar file": (tar_link(tarfile.LNKTYPE), {}, "1.txt is a link"),
    "a symbolic link in a tar file": (tar_link(tarfile.SYMTYPE), {}, "1.txt is a link"),
    "other columns in a second Parquet file": (
        steps(table("a.parquet", x=[1]), table("b.parquet", x=[1.5])),
        {},
        "b.parquet has other columns than .*: <x: double>, not <x: int64>",
    ),
    "another order of columns in a second Parquet file": (
        steps(table("a.parquet", x=[1], y=[2]), table("b.parquet", y=[2], x=[1])),
        {},
        "b.parquet has other columns than .*: <y: int64>, not <x: int64>",
    ),
    "fewer columns in a second Parquet file": (
        steps(table("a.parquet", x=[1], y=[2]), table("b.parquet", x=[1])),
        {},
        "b.parquet has other columns than .*: <nothing: null>, not <y: int64>",
    ),
    "an image of a kind that is not read": (
        steps(image("a/0.png"), image("a/1.gif")),
        {},
        r"1.gif is no file of images, as others are. HINT: images of .jpg, .*; format=.images",
    ),
    "a cut Parquet file": (cut(table(x=[1]), "a.parquet", 4), {}, "cannot use"),
    "nulls among whole numbers": (table(x=[1, None]), {}, "x"),
    "Arrow without its end": (
        cut(saved("a.arrow", listed=("a.arrow",)), "a.arrow", 60),
        {},
        "cannot be used",
    ),
    "big-endian numbers": (
        array(np.arange(3, dtype=">i8")),
        {},
        "holds >i8, in another order of bytes.*newbyteorder",
    ),
    "objects": (array(np.array([{}], object)), {}, "holds object"),
    "columns first": (
        array(np.asfortranarray(np.ones((2, 3)))),
        {},
        "is in Fortran order.*ascontiguousarray",
    ),
    "no rows": (array(np.array(3)), {}, "holds int64"),
    "a cut array": (cut(array(np.arange(9)), "a.npy", 8), {}, "the file ends before"),
    "two arrays in one file": (array(np.arange(9), b"\x93NUMPY"), {}, "6 bytes follow"),
    "half a token": (tokens(1, 2, 3, tail=b"x"), {"block": 1}, "1 bytes follow"),
    "tokens of 32 bits": (tokens(*range(1, 200), dtype="<u4"), {"block": 4}, 'dtype="uint32"'),
    "an image beside the folders": (
        steps(image("a/0.png"), image("b/0.png"), image("0.png")),
        {},
        "0.png is in no folder of a class",
    ),
    "a folder without images": (
        steps(image("a/0.png"), files(b__notes_dot_txt="")),
        {},
        "b is a folder without images",
    ),
    "an image that is not read": (
        steps(image("a/0.png"), files(a__1_dot_heic="")),
        {},
        "1.heic is no file of images",
    ),
    "captions beside images": (
        steps(image("a/0.png"), image("a/1.png"), files(metadata_dot_jsonl=ONE)),
        {},
        "metadata.jsonl is no file of images",
    ),
    "a cut image": (cut(image("a/0.png", size=(64, 64)), "a/0.png", 40), {}, "no image"),
    "an image of 16 bits": (image("a/0.png", "I;16"), {}, "I;16"),
    "an image of two pages": (pages, {}, "2 pages"),
    "an MDS shard that is gone": (
        lambda folder: write_mds(folder) or (folder / "shard.00001.mds").unlink(),
        {},
        "shard.00001.mds",
    ),
    "a cut MDS shard": (cut(write_mds, "shard.00001.mds", 9), {}, "shard.00001.mds"),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_kind_of_files_has_the_right_rows(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options, expected = RIGHT[kind]
    make(tmp_path)
    for _ in range(2):  # with the index that the first one has made
        source, batch = read_all(tmp_path, options, monkeypatch)
        columns = batch
        if isinstance(batch, list):
            columns = dict(zip(expected, batch, strict=True))
        values = {name: to_list(column) for name, column in columns.items() if name != "__key__"}
        np.testing.assert_equal(values, expected)
        assert list(source.find_damage()) == []


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kind_of_files_is_refused_in_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options, message = REFUSED[kind]
    make(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        read_all(tmp_path, options, monkeypatch)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["{}", "[{}, 1]", "[[{}, 1]]"])
@pytest.mark.parametrize(
    "first, other",
    [
        ("0.5", "1e39"),
        ("0.5", "1e400"),
        ("1", "9223372036854775808"),
        ("1", "18446744073709551615"),
        ("1", "true"),
    ],
)
def test_a_number_that_an_array_would_change_is_named(
    first: str, other: str, form: str, tmp_path: Path
) -> None:
    values = [first] * 256 + [other]
    jsonl("".join(f'{{"x": {form.format(value)}}}\n' for value in values))(tmp_path)
    source = open_data(tmp_path)
    with pytest.raises(InputError, match="record 256"):
        source.read(np.arange(257))
    assert [damage.first for damage in source.find_damage()] == [256]


@pytest.mark.parametrize("form", ["[{}, 1]", "[[{}, 1]]"])
def test_a_column_of_identifiers_of_64_bits_is_not_rounded(form: str, tmp_path: Path) -> None:
    jsonl(f'{{"x": {form.format(2**64 - 1)}}}\n{{"x": {form.format(2)}}}\n')(tmp_path)
    with pytest.raises(InputError, match=r"record 0: x .* too large for int64"):
        open_data(tmp_path).read(np.arange(2))


def test_a_later_value_of_another_type_is_no_damage_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(ONE * 256 + '{"x": 1.5}\n')
    with pytest.raises(InputError, match=r"record 256: x .* HINT: correct the file; or columns="):
        open_data(tmp_path).read(np.arange(257))

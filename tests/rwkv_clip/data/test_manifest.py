"""Manifests: a table of image files and captions."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from rwkv_clip import InputError
from rwkv_clip.data.manifest import ManifestSource
from rwkv_clip.data.pairs import class_number


def write(folder: Path, text: str) -> Path:
    path = folder / "pairs.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.parquet"])
def test_a_row_is_a_pair(pictures, name):
    """CSV and Parquet give the same rows: the image file's bytes, all filled captions, the label."""
    source = ManifestSource(pictures / name)
    assert len(source) == 24
    record = source.read(3)
    assert record.image == (pictures / "003.png").read_bytes()
    assert record.captions == source.captions(3) == ["picture 3 of the digit three", "a three"]
    assert record.label == 3
    assert source.problems == []


def test_parquet_lists_are_several_captions(tmp_path):
    """A column of lists gives every text in them, blank and missing ones left out."""
    table = pa.table({"image": ["a.png", "b.png"], "captions": [["one", None, " ", "two"], ["three"]]})
    pyarrow.parquet.write_table(table, tmp_path / "pairs.parquet")
    source = ManifestSource(tmp_path / "pairs.parquet")
    assert [source.captions(i) for i in range(2)] == [["one", "two"], ["three"]]


def test_captions_may_hold_anything(tmp_path):
    """Quotes, commas, line breaks, other scripts, numbers and the words null and NA come through as they are."""
    rows = ['a.png,"a ""cat"",\nbrown"', 'b.png,"null"', "c.png,猫 ∞", "d.png,NA", "5,007"]
    source = ManifestSource(write(tmp_path, "\n".join(["image,caption", *rows]) + "\n"))
    assert [source.captions(i)[0] for i in range(5)] == ['a "cat",\nbrown', "null", "猫 ∞", "NA", "007"]
    assert source.place(4).endswith("image 5")


def test_broken_rows_are_listed_with_their_place(tmp_path):
    """A row without image or caption, or with too many columns, is left out and listed; the others keep their numbers."""
    rows = ["a.png,one", ",two", "c.png,", "d.png,four", "e.png,five,six", "f.png,seven"]
    path = write(tmp_path, "\n".join(["image,caption", *rows]) + "\n")
    source = ManifestSource(path)
    assert [source.captions(i)[0] for i in range(len(source))] == ["one", "four", "seven"]
    assert sorted(source.problems) == [
        f"{path} line 6: 3 columns, not 2",
        f"{path} row 2: no image",
        f"{path} row 3: no caption",
    ]
    assert source.place(1) == f"{path} row 4, image d.png"


def test_columns_can_be_named(tmp_path):
    """Image and caption columns of other names are used when they are named."""
    path = write(tmp_path, "url,text,other\na.png,one,two\n")
    assert ManifestSource(path, "url", ("text",)).captions(0) == ["one"]
    with pytest.raises(InputError, match="no column begins with 'caption'; seen: url, text, other"):
        ManifestSource(path, "url")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("picture,caption\na.png,one\n", "no column 'image'; known: caption, picture"),
        ("images,caption\na.png,one\n", r"no column 'image'; did you mean 'images'\?"),
        ("image,caption\n", "no row names an image and a caption"),
        ("", "cannot read the manifest"),
        ("image,caption,caption\na.png,one,two\n", "2 columns are called 'caption'"),
        ("image,caption,label,label\na.png,one,1,2\n", "2 columns are called 'label'"),
        ("image,caption\na.png,\n", r"no row names an image and a caption; .* row 1: no caption"),
    ],
)
def test_manifests_of_no_use_are_explained(tmp_path, text, message):
    """A missing column, two of one name, an empty file and a file without a whole row are errors that say so."""
    with pytest.raises(InputError, match=message):
        ManifestSource(write(tmp_path, text))


def test_unreadable_manifests_are_explained(tmp_path):
    """A missing file, a file that is no Parquet, and text that is no UTF-8 are errors that name the file."""
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    (tmp_path / "latin.csv").write_bytes("image,caption\na.png,caf\xe9\n".encode("latin-1"))
    for name in ("missing.csv", "bad.parquet", "latin.csv"):
        with pytest.raises(InputError, match=f"{name}"):
            ManifestSource(tmp_path / name)


def test_a_row_that_is_no_utf8_is_left_out(tmp_path):
    """Bytes that are no UTF-8 cost their own row, which is listed, and no other."""
    path = tmp_path / "pairs.csv"
    path.write_bytes("image,caption\na.png,café\nb.png,café\n".encode("latin-1") + "c.png,café\n".encode())
    source = ManifestSource(path)
    assert [source.captions(i) for i in range(len(source))] == [["café"]]
    assert source.problems == [f"{path} row {row}: no UTF-8: b'caf\\xe9'" for row in (1, 2)]
    assert source.place(0) == f"{path} row 3, image c.png"


def test_a_file_in_another_encoding_is_explained(tmp_path):
    """UTF-16, as spreadsheets write it, is an error that names the file."""
    path = tmp_path / "pairs.csv"
    path.write_text("image,caption\na.png,one\n", encoding="utf-16")
    with pytest.raises(InputError, match=r"cannot read the manifest .*pairs\.csv: 'utf-8' codec"):
        ManifestSource(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            [("image", [{"bytes": b"x"}]), ("caption", ["b"])],
            "column 'image' holds struct<bytes: binary>, expected text",
        ),
        ([("image", ["a"]), ("caption", [b"b"])], "column 'caption' holds binary, expected text"),
        ([("image", ["a"]), ("captions", [[{"text": "b"}]])], "column 'captions' holds list<.*struct"),
    ],
)
def test_columns_of_no_use_are_explained(tmp_path, columns, message):
    """Columns that hold no text are errors that say what they hold; they are not read as something else."""
    names, values = zip(*columns, strict=True)
    pyarrow.parquet.write_table(pa.Table.from_arrays([pa.array(v) for v in values], names), tmp_path / "pairs.parquet")
    with pytest.raises(InputError, match=message):
        ManifestSource(tmp_path / "pairs.parquet")


def test_classes_may_be_written_in_several_ways():
    """A class may be a number, its digits, or a number with nothing after the point; anything else is named."""
    assert [class_number(value) for value in (3, "3", " 3\n", 3.0, "3.0")] == [3] * 5
    for value in ("cat", 3.5, "", "nan", float("inf")):
        with pytest.raises(InputError, match=re.escape(f"label {value!r} is no whole number")):
            class_number(value)

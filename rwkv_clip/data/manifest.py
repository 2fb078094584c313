"""A table of image files and captions: CSV or Parquet, one row a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from rwkv_clip.data.pairs import NO_LABEL, class_number
from rwkv_clip.data.pictures import Record
from rwkv_clip.errors import InputError, nearest

__all__ = ["MANIFEST_SUFFIXES", "ManifestSource"]

MANIFEST_SUFFIXES = (".csv", ".parquet")
CAPTION_PREFIX = "caption"
LABEL = "label"


class ManifestSource:
    """Rows of a manifest that name an image and hold at least one caption; the others are listed in ``problems``.

    Image paths are relative to the manifest. A caption column holds a text, or in Parquet a list of texts; of several
    columns those that are filled count. A column ``label`` of whole numbers gives classes. Rows count from 1.

    Raises:
        InputError: when the file cannot be read, a column is missing, or no row is left.
    """

    def __init__(
        self,
        path: Path,
        image_column: str = "image",
        caption_columns: tuple[str, ...] = (),
        *,
        limit: int | None = None,
    ) -> None:
        self.path, self.problems = path, list[str]()
        table = self._table()
        columns = caption_columns or tuple(name for name in table.column_names if name.startswith(CAPTION_PREFIX))
        if not columns:
            raise InputError(f"{path}: no column begins with {CAPTION_PREFIX!r}; seen: {', '.join(table.column_names)}")
        for name in (image_column, *columns, *({LABEL} & {*table.column_names})):
            self._check_column(name, table.schema)
        self._images = table.column(image_column).combine_chunks()
        self._captions = [table.column(name).combine_chunks() for name in columns]
        self._labels = table.column(LABEL).combine_chunks() if LABEL in table.column_names else None
        self._rows = self._whole_rows(table.num_rows)[:limit]
        if not self._rows:
            raise InputError(
                f"{path}: no row names an image and a caption" + "".join(f"; {p}" for p in self.problems[:1])
            )

    def _check_column(self, name: str, schema: pa.Schema) -> None:
        """Raise InputError unless there is one such column, of texts, of lists of them, or of what has a plain text."""
        found = len(schema.get_all_field_indices(name))
        if not found:
            raise InputError(f"{self.path}: no column {name!r}{nearest(name, schema.names)}")
        if found > 1:
            raise InputError(f"{self.path}: {found} columns are called {name!r}")
        kind = schema.field(name).type
        inner = kind.value_type if _is_list(kind) or pa.types.is_dictionary(kind) else kind
        if pa.types.is_nested(inner) or _is_binary(inner):
            raise InputError(f"{self.path}: column {name!r} holds {kind}, expected text")

    def _table(self) -> pa.Table:
        try:
            if self.path.suffix == ".parquet":
                return pyarrow.parquet.read_table(self.path)
            return self._csv()
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise InputError(f"cannot read the manifest {self.path}: {error}") from error

    def _csv(self) -> pa.Table:
        """All columns as text, so that a caption such as 007 or NA stays what it is."""
        skip = pyarrow.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=lambda _: "skip")
        with pyarrow.csv.open_csv(self.path, parse_options=skip) as reader:
            names = reader.schema.names
        convert = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            check_utf8=False,  # of each row for itself, below
        )
        parse = pyarrow.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=self._note_row)
        read = pyarrow.csv.ReadOptions(use_threads=False)  # with threads, rows that do not parse have no number
        return pyarrow.csv.read_csv(self.path, read_options=read, parse_options=parse, convert_options=convert)

    def _note_row(self, row: Any) -> str:
        self.problems.append(f"{self.path} line {row.number}: {row.actual_columns} columns, not {row.expected_columns}")
        return "skip"

    def _whole_rows(self, count: int) -> list[int]:
        whole = []
        for row in range(count):
            if problem := self._problem(row):
                self.problems.append(f"{self.path} row {row + 1}: {problem}")
            else:
                whole.append(row)
        return whole

    def _problem(self, row: int) -> str | None:
        try:
            if not self._images[row].as_py():
                return "no image"
            return None if self._texts(row) else "no caption"
        except UnicodeDecodeError as error:
            return f"no UTF-8: {error.object!r}"

    def _texts(self, row: int) -> list[str]:
        values = (column[row].as_py() for column in self._captions)
        texts = (text for value in values for text in (value if isinstance(value, list) else [value]))
        return [str(text) for text in texts if text is not None and str(text).strip()]

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, index: int) -> str:
        """The row and the image it names."""
        row = self._rows[index]
        return f"{self.path} row {row + 1}, image {self._images[row].as_py()}"

    def captions(self, index: int) -> list[str]:
        """The texts of a row's caption columns."""
        return self._texts(self._rows[index])

    def read(self, index: int) -> Record:
        """Read a row and its image file; raises OSError when that cannot be read."""
        row = self._rows[index]
        label = None if self._labels is None else self._labels[row].as_py()
        image = (self.path.parent / str(self._images[row].as_py())).read_bytes()
        return Record(image, self._texts(row), NO_LABEL if label is None else class_number(label))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))

"""Rows of data files: JSON lines, a JSON list, CSV, TSV, Parquet, and each of them in gzip, by the extension. Knows no column.

Lines, cells and record batches are read one after the other; a JSON list is read whole, and so is bounded
(`files.MOST_JSON`).
"""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import math
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any

from slime_tandem.errors import DataError
from slime_tandem.files import MOST_JSON, parse_json

Row = tuple[str, dict[str, Any] | DataError]
"""(file and line, the row); in the place of a row that cannot be read, what is wrong with it."""

EXAMPLE = 'e.g. {"prompt": "2 + 2 =", "label": "4"}'
_BOM = b"\xef\xbb\xbf"


def rows_of(path: Path) -> Generator[Row]:
    """The rows of a file, in order, without blank lines. A name without an extension that is known is read as JSON lines.

    Raises DataError for a file that is missing or unreadable as a whole: no gzip, no Parquet, no table, a line without end.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = "".join(suffixes[-2:-1] if packed else suffixes[-1:])
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            yield from _READERS.get(kind, _lines)(file, str(path))  # type: ignore[arg-type]
    except FileNotFoundError:
        raise DataError("path", str(path), "an existing file", "check tasks.*.path") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        expected = f"a readable file of UTF-8 text, Parquet, or gzip of these ({why})"
        remedy = "give JSON lines, JSON, CSV or Parquet; the extension says which"
        raise DataError("path", str(path), expected, remedy) from None


def _lines(file: IO[bytes], path: str) -> Iterator[Row]:
    number = 0
    while line := file.readline(MOST_JSON + 1):  # cut at \n alone: JSON may hold U+2028, which splitlines cuts at
        number += 1
        where = f"{path}:{number}"
        if len(line) > MOST_JSON:
            raise DataError(where, _shown(line), f"a line of at most {MOST_JSON} bytes", "split what is in it")
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        try:
            yield where, _object(parse_json(line.rstrip(b"\n")), where, line)
        except UnicodeDecodeError as error:
            yield where, DataError(where, _shown(line), f"UTF-8 text ({error.reason})", "save the file as UTF-8")
        except ValueError as error:
            yield where, DataError(where, _shown(line), f"one JSON object ({error})", EXAMPLE)


def _json(file: IO[bytes], path: str) -> Iterator[Row]:
    """A list of objects; what does not begin like a list is read as JSON lines, which are often called `.json`, too."""
    head = file.peek(4096) if isinstance(file, io.BufferedReader) else file.read(4096)
    if not isinstance(file, io.BufferedReader):
        file.seek(0)
    if not head.removeprefix(_BOM).lstrip().startswith(b"["):
        yield from _lines(file, path)
        return
    try:
        rows = parse_json(file.read(MOST_JSON + 1).removeprefix(_BOM))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise DataError(
            "path", path, f"a JSON list of objects ({error})", "mend it, or save it as JSON lines"
        ) from None
    for number, row in enumerate(rows, start=1):
        where = f"{path}: entry {number}"
        yield where, _object(row, where, b"" if isinstance(row, dict) else repr(row).encode("utf-8", "replace"))


def _csv(file: IO[bytes], path: str, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(MOST_JSON)
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        names: list[str] | None = None
        while True:
            where = f"{path}:{reader.line_num + 1}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                row: Any = DataError(where, None, f"a row of CSV ({error})", "mend this row, quotes first")
                if names is None:
                    raise row from None
                yield where, row
                continue
            if names is None:
                names = cells
                if not cells or len(set(names)) < len(names) or not all(names):
                    raise DataError(where, names, "a row with the columns' names, each once", "name every column")
            elif len(cells) == len(names):
                yield where, dict(zip(names, cells, strict=True))
            elif cells:
                expected = f"{len(names)} cells, one for each of {', '.join(names)}"
                yield where, DataError(where, f"{len(cells)} cells", expected, "quote cells that hold the delimiter")


def _tsv(file: IO[bytes], path: str) -> Iterator[Row]:
    return _csv(file, path, "\t")


def _parquet(file: IO[bytes], path: str) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        expected, remedy = "pyarrow, which reads Parquet", "pip install 'slime-tandem[diagnostics]'"
        raise DataError("path", path, expected, remedy) from None
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                where = f"{path}: row {number}"
                try:
                    yield where, _plain(row)
                except ValueError as error:
                    yield where, DataError(where, None, f"text, numbers, lists and objects ({error})", "leave it out")
    except pyarrow.ArrowException as error:
        why = str(error).split("\n")[0][:200]
        raise DataError("path", path, f"a readable Parquet file ({why})", "restore the file") from None


_READERS: dict[str, Callable[[IO[bytes], str], Iterator[Row]]] = {
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}


def _object(value: Any, where: str, line: bytes) -> dict[str, Any] | DataError:
    return value if isinstance(value, dict) else DataError(where, _shown(line), "a JSON object", EXAMPLE)


def _shown(line: bytes) -> str:
    return line[:320].decode("utf-8", "replace").rstrip("\n")[:80]


def _plain(value: Any) -> Any:
    """A value of Parquet as JSON has it. A null of a struct or a row is a key that is not there: columns hold all keys of all
    rows. Raises ValueError for what JSON has not."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    raise ValueError(f"{type(value).__name__} in a column")

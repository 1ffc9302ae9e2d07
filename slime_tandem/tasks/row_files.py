"""Rows of data files, by number: JSON lines, a JSON list, CSV, TSV, Parquet, and each of them in gzip.

Knows no column. A file is passed over once, for where its rows begin and for its SHA-256; a row is read when it is asked for.
In memory are eight bytes a row. What cannot be read from the middle is written out once, into a file without a name that goes
with the process: gzip as it unpacks, Parquet as Arrow. A JSON list is read whole, and so is bounded (`files.MOST_JSON`).
"""

from __future__ import annotations

import bisect
import csv
import datetime
import decimal
import gzip
import hashlib
import io
import itertools
import math
import os
import shutil
import stat
import tempfile
import weakref
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slime_tandem.errors import DataError
from slime_tandem.files import MOST_JSON, parse_json

Row = tuple[str, dict[str, Any] | DataError | None]
"""(file and line, the row); in the place of a row that cannot be read, what is wrong with it; None: a blank line."""

EXAMPLE = 'e.g. {"prompt": "2 + 2 =", "label": "4"}'
EXTRA = "pip install 'slime-tandem[data]'"
_BOM = b"\xef\xbb\xbf"
_TURNS = ("messages", "prompt", "conversations")
"""Keys of a row whose lists of objects are no rows."""
_CHUNK = 2**24
_BATCH = 2**14


class Source(NamedTuple):
    """What rows are from, so that another file of the same name is noticed: bytes, and a digest of all of them."""

    name: str
    size: int
    digest: str


class Rows(Protocol):
    """The rows of one file; `len` counts blank lines, too."""

    source: Source

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row: ...


def open_rows(path: Path) -> Rows:
    """The rows of a file, by its extension; a name without one that is known is read as JSON lines.

    Raises DataError for what is missing or unreadable as a whole: no gzip, no Parquet, no table.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = "".join(suffixes[-2:-1] if packed else suffixes[-1:])
    read = _READERS.get(kind, _lines)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe waits for its writer
            expected = "a file: rows are read again from any place of it, which a pipe or a device cannot do"
            raise DataError("path", str(path), expected, "write what comes out of it into a file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if packed:
                digest = _digest(file)
                with tempfile.TemporaryFile() as plain:
                    _unpack(path, plain)
                    _refuse_other(plain, str(path), kind)
                    return read(plain, Source(str(path), size, digest))
            _refuse_other(file, str(path), kind)
            return read(file, Source(str(path), size, ""))
    except FileNotFoundError:
        raise DataError("path", str(path), "an existing file", "check tasks.*.path") from None
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        expected = f"a readable file of UTF-8 text, Parquet, or gzip of these ({why})"
        remedy = "give JSON lines, JSON, CSV or Parquet; the extension says which"
        raise DataError("path", str(path), expected, remedy) from None


_MARKS = {
    b"PAR1": ("Parquet", "name it .parquet"),
    b"\x1f\x8b": ("gzip", "let its name end with .gz, as in rows.jsonl.gz"),
    b"PK\x03\x04": ("zip (as .xlsx, too)", "unpack it, or save the sheet as CSV"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unpack it, or pack it by gzip"),
    b"\xfd7zXZ\x00": ("xz", "unpack it, or pack it by gzip"),
    b"BZh": ("bzip2", "unpack it, or pack it by gzip"),
    b"ARROW1": ("Arrow", "save it as Parquet"),
    b"\xff\xfe": ("UTF-16 or UTF-32", "save the file as UTF-8"),
    b"\xfe\xff": ("UTF-16", "save the file as UTF-8"),
}
"""What files of other kinds begin with, and what to do; no text of UTF-8 that is a row begins so."""


def _refuse_other(file: IO[bytes], name: str, kind: str) -> None:
    """Raise DataError for a file that is not of the kind that its extension says, where the first bytes tell of which it is."""
    head = file.read(8)
    file.seek(0)
    for mark, (found, remedy) in _MARKS.items():
        if head.startswith(mark) and (found, kind) != ("Parquet", ".parquet"):
            expected = f"{_KINDS.get(kind, 'JSON lines')}, as its extension says; it begins as {found} does"
            raise DataError("path", name, expected, remedy)


def _unpack(path: Path, plain: IO[bytes]) -> None:
    """Write out what is in a file of gzip. Raises DataError for one that is cut off, damaged, or none."""
    try:
        with gzip.open(path, "rb") as unpacked:
            shutil.copyfileobj(unpacked, plain, _CHUNK)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        remedy = "fetch or pack it again; if it is not packed, let its name not end with .gz"
        raise DataError("path", str(path), f"a whole file of gzip ({error})", remedy) from None
    plain.flush()
    plain.seek(0)


class _Bytes:
    """An open file, of which any part can be read; it must stay as it is."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._fd, self._name = os.dup(file.fileno()), name
        weakref.finalize(self, os.close, self._fd)
        self._then = self._now()

    def _now(self) -> tuple[int, int]:
        state = os.fstat(self._fd)
        return state.st_size, state.st_mtime_ns

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop); raises DataError if the file was written to since it was opened."""
        if self._now() != self._then:
            expected = "the file as it was when the job started: rows are read when they are drawn"
            raise DataError("path", self._name, expected, "start again; write new data to another file")
        return os.pread(self._fd, stop - start, start)


class _LineRows:
    """JSON lines, cut at \\n alone: JSON may hold U+2028, which splitlines cuts at."""

    def __init__(self, data: _Bytes, starts: npt.NDArray[np.uint64], source: Source) -> None:
        self._data, self._starts, self.source = data, starts, source

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Row:
        where = f"{self.source.name}:{number + 1}"
        start, stop = int(self._starts[number]), int(self._starts[number + 1])
        line = self._data.read(start, min(stop, start + MOST_JSON + 1))
        if len(line) > MOST_JSON:
            return where, DataError(where, _shown(line), f"a line of at most {MOST_JSON} bytes", "split what is in it")
        if number == 0:
            line = line.removeprefix(_BOM)
        if not line.strip():
            return where, None
        try:
            return where, _object(parse_json(line.rstrip(b"\n")), where, line)
        except UnicodeDecodeError as error:
            return where, DataError(where, _shown(line), f"UTF-8 text ({error.reason})", "save the file as UTF-8")
        except ValueError as error:
            return where, DataError(where, _shown(line), f"one JSON object ({error})", EXAMPLE)


class _CsvRows:
    """CSV: `starts` of rows, the number of the line that each begins in, and the names of the columns."""

    def __init__(
        self, data: _Bytes, starts: npt.NDArray[np.uint64], lines: Sequence[int], source: Source, delimiter: str
    ) -> None:
        self._data, self._starts, self._lines, self._delimiter = data, starts, lines, delimiter
        self.source = source
        first = next((i for i in range(len(starts) - 1) if data.read(int(starts[i]), int(starts[i + 1])).strip()), None)
        self._skipped = len(starts) - 1 if first is None else first + 1
        self._names: list[str] = []
        if first is None:
            return
        names = self._cells(first)
        where = f"{source.name}:{self._line(first)}"
        if isinstance(names, DataError):
            raise names
        names = [name.strip() for name in names]
        if not names or len(set(names)) < len(names) or not all(names):
            remedy = (
                "save it without the index (pandas: index=False)" if names[:1] == [""] else "name every column, once"
            )
            raise DataError(where, names, "a row with the columns' names, each once", remedy)
        if any("\0" in name for name in names):
            raise DataError(where, names, "UTF-8 text, which has no zero bytes here", "save the file as UTF-8")
        if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
            expected = f"columns with {delimiter!r} between them, not {other!r}"
            remedy = "name it .tsv" if other == "\t" else "save it with commas between cells"
            raise DataError(where, names[0], expected, remedy)
        self._names = names

    def __len__(self) -> int:
        return len(self._starts) - 1 - self._skipped

    def __getitem__(self, number: int) -> Row:
        where, cells = f"{self.source.name}:{self._line(number + self._skipped)}", self._cells(number + self._skipped)
        if isinstance(cells, DataError):
            return where, cells
        if not cells:
            return where, None
        if len(cells) != len(self._names):
            expected = f"{len(self._names)} cells, one for each of {', '.join(self._names)}"
            return where, DataError(where, f"{len(cells)} cells", expected, "quote cells that hold the delimiter")
        return where, dict(zip(self._names, cells, strict=True))

    def _line(self, row: int) -> int:
        return self._lines[row] + 1

    def _cells(self, row: int) -> list[str] | DataError:
        where = f"{self.source.name}:{self._line(row)}"
        raw = self._data.read(int(self._starts[row]), int(self._starts[row + 1]))
        csv.field_size_limit(MOST_JSON)
        try:
            text = raw.decode("utf-8-sig" if row == 0 else "utf-8")
            return next(csv.reader([text], delimiter=self._delimiter, strict=True), [])
        except csv.Error as error:
            return DataError(where, None, f"a row of CSV ({error})", "mend this row, quotes first")
        except UnicodeDecodeError as error:
            return DataError(where, _shown(raw), f"UTF-8 text ({error.reason})", "save the file as UTF-8")


class _ListRows:
    """The entries of a JSON list."""

    def __init__(self, rows: Sequence[Any], source: Source) -> None:
        self._rows, self.source = rows, source

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        row, where = self._rows[number], f"{self.source.name}: entry {number + 1}"
        return where, _object(row, where, b"" if isinstance(row, dict) else repr(row).encode("utf-8", "replace"))


class ArrowRows:
    """Rows of Arrow: `take(number)` gives one as Arrow makes Python of it. `names`: of its columns."""

    def __init__(
        self, count: int, take: Callable[[int], dict[str, Any]], source: Source, names: Sequence[str] = ()
    ) -> None:
        twice = [name for name, times in Counter(names).items() if times > 1]
        if twice:
            expected = f"columns with names of their own; there are several called {', '.join(twice)}"
            raise DataError("path", source.name, expected, "rename or drop all but one")
        self._count, self._take, self.source = count, take, source

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Row:
        where, row = f"{self.source.name}: row {number + 1}", self._take(number)
        if nulls := [name for name, value in row.items() if value is None]:
            where += f" (null: {', '.join(nulls)[:80]})"
        plain = {}
        for name, value in row.items():
            try:
                plain[name] = _plain(value)
            except ValueError as error:
                expected = f"text, numbers, lists and objects ({error})"
                return where, DataError(
                    f"{where} {name}", f"{value!r:.80}", expected, "leave this column out, or convert it"
                )
        return where, {name: value for name, value in plain.items() if value is not None}


def _lines(file: IO[bytes], source: Source) -> Rows:
    ends, digest, _ = _pass(file)
    return _LineRows(_Bytes(file, source.name), ends, source._replace(digest=source.digest or digest))


def _json(file: IO[bytes], source: Source) -> Rows:
    """A list of objects; what does not begin like a list is read as JSON lines, which are often called `.json`, too."""
    head = file.read(4096)
    file.seek(0)
    if not head.removeprefix(_BOM).lstrip().startswith(b"["):
        rows = _lines(file, source)
        _refuse_object(file, source)
        return rows
    text = file.read(MOST_JSON + 1)
    try:
        values = parse_json(text.removeprefix(_BOM))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise DataError(
            "path", source.name, f"a JSON list of objects ({error})", "mend it, or save it as JSON lines"
        ) from None
    return _ListRows(values, source._replace(digest=source.digest or hashlib.sha256(text).hexdigest()))


def _refuse_object(file: IO[bytes], source: Source) -> None:
    """Raise DataError for one object that holds the rows in a list, as `{"data": [...]}`: nobody guesses by which key."""
    file.seek(0)
    text = file.read(MOST_JSON + 1)
    try:
        value = parse_json(text.removeprefix(_BOM))
    except ValueError:  # several lines, or broken: each line says why
        return
    if not isinstance(value, dict):  # a line of its own says that it is no object
        return
    held = [key for key, rows in value.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
    if len(held) == 1 and held[0] not in _TURNS:
        expected = f"a list of objects, or an object a line; here the rows are under the key `{held[0]}`"
        remedy = f"save that list alone, e.g. jq -c '.{held[0]}[]' FILE > rows.jsonl"
        raise DataError("path", source.name, expected, remedy)


def _csv(file: IO[bytes], source: Source, delimiter: str = ",") -> Rows:
    ends, digest, plain = _pass(file, table=True)
    lines: Sequence[int] = range(len(ends) - 1)
    if not plain:  # a cell may hold the end of a line
        ends, lines = _rows_of_csv(file, delimiter)
    return _CsvRows(_Bytes(file, source.name), ends, lines, source._replace(digest=source.digest or digest), delimiter)


def _tsv(file: IO[bytes], source: Source) -> Rows:
    return _csv(file, source, "\t")


def _rows_of_csv(file: IO[bytes], delimiter: str) -> tuple[npt.NDArray[np.uint64], Sequence[int]]:
    """(where rows begin, and the end of the last; the lines that they begin in), as csv reads the file."""
    csv.field_size_limit(MOST_JSON)
    file.seek(0)
    begin = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
    file.seek(begin)
    starts, lines, spent = array("Q", [0]), array("Q"), [begin]
    # Latin-1 has a character for each byte: positions are those of the file, and no mark of CSV is part of a UTF-8 letter.
    text = io.TextIOWrapper(file, encoding="latin-1", newline="")
    reader = csv.reader(_counted(text, spent), delimiter=delimiter, strict=True)
    while True:
        began = reader.line_num
        try:
            next(reader)
        except StopIteration:
            text.detach()
            return np.frombuffer(starts, dtype=np.uint64), lines
        except csv.Error:  # told when the row is read
            pass
        starts.append(spent[0])
        lines.append(began)


def _counted(lines: Iterable[str], spent: list[int]) -> Iterator[str]:
    for line in lines:
        spent[0] += len(line)
        yield line


def _pass(file: IO[bytes], *, table: bool = False) -> tuple[npt.NDArray[np.uint64], str, bool]:
    """(where lines begin, and the end of the last; the SHA-256; whether each line is a row of CSV: no quotes, no bare \\r).

    Of a `table` of which it is not, the lines are not kept.
    """
    file.seek(0)
    sha, at, plain = hashlib.sha256(), 0, True
    parts = [np.zeros(1, dtype=np.uint64)]
    with ThreadPoolExecutor(1) as beside:  # hashing lets go of the interpreter, and takes longer than the search
        hashed = None
        while chunk := file.read(_CHUNK):
            if chunk.endswith(b"\r"):
                chunk += file.read(1)
            if hashed is not None:
                hashed.result()
            hashed = beside.submit(sha.update, chunk)
            plain = plain and b'"' not in chunk and chunk.count(b"\r") == chunk.count(b"\r\n")
            if plain or not table:
                ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == 10).astype(np.uint64)
                parts.append(ends + np.uint64(at + 1))
            else:
                del parts[1:]
            at += len(chunk)
    last = next(int(part[-1]) for part in reversed(parts) if part.size)
    if last != at:
        parts.append(np.array([at], dtype=np.uint64))
    return np.concatenate(parts), sha.hexdigest(), plain


def _digest(file: IO[bytes]) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type] # it is buffered


def _parquet(file: IO[bytes], source: Source) -> Rows:
    """Parquet is packed by the column: written out as Arrow, of which any row can be read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("path", source.name, "pyarrow, which reads Parquet", EXTRA) from None
    digest = source.digest or _digest(file)
    try:
        packed = pyarrow.parquet.ParquetFile(file)
        with tempfile.NamedTemporaryFile(suffix=".arrow") as plain:
            with pyarrow.ipc.new_file(plain.name, packed.schema_arrow) as out:
                for batch in packed.iter_batches(batch_size=_BATCH):
                    out.write_batch(batch)
            opened = pyarrow.ipc.open_file(pyarrow.memory_map(plain.name))
    except (pyarrow.ArrowException, OSError) as error:
        why = str(error).split("\n")[0][:200]
        raise DataError("path", source.name, f"a readable Parquet file ({why})", "restore the file") from None
    batches = [opened.get_batch(i) for i in range(opened.num_record_batches)]  # of the memory map: no bytes are read
    firsts = [0, *itertools.accumulate(batch.num_rows for batch in batches)]

    def take(number: int) -> dict[str, Any]:
        i = bisect.bisect_right(firsts, number) - 1
        row: dict[str, Any] = batches[i].slice(number - firsts[i], 1).to_pylist()[0]
        return row

    return ArrowRows(firsts[-1], take, source._replace(digest=digest), opened.schema.names)


_READERS: dict[str, Callable[[IO[bytes], Source], Rows]] = {
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}
_KINDS = {".json": "JSON", ".csv": "CSV", ".tsv": "TSV", ".parquet": "Parquet"}


def _object(value: Any, where: str, line: bytes) -> dict[str, Any] | DataError:
    return value if isinstance(value, dict) else DataError(where, _shown(line), "a JSON object", EXAMPLE)


def _shown(line: bytes) -> str:
    return line[:320].decode("utf-8", "replace").rstrip("\n")[:80]


def _plain(value: Any) -> Any:
    """A value of Arrow as JSON has it. A null of a struct or a row is a key that is not there: columns hold all keys of all
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

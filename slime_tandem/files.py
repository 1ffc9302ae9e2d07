"""Files that are there whole or not at all, and texts that are read or refused.

JSON that people and this project write is read strictly here, so that no reader of it can end in anything but one sentence:
no key twice, no NaN, no number beyond 64 bits, no half of a surrogate pair, bounded in depth and length.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from slime_tandem.errors import ConfigError, DataError, RunDirError, printable

T = TypeVar("T")
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}
MOST_JSON = 2**26
"""Characters of one JSON text, or of one line of a JSONL file: 64 Mi."""
DEPTH = 64
"""Levels of nesting of JSON and YAML: nothing that is read here has more than ten."""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path`, fsynced, when the block ends, and is removed on an error.

    What a killed process leaves is a hidden file `.NAME.PID.unfinished`; two processes that write one file do not meet.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def resolved(path: Path, field: str) -> Path:
    """The path without links; raises ConfigError, which names `field`, for links in a circle and for what is no path."""
    try:
        return path.resolve()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # a circle is a RuntimeError until Python 3.13, a NUL a ValueError
        raise ConfigError(field, str(path), f"a path that leads to one place ({error})", "correct it") from None


def require_place(path: Path, field: str) -> None:
    """Refuse before the work, not after it, a file that could not be written: raises RunDirError, which names `field`."""
    if path.is_dir() or not path.parent.is_dir():
        raise RunDirError(field, str(path), "a file in an existing folder", "make the folder, or name another file")


def read_text(path: Path, what: str) -> str:
    """The text of a UTF-8 file; raises DataError, which names `what` it should have been, for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a NUL in the path, or no UTF-8
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataError(what, str(path), f"a readable UTF-8 file ({why})", "restore the file") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file, read strictly; raises ValueError, told in a phrase, and OSError."""
    with path.open("rb") as file:
        return parse_json(file.read(MOST_JSON + 1))


def fingerprint(path: Path, size: int | None = None) -> tuple[int, str]:
    """(bytes, their SHA-256) of a file, or of no more than its first `size` bytes. Raises OSError."""
    sha, left = hashlib.sha256(), path.stat().st_size if size is None else size
    read = 0
    with path.open("rb") as file:
        while part := file.read(min(2**20, left - read)):
            sha.update(part)
            read += len(part)
    return read, sha.hexdigest()


def is_file_name(name: str) -> bool:
    """Whether a name that a file holds can only mean a file in one folder: no path, no way up, nothing that cannot be shown.

    >>> [is_file_name(name) for name in ("__0_0.distcp", "../a", "/a", "a\\\\b", "..", "", "a\\0")]
    [True, False, False, False, False, False, False]
    """
    return 0 < len(name) <= 255 and name not in (".", "..") and not set("/\\") & set(name) and name.isprintable()


def csv_cell(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: text that begins like one gets a `'` in front (OWASP, CSV injection).

    >>> [csv_cell(cell) for cell in ("=1+1", "@x", "-0.5", -0.5, "a-b", None)]
    ["'=1+1", "'@x", "'-0.5", -0.5, 'a-b', None]
    """
    if not isinstance(cell, str):
        return cell
    text = printable(cell)  # a carriage return, which csv does not quote, would begin a row
    begins = text.lstrip("\ufeff").lstrip()[
        :1
    ]  # white space of any kind; a full-width sign may be read as the plain one
    return f"'{text}" if begins in tuple("=+-@\uff1d\uff0b\uff0d\uff20") or text[:1] in tuple("\t\n") else text


def parse_json(text: str | bytes, *, surrogates: bool = False) -> Any:
    """The value of a JSON text, read strictly (see above). Raises ValueError with a phrase that fits behind "JSON".

    `surrogates`: take halves of surrogate pairs, which stand for broken bytes in what a model wrote.

    >>> parse_json('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' stands twice
    """
    if len(text) > MOST_JSON:
        raise ValueError(f"{len(text)} characters, more than {MOST_JSON}")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_once, parse_int=_integer, parse_float=_finite, parse_constant=_no_constant
        )
    except RecursionError:
        raise ValueError(f"more than {DEPTH} levels") from None
    if text.count("[") + text.count("{") > DEPTH:
        _require_shallow(value)
    if not surrogates and "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return value


def record_of(kind: type[T], value: Any) -> T:
    """`value` (of a JSON text) as a `kind`, strictly: nothing is converted. Raises ValueError that names the first wrong field.

    >>> record_of(dict[str, int], {"a": "1"})
    Traceback (most recent call last):
    ValueError: a='1': expected a valid integer
    """
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    try:
        made: T = _ADAPTERS[kind].validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = " ".join(".".join(str(part) for part in first["loc"] if part != "[key]").split()) or "the whole"
        expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if first["type"] == "missing":
            raise ValueError(f"{where} is missing") from None
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{where} is no field that is known") from None
        shown = repr(first["input"])  # never deep: `parse_json` bounds it
        raise ValueError(f"{where}={shown[:80] + ('...' if len(shown) > 80 else '')}: expected {expected}") from None
    return made


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:100]!r} stands twice")
    return made


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= 20 else 2**64
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"the number {digits[:30]} has more than 64 bits")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:30]} is beyond the largest")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, list | dict)]
        if not level:
            return
    raise ValueError(f"more than {DEPTH} levels")

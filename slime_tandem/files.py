"""Files that are there whole or not at all, and texts that are read or refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from slime_tandem.errors import DataError, RunDirError


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


def require_place(path: Path, field: str) -> None:
    """Refuse before the work, not after it, a file that could not be written: raises RunDirError, which names `field`."""
    if path.is_dir() or not path.parent.is_dir():
        raise RunDirError(field, str(path), "a file in an existing folder", "make the folder, or name another file")


def read_text(path: Path, what: str) -> str:
    """The text of a UTF-8 file; raises DataError, which names `what` it should have been, for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataError(what, str(path), f"a readable UTF-8 file ({why})", "restore the file") from None

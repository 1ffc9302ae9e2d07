"""Rows of what the library `datasets` holds: a folder that it saved, or a dataset of the Hugging Face hub.

Both are Arrow files in a memory map. Nothing of a dataset is run as code: versions of `datasets` that could are not taken.
Knows no column.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slime_tandem.errors import DataError
from slime_tandem.tasks.row_files import EXTRA, ArrowRows, Source

_OLDEST = 4
"""The first version of `datasets` that runs no code of a dataset, whatever it is told."""


class HubName(NamedTuple):
    """A dataset of the hub: `owner/name`, its subset (a configuration, as `main`), split, and revision."""

    name: str
    subset: str | None = None
    split: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        more = [part for part in (self.subset, self.split) if part]
        return f"{self.name}{'@' + self.revision if self.revision else ''}{'[' + '/'.join(more) + ']' if more else ''}"


def saved(folder: Path, split: str | None) -> ArrowRows:
    """The rows of a folder that `save_to_disk` wrote. Raises DataError for any other, and for a split that is not there."""
    kinds = ("dataset_dict.json", "dataset_info.json")
    if not any((folder / name).is_file() for name in kinds):
        expected = f"a file, or a folder that `datasets` saved, with {' or '.join(kinds)}"
        remedy = "name one file of it; what is on the hub goes by tasks[].hub"
        raise DataError("path", str(folder), expected, remedy)
    datasets = _library("path", str(folder))
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # noqa: BLE001 - it raises anything on a broken folder
        why = " ".join(str(error).split())[:200]
        raise DataError("path", str(folder), f"a readable folder of `datasets` ({why})", "save it again") from None
    return _rows(_one(datasets, found, split, "path", str(folder)), str(folder) + (f":{split}" if split else ""))


def from_hub(hub: HubName) -> ArrowRows:
    """The rows of a dataset of the hub, or of the library's cache; raises DataError where neither can be had."""
    if Path(hub.name).exists():  # the library would take that
        expected = f"a dataset of the hub, and no {hub.name} in the folder that you are in"
        raise DataError("hub", hub.name, expected, "name what is on this machine by tasks[].path, or start elsewhere")
    datasets = _library("hub", hub.name)
    try:
        found = datasets.load_dataset(hub.name, hub.subset, split=None, revision=hub.revision)
    except Exception as error:  # noqa: BLE001 - it raises anything, of its own, of the hub's client and of the network
        raise _unloaded(hub, error) from None
    return _rows(_one(datasets, found, hub.split, "hub", hub.name), str(hub))


def _unloaded(hub: HubName, error: Exception) -> DataError:
    """What to say of a dataset that was not loaded."""
    why = " ".join(str(error).split())[:300]
    if isinstance(error, ValueError) and ("onfig name" in why or "BuilderConfig" in why):
        return DataError("hub", hub.name, f"a subset that there is ({why})", "name it by tasks[].subset")
    if "trust_remote_code" in why or "scripts are no longer supported" in why:
        return DataError("hub", hub.name, "data files: code of a dataset is never run", "choose a copy in Parquet")
    expected = (
        f"a dataset of the hub that can be reached, or is in the cache of `datasets` ({type(error).__name__}: {why})"
    )
    remedy = (
        "check the name and your token; without network, load it elsewhere, save it (`save_to_disk`), and name the folder by "
        "tasks[].path"
    )
    return DataError("hub", hub.name, expected, remedy)


def _library(field: str, value: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(field, value, "the library `datasets`, which reads it", EXTRA) from None
    if int(datasets.__version__.split(".")[0]) < _OLDEST:
        raise DataError("datasets", datasets.__version__, f"version {_OLDEST} or newer, which runs no code", EXTRA)
    datasets.disable_progress_bars()
    return datasets


def _one(datasets: Any, found: Any, split: str | None, field: str, name: str) -> Any:
    """The dataset of the split; without one, what there is if that is one."""
    if isinstance(found, datasets.DatasetDict):
        splits = list(found)
        if split is None and len(splits) == 1:
            return found[splits[0]]
        if split not in splits:
            near = difflib.get_close_matches(split or "", splits, n=1)
            remedy = f"did you mean `{near[0]}`?" if near else "name it by tasks[].split"
            raise DataError(f"split of {name}", split, f"one of {', '.join(splits)}", remedy)
        return found[split]
    if split is not None:
        raise DataError(f"split of {name}", split, "none: the folder holds one set of rows", "leave tasks[].split out")
    return found


def _rows(found: Any, name: str) -> ArrowRows:
    table = found.with_format("arrow")  # as it is stored: nothing is decoded, no image, no sound

    def take(number: int) -> dict[str, Any]:
        row: dict[str, Any] = table[number : number + 1].to_pylist()[0]
        return row

    files = [Path(file["filename"]) for file in found.cache_files]
    return ArrowRows(len(found), take, Source(name, sum(file.stat().st_size for file in files), _digest(files)))


def _digest(files: Sequence[Path]) -> str:
    """Of the contents: what the library calls a fingerprint is another one when the same rows are saved again."""
    sha = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()

"""Puts several banks, or several evaluations (shards, checkpoints), into one file. A key that two of them hold is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from slime_tandem.diagnostics.bank import BANK, EVALUATION, Bank, Format, Metadata, OneResponse, writing
from slime_tandem.diagnostics.output import Report, Row, plain, write_report
from slime_tandem.errors import DataError

_MUST_AGREE: dict[str, tuple[str, ...]] = {
    BANK.name: ("k", "missing_mass", "compatibility", "normalisation", "comparison"),
    EVALUATION.name: ("comparison",),
}


def merge(sources: Sequence[Path], output: Path) -> Report:
    """Write the rows of all sources, in their order, and a report beside them. All must be of one kind.

    Raises DataError for kinds, settings or vocabularies that differ, a label that names two pairs of models, and a key that
    is there twice.
    """
    kind = _kind_of(sources[0])
    metas: list[Metadata] = []
    for path in sources:
        with Bank(path, kind) as file:
            metas.append(file.metadata)
    together = _together(sources, metas, kind)
    seen: dict[tuple[Any, ...], Path] = {}
    responses = OneResponse()
    rows = []
    with writing(output, kind, together) as sink:
        for path in sources:
            n = 0
            with Bank(path, kind) as file:
                for table in file.batches():
                    if kind is BANK:
                        responses.check(path, table)
                    for key in zip(*(table.column(name).to_pylist() for name in kind.key), strict=True):
                        if key in seen:
                            where = f"{path}, ({', '.join(kind.key)})"
                            raise DataError(where, key, f"a key that {seen[key]} does not hold", "leave one out")
                        seen[key] = path
                    sink.write(table)
                    n += len(table)
            rows.append(Row("rows from", path.name, plain(float(n)), "rows"))
        if not seen:
            raise DataError("FILES", [str(p) for p in sources], "at least one row", "export or evaluate again")
    rows.append(Row("rows from", "all", plain(float(len(seen))), "rows"))
    report = Report(f"Merged {kind.name}: {output.name}", {"files": len(sources), **together}, rows)
    write_report(report, output.with_suffix(""))
    return report


def _kind_of(path: Path) -> Format:
    """By the file's own word; a file that is neither is refused by `Bank`."""
    try:
        raw = (pq.read_schema(path).metadata or {}).get(b"slime_tandem", b"")
    except (OSError, ValueError):
        raw = b""
    return EVALUATION if EVALUATION.name.encode() in raw else BANK


def _together(sources: Sequence[Path], metas: Sequence[Metadata], kind: Format) -> Metadata:
    first = metas[0]
    for path, meta in zip(sources, metas, strict=True):
        for name in _MUST_AGREE[kind.name]:
            if meta[name] != first[name]:
                remedy = "merge files that were made alike"
                raise DataError(f"{path}, {name}", meta[name], f"{first[name]!r}, as in {sources[0]}", remedy)
        for role in ("student", "teacher") if kind is BANK else ():
            if meta[role]["vocabulary"] != first[role]["vocabulary"]:
                remedy = "merge banks of the same tokenizers"
                raise DataError(f"{path}, vocabulary of the {role}", meta[role], str(first[role]), remedy)
    out: Metadata = {name: first[name] for name in kind.metadata}
    out["banks"] = sorted({bank for meta in metas for bank in meta["banks"]})
    if kind is EVALUATION:
        out["models"] = {}
        for path, meta in zip(sources, metas, strict=True):
            for label, models in meta["models"].items():
                if out["models"].setdefault(label, models) != models:
                    known = out["models"][label]
                    raise DataError(f"{path}, label {label}", models, f"{known}, as before", "give it another label")
    return out

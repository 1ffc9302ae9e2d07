"""The two files of the diagnostics, versioned Parquet that is checked on read: banks of contexts, and evaluations of a bank.

A bank has one row per fixed context, which is named by (sample, position): the student's ids of prompt and response, of which
the first `position` are the context and the next is the sampled token; the same for the teacher in its own ids; the scores
H, D, C of the student that wrote them, and both top-K lists. An evaluation has, per context and label (a checkpoint),
divergences over the full vocabulary.

What belongs to the whole file (version, K, models, vocabularies, which contexts) is JSON in the schema's metadata. How a
context is chosen or scored is not known here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from slime_tandem.config import Compatibility, MissingMass, Normalisation
from slime_tandem.distill.teachability import TopLists
from slime_tandem.errors import DataError
from slime_tandem.files import parse_json, whole_file
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import FloatArray

VERSION = 1
_META = b"slime_tandem"
_STRETCH = 1 << 16
_UNREADABLE = (OSError, ValueError, pa.ArrowException)
"""What reading a damaged file may raise; names that are no UTF-8 are ValueErrors."""
_ROWS = 1024
"""Rows of a row group: what is read at once."""

QUADRANTS = ("", "high H, high D", "high H, low D", "low H, high D", "low H, low D")
"""Names of the column `quadrant`; entropy and divergence against the medians of the batch's valid tokens."""

_IDS, _VALUES = pa.list_(pa.int32()), pa.list_(pa.float64())


Comparison = Literal["tokens", "next_byte"]


class _Model(TypedDict):
    model: str
    vocabulary: str
    weights: str | None


@dataclass(frozen=True)
class Format:
    """A kind of file: its columns, the columns that name a row, and the metadata that it must have."""

    name: str
    schema: Any
    key: tuple[str, ...]
    metadata: dict[str, Any]  # name: type


BANK = Format(
    "fixed-context-bank",
    pa.schema(
        [
            ("sample", pa.string()),  # name of the response
            ("position", pa.int32()),  # response tokens before this one
            ("token", pa.int32()),  # what the student sampled there
            ("prompt_ids", _IDS),
            ("response_ids", _IDS),
            ("teacher_prompt_ids", _IDS),
            ("teacher_response_ids", _IDS),
            ("teacher_position", pa.int32()),
            ("log_prob", pa.float64()),  # of the token, nats; the student's
            ("teacher_log_prob", pa.float64()),
            # distill/teachability.py; the `_line` ones normalised over the batch, not clipped to [0, 1]
            *((name, pa.float64()) for name in ("H", "Ht", "D", "D_reverse", "C", "H_line", "D_line", "C_line")),
            ("quadrant", pa.int8()),  # index into QUADRANTS
            ("weight", pa.float64()),  # valid tokens of the rollout that this row stands for
            ("student_top_ids", _IDS),
            ("student_top_log_probs", _VALUES),
            ("teacher_on_student", _VALUES),  # empty unless the rule for missing mass is `exact`
            ("teacher_top_ids", _IDS),  # in the student's ids
            ("teacher_top_log_probs", _VALUES),
            ("student_on_teacher", _VALUES),
        ]
    ),
    ("sample", "position"),
    {
        "banks": list[str],
        "k": Annotated[int, Field(ge=1)],
        "missing_mass": MissingMass,
        "compatibility": Compatibility,
        "normalisation": Normalisation,
        "comparison": Comparison,
        "student": _Model,
        "teacher": _Model,
    },
)
EVALUATION = Format(
    "fixed-context-evaluation",
    pa.schema(
        [
            ("label", pa.string()),
            ("sample", pa.string()),
            ("position", pa.int32()),
            *(
                (name, pa.float64())  # nats, over the full vocabulary; kl is KL(teacher || student)
                for name in ("kl", "reverse_kl", "student_entropy", "teacher_entropy", "log_prob", "teacher_log_prob")
            ),
        ]
    ),
    ("label", "sample", "position"),
    {"banks": list[str], "comparison": Comparison, "models": dict[str, dict[str, Any]]},
)

Metadata = dict[str, Any]


def vocabulary_of(tokens: TokenBytes) -> str:
    """Sixteen hex digits that name a tokenizer's table, special ids and ends of turn.

    >>> a = TokenBytes((b"a", None), frozenset({1}), frozenset({1}))
    >>> vocabulary_of(a) == vocabulary_of(TokenBytes((b"a", None), frozenset({1}), frozenset({1})))
    True
    """
    facts = [str(tokens.fingerprint), sorted(tokens.special), sorted(tokens.eos_ids)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def weights_fingerprint(folder: Path) -> str | None:
    """Sixteen hex digits that name a folder's weights, None without any: of each safetensors file size and three stretches.

    Training changes every weight, so stretches of 64 KiB tell checkpoints apart without reading all of them.
    """
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            for start in (0, size // 2, max(0, size - _STRETCH)):
                data.seek(start)
                digest.update(data.read(_STRETCH))
    return digest.hexdigest()[:16] if files else None


def bank_id(table: pa.Table) -> str:
    """Sixteen hex digits that name the contexts of a bank: which positions of which ids."""
    digest = hashlib.sha256()
    names = [
        "sample",
        "position",
        "prompt_ids",
        "response_ids",
        "teacher_prompt_ids",
        "teacher_response_ids",
        "teacher_position",
    ]
    for batch in table.select(names).to_batches(max_chunksize=_ROWS):
        for row in batch.to_pylist():
            digest.update(json.dumps(list(row.values())).encode())
    return digest.hexdigest()[:16]


class Writer:
    """Rows of one file, written whole or not at all; use `writing`."""

    def __init__(self, kind: Format, sink: pq.ParquetWriter) -> None:
        self._kind, self._sink = kind, sink

    def write(self, table: pa.Table) -> None:
        """Append rows; they must have the format's columns."""
        self._sink.write_table(table.cast(self._kind.schema), row_group_size=_ROWS)


@contextlib.contextmanager
def writing(path: Path, kind: Format, metadata: Mapping[str, Any]) -> Iterator[Writer]:
    """A `Writer` to `path`, which appears when the block ends without an error."""
    assert set(kind.metadata) <= set(metadata), "the format's metadata"
    meta = {"format": kind.name, "version": VERSION, **metadata}
    schema = kind.schema.with_metadata({_META: json.dumps(meta, ensure_ascii=False, allow_nan=False).encode()})
    with whole_file(path) as unfinished, pq.ParquetWriter(
        unfinished, schema, compression="zstd", write_page_checksum=True
    ) as sink:  # fmt: skip
        yield Writer(kind, sink)


class OneResponse:
    """Refuses a second response under a name: its contexts would be scored in the first one's text."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def check(self, path: Path, table: pa.Table) -> None:
        """Look at more rows; raises DataError."""
        columns = [table.column(name).to_pylist() for name in ("sample", "prompt_ids", "response_ids")]
        for name, *ids in zip(*columns, strict=True):
            if self._ids.setdefault(name, hash(tuple(map(tuple, ids)))) != hash(tuple(map(tuple, ids))):
                expected = "one prompt and one response per sample"
                raise DataError(f"{path}, sample", name, expected, "give responses names of their own")


class Bank:
    """A file of either kind, opened and its form checked; rows are checked as they are read. A context manager.

    Raises DataError for a file that is no Parquet, of another kind or version, without a column or with one of another type.
    """

    def __init__(self, path: Path, kind: Format) -> None:
        self.path, self.kind = path, kind
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
        except _UNREADABLE as error:
            why = " ".join(str(error).split())[:200]
            raise DataError("FILE", str(path), f"a Parquet file ({why})", "check the path") from None
        self.metadata = self._checked_metadata()
        schema = self._file.schema_arrow
        for column in kind.schema:
            at = schema.get_field_index(column.name)
            found = None if at < 0 else schema.field(at).type
            # The name of a list's entries is the writer's affair.
            if found is None or not _same_type(found, column.type):
                raise DataError(
                    f"{path}, column {column.name}",
                    "missing" if found is None else str(found),
                    f"type {column.type}, as version {VERSION} of {kind.name} has it",
                    "write the file again with this version's tools",
                )

    def __enter__(self) -> Bank:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def _checked_metadata(self) -> Metadata:
        raw = (self._file.schema_arrow.metadata or {}).get(_META)
        try:
            meta = parse_json(raw or b"null")
        except ValueError:
            meta = None
        if not isinstance(meta, dict) or meta.get("format") != self.kind.name:
            found = meta.get("format") if isinstance(meta, dict) else None
            expected = f"a file of kind {self.kind.name}, written by this project's tools"
            raise DataError(f"{self.path}, format", found, expected, "name the right file")
        if meta.get("version") != VERSION:
            remedy = "write it again with this version, or read it with the version that wrote it"
            raise DataError(f"{self.path}, version", meta.get("version"), f"version {VERSION}", remedy)
        for name, kind in self.kind.metadata.items():
            if name not in meta:
                raise DataError(f"{self.path}, metadata {name}", None, "a value", "write the file again")
            try:
                TypeAdapter(kind).validate_python(meta[name], strict=True)
            except ValidationError as error:
                why = error.errors()[0]["msg"]
                raise DataError(f"{self.path}, metadata {name}", meta[name], why, "write it again") from None
        return meta

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """All rows in order, a limited number at once, checked; `columns` are given, all by default.

        Raises DataError for a missing value, a score that is not finite, lists that do not fit, a position outside its
        response, and a key that was there before.
        """
        seen: set[tuple[Any, ...]] = set()
        responses = OneResponse()
        for group in range(self._file.num_row_groups):
            try:
                table = self._file.read_row_group(group, columns=self.kind.schema.names).combine_chunks()
            except _UNREADABLE as error:
                why = " ".join(str(error).split())[:200]
                raise DataError(
                    str(self.path), f"damaged ({why})", "the rows that were written", "write the file again"
                ) from None
            self._check(table)
            if self.kind is BANK:
                responses.check(self.path, table)
            for key in zip(*(table.column(name).to_pylist() for name in self.kind.key), strict=True):
                if key in seen:
                    remedy = "leave one of them out; merge_token_banks.py refuses duplicates as well"
                    raise DataError(f"{self.path}, ({', '.join(self.kind.key)})", key, "each key once", remedy)
                seen.add(key)
            yield table if columns is None else table.select(columns)

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows in memory; raises as `batches`, and DataError for a file without rows."""
        tables = list(self.batches(columns))
        if not sum(map(len, tables)):
            raise DataError(str(self.path), "no rows", "at least one", "export or evaluate again")
        return pa.concat_tables(tables).combine_chunks()

    def _check(self, table: pa.Table) -> None:
        for column in self.kind.schema:
            values = table.column(column.name)
            if values.null_count:
                raise self._bad(
                    table, int(np.flatnonzero(values.is_null().to_numpy())[0]), column.name, None, "a value"
                )
            if pa.types.is_float64(column.type):
                bad = np.flatnonzero(~np.isfinite(values.to_numpy()))
                if len(bad):
                    i = int(bad[0])
                    raise self._bad(table, i, column.name, values[i].as_py(), "a finite number")
        if self.kind is BANK:
            self._check_contexts(table)

    def _check_contexts(self, table: pa.Table) -> None:
        k = int(self.metadata["k"])
        for ids, beside in (
            ("student_top_ids", ("student_top_log_probs", "teacher_on_student")),
            ("teacher_top_ids", ("teacher_top_log_probs", "student_on_teacher")),
        ):
            length = lengths_of(table, ids)
            self._refuse(table, ids, length, length <= k, f"at most K = {k} entries")
            for name in beside:
                n = lengths_of(table, name)
                optional = (
                    name in ("teacher_on_student", "student_on_teacher") and self.metadata["missing_mass"] != "exact"
                )
                fits = (n == length) | (n == 0) if optional else n == length
                self._refuse(table, name, n, fits, f"as many entries as {ids}")
                values = flat(table, name)
                if np.isnan(values).any() or (values > 1e-3).any():
                    wrong = np.isnan(values) | (values > 1e-3)
                    i = int(np.searchsorted(np.cumsum(n), int(np.flatnonzero(wrong)[0]), side="right"))
                    raise self._bad(table, i, name, "a value that is none", "log-probabilities of at most 0")
        for position, ids in (("position", "response_ids"), ("teacher_position", "teacher_response_ids")):
            at, n = table.column(position).to_numpy(), lengths_of(table, ids)
            self._refuse(table, position, at, (at >= 0) & (at < n), f"a position in {ids}")
            if position == "position":
                sampled = flat(table, ids)[np.cumsum(n) - n + at]
                token = table.column("token").to_numpy()
                self._refuse(table, "token", token, token == sampled, "the response's token at that position")
        for name, low, high in (("weight", np.nextafter(0, 1), np.inf), ("quadrant", 1, 4)):
            values = table.column(name).to_numpy()
            self._refuse(
                table, name, values, (values >= low) & (values <= high), f"{name} between {low:g} and {high:g}"
            )

    def _refuse(
        self, table: pa.Table, name: str, values: npt.NDArray[Any], good: npt.NDArray[np.bool_], expected: str
    ) -> None:
        if not good.all():
            i = int(np.flatnonzero(~good)[0])
            raise self._bad(table, i, name, values[i].item(), expected)

    def _bad(self, table: pa.Table, i: int, column: str, value: object, expected: str) -> DataError:
        key = ", ".join(str(table.column(name)[i].as_py()) for name in self.kind.key)
        return DataError(f"{self.path}, {column} of ({key})", value, expected, "write the file again")


def _same_type(a: Any, b: Any) -> bool:
    if pa.types.is_list(a) and pa.types.is_list(b):
        return bool(a.value_type == b.value_type)
    return bool(a == b)


def flat(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """The entries of a list column, all rows behind each other."""
    values: npt.NDArray[Any] = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values


def lengths_of(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    """How many entries a list column has in each row."""
    return np.asarray(table.column(name).combine_chunks().value_lengths().to_numpy(zero_copy_only=False), np.int64)


def _padded(table: pa.Table, name: str, width: int, fill: float) -> npt.NDArray[Any]:
    n = lengths_of(table, name)
    values = flat(table, name)
    out = np.full((len(n), width), fill, values.dtype)
    out[np.arange(width) < n[:, None]] = values
    return out


def top_lists(table: pa.Table, k: int) -> TopLists:
    """The lists of a bank's rows as `teachability` takes them, [N, K], -1 where an entry is missing."""
    exact = bool(len(flat(table, "teacher_on_student")))

    def log_probs(name: str) -> FloatArray:
        return _padded(table, name, k, 0.0)

    return TopLists(
        _padded(table, "student_top_ids", k, -1),
        log_probs("student_top_log_probs"),
        _padded(table, "teacher_top_ids", k, -1),
        log_probs("teacher_top_log_probs"),
        log_probs("teacher_on_student") if exact else None,
        log_probs("student_on_teacher") if exact else None,
    )

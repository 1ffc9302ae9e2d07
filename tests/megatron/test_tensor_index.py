"""`.metadata` as data: what torch writes is read, and from nothing else is an object made or a name looked up."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import pickletools
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType

from slime_tandem.errors import CheckpointError
from slime_tandem.megatron import tensor_index
from slime_tandem.megatron.tensor_index import Chunk, Entry, Place, read_index

REPORTED = b"\x80\x04cpathlib\nPosixPath\n(N}(X\x04\0\0\0nameX\x04\0\0\0evilutb."


def index(
    file: Any = "__0_0.distcp",
    key: str = "decoder.w",
    size: tuple[int, ...] = (4, 2),
    *,
    offset: Any = 0,
    length: Any = 9,
) -> Metadata:
    """An index of one tensor of two chunks."""
    half = (size[0] // 2, *size[1:])
    starts = [(0,) * len(size), (half[0], *(0,) * (len(size) - 1))]
    chunks = [ChunkStorageMetadata(torch.Size(s), torch.Size(half)) for s in starts]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size(size), chunks)
    places = {MetadataIndex(key, s, i): _StorageInfo(file, offset, length) for i, s in enumerate(starts)}
    meta = StorageMeta(checkpoint_id=Path("/somewhere"), save_id="x")
    return Metadata({key: entry, "rng/shard_0_1": BytesStorageMetadata()}, {key: ("model", key)}, places, meta, "1.0.0")


def read(folder: Path, content: object) -> tensor_index.TensorIndex:
    data = content if isinstance(content, bytes) else pickle.dumps(content, protocol=4)
    (folder / ".metadata").write_bytes(data)
    return read_index(folder)


def test_what_torch_pickles_is_read_as_plain_records(tmp_path: Path) -> None:
    found = read(tmp_path, index())
    assert found.tensors == {"decoder.w": Entry(torch.bfloat16, (4, 2), (Chunk((0, 0), (2, 2)), Chunk((2, 0), (2, 2))))}
    assert found.places[("decoder.w", (2, 0))] == Place("__0_0.distcp", 0, 9)
    assert found.others == ("rng/shard_0_1",)


class Called:
    """Pickled as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def test_the_ranks_plans_that_megatron_adds_are_passed_over(tmp_path: Path) -> None:
    """Its own save keeps them in the index, to compare the next save's plans with."""
    whole = index()
    without = read(tmp_path, whole)
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 4)))
    tensor = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), torch.Size((4, 4)))
    items = [
        WriteItem(MetadataIndex("a", torch.Size((0, 0))), WriteItemType.SHARD, tensor_data=tensor),
        WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(3)),
    ]
    whole.all_local_plans = [SavePlan(items), SavePlan([], planner_data={"b": ("b",)})]  # type: ignore[attr-defined]
    assert read(tmp_path, whole) == without


def test_an_early_python_3_11_pickles_a_member_of_an_enum_by_getattr(tmp_path: Path) -> None:
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=4)
    pickler.dispatch_table = copyreg.dispatch_table | {
        _MEM_FORMAT_ENCODING: lambda member: (getattr, (_MEM_FORMAT_ENCODING, member.name))
    }
    pickler.dump(index())
    assert b"getattr" in out.getvalue()
    assert read(tmp_path, out.getvalue()) == read(tmp_path, index())
    for owner, name in ((_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__"), (torch.Size, "numel")):
        with pytest.raises(CheckpointError, match="getattr"):
            read(tmp_path, Called(getattr, (owner, name)))


HOSTILE = {
    "the reported one": REPORTED,
    "a call": pickle.dumps(Called(os.mkdir, ("pwned",)), protocol=4),
    "a call of an allowed name": pickle.dumps(Called(torch.Size, ("x",)), protocol=4),
    "state into a path": pickle.dumps(Called(PosixPath, ("a",), {"name": "evil"}), protocol=4),
    "state into a class": pickle.dumps(Called(getattr, (_MEM_FORMAT_ENCODING, "_value2member_map_")), protocol=4),
    "no opcode": b"\xff",
    "nothing": b"",
    "no end": b"\x80\x04N",
    "protocol 2": pickle.dumps(index(), protocol=2),
    "a number of megabytes": b"\x80\x04\x8b\x00\x00\x10\x00" + b"\x01" * (1 << 20) + b".",
    "a text that is not there": b"\x80\x04X\xff\xff\xff\x7fabc.",
    "a memo of 2 ** 31 places": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "nothing in the memo": b"\x80\x04h\x07.",
    "an endless stack": b"\x80\x04" + b"]" * 100_000 + b".",
    "deep lists": b"\x80\x04" + b"]" * 9_000 + b"a" * 8_999 + b".",
    "a deep tuple as a key": b"\x80\x04}" + b")" + b"\x85" * 1_000_000 + b"Ns.",
    "state twice": b"\x80\x04" + pickle.dumps(index(), protocol=4)[2:-1] + b"}b.",
    "a frame beyond the file": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff" + pickle.dumps(index(), protocol=4)[11:],
    "a later protocol": b"\x80\x09" + pickle.dumps(index(), protocol=4)[2:],
    "an object for a file's name": pickle.dumps(index(torch.strided), protocol=4),
    "a path for a file's name": pickle.dumps(index(PosixPath("__0_0.distcp")), protocol=4),
    "a path for a key": pickle.dumps(index(key=PosixPath("decoder.w")), protocol=4),
    "another end": b"\x80\x04N.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_are_refused_in_one_sentence_and_change_nothing(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"unsafe or damaged \.metadata") as caught:
        read(tmp_path, data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert PosixPath("/a/real").name == "real"
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "whole",
    [
        *(index(file=name) for name in ("../x", "/etc/passwd", "a/b", "..", "", "a\0b", "a\\b", "\x1b[2J", 7, None)),
        *(index(key=key) for key in ("../w", "/w", "a/b", "", "a\0")),
        *(index(offset=bad) for bad in (-1, None, 1.5, True, 2**70)),
        *(index(length=bad) for bad in (0, -9, "9", 2**70)),
        index(size=(2**50, 2)),
        index(size=(2,) * 9),
    ],
    ids=str,
)
def test_names_and_numbers_inside_are_checked(tmp_path: Path, whole: Metadata) -> None:
    with pytest.raises(CheckpointError, match=r"unsafe or damaged \.metadata"):
        read(tmp_path, whole)


def _field(record: Any, name: str, value: Any) -> Metadata:
    whole = index()
    at = {"whole": whole, "entry": whole.state_dict_metadata["decoder.w"]}[record]
    at.__dict__[name] = value
    return whole


ODD: list[Any] = [None, [], {}, "x", -1, (), b"x", 1.5, {"a": 1}, [None]]


@pytest.mark.parametrize("value", ODD, ids=str)
@pytest.mark.parametrize(
    ("record", "name"),
    [("whole", "state_dict_metadata"), ("whole", "storage_data")]
    + [("entry", name) for name in ("properties", "size", "chunks")],
)
def test_a_field_of_another_kind_is_refused_or_means_nothing(
    tmp_path: Path, record: str, name: str, value: Any
) -> None:
    """An index may have no tensors, or a tensor no chunks or dimensions: whoever reads one finds that it is not there."""
    try:
        found = read(tmp_path, _field(record, name, value))
    except CheckpointError:
        return
    assert value in ({}, [], ())
    assert not (found.tensors and found.places and found.tensors["decoder.w"].chunks)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_read_alike_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    good = pickle.dumps(index(), protocol=4)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(
        st.sampled_from(
            [
                good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :],
                good[:at],
                good[:at] + good[at + 1 :],
            ]
        )
    )
    try:
        found = read(tmp_path_factory.getbasetemp(), bad)
    except CheckpointError:
        return
    # What is accepted makes the same of `pickle.load`, whose classes have the same fields by the same names.
    real = pickle.loads(bad)
    assert {k for k, v in real.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)} == set(
        found.tensors
    )
    for place, info in real.storage_data.items():
        if place.fqn in found.tensors:
            assert found.places[place.fqn, tuple(place.offset or ())].file == info.relative_path


def test_every_opcode_that_is_read_is_one_of_pickles() -> None:
    names = {opcode.name for opcode in pickletools.opcodes}
    assert set(tensor_index.STEPS) < names
    assert not {"GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "PERSID", "BINPERSID", "EXT1", "LONG_BINPUT"} & set(
        tensor_index.STEPS
    )

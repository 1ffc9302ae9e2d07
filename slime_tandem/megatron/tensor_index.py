"""`.metadata` of a `torch_dist` folder read as data: a pickle from which no object of a foreign class is ever made.

The file is pickled by torch and says of every key its dtype, size, chunks and where they lie. An interpreter of our own goes
through its opcodes (a closed list; `pickletools` cuts them out, and executes nothing). A name such as
`torch.distributed.checkpoint.metadata Metadata` makes a record of ours, a call makes a plain value, and state goes into records
alone, once, by the fields that the class has. What passes here is harmless to `pickle.load` as well, which Megatron calls.

It reads no tensor and knows no model.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from slime_tandem.errors import CheckpointError
from slime_tandem.files import is_file_name

MOST_BYTES = 2**28
"""Of an index that is read; one of 400 billion weights on 1,024 ranks has some 50 MB."""
_MOST_WAITING = 10_000
"""Values on the stack of a pickle. Python's writer puts a thousand pairs of a dict there at once."""
_MOST_DIMENSIONS, _MOST_SIZE = 8, 2**48
_FRAME_BYTES = 9
"""Of the opcode FRAME itself: a byte and its length."""

_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_PLANNER = (
    "torch.distributed.checkpoint.planner"  # Megatron adds the ranks' plans, to compare the next save's; not read here
)
_FIELDS: dict[tuple[str, str], frozenset[str]] = {
    (_METADATA, "Metadata"): frozenset(
        {
            "state_dict_metadata",
            "planner_data",
            "storage_data",
            "storage_meta",
            "version",
            "mcore_data",
            "all_local_plans",
        }
    ),
    (_METADATA, "TensorStorageMetadata"): frozenset({"properties", "size", "chunks"}),
    (_METADATA, "BytesStorageMetadata"): frozenset(),
    (_METADATA, "ChunkStorageMetadata"): frozenset({"offsets", "sizes"}),
    (_METADATA, "MetadataIndex"): frozenset({"fqn", "offset", "index"}),
    (_METADATA, "StorageMeta"): frozenset({"checkpoint_id", "save_id", "load_id", "modules"}),
    (_METADATA, "TensorProperties"): frozenset(),  # its state is a tuple
    (_PLANNER, "SavePlan"): frozenset({"items", "storage_data", "planner_data", "usable"}),
    (_PLANNER, "WriteItem"): frozenset({"index", "type", "bytes_io_data", "tensor_data"}),
    (_PLANNER, "TensorWriteData"): frozenset({"chunk", "properties", "size"}),
    (_PLANNER, "BytesIOWriteData"): frozenset({"nbytes"}),
    (_FILESYSTEM, "_StorageInfo"): frozenset({"relative_path", "offset", "length", "transform_descriptors"}),
}
"""Classes whose instances an index holds, with the fields that state may set."""
_ENUM = (_METADATA, "_MEM_FORMAT_ENCODING")
_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_MEMBER = f"{_METADATA}._MEM_FORMAT_ENCODING"
_WRITES, _KINDS = (_PLANNER, "WriteItemType"), ("TENSOR", "SHARD", "BYTE_IO")
_SIZE, _LAYOUT, _GETATTR = ("torch", "Size"), ("torch.serialization", "_get_layout"), ("builtins", "getattr")
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}  # the second: its home in Python 3.13
_DICT = ("collections", "OrderedDict")
_CALLED = {_ENUM, _WRITES, _SIZE, _LAYOUT, _GETATTR, _DICT, *_PATHS}
_DTYPES = frozenset(
    str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor: where it begins in it, and its extent, per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the index: dtype, size and chunks."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies: a file of the folder, and the bytes of it."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """`tensors` by key; `places` by key and offsets of a chunk; `others`: keys of pickled objects, which are never read."""

    tensors: Mapping[str, Entry]
    places: Mapping[tuple[str, tuple[int, ...]], Place]
    others: tuple[str, ...]


def read_index(folder: Path) -> TensorIndex:
    """The index of a folder. Raises CheckpointError for a file that is damaged, too large, or anything but an index."""
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        return _index(PickleReader().read(data))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {folder}",
            f"unsafe or damaged .metadata ({' '.join(str(error).split())[:300]})",
            "Megatron's index of tensors",
            "check the path, or convert or save the checkpoint again",
        ) from error


# ---- the pickle ----


@dataclass(frozen=True, slots=True)
class Name:
    """A class, a function or an object that the pickle names; nothing is looked up."""

    at: tuple[str, str]

    def __str__(self) -> str:
        return ".".join(self.at)


@dataclass(slots=True, eq=False)
class Record:
    """What stands for an object; `state` comes once."""

    kind: tuple[str, str]
    state: Mapping[str, Any] | tuple[Any, ...] | None = None


@dataclass(slots=True, eq=False)
class Mark:
    """MARK on the stack."""


@dataclass
class PickleReader:
    """One pickle, read from its first opcode to STOP. Raises ValueError for all that has no place in an index."""

    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    steps: ClassVar[Mapping[str, Any]]

    def read(self, data: bytes) -> Any:
        """The value of a pickle. Raises ValueError for all that has no place in it."""
        for opcode, argument, at in pickletools.genops(data):
            name = opcode.name
            if name == "FRAME" and (argument or 0) > len(data) - (at or 0) - _FRAME_BYTES:
                raise ValueError(f"a frame of {argument} bytes, longer than the file")  # pickle.load reads it whole
            if name == "STOP":
                return self.pop()
            step = self.steps.get(name)
            if step is None:
                raise ValueError(f"the opcode {name} has no place in a tensor index")
            step(self, argument)
            if len(self.stack) > _MOST_WAITING:
                raise ValueError(f"more than {_MOST_WAITING} values at once")
        raise ValueError("no end")  # pragma: no cover - genops raises before

    def pop(self) -> Any:
        """Take the top of the stack."""
        if not self.stack or isinstance(self.stack[-1], Mark):
            raise ValueError("an opcode without its operand")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        """The top of the stack, which must be a `kind`."""
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise ValueError(f"an opcode without its {kind.__name__}")
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        """Take all values behind the last mark, and the mark."""
        for at in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[at], Mark):
                items = self.stack[at + 1 :]
                del self.stack[at:]
                return items
        raise ValueError("an opcode without its mark")

    def protocol(self, number: int) -> None:
        """PROTO."""
        if not 4 <= number <= pickle.HIGHEST_PROTOCOL:
            raise ValueError(f"pickle protocol {number}: torch writes 4")

    def nothing(self, _: Any) -> None:
        """FRAME: a hint for buffered reading."""

    def push(self, value: Any) -> None:
        """A plain value."""
        self.stack.append(value)

    def integer(self, value: int) -> None:
        """BININT and its kin."""
        if not -(2**63) <= value < 2**63:
            raise ValueError("a number of more than 64 bits")
        self.stack.append(value)

    def memoize(self, _: Any) -> None:
        """MEMOIZE."""
        if not self.stack or isinstance(self.stack[-1], Mark):
            raise ValueError("nothing to keep")
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, at: int) -> None:
        """BINGET."""
        if at not in self.memo:
            raise ValueError(f"nothing is kept under number {at}")
        self.stack.append(self.memo[at])

    def tuple_of(self, n: int) -> None:
        """TUPLE1, TUPLE2, TUPLE3."""
        items = [self.pop() for _ in range(n)]
        self.stack.append(tuple(reversed(items)))

    def tuple_since_mark(self, _: Any) -> None:
        """TUPLE."""
        self.stack.append(tuple(self.since_mark()))

    def append(self, _: Any) -> None:
        """APPEND."""
        value = self.pop()
        self.top(list).append(value)

    def appends(self, _: Any) -> None:
        """APPENDS."""
        items = self.since_mark()
        self.top(list).extend(items)

    def set_item(self, _: Any) -> None:
        """SETITEM."""
        value, key = self.pop(), self.pop()
        self.put(self.top(dict), [(key, value)])

    def set_items(self, _: Any) -> None:
        """SETITEMS."""
        items = self.since_mark()
        if len(items) % 2:
            raise ValueError("a key without its value")
        self.put(self.top(dict), list(zip(items[::2], items[1::2], strict=True)))

    def put(self, target: dict[Any, Any], pairs: list[tuple[Any, Any]]) -> None:
        """Pairs into a dict: a key of text, a number, or an index record as its plain form; none twice."""
        for key, value in pairs:
            plain = _chunk_key(key) if isinstance(key, Record) else key
            if not isinstance(key, Record) and type(key) not in (str, int):
                raise ValueError(f"a {type(key).__name__} as a key")
            if plain in target:
                raise ValueError(f"the key {str(plain)[:100]} twice")
            target[plain] = value

    def name(self, _: Any) -> None:
        """STACK_GLOBAL."""
        name, module = self.pop(), self.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise ValueError("a name that is no text")
        at = (module, name)
        if module == "torch" and name in _DTYPES:
            self.stack.append(getattr(torch, name))
        elif at in _FIELDS or at in _CALLED:
            self.stack.append(Name(at))
        else:
            raise ValueError(f"{module[:80]}.{name[:80]} has no place in a tensor index")

    def new_object(self, _: Any) -> None:
        """NEWOBJ."""
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, Name) or name.at not in _FIELDS or arguments != ():
            raise ValueError(f"no object is made of {str(name)[:100]}")
        self.stack.append(Record(name.at))

    def call(self, _: Any) -> None:
        """REDUCE."""
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, Name) or name.at not in _CALLED or not isinstance(arguments, tuple):
            raise ValueError(f"no call of {str(name)[:100]}")
        self.stack.append(_called(name.at, arguments))

    def build(self, _: Any) -> None:
        """BUILD."""
        state, record = self.pop(), self.top(Record)
        if record.state is not None:
            raise ValueError(f"state of a {record.kind[1]} twice")
        if record.kind == (_METADATA, "TensorProperties"):
            if not (isinstance(state, tuple) and len(state) == 5 and _is_format(state[3])):
                raise ValueError("TensorProperties with another state than torch's")
        elif not (isinstance(state, dict) and state.keys() <= _FIELDS[record.kind]):
            raise ValueError(f"a {record.kind[1]} with fields of another")
        record.state = dict(state) if isinstance(state, dict) else state  # as pickle: what is added later is not taken


def _is_format(value: object) -> bool:
    return isinstance(value, Name) and value.at[0] == _MEMBER


def _called(name: tuple[str, str], arguments: tuple[Any, ...]) -> Any:
    """What a call that an index may hold gives: sizes, a dict, or the name of an object, which no field takes for text."""
    if name == _SIZE and len(arguments) == 1 and isinstance(arguments[0], tuple):
        return _sizes(arguments[0])
    if name == _LAYOUT and arguments == ("torch.strided",):
        return Name(("torch", "strided"))
    if name == _ENUM and arguments in ((0,), (1,), (2,)):
        return Name((_MEMBER, _FORMATS[arguments[0]]))
    if name == _WRITES and arguments in ((1,), (2,), (3,)):
        return Name((".".join(_WRITES), _KINDS[arguments[0] - 1]))
    # How Python 3.11.0 to 3.11.3 pickles a member of an Enum (bpo-44342, undone since).
    if name == _GETATTR and len(arguments) == 2 and arguments[0] == Name(_ENUM) and arguments[1] in _FORMATS:
        return Name((_MEMBER, arguments[1]))
    if name == _GETATTR and len(arguments) == 2 and arguments[0] == Name(_WRITES) and arguments[1] in _KINDS:
        return Name((".".join(_WRITES), arguments[1]))
    if name in _PATHS and all(isinstance(part, str) for part in arguments):
        return Name((name[0], "/".join(arguments)))
    if name == _DICT and not arguments:
        return {}
    raise ValueError(f"{'.'.join(name)} with such arguments has no place in a tensor index")


STEPS: dict[str, Any] = {
    "PROTO": PickleReader.protocol,
    "FRAME": PickleReader.nothing,
    "MARK": lambda reader, _: reader.push(Mark()),
    "NONE": lambda reader, _: reader.push(None),
    "NEWTRUE": lambda reader, _: reader.push(True),
    "NEWFALSE": lambda reader, _: reader.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), PickleReader.integer),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINFLOAT"), PickleReader.push),
    "EMPTY_LIST": lambda reader, _: reader.push([]),
    "EMPTY_DICT": lambda reader, _: reader.push({}),
    "EMPTY_TUPLE": lambda reader, _: reader.push(()),
    "APPEND": PickleReader.append,
    "APPENDS": PickleReader.appends,
    "SETITEM": PickleReader.set_item,
    "SETITEMS": PickleReader.set_items,
    "TUPLE": PickleReader.tuple_since_mark,
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "MEMOIZE": PickleReader.memoize,
    "BINGET": PickleReader.get,
    "LONG_BINGET": PickleReader.get,
    "STACK_GLOBAL": PickleReader.name,
    "NEWOBJ": PickleReader.new_object,
    "REDUCE": PickleReader.call,
    "BUILD": PickleReader.build,
}
"""Every opcode that an index is read from."""
PickleReader.steps = STEPS


# ---- the index ----


def _index(root: Any) -> TensorIndex:
    whole = _state(root, "Metadata")
    entries, storage = whole.get("state_dict_metadata"), whole.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise ValueError("Metadata without state_dict_metadata or storage_data")
    tensors: dict[str, Entry] = {}
    others: list[str] = []
    for key, entry in entries.items():
        if isinstance(entry, Record) and entry.kind == (_METADATA, "BytesStorageMetadata"):
            others.append(_key(key))
        else:
            tensors[_key(key, tensor=True)] = _entry(key, entry)
    places = {}
    for at, place in storage.items():
        if not isinstance(at, tuple):
            raise ValueError("storage_data with a key that is no MetadataIndex")
        if at[0] in tensors:
            places[at] = _place(at[0], place)
    return TensorIndex(tensors, places, tuple(sorted(others)))


def _entry(key: str, entry: Any) -> Entry:
    state = _state(entry, "TensorStorageMetadata", key)
    properties, size, chunks = state.get("properties"), state.get("size"), state.get("chunks")
    dtype = properties.state[0] if isinstance(properties, Record) and isinstance(properties.state, tuple) else None
    if not isinstance(dtype, torch.dtype) or not isinstance(size, tuple) or not isinstance(chunks, list):
        raise ValueError(f"{key} without dtype, size or chunks")
    size = _sizes(size)
    return Entry(dtype, size, tuple(_chunks(key, size, chunks)))


def _chunks(key: str, size: tuple[int, ...], chunks: list[Any]) -> Iterator[Chunk]:
    for chunk in chunks:
        state = _state(chunk, "ChunkStorageMetadata", key)
        offsets, sizes = state.get("offsets"), state.get("sizes")
        if not isinstance(offsets, tuple) or not isinstance(sizes, tuple):
            raise ValueError(f"a chunk of {key} without offsets or sizes")
        made = Chunk(_sizes(offsets), _sizes(sizes))
        inside = len(made.offsets) == len(made.sizes) == len(size) and all(
            o + s <= n for o, s, n in zip(made.offsets, made.sizes, size, strict=True)
        )
        if not inside:
            raise ValueError(f"a chunk of {key} at {made.offsets} of {made.sizes} outside of {size}")
        yield made


def _place(key: str, place: Any) -> Place:
    state = _state(place, "_StorageInfo", key)
    file, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
    if not isinstance(file, str) or not is_file_name(file):
        raise ValueError(f".metadata points to {str(file)[:100]!r}, which names no file of this folder")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 1:
        raise ValueError(f"{file}: a place at {offset!r} of {length!r} bytes")
    if state.get("transform_descriptors"):
        raise ValueError(f"{file}: transformed bytes, where torch.save writes tensors as they are")
    return Place(file, offset, length)


def _state(record: Any, name: str, key: str = "") -> Mapping[str, Any]:
    if not isinstance(record, Record) or record.kind[1] != name or not isinstance(record.state, dict):
        found = record.kind[1] if isinstance(record, Record) else type(record).__name__
        raise ValueError(f"a {found}{f' for {key}' if key else ''} where a whole {name} belongs")
    return record.state


def _chunk_key(record: Record) -> tuple[str, tuple[int, ...]]:
    """(key, offsets) of a MetadataIndex; () for an object or a tensor that is one chunk without offsets."""
    state = _state(record, "MetadataIndex")
    fqn, offset, hint = state.get("fqn"), state.get("offset"), state.get("index")
    if not isinstance(fqn, str) or not isinstance(offset, tuple | None) or not isinstance(hint, int | None):
        raise ValueError("a MetadataIndex without a key, or with other offsets than numbers")
    return _key(fqn), _sizes(offset or ())


def _key(key: object, *, tensor: bool = False) -> str:
    """A key that can be shown and named; that of a tensor looks like no path. Objects' keys have shards behind a `/`."""
    if not isinstance(key, str) or not 0 < len(key) <= 1000 or not key.isprintable():
        raise ValueError("a key that is no name")
    if tensor and not is_file_name(key):
        raise ValueError(f"a tensor named {key[:100]!r}")
    return key


def _sizes(values: tuple[Any, ...]) -> tuple[int, ...]:
    if len(values) > _MOST_DIMENSIONS or not all(type(v) is int and 0 <= v < _MOST_SIZE for v in values):
        raise ValueError("sizes or offsets that are none")
    return values

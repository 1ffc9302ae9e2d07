"""What a `torch_dist` checkpoint says of its own architecture beside its tensors: head counts, rotation, what no shape shows.

A local run's checkpoint says it in `state.json`, one that `slime-tandem convert` made in `common.pt`, and Megatron's own in the
arguments that it keeps there. `common.pt` is a pickle that names many foreign classes: it is gone through as data
(`tensor_index.PickleReader`), every object is a record without behaviour, and plain values alone are taken out.

What a checkpoint does not say is not guessed: it is left out.
"""

from __future__ import annotations

import copy
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_tandem.files import read_json
from slime_tandem.megatron.architecture import Architecture
from slime_tandem.megatron.tensor_index import STEPS, PickleReader, Record

KEY = "slime_tandem_architecture"
"""In `common.pt`: `Architecture.as_json()`."""
_MOST_BYTES = 2**26


class _LooseReader(PickleReader):
    """Any pickle of torch's, as records, plain containers and plain values; what cannot be a plain key is dropped."""

    def protocol(self, number: int) -> None:
        """Any."""

    def put_at(self, at: int) -> None:
        self.memo[at] = self.stack[-1] if self.stack else None

    def long_integer(self, value: int) -> None:
        self.stack.append(value if -(2**63) <= value < 2**63 else None)

    def top(self, kind: type) -> Any:
        if self.stack and isinstance(self.stack[-1], Record) and kind in (list, dict, set):
            return kind()  # a subclass's own entries
        return super().top(kind)

    def put(self, target: dict[Any, Any], pairs: list[tuple[Any, Any]]) -> None:
        target.update((key, value) for key, value in pairs if type(key) in (str, int))

    def name(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self.stack.append(Record((str(module)[:200], str(name)[:200])))

    def by_text(self, both: str) -> None:
        module, _, name = both.partition(" ")
        self.stack.append(Record((module[:200], name[:200])))

    def call(self, _: Any) -> None:
        self.pop()
        called = self.pop()
        ordered = isinstance(called, Record) and called.kind == ("collections", "OrderedDict")
        self.stack.append({} if ordered else Record(called.kind if isinstance(called, Record) else ("", "")))

    def call_with_names(self, _: Any) -> None:
        self.pop()
        self.call(None)

    def stored_elsewhere(self, _: Any) -> None:
        self.pop()
        self.stack.append(Record(("", "storage")))

    def build(self, _: Any) -> None:
        state = self.pop()
        made = self.stack[-1] if self.stack else None
        if isinstance(made, Record) and isinstance(state, dict):
            made.state = dict(state)

    def add_items(self, _: Any) -> None:
        self.since_mark()

    def frozen(self, _: Any) -> None:
        self.stack.append(tuple(self.since_mark()))


_MORE: dict[str, Any] = {
    "PROTO": _LooseReader.protocol,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _LooseReader.put_at),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4"), _LooseReader.long_integer),
    **dict.fromkeys(
        ("BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8", "SHORT_BINSTRING", "BINSTRING"),
        _LooseReader.push,
    ),
    "EMPTY_SET": lambda reader, _: reader.push(set()),
    "ADDITEMS": _LooseReader.add_items,
    "FROZENSET": _LooseReader.frozen,
    "APPEND": _LooseReader.append,
    "APPENDS": _LooseReader.appends,
    "SETITEM": _LooseReader.set_item,
    "SETITEMS": _LooseReader.set_items,
    "GLOBAL": _LooseReader.by_text,
    "STACK_GLOBAL": _LooseReader.name,
    "NEWOBJ": _LooseReader.call,
    "NEWOBJ_EX": _LooseReader.call_with_names,
    "REDUCE": _LooseReader.call,
    "BUILD": _LooseReader.build,
    "BINPERSID": _LooseReader.stored_elsewhere,
}
_LooseReader.steps = STEPS | _MORE


def recorded(folder: Path) -> dict[str, Any]:
    """Fields of `Architecture` that no shape shows, as `as_json` has them, as far as the checkpoint states them.

    Some of Megatron's have a name of their own here, `megatron ...`, and must have the values of `PLAIN`.
    """
    try:
        state = read_json(folder / "state.json")
        if isinstance(state, dict) and isinstance(state.get("architecture"), dict):
            return _known(state["architecture"])
    except (OSError, ValueError):
        pass
    common = _common(folder)
    if isinstance(common.get(KEY), dict):
        return _known(common[KEY])
    args = common.get("args")
    return _of_megatron(args.state) if isinstance(args, Record) and isinstance(args.state, dict) else {}


def differences(arch: Architecture, told: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, what the checkpoint says, what the config says) wherever the two differ."""
    ours = {**arch.as_json(), **PLAIN}
    return [(name, value, ours[name]) for name, value in told.items() if not _equal(value, ours[name])]


def untold(told: Mapping[str, Any]) -> list[str]:
    """Fields that no shape shows and that the checkpoint does not state."""
    return [name for name in _UNSEEN if name not in told]


_UNSEEN = ("num_heads", "num_kv_heads", "head_dim", "norm_eps", "rope")
"""What decides the function and does not show in names and shapes of weights."""
PLAIN: dict[str, Any] = {
    "megatron swiglu": True,
    "megatron apply_layernorm_1p": False,
    "megatron rotary_interleaved": False,
    "megatron rotary_percent": 1.0,
    "megatron window_size": None,
    "megatron normalization": "RMSNorm",
}
"""Arguments of Megatron's that say nothing else for a dense llama, qwen2 or qwen3."""


def _known(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tree[name] for name in _UNSEEN if name in tree}


def _of_megatron(args: Mapping[str, Any]) -> dict[str, Any]:
    def number(name: str) -> Any:
        value = args.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    grouped = args.get("group_query_attention") is True
    told: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": number("num_query_groups") if grouped else heads,
        "head_dim": number("kv_channels") or (hidden // heads if heads and hidden else None),
        "norm_eps": number("norm_epsilon"),
    }
    if (base := number("rotary_base")) is not None and isinstance(scaled := args.get("use_rope_scaling", False), bool):
        # The factors of the scaling are Megatron's own constants in some versions, arguments in others.
        told["rope"] = {"rope_theta": base, "rope_type": "llama3" if scaled else "default"}
    told = {name: value for name, value in told.items() if value is not None}
    for name in PLAIN:
        argument = name.removeprefix("megatron ")
        if argument in args and (args[argument] is None or isinstance(args[argument], str | int | float)):
            told[name] = args[argument]
    return told


def _equal(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return all(name in ours and _equal(value, ours[name]) for name, value in theirs.items())
    if isinstance(theirs, float) or isinstance(ours, float):
        numbers = isinstance(theirs, int | float) and isinstance(ours, int | float)
        return numbers and math.isclose(theirs, ours, rel_tol=1e-9)
    return bool(theirs == ours)


def _common(folder: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(folder / "common.pt") as archive:
            name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
            with archive.open(name) as file:
                data = file.read(_MOST_BYTES + 1)
        found = _LooseReader().read(data) if len(data) <= _MOST_BYTES else None
    except Exception:  # noqa: BLE001 - a foreign file in any form: it then states nothing
        return {}
    return found if isinstance(found, dict) else {}


def with_told(hf_config: Any, told: Mapping[str, Any]) -> Any:
    """A copy of a transformers config in which what no shape shows is what the checkpoint states."""
    out = copy.deepcopy(hf_config)
    for field, name in (
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("head_dim", "head_dim"),
        ("norm_eps", "rms_norm_eps"),
    ):
        if field in told:
            setattr(out, name, told[field])
    if "rope" in told:
        rope = told["rope"]
        kept = dict(out.rope_parameters) if rope.get("rope_type") == out.rope_parameters.get("rope_type") else {}
        out.rope_parameters = {**kept, **rope}
    return out

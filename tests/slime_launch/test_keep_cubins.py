"""scripts/slime/keep_cubins.py on containers laid out by hand: what is kept stays readable, and no address behind it moves."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

FILE = Path(__file__).resolve().parents[2] / "scripts" / "slime" / "keep_cubins.py"
spec = importlib.util.spec_from_file_location("keep_cubins", FILE)
assert spec is not None
assert spec.loader is not None
keep_cubins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(keep_cubins)


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    """Header of 64 bytes with the architecture at byte 28, then the code."""
    head = struct.pack("<HHIQ", kind, 1, 64, len(payload)).ljust(28, b"h")
    return head + struct.pack("<I", arch).ljust(36, b"h") + payload


def container(entries: list[bytes]) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


CODE = st.tuples(st.sampled_from([1, 2]), st.sampled_from([75, 80, 90]), st.binary(max_size=40))


@given(st.lists(st.lists(CODE, max_size=4), min_size=1, max_size=3))
def test_what_is_kept_is_whole_and_at_its_containers_front(containers: list[list[tuple[int, int, bytes]]]) -> None:
    parts = [container([entry(*e) for e in entries]) for entries in containers]
    data = bytearray(b"before" + b"between".join(parts) + b"behind")
    if not any(arch == 90 for entries in containers for _, arch, _ in entries):
        with pytest.raises(ValueError, match="90 is in no container"):
            keep_cubins.cut(data, 90)
        return
    keep_cubins.cut(data, 90)
    kept = [container([entry(*e) for e in entries if e[1] == 90]) for entries in containers]
    expected = [a + bytes(len(b) - len(a)) for a, b in zip(kept, parts, strict=True)]
    assert bytes(data) == b"before" + b"between".join(expected) + b"behind"


def test_another_layout_is_refused() -> None:
    odd = bytearray(container([entry(7, 90, b"code")]))
    with pytest.raises(ValueError, match="kind 7"):
        keep_cubins.cut(odd, 90)
    cut_short = bytearray(container([entry(2, 90, b"code")])[:-2])
    with pytest.raises(ValueError, match="end within the file"):
        keep_cubins.cut(cut_short, 90)

"""Bytes spelt in one vocabulary, exactly or not at all. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from slime_tandem.tokens.token_bytes import TokenBytes


@dataclass(frozen=True)
class Speller:
    """Exact spelling of bytes in one vocabulary.

    `encode(text)` gives ids of plain text without special tokens; `end_of_turn` is the id that closes a turn;
    `special_ids` names the other special tokens (`<think>` and its like), which are carried over where both vocabularies
    have the same name.

    >>> table = TokenBytes((b"a", b"b", b"ab", b"\\xc3", b"\\xa9", None), frozenset({5}), frozenset({5}))
    >>> speller = Speller(table, lambda text: {"ab": [2], "b": [1]}[text], end_of_turn=5)
    >>> speller.spell(b"ab\\xc3b"), speller.spell(b"\\xff")
    ([2, 3, 1], None)
    """

    tokens: TokenBytes
    encode: Callable[[str], list[int]]
    end_of_turn: int
    special_ids: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        single = ((b[0], i) for i, b in enumerate(self.tokens.table) if b is not None and len(b) == 1)
        return dict(sorted(single, reverse=True))  # the lowest id of each byte wins

    @cached_property
    def special_names(self) -> dict[int, str]:
        """Id to name, the inverse of `special_ids`."""
        return {i: name for name, i in self.special_ids.items()}

    def spell(self, data: bytes) -> list[int] | None:
        """Ids whose bytes are exactly `data`; None if there are none. Broken UTF-8 is spelt byte by byte."""
        ids: list[int] = []
        rest = data
        while rest:
            try:
                good, bad = rest.decode(), b""
                rest = b""
            except UnicodeDecodeError as error:
                good, bad = rest[: error.start].decode(), rest[error.start : error.end]
                rest = rest[error.end :]
            ids += self.encode(good) if good else []
            if not self._byte_ids.keys() >= set(bad):
                return None
            ids += [self._byte_ids[b] for b in bad]
        return ids if self.tokens.join(ids) == data and all(self.tokens.of(i) for i in ids) else None

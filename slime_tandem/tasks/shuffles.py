"""A shuffle that is not kept: the place of each number follows from a key. Of ten million numbers the first costs as little
as of ten. Knows no prompt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

_ROUNDS = 6


def shuffled(count: int, key: str) -> Iterator[int]:
    """The numbers below `count`, each once, in an order that follows from `key`; in constant memory.

    A Feistel network over the pairs (left, right) of the smallest square that holds `count`; what falls outside is sent through
    it again until it does not, so that it stays a permutation (Black and Rogaway 2002, cycle walking).

    >>> list(shuffled(5, "a")), sorted(shuffled(1000, "b")) == list(range(1000))
    ([1, 4, 0, 2, 3], True)
    """
    side = max(1, math.isqrt(max(count - 1, 0)) + 1)
    keys = [hashlib.blake2b(f"{key}/{i}".encode(), digest_size=32).digest() for i in range(_ROUNDS)]

    def mixed(key: bytes, half: int) -> int:
        digest = hashlib.blake2b(half.to_bytes(8, "big"), digest_size=8, key=key).digest()
        return int.from_bytes(digest, "big") % side

    def place(number: int) -> int:
        left, right = divmod(number, side)
        for round_key in keys:
            left, right = right, (left + mixed(round_key, right)) % side
        return left * side + right

    for number in range(count):
        at = place(number)
        while at >= count:
            at = place(at)
        yield at

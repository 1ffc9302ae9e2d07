"""Remembers which token prefixes have their keys and values in the pool: a radix tree from token ids to pool locations.

Page size is one token. The tree holds no tensors. Sequences copy what they need out of the pool when they are admitted, so
entries need no locks: anything not touched in the current epoch may be evicted, least recently used leaves first. It runs no
model.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from slime_tandem.types import IntArray


class _Node:
    __slots__ = ("children", "ids", "last_used", "locations", "parent", "raw")

    def __init__(self, ids: IntArray, locations: IntArray, parent: _Node | None, last_used: int) -> None:
        self.ids = ids
        self.raw = ids.tobytes()  # compared as bytes: one memcmp per node
        self.locations = locations
        self.parent = parent
        self.last_used = last_used
        self.children: dict[int, _Node] = {}


class PrefixCache:
    """Radix tree over token ids with `capacity` pool locations, numbered 0 .. capacity-1.

    >>> cache = PrefixCache(8)
    >>> cache.insert(np.array([5, 6, 7]))[0], len(cache.match(np.array([5, 6, 9])))
    (0, 2)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.flush()

    def flush(self) -> None:
        """Forget everything."""
        self._root = _Node(np.empty(0, np.int64), np.empty(0, np.int64), None, 0)
        self._free: list[int] = list(range(self.capacity - 1, -1, -1))
        self._epoch = 1

    def __len__(self) -> int:
        return self.capacity - len(self._free)

    def tick(self) -> None:
        """Start a new epoch: what was matched or inserted before may be evicted from now on."""
        self._epoch += 1

    def match(self, ids: IntArray) -> IntArray:
        """Pool locations of the longest known prefix of `ids` [n]; the result has its length. Marks it as used."""
        _, found = self._walk(ids)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def insert(self, ids: IntArray) -> tuple[int, IntArray]:
        """Make `ids` [n] known; returns (start, locations): the caller fills `locations` for `ids[start:start+len]`.

        Less than the rest of `ids` gets locations when the cache is full of entries of this epoch.
        """
        node, found = self._walk(ids)
        start = sum(map(len, found))
        count = self._reserve(len(ids) - start)
        if count == 0:
            return start, np.empty(0, np.int64)
        locations = np.array(self._free[-count:], dtype=np.int64)
        del self._free[-count:]
        new_ids = np.array(ids[start : start + count], dtype=np.int64)
        node.children[int(new_ids[0])] = _Node(new_ids, locations, node, self._epoch)
        return start, locations

    def _walk(self, ids: IntArray) -> tuple[_Node, list[IntArray]]:
        """The deepest node whose path is a prefix of `ids` (split so that it ends there) and the locations on the way."""
        node, done, found = self._root, 0, list[IntArray]()
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        raw = ids.tobytes()
        while done < len(ids):
            child = node.children.get(int(ids[done]))
            if child is None:
                break
            if not raw.startswith(child.raw, 8 * done):
                span = min(len(child.ids), len(ids) - done)
                same = child.ids[:span] == ids[done : done + span]
                child = self._split(child, span if same.all() else int(same.argmin()))
            child.last_used = self._epoch
            found.append(child.locations)
            node, done = child, done + len(child.ids)
        return node, found

    @staticmethod
    def _split(child: _Node, length: int) -> _Node:
        parent = child.parent
        assert parent is not None
        assert 0 < length < len(child.ids)
        upper = _Node(child.ids[:length], child.locations[:length], parent, child.last_used)
        parent.children[int(upper.ids[0])] = upper
        child.ids, child.locations, child.parent = child.ids[length:], child.locations[length:], upper
        child.raw = child.ids.tobytes()
        upper.children[int(child.ids[0])] = child
        return upper

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _reserve(self, count: int) -> int:
        """Free at least `count` locations if that can be; returns how many of them there are."""
        if count > len(self._free):
            # A pass over the tree frees an eighth at once, so that passes stay rare.
            goal = max(count, self.capacity // 8)
            leaves = [(n.last_used, id(n), n) for n in self._nodes() if not n.children]
            heapq.heapify(leaves)
            while len(self._free) < goal and leaves:
                last_used, _, node = heapq.heappop(leaves)
                if last_used >= self._epoch:
                    break
                parent = node.parent
                assert parent is not None
                self._free.extend(node.locations.tolist())
                del parent.children[int(node.ids[0])]
                if parent is not self._root and not parent.children:
                    heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        return min(count, len(self._free))

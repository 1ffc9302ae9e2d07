"""The prefix cache against a plain list of everything that was inserted."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.engines.embedded.prefix_cache import PrefixCache

sequences = st.lists(st.integers(0, 2), min_size=1, max_size=10)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.booleans(), sequences), max_size=40), st.integers(1, 30))
def test_a_match_always_returns_what_was_stored_for_that_very_prefix(
    calls: list[tuple[bool, list[int]]], capacity: int
) -> None:
    """`pool` plays the key/value memory: it holds, per location, the prefix whose last token lives there."""
    cache = PrefixCache(capacity)
    pool: dict[int, tuple[int, ...]] = {}
    for is_insert, ids in calls:
        cache.tick()
        if is_insert:
            start, locations = cache.insert(np.array(ids))
            assert start + len(locations) <= len(ids)
            for i, location in enumerate(locations.tolist()):
                pool[location] = tuple(ids[: start + i + 1])
            # Everything else may be evicted, so that only the capacity can keep the newest sequence out.
            assert len(cache.match(np.array(ids))) == min(len(ids), capacity)
        found = cache.match(np.array(ids)).tolist()
        assert [pool[location] for location in found] == [tuple(ids[: i + 1]) for i in range(len(found))]
        assert len(set(found)) == len(found)
        assert 0 <= len(cache) <= capacity


def common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_match_is_the_longest_common_prefix_without_eviction() -> None:
    rng = np.random.default_rng(0)
    cache, known = PrefixCache(10_000), []
    for _ in range(200):
        ids = rng.integers(0, 3, rng.integers(1, 12)).tolist()
        shared = max((common(ids, old) for old in known), default=0)
        assert len(cache.match(np.array(ids))) == shared
        start, locations = cache.insert(np.array(ids))
        assert (start, len(locations)) == (shared, len(ids) - shared)
        known.append(ids)


def test_least_recently_used_goes_first() -> None:
    cache = PrefixCache(8)
    a, b, c = np.array([1, 1, 1]), np.array([2, 2, 2]), np.array([3, 3, 3])
    for ids in (a, b):
        cache.tick()
        cache.insert(ids)
    cache.tick()
    cache.match(a)
    cache.tick()
    cache.insert(c)
    assert [len(cache.match(ids)) for ids in (a, b, c)] == [3, 0, 3]


def test_entries_of_the_running_epoch_are_safe() -> None:
    cache = PrefixCache(4)
    cache.tick()
    cache.insert(np.array([1, 2, 3]))
    start, locations = cache.insert(np.array([5, 6, 7]))
    assert (start, len(locations)) == (0, 1)
    assert len(cache.match(np.array([1, 2, 3]))) == 3


def test_flush_forgets() -> None:
    cache = PrefixCache(4)
    cache.insert(np.array([1, 2, 3]))
    cache.flush()
    assert len(cache) == 0
    assert len(cache.match(np.array([1]))) == 0

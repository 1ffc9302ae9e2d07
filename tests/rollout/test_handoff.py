"""Laws of the handoff rule: authorship is a pure function of (settings, key, tokens)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import AuthorSchedule, TandemConfig
from slime_tandem.rollout.handoff import HandoffRule, OpenRun, author_key, mix32, sampling_seed
from slime_tandem.strategies import STRATEGIES
from slime_tandem.types import JUNIOR, SENIOR, SampleKey

VOCAB = 10
keys = st.builds(SampleKey, st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 10**6))
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=60)
rules = st.builds(
    HandoffRule.of,
    st.sampled_from(tuple(STRATEGIES)),
    prob_senior=st.floats(0, 1),
    max_gap_tokens=st.integers(1, 7),
    chunk_size=st.integers(1, 7),
    boundary=st.frozensets(st.integers(0, VOCAB - 1)),
    schedule=st.sampled_from(get_args(AuthorSchedule)),
)


def naive_runs(rule: HandoffRule, ids: list[int]) -> list[list[int]]:
    """The runs of a response, by the words of the module docstring rather than by its code."""
    runs: list[list[int]] = [[]]
    for token in ids:
        runs[-1].append(token)
        n = len(runs[-1])
        over = {
            "word": token in rule.boundary or n == rule.cap,
            "sentence": token in rule.boundary,
            "bernoulli": True,
            "alternating": True,
            "chunk": n == rule.cap,
        }[rule.strategy]
        if over:
            runs.append([])
    return [run for run in runs if run]


@given(rules, keys, tokens)
def test_authorship_is_one_author_per_run(rule: HandoffRule, key: SampleKey, ids: list[int]) -> None:
    expected = [rule.author(author_key(key), k) for k, run in enumerate(naive_runs(rule, ids)) for _ in run]
    assert rule.authorship(key, ids) == tuple(expected)
    assert rule.authorship(key, iter(ids)) == tuple(expected), "the same on a second call, from any iterable"


@given(rules, keys, tokens, st.integers(0, 60))
def test_the_authorship_of_a_prefix_is_a_prefix(rule: HandoffRule, key: SampleKey, ids: list[int], n: int) -> None:
    assert rule.authorship(key, ids[:n]) == rule.authorship(key, ids)[:n]


@given(rules, tokens)
def test_no_run_is_longer_than_its_cap(rule: HandoffRule, ids: list[int]) -> None:
    longest = max(map(len, naive_runs(rule, ids)), default=0)
    assert rule.cap is None or longest <= rule.cap
    length = 0
    for token in ids:  # what the rollout asks token by token
        length = 0 if rule.ends_run(token, length + 1) else length + 1
        if rule.strategy == "word":
            assert length < rule.cap


@given(keys, st.lists(st.sampled_from([1, 2, 3]), min_size=30, max_size=30))
def test_the_author_of_run_k_does_not_depend_on_the_tokens(key: SampleKey, lengths: list[int]) -> None:
    rule = HandoffRule.of("word", 0.5, 32, 16, frozenset({1}))
    ids = [token for n in lengths for token in [0] * (n - 1) + [1]]
    mask = rule.authorship(key, ids)
    ends = list(itertools.accumulate(lengths))
    assert [mask[end - 1] for end in ends] == [rule.author(author_key(key), k) for k in range(30)]


@given(keys, tokens, st.sampled_from(["word", "bernoulli", "sentence"]))
def test_probability_one_and_zero_leave_one_author(key: SampleKey, ids: list[int], strategy: str) -> None:
    for prob, author in ((1.0, SENIOR), (0.0, JUNIOR)):
        rule = HandoffRule.of(strategy, prob, 4, 4, frozenset({1, 2}))
        assert set(rule.authorship(key, ids)) <= {author}
        assert rule.runs_until_change(author_key(key), 0, 50) is None


@given(rules, keys, st.integers(0, 50), st.integers(0, 40))
def test_runs_until_change_looks_ahead_rightly(rule: HandoffRule, key: SampleKey, run: int, limit: int) -> None:
    akey = author_key(key)
    authors = [rule.author(akey, run + n) for n in range(limit + 1)]
    same = len(list(itertools.takewhile(lambda a: a == authors[0], authors)))
    assert rule.runs_until_change(akey, run, limit) == (same if same <= limit else None)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("chunk", (1, 1, 1, 0, 0, 0, 1, 1)), ("alternating", (1, 0, 1, 0, 1, 0, 1, 0))],
)
def test_counting_strategies_alternate_senior_first(strategy: str, expected: tuple[int, ...]) -> None:
    rule = HandoffRule.of(strategy, 0.0, 32, 3, frozenset())  # prob_senior has no say
    assert rule.authorship(SampleKey(1, 2, 3), [0] * 8) == expected


@given(rules, keys, tokens)
def test_the_alternating_schedule_changes_the_author_at_every_run(
    rule: HandoffRule, key: SampleKey, ids: list[int]
) -> None:
    rule = replace(rule, alternates=True)
    mask = rule.authorship(key, ids)
    expected = [SENIOR if k % 2 == 0 else JUNIOR for k, run in enumerate(naive_runs(rule, ids)) for _ in run]
    assert list(mask) == expected, "senior first, whatever prob_senior and the key say"
    assert rule.runs_until_change(author_key(key), 0, 1) == 1


def test_alternation_at_blank_lines() -> None:
    blank = 9
    rule = HandoffRule.of("sentence", 0.0, 2, 2, frozenset({blank}), schedule="alternate")
    assert rule.authorship(SampleKey(1, 2, 3), [1, 2, 3, blank, 4, blank, blank, 5]) == (1, 1, 1, 1, 0, 0, 1, 0)
    assert rule.cap is None, "a paragraph may be as long as it likes"


def test_the_boundary_token_itself_belongs_to_the_run_that_it_ends() -> None:
    rule = HandoffRule.of("word", 0.5, 32, 16, frozenset({1}))
    key = next(k for k in (SampleKey(s, 0, 0) for s in range(100)) if rule.authorship(k, [1, 0]) == (1, 0))
    assert rule.authorship(key, [0, 0, 1, 0]) == (1, 1, 1, 0)


@pytest.mark.parametrize("prob", [0.1, 0.25, 0.5, 0.9])
def test_the_senior_writes_its_share_of_the_runs(prob: float) -> None:
    rule = HandoffRule.of("bernoulli", prob, 32, 16, frozenset())
    draws = [rule.author(author_key(SampleKey(5, r, i)), k) for r in range(4) for i in range(50) for k in range(100)]
    n = len(draws)
    four_sigma = 4 * (prob * (1 - prob) / n) ** 0.5
    assert abs(sum(draws) / n - prob) < four_sigma
    # Neighbouring runs, and the same run of neighbouring samples, are drawn independently of each other.
    for lag in (1, 2, 100):
        both = sum(a & b for a, b in zip(draws, draws[lag:], strict=False)) / (n - lag)
        assert abs(both - prob**2) < 4 * (prob**2 * (1 - prob**2) / n) ** 0.5 + four_sigma


def test_every_part_of_the_key_matters() -> None:
    variants = [SampleKey(1, 2, 3), SampleKey(1, 3, 2), SampleKey(2, 1, 3), SampleKey(0, 2, 3), SampleKey(1, 2, 4)]
    assert len({author_key(k) for k in variants}) == len(variants)
    assert len({sampling_seed(k) for k in variants}) == len(variants)


@given(keys)
def test_sampling_seeds_fit_an_int32_and_differ_from_the_author_stream(key: SampleKey) -> None:
    assert 0 <= sampling_seed(key) < 2**31
    assert sampling_seed(key) != author_key(key) >> 33


def test_mix32_is_the_published_mixer() -> None:
    """Fixed points of the construction: 0 stays 0, and no two inputs of a sample collide (it is a bijection)."""
    assert mix32(0) == 0
    assert mix32(2**32) == mix32(0)
    assert len({mix32(i) for i in range(100_000)}) == 100_000


def test_the_draws_are_frozen_for_good() -> None:
    """A changed draw would give every stored transcript other authors than those it records."""
    rule = HandoffRule.of("bernoulli", 0.5, 32, 16, frozenset())
    assert author_key(SampleKey(7, 0, 3)) == 2238016912043480948
    assert sampling_seed(SampleKey(7, 0, 3)) == 623528259
    assert "".join(map(str, rule.authorship(SampleKey(7, 0, 3), [0] * 32))) == "11001111001010010110100011100010"


def test_a_disabled_tandem_is_the_senior_alone() -> None:
    off = TandemConfig(enabled=False, selection_strategy="alternating", prob_senior=0.0, author_schedule="alternate")
    rule = HandoffRule.from_config(off, {1})
    assert set(rule.authorship(SampleKey(0, 0, 0), [1] * 40)) == {SENIOR}


def test_from_config_takes_every_setting_over() -> None:
    config = TandemConfig(selection_strategy="chunk", prob_senior=0.3, max_gap_tokens=5, chunk_size=2)
    assert HandoffRule.from_config(config, [4, 4, 2]) == HandoffRule.of("chunk", 0.3, 5, 2, frozenset({2, 4}))
    config = TandemConfig(selection_strategy="sentence", author_schedule="alternate")
    assert HandoffRule.from_config(config, []).alternates


@given(keys, tokens, st.frozensets(st.integers(0, VOCAB - 1)))
def test_sentence_in_turns_is_the_authors_sampler(key: SampleKey, ids: list[int], boundary: frozenset[int]) -> None:
    """Theirs: a token is the senior's where an even number of boundary tokens stands before it."""
    rule = HandoffRule.of("sentence", 0.5, 32, 16, boundary, schedule="alternate")
    theirs = [SENIOR if sum(t in boundary for t in ids[:i]) % 2 == 0 else JUNIOR for i in range(len(ids))]
    assert list(rule.authorship(key, ids)) == theirs


def token_by_token(
    rule: HandoffRule, key: SampleKey, ids: list[int], inserted: list[tuple[int, int]], fallback_starts: set[int]
) -> list[int]:
    """`HandoffRule.authorship`, one token after the other."""
    at, mask = OpenRun(rule, author_key(key)), []
    for i, token in enumerate(ids):
        if any(start <= i < stop for start, stop in inserted):
            at.interrupt()
            mask.append(0)
            continue
        at.fallen = at.fallen or i in fallback_starts
        mask.append(at.author)
        at.advance(token)
    return mask


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=3)


@given(rules, keys, tokens, spans, st.frozensets(st.integers(0, 60), max_size=4))
def test_the_authors_of_a_whole_response_are_those_of_its_tokens_in_turn(
    rule: HandoffRule, key: SampleKey, ids: list[int], inserted: list[tuple[int, int]], starts: frozenset[int]
) -> None:
    expected = tuple(token_by_token(rule, key, ids, inserted, set(starts)))
    assert rule.authorship(key, ids, inserted=inserted, fallback_starts=starts) == expected
    assert rule.authorship(key, ids, inserted=iter(inserted), fallback_starts=sorted(starts)) == expected


@given(rules, keys, tokens, tokens, st.booleans())
def test_many_tokens_move_an_open_run_as_one_by_one(
    rule: HandoffRule, key: SampleKey, before: list[int], ids: list[int], fallen: bool
) -> None:
    at = OpenRun(rule, author_key(key))
    for token in before:
        at.advance(token)
    at.fallen = fallen
    start, whole, seen = at.copy(), at.copy(), []
    for token in ids:
        seen.append((at.author, at.run))
        at.advance(token)
    authors, runs = whole.authors_of(ids)
    assert list(zip(authors.tolist(), runs.tolist(), strict=True)) == seen
    assert whole == start, "the place stays"
    whole.advance_all(ids)
    assert whole == at

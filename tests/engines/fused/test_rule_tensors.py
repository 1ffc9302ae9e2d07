"""The rule on tensors is the rule of `rollout.handoff`, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.engines import handoff_wire
from slime_tandem.engines.fused import rule_tensors
from slime_tandem.engines.fused.state import Authors
from slime_tandem.protocol import Handoff
from slime_tandem.rollout.handoff import HandoffRule, author_key, mix32
from slime_tandem.rollout.writer import handoff_of
from slime_tandem.strategies import STRATEGIES
from slime_tandem.types import SampleKey

VOCAB = 12
BOUNDARY = frozenset({2, 5, 11})
TABLES = torch.zeros((2, VOCAB), dtype=torch.bool)
TABLES[1, list(BOUNDARY)] = True

keys = st.builds(SampleKey, st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 10**6))
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=80)
rules = st.builds(
    HandoffRule.of,
    st.sampled_from(tuple(STRATEGIES)),
    prob_senior=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    max_gap_tokens=st.integers(1, 9),
    chunk_size=st.integers(1, 9),
    boundary=st.just(BOUNDARY),
)


@given(st.lists(st.integers(0, 2**33), min_size=1, max_size=20))
def test_mix32_agrees_with_the_rule(xs: list[int]) -> None:
    assert rule_tensors.mix32(torch.tensor(xs)).tolist() == [mix32(x) for x in xs]


def end_state(rule: HandoffRule, ids: list[int]) -> tuple[int, int]:
    run = length = 0
    for token in ids:
        length += 1
        if rule.ends_run(token, length):
            run, length = run + 1, 0
    return run, length


@settings(max_examples=200, deadline=None)
@given(rules, tokens, st.integers(0, 80), st.integers(0, 5))
def test_replay_agrees_with_the_rule(rule: HandoffRule, ids: list[int], split: int, run: int) -> None:
    split = min(split, len(ids))
    begun, length = end_state(rule, ids[:split])
    table = TABLES[int(bool(rule.boundary))]
    got = rule_tensors.replay(torch.tensor(ids[split:], dtype=torch.int64), table, rule.cap or rule_tensors.NO_CAP,
                              run + begun, length)  # fmt: skip
    whole, rest = end_state(rule, ids)
    assert got == (run + whole, rest)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(rules, keys, tokens, st.integers(0, 80), st.booleans()), min_size=1, max_size=4), st.data())
def test_the_state_follows_the_rule_through_prefill_decode_and_retraction(
    rows: list[tuple[HandoffRule, SampleKey, list[int], int, bool]], data: st.DataObject
) -> None:
    """Every row: an input that ends anywhere inside the response, decoding, and a re-prefill at any point."""
    prompt = [3, 4]
    authors = Authors(TABLES, slots=8, locations=600)
    for i, (rule, key, ids, cut, twice) in enumerate(rows):
        cut = min(cut, len(ids) - 1)
        run, length = end_state(rule, ids[:cut])
        rid = "x" + handoff_wire.suffix(handoff_of(rule, author_key(key), run, length), len(prompt) + cut)
        sequence = prompt + ids
        slot, first = i + 1, 1 + 100 * i
        where = torch.zeros((8, 100), dtype=torch.int32)
        where[slot, : len(sequence)] = torch.arange(first, first + len(sequence))
        again = data.draw(st.integers(len(prompt) + cut, len(sequence)))
        expected = rule.authorship(key, ids)
        n, got = len(prompt) + cut, []

        def prefill(start: int, stop: int, rid=rid, slot=slot, sequence=sequence, where=where):  # type: ignore[no-untyped-def]
            return authors.extend(torch.tensor(sequence[start:stop]), where[slot, start:stop].long(), torch.tensor([slot]),
                                  [stop], [rid], where)  # fmt: skip

        codes = prefill(0, n)
        while True:
            got.append(int(codes))
            if n == len(sequence) - 1:
                break
            for _ in range(1 + twice):
                codes = authors.decode(
                    torch.tensor([sequence[n]]), torch.tensor([n]), torch.tensor([slot]), where[slot, n : n + 1].long()
                )
            n += 1
            if n == again:
                slot = slot % 7 + 1  # a retracted request comes back in another slot, part of its tokens still cached
                where[slot] = where[i + 1].clone()
                codes = authors.extend(
                    torch.tensor(sequence[n - 1 : n]),
                    where[slot, n - 1 : n].long(),
                    torch.tensor([slot]),
                    [n],
                    [rid],
                    where,
                )
        assert tuple(got) == expected[cut:]


def test_plain_and_padding_rows_are_the_seniors_and_damaged_ones_are_refused() -> None:
    authors = Authors(TABLES, slots=8, locations=32)
    other = Handoff(akey=1, threshold=0, alternate=False, cap=3, table="0123456789abcdef")
    damaged = "a~tandem1:00"
    newer = "a~tandem2:0000000000000001:0:0:3:-:0:0:1"
    rids = ["plain", None, "a" + handoff_wire.suffix(other, 1), damaged, newer]
    location = torch.arange(1, 6)
    codes = authors.extend(
        torch.zeros(5, dtype=torch.int64), location, location, [1] * 5, rids, torch.zeros((8, 4), dtype=torch.int32)
    )
    assert codes.tolist() == [1, 1, handoff_wire.REFUSED, handoff_wire.REFUSED, handoff_wire.REFUSED]
    zero = torch.zeros(3, dtype=torch.int64)
    assert authors.decode(zero, zero, zero, zero).tolist() == [1, 1, 1]


@pytest.mark.parametrize("table", ["", "00ff00ff00ff00ff"])
@pytest.mark.parametrize("cap", [None, 7])
def test_the_wire_form_comes_back_whole(table: str, cap: int | None) -> None:
    handoff = Handoff(
        akey=2**64 - 1, threshold=2**32, alternate=True, cap=cap, table=table, run=12, run_length=3, junior_scores=True
    )
    assert handoff_wire.parse("some-id.0.0" + handoff_wire.suffix(handoff, 40)) == (handoff, 40)


@pytest.mark.parametrize(
    "rid",
    [
        "~tandem",
        "~tandem1:",
        "x~tandem1:0000000000000001:100000001:0:3:-:0:0:1",
        "x~tandem1:0000000000000001:1:0:3:-:0:9:1",
    ],
)
def test_a_damaged_wire_form_is_no_plain_request(rid: str) -> None:
    with pytest.raises(ValueError, match="tandem"):
        handoff_wire.parse(rid)

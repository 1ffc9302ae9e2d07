"""A handoff strategy of the user's own, named in the settings as `module:attribute`: docs/extending.md's example."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import RunConfig, SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.errors import ConfigError
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.protocol import GenerateRequest, GenerateResult, table_fingerprint
from slime_tandem.rollout.boundaries import BoundaryRecord, boundary_ids, mark_of, rule_of
from slime_tandem.rollout.drive import write_lockstep
from slime_tandem.rollout.handoff import HandoffRule, author_key
from slime_tandem.rollout.writer import TandemWriter, WriterOptions, handoff_of
from slime_tandem.strategies import Mark, Strategy
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR, Message, Prompt, SampleKey, TandemSample

MODULE = """
from slime_tandem.strategies import Mark, Strategy


def ends_in_a_digit(data: bytes) -> bool:
    return data[-1:].isdigit()


after_digit = Strategy(ends_after=ends_in_a_digit, cap=6)
in_turn = Strategy(ends_after=ends_in_a_digit, alternates=True)
as_set = Strategy(ends_after=ends_in_a_digit, cap="max_gap_tokens")
at_letters = Strategy(ends_after=lambda data: data[-1:].isalpha(), alternates=True)
pairs = Strategy(cap=2, alternates=True)
never = Strategy(ends_after=lambda data: False)
broken = Strategy(ends_after=lambda data: data[7] == 0)
a_list = [1]
"""
TABLE: tuple[bytes | None, ...] = (None, b"a", b"1", b" b", b"x2", b"2x", b" 3", b"\n", b"\xe4")
TOKENS = TokenBytes(TABLE, frozenset({0}), frozenset({0}))
DIGITS = {2, 4, 6}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Import path of a user's module with strategies."""
    (tmp_path / "own_handoffs.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_handoffs"
    sys.modules.pop("own_handoffs", None)


def configured(name: str, **settings: Any) -> RunConfig:
    return RunConfig.from_mapping({"tandem": {"selection_strategy": name, **settings}})


class Scripted:
    """Writes tokens by a hash of who it is and what it was given, and stops where it is asked to."""

    def __init__(self, role: int) -> None:
        self.role, self.asked = role, list[GenerateRequest]()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.asked += requests
        return [self.answer(r) for r in requests]

    def answer(self, r: GenerateRequest) -> GenerateResult:
        ids: list[int] = []
        reason = "length"
        while len(ids) < r.max_new_tokens:
            seed = repr((self.role, r.sampling_seed, r.input_ids, ids)).encode()
            ids.append(1 + blake2b(seed).digest()[0] % (len(TABLE) - 1))
            text = TOKENS.join(ids).decode("utf-8", "replace")
            if ids[-1] in r.stop_token_ids or any(re.search(p, text) for p in r.stop_regex):
                reason = "stop"
                break
        return GenerateResult(r.rid, tuple(ids), (-0.5,) * len(ids), reason, "v1")  # type: ignore[arg-type]


def naive_authors(rule: HandoffRule, sample: TandemSample, cap: int | None, ends: Callable[[int], bool]) -> list[int]:
    """Run by run, by the words of the strategy."""
    runs: list[int] = [0]
    for token in sample.response_ids:
        runs[-1] += 1
        if ends(token) or runs[-1] == cap:
            runs.append(0)
    return [rule.author(author_key(sample.key), k) for k, n in enumerate(runs) for _ in range(n)]


@pytest.mark.parametrize(("attribute", "cap"), [("after_digit", 6), ("in_turn", None)])
def test_both_write_by_it_and_the_record_alone_tells_who_wrote_what(
    module: str, attribute: str, cap: int | None
) -> None:
    config = configured(f"{module}:{attribute}")
    record = BoundaryRecord.resolve(config.tandem, TOKENS)
    assert (record.source, record.ids, record.cap) == ("bytes", DIGITS, cap)
    rule = rule_of(config.tandem, record.ids, TOKENS)
    who = {role: Scripted(role) for role in (SENIOR, JUNIOR)}
    options = WriterOptions(rule, SamplingConfig(max_new_tokens=60), TOKENS)
    writers = [TandemWriter(SampleKey(5, 0, i), i, Prompt("p", (), None, "t"), (1,), options) for i in range(4)]
    samples = asyncio.run(write_lockstep(writers, who))  # type: ignore[arg-type]
    sys.modules.pop(module)
    kept = BoundaryRecord.from_json(record.to_json()).rule
    assert module not in sys.modules, "recomputed without the user's code"
    for sample in samples:
        assert isinstance(sample, TandemSample)
        assert sample.authorship_mask == kept.authorship(sample.key, sample.response_ids)
        assert list(sample.authorship_mask) == naive_authors(rule, sample, cap, DIGITS.__contains__)
        assert sample.switches > 4
    # The server is told where to stop by the text: a digit, which other tokens than boundaries hold too.
    assert all(r.stop_regex and r.stop_token_ids == (0,) for e in who.values() for r in e.asked)


def test_the_embedded_server_stops_at_its_boundaries(module: str, trio: Any, side_url: Callable[[str], str]) -> None:
    tokens = ModelTokenizer.load(trio.junior).tokens
    endless = dataclasses.replace(tokens, eos_ids=frozenset())
    prompt = ModelTokenizer.load(trio.junior).render((Message("user", "State 1 + 2 ="),))
    rules = {}
    for attribute, ends in (("after_digit", b"0123456789"), ("at_letters", string.ascii_letters.encode())):
        config = configured(f"{module}:{attribute}")
        record = BoundaryRecord.resolve(config.tandem, tokens)
        assert record.ids == {i for i, data in enumerate(tokens.table) if data and data[-1] in ends}
        rules[attribute] = rule_of(config.tandem, record.ids, tokens)
    assert rules["after_digit"].mark == Mark.of("0123456789")
    writers = [
        TandemWriter(
            SampleKey(5, 0, i),
            i,
            Prompt("p", (), None, "t"),
            prompt,
            WriterOptions(rule, SamplingConfig(max_new_tokens=40), endless),
        )
        for rule in rules.values()
        for i in range(6)
    ]

    async def write() -> list[Any]:
        async with EngineClient(side_url("junior"), role="junior") as client:
            return await write_lockstep(writers, {SENIOR: client, JUNIOR: client})

    samples = asyncio.run(write())
    for writer, sample in zip(writers, samples, strict=True):
        assert len(sample.response_ids) == 40
        assert sample.authorship_mask == writer.options.rule.authorship(sample.key, sample.response_ids)
    capped, open_ended = samples[:6], samples[6:]
    assert sum(s.switches for s in capped) > 10, "by the cap where no digit comes"
    assert sum(s.switches for s in open_ended) > 10
    assert [s.discarded_tokens for s in open_ended] == [0] * 6, "the server never writes past a boundary"


def test_a_fused_engine_gets_it_as_numbers(module: str) -> None:
    rule = rule_of(configured(f"{module}:after_digit").tandem, DIGITS, TOKENS)
    handoff = handoff_of(rule, 7)
    assert (handoff.table, handoff.cap, handoff.alternate) == (table_fingerprint(frozenset(DIGITS)), 6, False)


def test_it_may_take_its_cap_from_the_settings_or_count_alone(module: str) -> None:
    config = configured(f"{module}:as_set", max_gap_tokens=9, prob_senior=0.25)
    record = BoundaryRecord.resolve(config.tandem, TOKENS)
    assert (record.cap, record.prob_senior, record.alternates) == (9, 0.25, False)
    counted = BoundaryRecord.resolve(configured(f"{module}:pairs").tandem, TOKENS)
    assert (counted.source, counted.ids, counted.cap, counted.alternates) == ("none", frozenset(), 2, True)
    named = BoundaryRecord.resolve(configured(f"{module}:as_set", boundary_token_ids=[1]).tandem, TOKENS)
    assert (named.source, named.ids) == ("config", {1})


@pytest.mark.parametrize(
    ("attribute", "settings", "text"),
    [
        (
            "after_digit",
            {"max_gap_tokens": 9},
            r"tandem\.max_gap_tokens=9: expected 32 \(the default\) with tandem\.selec",
        ),
        ("after_digit", {"chunk_size": 9}, r"tandem\.chunk_size=9: expected 16 .*which ignores it"),
        (
            "after_digit",
            {"boundary_classes": ["newline"]},
            r"tandem\.boundary_classes=\['newline'\]: expected \['space'\]",
        ),
        ("pairs", {"boundary_token_ids": [1]}, r"tandem\.boundary_token_ids=\[1\]: expected null"),
        ("in_turn", {"prob_senior": 0.3}, r"tandem\.prob_senior=0\.3: expected 0\.5"),
        (
            "never",
            {},
            r"tandem\.selection_strategy='own_handoffs:never': expected a strategy for which this tokenizer has",
        ),
        ("broken", {}, r"selection_strategy='own_handoffs:broken'.*IndexError: index out of range at token 1, b'a'"),
        ("a_list", {}, r"selection_strategy='own_handoffs:a_list'.*it is a list, no Strategy"),
        ("after_digits", {}, r"selection_strategy='own_handoffs:after_digits'.*AttributeError"),
    ],
)
def test_what_does_not_hold_is_refused_by_name(module: str, attribute: str, settings: Any, text: str) -> None:
    config = configured(f"{module}:{attribute}", **settings)
    with pytest.raises(ConfigError, match=text):
        BoundaryRecord.resolve(config.tandem, TOKENS)


def test_the_settings_alone_import_nothing(module: str) -> None:
    assert configured("no.such.module:thing").tandem.selection_strategy == "no.such.module:thing"
    assert configured(f"{module}:after_digit", max_gap_tokens=9)
    assert module not in sys.modules
    with pytest.raises(ConfigError, match=r"'no\.such\.module:thing'.*ModuleNotFoundError"):
        boundary_ids("no.such.module:thing", TABLE, ())


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "something that ends a run"),
        ({"cap": 0}, r"Strategy\.cap=0: expected a whole number from 1"),
        ({"cap": True}, r"Strategy\.cap=True"),
        ({"cap": "prob_senior"}, r"Strategy\.cap='prob_senior'"),
    ],
)
def test_a_strategy_that_ends_no_run_cannot_be_made(parts: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Strategy(**parts)


# ---- the pattern that is found from the ids ----

pieces = st.lists(
    st.sampled_from([b"a", b"1", b"12", b" 1", b"b1", b"\xe4", "ä".encode(), b"\n", b"x.", b".x"]), max_size=9
)


@given(pieces, st.sets(st.integers(0, 8)), st.lists(st.integers(0, 8), max_size=20), st.integers(1, 3))
def test_the_pattern_is_found_no_later_than_the_last_boundary(
    table: list[bytes], chosen: set[int], response: list[int], runs: int
) -> None:
    ids = {i for i in chosen if i < len(table)}
    mark = mark_of(ids, table)
    if mark is None:
        assert not ids or any(not table[i].decode("utf-8", "ignore") for i in ids), (
            "a boundary without a whole character"
        )
        return
    response = [i for i in response if i < len(table)]
    ends = [n + 1 for n, i in enumerate(response) if i in ids]
    if len(ends) >= runs:
        text = b"".join(table[i] for i in response[: ends[runs - 1]]).decode("utf-8", "replace")
        assert re.search(mark.regex(runs), text)


def test_the_marks_are_few_and_of_the_boundaries_own() -> None:
    """Spaces and letters stand in more other tokens than the full stop does, though some boundaries hold them."""
    table = [b"a.", b" b.", b"c.", b"a", b" b", b"c", b" a", b".a"]
    assert mark_of({0, 1, 2}, table) == Mark.of(".")


def test_a_table_that_needs_too_many_characters_has_no_pattern() -> None:
    letters = [chr(0x4E00 + i).encode() for i in range(65)]
    assert mark_of(set(range(64)), letters) is not None
    assert mark_of(set(range(65)), letters) is None

"""The client side of a fused engine: what goes out in a request's name, what comes back, and what is not believed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.config import RunConfig, SamplingConfig
from slime_tandem.engines import handoff_wire
from slime_tandem.engines.client import EngineClient
from slime_tandem.errors import ConfigError, DataError, EngineError, EngineRejectedError
from slime_tandem.protocol import GenerateRequest, GenerateResult, Handoff
from slime_tandem.rollout.drive import write_lockstep, write_one
from slime_tandem.rollout.handoff import HandoffRule, author_key, mix32
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.strategies import STRATEGIES
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR, AuthorRun, FailedSample, Prompt, SampleKey, TandemSample

RULE = Handoff(akey=7, threshold=2**31, alternate=False, cap=None, table="")
REQUEST = GenerateRequest("r", (1, 2, 3), 2, handoff=RULE)


def ask(report: Any, request: GenerateRequest = REQUEST, ids: Sequence[int] = (7, 8)) -> tuple[GenerateResult, str]:
    """The result of one request whose answer bears `report`, and the name that the request had on the wire."""
    names: list[str] = []

    async def handler(http: web.Request) -> web.StreamResponse:
        [rid] = (await http.json())["rid"]
        names.append(rid)
        meta = {
            "id": rid, "finish_reason": {"type": "length"}, "prompt_tokens": 3, "weight_version": "3",
            # One short, as SGLang sends them of a retracted request.
            "output_token_logprobs": [[-9.0, t, None] for t in list(ids)[1:]],
        }  # fmt: skip
        if report is not None:
            meta[handoff_wire.REPORT] = report
        return web.json_response([{"text": "", "output_ids": list(ids), "meta_info": meta}])

    async def main() -> GenerateResult:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        async with (
            TestServer(app, shutdown_timeout=0.1) as server,
            EngineClient(str(server.make_url("/")), backoff_s=0.001, max_retries=1) as client,
        ):
            [result] = await client.generate([request])
            return result

    return asyncio.run(main()), names[0]


def test_the_report_replaces_the_list_that_sglang_cuts() -> None:
    result, name = ask([[1, -0.5, -0.5], [0, -0.25, -2.0]])
    assert (result.authors, result.output_log_probs, result.senior_log_probs) == ((1, 0), (-0.5, -0.25), (-0.5, -2.0))
    assert handoff_wire.parse(name) == (RULE, 3)


@pytest.mark.parametrize(
    ("report", "kind", "text"),
    [
        (None, EngineRejectedError, "a fused engine"),
        ([[-1, -0.5, -0.5], [-1, -0.5, -0.5]], EngineRejectedError, "does not know"),
        ([[1, -0.5, -0.5]], EngineError, "1 entries"),
        ([[1, -0.5, -0.5], [2, -0.5, -0.5]], EngineError, "an author for each"),
        ([[1, -0.5, -0.5], [0, None, -0.5]], EngineError, "finite"),
        ([[1, -0.5, -0.5], [0, -0.5, None]], EngineError, "finite"),
        ([[1, -0.5, -0.5], [1, -0.5, None, []]], EngineError, "finite"),
        ([[1, -0.5, -0.5, [-1.0]], [0, -0.5, None, []]], EngineError, "1 late log-probs at token 0"),
    ],
    ids=str,
)
def test_an_answer_that_proves_nothing_is_refused(report: Any, kind: type[EngineError], text: str) -> None:
    with pytest.raises(kind, match=text):
        ask(report)


def test_late_log_probs_of_the_senior_find_their_tokens() -> None:
    ids = (7, 8, 9, 6, 5)
    report = [
        [1, -0.5, -0.5],
        [0, -1.0, None, []],
        [0, -2.0, None, []],
        [1, -0.25, -0.25, [-3.0, -4.0]],
        [0, -5.0, None, []],
    ]
    result, _ = ask(report, ids=ids)
    assert result.senior_log_probs == (-0.5, -3.0, -4.0, -0.25, None)


def test_an_aborted_answer_without_tokens_needs_no_report() -> None:
    result, _ = ask(None, ids=())
    assert result.authors == ()


TABLE: tuple[bytes | None, ...] = (None, None, b"a", b" b", b" ", b"\n", b"\n\n", b"c d", b".\n\n", b"x", b"\xe4", None)
EOS = frozenset({0, 1})
TOKENS = TokenBytes(TABLE, frozenset({0, 1, 11}), EOS)
BOUNDARY = frozenset({3, 4, 8})


@dataclasses.dataclass
class FusedScript:
    """A fused engine that writes by an rng of (seed, context) and follows the wire form by its own little rule book."""

    cut: bool = False
    behind: bool = False  # the senior has not read the end of a junior's last turn
    lie_at: int | None = None
    spoil: Callable[[GenerateResult], GenerateResult] = lambda r: r
    seen: int = 0

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        await asyncio.sleep(0)
        return [self.spoil(self.answer(r)) for r in requests]

    def answer(self, r: GenerateRequest) -> GenerateResult:
        h = r.handoff
        if h is None:  # the last scores
            assert r.max_new_tokens == 0
            given = r.input_ids[r.logprob_start_len :]
            scores = tuple(-3.0 for _ in given)
            return GenerateResult(r.rid, (), (), "length", "v1", input_log_probs=scores, input_ids=given)
        ids: list[int] = []
        authors: list[int] = []
        run, length, reason = h.run, h.run_length, None
        while reason is None:
            draw = mix32((h.akey & 0xFFFFFFFF) ^ mix32(run + (h.akey >> 32))) < h.threshold
            author = int(run % 2 == 0 if h.alternate else draw)
            token = mix32(len(r.input_ids) + len(ids) + 31 * author) % len(TABLE)
            ids.append(token)
            authors.append(author if self.seen != self.lie_at else 1 - author)
            self.seen += 1
            length += 1
            if (h.table and token in BOUNDARY) or (h.cap and length >= h.cap):
                run, length = run + 1, 0
            if token in r.stop_token_ids:
                reason = "stop"
            elif len(ids) >= r.max_new_tokens:
                reason = "length"
            elif self.cut and len(ids) == 3:
                reason = "abort"
        own = tuple(-0.1 * (i + 1) for i in range(len(ids)))
        senior: tuple[float | None, ...] = tuple(v if a else v - 1 for v, a in zip(own, authors, strict=True))
        if self.behind:
            last = max((i for i, a in enumerate(authors) if a), default=-1)
            senior = tuple(v if i <= last else None for i, v in enumerate(senior))
        first = r.logprob_start_len
        scored = range(first, len(r.input_ids)) if first >= 0 else range(0)
        return GenerateResult(
            r.rid, tuple(ids), own, reason, "v1", authors=tuple(authors), senior_log_probs=senior,
            input_log_probs=tuple(-3.0 for _ in scored), input_ids=tuple(r.input_ids[i] for i in scored),
        )  # fmt: skip


def make_writer(rule: HandoffRule, i: int = 0, cap: int = 30, **kwargs: Any) -> TandemWriter:
    sampling = SamplingConfig(max_new_tokens=cap, **kwargs)
    return TandemWriter(
        SampleKey(4, 1, i), 0, Prompt("p", (), None, "t"), (2, 3), WriterOptions(rule, sampling, TOKENS, fused=True)
    )


def one(writer: TandemWriter, engine: FusedScript) -> TandemSample:
    return asyncio.run(write_one(writer, {SENIOR: engine, JUNIOR: engine}))


rules = st.builds(
    HandoffRule.of,
    st.sampled_from(tuple(STRATEGIES)),
    prob_senior=st.sampled_from([0.0, 0.3, 1.0]),
    max_gap_tokens=st.integers(1, 7),
    chunk_size=st.integers(1, 4),
    boundary=st.just(BOUNDARY),
)


@settings(max_examples=100, deadline=None)
@given(rules, st.integers(0, 200), st.integers(1, 40))
def test_one_request_writes_the_whole_response(rule: HandoffRule, i: int, cap: int) -> None:
    sample = one(make_writer(rule, i, cap), FusedScript())
    assert sample.requests == 1
    assert sample.authorship_mask == rule.authorship(sample.key, sample.response_ids)
    assert len(sample.senior_log_probs) == len(sample.response_ids)
    spans = [(r.start, r.stop, r.author) for r in sample.runs]
    assert [a for start, stop, a in spans for _ in range(start, stop)] == list(sample.authorship_mask)


@settings(max_examples=60, deadline=None)
@given(rules, st.integers(0, 100), st.booleans())
def test_what_the_senior_has_not_read_is_asked_for_where_it_is_wanted(rule: HandoffRule, i: int, wanted: bool) -> None:
    """One request of its own for the end of a junior's last turn, if its scores are asked for; else none of them are there."""
    writer = make_writer(rule, i)
    writer.options = dataclasses.replace(writer.options, score_junior=wanted)
    sample = one(writer, FusedScript(behind=True))
    whole = bool(sample.authorship_mask[-1])
    assert sample.requests == 1 + (wanted and not whole)
    assert len(sample.senior_log_probs) == (len(sample.response_ids) if wanted or whole else 0)
    tail = len(sample.response_ids) - 1 - max((k for k, a in enumerate(sample.authorship_mask) if a), default=-1)
    assert not wanted or sample.senior_log_probs[len(sample.response_ids) - tail :] == (-3.0,) * tail


@settings(max_examples=60, deadline=None)
@given(rules, st.integers(0, 100))
def test_an_aborted_response_resumes_to_the_same_authors(rule: HandoffRule, i: int) -> None:
    whole = one(make_writer(rule, i), FusedScript())
    part = one(make_writer(rule, i), FusedScript(cut=True))
    while part.finish_reason == "abort":
        writer = TandemWriter.resume(part, WriterOptions(rule, SamplingConfig(max_new_tokens=30), TOKENS, fused=True))
        part = one(writer, FusedScript(cut=True))
    assert part.response_ids == whole.response_ids
    assert part.authorship_mask == whole.authorship_mask
    assert len(part.senior_log_probs) == len(part.response_ids)


def test_a_run_that_fell_back_to_the_senior_is_not_resumed_on_a_fused_engine() -> None:
    rule, key = HandoffRule.of("chunk", 0.5, 32, 2, frozenset()), SampleKey(4, 1, 0)
    begun = TandemSample(
        key=key, group_id=0, prompt=Prompt("p", (), None, "t"), prompt_ids=(2, 3), response_ids=(2, 2, 2),
        authorship_mask=(1, 1, 1), log_probs=(-1.0,) * 3, finish_reason="abort", text="aaa",
        runs=(AuthorRun(SENIOR, 0, 3, "v1"),), fallback_starts=(2,),
    )  # fmt: skip
    assert TandemWriter.resume(begun, WriterOptions(rule, SamplingConfig(), TOKENS)).next_request()[0] == SENIOR
    with pytest.raises(DataError, match=r"fallback_starts.*resume on two servers"):
        TandemWriter.resume(begun, WriterOptions(rule, SamplingConfig(), TOKENS, fused=True))


def test_a_wrong_author_fails_its_sample_alone_and_says_where() -> None:
    rule = HandoffRule.of("word", 0.5, 32, 16, BOUNDARY)
    writers = [make_writer(rule, i) for i in range(3)]
    engine = FusedScript(lie_at=1)
    first, *others = asyncio.run(write_lockstep(writers, {SENIOR: engine, JUNIOR: engine}))
    assert isinstance(first, FailedSample)
    assert "author of response token 1 of SampleKey(seed=4, rollout_id=1, sample_index=0)" in first.reason
    assert f"{author_key(first.key):016x}" in first.reason
    assert all(isinstance(o, TandemSample) for o in others)


def test_missing_authors_or_senior_log_probs_fail() -> None:
    for change in ({"authors": ()}, {"senior_log_probs": (-1.0,)}):
        engine = FusedScript(spoil=lambda r, c=change: dataclasses.replace(r, **c))
        with pytest.raises(EngineError, match="one of each per token"):
            one(make_writer(HandoffRule.of("word", 0.5, 32, 16, BOUNDARY), cap=9), engine)


def test_senior_log_probs_are_left_out_where_they_are_not_at_temperature_one() -> None:
    rule = HandoffRule.of("bernoulli", 0.5, 32, 16, frozenset())
    assert one(make_writer(rule, temperature=0.5), FusedScript()).senior_log_probs == ()


@pytest.mark.parametrize(
    "setting",
    ["tandem.enabled=false", "tandem.junior_tokenizer=any", "engine.junior_url=http://x", "engine.sessions=true"],
)
def test_settings_that_contradict_a_fused_engine_are_refused(setting: str) -> None:
    RunConfig.load(overrides=["engine.mode=fused"])
    with pytest.raises(ConfigError, match=r"with engine\.mode=fused"):
        RunConfig.load(overrides=["engine.mode=fused", setting])

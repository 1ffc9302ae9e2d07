"""The co-writing loop against scripted engines: whatever an engine does, the response is the one the rule prescribes."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.config import SamplingConfig
from slime_tandem.errors import (
    DataError,
    EngineError,
    EngineRejectedError,
    EngineUnavailableError,
    WeightVersionError,
)
from slime_tandem.protocol import GenerateRequest, GenerateResult
from slime_tandem.rollout import writer as writer_module
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.drive import MOST_ABORTS, write_lockstep, write_one
from slime_tandem.rollout.handoff import HandoffRule, author_key
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.strategies import STRATEGIES
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR, FailedSample, Prompt, SampleKey, TandemSample

# Two ends of turn, a special token, spaces and newlines at the start, inside and at the end, half a character.
TABLE: tuple[bytes | None, ...] = (
    None, None, b"a", b" b", b" ", b"\n", b"\n\n", b"c d", b".\n\n", b"x", b"\xe4", None, b" \n\n",
)  # fmt: skip
EOS = frozenset({0, 1})
SPECIAL = frozenset({0, 1, 11})
TOKENS = TokenBytes(TABLE, SPECIAL, EOS)
PROMPT_IDS = (2, 3)
PROMPT = Prompt("p", (), None, "t")


def text_of(ids: Sequence[int]) -> str:
    return TOKENS.join(ids).decode("utf-8", "replace")


def draw(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


@dataclass
class ScriptedEngine:
    """A model whose next token depends on who it is, the request's seed and everything before; and a server with manners.

    `manners` "exact" stops where asked; "over" writes up to three tokens past it; "cut" may answer with less.
    """

    role: int
    vocab: tuple[int, ...] = tuple(range(len(TABLE)))
    tokens: TokenBytes = TOKENS
    manners: str = "exact"
    version: str = "v1"
    spoil: Callable[[GenerateRequest, GenerateResult], GenerateResult] = lambda _, result: result
    batches: list[list[GenerateRequest]] = field(default_factory=list)

    def next_token(self, seed: int | None, before: tuple[int, ...]) -> tuple[int, float]:
        """(token, log-prob) after the ids `before`."""
        d = draw(self.role, seed, before)
        return self.vocab[d % len(self.vocab)], -(1 + d % 1000) / 1000

    def score(self, before: tuple[int, ...], token: int) -> float:
        """Log-prob of a token that somebody else wrote."""
        return -(1 + draw(self.role, "score", before, token) % 1000) / 100

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.batches.append(list(requests))
        await asyncio.sleep(0)
        return [self.spoil(request, self._answer(request)) for request in requests]

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokens.join(ids).decode("utf-8", "replace")

    def _answer(self, r: GenerateRequest) -> GenerateResult:
        ids: list[int] = []
        log_probs: list[float] = []
        reason = "length" if r.max_new_tokens == 0 else None
        extra = draw("extra", r.rid) % 4 if self.manners == "over" and r.max_new_tokens else 0
        while reason is None or extra > 0:
            extra -= reason is not None
            token, log_prob = self.next_token(r.sampling_seed, r.input_ids + tuple(ids))
            ids.append(token)
            log_probs.append(log_prob)
            text = self._text(ids)
            found = any(re.search(p, text) for p in r.stop_regex) or any(s in text for s in r.stop)
            if token in r.stop_token_ids or found:
                reason = reason or "stop"
            elif len(ids) >= r.max_new_tokens:
                reason = reason or "length"
        if self.manners == "cut" and ids:
            n = 1 + draw("cut", r.rid) % len(ids)
            if n < len(ids):
                ids, log_probs, reason = ids[:n], log_probs[:n], "length"
        first, given = r.logprob_start_len, r.input_ids
        scored = range(first, len(given)) if first >= 0 else range(0)
        return GenerateResult(
            r.rid,
            tuple(ids),
            tuple(log_probs),
            reason,
            f"{self.version}/{self.role}",
            input_log_probs=tuple(None if i == 0 else self.score(given[:i], given[i]) for i in scored),
            input_ids=tuple(given[i] for i in scored),
        )


def engines(**kwargs: object) -> dict[int, ScriptedEngine]:
    return {role: ScriptedEngine(role, **kwargs) for role in (SENIOR, JUNIOR)}  # type: ignore[arg-type]


def make_rule(
    strategy: str, prob: float = 0.5, gap: int = 32, chunk: int = 4, boundary: frozenset[int] | None = None
) -> HandoffRule:
    ids = boundary_ids(strategy, TABLE, SPECIAL) if boundary is None else boundary
    return HandoffRule.of(strategy, prob, gap, chunk, ids)


def writer(
    key: SampleKey, rule: HandoffRule, cap: int = 24, custom: bool = False, stop: tuple[str, ...] = (), **kwargs: object
) -> TandemWriter:
    sampling = SamplingConfig(max_new_tokens=cap, stop=stop)
    rule = dataclasses.replace(rule, mark=None) if custom else rule
    return TandemWriter(
        key,
        4,
        PROMPT,
        PROMPT_IDS,
        WriterOptions(rule, sampling, TOKENS, **kwargs),  # type: ignore[arg-type]
    )


def step_by_step(
    key: SampleKey, rule: HandoffRule, cap: int, models: dict[int, ScriptedEngine], stop: tuple[str, ...] = ()
) -> list[tuple]:
    """The reference: one token at a time by whoever is due; [(token, author, log-prob)]."""
    seed = writer(key, rule).next_request()[1].sampling_seed
    out: list[tuple] = []
    run = length = 0
    while len(out) < cap:
        author = rule.author(author_key(key), run)
        token, log_prob = models[author].next_token(seed, PROMPT_IDS + tuple(t for t, _, _ in out))
        out.append((token, author, log_prob))
        if token in EOS or any(s.encode() in TOKENS.join([t for t, _, _ in out]) for s in stop):
            break
        length += 1
        if rule.ends_run(token, length):
            run, length = run + 1, 0
    return out


def one(w: TandemWriter, who: dict[int, ScriptedEngine], **kwargs: object) -> TandemSample:
    return asyncio.run(write_one(w, who, **kwargs))  # type: ignore[arg-type]


def lockstep(
    ws: list[TandemWriter], who: dict[int, ScriptedEngine], **kwargs: object
) -> list[TandemSample | FailedSample]:
    return asyncio.run(write_lockstep(ws, who, **kwargs))  # type: ignore[arg-type]


scenarios = {
    "strategy": st.sampled_from(tuple(STRATEGIES)),
    "prob": st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]),
    "gap": st.integers(1, 9),
    "chunk": st.integers(1, 5),
    "cap": st.integers(1, 30),
    "seed": st.integers(0, 2**63 - 1),
    "manners": st.sampled_from(["exact", "over", "cut"]),
    "custom": st.booleans(),
}


@settings(max_examples=300, deadline=None)
@given(**scenarios)
def test_the_response_is_the_prescribed_one_whatever_the_engines_do(
    strategy: str, prob: float, gap: int, chunk: int, cap: int, seed: int, manners: str, custom: bool
) -> None:
    boundary = frozenset({2, 5, 11}) if custom else None  # ids of a user's own, a special one among them
    rule = make_rule(strategy, prob, gap, chunk, boundary)
    key = SampleKey(seed, 1, 2)
    who = engines(manners=manners)
    sample = one(writer(key, rule, cap, custom), who)

    expected = step_by_step(key, rule, cap, who)
    assert list(zip(sample.response_ids, sample.authorship_mask, sample.log_probs, strict=True)) == expected
    assert sample.authorship_mask == rule.authorship(key, sample.response_ids), "anybody can recompute the authors"
    ended = sample.response_ids[-1] in EOS
    assert sample.finish_reason == ("stop" if ended else "length")
    assert sample.text == text_of(sample.response_ids[:-1] if ended else sample.response_ids)
    assert (sample.key, sample.group_id, sample.prompt, sample.prompt_ids) == (key, 4, PROMPT, PROMPT_IDS)

    asked = [r for e in who.values() for batch in e.batches for r in batch]
    assert sample.requests == len(asked)
    assert len({r.rid for r in asked}) == len(asked), "every request has a name of its own"
    assert len({r.sampling_seed for r in asked}) == 1, "both engines draw from the same stream"
    assert all(len(r.input_ids) - len(PROMPT_IDS) + r.max_new_tokens <= cap for r in asked)
    # The runs tile the response, each by one author under the version that its server named.
    assert [run.start for run in sample.runs] == [0, *(run.stop for run in sample.runs[:-1])]
    assert sample.runs[-1].stop == len(sample.response_ids)
    for run in sample.runs:
        assert set(sample.authorship_mask[run.start : run.stop]) == {run.author}
        assert run.weight_version == f"v1/{run.author}"


@settings(max_examples=60, deadline=None)
@given(**scenarios, n=st.integers(1, 5))
def test_lockstep_writes_what_single_tasks_write(
    strategy: str, prob: float, gap: int, chunk: int, cap: int, seed: int, manners: str, custom: bool, n: int
) -> None:
    rule = make_rule(strategy, prob, gap, chunk, frozenset({2, 5}) if custom else None)
    keys = [SampleKey(seed, 0, i) for i in range(n)]
    singly = [one(writer(k, rule, cap, custom), engines(manners=manners)) for k in keys]
    who = engines(manners=manners)
    rounds: list[int] = []
    together = lockstep([writer(k, rule, cap, custom) for k in keys], who, on_round=rounds.append)
    assert together == singly
    assert rounds == sorted(rounds)
    assert rounds[-1] == n
    for engine in who.values():
        assert len(engine.batches) <= len(rounds), "one batched request per engine and round"
        assert all(engine.batches), "nobody is asked for nothing"


endings = st.lists(st.sampled_from(["a b", "b a", " ", "x", "xx a", "\n\n", "c d"]), max_size=2)


@settings(max_examples=200, deadline=None)
@given(**scenarios, stop=endings)
def test_a_long_answer_taken_as_a_whole_is_the_one_taken_token_by_token(
    strategy: str, prob: float, gap: int, chunk: int, cap: int, seed: int, manners: str, custom: bool, stop: list[str]
) -> None:
    rule = make_rule(strategy, prob, gap, chunk, frozenset({2, 5, 11}) if custom else None)

    def wrote(at_once: int) -> TandemSample:
        with mock.patch.object(writer_module, "_AT_ONCE", at_once):
            return one(writer(SampleKey(seed, 1, 2), rule, cap, custom, tuple(stop)), engines(manners=manners))

    assert wrote(1) == wrote(10**9)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(TABLE) - 1), min_size=1, max_size=40),
    parts=st.lists(st.integers(1, 40), max_size=3),
    cap=st.integers(1, 40),
    strategy=st.sampled_from(tuple(STRATEGIES)),
    stop=endings,
    unread=st.integers(0, 60),
)
def test_a_fused_answer_taken_as_a_whole_is_the_one_taken_token_by_token(
    ids: list[int], parts: list[int], cap: int, strategy: str, stop: list[str], unread: int
) -> None:
    key, rule = SampleKey(3, 1, 2), make_rule(strategy)
    due = rule.authorship(key, ids)

    def wrote(at_once: int) -> tuple[object, ...]:
        w, at = writer(key, rule, cap, stop=tuple(stop), fused=True), 0
        with mock.patch.object(writer_module, "_AT_ONCE", at_once):
            for n in [*parts, len(ids)]:
                _, request = w.next_request()
                part = slice(at, at + n)
                log_probs = tuple(-1.0 - i for i in range(len(ids)))[part]
                scores: tuple[float | None, ...] = tuple(
                    None if i >= unread and due[i] == JUNIOR else -1.0 - i for i in range(len(ids))
                )[part]
                given = request.input_ids[request.logprob_start_len :] if request.logprob_start_len >= 0 else ()
                if not log_probs:
                    break
                w.accept(
                    GenerateResult(
                        request.rid, tuple(ids[part]), log_probs, "length", f"v{at}", authors=due[part],
                        senior_log_probs=scores, input_ids=given, input_log_probs=(-0.5,) * len(given),
                    )
                )  # fmt: skip
                at = len(w.response_ids)
                if w.finish_reason is not None:
                    break
        open_run = (w._open.run, w._open.length, w._open.fallen)
        return (dataclasses.asdict(w.transcript), w.finish_reason, w._cut, bytes(w._turn), open_run)

    assert wrote(1) == wrote(10**9)


def test_a_wrong_author_in_a_long_fused_answer_is_named_by_its_place() -> None:
    key, rule = SampleKey(3, 1, 2), make_rule("word")
    ids = (2, 3) * 40
    due = list(rule.authorship(key, ids))
    due[50] = 1 - due[50]
    w = writer(key, rule, 100, fused=True)
    _, request = w.next_request()
    result = GenerateResult(
        request.rid, ids, (-1.0,) * 80, "length", "v", authors=tuple(due), senior_log_probs=(-1.0,) * 80
    )
    with pytest.raises(EngineError, match=r"author of response token 50 of .*, run 25=0: "):
        w.accept(result)
    assert w.response_ids == []


CLEAN = {
    "word": (0, 2, 3, 4, 9, 10),  # a space only where a boundary token has it
    "sentence": (0, 2, 3, 6, 8, 9),  # a blank line only where a boundary token has it
    "bernoulli": tuple(range(len(TABLE))),
    "chunk": tuple(range(len(TABLE))),
    "alternating": tuple(range(len(TABLE))),
}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(tuple(STRATEGIES)), st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 2**32))
def test_one_request_per_chain_of_runs_and_nothing_discarded(strategy: str, prob: float, seed: int) -> None:
    cap = 40
    rule = make_rule(strategy, prob, gap=cap)
    sample = one(writer(SampleKey(seed, 0, 0), rule, cap), engines(vocab=CLEAN[strategy]))
    assert sample.discarded_tokens == 0
    assert sample.requests == len(sample.runs) == sample.switches + 1


def test_tokens_past_a_handoff_are_counted() -> None:
    """Twelve tokens are answered where the rule lets the senior write three (alternating: one)."""
    for strategy, kept in (("chunk", 3), ("alternating", 1)):
        w = writer(SampleKey(0, 0, 0), make_rule(strategy, chunk=3))  # type: ignore[arg-type]
        _, request = w.next_request()
        assert request.max_new_tokens == kept
        w.accept(GenerateResult(request.rid, (9,) * 12, (-0.5,) * 12, "length", "v"))
        assert (len(w.response_ids), w.done) == (kept, False)
        assert w.transcript.discarded == 12 - kept


def test_a_short_answer_is_continued_by_what_is_missing() -> None:
    """Asking for a whole run again would only make the server write tokens that are dropped."""
    w = writer(SampleKey(0, 0, 0), make_rule("chunk", chunk=4))
    _, request = w.next_request()
    w.accept(GenerateResult(request.rid, (9,), (-0.5,), "length", "v"))
    author, request = w.next_request()
    assert (author, request.max_new_tokens, request.input_ids) == (SENIOR, 3, (*PROMPT_IDS, 9))


@pytest.mark.parametrize(("prob", "author"), [(1.0, SENIOR), (0.0, JUNIOR)])
@pytest.mark.parametrize("strategy", ["word", "sentence", "bernoulli"])
@pytest.mark.parametrize("custom", [False, True])
def test_a_single_author_needs_a_single_plain_request(prob: float, author: int, strategy: str, custom: bool) -> None:
    who = engines(vocab=tuple(i for i in range(len(TABLE)) if i not in EOS))
    sample = one(writer(SampleKey(3, 0, 0), make_rule(strategy, prob, gap=2), 40, custom), who)
    assert set(sample.authorship_mask) == {author}
    assert not who[1 - author].batches
    ((request,),) = who[author].batches
    assert (request.max_new_tokens, request.stop_regex, request.stop_token_ids) == (40, (), tuple(sorted(EOS)))
    assert sample.finish_reason == "length"


def test_a_custom_boundary_stops_on_ids_not_on_text() -> None:
    w = writer(SampleKey(0, 0, 0), make_rule("word", 0.5, boundary=frozenset({9})), custom=True)
    _, request = w.next_request()
    assert request.stop_regex == ()
    assert request.stop_token_ids == (0, 1, 9)


def test_sampling_settings_reach_the_engine() -> None:
    sampling = SamplingConfig(temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=5)
    w = TandemWriter(SampleKey(0, 0, 0), 0, PROMPT, (1,), WriterOptions(make_rule("word", 1.0), sampling, TOKENS))
    _, r = w.next_request()
    assert (r.temperature, r.top_p, r.top_k, r.max_new_tokens, r.return_logprob) == (0.6, 0.9, 20, 5, True)


@pytest.mark.parametrize("role", [SENIOR, JUNIOR])
def test_either_author_may_end_the_turn(role: int) -> None:
    who = engines(vocab=(2, 9))
    who[role].vocab = (1,)
    sample = one(writer(SampleKey(0, 0, 0), make_rule("alternating")), who)
    assert sample.finish_reason == "stop"
    assert sample.response_ids[-1] == 1
    assert sample.authorship_mask == ((1,) if role == SENIOR else (1, 0))


def test_an_end_of_turn_at_the_cap_is_a_stop() -> None:
    who = engines(vocab=(0,))
    assert one(writer(SampleKey(0, 0, 0), make_rule("word"), cap=1), who).finish_reason == "stop"


# ---- engines that fail ----


def emptied(reason: str) -> Callable[[GenerateRequest, GenerateResult], GenerateResult]:
    return lambda r, _: GenerateResult(r.rid, (), (), reason, "v1/1")  # type: ignore[arg-type]


def both_drivers(who: dict[int, ScriptedEngine], rule: HandoffRule, **kwargs: object) -> list[Callable[[], object]]:
    def in_lockstep() -> object:
        written = lockstep([writer(SampleKey(0, 0, i), rule) for i in range(3)], who, **kwargs)
        for sample in written:
            if isinstance(sample, FailedSample):
                raise EngineError("sample", sample.reason, "none failed", "read it")
        return written

    return [lambda: one(writer(SampleKey(0, 0, 0), rule), who, **kwargs), in_lockstep]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_empty_answer_is_an_error_not_an_endless_loop(reason: str) -> None:
    for run in both_drivers(engines(spoil=emptied(reason)), make_rule("alternating")):
        with pytest.raises(EngineError, match=r"senior answer to 0-0-0-0=.0 tokens.*at least one token"):
            run()


def test_an_aborted_request_ends_the_response() -> None:
    wanted = {"aborted": lambda: True}
    empty = one(writer(SampleKey(0, 0, 0), make_rule("word")), engines(spoil=emptied("abort")), **wanted)
    assert empty.response_ids == ()

    def abort_third(r: GenerateRequest, result: GenerateResult) -> GenerateResult:
        if not r.rid.endswith("-2"):
            return result
        return GenerateResult(r.rid, result.output_ids, result.output_log_probs, "abort", result.weight_version)

    sample = one(
        writer(SampleKey(0, 0, 0), make_rule("alternating")), engines(vocab=(2, 9), spoil=abort_third), **wanted
    )
    assert (sample.finish_reason, len(sample.response_ids)) == ("abort", 3)
    assert sample.text == text_of(sample.response_ids), "no end of turn to leave out"


@pytest.mark.parametrize(
    ("log_probs", "what"),
    [((), "0 for 1 tokens"), ((-0.1, -0.2), "2 for 1 tokens"), ((float("nan"),), "nan at token 0"),
     ((float("-inf"),), "-inf at token 0")],
)  # fmt: skip
def test_unusable_log_probs_are_an_engine_error(log_probs: tuple[float, ...], what: str) -> None:
    who = engines(spoil=lambda r, _: GenerateResult(r.rid, (9,), log_probs, "length", "v1/1"))
    for run in both_drivers(who, make_rule("alternating")):
        with pytest.raises(EngineError, match=f"senior output log-probs of 0-0-0-0='{what}'"):
            run()


def test_only_the_seniors_weight_version_is_checked() -> None:
    rule = make_rule("alternating")
    for run in both_drivers(engines(), rule, senior_version="v1/1"):
        run()
    for run in both_drivers(engines(), rule):  # nothing expected, nothing checked
        run()
    for run in both_drivers(engines(version="v0"), rule, senior_version="v1/1"):
        with pytest.raises(WeightVersionError, match=r"senior weight_version='v0/1': expected 'v1/1'"):
            run()


@pytest.mark.parametrize("failing", [(SENIOR,), (JUNIOR,), (SENIOR, JUNIOR)])
def test_a_failing_engine_surfaces_as_its_own_error(failing: tuple[int, ...]) -> None:
    """In a lockstep round both engines work at once; the error is no ExceptionGroup, and the other request is given up."""
    rule = make_rule("bernoulli")
    who = engines()
    cancelled: list[int] = []

    class Down(ScriptedEngine):
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
            raise EngineUnavailableError(f"engine {self.role}", "down", "an answer", "start it")

    class Slow(ScriptedEngine):
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(self.role)
                raise
            raise AssertionError("unreachable")

    who = {role: (Down if role in failing else Slow)(role) for role in (SENIOR, JUNIOR)}
    writers = [writer(SampleKey(0, 0, i), rule) for i in range(16)]
    assert {w.next_request()[0] for w in writers} == {SENIOR, JUNIOR}
    with pytest.raises(EngineUnavailableError, match="='down'"):
        lockstep(writers, who)
    assert cancelled == [role for role in (SENIOR, JUNIOR) if role not in failing]


def test_cancelling_a_rollout_is_not_turned_into_an_error() -> None:
    async def main() -> None:
        task = asyncio.create_task(write_lockstep([writer(SampleKey(0, 0, 0), make_rule("word"))], {
            SENIOR: Hanging(SENIOR), JUNIOR: Hanging(JUNIOR)}))  # fmt: skip
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    class Hanging(ScriptedEngine):
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    asyncio.run(main())


def test_no_writers_no_work() -> None:
    assert lockstep([], engines()) == []


def test_the_writer_guards_its_protocol() -> None:
    w = writer(SampleKey(0, 0, 0), make_rule("word", 1.0))
    with pytest.raises(AssertionError, match="next_request"):
        w.accept(GenerateResult("r", (2,), (-0.1,), "stop", "v"))
    with pytest.raises(AssertionError, match="not finished"):
        w.sample()
    _, r = w.next_request()
    w.accept(GenerateResult(r.rid, (0,), (-0.1,), "stop", "v"))
    with pytest.raises(AssertionError, match="finished"):
        w.next_request()


# ---- stop strings, resuming, scores, inserted text ----


@settings(max_examples=200, deadline=None)
@given(**scenarios, stop=st.lists(st.sampled_from(["a b", "b a", " ", "x", "xx a", "\n\n"]), min_size=1, max_size=2))
def test_a_stop_string_ends_the_response_whoever_writes_it(
    strategy: str,
    prob: float,
    gap: int,
    chunk: int,
    cap: int,
    seed: int,
    manners: str,
    custom: bool,
    stop: list[str],
) -> None:
    rule = make_rule(strategy, prob, gap, chunk, frozenset({2, 5}) if custom else None)
    key, who = SampleKey(seed, 0, 0), engines(manners=manners, vocab=(2, 3, 4, 6, 9))
    sample = one(writer(key, rule, cap, custom, tuple(stop)), who)
    expected = step_by_step(key, rule, cap, who, tuple(stop))
    assert list(zip(sample.response_ids, sample.authorship_mask, sample.log_probs, strict=True)) == expected
    text = text_of(sample.response_ids)
    found = [at for s in stop if (at := text.find(s)) >= 0]
    assert sample.finish_reason == ("stop" if found else "length")
    assert sample.text == (text[: min(found)] if found else text)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("version", ["v0", ""])
def test_an_answer_that_its_engine_aborts_on_its_own_is_asked_for_again_and_never_taken(
    times: int, kept: int, version: str
) -> None:
    """`finish_reason: abort` and nobody aborted: the sample is the one without it, or it has failed after three in a row."""
    rule, left = make_rule("alternating"), 0

    def abort(r: GenerateRequest, result: GenerateResult) -> GenerateResult:
        nonlocal left
        if r.rid != "0-0-0-1" or left == 0:
            return result
        left -= 1
        return GenerateResult(r.rid, result.output_ids[:kept], result.output_log_probs[:kept], "abort", version)

    undisturbed = both_drivers(engines(vocab=(2, 9)), rule)
    for run, other in zip(both_drivers(engines(vocab=(2, 9), spoil=abort), rule), undisturbed, strict=True):
        left = times
        if times < MOST_ABORTS:
            assert run() == other()
        else:
            with pytest.raises(EngineError, match=r"junior answer to 0-0-0-1='aborted by its server, 3 times'"):
                run()
        assert left == 0


def test_a_stop_string_may_cross_a_handoff() -> None:
    who = engines()
    who[SENIOR].vocab, who[JUNIOR].vocab = (2,), (3,)
    sample = one(writer(SampleKey(0, 0, 0), make_rule("alternating"), stop=("a b",)), who)
    assert (sample.response_ids, sample.text, sample.finish_reason) == ((2, 3), "", "stop")


class AbortAfter(ScriptedEngine):
    """Shared counter: from request number `limit` on, answers are aborted after their first token, or before it."""

    limit: list[int]
    keep: int

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        (result,) = await super().generate(requests)
        self.limit[0] -= 1
        if self.limit[0] >= 0:
            return [result]
        n = min(self.keep, len(result.output_ids))
        cut = GenerateResult(
            result.rid, result.output_ids[:n], result.output_log_probs[:n], "abort", result.weight_version
        )
        return [cut]


@settings(max_examples=200, deadline=None)
@given(**scenarios, after=st.integers(0, 6), keep=st.integers(0, 1), score=st.booleans())
def test_an_aborted_sample_resumes_as_if_nothing_had_happened(
    strategy: str, prob: float, gap: int, chunk: int, cap: int, seed: int, manners: str, custom: bool,
    after: int, keep: int, score: bool,
) -> None:  # fmt: skip
    rule = make_rule(strategy, prob, gap, chunk, frozenset({2, 5}) if custom else None)
    key, limit = SampleKey(seed, 0, 0), [after]
    who = {role: AbortAfter(role, manners=manners) for role in (SENIOR, JUNIOR)}
    for engine in who.values():
        engine.limit, engine.keep = limit, keep
    sample = one(writer(key, rule, cap, custom, score_junior=score), who, aborted=lambda: True)  # type: ignore[arg-type]
    whole = one(writer(key, rule, cap, custom, score_junior=score), engines(manners=manners))
    if sample.finish_reason == "abort":
        assert sample.senior_log_probs == ()
        assert whole.response_ids[: len(sample.response_ids)] == sample.response_ids
        again = TandemWriter.resume(sample, writer(key, rule, cap, custom, score_junior=score).options)
        sample = one(again, engines(manners=manners))
        assert len({run.start for run in sample.runs}) == len(sample.runs)
        assert [run.start for run in sample.runs] == [0, *(run.stop for run in sample.runs[:-1])]
    for name in ("response_ids", "authorship_mask", "log_probs", "finish_reason", "text", "senior_log_probs"):
        assert getattr(sample, name) == getattr(whole, name), name


def test_only_an_aborted_sample_of_the_same_settings_is_resumed() -> None:
    sampling = SamplingConfig(max_new_tokens=24)
    whole = one(writer(SampleKey(0, 0, 0), make_rule("alternating")), engines(vocab=(2, 9)))
    with pytest.raises(DataError, match=r"finish_reason.*'length': expected abort"):
        TandemWriter.resume(whole, WriterOptions(make_rule("alternating"), sampling, TOKENS))
    aborted = dataclasses.replace(whole, finish_reason="abort")
    with pytest.raises(DataError, match=r"authorship_mask.*at token 1.*what the rule prescribes"):
        TandemWriter.resume(aborted, WriterOptions(make_rule("chunk"), sampling, TOKENS))
    assert TandemWriter.resume(aborted, WriterOptions(make_rule("alternating"), sampling, TOKENS)).done, (
        "the cap counts what is there"
    )


@settings(max_examples=200, deadline=None)
@given(**scenarios)
def test_the_senior_scores_what_the_junior_wrote(
    strategy: str, prob: float, gap: int, chunk: int, cap: int, seed: int, manners: str, custom: bool
) -> None:
    rule = make_rule(strategy, prob, gap, chunk, frozenset({2, 5}) if custom else None)
    who = engines(manners=manners)
    sample = one(writer(SampleKey(seed, 0, 0), rule, cap, custom, score_junior=True), who)
    plain = one(writer(SampleKey(seed, 0, 0), rule, cap, custom), engines(manners=manners))
    assert sample.response_ids == plain.response_ids
    for i, (token, author) in enumerate(zip(sample.response_ids, sample.authorship_mask, strict=True)):
        expected = who[SENIOR].score(PROMPT_IDS + sample.response_ids[:i], token)
        assert sample.senior_log_probs[i] == (sample.log_probs[i] if author == SENIOR else expected)
    ends_with_junior = sample.authorship_mask[-1] == JUNIOR
    assert sample.requests == plain.requests + ends_with_junior, "free, but for a junior run at the end"


def test_scores_that_are_missing_or_of_other_tokens_are_an_error() -> None:
    def spoil(change: Callable[[GenerateResult], GenerateResult]) -> dict[int, ScriptedEngine]:
        who = engines(vocab=(2, 9))
        who[SENIOR].spoil = lambda r, result: change(result) if r.logprob_start_len >= 0 else result
        return who

    cases: list[tuple[Callable[[GenerateResult], GenerateResult], str]] = [
        (lambda r: dataclasses.replace(r, input_log_probs=(), input_ids=()), "0 values"),
        (lambda r: dataclasses.replace(r, input_ids=(5,) * len(r.input_ids)), "one for each of the last"),
        (lambda r: dataclasses.replace(r, input_log_probs=(float("nan"),) * len(r.input_ids)), "'?nan'?: expected"),
    ]
    for change, what in cases:
        with pytest.raises(EngineError, match=what):
            one(writer(SampleKey(0, 0, 0), make_rule("alternating"), score_junior=True), spoil(change))


@settings(max_examples=100, deadline=None)
@given(**scenarios, n=st.integers(1, 6))
def test_asking_for_less_at_once_changes_nothing(
    strategy: str, prob: float, gap: int, chunk: int, cap: int, seed: int, manners: str, custom: bool, n: int
) -> None:
    rule = make_rule(strategy, prob, gap, chunk, frozenset({2, 5}) if custom else None)
    who = engines(manners=manners)
    sample = one(writer(SampleKey(seed, 0, 0), rule, cap, custom, tokens_per_request=n), who)
    plain = one(writer(SampleKey(seed, 0, 0), rule, cap, custom), engines(manners=manners))
    assert (sample.response_ids, sample.authorship_mask) == (plain.response_ids, plain.authorship_mask)
    assert all(r.max_new_tokens <= n for e in who.values() for batch in e.batches for r in batch)


def test_a_large_custom_table_does_not_travel() -> None:
    rule = make_rule("word", 0.5, boundary=frozenset(range(2, 100)))
    _, request = writer(SampleKey(0, 0, 0), rule, custom=True).next_request()
    assert request.stop_token_ids == (0, 1)
    assert request.max_new_tokens <= 16


TOOL = (9, 4, 2)


@settings(max_examples=100, deadline=None)
@given(**scenarios, turns=st.integers(1, 4), score=st.booleans())
def test_tool_text_between_turns_is_nobodys(
    strategy: str, prob: float, gap: int, chunk: int, cap: int, seed: int, manners: str, custom: bool,
    turns: int, score: bool,
) -> None:  # fmt: skip
    rule = make_rule(strategy, prob, gap, chunk, frozenset({2, 5}) if custom else None)
    calls: list[tuple[int, ...]] = []

    async def environment(w: TandemWriter) -> Sequence[int] | None:
        assert w.response_ids[-1] in EOS
        calls.append(tuple(w.response_ids))
        return TOOL if len(calls) < turns else None

    who = engines(manners=manners, vocab=(1, 2, 3, 9))
    sample = one(writer(SampleKey(seed, 0, 0), rule, cap, custom, score_junior=score), who, environment=environment)
    R = len(sample.response_ids)
    assert cap >= R
    assert sum(t in EOS for t in sample.response_ids) == len(calls), "asked once per finished turn"
    assert [start for start, _ in sample.inserted] == [len(c) for c in calls[: turns - 1] if len(c) < cap]
    for start, stop in sample.inserted:
        assert sample.response_ids[start:stop] == TOOL[: stop - start]
        assert sample.loss_mask[start:stop] == sample.authorship_mask[start:stop] == (0,) * (stop - start)
        assert sample.log_probs[start:stop] == (0.0,) * (stop - start)
        assert not score or sample.senior_log_probs[start:stop] == (0.0,) * (stop - start)
    assert sample.senior_tokens + sample.junior_tokens + sum(b - a for a, b in sample.inserted) == R
    assert sample.authorship_mask == rule.authorship(sample.key, sample.response_ids, inserted=sample.inserted)
    covered = {i for run in sample.runs for i in range(run.start, run.stop)}
    assert covered == {i for i, sampled in enumerate(sample.loss_mask) if sampled}
    calls.clear()
    again = lockstep(
        [writer(SampleKey(seed, 0, 0), rule, cap, custom, score_junior=score)],
        engines(manners=manners, vocab=(1, 2, 3, 9)), environment=environment,
    )  # fmt: skip
    assert again == [sample]


# ---- a sample that fails alone ----


class Picky(ScriptedEngine):
    """Refuses every batch that holds the sample `bad`."""

    bad = "0-0-1-"

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        if any(r.rid.startswith(self.bad) for r in requests):
            raise EngineRejectedError(requests[0].rid, "input too long", "less", "shorten it")
        return await super().generate(requests)


def test_a_refused_sample_fails_alone_and_in_its_place() -> None:
    rule = make_rule("word")
    keys = [SampleKey(0, 0, i) for i in range(4)]
    good = lockstep([writer(k, rule) for k in keys], engines())
    rounds: list[int] = []
    mixed = lockstep([writer(k, rule) for k in keys], {r: Picky(r) for r in (SENIOR, JUNIOR)}, on_round=rounds.append)
    failed = mixed[1]
    assert isinstance(failed, FailedSample)
    assert (failed.key, failed.group_id, failed.prompt) == (keys[1], 4, PROMPT)
    assert "input too long" in failed.reason
    assert [m for i, m in enumerate(mixed) if i != 1] == [g for i, g in enumerate(good) if i != 1]
    assert rounds[-1] == 4

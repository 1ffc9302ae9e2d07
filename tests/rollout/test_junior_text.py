"""A junior with another tokenizer: bytes pass exactly or not at all, and the response stays in the senior's ids."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest
from families import Conversation, Said, native, sample_of, spelt
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slime_tandem.config import SamplingConfig
from slime_tandem.errors import EngineError
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.protocol import GenerateRequest, GenerateResult
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.drive import write_lockstep, write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.junior_text import JuniorText
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.strategies import STRATEGIES
from slime_tandem.tokens.speller import Speller
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR, AuthorRun, FailedSample, Message, Prompt, SampleKey

PROMPT = Prompt("p", (), None, "t")


@pytest.fixture(scope="module")
def pair(trio: Any) -> tuple[Speller, Speller]:
    """(junior, senior) spellers of two real byte-level tokenizers with other merges and another end of turn."""
    return ModelTokenizer.load(trio.teacher).speller(), ModelTokenizer.load(trio.senior).speller()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40) | st.text(max_size=30).map(str.encode))
def test_a_byte_level_vocabulary_spells_every_byte_string(pair: tuple[Speller, Speller], data: bytes) -> None:
    for speller in pair:
        ids = speller.spell(data)
        assert ids is not None
        assert speller.tokens.join(ids) == data
        assert all(speller.tokens.of(i) for i in ids)


def test_what_cannot_be_spelt_is_none() -> None:
    lower = Speller(TokenBytes((b"a", b"\xc3"), frozenset(), frozenset()), lambda t: [0] * len(t), 9)
    assert lower.spell(b"aa") == [0, 0]
    assert lower.spell(b"A") is None, "the tokenizer wrote something else"
    assert lower.spell(b"a\xc3") == [0, 1]
    assert lower.spell(b"\xff") is None, "no id stands for this byte"
    assert lower.spell(b"") == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_translation_keeps_bytes_and_the_sum_of_log_probs(pair: tuple[Speller, Speller], data: st.DataObject) -> None:
    junior, senior = pair
    size = len(junior.tokens.table)
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=12))
    log_probs = [-(1 + i) / 8 for i in range(len(ids))]
    text = JuniorText(junior, senior, (0,))
    found = text.translate(ids, log_probs)
    assert found.complete, (
        "both know every byte, both name the same special tokens, an end of turn is one on both sides"
    )
    assert senior.tokens.join(found.ids) == junior.tokens.join(ids)
    assert sum(found.log_probs) == pytest.approx(sum(log_probs))
    specials = [i for i in ids if junior.tokens.of(i) is None]
    assert sum(senior.tokens.of(i) is None for i in found.ids) == len(specials)
    assert sum(i in senior.tokens.eos_ids for i in found.ids) == sum(i in junior.tokens.eos_ids for i in ids)


def draw(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


class Scripted:
    """Its next token depends on who it is, the seed and the bytes before; it may stop late. Checks every context it is
    given."""

    def __init__(self, role: int, speller: Speller, prompt: tuple[int, ...], ids: Sequence[int], late: bool) -> None:
        self.role, self.speller, self.prompt, self.ids, self.late = role, speller, prompt, ids, late
        self.writers: dict[str, TandemWriter] = {}

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        await asyncio.sleep(0)
        return [self._one(r) for r in requests]

    def _one(self, r: GenerateRequest) -> GenerateResult:
        assert r.conversation is not None
        so_far = self.writers[r.conversation]
        assert r.input_ids[: len(self.prompt)] == self.prompt
        assert self.speller.tokens.join(r.input_ids[len(self.prompt) :]) == so_far.options.tokens.join(
            so_far.response_ids
        )
        out: list[int] = []
        while len(out) < r.max_new_tokens:
            out.append(self.ids[draw(self.role, r.sampling_seed, r.input_ids, out) % len(self.ids)])
            text = self.speller.tokens.join(out).decode("utf-8", "replace")
            if out[-1] in r.stop_token_ids or any(re.search(p, text) for p in r.stop_regex):
                break
        out += [self.ids[0]] * (2 * self.late)
        first = r.logprob_start_len
        given_ids = r.input_ids[first:] if first >= 0 else ()
        return GenerateResult(
            r.rid, tuple(out), (-0.25,) * len(out), "stop", "v",
            input_log_probs=(-0.5,) * len(given_ids), input_ids=tuple(given_ids),
        )  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    strategy=st.sampled_from(tuple(STRATEGIES)), prob=st.sampled_from([0.0, 0.3, 0.7]), seed=st.integers(0, 2**40),
    gap=st.integers(1, 6), cap=st.integers(1, 30), late=st.booleans(), score=st.booleans(),
)  # fmt: skip
def test_the_loop_keeps_both_views_of_one_text(
    pair: tuple[Speller, Speller],
    strategy: str,
    prob: float,
    seed: int,
    gap: int,
    cap: int,
    late: bool,
    score: bool,
) -> None:
    junior, senior = pair
    boundary = boundary_ids(strategy, senior.tokens.table, senior.tokens.special)
    rule = HandoffRule.of(strategy, prob, gap, 3, boundary)
    everything = range(len(junior.tokens.table))
    pick = [i for i in everything if draw(seed, i) % 3 == 0 or i in junior.tokens.eos_ids]
    who = {
        SENIOR: Scripted(SENIOR, senior, (5, 6), range(len(senior.tokens.table)), late),
        JUNIOR: Scripted(JUNIOR, junior, (7,), pick, late),
    }
    writer = TandemWriter(
        SampleKey(seed, 0, 0), 0, PROMPT, (5, 6),
        WriterOptions(rule, SamplingConfig(max_new_tokens=cap), senior.tokens,
            junior_text=JuniorText(junior, senior, (7,)), score_junior=score),
    )  # fmt: skip
    for engine in who.values():
        engine.writers[f"{seed}-0-0"] = writer
    sample = asyncio.run(write_one(writer, who))  # type: ignore[arg-type]
    assert sample.authorship_mask == rule.authorship(sample.key, sample.response_ids)
    assert sample.fallback_starts == (), "two byte-level vocabularies can spell all that the other writes"
    assert len(sample.response_ids) <= cap
    ended = sample.response_ids[-1] in senior.tokens.eos_ids
    assert sample.finish_reason == ("stop" if ended else "length")
    assert all(0 <= i < len(senior.tokens.table) for i in sample.response_ids)
    if score:
        assert len(sample.senior_log_probs) == len(sample.response_ids)


# A senior without a byte for "z", so that the junior's "z" has no exact form.
NARROW = TokenBytes((None, b"a", b" b"), frozenset({0}), frozenset({0}))
WIDE = TokenBytes((b"a", b" b", b"z", None, None), frozenset({3, 4}), frozenset({3}))


ALTERNATING = HandoffRule.of("alternating", 0.5, 4, 2, frozenset())


def narrow_writer(
    refuse: bool, junior_ids: Sequence[int], rule: HandoffRule = ALTERNATING, seed: int = 0
) -> tuple[TandemWriter, dict[int, Scripted]]:
    senior = Speller(NARROW, lambda t: [1 if c == "a" else 2 for c in t.replace(" b", "b") if c in "ab"], 0)
    junior = Speller(WIDE, lambda t: ["ab".index(c) for c in t.replace(" b", "b")], 3, {"<tool>": 4})
    writer = TandemWriter(
        SampleKey(seed, 0, 0), 3, PROMPT, (1,),
        WriterOptions(rule, SamplingConfig(max_new_tokens=12), NARROW,
            junior_text=JuniorText(junior, senior, (0,)), refuse_fallback=refuse),
    )  # fmt: skip
    who = {
        SENIOR: Scripted(SENIOR, senior, (1,), (1,), False),
        JUNIOR: Scripted(JUNIOR, junior, (0,), junior_ids, False),
    }
    for engine in who.values():
        engine.writers[f"{seed}-0-0"] = writer
    return writer, who


@pytest.mark.parametrize("unknown", [2, 4], ids=["a byte", "a special token"])
def test_a_span_without_an_exact_form_falls_back_to_the_senior_and_is_counted(unknown: int) -> None:
    writer, who = narrow_writer(False, (unknown,))
    sample = asyncio.run(write_one(writer, who))  # type: ignore[arg-type]
    assert sample.response_ids == (1,) * 12
    assert sample.authorship_mask == (1,) * 12
    assert sample.fallback_starts == (1, 3, 5, 7, 9, 11), "the first token of every junior run"
    assert writer.options.rule.authorship(sample.key, sample.response_ids) == (1, 0) * 6
    again = writer.options.rule.authorship(sample.key, sample.response_ids, fallback_starts=sample.fallback_starts)
    assert again == sample.authorship_mask


def test_a_run_that_the_junior_began_is_finished_by_the_senior() -> None:
    """The junior writes "a" or a special token that the senior does not have, three tokens a run."""
    rule = HandoffRule.of("chunk", 0.5, 4, 3, frozenset())
    shared = 0
    for seed in range(20):
        writer, who = narrow_writer(False, (0, 4), rule, seed)
        sample = asyncio.run(write_one(writer, who))  # type: ignore[arg-type]
        mask, starts = sample.authorship_mask, sample.fallback_starts
        assert mask == rule.authorship(sample.key, sample.response_ids, fallback_starts=starts)
        for run in range(4):
            here = mask[3 * run : 3 * run + 3]
            taken = [start - 3 * run for start in starts if start // 3 == run]
            assert here == (
                (1, 1, 1) if run % 2 == 0 else (0,) * taken[0] + (1,) * (3 - taken[0]) if taken else (0,) * 3
            )
            shared += here not in ((1, 1, 1), (0, 0, 0))
        for cut in range(1, len(mask)):
            begun = replace(
                sample, response_ids=sample.response_ids[:cut], log_probs=sample.log_probs[:cut], finish_reason="abort",
                authorship_mask=mask[:cut], fallback_starts=tuple(s for s in starts if s <= cut),
                runs=(AuthorRun(SENIOR, 0, cut, "v"),),
            )  # fmt: skip
            again = TandemWriter.resume(
                begun,
                replace(writer.options, junior_text=JuniorText(who[JUNIOR].speller, who[SENIOR].speller, (0,))),
            )
            for engine in who.values():
                engine.writers[f"{seed}-0-0"] = again
            resumed = asyncio.run(write_one(again, who))  # type: ignore[arg-type]
            assert resumed.authorship_mask == rule.authorship(
                resumed.key, resumed.response_ids, fallback_starts=resumed.fallback_starts
            )
            assert resumed.fallback_starts[: len(begun.fallback_starts)] == begun.fallback_starts
    assert shared > 5, "some runs have two authors"


def test_a_span_without_an_exact_form_can_be_refused() -> None:
    writer, who = narrow_writer(True, (2,))
    with pytest.raises(EngineError, match=r"exact form in the senior's vocabulary.*on_unexpressible"):
        asyncio.run(write_one(writer, who))  # type: ignore[arg-type]
    writer, who = narrow_writer(True, (2,))
    (failed,) = asyncio.run(write_lockstep([writer], who))  # type: ignore[arg-type]
    assert isinstance(failed, FailedSample)
    assert (failed.group_id, failed.key) == (3, SampleKey(0, 0, 0))


def test_the_expressible_part_of_an_answer_is_kept() -> None:
    writer, who = narrow_writer(False, (0,))
    sample = asyncio.run(write_one(writer, who))  # type: ignore[arg-type]
    assert (sample.authorship_mask, sample.fallback_starts) == ((1, 0) * 6, ())
    text = JuniorText(who[JUNIOR].speller, who[SENIOR].speller, (0,))
    found = text.translate((0, 4, 0), (-0.5, -0.25, -0.125))
    assert (found.ids, found.log_probs, found.complete) == ((1,), (-0.5,), False)


NARROW_PLUS = TokenBytes((None, b"a", b" b", b"y"), frozenset({0}), frozenset({0}))
"""As NARROW, with a letter of its own, so that the senior's "y" has no exact form for the junior either."""


def spelt_by(tokens: TokenBytes, text: str) -> list[int]:
    """A tokenizer without the letters that it does not know, as one without byte fallback."""
    ids = {b.decode(): i for i, b in enumerate(tokens.table) if b}
    return [ids[piece] for piece in re.findall("|".join(sorted(ids, key=len, reverse=True)), text)]


class Aborting(Scripted):
    """Cut off in its request number `cut` (None: never): it hands over what it has by then, or nothing."""

    def __init__(
        self, role: int, speller: Speller, prompt: tuple[int, ...], ids: Sequence[int], late: bool, cut: int | None
    ) -> None:
        super().__init__(role, speller, prompt, ids, late)
        self.cut, self.asked = cut, 0

    def _one(self, r: GenerateRequest) -> GenerateResult:
        whole = super()._one(r)
        self.asked += 1
        if self.cut is None or self.asked <= self.cut:
            return whole
        n = draw(r.input_ids) % (len(whole.output_ids) + 1)
        return replace(
            whole,
            output_ids=whole.output_ids[:n],
            output_log_probs=whole.output_log_probs[:n],
            finish_reason="abort",
            input_log_probs=(),
            input_ids=(),
        )


@settings(max_examples=150, deadline=None)
@given(
    strategy=st.sampled_from(tuple(STRATEGIES)), prob=st.sampled_from([0.0, 0.3, 0.7]), seed=st.integers(0, 2**40),
    gap=st.integers(1, 6), cap=st.integers(1, 40), late=st.booleans(), score=st.booleans(),
    cuts=st.lists(st.integers(0, 8), max_size=4), most=st.none() | st.integers(1, 4),
    stop=st.sampled_from([(), ("ab",), ("b b", "aa b")]),
)  # fmt: skip
@example(  # only the last scores were cut off, of a response that the text between two turns filled
    strategy="word", prob=0.0, seed=83, gap=1, cap=11, late=False, score=True, cuts=[6], most=None, stop=(),
)  # fmt: skip
def test_a_junior_that_cannot_say_everything_through_turns_stops_and_resumes(
    strategy: str, prob: float, seed: int, gap: int, cap: int, late: bool, score: bool, cuts: list[int],
    most: int | None, stop: tuple[str, ...],
) -> None:  # fmt: skip
    """Juniors and seniors each with text and special tokens that the other has no form for, two turns, aborts anywhere."""
    senior = Speller(NARROW_PLUS, lambda t: spelt_by(NARROW_PLUS, t), 0)
    junior = Speller(WIDE, lambda t: spelt_by(WIDE, t), 3, {"<tool>": 4})
    rule = HandoffRule.of(strategy, prob, gap, 3, boundary_ids(strategy, NARROW_PLUS.table, NARROW_PLUS.special))
    key, sampling = SampleKey(seed, 0, 0), SamplingConfig(max_new_tokens=cap, stop=stop)
    options = {"score_junior": score, "tokens_per_request": most}
    writer = TandemWriter(
        key,
        0,
        PROMPT,
        (1,),
        WriterOptions(rule, sampling, NARROW_PLUS, junior_text=JuniorText(junior, senior, (0,)), **options),
    )
    pick = [i for i in range(5) if draw(seed, i) % 4]
    turns = 0

    async def environment(w: TandemWriter) -> list[int] | None:
        nonlocal turns
        turns += 1
        return [2, 1, 3][: draw(seed, turns) % 3 + 1] if len(w.chat) < 3 else None

    for cut in [*cuts, None]:
        who = {
            SENIOR: Aborting(SENIOR, senior, (1,), range(4), late, cut),
            JUNIOR: Aborting(JUNIOR, junior, (0,), pick or [0], late, cut),
        }
        for engine in who.values():
            engine.writers[f"{seed}-0-0"] = writer
        sample = asyncio.run(write_one(writer, who, environment=environment, aborted=lambda: True))  # type: ignore[arg-type]
        again = rule.authorship(
            key, sample.response_ids, inserted=sample.inserted, fallback_starts=sample.fallback_starts
        )
        assert sample.authorship_mask == again
        assert len(sample.response_ids) <= cap
        covered = sorted([(r.start, r.stop) for r in sample.runs] + list(sample.inserted))
        assert [i for a, b in covered for i in range(a, b)] == list(range(len(sample.response_ids)))
        if sample.finish_reason != "abort":
            break
        text = JuniorText(junior, senior, (0,))
        writer = TandemWriter.resume(sample, WriterOptions(rule, sampling, NARROW_PLUS, junior_text=text, **options))
    assert sample.finish_reason in ("stop", "length")
    if score:
        assert len(sample.senior_log_probs) == len(sample.response_ids)


@pytest.mark.parametrize("junior", ["qwen2.5", "llama3", "gemma3", "phi-4", "smollm2", "mistral-tekken"])
@pytest.mark.parametrize("senior", ["qwen2.5", "llama3", "gemma3", "phi-4", "deepseek-v3"])
def test_between_turns_the_junior_reads_its_own_markup(families: dict[str, Any], senior: str, junior: str) -> None:
    """Its context of a response of two turns is what its own template writes of it; not what the senior reads there."""
    told = Conversation(
        (Message("user", "What is 12 + 345?"),),
        (Said("Let me see"), Said("It is 357.")),
        ((Message("user", "And then?"),),),
        ended=False,
    )
    (mine, chat), (theirs, own) = families[junior], families[senior]
    sample = sample_of(theirs, own, told)
    pair = mine.speller(), theirs.speller()
    text = JuniorText(*pair, chat.render(told.messages), chat.next_turn)
    asked = sample.response_ids, sample.inserted, sample.inserted_messages
    context = text.context(*asked)
    assert context is not None
    assert native(chat, told).startswith(spelt(mine.tokens, context))
    # Asked in the middle of it, and again: the same in the end, and nothing is read twice.
    steps = JuniorText(*pair, chat.render(told.messages), chat.next_turn)
    stop = sample.inserted[0][1]
    for n, spans in ((1, 0), (stop, 1), (stop + 1, 1), (len(sample.response_ids), 1)):
        found = steps.context(sample.response_ids[:n], sample.inserted[:spans], sample.inserted_messages[:spans])
    assert mine.tokens.join(found or ()) == mine.tokens.join(context)
    assert spelt(mine.tokens, found or ()) == spelt(mine.tokens, context)
    # A role that its template does not have leaves the turn to the senior.
    if "tool" not in chat.turns.roles:
        tool = ((Message("tool", "357"),),)
        fresh = JuniorText(*pair, chat.render(told.messages), chat.next_turn)
        assert fresh.context(asked[0], asked[1], tool) is None or "phi" in junior

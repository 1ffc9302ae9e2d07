"""What a transcript is told, its sample says; what a sample says, tells the same transcript."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.rollout.transcript import Inserted, Sampled, Transcript, pieces
from slime_tandem.types import JUNIOR, SENIOR, Message, Prompt, SampleKey

KEY, PROMPT = SampleKey(1, 2, 3), Prompt("p", (), None, "t")
log_probs = st.floats(-20, 0)
sampled = st.builds(
    Sampled,
    st.integers(0, 99),
    st.sampled_from([SENIOR, JUNIOR]),
    log_probs,
    st.lists(st.integers(0, 99), max_size=2).map(tuple),
)
answers = st.lists(sampled, max_size=6)
texts = st.builds(
    Inserted, st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple), st.just((Message("tool", "4"),))
)
# A response is answers, each with text behind it or none: nothing is inserted before the first token.
parts = st.lists(st.tuples(answers.filter(bool), st.none() | texts), min_size=1, max_size=5)


def written(parts: list[tuple[list[Sampled], Inserted | None]]) -> Transcript:
    t = Transcript(KEY, 4, PROMPT, (1, 2))
    for number, (answer, text) in enumerate(parts):
        start = len(t)
        for s in answer:
            t.append(s.token, s.author, s.log_prob, s.kept)
        t.close_runs(start, f"v{number}")
        t.requests += 1
        if text is not None:
            t.insert(text.ids, text.messages)
    return t


@given(parts)
def test_a_sample_comes_back_piece_by_piece(parts: list[tuple[list[Sampled], Inserted | None]]) -> None:
    told = [piece for answer, text in parts for piece in (*answer, *([text] if text else []))]
    sample = written(parts).sample("abort", "text", scores=False, kept=True)
    assert list(pieces(sample)) == told
    again = Transcript(KEY, 4, PROMPT, (1, 2))
    for piece in pieces(sample):
        if isinstance(piece, Inserted):
            again.insert(piece.ids, piece.messages)
        else:
            again.append(piece.token, piece.author, piece.log_prob, piece.kept)
    again.runs, again.requests = list(sample.runs), sample.requests
    assert again.sample("abort", "text", scores=False, kept=True) == sample


@given(parts)
def test_runs_tile_what_was_sampled_and_change_with_author_or_answer(
    parts: list[tuple[list[Sampled], Inserted | None]],
) -> None:
    t = written(parts)
    sample = t.sample("stop", "", scores=False, kept=False)
    assert [i for run in sample.runs for i in range(run.start, run.stop)] == [
        i for i, on in enumerate(sample.loss_mask) if on
    ]
    for run in sample.runs:
        assert {sample.authorship_mask[i] for i in range(run.start, run.stop)} == {run.author}
    for a, b in itertools.pairwise(sample.runs):
        assert a.stop < b.start or a.author != b.author or a.weight_version != b.weight_version
    assert (sample.requests, sample.kept_ids, t.context) == (len(parts), (), (1, 2, *sample.response_ids))


@given(parts, st.data())
def test_scores_stand_where_their_tokens_do(
    parts: list[tuple[list[Sampled], Inserted | None]], data: st.DataObject
) -> None:
    """In any portions: the senior's tokens keep their own, inserted text has 0, the junior's have what was read."""
    t = written(parts)
    values = data.draw(st.lists(log_probs, min_size=len(t), max_size=len(t)))
    while t.scored < len(t):
        n = data.draw(st.integers(1, len(t) - t.scored))
        t.score_read(values[t.scored : t.scored + n])
    sample = t.sample("stop", "", scores=True, kept=False)
    expected = [
        own if author == SENIOR else read if on else 0.0
        for own, read, author, on in zip(
            sample.log_probs, values, sample.authorship_mask, sample.loss_mask, strict=True
        )
    ]
    assert list(sample.senior_log_probs) == expected


def test_nothing_is_inserted_for_no_ids() -> None:
    t = Transcript(KEY, 4, PROMPT, (1,))
    t.insert((), (Message("tool", "4"),))
    assert (t.inserted, t.messages, len(t)) == ([], [], 0)

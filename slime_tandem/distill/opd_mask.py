"""From the lists of a rollout's responses to its OPD mask: score, normalise, select. Pure.

The mask says which tokens carry the teacher's signal; the task reward's own mask stays as it is. It is chosen over the whole
rollout batch, before mini-batches are cut, and depends on (seed, rollout id, tokens) alone. It asks no engine and knows no
loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slime_tandem.config import SelectionConfig
from slime_tandem.distill.published import PublishedScores, published_choice, published_scores
from slime_tandem.distill.selection import COMPARED, SELECTION_METRICS, TokenKeys, overlap, select, selection_metrics
from slime_tandem.distill.teachability import TokenScores, raw_scores, token_scores
from slime_tandem.errors import DataError
from slime_tandem.types import BoolArray, SampleKey, TopLists

OPD_MASK_METRICS = (
    *SELECTION_METRICS, "valid_tokens", "masked_tokens", "unshared_candidates", *(f"overlap_{name}" for name in COMPARED),
    "end_of_turn", "end_of_turn_kept",
)  # fmt: skip
"""Names under `selection/`, always all of them; None: nothing to measure."""


@dataclass(frozen=True)
class OpdMask:
    """`masks`: per response [R], True where the signal counts; `metrics`: `selection/...`, names in `OPD_MASK_METRICS`.

    `published`: the scores of all tokens, one below the other, where the published rules chose.
    """

    masks: list[BoolArray]
    metrics: dict[str, float | None]
    published: PublishedScores | None = None


def opd_mask(
    keys: Sequence[SampleKey],
    usable: Sequence[BoolArray],
    lists: Sequence[TopLists | None],
    settings: SelectionConfig,
    banks_before: int = 0,
    ends: Sequence[BoolArray] | None = None,
) -> OpdMask:
    """Choose the tokens of one rollout: `usable` [R] per response may carry the signal, `lists` [R, K] say what they teach.

    A usable token whose lists share no entry with a counterpart on both sides cannot be scored: it is masked and counted
    (`selection/masked_tokens`). Without usable tokens everything is masked. `banks_before`: how many rollouts have written
    a bank of their tokens, with which the published rules' draws advance. `ends` [R] per response: its ends of turn, whose
    part in the choice is reported apart (None: not known). Raises DataError where lists are missing for a
    selector that needs them, and for responses of several rollouts.
    """
    lengths, tokens = [len(u) for u in usable], token_keys(keys, usable)
    able = np.concatenate([*usable, np.zeros(0, dtype=np.bool_)])
    out: dict[str, float | None] = dict.fromkeys(OPD_MASK_METRICS)
    at_ends = None if ends is None else np.concatenate([*ends, np.zeros(0, dtype=np.bool_)])
    if settings.mask == "full":
        out |= selection_metrics(able, able, tokens, None) | _counts(able, 0) | _of_ends(able, able, at_ends)
        return _result(lengths, able, out)
    if len({(k.seed, k.rollout_id) for k in keys}) > 1:
        raise DataError("opd_mask", "several rollouts", "the responses of one", "choose per rollout")
    if not able.any():
        return _result(lengths, able, out | _counts(able, 0))
    scored = joined_lists(lists, usable, settings)
    # A list can lose all of its entries to the other vocabulary.
    known = scored.shared
    valid = able & known
    published = published_scores(scored, tokens, settings) if settings.rules == "reference" else None
    scores = _own_scores(scored, valid, tokens, settings) if published is None else published.as_token_scores(valid)

    def choose(selector: str) -> BoolArray:
        if published is not None:
            return published_choice(published, valid, tokens, selector, settings, banks_before)
        return select(
            scores, tokens, selector, settings.ratio,
            seed=keys[0].seed, rollout_id=keys[0].rollout_id, budget=settings.budget,
            min_keep_per_sample=settings.min_keep_per_sample, gamma=settings.gamma,
        )  # fmt: skip

    chosen = choose(settings.mask)
    out |= selection_metrics(chosen, valid, tokens, scores) | _counts(valid, int((able & ~known).sum()))
    out |= _of_ends(chosen, valid, at_ends)
    entries = np.concatenate([scored.student_ids[able], scored.teacher_ids[able]])
    out["unshared_candidates"] = float((entries < 0).mean())
    out |= {f"overlap_{name}": overlap(chosen, choose(name)) for name in COMPARED}
    return replace(_result(lengths, chosen, out), published=published)


def _own_scores(lists: TopLists, valid: BoolArray, tokens: TokenKeys, settings: SelectionConfig) -> TokenScores:
    raw = raw_scores(lists, settings.missing_mass, settings.compatibility, tokens.sequence, settings.prefix_alpha)
    return token_scores(raw, valid, settings.normalisation, reverse=settings.divergence == "reverse")


def _counts(valid: BoolArray, masked: int) -> dict[str, float | None]:
    return {"valid_tokens": float(valid.sum()), "masked_tokens": float(masked)}


def _of_ends(chosen: BoolArray, valid: BoolArray, ends: BoolArray | None) -> dict[str, float | None]:
    """The share of ends of turn in what was chosen, and of valid ends of turn that were."""
    if ends is None:
        return {}
    kept, there = int((chosen & ends).sum()), int((valid & ends).sum())
    return {
        "end_of_turn": kept / n if (n := int(chosen.sum())) else None,
        "end_of_turn_kept": kept / there if there else None,
    }


def _result(lengths: Sequence[int], chosen: BoolArray, metrics: dict[str, float | None]) -> OpdMask:
    masks = np.split(chosen, np.cumsum(lengths)[:-1]) if lengths else []
    return OpdMask(masks, {f"selection/{name}": value for name, value in metrics.items()})


def token_keys(keys: Sequence[SampleKey], usable: Sequence[BoolArray]) -> TokenKeys:
    """The tokens of all responses, one below the other."""
    lengths = [len(u) for u in usable]
    return TokenKeys(
        np.repeat(np.array([k.sample_index for k in keys], dtype=np.int64), lengths),
        np.concatenate([np.arange(n) for n in (*lengths, 0)]),
    )


def joined_lists(lists: Sequence[TopLists | None], usable: Sequence[BoolArray], settings: SelectionConfig) -> TopLists:
    """The lists of all responses one below the other [N, K]; a response without usable tokens needs none."""
    k, cross = settings.top_k, settings.asks_cross
    parts: list[TopLists] = []
    for mine, able in zip(lists, usable, strict=True):
        if mine is None:
            if able.any():
                expected = f"lists of every response, which selector {settings.selector!r} scores tokens by"
                raise DataError("AlignedScores.lists", None, expected, "score with Scoring(lists=...)")
            ids, values = np.full((len(able), k), -1, dtype=np.int64), np.zeros((len(able), k))
            mine = TopLists(ids, values, ids, values, *((values, values) if cross else ()))
        parts.append(mine)
    return TopLists.concatenate(parts)

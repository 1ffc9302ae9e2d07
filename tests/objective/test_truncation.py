"""Kept sets against vLLM's reference, its ties, hand-computed cases, shards' lists, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_tandem.errors import DataError
from slime_tandem.objective.truncation import KeptIds, Truncation, kept_mask, thresholds


def vllm_reference(logits: Tensor, k: int, p: float, min_p: float, temperature: float) -> Tensor:
    """What is left, by the published description: divide by the temperature; drop what has less than min_p of the best one's
    probability; sort upwards, drop what is below the k-th from the end; drop the beginning whose cumulative probability is at
    most 1 - p, but never the last; put everything back in its place."""
    x = logits / temperature
    probs = x.softmax(-1)
    x = x.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -math.inf)
    ranked, order = x.sort(dim=-1)
    V = x.shape[-1]
    if 0 < k < V:
        ranked = ranked.masked_fill(ranked < ranked[:, V - k, None], -math.inf)
    if p < 1:
        drop = ranked.softmax(-1).cumsum(-1) <= 1 - p
        drop[:, -1] = False
        ranked = ranked.masked_fill(drop, -math.inf)
    return torch.empty_like(x).scatter_(-1, order, ranked) > -math.inf


def random_logits(seed: int, V: int = 60, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(12, V, generator=g, dtype=torch.float64) * 3).to(dtype)


SETTINGS = st.tuples(
    st.sampled_from([-1, 1, 3, 20, 60, 1000]),
    st.sampled_from([1.0, 0.95, 0.8, 0.3, 1e-6]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.sampled_from([1.0, 0.6, 1.7]),
    st.integers(0, 10**6),
)


@settings(max_examples=150, deadline=None)
@given(SETTINGS)
def test_equals_vllms_reference_where_no_two_logits_are_equal(setting: tuple[int, float, float, float, int]) -> None:
    k, p, min_p, temperature, seed = setting
    logits = random_logits(seed)
    want = vllm_reference(logits, k, p, min_p, temperature)
    assert torch.equal(kept_mask(logits, k, p, min_p, temperature), want)


@settings(max_examples=60, deadline=None)
@given(SETTINGS, st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_equals_are_kept_together_and_nothing_else_is_added(
    setting: tuple[int, float, float, float, int], dtype: torch.dtype
) -> None:
    k, p, min_p, temperature, seed = setting
    logits = (random_logits(seed) * 2).round().div(2).to(dtype)
    kept, want = kept_mask(logits, k, p, min_p, temperature), vllm_reference(logits.double(), k, p, min_p, temperature)
    for x, mine, theirs in zip(logits, kept, want, strict=True):
        least = x[mine].min()
        assert torch.equal(mine, x >= least)
        # The reference keeps at least as little, and never stops above the same value.
        assert (mine | ~theirs).all()
        assert x[theirs].min() == least


def test_hand_computed_sets() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64).log()

    def kept(*cut: Any) -> list[int]:
        return kept_mask(logits, *cut)[0].nonzero().flatten().tolist()

    assert kept(-1, 1.0, 0.0) == kept(4, 1.0, 0.0) == kept(99, 1.0, 0.0) == [0, 1, 2, 3]
    assert kept(1, 1.0, 0.0) == kept(-1, 1e-9, 0.0) == kept(-1, 1.0, 1.0) == [1]
    assert kept(3, 1.0, 0.0) == [1, 2, 3]
    assert kept(-1, 0.69, 0.0) == [1, 3]
    assert kept(-1, 0.71, 0.0) == [1, 2, 3]
    # After top-k 2 the rest is renormalised to 4/7 and 3/7, so that 0.5 needs one token only.
    assert kept(2, 0.5, 0.0) == [1]
    assert kept(2, 0.6, 0.0) == [1, 3]
    # min-p 0.6 leaves 0.4 and 0.3 and comes first: 0.5 of that is one token. After top-p (two tokens) it would leave both.
    assert kept(-1, 0.5, 0.6) == [1]
    # The rows of a batch have settings of their own.
    per_row = kept_mask(
        logits.repeat(3, 1), torch.tensor([2, -1, -1]), torch.tensor([1.0, 0.71, 1.0]), torch.tensor([0.0, 0.0, 0.6])
    )
    assert per_row.sum(-1).tolist() == [2, 3, 2]


def test_impossible_tokens_are_cut_by_any_truncation_and_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-math.inf, 1.0, 0.5, -math.inf]])
    assert kept_mask(logits, 3, 0.999999, 0.0).tolist() == [[False, True, True, False]]
    assert kept_mask(logits, -1, 1.0, 0.0).all()
    assert kept_mask(torch.tensor([[0.0, -0.0, -1.0]]), 1, 1.0, 0.0).tolist() == [[True, True, False]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_thresholds_are_logits(dtype: torch.dtype) -> None:
    logits = random_logits(3, 200, dtype)
    for cut in ((20, 1.0, 0.0), (-1, 0.7, 0.0), (-1, 1.0, 0.1), (20, 0.7, 0.1)):
        limit = thresholds(logits, *cut)
        assert limit.dtype == dtype
        assert (logits == limit[:, None]).any(-1).all()
    assert torch.equal(thresholds(logits, 20, 1.0, 0.0), logits.topk(20).values[:, -1])
    assert thresholds(logits[:0], 20, 0.9, 0.1).shape == (0,)


@pytest.mark.parametrize(
    ("name", "values"), [("top_k", (0, -2)), ("top_p", (0.0, 1.1, math.nan)), ("min_p", (-0.1, 2.0, math.nan))]
)
def test_settings_outside_their_range_are_refused(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(DataError, match=f"{name}=.*Remedy"):
            Truncation(**{name: value})


def test_lists_of_kept_ids_become_masks_of_any_rows_and_columns() -> None:
    kept = KeptIds.of([[4, 0], [], [1], [3, 5]])
    whole = kept.mask(0, 4, 0, 6)
    assert whole.int().tolist() == [[1, 0, 0, 0, 1, 0], [1] * 6, [0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 1]]
    assert torch.equal(kept.mask(1, 4, 3, 3), whole[1:4, 3:])
    assert KeptIds.of([]).mask(0, 0, 0, 6).shape == (0, 6)

"""Draws: counter-based, distributed as asked, truncated as asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime_tandem.engines.embedded.sampling import SamplingBatch, sample, uniforms


def batch(n: int, **changes: Any) -> SamplingBatch:
    arrays: dict[str, Any] = {
        "temperature": np.ones(n, np.float32),
        "top_k": np.full(n, -1),
        "top_p": np.ones(n),
        "min_p": np.zeros(n),
        "seed": np.zeros(n, np.uint64),
        "position": np.arange(n),
    }
    return SamplingBatch(**{**arrays, **changes})


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    seed, position = np.array([1, 2, 3], np.uint64), np.array([5, 5, 5])
    u = uniforms(seed, position)
    assert len(set(u.tolist())) == 3
    assert u[::-1].tolist() == uniforms(seed[::-1].copy(), position).tolist()
    assert u[1] == uniforms(np.array([2], np.uint64), np.array([5]))[0]


def test_uniforms_are_uniform_along_positions_and_seeds() -> None:
    n = 20_000
    along_positions = uniforms(np.full(n, 11, np.uint64), np.arange(n))
    along_seeds = uniforms(np.arange(n, dtype=np.uint64), np.full(n, 3))
    for u in (along_positions, along_seeds):
        assert u.min() >= 0.0
        assert u.max() < 1.0
        counts, _ = np.histogram(u, bins=20, range=(0, 1))
        # chi-square with 19 degrees of freedom: 43.8 is its 0.999 quantile
        assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 43.8
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.025


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draw_frequencies_follow_the_distribution(temperature: float) -> None:
    n = 20_000
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    tokens, log_probs, _ = sample(logits.repeat(n, 1), batch(n, temperature=np.full(n, temperature, np.float32)))
    want = torch.softmax(logits / temperature, dim=-1)
    torch.testing.assert_close(log_probs[0].exp(), want)
    got = torch.bincount(tokens, minlength=4) / n
    assert (got - want).abs().max() < 0.02


def test_greedy_takes_the_best_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    tokens, log_probs, _ = sample(logits, batch(2, temperature=np.zeros(2, np.float32)))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, dim=-1))


def test_greedy_and_sampled_rows_mix() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    mixed = batch(4, temperature=np.array([0.0, 1.0, 0.0, 0.7], np.float32))
    alone = [
        sample(
            logits[i : i + 1],
            SamplingBatch(
                *(getattr(mixed, f)[i : i + 1] for f in ("temperature", "top_k", "top_p", "min_p", "seed", "position"))
            ),
        )
        for i in range(4)
    ]
    tokens, log_probs, _ = sample(logits, mixed)
    assert tokens.tolist() == [int(t) for t, _, _ in alone]
    torch.testing.assert_close(log_probs, torch.cat([p for _, p, _ in alone]))


def test_truncated_draws_stay_inside_and_log_probs_are_of_the_full_distribution() -> None:
    n = 500
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(n, 1)
    tokens, log_probs, kept = sample(logits, batch(n, top_k=np.full(n, 2)))
    assert set(tokens.tolist()) == {2, 3}
    assert kept is not None
    assert kept[0].tolist() == [False, False, True, True]
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, dim=-1))
    tokens, _, _ = sample(logits, batch(n, top_p=np.full(n, 0.5)))
    assert set(tokens.tolist()) == {3}
    tokens, _, _ = sample(logits, batch(n, min_p=np.full(n, 0.2)))
    assert set(tokens.tolist()) == {2, 3}
    # Greedy rows draw from nothing, and a row without truncation keeps all.
    mixed = batch(3, temperature=np.array([0, 1, 1], np.float32), top_k=np.array([2, -1, 2]))
    _, _, kept = sample(logits[:3], mixed)
    assert kept is not None
    assert kept.sum(-1).tolist() == [4, 4, 2]


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    n = 2000
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).repeat(n, 1)
    tokens, _, _ = sample(logits, batch(n))
    assert set(tokens.tolist()) == {1, 3}

"""Log-probs and entropies of sampled tokens."""

from __future__ import annotations

import math

import pytest
import torch

from slime_tandem.objective.logprobs import token_log_probs


def test_closed_form_with_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(9.0), 0.0]])
    log_probs, entropy = token_log_probs(logits, torch.tensor([1, 1]))
    assert log_probs.exp().tolist() == pytest.approx([0.75, 0.1])
    assert entropy.tolist() == pytest.approx(
        [-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))]
    )
    halved, _ = token_log_probs(logits, torch.tensor([1, 1]), temperature=2.0)
    assert halved.exp().tolist() == pytest.approx([3**0.5 / (1 + 3**0.5), 0.25])


def test_agrees_with_the_definition_on_random_logits() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 50, generator=g) * 5
    tokens = torch.randint(50, (20,), generator=g)
    log_probs, entropy = token_log_probs(logits, tokens, temperature=0.7)
    reference = torch.distributions.Categorical(logits=(logits / 0.7).double())
    torch.testing.assert_close(log_probs.double(), reference.log_prob(tokens), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), reference.entropy(), atol=1e-5, rtol=1e-5)


def test_half_precision_logits_are_widened_first() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    log_probs, entropy = token_log_probs(logits, torch.tensor([1, 2, 3]))
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, token_log_probs(logits.float(), torch.tensor([1, 2, 3]))[0])


def test_the_gradient_is_one_hot_minus_the_softmax_and_the_entropy_has_none() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([2]))
    assert not entropy.requires_grad
    (g,) = torch.autograd.grad(log_probs.sum(), logits)
    torch.testing.assert_close(g, torch.tensor([[0.0, 0.0, 1.0]]) - torch.softmax(logits.detach(), -1))


def test_huge_and_impossible_logits_stay_numbers() -> None:
    """Padded vocabulary rows may be masked with -inf; 0 * log 0 is 0."""
    log_probs, entropy = token_log_probs(torch.tensor([[1e4, -1e4, -math.inf]]), torch.tensor([0]))
    assert (log_probs.item(), entropy.item()) == (0.0, 0.0)

"""Log-probs of sampled tokens from logits. Pure torch."""

from __future__ import annotations

import torch
from torch import Tensor


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(log-probs [T], entropies [T]) in nats of logits [T, V] at the sampled tokens [T].

    The log-probs are those of softmax(logits / temperature), what the engines report for output tokens. The entropy is a
    metric: it carries no gradient.

    >>> lp, h = token_log_probs(torch.zeros(1, 4), torch.tensor([2]))
    >>> round(lp.item(), 4), round(h.item(), 4)
    (-1.3863, 1.3863)
    """
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = torch.special.entr(log_p.exp()).sum(-1)  # 0 for impossible tokens, where p log p is 0 * -inf
    return chosen, entropy

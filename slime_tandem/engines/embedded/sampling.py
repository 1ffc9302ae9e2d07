"""Draws the next tokens: temperature, min-p, top-k, top-p, with counter-based random numbers, and the log-probs that
go with them.

The uniform number behind a token is a hash of (sampling seed, index of the token in the whole sequence) and nothing else.
A request that is retried, resumed with its own output as input, re-ordered or batched with others draws the same tokens.

Log-probs follow SGLang 0.5.15.post1 (`layers/sampler.py`): the log-softmax over the full vocabulary of logits / temperature;
for greedy rows (temperature 0) at temperature 1. A truncation narrows the draw, the log-prob returned is of the full,
untruncated distribution; what was kept is returned beside it (`objective.truncation` has the rules and the order). It knows no
request and no stop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slime_tandem.objective.truncation import kept_mask
from slime_tandem.types import BoolArray, FloatArray, IntArray

UintArray = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling settings of B rows, one array entry per row.

    `temperature` [B] float32 (0: greedy), `top_k` [B] int64 (<= 0: whole vocabulary), `top_p` and
    `min_p` [B] float64, `seed` [B] uint64, `position` [B] int64: index that the drawn token will have in its whole sequence.
    """

    temperature: npt.NDArray[np.float32]
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    seed: UintArray
    position: IntArray


def _mix(x: UintArray) -> UintArray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seed: UintArray, position: IntArray) -> FloatArray:
    """Numbers in [0, 1) that depend on (seed, position) alone; both [B], the result is [B] float64.

    The mixer is SplitMix64's finaliser (Steele, Lea and Flood 2014), applied to the seed and then to the seed's hash plus
    the position's Weyl step, so that neighbouring seeds and positions share nothing.

    >>> a = uniforms(np.array([7, 7], dtype=np.uint64), np.array([3, 4]))
    >>> bool(a[0] == uniforms(np.array([7], dtype=np.uint64), np.array([3]))[0]), bool(a[0] != a[1])
    (True, True)
    """
    base = _mix(seed + _GOLDEN)
    bits = _mix(base + (position.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: torch.Tensor, rows: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw one token per row.

    `logits` [B, V] float32. Returns `tokens` [B] int64, `log_probs` [B, V] float32 (nats) by the module's rule, and
    `kept` [B, V]
    bool, the tokens that each row drew from, or None if all rows drew from all.
    """
    greedy = rows.temperature == 0.0
    scale = torch.from_numpy(np.where(greedy, np.float32(1.0), rows.temperature))
    log_probs = torch.log_softmax(logits / scale.unsqueeze(-1) if (rows.temperature != 1.0).any() else logits, dim=-1)
    if greedy.all():
        return log_probs.argmax(dim=-1), log_probs, None
    probs = log_probs.exp()
    cut: BoolArray = ((rows.top_k > 0) & (rows.top_k < logits.shape[-1])) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
    cut &= ~greedy
    kept = None
    if cut.any():
        index = torch.from_numpy(cut.nonzero()[0])
        top_k, top_p, min_p = (torch.from_numpy(a[cut]) for a in (rows.top_k, rows.top_p, rows.min_p))
        kept = torch.ones_like(logits, dtype=torch.bool)
        kept[index] = kept_mask(logits[index], top_k, top_p, min_p, scale[index])
        probs = probs * kept
    cdf = torch.cumsum(probs, dim=-1, dtype=torch.float64)
    total = cdf[:, -1:]
    u = torch.from_numpy(uniforms(rows.seed, rows.position)).unsqueeze(-1)
    # Below the total even after rounding, so that the search ends on a token of positive probability.
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy), log_probs.argmax(dim=-1), tokens)
    # NaN logits leave no valid index; the caller refuses the row by its log-prob.
    return tokens.clamp_(max=logits.shape[-1] - 1), log_probs, kept

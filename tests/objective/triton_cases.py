"""The Triton kernels against float64; `test_logprobs_triton.py` runs this in a Python that has triton."""

from __future__ import annotations

import math
import os
import sys

if len(sys.argv) > 1:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from slime_tandem.objective import logprobs_triton as kernels
from slime_tandem.objective.logprobs import token_log_probs
from slime_tandem.objective.truncation import Replay, Truncation

DEVICE = "cpu" if "TRITON_INTERPRET" in os.environ else "cuda"
SMALL = kernels.Blocks(group=8, part=4, window=4, wide_window=2, grad_part=4, grad_step=2)
"""Several parts, windows and groups in sixty logits."""
CUTS = [
    Truncation(),
    Truncation(top_p=0.8),
    Truncation(min_p=0.1),
    Truncation(20, 0.95),
    Truncation(10, 0.7, 0.05),
    Truncation(1000, 0.3),
]


def logits_of(V: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows, one of few different values, one of a single value, one with impossible tokens."""
    x = torch.randn(6, V, generator=torch.Generator().manual_seed(V)) * 3
    x[1] = x[1].round()
    x[2] = 0.0
    x[3, ::3] = -torch.inf
    return x.to(dtype)


def check(V: int, dtype: torch.dtype, cut: Truncation) -> None:
    x, tokens = logits_of(V, dtype), torch.tensor([0, 1, 2, 3, 4, 5])
    tokens[0] = x[0].argmax()
    replayed = torch.tensor([True, True, True, True, True, False])
    grads = torch.tensor([1.0, -0.5, 2.0, 1.0, 0.0, -1.5])
    exact = x.double().requires_grad_()
    want, want_entropy = token_log_probs(exact, tokens, 0.7, replay=Replay(cut, replayed))
    (want_grad,) = torch.autograd.grad(want, exact, grads.double())
    on = [t.to(DEVICE) for t in (x, tokens, replayed, grads)]
    on[1:] = [torch.stack([t, t], 1)[:, 0] for t in on[1:]]  # not contiguous
    got, entropy, state = kernels.forward(on[0], on[1], 0.7, cut, on[2], SMALL)
    kernels.backward(on[0], on[1], 0.7, state, on[3], on[0], SMALL)  # in place
    case = f"V={V} {dtype} {cut}"
    finite = want.isfinite()
    assert torch.equal(got.cpu()[~finite].double(), want[~finite].detach()), case
    assert (got.cpu() - want)[finite].abs().max() < 1e-5, (case, got, want)
    assert (entropy.cpu() - want_entropy).abs().max() < 1e-5, (case, entropy, want_entropy)
    grad = on[0].cpu().double()
    # The interpreter cuts off what does not fit into bfloat16, a GPU rounds it.
    step = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert ((grad - want_grad).abs() <= step * want_grad.abs() + 1e-6).all(), (case, grad, want_grad)
    assert torch.equal(grad[:4] != 0, want_grad[:4] != 0) or dtype == torch.float16, case  # float16 has a least number


def check_bad() -> None:
    """NaN, +inf, a row without any possible token, no rows."""
    x = torch.zeros(4, 40)
    x[:, 0] = 3.0
    x[0, 5], x[1, 5], x[2] = math.nan, math.inf, -math.inf
    for cut in (Truncation(), Truncation(3)):
        tokens = torch.zeros(4, dtype=torch.long)
        got, _, _ = kernels.forward(x.to(DEVICE), tokens.to(DEVICE), 1.0, cut, None, SMALL)
        assert got.isnan().tolist() == [True, True, True, False], got
        got, _, _ = kernels.forward(x.to(DEVICE), tokens.to(DEVICE) - 1, 1.0, cut, None, SMALL)
        assert got.isnan().all(), "no such id"
        got, entropy, state = kernels.forward(x[:0].to(DEVICE), tokens[:0].to(DEVICE), 1.0, cut, None, SMALL)
        kernels.backward(x[:0].to(DEVICE), tokens[:0].to(DEVICE), 1.0, state, got, x[:0].to(DEVICE), SMALL)
        assert got.shape == entropy.shape == (0,)


if __name__ == "__main__":
    for i, cut in enumerate(CUTS):
        check(60, (torch.bfloat16, torch.float16, torch.float32)[i % 3], cut)
    check(7, torch.bfloat16, CUTS[3])
    check_bad()
    print("all cases hold")

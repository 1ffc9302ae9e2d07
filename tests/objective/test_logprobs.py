"""Log-probs and entropies of sampled tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slime_tandem.errors import DataError
from slime_tandem.objective.logprobs import token_log_probs, top_log_probs
from slime_tandem.objective.truncation import KeptIds, Replay, Truncation, kept_mask


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


CUTS = {
    "none": Truncation(),
    "top_k": Truncation(top_k=5),
    "top_p": Truncation(top_p=0.8),
    "min_p": Truncation(min_p=0.1),
    "all": Truncation(8, 0.9, 0.02),
}


def random_case(T: int = 7, V: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, V, generator=g, dtype=torch.float64) * 3
    return logits, torch.randint(V, (T,), generator=g)


@pytest.mark.parametrize("name", CUTS)
def test_replay_is_the_softmax_over_the_kept_and_the_label(name: str) -> None:
    logits, tokens = random_case()
    cut = CUTS[name]
    kept = kept_mask(logits, cut.top_k, cut.top_p, cut.min_p, 0.7)
    assert name == "none" or not kept.gather(1, tokens[:, None]).all(), (
        "some label lies outside, which is the case to test"
    )
    kept.scatter_(1, tokens[:, None], True)
    want = torch.log_softmax((logits / 0.7).masked_fill(~kept, -math.inf), -1).gather(1, tokens[:, None])[:, 0]
    got, entropy = token_log_probs(logits, tokens, 0.7, replay=Replay(cut))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        entropy, token_log_probs(logits, tokens, 0.7)[1], msg="the entropy is the full distribution's"
    )
    lists = KeptIds.of([row.nonzero().flatten().tolist() for row in kept])
    torch.testing.assert_close(token_log_probs(logits, tokens, 0.7, replay=Replay(cut, kept=lists))[0], want)
    half = torch.arange(len(tokens)) % 2 == 0
    mixed, _ = token_log_probs(logits, tokens, 0.7, replay=Replay(cut, half))
    torch.testing.assert_close(mixed, torch.where(half, want, token_log_probs(logits, tokens, 0.7)[0]))


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_gradient_is_autograds_and_zero_outside_the_kept(name: str, in_place: bool) -> None:
    logits, tokens = random_case(seed=1)
    grads = torch.linspace(-1, 1, len(tokens), dtype=torch.float64)
    cut = CUTS[name]
    kept = kept_mask(logits, cut.top_k, cut.top_p, cut.min_p, 0.7).scatter(1, tokens[:, None], True)
    plain = logits.clone().requires_grad_()
    want = torch.log_softmax((plain / 0.7).masked_fill(~kept, -math.inf), -1).gather(1, tokens[:, None])[:, 0]
    (want_grad,) = torch.autograd.grad(want, plain, grads)
    x = logits.clone().requires_grad_()
    (got,) = torch.autograd.grad(token_log_probs(x, tokens, 0.7, replay=Replay(cut), in_place=in_place)[0], x, grads)
    torch.testing.assert_close(got, want_grad)
    assert not got[~kept].any()
    assert (got.data_ptr() == x.data_ptr()) == in_place


def test_the_gradient_against_finite_differences() -> None:
    logits, tokens = random_case(T=3, V=9)

    def of(x: Tensor) -> Tensor:
        out: Tensor = token_log_probs(x, tokens, 0.7, replay=Replay(Truncation(4, 0.9)))[0]
        return out

    assert torch.autograd.gradcheck(of, logits.requires_grad_())


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_gradient_of_the_entropy_is_autograds_of_the_full_distribution(name: str, in_place: bool) -> None:
    logits, tokens = random_case(seed=2)
    logits[0, :3] = -math.inf
    tokens[0] = 5
    grads = torch.linspace(-1, 1, len(tokens), dtype=torch.float64)
    of_entropy = grads.flip(0) * 0.3
    of_entropy[1] = 0.0
    cut = CUTS[name]
    kept = kept_mask(logits, cut.top_k, cut.top_p, cut.min_p, 0.7).scatter(1, tokens[:, None], True)
    plain = logits.clone().requires_grad_()
    full = torch.log_softmax(plain / 0.7, -1)
    entropy = -(full.exp() * full.masked_fill(full == -math.inf, 0.0)).sum(-1)
    chosen = torch.log_softmax((plain / 0.7).masked_fill(~kept, -math.inf), -1).gather(1, tokens[:, None])[:, 0]
    (want,) = torch.autograd.grad((chosen, entropy), plain, (grads, of_entropy))
    want = torch.where(logits == -math.inf, 0.0, want)  # autograd's 0 * inf
    x = logits.clone().requires_grad_()
    found = token_log_probs(x, tokens, 0.7, replay=Replay(cut), in_place=in_place, entropy_grad=True)
    torch.testing.assert_close(found[1], entropy)
    (got,) = torch.autograd.grad(found, x, (grads, of_entropy))
    torch.testing.assert_close(got, want)


def test_the_gradient_of_the_entropy_by_hand() -> None:
    """Probabilities 3/4 and 1/4: dH/dx = -p (log p + H), and a uniform distribution is the top."""
    x = torch.tensor([[math.log(3.0), 0.0], [1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    _, entropy = token_log_probs(x, torch.tensor([0, 0]), entropy_grad=True)
    (got,) = torch.autograd.grad(entropy.sum(), x)
    assert got[0].tolist() == pytest.approx([-3 / 16 * math.log(3), 3 / 16 * math.log(3)])
    assert got[1].tolist() == pytest.approx([0.0, 0.0])
    assert not token_log_probs(x, torch.tensor([0, 0]))[1].requires_grad, "a metric, unless asked for"


class Largest(TorchDispatchMode):
    """Remembers the most elements of a new float32 tensor."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.dtype == torch.float32:
                self.elements = max(self.elements, x.numel())
        return out


def test_chunks_change_nothing_and_no_wide_copy_of_all_logits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, tokens = random_case(T=50, V=64)
    logits = exact.bfloat16()
    replay, grads = Replay(Truncation(8, 0.9)), torch.linspace(-1, 1, 50)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        x = logits.clone().requires_grad_()
        log_probs, entropy = token_log_probs(x, tokens, replay=replay)
        return log_probs, entropy, torch.autograd.grad(log_probs, x, grads)[0]

    whole = run()
    monkeypatch.setattr("slime_tandem.objective.logprobs._CHUNK", 64 * 7)
    with Largest() as seen:
        parts = run()
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert 0 < seen.elements <= 64 * 7


def test_top_log_probs_are_topk_of_the_log_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_tandem.objective.logprobs._CHUNK", 100)
    logits, _ = random_case()
    want = torch.log_softmax(logits / 0.7, -1).topk(6)
    log_probs, ids = top_log_probs(logits, 6, 0.7)
    torch.testing.assert_close(log_probs, want.values)
    assert torch.equal(ids, want.indices)
    with pytest.raises(DataError, match="k=41: expected 1 to 40"):
        top_log_probs(logits, 41)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_bad_logits_give_a_defined_value(cut: Truncation) -> None:
    logits = torch.zeros(5, 12)
    logits[:, 0] = 3.0
    logits[0, 5] = math.nan
    logits[1, 5] = math.inf
    logits[2, 5] = -math.inf
    logits[3] = -math.inf
    tokens = torch.tensor([0, 0, 5, 0, 0])
    logits.requires_grad_()
    log_probs, _ = token_log_probs(logits, tokens, replay=Replay(cut))
    assert log_probs.isnan().tolist() == [True, True, False, True, False]
    assert log_probs[2] == -math.inf, "an impossible token was sampled"
    # A row without gradient has none, whatever is in it: 0 * NaN is 0 here.
    (grad,) = torch.autograd.grad(log_probs, logits, torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))
    assert not grad[:4].any()
    assert grad[4].isfinite().all()


def test_an_empty_response_is_nothing() -> None:
    x = torch.zeros(0, 9, requires_grad=True)
    log_probs, entropy = token_log_probs(x, torch.zeros(0, dtype=torch.long), replay=Replay(Truncation(3, 0.9, 0.1)))
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 9)


def test_what_does_not_fit_is_refused() -> None:
    logits, tokens = torch.zeros(3, 5), torch.tensor([0, 1, 2])
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(DataError, match="temperature="):
            token_log_probs(logits, tokens, temperature)
    for bad in ([0, 1, 5], [-1, 0, 0]):
        with pytest.raises(DataError, match=r"ids in \[0, 5\)"):
            token_log_probs(logits, torch.tensor(bad))
    for shapes in ((logits, tokens[:2]), (logits[0], tokens), (logits.long(), tokens)):
        with pytest.raises(DataError, match="floats"):
            token_log_probs(*shapes)
    for replay in (
        Replay(CUTS["top_k"], torch.ones(2, dtype=torch.bool)),
        Replay(CUTS["top_k"], kept=KeptIds.of([[1]])),
    ):
        with pytest.raises(DataError, match="one per token"):
            token_log_probs(logits, tokens, replay=replay)
    for ids in ([[0], [5], [1]], [[-1], [], []]):
        with pytest.raises(DataError, match=r"replay\.kept\.ids=.*ids in \[0, 5\)"):
            token_log_probs(logits, tokens, replay=Replay(CUTS["top_k"], kept=KeptIds.of(ids)))
    with pytest.raises(DataError, match="memory of its own"):
        token_log_probs(logits[:1].expand(3, 5), tokens, in_place=True)


def test_no_token_of_no_vocabulary() -> None:
    log_probs, _ = token_log_probs(torch.zeros(0, 0), torch.zeros(0, dtype=torch.long))
    assert log_probs.shape == (0,)

"""Divergences over candidates: hand-computed values, laws, and gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.config import OpdSignal
from slime_tandem.errors import ConfigError
from slime_tandem.objective.divergence import (
    DIVERGENCES,
    candidate_divergence,
    find_divergence,
    log_probs_of,
    log_rest_of,
)

KINDS = ("reverse_kl", "forward_kl", "jsd")


def distribution(rng: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.log_softmax(2 * torch.randn(shape, generator=rng, dtype=torch.float64), -1)


def test_by_hand() -> None:
    """Student (0.5, 0.25, rest 0.25), teacher (0.25, 0.25, rest 0.5)."""
    s = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()
    t = torch.tensor([[0.25, 0.25]], dtype=torch.float64).log()
    known = torch.ones(1, 2, dtype=torch.bool)
    ln2 = math.log(2)
    assert candidate_divergence(s, t, known, "reverse_kl").item() == pytest.approx(0.5 * ln2 - 0.25 * ln2)
    assert candidate_divergence(s, t, known, "forward_kl").item() == pytest.approx(-0.25 * ln2 + 0.5 * ln2)
    m = (0.375, 0.25, 0.375)
    want = 0.5 * (0.25 * math.log(0.25 / m[0]) + 0.5 * math.log(0.5 / m[2]))
    want += 0.5 * (0.5 * math.log(0.5 / m[0]) + 0.25 * math.log(0.25 / m[2]))
    assert candidate_divergence(s, t, known, "jsd").item() == pytest.approx(want)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 8))
def test_never_negative_and_never_more_than_the_full_one(kind: str, seed: int, k: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    s, t = distribution(rng, (1, 8)), distribution(rng, (1, 8))
    ids = torch.randperm(8, generator=rng)[None, :k]
    known = torch.ones(1, k, dtype=torch.bool)
    some = candidate_divergence(s.gather(-1, ids), t.gather(-1, ids), known, kind).item()
    full = candidate_divergence(s, t, torch.ones(1, 8, dtype=torch.bool), kind).item()
    assert -1e-9 <= some <= full + 1e-5
    # A candidate that does not exist changes nothing, whatever stands in its place.
    wider = [torch.cat([x.gather(-1, ids), torch.full((1, 1), junk)], -1) for x, junk in ((s, -3.0), (t, 0.0))]
    more = candidate_divergence(*wider, torch.cat([known, torch.zeros(1, 1, dtype=torch.bool)], -1), kind).item()
    assert more == pytest.approx(some)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_finite_differences(kind: str) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=rng, dtype=torch.float64).requires_grad_()
    teacher = distribution(rng, (3, 6))
    ids = torch.tensor([[0, 3, -1], [5, 1, 2], [4, -1, -1]])
    known = ids >= 0

    def value(x: torch.Tensor) -> torch.Tensor:
        log_p = torch.log_softmax(x, -1).gather(-1, ids.clamp(min=0))
        return candidate_divergence(log_p, teacher.gather(-1, ids.clamp(min=0)), known, kind)

    assert torch.autograd.gradcheck(value, (logits,))


@pytest.mark.parametrize("kind", KINDS)
def test_descent_brings_the_student_to_the_teacher(kind: str) -> None:
    """As a loss term it has a gradient; put in as an advantage of the sampled token it would have none on average."""
    rng = torch.Generator().manual_seed(1)
    teacher = distribution(rng, (1, 5)).float()
    logits = torch.zeros(1, 5, requires_grad=True)
    ids, known = torch.tensor([[0, 1, 2]]), torch.ones(1, 3, dtype=torch.bool)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        loss = candidate_divergence(log_probs_of(logits, ids), teacher[:, :3], known, kind).sum()
        loss.backward()
        optimizer.step()
    assert torch.softmax(logits.detach(), -1)[0, :3] == pytest.approx(teacher[0, :3].exp(), abs=2e-3)


def test_lists_that_sum_to_more_than_one_stay_finite() -> None:
    s = torch.tensor([[0.7, 0.4]]).log().requires_grad_()
    t = torch.tensor([[0.6, 0.401]]).log()
    loss = candidate_divergence(s, t, torch.ones(1, 2, dtype=torch.bool), "reverse_kl")
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert s.grad is not None
    assert torch.isfinite(s.grad).all()


def test_a_position_without_candidates_compares_nothing() -> None:
    s = torch.zeros(1, 2, requires_grad=True)
    loss = candidate_divergence(s, torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool), "jsd")
    loss.sum().backward()
    assert loss.item() == 0.0
    assert s.grad is not None
    assert s.grad.tolist() == [[0.0, 0.0]]


def test_a_candidate_beyond_the_vocabulary_has_no_log_prob() -> None:
    """Not that of another token, and not 0: the loss then names it."""
    ids = torch.tensor([[3, 4, -1]])
    assert log_probs_of(torch.zeros(1, 4), ids).isnan().tolist() == [[False, True, False]]


def test_temperature_is_that_of_the_sampler() -> None:
    logits = torch.tensor([[2.0, 0.0]])
    assert log_probs_of(logits, torch.tensor([[0]]), 2.0).item() == pytest.approx(math.log(math.e / (math.e + 1)))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("gap", [5.0, 18.0, 25.0, 60.0])
def test_a_student_that_is_sure_of_its_candidates_still_learns_of_the_rest(kind: str, gap: float) -> None:
    """The rest of a sharp distribution is far below what 1 - sum(p) can tell in single precision."""

    def loss(logits: torch.Tensor) -> torch.Tensor:
        ids, teacher = torch.tensor([[0, 1, 2]]), torch.full((1, 3), 0.1, dtype=logits.dtype).log()
        own = logits.log_softmax(-1)
        if logits.dtype == torch.float64:  # by hand
            s = torch.cat([own[:, :3], own[:, 3:].logsumexp(-1, keepdim=True)], -1)
            t = torch.tensor([[0.1, 0.1, 0.1, 0.7]], dtype=torch.float64)
            m = (t + s.exp()) / 2
            kl = {
                "forward_kl": (t * (t.log() - s)).sum(),
                "reverse_kl": (s.exp() * (s - t.log())).sum(),
                "jsd": ((t * (t.log() - m.log())).sum() + (s.exp() * (s - m.log())).sum()) / 2,
            }
            return kl[kind]
        known = torch.ones(1, 3, dtype=torch.bool)
        rest = log_rest_of(logits, ids)
        return candidate_divergence(log_probs_of(logits, ids), teacher, known, kind, student_rest=rest).sum()

    got, want = [], []
    for dtype, out in ((torch.float32, got), (torch.float64, want)):
        logits = torch.zeros(1, 20, dtype=dtype)
        logits[0, :3] = gap
        logits.requires_grad_()
        value = loss(logits)
        (gradient,) = torch.autograd.grad(value, logits)
        out += [value.item(), gradient[0, 0].item(), gradient[0, 9].item()]
    assert got == pytest.approx(want, rel=2e-3, abs=5e-6)


def test_the_table_has_the_signals_of_the_settings() -> None:
    assert {"sampled", *DIVERGENCES} == set(get_args(OpdSignal))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    def make(name: str, body: str) -> str:
        (tmp_path / f"{name}.py").write_text(f"import torch\ndef f(student, teacher, beta): {body}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        return f"{name}:f"

    return make


def test_a_signal_of_ones_own_is_taken_as_it_is(own: Callable[[str, str], str]) -> None:
    """Written by hand, KL(student || teacher) is the built-in one, gradient and all."""
    name = own("sig_kl", "return (student * (student.clamp(min=1e-30).log() - teacher.clamp(min=1e-30).log())).sum(-1)")
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    teacher = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).log_softmax(-1) - 0.5
    known = torch.ones(5, 4, dtype=torch.bool)
    found = []
    for kind in (name, "reverse_kl"):
        student = (logits.log_softmax(-1) - 0.3).requires_grad_()
        value = candidate_divergence(student, teacher, known, kind)
        value.sum().backward()
        found.append((value.detach(), student.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return student.sum()", "answers ()"),
        ("return student.sum(-1).tolist()", "answers list"),
        ("return teacher.sum(-1)", "has no gradient"),
        ("return (student.log() - teacher.log()).sum(-1)", "not finite"),
        ("return ((student - teacher) ** 2).sum(-1) / student.sum()", "mixes positions"),
        ("return student.nothing", "raises AttributeError"),
    ],
)
def test_a_signal_that_is_none_is_refused_before_it_is_used(
    own: Callable[[str, str], str], body: str, says: str
) -> None:
    name = own(f"sig_bad_{abs(hash(body))}", body)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        find_divergence(name)
    assert (caught.value.field, caught.value.value) == ("opd.signal", name)

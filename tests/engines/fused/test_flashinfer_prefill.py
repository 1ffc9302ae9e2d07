"""What a prefill asks of FlashInfer, held against a plain softmax, with a stand-in for it; on a GPU with the real one."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from slime_tandem.engines.fused.flashinfer_prefill import Heads, Prefill

from . import flashinfer_stand_in
from .flashinfer_cases import CASES, on_a_gpu, worst

SENIOR, JUNIOR = Heads(4, 2, 16, 0.25), Heads(2, 2, 16, 0.25)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    flashinfer_stand_in.PLANS.clear()
    flashinfer_stand_in.RUNS.clear()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("new", "cached"), CASES)
def test_every_token_is_planned_once_for_every_number_of_heads(new: list[int], cached: list[int]) -> None:
    assert worst([SENIOR, JUNIOR, SENIOR], new, cached, dtype=torch.float32, device=torch.device("cpu")) < 1e-5
    ragged = [plan[1:] for plan in flashinfer_stand_in.PLANS if plan[0] == "ragged"]
    assert ragged == [(4, new, new), (2, new, new)], "once a batch, not once a layer or model"
    paged = [plan for plan in flashinfer_stand_in.PLANS if plan[0] == "paged"]
    assert len(paged) == (2 if any(cached) else 0), "nothing is planned for what is not there"
    for _, _, rows, keys in paged:
        assert sum(keys) == sum(cached)
        behind = [n for n, m in zip(new, cached, strict=True) if m]
        assert [n for n, m in zip(rows, keys, strict=True) if m] == behind
        assert keys[0], "what precedes the first prefix is left out"
        assert keys[-1], "and what follows the last one"
    assert [rows for kind, rows in flashinfer_stand_in.RUNS if kind == "ragged"] == [sum(new)] * 6


@pytest.mark.usefixtures("stand_in")
def test_a_plan_is_of_its_batch_alone() -> None:
    """A batch without a prefix behind one that has one; rows, heads and factors that were not planned."""
    prefill = Prefill([SENIOR, JUNIOR], torch.float32, torch.device("cpu"))
    q, k = torch.ones(3, 4, 16), torch.zeros(3, 2, 16)
    v = torch.tensor([1.0, 2.0, 6.0]).view(3, 1, 1).expand(3, 2, 16)
    pool = k, k
    prefill.plan([3], [1], torch.zeros(1, dtype=torch.int32))
    assert prefill.attend(q, k, v, pool, 0.25)[:, 0, 0].tolist() == pytest.approx([0.5, 1.0, 2.25])
    prefill.plan([3], [0], torch.zeros(0, dtype=torch.int32))
    assert prefill.attend(q, k, v, pool, 0.25)[:, 0, 0].tolist() == pytest.approx([1.0, 1.5, 3.0])
    with pytest.raises(ValueError, match="3 rows"):
        prefill.attend(q[:2], k[:2], v[:2], pool, 0.25)
    for other in (q[:, :3], q[:, :1]):
        with pytest.raises(KeyError):
            prefill.attend(other, k, v, pool, 0.25)
    with pytest.raises(KeyError):
        prefill.attend(q, k, v, pool, 0.5)


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None, reason="needs a GPU and FlashInfer"
)
def test_the_real_one_agrees_with_a_plain_softmax() -> None:
    on_a_gpu()

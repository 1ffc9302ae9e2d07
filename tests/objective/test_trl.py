"""The loss and the KL against Hugging Face TRL's own GRPO: its `GRPOTrainer._compute_loss`, called on a stand-in.

TRL's function takes padded rows and log-probs from a model; the stand-in gives it log-probs, and all else that it reads of a
trainer. Where both have a setting, values and gradients must agree.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_tandem.config import ObjectiveConfig, OpdConfig
from slime_tandem.objective.loss import Denominators, PackedTokens, tandem_loss

F64 = torch.float64
LENGTHS = (5, 2, 7, 3)
LONGEST = 9  # max_completion_length: rows are padded to it
MASK = torch.tensor([[1.0] * n + [0.0] * (LONGEST - n) for n in LENGTHS], dtype=F64)
ROW = torch.repeat_interleave(torch.tensor(LENGTHS))


def numbers(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(len(LENGTHS), LONGEST, generator=g, dtype=F64)

    old = -normal(1.0).abs() - 0.1
    return {
        "old": old,
        "new": old + normal(0.4),
        "ref": old + normal(0.3),
        "importance": normal(0.5).exp().clamp(max=1.3),
        "advantages": torch.randn(len(LENGTHS), generator=g, dtype=F64),
        "entropy": normal(1.0).abs(),
    }


def by_trl(x: dict[str, Tensor], settings: dict[str, Any]) -> tuple[float, Tensor, dict[str, list[float]]]:
    """(loss, gradient on the log-probs [B, LONGEST], metrics) of TRL."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    new = x["new"].clone().requires_grad_()
    ours = {"beta": 0.0, "delta": None, "importance_sampling_level": "token", "use_vllm": False} | settings
    trainer = SimpleNamespace(
        **{k: v for k, v in ours.items() if k != "delta"},
        args=SimpleNamespace(delta=ours["delta"], use_bias_correction_kl=False, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, x["entropy"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda v: v, reduce=lambda v, **_: v),
    )
    ids = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": MASK,
        "advantages": x["advantages"],
        "old_per_token_logps": x["old"],
        "ref_per_token_logps": x["ref"],
        "importance_sampling_ratio": x["importance"],
        "num_items_in_batch": MASK.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.item(), gradient, trainer._metrics["train"]


def by_us(x: dict[str, Tensor], objective: ObjectiveConfig) -> tuple[float, Tensor, dict[str, float]]:
    used = MASK.bool()
    new = x["new"].clone().requires_grad_()
    old = x["old"][used]
    batch = PackedTokens(
        old_log_probs=old,
        advantages=x["advantages"][ROW],
        weights=torch.ones_like(old),
        opd_weights=torch.zeros_like(old),
        teacher_log_probs=torch.zeros_like(old),
        ref_log_probs=x["ref"][used],
        rollout_log_probs=old - x["importance"][used].log(),
        sequences=ROW,
    )
    den = Denominators.over([float(n) for n in LENGTHS], 0, 0, objective.reduction, LONGEST)
    loss, metrics = tandem_loss(new[used], x["entropy"][used], batch, den, objective, OpdConfig(enabled=False))
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.item(), gradient, metrics


CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "grpo", "beta": 0.3, **CLIP}, {"reduction": "sequence_mean", "kl_coef": 0.3}),
    ({"loss_type": "bnpo", "beta": 0.3, **CLIP}, {"kl_coef": 0.3}),
    ({"loss_type": "dapo", **CLIP}, {}),
    ({"loss_type": "dr_grpo", "beta": 0.1, **CLIP}, {"reduction": "constant", "kl_coef": 0.1}),
    ({"loss_type": "grpo", "delta": 1.5, **CLIP}, {"reduction": "sequence_mean", "dual_clip": 1.5}),
    ({"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.28}, {"surrogate": "cispo"}),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
        {"reduction": "sequence_mean", "ratio": "sequence", "clip_low": 0.02, "clip_high": 0.03},
    ),
    ({"loss_type": "bnpo", "use_vllm": True, **CLIP}, {"rollout_weights": "truncated", "rollout_weight_max": 1.3}),
]


def test_values_and_gradients_are_those_of_trl() -> None:
    for theirs, ours in PAIRS:
        clipped = 0.0
        for seed in range(4):
            x = numbers(seed)
            loss, gradient, metrics = by_trl(x, theirs)
            own_loss, own_gradient, own = by_us(x, ObjectiveConfig(**ours))
            assert own_loss == pytest.approx(loss, abs=1e-10), (theirs, seed)
            torch.testing.assert_close(own_gradient, gradient, atol=1e-10, rtol=1e-8)
            assert own["entropy"] == pytest.approx(metrics["entropy"][0]), theirs
            if "beta" in theirs:
                assert own["kl"] == pytest.approx(metrics["kl"][0]), theirs
                assert own["kl"] > 0.01
            clipped += own["clip_fraction"]
        assert clipped > 0.1, "the clip was at work"

"""Each probe passes what is sound, and finds the fault that it is there for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from slime_tandem.config import ObjectiveConfig, RunConfig
from slime_tandem.doctor import probes
from slime_tandem.doctor.probes import BFLOAT16, FLOAT32, Finding, attempt
from slime_tandem.errors import ModelError
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.training.rows import TrainRow


def config(*overrides: str) -> RunConfig:
    return RunConfig.load(overrides=["opd.enabled=false", *overrides])


@pytest.mark.parametrize("scale", ["none", "std", "mad"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "median"])
def test_group_sums(scale: str, baseline: str) -> None:
    settings = (f"objective.scale_advantages={scale}", f"objective.baseline={baseline}")
    assert probes.group_sums(config(*settings)).status == "pass"


def test_group_sums_finds_a_mean_over_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_the_batch(rewards: Any, ids: Any, *_: Any) -> tuple[Any, float]:
        return np.asarray(rewards) - np.mean(rewards), 0.25

    monkeypatch.setattr(probes, "group_advantages", over_the_batch)
    assert probes.group_sums(config()).status == "fail"
    assert probes.group_sums(config("train.samples_per_prompt=1", "train.steps=0")).status == "skip"


def test_agreement_and_replay() -> None:
    engine = np.log(np.array([0.5, 0.25, 0.125] * 40))
    assert probes.agreement("x", engine + 1e-5, engine, FLOAT32).status == "pass"
    assert probes.replay_ratio(engine + 1e-5, engine, FLOAT32).status == "pass"
    # Half precision: rounding is no fault there.
    noisy = engine + 0.02 * np.tile([1, -1, 0], 40)
    assert probes.agreement("x", noisy, engine, FLOAT32).status == "fail"
    assert probes.agreement("x", noisy, engine, BFLOAT16).status == "pass"
    # An engine that truncates reports renormalised, greater log-probs.
    truncated = engine + np.log(1 / 0.8)
    finding = probes.replay_ratio(engine, truncated, BFLOAT16)
    assert finding.status == "fail"
    assert "mean 0.8000; 100.0% of 120 tokens outside" in finding.detail
    assert "top_p" in finding.remedy
    off_by_one = np.roll(engine, 1)
    assert probes.agreement("x", off_by_one, engine, BFLOAT16).status == "fail"
    assert probes.agreement("x", np.array([np.nan]), np.array([-1.0]), BFLOAT16).status == "fail"
    assert probes.replay_ratio(np.array([np.nan]), np.array([-1.0]), BFLOAT16).status == "fail"
    nothing = np.zeros(0)
    assert probes.agreement("x", nothing, nothing, FLOAT32).status == "skip"


def test_kl_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 3 * torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    assert probes.kl_parity(logits, ObjectiveConfig()).status == "pass"
    blind = ObjectiveConfig(kl_coef=0.1, kl_estimator="k1")
    assert probes.kl_parity(logits, blind).status == "warn"
    assert probes.kl_parity(logits, blind.model_copy(update={"kl_in": "reward"})).status == "pass"
    mislabelled = {"k1": "k1", "k2": "k3", "k3": "k2"}  # as the checklist's sample code has it
    right = probes.kl_estimate
    monkeypatch.setattr(probes, "kl_estimate", lambda p, q, k: right(p, q, mislabelled[k]))  # type: ignore[arg-type]
    assert probes.kl_parity(logits, ObjectiveConfig()).status == "fail"
    monkeypatch.undo()
    assert probes.kl_parity(logits * float("nan"), ObjectiveConfig()).status == "fail"


def rows() -> tuple[list[TrainRow], list[np.ndarray]]:
    old = np.array([-1.0, -2.0, -0.5])
    weights = np.array([1.0, 0.0, 1.0])
    made = [TrainRow((1, 2, 3, 4), 0, a, old, weights, np.zeros(3), np.zeros(3)) for a in (0.5, -0.5)]
    return made, [old, old]


def test_masking(monkeypatch: pytest.MonkeyPatch) -> None:
    made, own = rows()
    finding = probes.masking(made, own, config())
    assert (finding.status, finding.detail.split()[0]) == ("pass", "2")
    flat = [replace(row, advantage=0.0) for row in made]
    assert probes.masking(flat, own, config()).status == "warn"

    def leaking(x: Any, entropy: Any, batch: Any, *args: Any) -> Any:
        return (x - batch.old_log_probs).exp().sum(), {}

    monkeypatch.setattr(probes, "tandem_loss", leaking)
    assert probes.masking(made, own, config()).status == "fail"


def test_padding() -> None:
    class Blind:
        """Every row's log-probs move with the longest row: attention sees padding."""

        def own_log_probs(self, responses: Any) -> list[np.ndarray]:
            longest = max(len(r.tokens) for r in responses)
            return [np.full(r.response_length, -1.0 - 0.1 * longest) for r in responses]

    response = probes.Response((1, 2, 3), 2)
    assert probes.padding(Blind(), [response]).status == "fail"  # type: ignore[arg-type]


@dataclass
class FakeTokenizer:
    """What the probe asks of a tokenizer; `prompt` and `unlisted_ends` are what is wrong with it."""

    prompt: tuple[int, ...] = (256, 65)
    unlisted_ends: frozenset[int] = frozenset()
    exact: bool = True

    @property
    def tokens(self) -> TokenBytes:
        table = (*(bytes([i]) for i in range(256)), None, None)
        return TokenBytes(table, frozenset({256, 257}), frozenset({257}), {256: "<s>", 257: "</s>"})

    def encode(self, text: str) -> list[int]:
        return list(text.encode() if self.exact else text.upper().encode())

    def render(self, _: Any) -> list[int]:
        return list(self.prompt)

    def show(self, token: int) -> str:
        return self.tokens.names[token]


@pytest.mark.parametrize(
    ("tokenizer", "width", "status", "detail"),
    [
        (FakeTokenizer(), 264, "pass", "258 ids, bytes exact; a turn ends with 257 </s>"),
        (FakeTokenizer(), 257, "fail", "258 ids, but logits for 257"),
        (FakeTokenizer(prompt=(256, 256, 65)), None, "fail", "two begins of text"),
        (FakeTokenizer(unlisted_ends=frozenset({256})), None, "warn", "ends turns with [256], which generation_config"),
        (FakeTokenizer(exact=False), None, "fail", "spell"),
    ],
)
def test_tokenizers(tokenizer: FakeTokenizer, width: int | None, status: str, detail: str) -> None:
    finding = probes.tokenizer(tokenizer, "senior", width)  # type: ignore[arg-type]
    assert finding.status == status
    assert detail in finding.detail
    assert bool(finding.remedy) == (status != "pass")


def test_length() -> None:
    before, after = np.array([4.0, 6.0, 5.0, 5.0] * 4), np.array([9.0, 9.0, 8.0, 9.0] * 4)
    assert probes.length_reward([before, after], [1.0] * 8, 1, 16).detail.endswith("5.0 to 8.8 tokens")
    assert probes.length_reward([after, before], [1.0] * 8, 1, 16).status == "fail"
    assert probes.length_reward([after, before], [1.0] * 8, -1, 16).status == "pass", "shorter was asked for"
    assert probes.length_reward([before, before], [1.0] * 8, 1, 16).status == "pass"
    assert "the learning rate is too small" in probes.length_reward([before, before], [1.0] * 8, 1, 16).detail
    assert probes.length_reward([before, after], [-1.0] * 8, 1, 16).status == "fail", "updates point the wrong way"
    assert probes.length_reward([before], [1.0], 1, 16).status == "pass"


def test_an_error_with_a_remedy_is_a_finding() -> None:
    def broken() -> Finding:
        raise ModelError("models.junior", "x", "the senior's tokenizer", "use another")

    finding = attempt("tokenizer", broken)
    assert finding == Finding("tokenizer", "fail", "models.junior='x': expected the senior's tokenizer.", "use another")
    assert not probes.all_passed([finding])
    assert probes.all_passed([replace(finding, status=s) for s in ("pass", "warn", "skip")])  # type: ignore[arg-type]

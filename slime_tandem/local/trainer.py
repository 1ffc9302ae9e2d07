"""One update of the senior from one rollout: rows -> mini-batches -> micro-batches -> loss -> optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slime_tandem.config import RunConfig
from slime_tandem.local.batches import TrainRow, micro_batches, mini_batches
from slime_tandem.local.policy import MegatronPolicy
from slime_tandem.local.replay import replay_of
from slime_tandem.objective.distillation import log_probs_of, log_rest_of
from slime_tandem.objective.logprobs import token_log_probs
from slime_tandem.objective.loss import LOSS_METRICS, Denominators, PackedTokens, tandem_loss
from slime_tandem.objective.truncation import Replay
from slime_tandem.types import FloatArray


class Trainer:
    """Applies the objective to a policy. `reference` (the frozen start weights) is needed when `objective.kl_coef` > 0."""

    def __init__(self, config: RunConfig, policy: MegatronPolicy, reference: MegatronPolicy | None) -> None:
        assert (reference is not None) == (config.objective.kl_coef > 0)
        self.config, self.policy, self.reference = config, policy, reference

    def update(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Learn from one rollout; returns `train/...` metrics, means over its optimizer steps.

        `train/logprob_diff` is of the first step only: there the policy still is the one that sampled, so it shows how far
        the trainer and the engine disagree.
        """
        if self.config.sampling.truncates and self.config.sampling.truncation_replay == "recompute":
            rows = self._with_own_log_probs(rows)
        ref_log_probs = self._ref_log_probs(rows)
        steps: list[dict[str, float]] = []
        for mini in mini_batches(rows, self.config.train.updates_per_step):
            steps.append(self._optimizer_step(mini, ref_log_probs))
        metrics = {f"train/{k}": float(np.mean([s[k] for s in steps])) for k in (*LOSS_METRICS, "grad_norm")}
        metrics["train/logprob_diff"] = steps[0]["logprob_diff"]
        metrics["train/lr"] = self.policy.lr
        return metrics

    def _optimizer_step(self, mini: Sequence[TrainRow], ref: dict[int, Tensor]) -> dict[str, float]:
        pg = sum(float(row.weights.sum()) for row in mini)
        opd = sum(row.opd_share for row in mini)
        denominators = Denominators(max(pg, 1e-8), max(opd, 1e-8))
        total = dict.fromkeys(LOSS_METRICS, 0.0)
        self.policy.zero_grad()
        for micro in micro_batches(mini, self.config.train.micro_batch_tokens):
            logits = self._logits(self.policy, micro)
            replay = replay_of(self.config.sampling, micro, self.policy.device)
            log_probs, entropy = self._log_probs(logits, micro, replay)
            ids, teacher = self._candidates(micro)
            packed = PackedTokens(
                old_log_probs=self._pack([r.old_log_probs for r in micro]),
                advantages=self._pack([np.full(r.response_length, r.advantage) for r in micro]),
                weights=self._pack([r.weights for r in micro]),
                opd_weights=self._pack([r.opd_weights for r in micro]),
                teacher_log_probs=self._pack([r.teacher_log_probs for r in micro]),
                ref_log_probs=torch.cat([ref[id(r)] for r in micro]) if ref else None,
                candidate_ids=ids,
                candidate_teacher=teacher,
            )
            of_candidates = None if ids is None else log_probs_of(logits, ids, self.config.sampling.temperature)
            of_rest = None if ids is None else log_rest_of(logits, ids, self.config.sampling.temperature)
            loss, metrics = tandem_loss(
                log_probs, entropy, packed, denominators, self.config.objective, self.config.opd, of_candidates, of_rest
            )
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in metrics.items():
                total[name] += value
        return total | {"grad_norm": self.policy.step()}

    def _with_own_log_probs(self, rows: Sequence[TrainRow]) -> list[TrainRow]:
        """The rows with old log-probs that this policy computes before its first update, truncation replayed.

        The server's are of the full distribution where it does not tell what it kept.
        """
        own: dict[int, TrainRow] = {}
        with torch.no_grad():
            for micro in micro_batches(rows, self.config.train.micro_batch_tokens):
                replay = replay_of(self.config.sampling, micro, self.policy.device)
                log_probs, _ = self._log_probs(self._logits(self.policy, micro), micro, replay)
                parts = torch.split(log_probs.double().cpu(), [r.response_length for r in micro])
                own.update(
                    (id(row), replace(row, old_log_probs=p.numpy())) for row, p in zip(micro, parts, strict=True)
                )
        return [own[id(row)] for row in rows]

    def _ref_log_probs(self, rows: Sequence[TrainRow]) -> dict[int, Tensor]:
        """Log-probs [R] of the start weights per row, computed once per rollout and reused by all its updates."""
        if self.reference is None:
            return {}
        out: dict[int, Tensor] = {}
        with torch.no_grad():
            for micro in micro_batches(rows, self.config.train.micro_batch_tokens):
                log_probs, _ = self._log_probs(self._logits(self.reference, micro), micro)
                parts = torch.split(log_probs, [r.response_length for r in micro])
                out.update((id(row), part) for row, part in zip(micro, parts, strict=True))
        return out

    def _logits(self, policy: MegatronPolicy, micro: Sequence[TrainRow]) -> Tensor:
        return policy.response_logits([r.tokens for r in micro], [r.response_length for r in micro])

    def _candidates(self, micro: Sequence[TrainRow]) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """(ids [T, K], the teacher's log-probs [T, K]) of a micro-batch; rows without a teacher have no candidates (-1)."""
        if not self.config.opd.enabled or self.config.opd.signal == "sampled":
            return None, None
        width = max((r.candidates.ids.shape[1] for r in micro if r.candidates is not None), default=1)
        ids, values = [], []
        for row in micro:
            shape = (row.response_length, width)
            ids.append(np.full(shape, -1, dtype=np.int64) if row.candidates is None else row.candidates.ids)
            values.append(np.zeros(shape) if row.candidates is None else row.candidates.teacher_log_probs)
        return torch.from_numpy(np.concatenate(ids)).to(self.policy.device), self._pack(values)

    def _log_probs(
        self, logits: Tensor, micro: Sequence[TrainRow], replay: Replay | None = None
    ) -> tuple[Tensor, Tensor]:
        labels = torch.tensor([t for r in micro for t in r.tokens[len(r.tokens) - r.response_length :]])
        return token_log_probs(logits, labels.to(logits.device), self.config.sampling.temperature, replay=replay)

    def _pack(self, parts: Sequence[FloatArray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).float().to(self.policy.device)

"""One update of the senior from one rollout: rows -> mini-batches -> micro-batches -> loss -> optimizer step.

It writes no response and knows no server: rows in, metrics out, and a policy whose weights have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError
from slime_tandem.megatron.policy import MegatronPolicy
from slime_tandem.objective.divergence import log_probs_of, log_rest_of
from slime_tandem.objective.kl import above_guard, adapted_coef, left_target
from slime_tandem.objective.logprobs import token_log_probs
from slime_tandem.objective.loss import (
    LOSS_METRICS,
    Denominators,
    PackedTokens,
    kept_by_weights,
    tandem_loss,
    token_kl,
)
from slime_tandem.objective.truncation import Replay
from slime_tandem.training.replay import replay_of
from slime_tandem.training.rows import Response, Sequenced, TrainRow, micro_batches, mini_batches
from slime_tandem.types import FloatArray, TandemSample


class Trainer:
    """Applies the objective to a policy. `reference` (the frozen start weights) is needed when `objective.kl_coef` > 0.

    `kl_coef`: the coefficient now, which follows `objective.kl_target`; it belongs into checkpoints.
    """

    def __init__(self, config: RunConfig, policy: MegatronPolicy, reference: MegatronPolicy | None) -> None:
        assert (reference is not None) == (config.objective.kl_coef > 0)
        self.config, self.policy, self.reference = config, policy, reference
        self.kl_coef = config.objective.kl_coef

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the coefficient over from a checkpoint where it adapts, into the bounds of now; else the config's stays."""
        objective = self.config.objective
        if objective.kl_target is not None and "kl_coef" in state:  # older checkpoints have none
            self.kl_coef = min(max(float(state["kl_coef"]), objective.kl_coef_min), objective.kl_coef_max)

    def reference_log_probs(self, samples: Sequence[TandemSample]) -> list[FloatArray] | None:
        """Log-probs [R] of the start weights per sample, for `build_rows`; None in a run without KL.

        Asked for once per rollout: all its updates use the same.
        """
        if self.reference is None:
            return None
        return self._score(self.reference, [Response.of(sample) for sample in samples])

    def own_log_probs(self, rows: Sequence[Sequenced], *, replayed: bool = False) -> list[FloatArray]:
        """Log-probs [R] of the policy's present weights per row, nats, of the full distribution.

        `replayed`: of what the engine reported log-probs of, which is the truncated one if it reported what it kept.
        """
        return self._score(self.policy, rows, self._replay if replayed and self.config.sampling.asks_kept_ids else None)

    def update(self, rows: Sequence[TrainRow]) -> dict[str, float | None]:
        """Learn from one rollout; returns `train/...` metrics, means over its optimizer steps.

        `train/logprob_diff` is of the first step only: there the policy still is the one that sampled, so it shows how far
        the trainer and the engine disagree. A mini-batch without a token that any term counts is left out (zero gradients would
        still let AdamW's moments move the weights): `train/empty_updates`; if all are, means over the steps are None. Raises
        DataError for no rows, TandemError if the KL leaves its target and `objective.kl_guard` is stop.
        """
        if not rows:
            raise DataError("rows of an update", 0, "at least one", "keep a sample, or leave the update out")
        objective = self.config.objective
        rows, masked = self._with_own_log_probs(rows)
        steps: list[dict[str, float]] = []
        kl_values: list[Tensor] = []
        guarded = empty = 0
        train = self.config.train
        for mini in chain.from_iterable(
            mini_batches(rows, train.updates_per_step) for _ in range(train.epochs_per_step)
        ):
            if not any(map(self._teaches, mini)):
                empty += 1
                continue
            step, values = self._optimizer_step(mini)
            steps.append(step)
            kl_values += values
            over = above_guard(step["kl"], objective)
            guarded += over
            if over and objective.kl_guard == "stop":
                raise left_target(step["kl"], objective)
            if any(v.numel() for v in values):  # an update without a weighted token says nothing of the KL
                self.kl_coef = adapted_coef(self.kl_coef, step["kl"], objective)
            if over and objective.kl_guard == "skip_updates":
                break
        metrics: dict[str, float | None] = {
            f"train/{k}": float(np.mean([s[k] for s in steps])) if steps else None for k in (*LOSS_METRICS, "grad_norm")
        }
        metrics["train/logprob_diff"] = steps[0]["logprob_diff"] if steps else None
        metrics["train/lr"] = self.policy.lr
        metrics["train/updates"] = float(len(steps))
        metrics["train/empty_updates"] = float(empty)
        metrics["train/rollout_masked_tokens"] = masked
        metrics["train/kl_guard"] = float(guarded)
        metrics["train/kl_coef"] = self.kl_coef
        kl_tokens = torch.cat(kl_values).cpu().numpy() if kl_values else np.zeros(0)
        metrics["train/kl_p95"] = float(np.quantile(kl_tokens, 0.95)) if kl_tokens.size else None
        if self.reference is None:
            metrics["train/kl"] = None
        if objective.lambda_jun == 0:
            metrics["train/junior_kl"] = None
        return metrics

    def _teaches(self, row: TrainRow) -> bool:
        """Whether a term of the loss counts one of the row's tokens (its value there may still be 0)."""
        objective, opd = self.config.objective, self.config.opd
        return bool(
            ((objective.reward_coef > 0 or self.kl_coef > 0 or objective.entropy_coef > 0) and row.weights.any())
            or (opd.enabled and opd.coef > 0 and row.opd_weights.any())
            or (objective.lambda_jun > 0 and row.junior_weights is not None and row.junior_weights.any())
        )

    def _optimizer_step(self, mini: Sequence[TrainRow]) -> tuple[dict[str, float], list[Tensor]]:
        """One update; (its metrics, KL per weighted token of each micro-batch)."""
        objective = self.config.objective
        denominators = Denominators.over(
            [float(row.weights.sum()) for row in mini],
            opd=sum(row.opd_share for row in mini),
            junior=sum(float(row.junior_weights.sum()) for row in mini if row.junior_weights is not None),
            reduction=objective.reduction,
            constant_length=objective.constant_length or self.config.sampling.max_new_tokens,
        )
        kl_values: list[Tensor] = []
        total = dict.fromkeys(LOSS_METRICS, 0.0)
        self.policy.zero_grad()
        for micro in micro_batches(mini, self.config.train.micro_batch_tokens):
            logits = self._logits(self.policy, micro)
            log_probs, entropy = self._log_probs(logits, micro, self._replay(micro))
            ids, teacher = self._candidates(micro)
            packed = PackedTokens(
                old_log_probs=self._pack([r.old_log_probs for r in micro]),
                advantages=self._pack([np.full(r.response_length, r.advantage) for r in micro]),
                weights=self._pack([r.weights for r in micro]),
                opd_weights=self._pack([r.opd_weights for r in micro]),
                teacher_log_probs=self._pack([r.teacher_log_probs for r in micro]),
                ref_log_probs=self._pack_some([r.ref_log_probs for r in micro]),
                candidate_ids=ids,
                candidate_teacher=teacher,
                rollout_log_probs=self._pack_some([r.rollout_log_probs for r in micro]),
                junior_weights=self._pack_some([r.junior_weights for r in micro]),
                junior_log_probs=self._pack_some([r.junior_log_probs for r in micro]),
                sequences=torch.repeat_interleave(torch.tensor([r.response_length for r in micro])).to(logits.device),
            )
            of_candidates = None if ids is None else log_probs_of(logits, ids, self.config.sampling.temperature)
            of_rest = None if ids is None else log_rest_of(logits, ids, self.config.sampling.temperature)
            loss, metrics = tandem_loss(
                log_probs,
                entropy,
                packed,
                denominators,
                objective,
                self.config.opd,
                of_candidates,
                of_rest,
                kl_coef=self.kl_coef,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            if packed.ref_log_probs is not None:
                kl_values.append(token_kl(log_probs.detach(), packed, objective)[packed.weights > 0])
            for name, value in metrics.items():
                total[name] += value
        return total | {"grad_norm": self.policy.step()}, kl_values

    def _with_own_log_probs(self, rows: Sequence[TrainRow]) -> tuple[Sequence[TrainRow], float | None]:
        """(rows whose old policy is the trainer's, tokens that a mask took; None without one).

        They are where `objective.rollout_weights` asks for it, and where truncation is found again in the trainer's logits:
        there the server's log-probs are of the full distribution.
        """
        objective, sampling = self.config.objective, self.config.sampling
        weighted = objective.rollout_weights != "none"
        if not weighted and not (sampling.truncates and sampling.truncation_replay == "recompute"):
            return rows, None
        values = self._score(self.policy, rows, self._replay)
        if not weighted:
            return [replace(row, old_log_probs=own) for row, own in zip(rows, values, strict=True)], None
        out, masked = [], 0
        for row, own in zip(rows, values, strict=True):
            used = (row.weights > 0) | (row.opd_weights > 0)
            ours, engines, counts = map(torch.from_numpy, (own, row.old_log_probs, used))
            keep = kept_by_weights(ours, engines, counts, objective).numpy()
            masked += int((used & ~keep).sum())
            out.append(
                replace(
                    row,
                    old_log_probs=own,
                    rollout_log_probs=row.old_log_probs,
                    weights=row.weights * keep,
                    opd_weights=row.opd_weights * keep,
                )
            )
        return out, float(masked)

    def _replay(self, micro: Sequence[Sequenced]) -> Replay | None:
        return replay_of(self.config.sampling, micro, self.policy.device)

    def _score(
        self,
        policy: MegatronPolicy,
        rows: Sequence[Sequenced],
        replay: Callable[[Sequence[Sequenced]], Replay | None] | None = None,
    ) -> list[FloatArray]:
        """Log-probs [R] of each row's response, in order; of the truncated distribution where `replay` gives one."""
        out: dict[int, FloatArray] = {}
        with torch.no_grad():
            for micro in micro_batches(rows, self.config.train.micro_batch_tokens):
                log_probs, _ = self._log_probs(self._logits(policy, micro), micro, replay and replay(micro))
                parts = torch.split(log_probs, [r.response_length for r in micro])
                out.update((id(row), part.double().cpu().numpy()) for row, part in zip(micro, parts, strict=True))
        return [out[id(row)] for row in rows]

    def _logits(self, policy: MegatronPolicy, micro: Sequence[Sequenced]) -> Tensor:
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
        self, logits: Tensor, micro: Sequence[Sequenced], replay: Replay | None = None
    ) -> tuple[Tensor, Tensor]:
        labels = torch.tensor([t for r in micro for t in r.tokens[len(r.tokens) - r.response_length :]])
        return token_log_probs(
            logits,
            labels.to(logits.device),
            self.config.sampling.temperature,
            replay=replay,
            entropy_grad=self.config.objective.entropy_coef > 0,
        )

    def _pack(self, parts: Sequence[FloatArray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).float().to(self.policy.device)

    def _pack_some(self, parts: Sequence[FloatArray | None]) -> Tensor | None:
        """All rows have it or none has."""
        there = [part for part in parts if part is not None]
        assert len(there) in (0, len(parts))
        return self._pack(there) if there else None

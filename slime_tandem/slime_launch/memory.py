"""How much memory a GPU and a machine need, from the sizes alone. docs/scaling.md derives every formula; bytes throughout.

Trainer: bf16 weights (2), float32 gradients (4), and of the distributed optimizer float32 masters and two moments (12, cut by
the data parallel size); kept activations; logits. Engine: bf16 weights, and what its share of the GPU leaves for the KV cache.
`RESERVED` is an assumption (contexts of two processes, NCCL, fragments), not a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime_tandem.config import ClusterConfig
from slime_tandem.megatron.architecture import Architecture
from slime_tandem.slime_launch.served import Served

GIB = 2**30
WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
LOGIT = 12
"""Bytes per logit: float32 logits, the softmax kept for the backward pass, its gradient (slime: ppo_utils.py)."""
RESERVED = 4 * GIB
STEP = 4
"""Bytes per weight of a rank's share that torch's AdamW takes beside its states while it steps: roots of the second moments.
Transformer Engine's and Apex's fused optimizers take none; `cluster.layer_spec=own` is for machines without these."""
ENGINE_RESERVED = 2 * GIB
"""An assumption: context, CUDA graphs and activations of an engine."""
SCORED_AT_ONCE = 1024
"""Positions whose logits an engine holds at once where it scores a prompt (SGLANG_LOGITS_PROCESSER_CHUNK_SIZE). Without chunks
it takes those of a whole prefill, 8192, and keeps the memory: 12 GiB for a vocabulary of 128k."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Of the fullest rank, in bytes. `parameters`: weights that it holds, experts among them."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    step: int = 0

    @property
    def total(self) -> int:
        """Everything but the reserve. Activations and logits are gone when the optimizer steps."""
        return self.weights + self.gradients + self.optimizer + max(self.activations + self.logits, self.step)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Of one GPU of an engine, in bytes; `kv_tokens`: tokens that its KV cache holds (of the engine, not of the GPU);
    `scoring`: logits of a prompt that is scored."""

    weights: int
    kv_per_token: int
    kv_tokens: int
    scoring: int = 0

    def process(self, pool_tokens: int | None = None) -> int:
        """What its process takes of a GPU at most; `pool_tokens`: a bound of the KV cache (`--max-total-tokens`)."""
        tokens = self.kv_tokens if pool_tokens is None else min(pool_tokens, self.kv_tokens)
        return self.weights + tokens * self.kv_per_token + self.scoring + ENGINE_RESERVED


def rank_parameters(arch: Architecture, tensor: int, pipeline: int, expert: int = 1) -> int:
    """Weights on the fullest rank: matrices are cut by `tensor`, norms are not; embedding and head at the ends of the pipeline.

    A tied head is the embedding; with a pipeline the last stage has a copy. Experts are divided by `expert` and cut no further;
    their router is whole on every rank.
    """
    H, D, f = arch.hidden_size, arch.head_dim, arch.ffn_size
    q, kv = arch.num_heads * D, arch.num_kv_heads * D
    cut = H * (q + 2 * kv) + q * H + (q + 2 * kv if arch.qkv_bias else 0)
    cut += 3 * H * f if arch.experts is None else 0
    whole = 2 * H + (2 * D if arch.qk_norm else 0) + (H * arch.experts.count if arch.experts else 0)
    table = arch.vocab_size * H // tensor
    tables = 2 if pipeline == 1 and not arch.tied else 1
    layers = math.ceil(arch.num_layers / pipeline)
    return layers * (cut // tensor + whole) + tables * table + H + expert_parameters(arch, pipeline, expert)


def expert_parameters(arch: Architecture, pipeline: int, expert: int) -> int:
    """Weights of the experts alone on the fullest rank; 0 for a dense model."""
    if arch.experts is None:
        return 0
    each = 3 * arch.hidden_size * arch.experts.ffn_size
    return math.ceil(arch.num_layers / pipeline) * math.ceil(arch.experts.count / expert) * each


def activation_bytes(arch: Architecture, *, recompute: bool) -> int:
    """Kept bytes per token and layer, bf16: the layer's input alone, or what every operation in it needs again."""
    H, D = arch.hidden_size, arch.head_dim
    q, kv = arch.num_heads * D, arch.num_kv_heads * D
    if recompute:
        return 2 * H
    if arch.experts is not None:
        # the same, and for each active expert its input, gate and up, their product and its output
        e = arch.experts
        return 2 * (4 * H + (q + 2 * kv) + q + e.active * (2 * H + 3 * e.ffn_size))
    f = arch.ffn_size
    # input, its norm, q k v, attention's output, second input, its norm, gate and up, their product
    return 2 * (4 * H + (q + 2 * kv) + q + 3 * f)


def trainer_memory(arch: Architecture, cluster: ClusterConfig, trainer_gpus: int) -> TrainerMemory:
    """Of the fullest rank of the trainer. Stages of a pipeline hold the activations of up to `pipeline` micro-batches."""
    t, p, e = cluster.tensor_parallel, cluster.pipeline_parallel, cluster.expert_parallel
    held, experts = rank_parameters(arch, t, p, e), expert_parameters(arch, p, e)
    shards = trainer_gpus // (t * p)  # data and context parallel ranks share the optimizer
    tokens, layers = cluster.max_tokens_per_gpu, math.ceil(arch.num_layers / p)
    activations = p * layers * tokens * activation_bytes(arch, recompute=cluster.recompute) // t
    if cluster.recompute:  # one layer at a time is computed again
        activations += tokens * activation_bytes(arch, recompute=False) // t
    return TrainerMemory(
        parameters=held,
        weights=WEIGHT * held,
        gradients=GRADIENT * held,
        # Ranks with the same experts share theirs: of a stage, all that expert parallelism does not tell apart.
        optimizer=OPTIMIZER * (held - experts) // shards + OPTIMIZER * experts // max(1, trainer_gpus // (p * e)),
        activations=activations,
        logits=LOGIT * tokens * math.ceil(arch.vocab_size / t),
        step=STEP * held // shards if cluster.layer_spec == "own" else 0,
    )


def scoring_bytes(models: Sequence[Served], tokens: int = SCORED_AT_ONCE) -> int:
    """Logits of `tokens` positions as an engine scores them, on each of its GPUs: float32 logits, log-probs and a copy."""
    return LOGIT * tokens * max(model.vocabulary for model in models)


def engine_memory(
    models: Sequence[Served], tp: int, cluster: ClusterConfig, mem_fraction: float | None = None
) -> EngineMemory:
    """Of an engine that holds these models (two in a fused one) with one pool. `mem_fraction`: None, the cluster's."""
    weights = sum(model.weights // tp for model in models)
    kv = sum(model.kv_per_token(tp) for model in models)
    room = int((mem_fraction or cluster.mem_fraction) * cluster.gpu_memory_gib * GIB) - weights
    room = int(room * min(model.kv_share for model in models))
    return EngineMemory(weights=weights, kv_per_token=kv, kv_tokens=max(0, room // kv), scoring=scoring_bytes(models))


def host_bytes(trainer: TrainerMemory, *, offloaded: bool, reference: bool) -> int:
    """Main memory per GPU of the trainer: pinned weights (one more copy for a reference), and with colocation the optimizer."""
    return trainer.weights * (2 if reference else 1) + (trainer.optimizer if offloaded else 0)

"""The estimate against cases computed by hand, and a model whose parameters are counted."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import ClusterConfig
from slime_tandem.megatron.architecture import Architecture, Experts
from slime_tandem.slime_launch.memory import (
    GIB,
    RESERVED,
    activation_bytes,
    engine_memory,
    host_bytes,
    rank_parameters,
    scoring_bytes,
    trainer_memory,
)
from slime_tandem.slime_launch.served import of_architecture
from slime_tandem.slime_launch.sizes import PUBLISHED, parameters

from ..waiting import PATIENCE_S

TOY = Architecture("llama", 2, 4, 2, 1, 2, 8, 10, 1e-5, 64, False, ())
"""H 4, two heads of 2, one KV head, MLP 8, vocabulary 10, two layers, untied."""


def test_by_hand() -> None:
    # A layer: q 4x4, k and v 2x4 each, o 4x4, gate, up and down 4x8 each: 16 + 8 + 8 + 16 + 96 = 144, and two norms of 4.
    assert parameters(TOY) == 2 * (144 + 8) + 2 * 40 + 4 == 388
    assert rank_parameters(TOY, 1, 1) == 388
    assert rank_parameters(TOY, 2, 1) == 2 * (72 + 8) + 2 * 20 + 4 == 204
    assert rank_parameters(TOY, 1, 2) == 152 + 40 + 4 == 196
    # Kept per token and layer: 4 H-wide tensors, q k v (4 + 2 + 2), attention's output 4, 3 MLP-wide ones: 16 + 8 + 4 + 24.
    assert activation_bytes(TOY, recompute=False) == 2 * 52
    assert activation_bytes(TOY, recompute=True) == 2 * 4


def test_a_trainer_by_hand() -> None:
    cluster = ClusterConfig(tensor_parallel=2, max_tokens_per_gpu=100, recompute=False)
    m = trainer_memory(TOY, cluster, 8)
    assert (m.weights, m.gradients) == (2 * 204, 4 * 204)
    assert m.optimizer == 12 * 204 // 4  # 8 GPUs in 4 data parallel pairs
    assert m.activations == 2 * 100 * 104 // 2
    assert m.logits == 12 * 100 * 5
    assert m.total == m.weights + m.gradients + m.optimizer + m.activations + m.logits
    again = trainer_memory(TOY, cluster.model_copy(update={"recompute": True}), 8)
    assert again.activations == (2 * 100 * 8) // 2 + 100 * 104 // 2
    assert host_bytes(m, offloaded=True, reference=True) == 2 * m.weights + m.optimizer
    assert host_bytes(m, offloaded=False, reference=False) == m.weights


def test_context_parallel_ranks_share_the_optimizer() -> None:
    with_cp = trainer_memory(TOY, ClusterConfig(context_parallel=4), 8)
    assert with_cp.optimizer == 12 * 388 // 8


def test_an_engine_by_hand() -> None:
    cluster = ClusterConfig(gpu_memory_gib=1.0, mem_fraction=0.5)
    toy = of_architecture(TOY)
    e = engine_memory([toy], 1, cluster)
    assert (e.weights, e.kv_per_token) == (776, 2 * 2 * 2 * 1 * 2)
    assert e.kv_tokens == (GIB // 2 - 776) // 16
    assert engine_memory([toy], 2, cluster).kv_per_token == 16  # one KV head: both GPUs hold it
    both = engine_memory([toy, toy], 1, cluster)
    assert (both.weights, both.kv_per_token) == (2 * 776, 32)
    assert engine_memory([of_architecture(PUBLISHED["qwen3-4B"])], 1, cluster).kv_tokens == 0


def test_experts_by_hand() -> None:
    # Four experts of width 3, two at work: gate, up and down 4x3 each, 36 an expert; a router of 4x4; no dense MLP.
    arch = dataclasses.replace(TOY, experts=Experts(count=4, active=2, ffn_size=3))
    layer = 48 + 4 * 36 + 16 + 8  # attention, experts, router, two norms
    assert parameters(arch) == rank_parameters(arch, 1, 1) == 2 * layer + 2 * 40 + 4
    # Tensor parallel ranks cut attention and tables; expert parallel ranks have two experts each; the router is whole.
    assert rank_parameters(arch, 2, 1, 2) == 2 * (24 + 2 * 36 + 16 + 8) + 2 * 20 + 4
    m = trainer_memory(arch, ClusterConfig(tensor_parallel=2, expert_parallel=2), 8)
    experts, rest = 2 * 2 * 36, 2 * (24 + 16 + 8) + 2 * 20 + 4
    assert m.weights == 2 * (experts + rest)
    assert (
        m.optimizer == 12 * rest // 4 + 12 * experts // 4
    )  # four pairs of tensor parallel ranks; four holders of each expert
    assert activation_bytes(arch, recompute=False) == 2 * (4 * 4 + 8 + 4 + 2 * (2 * 4 + 3 * 3))


def test_the_optimizers_step_by_hand() -> None:
    """torch's AdamW holds a root per weight of the share; activations and logits are gone by then."""
    few = ClusterConfig(max_tokens_per_gpu=1, layer_spec="own")
    m = trainer_memory(TOY, few, 2)
    assert m.step == 4 * 388 // 2
    assert m.activations + m.logits < m.step
    assert m.total == (2 + 4) * 388 + 12 * 388 // 2 + m.step
    assert trainer_memory(TOY, few.model_copy(update={"layer_spec": "transformer_engine"}), 2).step == 0


def test_logits_of_a_scored_prompt_by_hand() -> None:
    """Llama 3's vocabulary: 12 bytes for each of 128,256 logits of 1,024 positions; a whole prefill of 8,192 takes 11.7 GiB."""
    teacher = of_architecture(PUBLISHED["llama3.2-3B"])
    assert teacher.vocabulary == 128256
    assert scoring_bytes([teacher]) == 12 * 1024 * 128256
    assert scoring_bytes([teacher], 8192) / GIB == pytest.approx(11.7, abs=0.1)


@pytest.mark.parametrize(
    ("served", "measured"),
    [
        ([["qwen3-4B"]], 120.9),
        ([["qwen3-4B", "qwen3-0.6B"]], 124.1),
        ([["qwen3-4B", "qwen3-0.6B"], ["llama3.2-3B"]], 137.7),
    ],
)
def test_the_estimate_is_within_a_tenth_of_what_was_measured_on_one_card(
    served: list[list[str]], measured: float
) -> None:
    """docs/results/slime-scale.md: 4,096 tokens a micro-batch, nothing computed again, KV caches of 65,536 tokens."""
    cluster = ClusterConfig(
        gpus_per_node=1, gpu_memory_gib=139.8, layer_spec="own", max_tokens_per_gpu=4096, recompute=False
    )
    total = trainer_memory(PUBLISHED["qwen3-4B"], cluster, 1).total + RESERVED
    for models in served:
        engine = engine_memory([of_architecture(PUBLISHED[name]) for name in models], 1, cluster)
        total += engine.process(65536) - (engine.scoring if models[0].startswith("qwen") else 0)
    assert total / GIB == pytest.approx(measured, rel=0.1)


def test_the_senior_of_the_first_run_took_what_is_estimated() -> None:
    """27 GiB with a KV cache of 131,072 tokens."""
    engine = engine_memory([of_architecture(PUBLISHED["qwen3-4B"])], 1, ClusterConfig(gpu_memory_gib=139.8))
    assert (engine.process(131072) - engine.scoring) / GIB == pytest.approx(27, rel=0.05)


def test_a_known_size() -> None:
    # Qwen3-4B: 36 layers, 8 KV heads of 128, bf16 keys and values: 2 * 2 * 36 * 8 * 128 bytes a token.
    e = engine_memory([of_architecture(PUBLISHED["qwen3-4B"])], 1, ClusterConfig())
    assert e.kv_per_token == 147456
    assert e.weights == 2 * 4022468096


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_rank_alone_holds_every_weight(name: str) -> None:
    assert rank_parameters(PUBLISHED[name], 1, 1) == parameters(PUBLISHED[name])


@given(name=st.sampled_from(sorted(PUBLISHED)), t=st.sampled_from([1, 2, 4, 8]), p=st.sampled_from([1, 2, 4]))
def test_ranks_together_hold_at_least_every_weight_and_cutting_never_costs(name: str, t: int, p: int) -> None:
    arch = PUBLISHED[name]
    held = rank_parameters(arch, t, p)
    assert held * t * p >= parameters(arch)
    assert held <= rank_parameters(arch, 1, 1)


@pytest.mark.parametrize("field", ["num_layers", "ffn_size", "vocab_size"])
def test_more_model_needs_more_memory(field: str) -> None:
    larger = dataclasses.replace(TOY, **{field: 2 * getattr(TOY, field)})
    assert trainer_memory(larger, ClusterConfig(), 8).total > trainer_memory(TOY, ClusterConfig(), 8).total


def test_megatron_allocates_what_is_estimated() -> None:
    """The real model, buffers and optimizer of one rank, without memory; alone and cut over two of four ranks."""
    script = Path(__file__).parents[2] / "scripts" / "slime" / "measure_memory.py"
    command = [sys.executable, "-W", "ignore", str(script), "qwen3-0.6B:1:1", "qwen2.5-0.5B:2:4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    ratios = [json.loads(line)["to_estimate"] for line in done.stdout.splitlines()]
    parts = ("parameters", "weights", "gradients", "optimizer")
    assert ratios == [pytest.approx(dict.fromkeys(parts, 1.0), abs=1e-3)] * 2

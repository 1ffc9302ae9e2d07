"""Run by real_slime.py, two processes over gloo: a model of our layers, cut by context or by tensor, against the whole one.

`parallel_spec.py RANK STORE`: this rank's logits and gradients are compared with those that it computes alone, to 1e-5.
"""

from __future__ import annotations

import sys

import cpu_device
import torch
from megatron.core import mpu, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from slime.backends.megatron_utils.cp_utils import slice_with_cp
from torch import Tensor
from torch import distributed as dist
from transformers import Qwen3Config

from slime_tandem.megatron.weights import transformer_config_from_hf
from slime_tandem.slime_hooks.spec import layer_spec

VOCABULARY, LENGTHS = 40, (5, 1, 7, 16, 3)
HF = Qwen3Config(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
)  # fmt: skip


def shard(name: str, full: Tensor, rank: int, size: int) -> Tensor:
    """What a tensor-parallel rank holds of a parameter."""
    if cut_dimension(name) is None:
        return full
    if "linear_fc1" in name:  # gate and up, each cut
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dim=cut_dimension(name))[rank]


def cut_dimension(name: str) -> int | None:
    """0 for column-parallel weights and tables, 1 for row-parallel weights; norms are whole."""
    return None if "norm" in name else int("linear_proj" in name or "linear_fc2" in name)


def logits_and_gradients(tp: int, cp: int, ids: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Of the loss sum(logits x random): what this rank has of each sequence's logits, and every parameter's gradient."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp, create_gloo_process_groups=True
    )
    model_parallel_cuda_manual_seed(0)
    config = transformer_config_from_hf(HF)
    config.tensor_model_parallel_size, config.context_parallel_size = tp, cp
    config.sequence_parallel = tp > 1
    model = GPTModel(
        config=config, transformer_layer_spec=layer_spec(None, config), vocab_size=VOCABULARY, max_sequence_length=64,
        share_embeddings_and_output_weights=False, position_embedding_type="rope", parallel_output=False,
    )  # fmt: skip
    rank = mpu.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            whole = list(parameter.shape)
            if (cut := cut_dimension(name)) is not None:
                whole[cut] *= tp
            drawn = torch.randn(whole, generator=torch.Generator().manual_seed(i)) * 0.3
            parameter.copy_(shard(name, drawn, rank, tp))
    mine = [slice_with_cp(t, 0) for t in ids]
    cut = torch.cat(mine)
    pad = (2 * tp - len(cut) % (2 * tp)) % (2 * tp)  # as slime pads; the padding is a sequence of its own
    lengths = torch.tensor([len(t) for t in mine] + ([pad] if pad else []), dtype=torch.int32) * cp
    cu = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    n = int(lengths.max())
    packed = PackedSeqParams(cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=n, max_seqlen_kv=n, qkv_format="thd")
    cut = torch.nn.functional.pad(cut, (0, pad))[None]
    out = model(cut, torch.zeros_like(cut), None, packed_seq_params=packed)[0]
    parts, weighted = list(out[: out.shape[0] - pad].split([len(t) for t in mine])), torch.zeros(())
    for k, (part, whole_ids) in enumerate(zip(parts, ids, strict=True)):
        factors = torch.randn(len(whole_ids), VOCABULARY, generator=torch.Generator().manual_seed(100 + k))
        weighted = weighted + (part * slice_with_cp(factors, 0.0)).sum()
    weighted.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        dist.all_reduce(gradient, group=mpu.get_context_parallel_group())
        # The rule of Megatron's finalize_model_grads.
        if getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
            dist.all_reduce(gradient, group=mpu.get_tensor_model_parallel_group())
        gradients[name] = gradient
    parallel_state.destroy_model_parallel()
    return [part.detach() for part in parts], gradients


def main(rank: int, store: str) -> None:
    """See the module."""
    cpu_device.patch_torch()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    ids = [torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    whole, gradients = logits_and_gradients(1, 1, ids)
    for tp, cp in ((1, 2), (2, 1)):
        found, ours = logits_and_gradients(tp, cp, ids)
        for n, part, expected in zip(LENGTHS, found, whole, strict=True):
            if cp > 1:  # rank r has pieces r and 3 - r; what is padding at the end is nobody's
                c = (n + 3) // 4
                places = [i for start in (rank * c, (3 - rank) * c) for i in range(start, start + c)]
                kept = [(j, i) for j, i in enumerate(places) if i < n]
                part, expected = part[[j for j, _ in kept]], expected[[i for _, i in kept]]
            torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)
        assert ours.keys() == gradients.keys()
        for name, gradient in gradients.items():
            wanted = shard(name, gradient, rank, tp) if tp > 1 else gradient
            torch.testing.assert_close(
                ours[name], wanted, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
        assert max(float(g.abs().max()) for g in ours.values()) > 0.1
    print(f"rank {rank}: context 2 and tensor 2 agree with one process")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

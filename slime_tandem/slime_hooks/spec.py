"""`--spec slime_tandem.slime_hooks.spec layer_spec`: a Megatron layer that needs neither Transformer Engine nor flash-attn.

Its parameters have the names of Transformer Engine's layer (the norms sit inside the linears behind them:
`linear_qkv.layer_norm_weight`, `linear_fc1.layer_norm_weight`), because slime's converters between Megatron and Hugging Face
know no others. Attention is PyTorch's, one call for all packed sequences where they are about as long, else one for each; with
context parallelism keys and values are gathered, and two calls attend, one for each of a rank's two pieces of the sequence. For
machines without Transformer Engine, and for a CPU; where it is installed, leave `--spec` out. Checked against
NVIDIA/Megatron-LM 1dcf0daf and THUDM/slime 624b824a.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from slime_tandem.errors import ConfigError

_PADDED = 1.5
"""Packed sequences become rows of one call while these hold at most so many times their tokens: a call costs the host time."""


class Norm(nn.RMSNorm):
    """RMSNorm of heads, and behind the last layer. Megatron's own for PyTorch refuses `--sequence-parallel`."""

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__(hidden_size, eps)
        _rms_only(config)
        _mark(self.weight, config)


class NormLinear(ColumnParallelLinear):  # type: ignore[misc]
    """RMSNorm and the column-parallel linear behind it; the norm's weight [input_size] is `layer_norm_weight`."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        _rms_only(config)
        self.eps = config.layernorm_epsilon
        ones = torch.ones(input_size, dtype=self.weight.dtype, device=self.weight.device)
        self.layer_norm_weight = nn.Parameter(ones)
        _mark(self.layer_norm_weight, config)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the linear's, on normalised input [..., input_size]."""
        normed = nn.functional.rms_norm(input_, input_.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


def _rms_only(config: Any) -> None:
    if config.normalization != "RMSNorm":
        raise ConfigError("--normalization", config.normalization, "RMSNorm", "use the standard spec")


def _mark(weight: nn.Parameter, config: Any) -> None:
    # Megatron adds up the gradients of a parameter that bears this mark over the ranks that split the sequence.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by PyTorch, on packed sequences [t, heads, d] or on a batch [s, b, heads, d].

    With a context parallel size of C, each packed sequence of length n (a multiple of 2 C) is 2 C pieces, and rank r has pieces
    r and 2 C - 1 - r, as slime's `slice_with_cp` cuts it; `cu_seqlens_q` counts whole sequences.
    """

    def __init__(
        self, config: Any, *_: Any, softmax_scale: float | None = None, pg_collection: Any = None, **__: Any
    ) -> None:
        super().__init__(config=config)
        self.ranks = (pg_collection or ProcessGroupCollection.use_mpu_process_groups(["cp"])).cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        """Hidden states [t, heads * d] of packed sequences, else [s, b, heads * d]."""
        if packed_seq_params is None:
            if self.ranks.size() > 1:
                expected = "1 for a batch that is not packed, with this layer spec"
                raise ConfigError("--context-parallel-size", self.ranks.size(), expected, "leave --qkv-format at thd")
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        query, key, value = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        lengths: list[int] = packed_seq_params.cu_seqlens_q.diff().tolist()
        if self.ranks.size() > 1:
            parts = self._pieces(query, key, value, lengths)
        elif len(lengths) > 1 and len(lengths) * max(lengths) <= _PADDED * query.shape[0]:
            return self._padded(query, key, value, packed_seq_params.cu_seqlens_q, max(lengths))
        else:
            parts = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
        attended = [self._attend(*(x.transpose(0, 1)[None] for x in part))[0].transpose(0, 1) for part in parts]
        return torch.cat(attended).flatten(1)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Hidden states [t, heads * d]: each sequence is filled up behind its end, where a causal query never looks.

        `starts` [m + 1]: the sequences' first tokens, and t.
        """
        m, t = len(starts) - 1, query.shape[0]
        owner = torch.repeat_interleave(torch.arange(m, device=starts.device), starts.diff(), output_size=t)
        place = owner * longest + torch.arange(t, device=starts.device) - starts[owner]
        rows = [
            x.new_zeros(m * longest, *x.shape[1:])
            .index_copy(0, place, x)
            .view(m, longest, *x.shape[1:])
            .transpose(1, 2)
            for x in (query, key, value)
        ]
        return self._attend(*rows).transpose(1, 2).flatten(0, 1).index_select(0, place).flatten(1)

    def _pieces(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """This rank's queries, piece by piece, with the keys and values up to the piece's end.

        The gradients of gathered keys and values are summed over the ranks on their way back.
        """
        size, rank = self.ranks.size(), self.ranks.rank()
        for n in lengths:
            if n % (2 * size):  # the padding behind the last sequence: a rank's share of it has no middle
                expected = f"a multiple of {2 * size}, twice the context parallel size"
                raise ConfigError("tokens of a packed sequence", n, expected, "make --data-pad-size-multiplier even")
        everyones = [
            gather_from_sequence_parallel_region(x.contiguous(), group=self.ranks).unflatten(0, (size, -1))
            for x in (key, value)
        ]
        at = 0
        for n in lengths:
            c = n // (2 * size)
            early, late = slice(at, at + c), slice(at + c, at + 2 * c)
            whole = [torch.cat([x[:, early], x[:, late].flip(0)]).flatten(0, 1) for x in everyones]
            for mine, place in ((early, rank), (late, 2 * size - 1 - rank)):
                yield query[mine], *(x[: (place + 1) * c] for x in whole)  # type: ignore[misc]
            at += 2 * c

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, heads, s, d], the queries being the last s of the keys' positions; grouped heads share keys and values."""
        shared, (s, end) = query.shape[1] != key.shape[1], (query.shape[2], key.shape[2])
        mask = None if s == end else causal_lower_right(s, end)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=shared
        )


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's router; without Transformer Engine its own matrix product ends in a NameError (moe/moe_utils.py:1253)."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits [t, experts], in the precision of `--moe-router-dtype`."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)


class _OfExperts(nn.Module):
    """One matrix [output_size, input_size] for each expert: `weight0`, `weight1`, ..., as Transformer Engine has them."""

    def __init__(self, count: int, output_size: int, input_size: int, config: Any, init: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        for n in range(count):
            weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
            if config.perform_initialization:
                init(weight)
            self.register_parameter(f"weight{n}", weight)


class Experts(MegatronModule):  # type: ignore[misc]
    """All experts of a layer, one after the other, each gate, up and down without bias."""

    def __init__(self, num_local_experts: int, config: Any, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (value := getattr(config, name)) != 1:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(flag, value, "1 with this layer spec", "set it to 1, or install Transformer Engine")
        H, f = config.hidden_size, config.moe_ffn_hidden_size
        self.count = num_local_experts
        self.linear_fc1 = _OfExperts(num_local_experts, 2 * f, H, config, config.init_method)
        self.linear_fc2 = _OfExperts(num_local_experts, H, f, config, config.output_layer_init_method)

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """`hidden` [t, H] sorted by expert, `tokens_per_expert` [experts], `probs` [t] of each token's expert; [t, H]."""
        counts = tokens_per_expert.tolist()
        out = []
        for n, (x, p) in enumerate(zip(torch.split(hidden, counts), torch.split(probs, counts), strict=True)):
            up, down = getattr(self.linear_fc1, f"weight{n}"), getattr(self.linear_fc2, f"weight{n}")
            gate, value = nn.functional.linear(x, up).chunk(2, dim=-1)
            inner = nn.functional.silu(gate) * value * p.unsqueeze(-1)
            out.append(nn.functional.linear(inner.to(x.dtype), down))
        return torch.cat(out), None


def _mlp(config: Any) -> dict[str, ModuleSpec | type]:
    """The second half of a layer: experts with a norm of their own in front, or a dense MLP whose first linear has it."""
    if config.num_moe_experts is None:
        dense = MLPSubmodules(linear_fc1=NormLinear, linear_fc2=RowParallelLinear)
        return {"pre_mlp_layernorm": IdentityOp, "mlp": ModuleSpec(module=MLP, submodules=dense)}
    parts = MoESubmodules(experts=ModuleSpec(module=Experts), router=Router)
    return {"pre_mlp_layernorm": Norm, "mlp": ModuleSpec(module=MoELayer, submodules=parts)}


def layer_spec(args: Any, config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of a model with RMSNorm (llama, qwen2, qwen3; qwen3_moe on ranks that each have all experts) on this stage of
    the pipeline."""
    head_norm = Norm if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=NormLinear,
                    core_attention=CausalAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            **_mlp(config),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=Norm
    )

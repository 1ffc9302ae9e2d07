"""`--spec slime_tandem.slime_hooks.spec layer_spec`: a Megatron layer that needs neither Transformer Engine nor flash-attn.

Its parameters have the names of Transformer Engine's layer (the norms sit inside the linears behind them:
`linear_qkv.layer_norm_weight`, `linear_fc1.layer_norm_weight`), because slime's converters between Megatron and Hugging Face
know no others. Attention is PyTorch's, one call per packed sequence. For machines without Transformer Engine, and for a CPU;
where it is installed, leave `--spec` out. Checked against NVIDIA/Megatron-LM 1dcf0daf.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from slime_tandem.errors import ConfigError, explain


class NormLinear(ColumnParallelLinear):  # type: ignore[misc]
    """RMSNorm and the column-parallel linear behind it; the norm's weight [input_size] is `layer_norm_weight`."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        if config.normalization != "RMSNorm":
            raise ConfigError(explain("--normalization", config.normalization, "RMSNorm", "use the standard spec"))
        self.eps = config.layernorm_epsilon
        ones = torch.ones(input_size, dtype=self.weight.dtype, device=self.weight.device)
        self.layer_norm_weight = nn.Parameter(ones)
        # Megatron adds up the gradients of a parameter that bears this mark over the ranks that split the sequence.
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the linear's, on normalised input [..., input_size]."""
        normed = nn.functional.rms_norm(input_, input_.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by PyTorch, on packed sequences [t, heads, d] or on a batch [s, b, heads, d]."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            size = config.context_parallel_size
            remedy = "install Transformer Engine and leave --spec out"
            raise ConfigError(explain("--context-parallel-size", size, "1 with this layer spec", remedy))
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        """Hidden states [t, heads * d] of packed sequences, else [s, b, heads * d]."""
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        packed = [x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value)]
        lengths: list[int] = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(*(torch.split(x, lengths) for x in packed), strict=True)
        attended = [self._attend(*(x.transpose(0, 1)[None] for x in part))[0].transpose(0, 1) for part in parts]
        return torch.cat(attended).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, heads, s, d]; grouped heads share keys and values."""
        shared = query.shape[1] != key.shape[1]
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=shared
        )


def layer_spec(args: Any, config: Any, vp_stage: int | None = None) -> ModuleSpec:
    """The layer of a dense model with RMSNorm (llama, qwen2, qwen3)."""
    head_norm = WrappedTorchNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
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
            pre_mlp_layernorm=IdentityOp,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=NormLinear, linear_fc2=RowParallelLinear)),
            mlp_bda=get_bias_dropout_add,
        ),
    )

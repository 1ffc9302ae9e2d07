"""The one door to megatron-core: imports it quietly and brings it up for one process, on the CPU or on one GPU.

Other modules take Megatron's names from here, never from `megatron` itself, so that the import-time warnings are filtered
in one place. Nothing of torch or Megatron is patched: each thing that stands in the way of megatron-core 0.16.1 without
CUDA is gone round by an own small class that is used only there. Upstream paths below are under `megatron/core`. It knows no
weights and no checkpoint of ours.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_dist_save
from torch.utils.checkpoint import checkpoint

from slime_tandem.errors import ConfigError

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    raise ConfigError(
        "megatron-core",
        None,
        "installed, for training and `convert` on this machine",
        "pip install 'slime-tandem[local]'",
    )
with warnings.catch_warnings():
    # Transformer Engine and Apex are CUDA-only and not wanted here; Megatron says once per module that it falls back
    # (models/backends.py:21, models/gpt/gpt_layer_specs.py:70, optimizer/__init__.py:24, optimizer/clip_grads.py:29, ...).
    warnings.filterwarnings(
        "ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed", category=UserWarning
    )
    # Megatron importing its own deprecated modules (inference/contexts/__init__.py:9, multi_latent_attention.py:36).
    warnings.filterwarnings("ignore", message=r"\s*The following imports from", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=r"\s*The 'megatron\.core", category=DeprecationWarning)
    # torch's own `utils/mkldnn.py` still uses TorchScript; it is imported through Megatron's dynamo use.
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.script", category=DeprecationWarning)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        TorchDistSaveShardedStrategy,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import RowParallelLinear, model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

__all__ = [
    "CheckpointedLayer",
    "GPTModel",
    "GroupedRowParallelLinear",
    "InverseFrequencyRope",
    "SdpaCoreAttention",
    "ShardedObject",
    "SynchronousTorchDistSave",
    "TransformerConfig",
    "device",
    "dist_checkpointing",
    "ensure_initialized",
    "get_gpt_layer_local_spec",
    "make_sharded_optimizer_tensor",
    "save_torch_dist_config",
    "shutdown",
]


def device() -> torch.device:
    """Where models live: the current GPU if torch sees one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def save_torch_dist_config(folder: Path) -> None:
    """Write `metadata.json`, by which Megatron knows a checkpoint folder and its format."""
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def ensure_initialized(seed: int) -> None:
    """Bring up torch.distributed and Megatron's parallel state for a world of one; further calls do nothing.

    Without CUDA the backend is gloo, bound to the loopback interface; the store is in memory, so no fixed port is used.
    With CUDA the backend is NCCL (and gloo for CPU tensors) and Megatron's own random-number tracker is seeded. On the CPU
    that tracker is left alone: it holds CUDA generators (tensor_parallel/random.py:235), and nothing draws from it, because
    weights are loaded and dropout is refused by `megatron.weights`; torch's CPU generator is seeded instead.
    """
    if parallel_state.model_parallel_is_initialized():
        return
    with_cuda = torch.cuda.is_available()
    with _gloo_on_loopback():
        if not dist.is_initialized():
            excepthook = sys.excepthook
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if with_cuda else "gloo", store=HashStore(), rank=0, world_size=1
            )
            # torch marks every line of an uncaught error with "[rank0]:"; a world of one does not need it.
            sys.excepthook = excepthook
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    atexit.register(shutdown)  # NCCL warns at exit of groups left open
    torch.manual_seed(seed)
    if with_cuda:
        model_parallel_cuda_manual_seed(seed)


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    # gloo listens on whatever address the host name resolves to, which may be a public one; a name the user set wins.
    name = "GLOO_SOCKET_IFNAME"
    loopback = {"lo", "lo0"} & {interface for _, interface in socket.if_nameindex()}
    if name in os.environ or not loopback:
        yield
        return
    os.environ[name] = loopback.pop()
    try:
        yield
    finally:
        del os.environ[name]


def shutdown() -> None:
    """Undo `ensure_initialized`: close the process groups with their sockets and threads; without one, do nothing."""
    atexit.unregister(shutdown)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


class InverseFrequencyRope(RotaryEmbedding):  # type: ignore[misc]
    """Rotary embedding with given inverse frequencies `[head_dim / 2]`, on the device they are on.

    Two reasons not to take the parent's `get_emb` and `forward`: the first moves CPU frequencies to
    `torch.cuda.current_device()` (models/common/embeddings/rotary_pos_embedding.py:162), which raises without CUDA; the
    second is an `lru_cache` on a method (same file, line 182), which keeps every model alive and hands tensors made under
    `inference_mode` to a later training pass, where autograd refuses them.
    """

    def __init__(self, inverse_frequencies: torch.Tensor) -> None:
        super().__init__(kv_channels=2 * inverse_frequencies.numel(), rotary_percent=1.0, use_cpu_initialization=True)
        # Upstream keeps a plain attribute, which `Module.to` does not move; as a buffer it follows the model.
        del self.inv_freq
        self.register_buffer("inv_freq", inverse_frequencies, persistent=False)

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> torch.Tensor:
        """Angles `[S, 1, 1, head_dim]` of positions `offset ..`; packing and context parallelism are not used here."""
        assert not packed_seq
        assert cp_group is None or cp_group.size() == 1
        freqs = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((freqs, freqs), dim=-1)[:, None, None, :]


class SdpaCoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal softmax(QK^T)V by torch's fused kernel, grouped query heads included, no dropout.

    Megatron's own `DotProductAttention` forks the CUDA random-number tracker even at dropout 0
    (transformer/dot_product_attention.py:217, tensor_parallel/random.py:250) and materialises the scores.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_where: Any) -> None:
        super().__init__(config=config)
        assert config.attention_dropout == 0.0
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: Any = None,
        attention_bias: torch.Tensor | None = None,
        **_kind: Any,
    ) -> torch.Tensor:
        """`query` [S, B, heads, D], `key` and `value` [S, B, groups, D] -> [S, B, heads * D]."""
        assert (attention_mask, packed_seq_params, attention_bias) == (None, None, None)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        S, B = query.shape[:2]
        return out.permute(2, 0, 1, 3).reshape(S, B, -1)


class GroupedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel linear layer, telling its kernel the group it already knows.

    The parent passes `tp_group=None` (tensor_parallel/layers.py:1280), of which core/utils.py:501 warns at every call.
    """

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        output = super()._forward_impl(input, weight, **{**options, "tp_group": self.tp_group})
        assert isinstance(output, torch.Tensor)
        return output


class CheckpointedLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer, which keeps its input alone for the backward pass and computes the rest again (gradient checkpointing).

    Megatron's own recomputation goes through its CUDA random-number tracker (tensor_parallel/random.py:422). Nothing draws
    here, so no state of a generator has to be kept; parameters and names are the layer's own.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent's; without gradients it is the parent's."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class SynchronousTorchDistSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's `torch_dist` format, written by this thread.

    The parent starts a spawned manager process, which re-imports `__main__` and hangs a script without a main guard
    (dist_checkpointing/strategies/filesystem_async.py:52), forks one writer per thread, and needs `torch.cuda`
    (line 230 there, state_dict_saver.py:252). torch's own writer gives the same files without any of it.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write the tensors to `__0_0.distcp` and their index to `.metadata`, both fsynced."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        with warnings.catch_warnings():
            # `no_dist`: with collectives torch pickles an error on its way to rank 0, which loses the OSError behind it.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            torch_dist_save(
                mcore_to_pyt_state_dict(by_key, False),
                storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                no_dist=True,
            )

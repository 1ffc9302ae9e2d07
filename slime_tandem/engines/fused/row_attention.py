"""How SGLang's layers attend in a catch-up step: `ragged_attention` on a GPU, SGLang's own attention, row by row, on a CPU.

SGLang's attention of a decode step takes one row a sequence. A layer asks the backend of the current forward context, so
another one can answer for as long as a model's stack runs (model_executor/forward_context.py: "callers that need a per-call
override"). What was known before the step stays as it was: the pools, and where tokens lie.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_context import forward_context, get_forward_context

from slime_tandem.engines.fused.catch_up import Bounds, Snapshot, Step


class RowAttention:
    """The attention of one engine's catch-up steps, and where the tokens of a step's sequences lie."""

    def __init__(self, bounds: Bounds, heads: int) -> None:
        """`heads`: query heads of whichever model has more, on this rank."""
        self._bounds, self._heads = bounds, heads
        self._workspaces: list[Any] = []
        self._most = 0  # sequences that the last one has room for

    def snapshot(self, batch: Any) -> Snapshot:
        """Where the tokens of a decode step's sequences lie."""
        backend = get_forward_context().attn_backend
        if batch.seq_lens.is_cuda:
            # What was copied before a graph is replayed: the scheduler goes on writing into the request slots meanwhile.
            known = backend.forward_metadata
            return Snapshot(known.kv_indptr, known.kv_indices)
        slots, lengths = backend.req_to_token_pool.req_to_token, batch.seq_lens.tolist()
        locations = [slots[slot, :n] for slot, n in zip(batch.req_pool_indices.tolist(), lengths, strict=True)]
        return Snapshot(torch.tensor([0, *lengths]).cumsum(0), torch.cat(locations).long())

    def over(self, step: Step, snapshot: Snapshot) -> contextlib.AbstractContextManager[None]:
        """Within it, layers attend for the rows of `step`."""
        if not step.taken.is_cuda:
            return contextlib.nullcontext()
        context = get_forward_context()
        backend = _Ragged(context.attn_backend, step, snapshot, self._bounds.longest, self._workspace_for)
        return forward_context(dataclasses.replace(context, attn_backend=backend))  # type: ignore[no-any-return]

    def _workspace_for(self, sequences: int, kv_heads: int, size: int, device: torch.device) -> Any:
        """One for all layers, both models and every graph: SGLang captures the largest batch first."""
        from slime_tandem.engines.fused import ragged_attention as ragged

        if sequences > self._most:
            shares = ragged.shares_of(device, kv_heads)
            most = max(self._bounds.rows(n) * ragged.most_parts(n, shares) for n in range(1, sequences + 1))
            self._workspaces.append(
                ragged.Workspace(most * self._heads, size, device)
            )  # graphs hold on to earlier ones
            self._most = sequences
        return self._workspaces[-1]


class _Ragged(AttentionBackend):  # type: ignore[misc]
    """One model's attention in one step, on a GPU."""

    def __init__(self, base: Any, step: Step, snapshot: Snapshot, longest: int, workspace: Callable[..., Any]) -> None:
        super().__init__()
        self.token_to_kv_pool, self.req_to_token_pool = base.token_to_kv_pool, base.req_to_token_pool
        self._step, self._snapshot, self._longest, self._workspace = step, snapshot, longest, workspace

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """A layer's attention [R, heads x size] of the rows' queries; their keys and values are stored first."""
        from slime_tandem.engines.fused import ragged_attention as ragged

        assert not kwargs, "models that need more of their attention are refused"
        assert save_kv_cache, "no layer shares another's keys and values"
        pool, heads, size = self.token_to_kv_pool, layer.tp_q_head_num, layer.qk_head_dim
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        rows, kv_heads = q.shape[0], keys.shape[1]
        workspace = self._workspace(len(self._step.taken), kv_heads, size, q.device)
        out = ragged.attend(
            q.reshape(rows, heads, size),
            keys,
            values,
            self._snapshot,
            self._step,
            self._longest,
            layer.scaling,
            workspace,
        )
        return out.view(rows, heads * size)

"""FlashInfer as far as a prefill calls it, in plain tensor operations on a CPU; it records every plan and run.

What the real one refuses is refused: rows that were not planned, a merge of other shapes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

PLANS: list[tuple[str, int, list[int], list[int]]] = []
"""(kind, query heads, rows of each sequence, keys of each sequence) of every plan."""
RUNS: list[tuple[str, int]] = []
"""(kind, rows) of every run."""


class _Wrapper:
    kind = ""

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str = "auto") -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8

    def _planned(
        self, queries: torch.Tensor, keys: torch.Tensor, heads: int, kv_heads: int, size: int, scale: float
    ) -> None:
        assert queries.dtype == keys.dtype == torch.int32
        assert len(queries) == len(keys)
        self.queries, self.keys, self.shape, self.scale = (
            queries.tolist(),
            keys.tolist(),
            (heads, kv_heads, size),
            scale,
        )
        PLANS.append((self.kind, heads, queries.diff().tolist(), keys.diff().tolist()))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, kv_heads, size = self.shape
        if q.shape != (self.queries[-1], heads, size) or k.shape[1:] != (kv_heads, size):
            raise ValueError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)} where {self.queries[-1]} rows of {self.shape} were planned"
            )
        RUNS.append((self.kind, len(q)))
        # Of a sequence without keys the real one leaves what its buffers held.
        out, weights = torch.full_like(q, math.nan), torch.full(q.shape[:2], 50.0)
        for b in range(len(self.queries) - 1):
            rows, seen = slice(*self.queries[b : b + 2]), slice(*self.keys[b : b + 2])
            n, m = rows.stop - rows.start, seen.stop - seen.start
            if not n or not m:
                continue
            group = q[rows].double().view(n, kv_heads, -1, size)
            scores = torch.einsum("nhgd,mhd->hgnm", group, k[seen].double()) * self.scale
            if causal:
                scores = scores.masked_fill(torch.ones(n, m).tril(m - n) == 0, -math.inf)
            values = torch.einsum("hgnm,mhd->nhgd", scores.softmax(-1), v[seen].double())
            out[rows] = values.reshape(n, heads, size).to(q.dtype)
            weights[rows] = (scores.logsumexp(-1) / math.log(2)).permute(2, 0, 1).reshape(n, heads).float()
        return out, weights


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """New tokens, which attend to each other."""

    kind = "ragged"

    def plan(
        self, queries: Any, keys: Any, heads: int, kv_heads: int, size: int, *, causal: bool, sm_scale: float,
        q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert causal
        self._planned(queries, keys, heads, kv_heads, size, sm_scale)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False) -> Any:
        out, weights = self._attend(q, k, v, causal=True)
        return (out, weights) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """New tokens, which attend to what lies in the pool."""

    kind = "paged"

    def plan(
        self, queries: Any, keys: Any, locations: Any, last: Any, heads: int, kv_heads: int, size: int, page: int, *,
        causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert not causal
        assert page == 1
        assert last.tolist() == [1] * (len(queries) - 1)
        assert locations.dtype == torch.int32
        assert len(locations) == keys[-1]
        self.locations = locations.long()
        self._planned(queries, keys, heads, kv_heads, size, sm_scale)

    def run(self, q: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor], *, return_lse: bool = False) -> Any:
        assert return_lse
        return self._attend(q, pool[0][self.locations], pool[1][self.locations], causal=False)


def merge_state_in_place(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None:
    """Two parts of the same rows' attention, by the base-2 logs of their weights, into the first."""
    assert v.shape == v_other.shape
    assert s.shape == s_other.shape
    top = torch.maximum(s, s_other)
    ours, theirs = torch.exp2(s - top), torch.exp2(s_other - top)
    share = (theirs / (ours + theirs)).unsqueeze(-1).to(v.dtype)
    v.copy_(v * (1 - share) + v_other * share)

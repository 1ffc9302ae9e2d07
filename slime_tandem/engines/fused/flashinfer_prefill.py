"""Prefill attention by FlashInfer for models with different numbers of query heads over one pool of keys and values.

FlashInfer plans a batch on the host for one number of heads. Here every layout of heads has wrappers and a plan of its own,
made once a batch and used by each of its layers. The new tokens attend to each other from the keys and values just computed
(`ragged`), those of sequences with something cached also to what lies in the pool (`paged`), and the two are merged; so does
SGLang's FlashInfer backend. Lengths are known on the host, so that a plan waits for nothing. It knows no model and no SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

SIZES = (64, 128, 256)
"""Sizes of a head that FlashInfer's prefill kernels are made for."""
_LEAST_WORKSPACE = 128 * 2**20
_TILE_ROWS = 128
"""Query rows of FlashInfer's widest tile."""
_MERGE_THREADS = 1024


class Heads(NamedTuple):
    """A layout of heads on this rank: query heads, KV heads, the size of a head, the factor of the scores.

    >>> Heads(32, 8, 128, 0.088).merges, Heads(128, 8, 128, 0.088).merges
    (True, False)
    """

    query: int
    kv: int
    size: int
    scale: float

    @property
    def merges(self) -> bool:
        """Whether FlashInfer's merge kernel takes a row: a thread for every 8 values of it (cascade.cuh), 16-bit values."""
        return self.query * self.size // max(8, self.size // 32) <= _MERGE_THREADS

    def workspace(self, processors: int) -> int:
        """Bytes that a plan may need for partial results on a card of so many processors, doubled.

        FlashInfer splits sequences only up to two tiles a processor (scheduler.cuh: PrefillPlan).
        """
        return 2 * (self.query // self.kv) * 2 * processors * _TILE_ROWS * (self.size + 1) * 4


class Tuning(NamedTuple):
    """FlashInfer's `backend` for new tokens and for what is cached; the defaults are those of SGLang 0.5.15."""

    ragged: str = "auto"
    paged: str = "fa2"


TUNING = Tuning()


class Prefill:
    """The plans of one engine, on one device; `dtype` of queries, keys and values: bfloat16 or float16."""

    def __init__(
        self, layouts: Iterable[Heads], dtype: torch.dtype, device: torch.device, tuning: Tuning = TUNING
    ) -> None:
        """Raises ImportError without FlashInfer."""
        import flashinfer

        self._merge: Any = flashinfer.merge_state_in_place
        self._dtype, self._device = dtype, device
        self._copied: torch.cuda.Event | None = None
        distinct = list(dict.fromkeys(layouts))
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        size = max(_LEAST_WORKSPACE, *(heads.workspace(processors) for heads in distinct))
        # One for all: a run's partial results are merged before the next one begins.
        workspace = torch.empty(size if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
        self._ragged: dict[Heads, Any] = {
            h: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=tuning.ragged)
            for h in distinct
        }
        self._paged: dict[Heads, Any] = {
            h: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=tuning.paged) for h in distinct
        }
        self._behind = slice(0, 0)
        self._nothing: torch.Tensor | None = None

    def plan(self, new: Sequence[int], cached: Sequence[int], locations: torch.Tensor) -> None:
        """Plan a batch, for every layout: of sequence b `new[b]` tokens, behind `cached[b]` that lie in the pool.

        `locations` [sum(cached)] int32, on the device: where the cached ones lie, one sequence after the other.
        """
        if self._copied is not None:
            # A plan is copied from the wrapper's one page-locked buffer: the last one's copy must be through.
            self._copied.synchronize()
        starts = [0, *accumulate(new)]
        hit = [b for b, n in enumerate(cached) if n]
        first, end = (hit[0], hit[-1] + 1) if hit else (0, 0)
        self._behind = slice(starts[first], starts[end])
        self._nothing = None
        if not all(cached[first:end]):
            rows = [not cached[b] for b in range(first, end) for _ in range(new[b])]
            self._nothing = self._host(rows, torch.bool).to(self._device, non_blocking=True)
        queries = self._host(starts)
        for heads, ragged in self._ragged.items():
            ragged.plan(
                queries, queries, heads.query, heads.kv, heads.size, causal=True, sm_scale=heads.scale,
                q_data_type=self._dtype, kv_data_type=self._dtype,
            )  # fmt: skip
        if hit:
            behind = self._host([n - starts[first] for n in starts[first : end + 1]])
            before = self._host([0, *accumulate(cached[first:end])])
            ones = self._host([1] * (end - first))
            for heads, paged in self._paged.items():
                paged.plan(
                    behind, before, locations, ones, heads.query, heads.kv, heads.size, 1, causal=False,
                    sm_scale=heads.scale, q_data_type=self._dtype, kv_data_type=self._dtype,
                )  # fmt: skip
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """[T, H, D]: attention of the planned batch's T new tokens `q` [T, H, D], with their `k` and `v` [T, KV heads, D].

        `pool`: keys and values [locations, KV heads, D] of the layer. Raises KeyError for a layout that was not announced.
        """
        heads = Heads(q.shape[1], k.shape[1], q.shape[2], scale)
        ragged, rows = self._ragged[heads], self._behind
        if rows.start == rows.stop:
            return ragged.run(q, k, v)  # type: ignore[no-any-return]
        out, weights = ragged.run(q, k, v, return_lse=True)
        cached, theirs = self._paged[heads].run(q[rows], pool, return_lse=True)
        if self._nothing is not None:
            # Of a sequence without keys FlashInfer leaves what its buffers held (fa2, 0.6.12). Its weight is nil.
            cached.masked_fill_(self._nothing[:, None, None], 0.0)
            theirs.masked_fill_(self._nothing[:, None], -math.inf)
        self._merge(out[rows], weights[rows], cached, theirs)
        return out  # type: ignore[no-any-return]

    def _host(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        pinned = self._device.type == "cuda"
        return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned)


def located(table: torch.Tensor, slots: torch.Tensor, cached: Sequence[int]) -> torch.Tensor:
    """[sum(cached)] int32: where the first `cached[b]` tokens of the sequences in `slots` [B] lie, one after the other.

    `table` [slots, positions]: locations. Nothing is read back from the device.

    >>> located(torch.arange(12).view(3, 4), torch.tensor([2, 0, 1]), [2, 0, 3]).tolist()
    [8, 9, 4, 5, 6]
    """
    total, device = sum(cached), table.device
    lengths = torch.tensor(cached, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    lengths = lengths.to(device, non_blocking=True)
    of = torch.repeat_interleave(torch.arange(len(cached), device=device), lengths, output_size=total)
    position = torch.arange(total, device=device) - (lengths.cumsum(0) - lengths)[of]
    return table[slots.long()[of], position].to(torch.int32)

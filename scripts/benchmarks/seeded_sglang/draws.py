"""SGLang's seeded draws on a CPU: its deterministic mode refuses the CPU's attention and hashes by a Triton kernel.

The same hash (MurmurHash3 of seed, position and column, sglang/srt/layers/utils/hash.py) by torch, and the mode switched on
behind the parser. For benchmarks: a repeated request then writes the same tokens, as on a GPU with
`--enable-deterministic-inference`.
"""

from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.server_args import get_global_server_args

_WORD = 0xFFFFFFFF


def _rotated(x: torch.Tensor, by: int) -> torch.Tensor:
    return ((x << by) | (x >> (32 - by))) & _WORD


def _mixed(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = (_rotated((k * 0xCC9E2D51) & _WORD, 15) * 0x1B873593) & _WORD
    return (_rotated(h ^ k, 13) * 5 + 0xE6546B64) & _WORD


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    seed, positions, columns = (
        seed.to(torch.int64)[:, None],
        positions.to(torch.int64)[:, None],
        col_indices.to(torch.int64),
    )
    h = _mixed(_mixed(torch.zeros_like(seed), seed & _WORD), (seed >> 32) & _WORD)
    h = _mixed(_mixed(h, positions & _WORD), columns[None, :]) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


_plain = SamplingBatchInfo.from_schedule_batch.__func__


def _seeded(cls: type, *args: Any, **kwargs: Any) -> Any:
    get_global_server_args().enable_deterministic_inference = True
    return _plain(cls, *args, **kwargs)


sampler.murmur_hash32 = murmur_hash32
SamplingBatchInfo.from_schedule_batch = classmethod(_seeded)

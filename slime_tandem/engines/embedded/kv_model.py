"""Runs a transformers causal LM over our own key/value memory, many sequences at once, without padding the linear layers.

Two memories: *slots*, one contiguous row per running sequence, read by attention as they lie; and the *pool*, one location
per token, that holds prefixes worth keeping (`prefix_cache` knows which). Keys and values travel between them in bulk.
An attention function registered with transformers' `AttentionInterface` puts new keys and values into the slots and attends
over them, so every architecture that goes through that interface works unchanged. When a model is taken in, its log-probs are
compared with transformers' own attention: what this module does not handle is refused instead of served wrong.

Letters: T new tokens of a step, flattened over m sequences; Q the longest share of one sequence; R rows, C positions a row;
L positions attended to; H query heads, K key/value heads, G = H / K, D head size; N pool locations; V vocabulary. It knows no
request, no stop and no sampling: `runner.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from slime_tandem.errors import ModelError
from slime_tandem.types import IntArray

ATTENTION = "slime_tandem_slots"
_WIDTH_STEP = 64
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}


@dataclass(slots=True)
class _Step:
    """What the attention function needs to know about one forward pass."""

    memory: torch.Tensor  # [2 * layers, R, K, C, D]
    write: torch.Tensor  # [T * K] flat positions in a layer's [R * K * C]
    rows: slice | torch.Tensor  # the m rows of the step
    width: int  # L
    mask: torch.Tensor | None  # [m, 1, G * Q, L], 0 or -inf; None: everything is visible
    pad: torch.Tensor | None  # [m * Q] flat token of each padded place; None: no padding
    unpad: torch.Tensor | None  # [T] padded place of each token
    sequences: int  # m


class _Probe:
    """Collects (K, D) of each layer in a plain causal pass."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int, torch.dtype]] = {}


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    tandem_step: _Step | _Probe | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function. `query` [1, H, T, D], `key` and `value` [1, K, T, D]; returns [1, T, H, D]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(tandem_step, _Probe):
        tandem_step.layers[layer] = (key.shape[1], key.shape[3], value.shape[3], key.dtype)
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    step = tandem_step
    assert step is not None
    _, H, T, D = query.shape
    K = key.shape[1]
    G, m = H // K, step.sequences
    layers = step.memory.view(step.memory.shape[0], -1, D)
    layers[2 * layer].index_copy_(0, step.write, key[0].transpose(0, 1).reshape(T * K, D))
    layers[2 * layer + 1].index_copy_(0, step.write, value[0].transpose(0, 1).reshape(T * K, D))
    keys, values = step.memory[2 * layer, :, :, : step.width], step.memory[2 * layer + 1, :, :, : step.width]
    # Indexing, not index_select, which would first make a contiguous copy of all rows.
    keys, values = keys[step.rows], values[step.rows]
    q = query[0].transpose(0, 1)
    if step.pad is not None:
        q = q.index_select(0, step.pad)
    Q = q.shape[0] // m
    # The G query heads that share a key/value head attend as G * Q queries, so nothing is repeated in memory.
    q = q.reshape(m, Q, K, G, D).permute(0, 2, 3, 1, 4).reshape(m, K, G * Q, D)
    out = scaled_dot_product_attention(q, keys, values, attn_mask=step.mask, scale=scaling)
    out = out.view(m, K, G, Q, D).permute(0, 3, 1, 2, 4).reshape(m * Q, H, D)
    if step.unpad is not None:
        out = out.index_select(0, step.unpad)
    return out.unsqueeze(0), None


def _require_full_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    ):
        raise ModelError(
            "config.layer_types",
            sorted(kinds),
            "full attention in every layer, without a sliding window",
            "serve this model with SGLang",
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ModelError(
            "config.attn_logit_softcapping",
            config.attn_logit_softcapping,
            "attention without soft-capping",
            "serve this model with SGLang",
        )


def _equal_heads(probe: _Probe, config: Any) -> tuple[int, int, torch.dtype]:
    """(key/value heads, head size, dtype), the same in every layer that the config counts."""
    shapes = set(probe.layers.values())
    if len(shapes) != 1 or sorted(probe.layers) != list(range(config.num_hidden_layers)):
        raise ModelError(
            "config.model_type",
            config.model_type,
            f"attention layers 0..{config.num_hidden_layers - 1} with equal heads, got {sorted(map(str, shapes))}",
            "serve this model with SGLang",
        )
    kv_heads, head_dim, value_dim, dtype = shapes.pop()
    if head_dim != value_dim:
        raise ModelError(
            "config.model_type", config.model_type, "keys and values of equal size", "serve it with SGLang"
        )
    return kv_heads, head_dim, dtype


class KVModel:
    """A causal LM with slots for running sequences and a pool for known prefixes.

    `cache_tokens` bounds both memories: rows times positions per row of the slots, and the locations of the pool. Pages that
    were never written cost no RAM. Raises ModelError for a model that cannot be served exactly.
    """

    def __init__(self, model: Any, *, max_rows: int, cache_tokens: int) -> None:
        self.max_rows = max_rows
        self.cache_tokens = cache_tokens
        self._take(model)
        self.rows, self.width = 0, 0
        self.slots = self._zeros(0, 0)
        self.pool = torch.zeros(2 * self.layers, cache_tokens, self.kv_heads, self.head_dim, dtype=self.dtype)
        self.fit(1, _WIDTH_STEP, 0, 0)
        self._verify()

    def _take(self, model: Any) -> None:
        config = model.config.get_text_config()
        _require_full_attention(config)
        kv_heads, head_dim, self.dtype = _equal_heads(self._probe(model, config), config)
        self.model = model
        self.layers, self.kv_heads, self.head_dim = config.num_hidden_layers, kv_heads, head_dim
        self.groups = config.num_attention_heads // kv_heads
        self.vocab_size = int(config.vocab_size)
        self.context_length = int(config.max_position_embeddings)

    def _probe(self, model: Any, config: Any) -> _Probe:
        """What each attention layer is called with; keeps the log-probs of transformers' own attention for `_verify`."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attend)
        # No mask function is registered under this name, so transformers builds no mask; the slots bring their own.
        probe = _Probe()
        with torch.inference_mode():
            ids = torch.arange(8).remainder(config.vocab_size).unsqueeze(0)
            try:
                self._reference = self._plain_log_probs(model, ids)
                model.set_attn_implementation(ATTENTION)
                model(input_ids=ids, position_ids=torch.arange(8).unsqueeze(0), use_cache=False, tandem_step=probe)
            except Exception as error:
                raise ModelError(
                    "config.model_type",
                    config.model_type,
                    f"an architecture that uses transformers' AttentionInterface ({type(error).__name__}: {error})",
                    "serve this model with SGLang",
                ) from error
        return probe

    @staticmethod
    def _plain_log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
        model.set_attn_implementation("sdpa")
        return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), dim=-1)

    def _verify(self) -> None:
        """Compare a prefill of five tokens and three decode steps with transformers' own attention."""
        ids = np.arange(8) % self.vocab_size
        spans = [(0, 5), (5, 6), (6, 7), (7, 8)]
        parts = [
            self.forward(np.zeros(1, np.int64), ids[a:b], np.array([a]), np.array([b - a]), None) for a, b in spans
        ]
        error = float((torch.log_softmax(torch.cat(parts), dim=-1) - self._reference).abs().max())
        if not error <= _PROBE_TOLERANCE[self.dtype]:
            raise ModelError(
                "config.model_type",
                self.model.config.model_type,
                f"log-probs equal to transformers' own attention, but they differ by {error:.3g}",
                "serve this model with SGLang",
            )

    def swap(self, model: Any) -> None:
        """Serve `model`, of the same architecture, from now on. Raises ModelError and keeps the old one if it does not fit."""
        old_model, old_reference = self.model, self._reference
        try:
            old_shapes = {k: v.shape for k, v in old_model.state_dict().items()}
            new_shapes = {k: v.shape for k, v in model.state_dict().items()}
            if type(model) is not type(old_model) or old_shapes != new_shapes:
                differing = sorted(k for k in old_shapes | new_shapes if old_shapes.get(k) != new_shapes.get(k))
                raise ModelError(
                    "model_path",
                    type(model).__name__,
                    f"a {type(old_model).__name__} with the served model's shapes; differing: {differing[:3]}",
                    "send weights of the served model",
                )
            broken = next((k for k, v in model.state_dict().items() if not torch.isfinite(v).all()), None)
            if broken is not None:
                raise ModelError("model_path", broken, "finite weights", "look for NaN or inf in the trainer's step")
            self._take(model)
            self._verify()
        except BaseException:
            self.model, self._reference = old_model, old_reference
            raise

    def _zeros(self, rows: int, width: int) -> torch.Tensor:
        # Zeros, not empty: a masked position still multiplies its value by 0, and 0 * NaN is NaN.
        return torch.zeros(2 * self.layers, rows, self.kv_heads, width, self.head_dim, dtype=self.dtype)

    def fit(self, rows: int, width: int, used_rows: int, used_width: int) -> bool:
        """Make the slots hold `rows` x `width`, keeping the used part; True if they were re-made."""
        if rows <= self.rows and width <= self.width:
            return False
        width = -(-width // _WIDTH_STEP) * _WIDTH_STEP
        rows = max(rows, min(self.max_rows, self.cache_tokens // width))
        slots = self._zeros(rows, width)
        slots[:, :used_rows, :, :used_width] = self.slots[:, :used_rows, :, :used_width]
        self.slots, self.rows, self.width = slots, rows, width
        return True

    def fits(self, rows: int, width: int) -> bool:
        """Whether `rows` sequences of `width` positions stay within `cache_tokens`."""
        return rows <= self.max_rows and rows * width <= self.cache_tokens

    def _flat(self, rows: IntArray, positions: IntArray) -> torch.Tensor:
        """Flat places [n * K] in [R * K * C] of all heads of (row, position) pairs [n]."""
        heads = rows[:, None] * self.kv_heads + np.arange(self.kv_heads)
        return torch.from_numpy((heads * self.width + positions[:, None]).reshape(-1))

    def load(self, rows: IntArray, positions: IntArray, locations: IntArray) -> None:
        """Copy pool `locations` [n] to (row, position) pairs [n] of the slots."""
        part = self.pool.index_select(1, torch.from_numpy(locations)).flatten(1, 2)
        self.slots.view(2 * self.layers, -1, self.head_dim).index_copy_(1, self._flat(rows, positions), part)

    def store(self, rows: IntArray, positions: IntArray, locations: IntArray) -> None:
        """Copy (row, position) pairs [n] of the slots to pool `locations` [n]."""
        part = self.slots.view(2 * self.layers, -1, self.head_dim).index_select(1, self._flat(rows, positions))
        self.pool.index_copy_(
            1, torch.from_numpy(locations), part.view(2 * self.layers, -1, self.kv_heads, self.head_dim)
        )

    def copy_rows(self, source: IntArray, target: IntArray, width: int) -> None:
        """Copy the first `width` positions of rows `source` over rows `target`."""
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            self.slots[:, b, :, :width] = self.slots[:, a, :, :width]

    @torch.inference_mode()
    def forward(
        self, rows: IntArray, ids: IntArray, starts: IntArray, lengths: IntArray, keep: IntArray | None
    ) -> torch.Tensor:
        """Feed new tokens and return logits [len(keep), V] float32.

        `rows`, `starts`, `lengths` [m]: each sequence's slot row, the position of its first new token, and
        how many new tokens it has.
        `ids` [T] is their concatenation. `keep` are the flat tokens whose logits are wanted (None: all of them).
        """
        m, T = len(rows), len(ids)
        width = int((starts + lengths).max())
        if m == T:
            owner, offset, Q = np.arange(m), np.zeros(m, np.int64), 1
            positions = starts
        else:
            owner = np.repeat(np.arange(m), lengths)
            offset = np.arange(T) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            positions, Q = starts[owner] + offset, int(lengths.max())
        pad = unpad = None
        if m * Q != T:
            places = owner * Q + offset
            filler = np.zeros(m * Q, np.int64)
            filler[places] = np.arange(T)
            pad, unpad = torch.from_numpy(filler), torch.from_numpy(places)
        mask = None
        if Q > 1 or int(starts.min()) + 1 != width:
            query_positions = torch.from_numpy(starts).view(m, 1, 1) + torch.arange(Q).view(1, Q, 1)
            hidden = torch.arange(width).view(1, 1, width) > query_positions
            mask = torch.zeros(m, Q, width, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
            mask = mask.repeat(1, self.groups, 1).unsqueeze(1)
        first = int(rows[0])
        contiguous = m == 1 or bool((rows == np.arange(first, first + m)).all())
        step = _Step(
            memory=self.slots,
            write=self._flat(rows[owner], positions),
            rows=slice(first, first + m) if contiguous else torch.from_numpy(rows),
            width=width,
            mask=mask,
            pad=pad,
            unpad=unpad,
            sequences=m,
        )
        logits: torch.Tensor = self.model(
            input_ids=torch.from_numpy(ids).unsqueeze(0),
            position_ids=torch.from_numpy(positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if keep is None else torch.from_numpy(keep),
            tandem_step=step,
        ).logits
        return logits[0].float()

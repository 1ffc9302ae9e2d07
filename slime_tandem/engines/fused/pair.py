"""Which senior and junior fit into one engine, told from their config.json. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_tandem.errors import ModelError

ARCHITECTURES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}
"""`model_type` -> first part of the class names, here and in SGLang."""


def head_size(config: Mapping[str, Any]) -> int:
    """Size of one attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def kv_heads(config: Mapping[str, Any]) -> int:
    """Number of key and value heads."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def context_length(senior: Mapping[str, Any], junior: Mapping[str, Any]) -> int | None:
    """Tokens that SGLang must be told to stop at, where the junior's context is the shorter one; else None.

    SGLang takes the senior's context and stretches the position tables of every layer to it: past its own context the
    junior would write what it was never trained to, and nothing would tell.

    >>> context_length({"max_position_embeddings": 512}, {"max_position_embeddings": 256})
    256
    """
    own, other = _context(senior), _context(junior)
    return other if own is not None and other is not None and other < own else None


def _context(config: Mapping[str, Any]) -> int | None:
    """The context as SGLang 0.5.15 takes it from a config (`get_context_length`); None where none is stated."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = "original_max_position_embeddings" not in rope and rope.get("rope_type") != "llama3"
    positions = config.get("max_position_embeddings")
    return None if positions is None else int(positions * (rope.get("factor", 1) if stretched else 1))


def _damages(role: str, config: Mapping[str, Any]) -> list[ModelError]:
    """What is missing or no count among the sizes by which the engine is laid out."""
    names = ["vocab_size", "num_hidden_layers", "num_attention_heads"]
    names += [n for n in ("num_key_value_heads", "head_dim", "max_position_embeddings") if config.get(n) is not None]
    names += [] if config.get("head_dim") else ["hidden_size"]
    faults = [
        ModelError(f"{role}.{name}", config.get(name), "a whole number above 0 in config.json", "save the model again")
        for name in names
        if type(config.get(name)) is not int or config[name] < 1
    ]
    faults += [
        ModelError(f"{role}.{name}", config[name], "an object or null in config.json", "save the model again")
        for name in ("rope_scaling", "rope_parameters")
        if config.get(name) is not None and not isinstance(config[name], Mapping)
    ]
    if not faults and config["num_attention_heads"] % kv_heads(config):
        heads = f"{config['num_attention_heads']} for {kv_heads(config)} KV heads"
        faults.append(ModelError(f"{role}.num_attention_heads", heads, "a multiple", "save the model again"))
    return faults


def require_fitting(senior: Mapping[str, Any], junior: Mapping[str, Any]) -> None:
    """Raise ModelError, with every reason, unless both can share one engine.

    >>> config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> require_fitting(config, {**config, "num_hidden_layers": 3})
    """
    faults = []
    kind = senior.get("model_type")
    if kind not in ARCHITECTURES:
        faults.append(ModelError("senior.model_type", kind, f"one of {sorted(ARCHITECTURES)}", "use two servers"))
    elif junior.get("model_type") != kind:
        faults.append(
            ModelError(
                "junior.model_type", junior.get("model_type"), f"{kind!r}, the senior's family", "use two servers"
            )
        )
    faults += [fault for role, config in (("senior", senior), ("junior", junior)) for fault in _damages(role, config)]
    if faults:
        raise ModelError.gather(faults)
    for role, config in (("senior", senior), ("junior", junior)):
        if config.get("use_sliding_window") and config.get("sliding_window"):
            faults.append(
                ModelError(f"{role}.use_sliding_window", True, "full attention in every layer", "use two servers")
            )
    same = (
        ("vocab_size", junior["vocab_size"], senior["vocab_size"], "one vocabulary, so that logits can be exchanged"),
        ("num_key_value_heads", kv_heads(junior), kv_heads(senior), "one KV pool serves both models"),
        ("head_dim", head_size(junior), head_size(senior), "one KV pool serves both models"),
    )
    for name, value, wanted, reason in same:
        if value != wanted:
            faults.append(
                ModelError(
                    f"junior.{name}", value, f"{wanted}, the senior's: {reason}", "use two servers, or another junior"
                )
            )
    if junior.get("quantization_config") != senior.get("quantization_config"):
        faults.append(
            ModelError(
                "junior.quantization_config",
                junior.get("quantization_config"),
                f"{senior.get('quantization_config')}, the senior's: SGLang reads both models by it",
                "use two servers, or a junior quantized the same way",
            )
        )
    if junior["num_attention_heads"] > senior["num_attention_heads"]:
        faults.append(
            ModelError(
                "junior.num_attention_heads",
                junior["num_attention_heads"],
                f"at most the senior's {senior['num_attention_heads']}: SGLang sizes attention workspaces by the senior",
                "use two servers, or a narrower junior",
            )
        )
    if faults:
        raise ModelError.gather(faults)


def catches_up(senior: Mapping[str, Any]) -> bool:
    """Whether the kernel of catch-up steps takes heads of this size.

    >>> catches_up({"head_dim": 128}), catches_up({"head_dim": 80})
    (True, False)
    """
    size = head_size(senior)
    return size >= 16 and not size & (size - 1)


def require_catching_up(senior: Mapping[str, Any]) -> None:
    """Raise ModelError unless the heads of a pair that fits are of a size that the kernel of catch-up steps takes.

    >>> require_catching_up({"head_dim": 128})
    """
    if not catches_up(senior):
        raise ModelError(
            "senior.head_dim",
            head_size(senior),
            "a power of two from 16 on: the attention kernel takes such heads",
            "set engine.fused_attention to auto or every_step",
        )

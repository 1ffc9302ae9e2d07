"""What serving a model takes: weights, and KV cache of a token; of any architecture that a server knows, not only of students.

A student's sizes follow from its `Architecture`. Of any other model the weights are those of its files (headers only), or what
transformers counts for its config.json without making one; the KV cache follows from the config. What is an estimate is said in
a note, what cannot be known is asked for. It starts nothing and reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_tandem.config import ServedModel
from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.megatron.architecture import Architecture
from slime_tandem.models.hf import architectures_of, language_config, quantization_of, read_model_config, require_sizes
from slime_tandem.models.weight_files import stored_bytes
from slime_tandem.slime_launch.sizes import PUBLISHED, parameters

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STATES = 0.9
"""SGLang's `mamba_full_memory_ratio`: memory of the states of linear layers over that of the KV cache (server_args.py)."""


_TEXT_ALONE = ("qwen3_5_text", "qwen3_5_moe_text")
"""Kinds of which SGLang 0.5.15 has `...ForConditionalGeneration` alone (models/qwen3_5.py)."""
_BY_SETTING = frozenset({
    "awq", "awq_marlin", "auto-round", "auto-round-int8", "bitsandbytes", "compressed-tensors", "fp8", "gguf",
    "gptq", "gptq_marlin", "marlin", "modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "moe_wna16",
    "mxfp4", "mxfp8", "nvfp4_online", "petit_nvfp4", "qoq", "quark", "quark_int4fp8_moe", "quark_mxfp4", "unquant",
    "w4afp8", "w8a8_fp8", "w8a8_int8",
})  # fmt: skip
"""SGLang 0.5.15's `--quantization` on GPUs (server_args.py)."""
_BY_FILE = frozenset({"blockwise_int8", "compressed_tensors", "fbgemm_fp8"})
"""Further methods that it reads from a config.json (layers/quantization/__init__.py)."""
_READS_AS = {
    **dict.fromkeys(("modelopt_fp8", "modelopt_fp4", "modelopt_mixed", "petit_nvfp4"), ("modelopt",)),
    **dict.fromkeys(("w8a8_int8", "w8a8_fp8", "auto-round-int8"), ("compressed-tensors", "compressed_tensors")),
    "gptq_marlin": ("gptq",),
    "awq_marlin": ("awq",),
    "marlin": ("awq", "gptq"),
    "moe_wna16": ("awq", "gptq"),
    "nvfp4_online": ("fp8",),
}
"""Setting -> methods of a config.json that it also reads (configs/model_config.py, `override_quantization_method`)."""


@dataclass(frozen=True, slots=True)
class Served:
    """One model in a server. `weights`: bytes of all of it; `max_positions`: None where the config has none.

    KV cache of a token: `kv_head` bytes for each of `kv_heads`, which tensor parallel ranks divide, and `kv_whole` bytes that
    every rank holds (latents). `kv_share`: the part of an engine's pool that is KV cache. `vocabulary`: its size, 0 where the
    config has none. `notes`: what is an estimate.
    """

    heads: int | None
    max_positions: int | None
    weights: int
    kv_heads: int
    kv_head: int
    kv_whole: int = 0
    kv_share: float = 1.0
    vocabulary: int = 0
    notes: tuple[str, ...] = ()

    def kv_per_token(self, tp: int) -> int:
        """Bytes on one GPU of `tp`; KV heads are copied where `tp` exceeds them.

        >>> Served(32, 1024, 0, kv_heads=8, kv_head=512).kv_per_token(4), Served(32, 1024, 0, 8, 512).kv_per_token(16)
        (1024, 512)
        """
        return self.kv_whole + max(1, self.kv_heads // tp) * self.kv_head if self.kv_heads else self.kv_whole


def of_architecture(arch: Architecture, how: ServedModel | None = None) -> Served:
    """A model whose sizes are all known: two bytes for a weight, a key and a value, unless `how` has another dtype."""
    size = _BYTES[(how and how.dtype) or "bfloat16"]
    return Served(
        arch.num_heads,
        arch.max_positions,
        size * parameters(arch),
        arch.num_kv_heads,
        2 * size * arch.num_layers * arch.head_dim,
        vocabulary=arch.vocab_size,
    )


def served(model: str, how: ServedModel, *, field: str) -> Served:
    """A published size by its name, or a Hugging Face folder; `field`: the settings `how`, for an error's remedy.

    Raises ModelError for a folder without config.json, and for what neither files, config nor settings tell.
    """
    found = of_architecture(PUBLISHED[model], how) if model in PUBLISHED else _of_folder(Path(model), how, field)
    if how.kv_bytes_per_token is not None:
        found = replace(found, kv_heads=0, kv_head=0, kv_whole=how.kv_bytes_per_token)
    return in_context(found, how)


def in_context(model: Served, how: ServedModel) -> Served:
    """The same, with no more positions than its server is given."""
    given = how.context_length
    return model if given is None else replace(model, max_positions=min(model.max_positions or given, given))


def _of_folder(folder: Path, how: ServedModel, field: str) -> Served:
    raw = read_model_config(folder)
    require_sizes(raw, folder / "config.json")
    architectures_of(raw, folder / "config.json")  # a server looks for its class by them
    _check_quantization(folder, raw, how, field)
    hf_config, fault = _transformers_config(folder)
    config: Any = language_config(raw) if hf_config is None else hf_config.get_text_config().to_dict()
    weights, why = _weights(folder, raw, hf_config, fault, how, field)
    notes = [] if why is None else [f"weights {why}"]
    if raw.get("model_type") in _TEXT_ALONE:
        notes.append("SGLang 0.5.15 has no class of this text model alone, only of the whole one with its eyes")
    if how.quantization is not None and quantization_of(raw)[1] is None:
        notes.append(f"weights as stored: {how.quantization} makes them smaller when they are loaded")
    heads, positions = config.get("num_attention_heads"), config.get("max_position_embeddings")
    base = Served(_whole(heads), _whole(positions), weights, 0, 0, vocabulary=_whole(config.get("vocab_size")) or 0)
    if how.kv_bytes_per_token is None:
        base = _with_cache(base, config, _BYTES[how.dtype or "bfloat16"], notes, str(folder), field)
    return replace(base, notes=tuple(notes))


def _check_quantization(folder: Path, raw: Mapping[str, Any], how: ServedModel, field: str) -> None:
    """Raise for a quantization that SGLang does not read, or that is not the one of the folder's weights: its engines would end
    when they load the model."""
    name, method = quantization_of(raw)
    known = ", ".join(sorted(_BY_SETTING))
    if how.quantization is not None and how.quantization.lower() not in _BY_SETTING:
        remedy = "choose one of these, or serve the model yourself and name its address"
        raise ConfigError(f"{field}.quantization", how.quantization, f"one of SGLang's: {known}", remedy)
    if method is None:
        return
    stored, asked = method.lower(), (how.quantization or method).lower()
    if stored not in _BY_SETTING | _BY_FILE:
        expected = f"a quantization that SGLang reads: {', '.join(sorted(_BY_SETTING | _BY_FILE))}"
        remedy = "fetch the model whole or quantized so, or serve it yourself and name its address"
        raise ModelError(f"{folder / 'config.json'} {name}", method, expected, remedy)
    if asked != stored and stored not in _READS_AS.get(asked, ()):
        expected = f"{method}, by which its weights are stored (config.json), or null"
        raise ConfigError(f"{field}.quantization", how.quantization, expected, "remove it")


def _with_cache(base: Served, config: Mapping[str, Any], size: int, notes: list[str], model: str, field: str) -> Served:
    """`base` with the KV cache that the config asks for, `size` bytes a value; appends to `notes` what is an estimate."""
    layers = _whole(config.get("num_hidden_layers"))
    kinds = list(config.get("layer_types") or _by_interval(config, layers or 0))
    attending = [kind for kind in kinds if "attention" in kind and not kind.startswith("linear")]
    heads, hidden = base.heads, _whole(config.get("hidden_size"))
    if (latent := _whole(config.get("kv_lora_rank"))) and layers is not None:
        notes.append("KV cache: latents, the same on every GPU of an engine")
        return replace(base, kv_whole=size * layers * (latent + (_whole(config.get("qk_rope_head_dim")) or 0)))
    head = _whole(config.get("head_dim")) or (hidden // heads if hidden and heads else None)
    kv_heads = _whole(config.get("num_key_value_heads")) or heads
    if layers is None or head is None or kv_heads is None or (kinds and not attending):
        raise ModelError(
            f"{model}/config.json",
            config.get("model_type"),
            "num_hidden_layers, num_attention_heads and head sizes, from which the KV cache follows",
            f"set {field}.kv_bytes_per_token: bytes of a token on one GPU",
        )
    full, share = len(attending) if kinds else layers, 1.0
    if kinds and full < layers:
        share = 1 / (1 + _STATES)
        notes.append(
            f"KV cache: of {full} of {layers} layers; SGLang keeps {1 - share:.0%} of the pool for the others' states"
        )
    elif config.get("sliding_window") and config.get("use_sliding_window", True):
        notes.append("KV cache: layers with a sliding window counted whole, an upper bound")
    return replace(base, kv_heads=kv_heads, kv_head=2 * size * full * head, kv_share=share)


def _by_interval(config: Mapping[str, Any], layers: int) -> list[str]:
    """Kinds of the layers where every n-th attends and the others are linear (Qwen3-Next); none where the config is silent."""
    n = _whole(config.get("full_attention_interval"))
    return ["linear_attention" if (i + 1) % n else "full_attention" for i in range(layers)] if n else []


def _weights(
    folder: Path, raw: Mapping[str, Any], hf_config: Any, fault: str, how: ServedModel, field: str
) -> tuple[int, str | None]:
    """(bytes of the weights, how they were found where that is no count of the files); `fault`: why there is no `hf_config`."""
    if how.weights_gib is not None:
        return int(how.weights_gib * GIB), None
    size = _BYTES[how.dtype or "bfloat16"]
    if (stored := stored_bytes(folder, size)) is not None:
        return stored.size, None if stored.counted else "as the index says, without the shards"
    quantized, method = quantization_of(raw)
    if method is not None:
        raise ModelError(
            f"{folder / 'config.json'} {quantized}",
            method,
            "weights or their index in the folder: config.json does not tell how large quantized ones are",
            f"fetch model.safetensors.index.json, or set {field}.weights_gib",
        )
    if hf_config is not None:
        count, fault = _count(hf_config)
        if count is not None:
            return size * count, f"counted from config.json, {size} bytes each: the folder has no weight files"
    raise ModelError(
        f"{folder / 'config.json'} model_type",
        raw.get("model_type"),
        f"weight files beside it, their index, or a config that transformers loads, which say how large it is ({fault})",
        f"fetch one of them, mend config.json, or set {field}.weights_gib",
    )


def _count(hf_config: Any) -> tuple[int | None, str]:
    """(parameters of a model that transformers knows, without making any, or None for one that it does not, and why not)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # The whole model first: of some kinds (Qwen3.5) transformers has a class of the language model alone, too, and a server
    # loads the other senses as well.
    fault = ""
    for kind in (AutoModelForImageTextToText, AutoModelForCausalLM):
        try:
            with torch.device("meta"):  # whatever dtype the config names: what is counted has none
                model = kind.from_config(hf_config, attn_implementation="eager", dtype=torch.bfloat16)
        except Exception as error:  # noqa: BLE001 - whatever a modelling file raises: the size is asked for instead
            fault = _line(error)
            continue
        return sum(int(p.numel()) for p in model.parameters()), ""
    return None, fault


def _transformers_config(folder: Path) -> tuple[Any, str]:
    """(transformers' config, which knows the defaults that config.json leaves out, or None for one that it does not load, and
    why not)."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        found.get_text_config().to_dict()  # what a text_config is, is looked at here alone
    except Exception as error:  # noqa: BLE001 - config.json is then read as it is
        return None, _line(error)
    return found, ""


def _line(error: Exception) -> str:
    """The beginning of what transformers says, in a line: it goes on with advice on updates of its own."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

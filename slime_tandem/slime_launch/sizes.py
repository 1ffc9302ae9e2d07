"""The usual sizes of Qwen3, Qwen2.5 and Llama-3, from their published config.json, and a model's flags for Megatron.

`scripts/train/models/*.sh` are written from here: `python -m slime_tandem.slime_launch.sizes scripts/train/models`.
"""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.megatron.architecture import Architecture, Experts, architecture_of, hf_shapes, load_hf_config

Rope = tuple[tuple[str, float | int | str], ...]


def _qwen(kind: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, **more: Any) -> Architecture:
    qwen3 = kind.startswith("qwen3")
    return Architecture(
        model_type=kind,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=128 if qwen3 else hidden // heads,
        ffn_size=ffn,
        vocab_size=more.get("vocab", 151936),
        norm_eps=1e-6,
        max_positions=40960 if qwen3 else 32768,
        tied=more["tied"],
        rope=(("rope_theta", 1000000.0), ("rope_type", "default")),
        experts=more.get("experts"),
    )


def _llama(
    layers: int, hidden: int, ffn: int, heads: int, *, head_dim: int, tied: bool, factor: float | None
) -> Architecture:
    scaling: Rope = (("rope_theta", 500000.0), ("rope_type", "default"))
    if factor is not None:
        scaling = (
            ("factor", factor),
            ("high_freq_factor", 4.0),
            ("low_freq_factor", 1.0),
            ("original_max_position_embeddings", 8192),
            ("rope_theta", 500000.0),
            ("rope_type", "llama3"),
        )
    return Architecture(
        model_type="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=128256,
        norm_eps=1e-5,
        max_positions=8192 if factor is None else 131072,
        tied=tied,
        rope=scaling,
    )


PUBLISHED: dict[str, Architecture] = {
    "qwen3-0.6B": _qwen("qwen3", 28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7B": _qwen("qwen3", 28, 2048, 6144, 16, 8, tied=True),
    "qwen3-4B": _qwen("qwen3", 36, 2560, 9728, 32, 8, tied=True),
    "qwen3-8B": _qwen("qwen3", 36, 4096, 12288, 32, 8, tied=False),
    "qwen3-14B": _qwen("qwen3", 40, 5120, 17408, 40, 8, tied=False),
    "qwen3-32B": _qwen("qwen3", 64, 5120, 25600, 64, 8, tied=False),
    "qwen3-30B-A3B": _qwen("qwen3_moe", 48, 2048, 6144, 32, 4, tied=False, experts=Experts(128, 8, 768)),
    "qwen3-235B-A22B": _qwen("qwen3_moe", 94, 4096, 12288, 64, 4, tied=False, experts=Experts(128, 8, 1536)),
    "qwen2.5-0.5B": _qwen("qwen2", 24, 896, 4864, 14, 2, tied=True),
    "qwen2.5-1.5B": _qwen("qwen2", 28, 1536, 8960, 12, 2, tied=True),
    "qwen2.5-3B": _qwen("qwen2", 36, 2048, 11008, 16, 2, tied=True),
    "qwen2.5-7B": _qwen("qwen2", 28, 3584, 18944, 28, 4, tied=False, vocab=152064),
    "qwen2.5-14B": _qwen("qwen2", 48, 5120, 13824, 40, 8, tied=False, vocab=152064),
    "qwen2.5-32B": _qwen("qwen2", 64, 5120, 27648, 40, 8, tied=False, vocab=152064),
    "qwen2.5-72B": _qwen("qwen2", 80, 8192, 29568, 64, 8, tied=False, vocab=152064),
    "llama3-8B": _llama(32, 4096, 14336, 32, head_dim=128, tied=False, factor=None),
    "llama3.1-8B": _llama(32, 4096, 14336, 32, head_dim=128, tied=False, factor=8.0),
    "llama3.1-70B": _llama(80, 8192, 28672, 64, head_dim=128, tied=False, factor=8.0),
    "llama3.2-1B": _llama(16, 2048, 8192, 32, head_dim=64, tied=True, factor=32.0),
    "llama3.2-3B": _llama(28, 3072, 8192, 24, head_dim=128, tied=True, factor=32.0),
}
"""By the name of the file in scripts/train/models. Qwen2.5: the instruct models (some base models have norm_eps 1e-5)."""


def architecture(model: str) -> Architecture:
    """A student's, of a Hugging Face folder or of a published size by its name; raises ModelError for neither, and for a folder
    of a kind that only a server knows.

    >>> architecture("qwen3-4B").num_layers
    36
    """
    if model in PUBLISHED:
        return PUBLISHED[model]
    if not (Path(model) / "config.json").is_file():
        raise ModelError(
            "model", model, "a local Hugging Face folder or a published size", f"sizes: {', '.join(PUBLISHED)}"
        )
    return architecture_of(load_hf_config(model), experts=True)


def hf_sizes(arch: Architecture) -> dict[str, Any]:
    """What a config.json says of the sizes by which two models share an engine (`engines.fused.pair`).

    >>> hf_sizes(PUBLISHED["qwen3-4B"])["num_key_value_heads"]
    8
    """
    return {
        "model_type": arch.model_type,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "max_position_embeddings": arch.max_positions,
        "rope_parameters": dict(arch.rope),
    }


def parameters(arch: Architecture) -> int:
    """Number of weights; those of a tied head count once.

    >>> parameters(PUBLISHED["qwen3-4B"])
    4022468096
    """
    return sum(math.prod(shape) for shape in hf_shapes(arch).values())


def model_flags(arch: Architecture) -> list[str]:
    """Megatron's flags of an architecture, what slime's scripts/models/*.sh call MODEL_ARGS.

    Llama-3's scaling factor is `--rope-scaling-factor`; `--rotary-scaling-factor` is another thing (multi-latent attention).
    """
    rope = dict(arch.rope)
    flags = [
        "--swiglu",
        *("--num-layers", str(arch.num_layers)),
        *("--hidden-size", str(arch.hidden_size)),
        *("--ffn-hidden-size", str(arch.ffn_size)),
        *("--num-attention-heads", str(arch.num_heads)),
        "--group-query-attention",
        *("--num-query-groups", str(arch.num_kv_heads)),
        *("--kv-channels", str(arch.head_dim)),
        *("--max-position-embeddings", str(arch.max_positions)),
        "--use-rotary-position-embeddings",
        *("--rotary-base", f"{rope['rope_theta']:.0f}"),
        "--disable-bias-linear",
        *("--normalization", "RMSNorm"),
        *("--norm-epsilon", repr(arch.norm_eps)),  # slime compares it with config.json, digit by digit
        *("--vocab-size", str(arch.vocab_size)),
    ]
    if rope.get("rope_type") == "llama3":
        flags += ["--use-rope-scaling", "--rope-scaling-factor", f"{rope['factor']:g}"]
    if arch.qkv_bias:
        flags.append("--add-qkv-bias")
    if arch.qk_norm:
        flags.append("--qk-layernorm")
    if not arch.tied:
        flags.append("--untie-embeddings-and-output-weights")
    return flags if arch.experts is None else [*flags, *_expert_flags(arch.experts, arch.num_layers)]


def _expert_flags(experts: Experts, layers: int) -> list[str]:
    """Those of slime's own files for such models (scripts/models/qwen3-30B-A3B.sh)."""
    return [
        *("--num-experts", str(experts.count)),
        *("--moe-ffn-hidden-size", str(experts.ffn_size)),
        *("--moe-router-topk", str(experts.active)),
        *("--moe-layer-freq", f"[{','.join('1' * layers)}]"),
        *("--moe-router-score-function", "softmax"),
        # The softmax of the active experts' logits alone makes weights that sum to 1.
        *(() if experts.normalised else ("--moe-router-pre-softmax",)),
        *("--moe-router-dtype", "fp32"),
        *("--moe-token-dispatcher-type", "alltoall"),
        *("--moe-token-drop-policy", "probs"),
        *("--moe-aux-loss-coeff", "0"),
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
    ]


def flags_of_folder(folder: Path) -> list[str]:
    """`model_flags` of a Hugging Face folder; none where it is of a kind that this package has no flags for."""
    try:
        return model_flags(architecture(str(folder)))
    except ModelError:
        return []


def read_model_args(file: Path) -> list[str]:
    """MODEL_ARGS of a shell file as slime's scripts/models/*.sh are written. Raises ConfigError for a file without."""
    script = 'set -e; source "$1"; ((${#MODEL_ARGS[@]} > 0)); printf "%s\\0" "${MODEL_ARGS[@]}"'
    done = subprocess.run(["bash", "-c", script, "bash", str(file)], capture_output=True, text=True, check=False)  # noqa: S603, S607
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it sets none"])[-1]
        raise ConfigError(
            "--model-args", str(file), f"a shell file that sets MODEL_ARGS ({why})", "see scripts/train/models/"
        )
    return done.stdout.split("\0")[:-1]


def model_file(name: str) -> str:
    """The text of scripts/train/models/<name>.sh."""
    words: list[str] = []
    for word in model_flags(PUBLISHED[name]):
        if word.startswith("--"):
            words.append(f"  {word}")
        else:
            words[-1] += f" {shlex.quote(word)}"
    head = f"# Megatron's flags for {name}; written by python -m slime_tandem.slime_launch.sizes, do not edit.\n"
    note = ""
    if dict(PUBLISHED[name].rope).get("factor", 8.0) != 8.0:
        note = "# slime 624b824a hands no factor on (model_provider.py) and trains with 8; `slime-tandem config` refuses it.\n"
    return f"# shellcheck shell=bash disable=SC2034\n{head}{note}MODEL_ARGS=(\n" + "\n".join(words) + "\n)\n"


def main(folder: Path) -> None:
    """Write all model files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PUBLISHED:
        (folder / f"{name}.sh").write_text(model_file(name), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

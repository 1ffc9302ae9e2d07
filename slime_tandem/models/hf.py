"""Loads models and tokenizers from local Hugging Face folders: safetensors only, no download, no remote code unless asked.

It builds no Megatron model and starts no server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slime_tandem.errors import ModelError
from slime_tandem.models.weight_files import hf_weight_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def quiet_transformers() -> None:
    """Switch off transformers' progress bars and its chatter below errors."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_served_model(info: Mapping[str, Any], folder: Path, url: str) -> None:
    """Raise ModelError where a server reports another vocabulary size than the model folder: its log-probs would be noise."""
    served, own = info.get("vocab_size"), None
    if (folder / "config.json").exists():
        own = language_config(read_model_config(folder)).get("vocab_size")
    if isinstance(served, int) and isinstance(own, int) and served != own:
        raise ModelError(
            f"server {url}",
            f"{info.get('model_path')} with a vocabulary of {served}",
            f"the model {folder} with one of {own}",
            "correct the URL, or name the folder of the model that it serves",
        )


def check_model_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder as a path if it holds a config and whole safetensors files; raises ModelError that names what is not.

    Reads the config and the headers of the weight files, not the weights.
    """
    path = Path(folder)
    try:
        found = path.is_dir()
    except OSError:  # no file system has a name of such a length
        found = False
    if not found:
        raise ModelError(
            "model", str(folder), "an existing folder in Hugging Face format", "check the path; no hub is used"
        )
    odd = next((file for file in sorted(path.iterdir()) if not file.is_file() and not file.is_dir()), None)
    if odd is not None:  # reading a pipe or a device may never end
        raise ModelError("model", str(odd), "regular files, no pipe, device, socket or broken link", "remove it")
    require_sizes(read_model_config(path), path / "config.json")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ModelError(
            "model",
            str(folder),
            "a folder with *.safetensors weights (pickled .bin files are not loaded)",
            "save it with save_pretrained",
        )
    if not (path / "model.safetensors").is_file() and (path / "model.safetensors.index.json").is_file():
        hf_weight_files(path)  # every shard is there, and none of another folder
    for file in weights:
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                "model", str(file), f"a whole safetensors file ({error})", "copy or save the weights again"
            ) from error
    return path


def read_model_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in config.json of a model folder; raises ModelError if there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError("model", str(folder), "a folder with config.json", "save it with save_pretrained")
    return read_json_object(path)


_LARGEST = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "num_experts": 2**16,
    "num_labels": 2**16,
}
_LARGEST |= dict.fromkeys(("num_local_experts", "n_routed_experts"), 2**16)
_LARGEST["max_position_embeddings"] = 2**40
_LARGEST |= dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "head_dim"), 2**28)


def require_sizes(config: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Raise ModelError for a whole number in a config.json that is no size: transformers would write out a list of a billion
    layers, or of as many labels, before anybody looked at it. What is no whole number is left to transformers.

    >>> require_sizes({"num_hidden_layers": 10**9}, "config.json")
    Traceback (most recent call last):
    slime_tandem.errors.ModelError: config.json num_hidden_layers=1000000000: expected 1 to 10000. Remedy: mend it.
    """
    for part in (config, language_config(config)):
        for name, most in _LARGEST.items():
            value = part.get(name)
            least = 0 if "experts" in name or name == "num_labels" else 1  # a dense member of such a family says 0
            if isinstance(value, int) and not least <= value <= most:
                raise ModelError(f"{os.fspath(path)} {name}", value, f"{least} to {most}", "mend it")


def architectures_of(config: Mapping[str, Any], path: str | os.PathLike[str]) -> list[str]:
    """Names of the classes that a config.json is of; ModelError where it names none: a server then knows no class to load.

    >>> architectures_of({"architectures": []}, "config.json")
    Traceback (most recent call last):
    slime_tandem.errors.ModelError: config.json architectures=[]: expected names of the model's classes. Remedy: mend it.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ModelError(f"{os.fspath(path)} architectures", names, "names of the model's classes", "mend it")
    return names


def quantization_of(config: Mapping[str, Any]) -> tuple[str, str | None]:
    """(field, method) of the quantization that a config.json names; the method is None where the weights are whole.

    >>> quantization_of({"quantization_config": {"quant_method": "mxfp4"}})
    ('quantization_config.quant_method', 'mxfp4')
    """
    for prefix, part in (("", config), ("text_config.", language_config(config))):
        for name in ("quantization_config", "compression_config"):  # the latter by older compressed-tensors
            if isinstance(found := part.get(name), Mapping):
                return f"{prefix}{name}.quant_method", str(found.get("quant_method", "unnamed"))
    return "quantization_config", None


def require_whole_weights(folder: str | os.PathLike[str]) -> None:
    """Raise ModelError for a model of quantized weights, which nothing here computes with."""
    field, method = quantization_of(read_model_config(folder))
    if method is not None:
        raise ModelError(
            f"{Path(folder) / 'config.json'} {field}",
            method,
            "none: the embedded server and the trainer compute with whole weights",
            "serve this model with SGLang and name its address (engine.teacher_url, engine.junior_url, opd.teachers[].url), "
            "or save it dequantized",
        )


def check_revision(folder: Path, revision: str | None) -> None:
    """Raise ModelError unless the folder is the snapshot of this commit, or of this name, in a Hugging Face cache.

    Such a cache keeps a commit in `snapshots/<commit>`, and in `refs/<name>` which commit a branch or tag is.
    """
    if revision is None:
        return
    snapshot = folder.absolute()
    if snapshot.parent.name != "snapshots":
        snapshot = folder.resolve()
    ref = snapshot.parent.parent / "refs" / revision
    named = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    if snapshot.parent.name != "snapshots" or snapshot.name != named:
        raise ModelError(
            "revision",
            revision,
            f"that of the folder {folder}",
            "name the folder snapshots/<commit> of a Hugging Face cache, or leave the revision out",
        )


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that is about text: of a model with other senses, too (Gemma 3), its `text_config`.

    >>> language_config({"model_type": "gemma3", "text_config": {"hidden_size": 8}})
    {'hidden_size': 8}
    """
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder; raises ModelError for a file that holds none or cannot be read."""
    why = "it holds something else"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # as transformers reads it: with NaN, the last of two keys
        found, why = None, str(error)
    if not isinstance(found, dict):
        raise ModelError("model", str(path), f"a file with one JSON object ({why})", "save the model again")
    return found


def load_model(folder: str | os.PathLike[str], dtype: str = "float32", trust_remote_code: bool = False) -> Any:
    """A transformers causal LM in eval mode on the CPU.

    `dtype` is float32 or bfloat16. Raises ModelError for a folder without config or safetensors, for weights that do not fit
    the config (missing, left over, of another shape, or not a number), for unknown architectures and for damaged files.
    """
    path = check_model_folder(folder)
    require_whole_weights(path)
    if dtype not in _DTYPES:
        raise ModelError("dtype", dtype, "float32 or bfloat16", "choose one of these")
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=_DTYPES[dtype],
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the name of the weight
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        raise ModelError(
            "model",
            str(folder),
            f"a causal LM that transformers loads ({type(error).__name__}: {reason})",
            "check config.json and the weight files",
        ) from error
    wrong = {
        key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]
    }
    if wrong:
        first = "; ".join(f"{key.split('_')[0]}: {names[0]} ({len(names)})" for key, names in wrong.items())
        raise ModelError(
            "model", str(folder), f"weights that fit config.json exactly ({first})", "save the model again"
        )
    _require_floats(path, {name for name, _ in model.named_parameters()})
    # transformers leaves weights mapped to their file. Whoever saves the next checkpoint over it would change, or crash, a
    # model that is being served.
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.clone()
        if parameter.numel() and not torch.isfinite(torch.stack(torch.aminmax(parameter.data))).all():
            expected = f"finite weights ({name} has one that is infinite or not a number)"
            raise ModelError("model", str(folder), expected, "its training diverged: take an earlier checkpoint")
    language = model.config.get_text_config()
    model.config.return_dict = language.return_dict = True  # outputs are read by name, whatever the folder prefers
    return model.eval()


_FLOATS = ("F64", "F32", "F16", "BF16")


def _require_floats(path: Path, parameters: Collection[str]) -> None:
    """Raise ModelError for `parameters` in integers or 8 bits: without a quantization's scales they say something else.

    Masks that older folders keep beside them (GPT-NeoX's `attention.bias`) are none. A file may name a parameter without the
    first part of its name, or with one more.
    """
    known = {*parameters, *(name.partition(".")[2] for name in parameters)}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no dictionary
                if not {name, name.partition(".")[2]} & known:
                    continue
                if (kind := weights.get_slice(name).get_dtype()) not in _FLOATS:
                    raise ModelError(
                        f"{file} {name}",
                        kind,
                        f"weights of {', '.join(_FLOATS)}",
                        "save it dequantized, or in bfloat16",
                    )


def has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has any file of a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(folder: str | os.PathLike[str], trust_remote_code: bool = False) -> Any:
    """The tokenizer in `folder`; raises ModelError if there is none or it does not load.

    transformers reads a config.json beside it, too: what is wrong with that is said of it.
    """
    path = Path(folder)
    if not has_tokenizer(path):
        raise ModelError("model", str(folder), "a folder with tokenizer files", "save the tokenizer beside the weights")
    from transformers import AutoTokenizer

    if (path / "config.json").is_file():
        require_sizes(read_model_config(path), path / "config.json")
    quiet_transformers()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        _require_loadable_config(path, trust_remote_code)
        reason = " ".join(str(error).split())[:400]
        raise ModelError(
            "model",
            str(folder),
            f"a tokenizer that transformers loads ({type(error).__name__}: {reason})",
            "save the tokenizer again",
        ) from error
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        field = f"{path / 'tokenizer_config.json'} model_max_length"
        raise ModelError(field, longest, "a number of tokens", "mend it, or leave it out")
    return tokenizer


def _require_loadable_config(path: Path, trust_remote_code: bool) -> None:
    """Raise ModelError for a config.json that transformers knows the type of, and does not read."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not (path / "config.json").is_file():
        return
    kind = read_model_config(path).get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ModelError(f"{path / 'config.json'} model_type", kind, "a name", "mend it")
    if kind not in CONFIG_MAPPING.keys():  # noqa: SIM118 - no plain dictionary
        return
    try:
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        expected = f"a configuration that transformers loads ({reason})"
        raise ModelError("model", str(path / "config.json"), expected, "mend it") from error

"""Whether the SGLang of this Python, which is the job's, has the architectures of the models that slime is to serve.

Asked of SGLang's own registry, as its engines ask it when they load a model (model_loader/utils.py): its own classes first,
then transformers' implementation where that can be served. Otherwise a model that neither has is met when the engines load it.
It starts nothing and reads no weights.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_tandem.config import RunConfig
from slime_tandem.errors import ModelError
from slime_tandem.megatron.architecture import TRAINED
from slime_tandem.models.hf import architectures_of, read_model_config
from slime_tandem.slime_launch.layout import ACTOR, JUNIOR, junior_model, teacher_models


@dataclass(frozen=True)
class KnownModels:
    """What an SGLang serves. `native`: architectures that it has classes of; `broken`: why this Python cannot import the class
    that it has, None where it has none; `by_transformers`: whether it would serve transformers' implementation."""

    version: str
    native: Collection[str]
    broken: Callable[[str], str | None]
    by_transformers: Callable[[str], bool]


def check_architectures(config: RunConfig, known: Callable[[], KnownModels] | None = None) -> list[str]:
    """Notes on the models that slime is to serve; raises ModelError for one that the SGLang at hand does not.

    Nobody is asked about the architectures that are trained here, which every SGLang has: its registry imports every model that
    it knows, ten seconds. Models that are no folder of this machine are passed over.
    """
    asked: dict[str, tuple[Path, list[str], Mapping[str, Any]]] = {}
    for name, model in {ACTOR: config.models.senior, **junior_model(config), **teacher_models(config)}.items():
        file = Path(model) / "config.json"
        if file.is_file():
            raw = read_model_config(model)
            names = architectures_of(raw, file)
            if not TRAINED.intersection(names):
                asked[name] = (file, names, raw)
    if not asked:
        return []
    try:
        sglang = (known or of_this_python)()
    except Exception as error:  # noqa: BLE001 - whatever the import of SGLang and its kernels raises
        these = ", ".join(f"{names[0]} ({name})" for name, (_, names, _) in asked.items())
        return [f"SGLang cannot be asked here whether it serves {these}: {' '.join(str(error).split())}"]
    return [note for name, (file, names, raw) in asked.items() for note in _notes(name, file, names, raw, sglang)]


def _notes(name: str, file: Path, names: list[str], raw: Mapping[str, Any], sglang: KnownModels) -> list[str]:
    if any(a in sglang.native for a in names):
        return []
    for a in names:
        if (why := sglang.broken(a)) is not None:
            return [
                f"{name}: SGLang {sglang.version} has {a}, but this Python cannot import it ({why}); the engines' must"
            ]
    if all(sglang.by_transformers(a) for a in names):
        return [f"{name}: SGLang {sglang.version} has no class {names[0]} and serves transformers' implementation"]
    if isinstance(own := raw.get("auto_map"), Mapping) and "AutoModel" in own:
        return [
            f"{name}: SGLang {sglang.version} has no class {names[0]}; the model's own code (auto_map) is not tried"
        ]
    url = f"engine.{name}_url" if name in (JUNIOR, "teacher") else f"the url of {name} in opd.teachers"
    raise ModelError(
        f"{file} architectures",
        names,
        f"an architecture that this Python's SGLang {sglang.version} serves to the {name}, or transformers for it",
        f"install an SGLang that has it, or serve the model yourself and name its address ({url})",
    )


def of_this_python() -> KnownModels:
    """What the SGLang of this Python serves; raises whatever its import does where there is none that works."""
    with _quiet("sglang"):  # a line for each of its models that this machine cannot import
        registry = importlib.import_module("sglang.srt.models.registry").ModelRegistry
        version = importlib.import_module("sglang.version").__version__
    return KnownModels(version, frozenset(registry.get_supported_archs()), _broken, _by_transformers)


def _broken(architecture: str) -> str | None:
    package = importlib.import_module("sglang.srt.models")
    for folder in package.__path__:
        for file in sorted(Path(folder).glob("*.py")):
            if re.search(rf"^class {re.escape(architecture)}\b", file.read_text(encoding="utf-8"), re.MULTILINE):
                try:
                    importlib.import_module(f"{package.__name__}.{file.stem}")
                except Exception as error:  # noqa: BLE001 - as the registry does
                    return " ".join(str(error).split()) or type(error).__name__
    return None


def _by_transformers(architecture: str) -> bool:
    found = getattr(importlib.import_module("transformers"), architecture, None)
    compatible = getattr(found, "is_backend_compatible", None)
    return found is not None and (compatible is None or bool(compatible()))


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)

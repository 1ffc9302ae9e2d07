"""A TandemConfig of the first tandem code base as settings of a run: where each of its fields lives now.

Its names are those of the naming authority's target column, or the old ones (`migrate.py` renames them). It reads no file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from slime_tandem.config.load import load_yaml
from slime_tandem.config.migrate import migrate_tree
from slime_tandem.errors import ConfigError
from slime_tandem.files import parse_json
from slime_tandem.strategies import STRATEGIES

Read = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _count(devices: Any) -> int:
    if isinstance(devices, str):  # as CUDA_VISIBLE_DEVICES is spelt
        devices = [name for name in devices.strip().strip("[]").split(",") if name.strip()]
    return len(devices) if isinstance(devices, (list, tuple)) else 1


SETTINGS: dict[str, tuple[str, Read] | None] = {
    "enabled": ("tandem.enabled", _same),
    "selection_strategy": ("tandem.selection_strategy", _same),
    "prob_senior": ("tandem.prob_senior", _same),
    "max_gap_tokens": ("tandem.max_gap_tokens", _same),
    "chunk_size": ("tandem.chunk_size", _same),
    "boundary_token_ids": ("tandem.boundary_token_ids", _same),
    "junior_token_loss_weight": ("tandem.junior_token_loss_weight", _same),
    "junior_model": ("models.junior", _same),
    "junior_tensor_parallel_size": ("cluster.junior_tp", _same),
    "junior_gpu_devices": ("cluster.junior_gpus", _count),
    "junior_model_revision": ("serving.junior.revision", _same),
    "junior_gpu_memory_utilization": ("serving.junior.mem_fraction", _same),
    "junior_dtype": ("serving.junior.dtype", lambda v: None if v == "auto" else v),
    "junior_quantization": ("serving.junior.quantization", _same),
    "junior_enforce_eager": ("serving.junior.enforce_eager", _same),
    "junior_max_model_len": ("serving.junior.context_length", _same),
    "senior_model_config": None,
    "senior_parallel_config": None,
}
"""Where each target field lives, and how its value is read; None: an object of the server that wrote it, no setting."""


@dataclass(frozen=True)
class Found:
    """`settings` by dotted name; `notes`: a sentence for each field that became none, or something else than its name says."""

    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_yaml(self) -> str:
        """The settings as a configuration file."""
        tree: dict[str, Any] = {}
        for dotted, value in self.settings.items():
            *above, last = dotted.split(".")
            inner = tree
            for part in above:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def tandem_settings(tree: Any) -> Found:
    """The TandemConfig in a tree (at any depth, as JSON in a string, or as overrides `a.b.tandem.prob_senior=0.5` in a list),
    as settings that load.

    Raises ConfigError where there is none, or two that differ.

    >>> found = tandem_settings({"tandem_config": {"frozen_model": "J", "prob_primary": 0.25, "chunk_size": 1}})
    >>> found.settings
    {'models.junior': 'J', 'tandem.prob_senior': 0.25}
    >>> found.notes
    ["chunk_size=1: left out, selection_strategy='word' does not read it"]
    """
    blobs = list(_blobs(migrate_tree(tree)[0]))
    if not blobs:
        raise ConfigError(
            "TandemConfig", None, "one with junior_model or selection_strategy", "name the file that has it"
        )
    if any(blob != blobs[0] for blob in blobs):
        raise ConfigError("TandemConfig", f"{len(blobs)} that differ", "one", "keep one of them in the file")
    blob, found = blobs[0], Found()
    strategy = blob.get("selection_strategy", "word")
    read_by = STRATEGIES[strategy].reads if strategy in STRATEGIES else None
    for name, value in blob.items():
        place = SETTINGS.get(name)
        if place is None:
            if value is not None:
                found.notes.append(f"{name}={value!r}: left out, {_why(name)}")
            continue
        setting, read = place
        if (value := read(value)) is None:
            continue
        if read_by is not None and name in _READ_BY_SOME - read_by:
            found.notes.append(f"{name}={value!r}: left out, selection_strategy={strategy!r} does not read it")
        else:
            found.settings[setting] = value
    if strategy == "sentence":  # their sampler alternates there
        found.settings["tandem.author_schedule"] = "alternate"
        if found.settings.pop("tandem.prob_senior", None) is not None:
            found.notes.append(
                "prob_senior: left out, the authors' sentence strategy alternates (author_schedule: alternate)"
            )
    if "junior_gpu_devices" in blob:
        found.notes.append("junior_gpu_devices: their number alone; the plan says which GPUs (cluster.*)")
    return found


_READ_BY_SOME = {"prob_senior", "max_gap_tokens", "chunk_size", "boundary_token_ids"}


def _why(name: str) -> str:
    return "an object of the server that wrote it" if name in SETTINGS else "no field of a TandemConfig"


def _blobs(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, Mapping):
        if "junior_model" in tree or "selection_strategy" in tree:
            yield dict(tree)
            return
        for value in tree.values():
            yield from _blobs(value)
    elif isinstance(tree, (list, tuple)):
        pairs = [part.partition("=") for part in tree if isinstance(part, str) and "=" in part]
        named = {key.rpartition(".")[2].lstrip("+~"): value for key, _, value in pairs}
        mine = {name: load_yaml(value) for name, value in named.items() if name in SETTINGS}
        if "junior_model" in mine or "selection_strategy" in mine:
            yield mine
        for value in tree:
            yield from _blobs(value)
    elif isinstance(tree, str) and tree.lstrip().startswith("{"):  # JSON in a string, as `migrate` reads it
        with contextlib.suppress(ValueError):
            yield from _blobs(parse_json(tree))

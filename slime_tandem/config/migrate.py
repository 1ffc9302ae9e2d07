"""Renames the field names of the first tandem code base to those in use, in configs, run scripts and checkpoint blobs.

The naming authority's tables, word for word; nothing else is touched. In YAML, JSON and `.pt` files the keys of mappings are
renamed, of values what is no plain word: metric names, overrides (`a.b=1`), code. In run scripts, code and other text every
whole word. Each change is reported with its place; `left_alone` lists what looks like an old name and is in no table, or could
be anything (`primary`, a value that is one word). What the settings of these names are here is `legacy.py`'s.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime_tandem.config.load import compose_yaml, load_yaml
from slime_tandem.errors import ConfigError, printable
from slime_tandem.files import parse_json, resolved, whole_file

RENAMED: dict[str, str] = {
    # TandemConfig
    "frozen_model": "junior_model",
    "frozen_model_revision": "junior_model_revision",
    "prob_primary": "prob_senior",
    "frozen_tensor_parallel_size": "junior_tensor_parallel_size",
    "frozen_gpu_devices": "junior_gpu_devices",
    "frozen_gpu_memory_utilization": "junior_gpu_memory_utilization",
    "frozen_dtype": "junior_dtype",
    "frozen_quantization": "junior_quantization",
    "frozen_enforce_eager": "junior_enforce_eager",
    "frozen_max_model_len": "junior_max_model_len",
    "target_model_config": "senior_model_config",
    "target_parallel_config": "senior_parallel_config",
    # masks
    "tandem_model_mask": "authorship_mask",
    "new_tandem_model_mask": "new_authorship_mask",
    "tandem_mask": "authorship_mask",
    "model_mask": "authorship_mask",
    # loss
    "tandem_jr_tkn_weight": "junior_token_loss_weight",
    # metrics
    "tandem/primary_token_fraction": "tandem/senior_token_fraction",
    "tandem/frozen_token_fraction": "tandem/junior_token_fraction",
    # prefix of the junior's weights
    "FROZEN_PREFIX": "JUNIOR_PREFIX",
    # functions and methods
    "is_frozen_layer": "is_junior_layer",
    "get_frozen_tp_group": "get_junior_tp_group",
    "use_frozen_tp": "use_junior_tp",
    "_frozen_tp_context": "_junior_tp_context",
    "frozen_forward": "junior_forward",
    "load_frozen_model": "load_junior_model",
    "initialize_frozen_kv_cache": "initialize_junior_kv_cache",
    "get_frozen_model": "get_junior_model",
    "get_frozen_device": "get_junior_device",
    # the sampler's and the manager's variables
    "primary_logits": "senior_logits",
    "frozen_logits": "junior_logits",
    "primary_output": "senior_output",
    "frozen_output": "junior_output",
    "primary_tokens": "senior_tokens",
    "frozen_tokens": "junior_tokens",
    "use_primary": "use_senior",
    "frozen_device": "junior_device",
    "frozen_kv_caches": "junior_kv_caches",
    "primary_vllm_config": "senior_vllm_config",
    "frozen_attn_metadata": "junior_attn_metadata",
    "frozen_input_ids": "junior_input_ids",
    "frozen_positions": "junior_positions",
    "frozen_logits_indices": "junior_logits_indices",
    "frozen_sfc": "junior_sfc",
    "primary_sfc": "senior_sfc",
    "frozen_attn_count": "junior_attn_count",
    "frozen_layers": "junior_layers",
    "frozen_vllm_config": "junior_vllm_config",
    "frozen_config": "junior_config",
    "frozen_hf_config": "junior_hf_config",
    "frozen_local_rank": "junior_local_rank",
}
DROPPED = ("model_a_mask",)
"""A key without a successor: it is taken out of a tree; in text, where its end is anybody's guess, it is an error."""
_PREFIXES = {"tandem_frozen.": "tandem_junior."}
"""Of weights in a state dict."""
_METRICS = tuple(name for name in RENAMED if "/" in name)
_NEW = RENAMED | _PREFIXES


def _words(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))


_WORD = re.compile(
    # A metric may stand below others (train/tandem/...), a path's part is no field; a prefix goes on behind its full stop.
    rf"(?<![A-Za-z0-9_])({_words(_METRICS)})(?![A-Za-z0-9_])|(?<![A-Za-z0-9_/])({_words(_PREFIXES)})"
    rf"|(?<![A-Za-z0-9_/])({_words(set(RENAMED) - set(_METRICS))})(?![A-Za-z0-9_])"
)
_METRIC = re.compile(rf"(?<![A-Za-z0-9_])({_words(_METRICS)})(?![A-Za-z0-9_])")
_CODE = re.compile(r"[=\n]|^\s*[{\[]")
"""A string that is more than a word: an override, a JSON object, several lines."""
_SUSPECT = re.compile(
    r"(?<![A-Za-z0-9_])(?:[A-Za-z0-9_]*(?:frozen|primary)[A-Za-z0-9_]*|hot|model_[ab](?:_[A-Za-z0-9_]+)?|target_[a-z_]*config"
    r"|TT|tandem native GRPO)(?![A-Za-z0-9_])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Change:
    """One rename: where (line of a text, dotted place in a tree), the old name, the new one (None: taken out)."""

    where: str
    old: str
    new: str | None

    def __str__(self) -> str:
        """As the tool prints it."""
        return printable(f"{self.where}: {self.old} -> {self.new or '(taken out)'}")


def new_name(key: str) -> str | None:
    """What a key is called now; None for one that is taken out. Dotted keys are renamed part by part.

    >>> new_name("actor_rollout_ref.rollout.tandem.prob_primary"), new_name("max_gap_tokens"), new_name("model_a_mask")
    ('actor_rollout_ref.rollout.tandem.prob_senior', 'max_gap_tokens', None)
    >>> new_name("tandem_frozen.model.norm.weight")
    'tandem_junior.model.norm.weight'
    """
    if key in DROPPED:
        return None
    for old, new in _PREFIXES.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    if key in RENAMED.values():
        return key
    if _METRIC.search(key):
        return _METRIC.sub(lambda m: RENAMED[m[0]], key)
    parts = (re.fullmatch(r"([+~]*)(.*)", part, re.DOTALL) for part in key.split("."))
    return ".".join(p[1] + RENAMED.get(p[2], p[2]) for p in parts if p is not None)


def new_value(text: str) -> str:
    """What a string that is a value says now: metric names anywhere, every old name where it is code; one word stays.

    Raises ConfigError as `migrate_text`.

    >>> new_value("train/tandem/primary_token_fraction"), new_value("+a.prob_primary=0.5"), new_value("frozen_model")
    ('train/tandem/senior_token_fraction', '+a.prob_senior=0.5', 'frozen_model')
    """
    return migrate_text(text)[0] if _CODE.search(text) else _METRIC.sub(lambda m: RENAMED[m[0]], text)


def left_alone(text: str) -> list[tuple[str, str]]:
    """(line, what of it looks like a name of the first code base) in text that was migrated: for a person to look at.

    >>> left_alone("prob_senior: 0.5\\nuse: the primary model, my_frozen_model")
    [('line 2', 'primary'), ('line 2', 'my_frozen_model')]
    """
    known = set(RENAMED.values())
    return [
        (f"line {number}", m[0])
        for number, line in enumerate(text.split("\n"), 1)
        for m in _SUSPECT.finditer(line)
        if m[0] not in known
    ]


def migrate_tree(tree: Any, where: str = "") -> tuple[Any, list[Change]]:
    """A copy with keys renamed at every depth, and the changes; raises ConfigError where old and new name stand side by side.

    >>> migrate_tree({"tandem_config": {"prob_primary": 0.5, "chunk_size": 4}})
    ({'tandem_config': {'prob_senior': 0.5, 'chunk_size': 4}}, [Change(where='tandem_config', old='prob_primary', \
new='prob_senior')])
    """
    changes: list[Change] = []
    if isinstance(tree, Mapping):
        out: dict[Any, Any] = {}
        for key, value in tree.items():
            new = new_name(key) if isinstance(key, str) else key
            if new != key:
                changes.append(Change(where or "top", key, new))
            if new is None:
                continue
            if new in out or (new != key and new in tree):
                raise ConfigError(f"{where or 'top'} {key}", value, f"no `{new}` beside it", "remove one of the two")
            out[new], inner = migrate_tree(value, f"{where}.{new}" if where else str(new))
            changes += inner
        return out, changes
    if isinstance(tree, (list, tuple)):
        items = []
        for i, value in enumerate(tree):
            item, inner = migrate_tree(value, f"{where}[{i}]")
            items.append(item)
            changes += inner
        return (tuple(items) if isinstance(tree, tuple) else items), changes
    if isinstance(tree, str) and (new := new_value(tree)) != tree:
        return new, [Change(where or "top", m[0], _NEW[m[0]]) for m in _pattern(tree).finditer(tree)]
    return tree, changes


def _pattern(value: str) -> re.Pattern[str]:
    return _WORD if _CODE.search(value) else _METRIC


def migrate_text(text: str) -> tuple[str, list[Change]]:
    """Text (a run script, hydra overrides) with every old name replaced where it stands as a word.

    >>> migrate_text("+rollout.tandem.prob_primary=0.5  # primary writes")
    ('+rollout.tandem.prob_senior=0.5  # primary writes', [Change(where='line 1', old='prob_primary', new='prob_senior')])
    """
    lines, changes = text.split("\n"), list[Change]()
    for number, line in enumerate(lines, 1):
        changes += [Change(f"line {number}", m[0], _NEW[m[0]]) for m in _WORD.finditer(line)]
        changes += [Change(f"line {number}", name, name) for name in DROPPED if re.search(rf"\b{name}\b", line)]
        lines[number - 1] = _WORD.sub(lambda m: _NEW[m[0]], line)
    left = [c for c in changes if c.new == c.old]
    if left:
        raise ConfigError(left[0].where, left[0].old, "no name without a successor", "take it out by hand")
    return "\n".join(lines), changes


def migrate_yaml(text: str) -> tuple[str, list[Change]]:
    """YAML with keys renamed in place, comments and layout kept. Raises ConfigError for broken YAML, and as `migrate_tree`."""
    try:
        node, loaded = compose_yaml(text), load_yaml(text)
    except ValueError as error:
        raise ConfigError("file", str(error), "one document of valid YAML", "correct it first") from None
    tree, changes = migrate_tree(loaded)
    edits = sorted(set(_key_edits(node, text)), reverse=True) if node is not None else []
    for start, end, new in edits:
        quoted = bool(new) and text[start] in "\"'" and new[0] not in "\"'"
        text = text[:start] + (text[start] + new + text[start] if quoted else new) + text[end:]
    try:
        whole = load_yaml(text) == tree
    except ValueError:  # an anchor went that others name
        whole = False
    if not whole:
        last = next((c for c in changes if c.new is None), changes[0] if changes else None)
        expected = "keys that can be renamed or cut out where they stand"
        raise ConfigError("file", None if last is None else str(last), expected, "change it by hand")
    return text, changes


def _key_edits(node: yaml.Node, text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, what stands there now)."""
    if isinstance(node, yaml.MappingNode):
        for i, (key, value) in enumerate(node.value):
            new = new_name(key.value) if isinstance(key, yaml.ScalarNode) else key.value
            if new is None:
                yield _cut(node, i, text)
                continue
            if new != key.value:
                yield key.start_mark.index, key.end_mark.index, new
            yield from _key_edits(value, text)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _key_edits(item, text)
    elif isinstance(node, yaml.ScalarNode) and new_value(node.value) != node.value:
        start, end = node.start_mark.index, node.end_mark.index
        yield start, end, _pattern(node.value).sub(lambda m: _NEW[m[0]], text[start:end])


def _cut(node: yaml.MappingNode, i: int, text: str) -> tuple[int, int, str]:
    """The edit that takes pair `i` out, its line with it if it has one; an only pair leaves `{}`.

    Raises ConfigError where a comment stands between pairs of a flow mapping: whose it is, is nobody's to guess.
    """
    key, value = node.value[i]
    start, end = key.start_mark.index, value.end_mark.index
    following = node.value[i + 1][0].start_mark.index if i + 1 < len(node.value) else None
    if node.flow_style:
        before = node.value[i - 1][1].end_mark.index if i else start
        if "#" in text[before:start] + text[end : following or node.end_mark.index]:
            expected = "a flow mapping without comments around it"
            raise ConfigError("file", f"line {key.start_mark.line + 1}: {key.value}", expected, "cut it by hand")
        return (before, end, "") if following is None else (start, following, "")
    if not isinstance(value, yaml.ScalarNode) or value.style in ("|", ">"):
        # Here the mark lies before the next token: blank lines and comments that are no deeper belong to what follows.
        lines = text[start:end].split("\n")
        while len(lines) > 1 and (
            not (bare := lines[-1].strip()) or (bare[0] == "#" and _depth(lines[-1]) <= key.start_mark.column)
        ):
            lines.pop()
        end = start + len("\n".join(lines))
    if len(node.value) == 1:
        return start, end, "{}"
    line = text.rfind("\n", 0, start) + 1
    after = text.find("\n", end)
    after = len(text) if after < 0 else after
    if not text[line:start].strip():
        return line, min(after + 1, len(text)), ""
    # Behind the dash of a list: the next key takes its place, unless comments stand between.
    return start, after if following is None or "#" in text[after:following] else following, ""


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def migrate_file(path: Path, *, write: bool) -> tuple[list[Change], list[tuple[str, str]]]:
    """(changes, what is left alone) of a file, by its kind: .json, .yaml, .pt (tensors and plain values; read safely), text.

    With `write`, a changed file is replaced and the old one kept as `<name>.bak`, which must not exist yet. Raises ConfigError.
    """
    path = resolved(path, "FILE")  # through a link: the file changes, the link stays
    kind = path.suffix.lower()
    try:
        if kind in (".pt", ".pth", ".bin"):
            return _migrate_torch(path, write=write)
        text = path.read_bytes().decode("utf-8")  # line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError):
            raise ConfigError.of_os_error(path, error) from None
        raise ConfigError(str(path), str(error), "UTF-8 text", "leave it out") from None
    try:
        if kind == ".json":
            tree, changes = migrate_tree(_json(text))
            new = json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
        else:
            new, changes = (migrate_yaml if kind in (".yaml", ".yml") else migrate_text)(text)
    except ConfigError as error:
        raise error.within(str(path)) from None
    try:
        data = new.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(str(path), str(error), "text that UTF-8 can hold", "correct it first") from None
    if changes and write:
        _replace(path, lambda temporary: temporary.write_bytes(data))
    return changes, left_alone(new)


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError("file", str(error), "valid JSON, without comments", "correct it first") from None


def _migrate_torch(path: Path, *, write: bool) -> tuple[list[Change], list[tuple[str, str]]]:
    import torch

    try:
        tree = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - damaged bytes end in whatever torch's readers stumble over
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            str(path), why, "a file of tensors and plain values", "save its config blob as JSON first"
        ) from None
    try:
        new, changes = migrate_tree(tree)
    except RecursionError:
        raise ConfigError(str(path), "very deep nesting", "a config blob", "save it as JSON first") from None
    if changes and write:
        _replace(path, lambda temporary: torch.save(new, temporary))
    return changes, [(place, name) for place, text in _texts(new) for _, name in left_alone(text)]


def _texts(tree: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every key and string of a tree, with its place."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(key, where)
            yield from _texts(value, f"{where}.{key}" if where else str(key))
    elif isinstance(tree, (list, tuple)):
        for i, value in enumerate(tree):
            yield from _texts(value, f"{where}[{i}]")
    elif isinstance(tree, str):
        yield where or "top", tree


def _replace(path: Path, save: Callable[[Path], object]) -> None:
    backup = path.with_name(path.name + ".bak")
    if backup.exists():
        raise ConfigError(str(backup), "there already", "no older copy in the way", "move it away")
    try:
        with whole_file(path) as file:
            save(file)
            shutil.copymode(path, file)
            os.link(path, backup)
    except OSError as error:
        raise ConfigError.of_os_error(path, error) from None

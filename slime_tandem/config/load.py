"""YAML and `--set` to a tree of settings, and pydantic's findings to errors of ours. Knows no section."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from slime_tandem.config.section import Named
from slime_tandem.errors import ConfigError
from slime_tandem.files import DEPTH

T = TypeVar("T")


MOST_YAML = 2**24
"""Characters of a YAML text."""
_MOST_VALUES = 1_000_000
"""Of a YAML text, aliases unfolded: a few lines of them would otherwise stand for billions."""


class _Loader(yaml.SafeLoader):
    """The safe loader, but a key that stands twice in one mapping is an error: PyYAML would drop the first value.

    Depth and number of values, aliases unfolded, are bounded before any value is made.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As SafeLoader's; raises ComposerError for too many levels or values, and for an alias of what holds it."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > DEPTH:
            raise yaml.composer.ComposerError(None, None, f"more than {DEPTH} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if not isinstance(event, yaml.AliasEvent):
            inner = node.value if isinstance(node, yaml.SequenceNode) else []
            if isinstance(node, yaml.MappingNode):
                inner = [part for pair in node.value for part in pair]
            self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in inner)
        if self._sizes.get(id(node), _MOST_VALUES + 1) > _MOST_VALUES:
            problem = f"aliases that unfold to more than {_MOST_VALUES} values, or to themselves"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader's; raises ConstructorError for a key that is there already."""
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    problem = f"the key `{key_node.value}` stands twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_OTHERWISE = re.compile(r"[-+]?0[0-9_]+|[^:]+(?::[^:]*)+")


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """A number; raises ConstructorError for one that YAML 1.1 reads otherwise than anybody: `010` is 8 to it, `12:30` 750."""
    if _OTHERWISE.fullmatch(node.value):
        problem = f"{node.value} is octal, or of base 60; write a decimal number, or quote it for text"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    if node.tag.endswith(":int"):
        return loader.construct_yaml_int(node)
    return loader.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def compose_yaml(text: str) -> yaml.Node | None:
    """The nodes of one document of YAML, None for an empty one; raises ValueError, told in one line, for anything else."""
    return _told(lambda: yaml.compose(text, Loader=_Loader), text)


def load_yaml(text: str) -> Any:
    """The value of one document of YAML, by the safe loader; raises ValueError, told in one line, for anything else.

    No key twice, no second document, bounded in length, depth and number of values: `yaml.safe_load` has no such bounds.

    >>> load_yaml("{a: [1, x], b: 1.5}")
    {'a': [1, 'x'], 'b': 1.5}
    """
    return _told(lambda: yaml.load(text, Loader=_Loader), text)  # noqa: S506 - a SafeLoader


def _told(read: Callable[[], T], text: str) -> T:
    if len(text) > MOST_YAML:
        raise ValueError(f"{len(text)} characters, more than {MOST_YAML}")
    try:
        return read()
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or number that is none
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Read one YAML mapping with the safe loader; raises ConfigError otherwise."""
    try:
        loaded = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("--config", str(path), "an existing YAML file", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        expected = f"a readable UTF-8 text file ({why})"
        raise ConfigError("--config", str(path), expected, "give a YAML file, saved as UTF-8") from None
    except ValueError as error:
        expected = f"valid YAML ({error})"
        raise ConfigError("--config", str(path), expected, "correct the file at this place") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError("--config", str(path), "a mapping of section names", "see scripts/train/configs/")
    return loaded


def set_override(tree: dict[str, Any], item: str) -> None:
    """Put one `key=value` (a dotted key, a YAML value) into the tree; raises ConfigError for anything else."""
    key, eq, raw = item.partition("=")
    if not eq or not key:
        raise ConfigError("--set", item, "key=value with a dotted key", "e.g. --set tandem.prob_senior=0.3")
    try:
        value = load_yaml(raw) if raw else ""
    except ValueError as error:
        raise ConfigError("--set", item, f"a YAML value ({error})", "quote it") from None
    node: Any = tree
    parts = key.split(".")
    if len(parts) > DEPTH:
        raise ConfigError("--set", item, "the dotted name of a setting", "e.g. --set tandem.prob_senior=0.3")
    for i, part in enumerate(parts):
        at: Any = part
        below = parts[i + 1] if i + 1 < len(parts) else None
        if isinstance(node, list):  # `tasks.0.weight`, as errors name it
            if not part.isdecimal() or int(part) >= len(node):
                raise ConfigError("--set", item, f"an entry of the list, 0 to {len(node) - 1}", "set the whole list")
            at = int(part)
        elif below is not None and below.isdecimal() and part not in node:
            above = ".".join(parts[: i + 1])
            expected = f"a list at `{above}` in the file of settings, whose entry {below} is changed"
            raise ConfigError("--set", item, expected, f"set the whole list: --set '{above}=[...]'")
        elif below is not None:
            node.setdefault(part, {})
        if below is None:
            node[at] = value
        elif isinstance(node[at], dict | list):
            node = node[at]
        else:
            raise ConfigError("--set", item, f"a section at `{part}`", "give the dotted name of one setting")


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every leaf setting below `model` as (dotted name, default, description)."""
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from fields_of(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info.get_default(call_default_factory=True), info.description or ""


def choices_of(model: type[BaseModel], name: str) -> tuple[str, ...]:
    """The literal values, or built-in names, that a setting (by its dotted name) takes; empty for any other kind of setting."""
    *parents, leaf = name.split(".")
    for part in parents:
        below = model.model_fields[part].annotation
        assert isinstance(below, type), "a section"
        model = below
    for mark in model.model_fields[leaf].metadata:
        if isinstance(mark, Named):
            return mark.names
    annotation = model.model_fields[leaf].annotation
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else ()


def problems(
    error: ValidationError, root: type[BaseModel], entries: Mapping[str, type[BaseModel]]
) -> Iterator[ConfigError]:
    """What pydantic found while it built a `root`, as errors; `entries`: what the entries of each list setting are."""
    defaults = {name: default for name, default, _ in fields_of(root)}
    known = [*defaults, *root.model_fields, *(f"{at}.{n}" for at, entry in entries.items() for n in entry.model_fields)]
    items = error.errors(include_url=False)
    for item in items:
        if item["type"] == "too_short" and any(other["loc"][:1] == item["loc"] != other["loc"] for other in items):
            continue  # pydantic leaves broken list items out and then finds the list too short
        where = ".".join(str(part) for part in item["loc"])
        value, kind = item.get("input"), item["type"]
        if kind == "extra_forbidden":
            plain = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
            close = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
            hint = (
                f"did you mean `{close[0]}`?" if close else "remove it; `slime-tandem config --list` lists all settings"
            )
            yield ConfigError(where, value, "a known setting", hint)
        elif kind == "value_error" and isinstance(item["ctx"]["error"], ConfigError):
            found = item["ctx"]["error"]  # a type of setting does not know the name of the setting
            yield found if found.field else ConfigError(where, found.value, found.expected, found.remedy)
        elif kind == "literal_error":
            # e.g. "'word', 'chunk' or 'sentence'": the values as pydantic lists them
            close = difflib.get_close_matches(str(value), re.findall(r"'([^']*)'", item["ctx"]["expected"]), n=1)
            yield ConfigError(
                where,
                value,
                f"one of {item['ctx']['expected']}",
                f"did you mean {close[0]!r}?" if close else "choose one of these",
            )
        else:
            yield ConfigError(
                where or "config",
                value,
                str(item["msg"]).removeprefix("Value error, ").removeprefix("Input should be "),
                f"correct this setting (default: {defaults[where]!r})" if where in defaults else "correct this setting",
            )

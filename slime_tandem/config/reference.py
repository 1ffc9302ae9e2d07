"""The reference of all settings, docs/settings.md, from the settings tree itself.

`python -m slime_tandem.config.reference > docs/settings.md` writes it; a test compares the two.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_tandem.config import Named, RunConfig, Section

_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}", "min_length": "not empty"}
_OR_NULL = " or null"
_NAMES = {bool: "true, false", int: "whole number", float: "number", str: "text"}


def settings_markdown() -> str:
    """The text of docs/settings.md: a table for each section, in the order of the tree."""
    lines = [
        "# Settings",
        "",
        "Generated from `slime_tandem/config/`; do not edit by hand:",
        "`python -m slime_tandem.config.reference > docs/settings.md`.",
        "",
        "Each is a key of the YAML file (`tandem: {prob_senior: 0.3}`) and of `--set tandem.prob_senior=0.3`. Unknown keys,",
        "values out of range, contradictions, and settings that others make void are refused with the remedy.",
    ]
    for name, section in sections(RunConfig, ""):
        lines += ["", f"## `{name}`" if name else "## The run", "", said_of(section)]
        lines += ["", "| setting | default | values | what it is |", "|---|---|---|---|"]
        for field, info in section.model_fields.items():
            if not _section_of(info.annotation):
                row = (f"`{name}{'.' if name else ''}{field}`", _default(info), _values(info), info.description or "")
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def said_of(section: type[Section]) -> str:
    """What a section is, in a line."""
    return (inspect.getdoc(section) or "").partition("\n")[0]


def own_settings(section: type[Section]) -> list[str]:
    """Names of the settings of a section that are no section themselves.

    >>> own_settings(RunConfig)
    ['name', 'runs_dir', 'seed', 'report_to', 'tasks', 'control']
    """
    return [field for field, info in section.model_fields.items() if not _section_of(info.annotation)]


def sections(section: type[Section] = RunConfig, name: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The section and all below it, with their dotted names; the entries of a list as `name[]`."""
    yield name, section
    for field, info in section.model_fields.items():
        dotted = f"{name}.{field}" if name else field
        if inner := _section_of(info.annotation):
            yield from sections(inner, dotted)
        elif get_origin(info.annotation) is tuple and (entry := _section_of(get_args(info.annotation)[0])):
            yield from sections(entry, f"{dotted}[]")


def _section_of(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        value = [v.model_dump(exclude_defaults=True) if isinstance(v, BaseModel) else v for v in value]
    return f"`{json.dumps(value)}`"


def _values(info: FieldInfo) -> str:
    """What the setting takes, in words.

    >>> _values(RunConfig.model_fields["seed"])
    'whole number, at least 0, below 2^63'
    """
    if named := [item for item in info.metadata if isinstance(item, Named)]:
        return _named(named[0])
    kind, null, _ = _kind(info.annotation).partition(_OR_NULL)
    return ", ".join([kind, *_bounds(info.metadata)]) + null


def _kind(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *metadata = args
        if named := [item for item in metadata if isinstance(item, Named)]:
            return _named(named[0])
        constraints = [m for item in metadata for m in getattr(item, "metadata", [item])]
        return ", ".join([_kind(inner), *_bounds(constraints)])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, UnionType):
        kinds = [_kind(arg) for arg in args if arg is not NoneType]
        return " or ".join(kinds) + (_OR_NULL if NoneType in args else "")
    if origin is tuple:
        return "list, below" if _section_of(args[0]) else f"list: {_kind(args[0])}"
    return "mapping" if origin is dict else _NAMES[annotation]


def _named(named: Named) -> str:
    return " or ".join([", ".join(f"`{name}`" for name in named.names), *(f"`{form}`" for form in named.forms)])


def _bounds(metadata: list[Any]) -> list[str]:
    found = []
    for item in metadata:
        for key, words in _BOUNDS.items():
            if (value := getattr(item, key, None)) is not None:
                found.append(words.format(_number(value)))
    return found


def _number(value: float) -> str:
    """A bound for reading; large powers of two as such."""
    power = int(value).bit_length() - 1
    return f"2^{power}" if power > 16 and value == 2**power else f"{value:g}"


if __name__ == "__main__":
    print(settings_markdown(), end="")

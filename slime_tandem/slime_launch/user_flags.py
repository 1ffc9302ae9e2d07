"""The flags of slime that a user adds to a plan: read, compared with the plan's own, and held against slime_hooks/refused.py.

Values are compared as values: `--lr 1e-6` says what `--lr 1e-06` says, and so do lists and objects. It knows no defaults of
slime's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_tandem.config import RunConfig
from slime_tandem.config.load import load_yaml
from slime_tandem.errors import ConfigError
from slime_tandem.slime_hooks.refused import argument, check_flags, instead_of
from slime_tandem.slime_launch.layout import Layout, check_sglang_config

_SAID_BY_ABSENCE = {"--colocate", "--rollout-stop", "--disable-grpo-std-normalization"}
"""Flags that a plan leaves out where a setting says so: beside it they would say something else."""
_TEXTS = {"--rollout-stop"}
"""Flags of ours whose values are never numbers: a stop at `1` is none at `1.0`."""


def split(flags: Sequence[str]) -> dict[str, list[str]]:
    """Flags with their values, of a repeated one the last, as argparse takes them; `--flag=value` too.

    Raises ConfigError for a word in front of the first flag, and for a lone `--`.

    >>> split(["--a", "1", "--b", "--lr=-3"])
    {'--a': ['1'], '--b': [], '--lr': ['-3']}
    """
    return dict(_each(flags))


def _each(flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The same with every occurrence: slime adds some up (--rollout-sample-hook-path)."""
    found: list[tuple[str, list[str]]] = []
    for word in flags:
        if word == "--":
            raise ConfigError("slime flags", word, "flags alone behind the first --", "remove it")
        if word.startswith("--"):
            name, eq, value = word.partition("=")
            found.append((name, [value] if eq else []))
        elif not found:
            raise ConfigError("slime flags", word, "a flag first", "e.g. -- --use-tensorboard")
        else:
            found[-1][1].append(word)
    return found


def same(name: str, ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether the two say one thing: the same words, or words that are the same numbers, lists or objects.

    >>> same("--lr", ["1e-06"], ["1e-6"]), same("--lr", ["1e-06"], ["2e-6"]), same("--rollout-stop", ["1"], ["1.0"])
    (True, False, False)
    >>> same("--apply-chat-template-kwargs", ['{"a": 1}'], ['{"a":1}'])
    True
    >>> same("--moe-layer-freq", ["[1,1,1]"], ["[0]*0+[1]*3"])
    True
    """
    return len(ours) == len(theirs) and all(
        a == b or (name not in _TEXTS and _same_value(a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_value(a: str, b: str) -> bool:
    if (number := _number(a)) is not None:
        return number == _number(b)
    return bool(a[:1] in "[({" and b[:1] in "[({") and (value := _literal(a)) is not None and value == _literal(b)


def _literal(text: str) -> Any:
    """A list or an object in the notation of Python or JSON, also Megatron's `[0]*1+[1]*47`; None for what is none."""
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


_LONGEST = 10_000
"""Entries of a list that is written out to be compared."""


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            a, b = _evaluated(left), _evaluated(right)
            if isinstance(a, list) and isinstance(b, list):
                return [*a, *b]
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(n))) if n <= _LONGEST:
            if isinstance(a := _evaluated(left), list) and len(a) * n <= _LONGEST:
                return a * n
        case ast.List(elts=entries):
            return [_evaluated(entry) for entry in entries]
        case ast.Dict(keys=keys, values=values):
            return {key.value: _evaluated(v) for key, v in _constants(zip(keys, values, strict=True))}
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="true" | "false" | "null" as word):  # JSON's
            return {"true": True, "false": False, "null": None}[word]
    raise ValueError(ast.dump(node)[:80])


def _constants(entries: Iterator[tuple[ast.expr | None, ast.expr]]) -> Iterator[tuple[ast.Constant, ast.expr]]:
    for key, value in entries:
        if not isinstance(key, ast.Constant):
            raise ValueError("a key that is no constant")
        yield key, value


def accepted(
    config: RunConfig, ours: Sequence[str], extra: Sequence[str], place: Layout, *, of_model: Sequence[str], hooks: str
) -> list[str]:
    """The user's own flags `extra`, without those that repeat `ours`; raises ConfigError for one that contradicts a plan's.

    `of_model`: those of ours that are the senior's sizes; `hooks`: what the import strings of ours begin with.
    """
    mine, kept, sizes = split(ours), list[str](), split(of_model)
    for name, values in _each(extra):
        if name == "--sglang-config":
            check_sglang_config(config, Path(values[0] if values else ""), place)
            kept += [name, *values]
        elif name not in mine:
            # slime's parser of these flags takes beginnings of names, and would change ours by another's.
            if name.startswith("--sglang") and (whole := [flag for flag in mine if flag.startswith(name)]):
                raise ConfigError(name, " ".join(values) or True, f"a whole name, {' or '.join(whole)}", "write it out")
            if name in _SAID_BY_ABSENCE:
                raise ConfigError(
                    name,
                    " ".join(values) or True,
                    "not to be set: the configuration says otherwise",
                    instead_of(name, hook=False, of_model=False),
                )
            kept += [name, *values]
        elif not same(name, mine[name], values):
            expected = f"{' '.join(mine[name]) or 'as a flag'}, what the configuration says"
            hook = " ".join(mine[name]).startswith(hooks)
            raise ConfigError(name, " ".join(values), expected, instead_of(name, hook=hook, of_model=name in sizes))
    # What the hooks themselves would refuse when the job has started, and what only a plan knows.
    check_flags(SimpleNamespace(**_as_arguments({**mine, **split(kept)})), config, planned=True)
    return kept


def _as_arguments(flags: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {
        argument(name): True if not values else _value(values[0]) if len(values) == 1 else [*map(_value, values)]
        for name, values in flags.items()
    }


def _value(text: str) -> Any:
    if (number := _number(text)) is not None:
        return number  # YAML takes 1e-05 for text
    try:
        return load_yaml(text)
    except ValueError:  # a name, a pattern
        return text


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

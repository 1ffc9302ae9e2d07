"""The flags of slime that a user adds to a plan: read, compared with the plan's own, and held against slime_hooks/refused.py.

Values are compared as values: `--lr 1e-6` says what `--lr 1e-06` says. It knows no defaults of slime's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Flags with their values; `--flag=value` too. Raises ConfigError for a word in front of the first flag.

    >>> split(["--a", "1", "--b", "--lr=-3"])
    {'--a': ['1'], '--b': [], '--lr': ['-3']}
    """
    found: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--") and len(word) > 2:
            name, eq, value = word.partition("=")
            found[name] = [value] if eq else []
        elif not found:
            raise ConfigError("slime flags", word, "a flag first", "e.g. -- --use-tensorboard")
        else:
            found[next(reversed(found))].append(word)
    return found


def same(name: str, ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether the two say one thing: the same words, or words that are the same numbers or JSON objects.

    >>> same("--lr", ["1e-06"], ["1e-6"]), same("--lr", ["1e-06"], ["2e-6"]), same("--rollout-stop", ["1"], ["1.0"])
    (True, False, False)
    >>> same("--apply-chat-template-kwargs", ['{"a": 1}'], ['{"a":1}'])
    True
    """
    return len(ours) == len(theirs) and all(
        a == b or (name not in _TEXTS and (value := _plain(a)) is not None and value == _plain(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def accepted(
    config: RunConfig, ours: Sequence[str], extra: Sequence[str], place: Layout, *, of_model: Sequence[str], hooks: str
) -> list[str]:
    """The user's own flags `extra`, without those that repeat `ours`; raises ConfigError for one that contradicts a plan's.

    `of_model`: those of ours that are the senior's sizes; `hooks`: what the import strings of ours begin with.
    """
    mine, given, kept, sizes = split(ours), split(extra), list[str](), split(of_model)
    for name, values in given.items():
        if name == "--sglang-config":
            check_sglang_config(config, Path(values[0] if values else ""), place)
            kept += [name, *values]
        elif name not in mine:
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


def _plain(text: str) -> float | dict[str, Any] | None:
    """A number or an object; None for all else."""
    value = _value(text) if text.startswith("{") else _number(text)
    return value if isinstance(value, (float, dict)) else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

"""Names in a configuration that stand for code: a built-in one, or a user's own as `module:attribute`.

One door for strategies, selectors, signals, task families, rewards, environments and teachers (docs/extending.md). Importing a
user's module runs its code: that is the user's own doing, named in the user's own configuration.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from slime_tandem.errors import ConfigError, TandemError

T = TypeVar("T")


def is_own(name: str) -> bool:
    """Whether a name is of the form `module:attribute`, which no built-in one has.

    >>> is_own("my.rewards:strict"), is_own("word"), is_own("http://127.0.0.1/score"), is_own("tip:0.1")
    (True, False, False, False)
    """
    module, _, attribute = name.partition(":")
    return bool(module) and all(part.isidentifier() for part in attribute.split("."))


def is_url(name: str) -> bool:
    """Whether a name is the address of a server (`http://` or `https://`), where a setting takes one.

    >>> is_url("https://judge.example/score"), is_url("http:score")
    (True, False)
    """
    return name.startswith(("http://", "https://"))


def find(name: str, built_in: Mapping[str, T], field: str, kind: type[T] | None = None) -> T:
    """What `name` stands for. Raises ConfigError, which names the setting `field`, for a name that is neither built in nor
    importable, and for an attribute that is no `kind` (a class or a runtime-checkable protocol; None: that is callable).

    >>> find("math:sqrt", {}, "tasks.0.reward")(9.0)
    3.0
    """

    def refusal(why: str) -> ConfigError:
        close = difflib.get_close_matches(name, built_in, n=1, cutoff=0.6)
        remedy = f"did you mean {close[0]!r}?" if close else "correct the name, or the import path"
        known = f"{', '.join(sorted(built_in))} or " if built_in else ""
        return ConfigError(field, name, f"{known}module:attribute ({why})", remedy)

    if name in built_in:
        return built_in[name]
    if not is_own(name):
        raise refusal("no built-in one has this name")
    module, _, attribute = name.partition(":")
    try:
        found: T = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # an import runs the user's code
        raise refusal(said(error)) from error
    if not (callable(found) if kind is None else isinstance(found, kind)):
        raise refusal(f"it is a {type(found).__name__}" + ("" if kind is None else f", no {kind.__name__}"))
    return found


def made(make: Callable[..., T], *args: object, field: str, name: str) -> T:
    """What `make`, a user's own that `name` stands for, makes of `args`. Raises ConfigError, naming `field`, if it raises."""
    try:
        return make(*args)
    except TandemError:
        raise
    except (Exception, SystemExit) as error:  # the user's code
        raise ConfigError(field, name, f"one that can be made ({said(error)})", "mend it") from error


def said(error: BaseException) -> str:
    """An error of somebody else's in one line.

    >>> said(KeyError("a"))
    "KeyError: 'a'"
    """
    return " ".join(f"{type(error).__name__}: {error}".split())

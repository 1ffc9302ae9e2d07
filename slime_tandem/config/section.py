"""The base of every section of the configuration, and how a section says that a setting has no effect."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from annotated_types import Le, Lt
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationInfo, field_validator
from pydantic_core import core_schema

from slime_tandem.errors import ConfigError
from slime_tandem.extensions import is_own, is_url

LARGEST = 2**31 - 1
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True, slots=True)
class Named:
    """Marks a setting (`Annotated[str, Named(names)]`) that names code: a built-in name, or a user's own as `module:attribute`.

    The form alone is checked here; whoever uses the setting imports it (`extensions.find`). `urls`: a server's address will do,
    too.
    """

    names: tuple[str, ...]
    urls: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """What it may be beside a built-in name."""
        return ("module:attribute", "http://host/path") if self.urls else ("module:attribute",)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))

    def check(self, value: object) -> object:
        """The value itself; raises ConfigError, without the setting's name, for anything but a name."""
        if value in self.names or (isinstance(value, str) and is_own(value)):
            return value
        if self.urls and isinstance(value, str) and is_url(value):
            return _server(value)
        *most, last = map(repr, self.names)
        close = difflib.get_close_matches(str(value), self.names, n=1)
        raise ConfigError(
            "",
            value,
            (f"one of {', '.join(most)} or {last}, or " if most else f"{last} or ") + " or ".join(self.forms),
            f"did you mean {close[0]!r}?" if close else "choose one of these",
        )


class Ignored(NamedTuple):
    """A setting that has no effect while another says so; setting it all the same is an error.

    `name`: the setting; `when(section)`: whether it has none; `by`: the setting of the same section that decides, shown with
    its value; `remedy`: what would give it effect, behind "remove it, or ".
    """

    name: str
    when: Callable[[Any], bool]
    by: str
    remedy: str


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    ignored: ClassVar[tuple[Ignored, ...]] = ()

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("another type than true or false")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _numbers_can_be_counted_to(cls, value: object, info: ValidationInfo) -> object:
        """A count without a bound of its own has this one: no run is that long, and libraries fail in ways of their own."""
        own = cls.model_fields[info.field_name].metadata if info.field_name else ()
        if type(value) is int and abs(value) > LARGEST and not any(isinstance(m, (Le, Lt)) for m in own):
            raise ValueError(f"a number of at most {LARGEST}")
        return value

    def misuses(self, path: str = "") -> Iterator[ConfigError]:
        """An error for each setting, here and in the sections below, that is set and has no effect; `path` names this one.

        >>> from slime_tandem.config import TandemConfig
        >>> print(*TandemConfig(selection_strategy="sentence", chunk_size=4).misuses("tandem"))
        tandem.chunk_size=4: expected 16 (the default) with tandem.selection_strategy='sentence', which ignores it. \
Remedy: remove it, or choose chunk.
        """
        for rule in self.ignored:
            if rule.when(self) and (problem := self.misuse(rule, path)):
                yield problem
        for name in type(self).model_fields:
            if isinstance(below := getattr(self, name), Section):
                yield from below.misuses(f"{path}.{name}" if path else name)

    def misuse(self, rule: Ignored, path: str = "") -> ConfigError | None:
        """The error of a setting that has no effect; None where it is at its default. `path` names this section."""
        dot = f"{path}." if path else ""
        value = getattr(self, rule.name)
        default = type(self).model_fields[rule.name].get_default(call_default_factory=True)
        if value == default:
            return None
        decides = getattr(self, rule.by)
        by = f"{dot}{rule.by}" + ("" if isinstance(decides, tuple) else f"={decides!r}")
        return ConfigError(
            f"{dot}{rule.name}",
            list(value) if isinstance(value, tuple) else value,
            f"{_as_yaml(default)} (the default) with {by}, which ignores it",
            f"remove it, or {rule.remedy}",
        )


def set_in(section: Section, path: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting of a section that is not at its default; `path` names the section.

    >>> from slime_tandem.config import ClusterConfig
    >>> list(set_in(ClusterConfig(nodes=2), "cluster"))
    [('cluster.nodes', 2)]
    """
    for name, info in type(section).model_fields.items():
        if (value := getattr(section, name)) != info.get_default(call_default_factory=True):
            yield f"{path}.{name}", value


def _as_yaml(default: object) -> object:
    if default is None:
        return "null"
    return list(default) if isinstance(default, tuple) else default


def _server(value: str) -> str:
    """A URL that requests go to; raises ConfigError, without the setting's name, for one that is none or holds a secret."""
    try:
        http_url(value)
        parts = urlsplit(value)
    except ValueError:
        raise ConfigError("", value, "a URL such as http://127.0.0.1:8000/score", "correct it") from None
    if parts.username is not None or parts.password is not None:
        remedy = "put the key into a variable, and name that by reward.api_key_env"
        raise ConfigError("", "(not shown)", "a URL without user and password", remedy)
    return value


def http_url(value: str | None) -> str | None:
    """The URL itself, or None; raises ValueError for anything but an http or https URL with a host."""
    try:
        parts = urlsplit(value or "http://none")
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a broken IPv6 address, a port that is no number
        good = False
    if value == "" or not good:
        raise ValueError("null or a URL such as http://127.0.0.1:30000")
    return value

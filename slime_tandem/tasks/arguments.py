"""What a reward of the user's is given: its own parameters say, by their names. Pure; nothing is called here.

A parameter in the singular (`text`, `label`) is of one response, one in the plural (`texts`, `labels`) of all responses of a
call, a list each. Any other name is a column of the prompt (its metadata). `docs/extending.md` has the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from slime_tandem.errors import ConfigError, DataError
from slime_tandem.tasks.columns import RESERVED, WHOLE_LABEL
from slime_tandem.types import Prompt, TandemSample


class Response(NamedTuple):
    """A response to be scored: its `text` after stop truncation; `sample` has its tokens, None where only the text is known."""

    prompt: Prompt
    text: str
    sample: TandemSample | None = None


def _of_sample(name: str) -> Callable[[Response], Any]:
    def value(response: Response) -> Any:
        found = None if response.sample is None else getattr(response.sample, name)
        return list(found) if isinstance(found, tuple) else found

    return value


OF_A_RESPONSE: Mapping[str, Callable[[Response], Any]] = MappingProxyType(
    {
        "prompt": lambda r: r.prompt,
        "text": lambda r: r.text,
        "label": lambda r: r.prompt.label if r.prompt.label is not None else r.prompt.metadata.get(WHOLE_LABEL),
        "task": lambda r: r.prompt.task,
    }
)
"""In the singular of one response, with an `s` of all of a batch."""
OF_BOTH: Mapping[str, Callable[[Response], Any]] = MappingProxyType(
    {
        "messages": lambda r: [m.as_dict() for m in r.prompt.messages],
        "metadata": lambda r: _columns(r),
        "prompt_ids": _of_sample("prompt_ids"),
        "response_ids": _of_sample("response_ids"),
        "authorship_mask": _of_sample("authorship_mask"),
        "loss_mask": lambda r: None if r.sample is None else list(r.sample.loss_mask),
        "log_probs": _of_sample("log_probs"),
        "finish_reason": _of_sample("finish_reason"),
    }
)
"""Called alike of one response and of all of a batch: a list of them there."""
SENT = ("messages", "text", "label", "task", "metadata", "finish_reason")
"""What a server of the user's is sent (`remote`)."""
SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        "response": "text",
        "solution_str": "text",
        "ground_truth": "label",
        "data_source": "task",
        "extra_info": "metadata",
        "extra_infos": "metadata",
    }
)
"""Names that other libraries give the same (slime, verl), where no column has them."""


def _columns(response: Response) -> dict[str, Any]:
    return {name: value for name, value in response.prompt.metadata.items() if name not in RESERVED}


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function takes. `needed` and `optional`: names of its parameters; `everything`: it takes `**kwargs`, too; `batch`:
    of many responses at once; `waits`: it is a coroutine function; `where`: the setting that names it."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    everything: bool
    batch: bool
    waits: bool
    where: str

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise DataError for a parameter that is neither known nor a column of these prompts: of each; for a batch of any."""
        known = OF_A_RESPONSE.keys() | OF_BOTH.keys() | SYNONYMS.keys()
        for name in self.needed:
            if _singular(name) not in known:
                lacking = [prompt for prompt in prompts if name not in prompt.metadata]
                if lacking and not (self.batch and len(lacking) < len(prompts)):
                    raise self._unknown(name, Response(lacking[0], ""))

    def of(self, response: Response) -> dict[str, Any]:
        """The keyword arguments for one response; raises DataError for a parameter that is neither known nor a column."""
        columns = _columns(response)
        found = {name: _value(name, response, columns) for name in (*self.needed, *self.optional)}
        for name in self.needed:
            if found[name] is _NONE:
                raise self._unknown(name, response)
        if self.everything:
            names = (*OF_A_RESPONSE, *OF_BOTH, *(name for name in columns if name.isidentifier()))
            found = {name: _value(name, response, columns) for name in names} | found
        return {name: value for name, value in found.items() if value is not _NONE}

    def of_all(self, responses: Sequence[Response]) -> dict[str, Any]:
        """The keyword arguments for a batch (at least one response): lists, in its order, with None where a prompt lacks a
        column. Raises DataError for a parameter that is no column of any."""
        columns = [_columns(response) for response in responses]
        found: dict[str, list[Any]] = {}
        names = [*self.needed, *self.optional]
        if self.everything:
            own = dict.fromkeys(name for row in columns for name in row if name.isidentifier())
            names += [name for name in (*map(_plural, OF_A_RESPONSE), *OF_BOTH, *own) if name not in names]
        for name in names:
            values = [_value(_singular(name), r, row) for r, row in zip(responses, columns, strict=True)]
            if any(value is not _NONE for value in values):
                found[name] = [None if value is _NONE else value for value in values]
            elif name in self.needed:
                raise self._unknown(name, responses[0])
        return found

    def _unknown(self, name: str, response: Response) -> DataError:
        known = (*map(_plural, OF_A_RESPONSE), *OF_BOTH) if self.batch else (*OF_A_RESPONSE, *OF_BOTH)
        field = f"parameter of {self.where} at prompt {response.prompt.prompt_id}"
        expected = f"a column of the prompt, or one of {', '.join(known)}"
        columns = ", ".join(_columns(response)) or "none"
        return DataError(field, name, expected, f"correct its name, or give it a default; columns here: {columns}")


_NONE = object()


def _value(name: str, response: Response, columns: Mapping[str, Any]) -> Any:
    known = OF_A_RESPONSE.get(name) or OF_BOTH.get(name)
    if known is not None:
        return known(response)
    if name in columns:
        return columns[name]
    return _value(SYNONYMS[name], response, columns) if name in SYNONYMS else _NONE


_PLURALS = {f"{name}s": name for name in OF_A_RESPONSE} | {
    f"{name}s": name for name, means in SYNONYMS.items() if means in OF_A_RESPONSE
}


def _singular(name: str) -> str:
    return _PLURALS.get(name, name)


def _plural(name: str) -> str:
    return f"{name}s"


def parameters_of(function: Callable[..., Any], where: str, name: str) -> Parameters:
    """What a reward takes; a class is made without arguments before it is called, so its `__call__` says.

    Raises ConfigError, naming the setting `where` with its value `name`, for one whose parameters cannot be given by name, and
    for one that mixes one response and many.

    >>> parameters_of(lambda text, label: 0.0, "tasks.0.reward", "m:f").of(Response(Prompt("p", (), "4", "t"), "so 4"))
    {'text': 'so 4', 'label': '4'}
    >>> parameters_of(lambda texts: [], "tasks.0.reward", "m:f").batch
    True
    """
    called: Any = function
    if inspect.isclass(function):
        if not any("__call__" in vars(base) for base in function.__mro__):
            raise ConfigError(where, name, "a function, or a class with `__call__`", "see docs/extending.md")
        called = function.__call__
    waits = any(map(inspect.iscoroutinefunction, (called, type(called).__call__)))
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(where, name, f"a function whose parameters have names ({error})", "wrap it in one") from None
    if inspect.isclass(function):
        parameters = parameters[1:]
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if unnamed:
        raise ConfigError(where, name, f"parameters that can be given by name, not {unnamed[0]!r}", "drop the `/`")
    names = [p.name for p in by_name]
    if not names and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(where, name, "a function that takes the response, e.g. `text`", "see docs/extending.md")
    batch = [n for n in names if n in _PLURALS]
    single = [n for n in names if n in OF_A_RESPONSE or SYNONYMS.get(n) in OF_A_RESPONSE]
    if batch and single:
        expected = f"names of one response or of many, not {single[0]!r} beside {batch[0]!r}"
        raise ConfigError(where, name, expected, "use the singular or the plural throughout")
    return Parameters(
        tuple(p.name for p in by_name if p.default is p.empty),
        tuple(p.name for p in by_name if p.default is not p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        bool(batch),
        waits,
        where,
    )

"""Whether a chat template comes to an end: rendered once in a process that can be killed, before it is rendered here.

A template is a program in a sandbox, which keeps it from files, and from nothing that takes long or is large. What messages say
is data to it, and is not read as a template.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from slime_tandem.tasks.pool import Call, Limits, Pool, recipe

LIMITS = Limits(
    timeout_s=10.0, memory_mib=2048, processes=1, guarded=False
)  # Jinja makes Python of a template, and evaluates it
MOST_CHARACTERS = 1_000_000
_CHATS = tuple(
    [{"role": role, "content": "probe"} for role in roles]
    for roles in (("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool"))
)


@functools.cache
def is_bounded(template: str, variables: tuple[tuple[str, str], ...]) -> bool:
    """Whether a few short chats are rendered within LIMITS and MOST_CHARACTERS; one that raises is bounded."""
    pool = Pool(LIMITS)
    try:
        (reply,) = pool.ask([Call(recipe(__name__, "renderer"), (template, dict(variables)))])
    finally:
        pool.close()
    return reply.problem is None and reply.value <= MOST_CHARACTERS


def renderer() -> Callable[[str, Mapping[str, str]], int]:
    """What the process calls: the longest of the chats as the template writes them, in characters; 0 where it raises."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, transformers' own: what is between is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: form)

    def render(template: str, variables: Mapping[str, str]) -> int:
        longest = 0
        for chat in _CHATS:
            for add in (False, True):
                try:
                    text = environment.from_string(template).render(
                        messages=chat, tools=None, documents=None, add_generation_prompt=add, **variables
                    )
                except (MemoryError, RecursionError):
                    raise
                except Exception:  # noqa: BLE001, S112 - a template refuses roles by what it likes
                    continue
                longest = max(longest, len(text))
        return longest

    return render

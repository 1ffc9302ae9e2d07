"""Whether a chat template comes to an end: all that is rendered to read it (`turns.probe`) is rendered in a process that can be
killed first, before it is rendered here.

A template is a program in a sandbox, which keeps it from files, and from nothing that takes long or is large. What messages say
is data to it, and is not read as a template.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_tandem.errors import ModelError
from slime_tandem.tasks.pool import Call, Limits, Pool, recipe
from slime_tandem.turns import probe

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
        try:
            compiled = environment.from_string(template)
        except TemplateError:
            return 0

        def write(
            messages: Sequence[Mapping[str, Any]], *, generation: bool, tools: Sequence[Any] | None = None
        ) -> str:
            nonlocal longest
            try:
                text = compiled.render(
                    messages=[dict(message) for message in messages],
                    tools=tools,
                    documents=None,
                    add_generation_prompt=generation,
                    **variables,
                )
            except (MemoryError, RecursionError):
                raise
            except Exception as error:  # a template refuses roles by what it likes
                raise ModelError("chat template", "", "one that renders these", "") from error
            longest = max(longest, len(text))
            return text

        for chat in _CHATS:
            for generation in (False, True):
                with contextlib.suppress(ModelError):
                    write(chat, generation=generation)
        with contextlib.suppress(ModelError):
            probe(write, "")
        return longest

    return render

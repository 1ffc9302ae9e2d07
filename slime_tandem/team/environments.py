"""What answers between a model's turns: tools and the like, in chat messages. One is built in, others are `module:attribute`.

An environment is a function of the prompt and the chat since then. Its messages stand behind the turn in the senior's own
markup; nobody sampled them (no loss), and each teacher reads them in the markup of its own template.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import re
import threading
from collections.abc import Awaitable, Callable, Sequence

from slime_tandem.config import TaskSpec
from slime_tandem.errors import DataError, EngineError, EnvironmentTimeoutError, ModelError
from slime_tandem.extensions import find, said
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.rollout.drive import NextTurn
from slime_tandem.rollout.writer import TandemWriter
from slime_tandem.types import Message, Prompt

Answer = Sequence[Message] | None
_Returned = Answer | Awaitable[Answer]
Respond = Callable[[Prompt, Sequence[Message]], _Returned]
"""(prompt, chat since the prompt, the model's turn last) -> messages before its next turn; None or none: it is done. They
are of any role but the assistant's; it may be async. Equal arguments must get equal answers, or a run cannot be repeated. It
is called in a thread of its own, coroutines run in an event loop that all share; under slime several calls may be under way."""

_SUM = re.compile(r"(?<![\w.])\d{1,9}(?: ?[-+*] ?\d{1,9}){1,9}(?= ?=)")


def calculator(prompt: Prompt, chat: Sequence[Message]) -> Answer:
    """Works out each sum that the last turn wrote before an equals sign (whole numbers; +, -, *), whatever result it gave.

    >>> calculator(Prompt("p", (), None, "t"), [Message("assistant", " 7+8 =14 ; 4*3-1 = 11 ; <answer>114</answer>")])
    (Message(role='tool', content='7+8 =15 ; 4*3-1 =11'),)
    """
    found = _SUM.findall(chat[-1].content)
    return (Message("tool", " ; ".join(f"{text} ={_value(text)}" for text in found)),) if found else None


def _value(text: str) -> int:
    total = 0
    for sign, product in re.findall(r"([-+]?)([^-+]+)", text.replace(" ", "")):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total


ENVIRONMENTS: dict[str, Respond] = {"calculator": calculator}
"""Built-in values of `tasks[].environment`."""


async def _called(respond: Respond, prompt: Prompt, chat: Sequence[Message]) -> Answer:
    """The answer of `respond`, called in a thread, so that a hanging function holds up neither the event loop nor the exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[_Returned, BaseException | None]] = loop.create_future()

    def deliver(outcome: tuple[_Returned, BaseException | None]) -> None:
        if not done.done():  # nobody waits any more after a time-out
            done.set_result(outcome)

    def work() -> None:
        outcome: tuple[_Returned, BaseException | None]
        try:
            outcome = respond(prompt, chat), None
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(deliver, outcome)

    # Not `asyncio.to_thread`: the interpreter waits for its threads before it exits.
    threading.Thread(target=work, name="environment", daemon=True).start()
    answer, error = await done
    if error is not None:
        raise error
    if not inspect.isawaitable(answer):
        return answer
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_finished(answer), _coroutines()))


async def _finished(answer: Awaitable[Answer]) -> Answer:
    return await answer


@functools.cache
def _coroutines() -> asyncio.AbstractEventLoop:
    """The event loop, in a thread, of the environments' coroutines: one that blocks holds up its like, and not the run."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def _is_message(value: object) -> bool:
    if not (isinstance(value, Message) and isinstance(value.content, str) and value.role in ("user", "tool", "system")):
        return False
    try:
        value.content.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no tokenizer takes
        return False
    return True


class Environments:
    """The environments of a run's tasks, as `rollout.drive` asks for them; raises ConfigError as `extensions.find`.

    `student` writes the messages in the senior's markup; `timeout_s`: seconds that one answer may take.
    """

    def __init__(self, specs: Sequence[TaskSpec], student: ModelTokenizer, *, timeout_s: float = 60.0) -> None:
        self._specs, self._student, self.timeout_s = specs, student, timeout_s
        self._responds = {
            i: find(spec.environment, ENVIRONMENTS, f"tasks.{i}.environment")
            for i, spec in enumerate(specs)
            if spec.environment is not None
        }

    async def __call__(self, writer: TandemWriter) -> NextTurn | None:
        """What comes before the next turn of this response; None if it is complete.

        Raises EnvironmentTimeoutError after `timeout_s` (this response fails; a function that hangs cannot be stopped
        and goes on in its thread); DataError for an environment that raises, or answers anything but messages; ModelError if
        the senior's template refuses these.
        """
        index = writer.prompt.metadata.get("spec", -1)
        if index not in self._responds:
            return None
        respond, spec, so_far = self._responds[index], self._specs[index], writer.chat
        if sum(m.role == "assistant" for m in so_far) >= spec.max_turns:
            return None
        where = f"environment {spec.environment} at prompt {writer.prompt.prompt_id}"
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                # A copy: what a function does to its arguments is no part of the run.
                messages = await _called(respond, copy.deepcopy(writer.prompt), so_far)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # not the environment's own: we are to stop
            if limit.expired():
                expected = f"an answer within engine.environment_timeout_s={self.timeout_s:g}"
                remedy = "mend the function, raise the limit, or set sampling.on_failed_sample=drop_sample"
                raise EnvironmentTimeoutError(where, "none", expected, remedy) from None
            raise DataError(where, said(error), "messages or None", "mend the function") from error
        if messages is None:
            return None
        if not isinstance(messages, Sequence) or not all(map(_is_message, messages)):
            raise DataError(
                where,
                messages,
                "a sequence of Message of the roles tool, user or system with text that UTF-8 can write, or None",
                "mend the function",
            )
        if not messages:
            return None
        chat = self._student.chat()
        try:
            ids = chat.next_turn(messages, writer.response_ids[-1])
        except ModelError as error:
            if chat.text_markers != "refuse" or not chat.count_markers(messages, environment=True):
                raise
            raise EngineError(where, error.value, error.expected, error.remedy) from error  # this response fails
        return NextTurn(ids, messages)

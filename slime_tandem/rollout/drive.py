"""Drivers of the co-writing loop: ask the engines for what the writers want, and lose no sample on the way.

`write_one` drives a single response as its own task. `write_lockstep` asks each engine once per round with a batch of all
responses that wait for it; that fixes which sequences an engine computes together, so a run repeats bit for bit.

A request that its engine refuses, or answers unusably after the client's repeats, fails its own sample: the result list holds a
`FailedSample` with the reason in its place. An engine that cannot be reached, or serves other weights, stops the rollout.

An answer that the engine aborted on its own (`finish_reason` abort, and nobody here wanted that) is a part of one: it is thrown
away and asked for again, which gives the same tokens, and after `MOST_ABORTS` in a row the sample has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from slime_tandem.errors import EngineError, EngineUnavailableError, WeightVersionError
from slime_tandem.protocol import Engine, GenerateRequest, GenerateResult
from slime_tandem.rollout.answers import ROLE
from slime_tandem.rollout.writer import TandemWriter
from slime_tandem.types import JUNIOR, SENIOR, FailedSample, Message, TandemSample

MOST_ABORTS = 3
"""Answers to one request that its engine may abort."""
Aborted = Callable[[], bool]
"""Whether who asks for the responses wants them to end now: an aborted answer is then taken as it is."""


@dataclass(frozen=True)
class NextTurn:
    """Text between two turns: its ids in the senior's vocabulary, and the chat messages that it shows."""

    ids: Sequence[int]
    messages: Sequence[Message] = ()


Environment = Callable[[TandemWriter], Awaitable[NextTurn | Sequence[int] | None]]
"""Called when a turn ended with a stop: what to insert before the next turn (ids alone if no teacher needs the messages),
or None when the response is complete."""


async def write_one(
    writer: TandemWriter,
    engines: Mapping[int, Engine],
    *,
    senior_version: str | None = None,
    environment: Environment | None = None,
    aborted: Aborted = lambda: False,
    on_part: Callable[[TandemWriter], None] = lambda writer: None,
) -> TandemSample:
    """Write one response, free-running. `engines` maps SENIOR and JUNIOR to an engine; `on_part` hears of each answer that does
    not end the response (a teacher can read what is there while the rest is written).

    With `aborted` the sample may be a part, with the finish reason abort, that `TandemWriter.resume` goes on with. Raises
    EngineError kinds of the engines, WeightVersionError if the senior serves other weights than `senior_version`.
    """
    aborts = 0
    while not writer.done:
        author, request = writer.next_request()
        (result,) = await engines[author].generate([request])
        if (aborts := _aborts(author, result, aborts, aborted)) == 0:
            _check_version(author, result, senior_version)
            await _accept(writer, result, environment)
            if not writer.done:
                on_part(writer)
    return writer.sample()


async def write_lockstep(
    writers: Sequence[TandemWriter],
    engines: Mapping[int, Engine],
    *,
    senior_version: str | None = None,
    environment: Environment | None = None,
    aborted: Aborted = lambda: False,
    on_round: Callable[[int], None] | None = None,
    on_finished: Callable[[int, TandemSample], None] | None = None,
) -> list[TandemSample | FailedSample]:
    """Write many responses in rounds: one batched request per engine and round, both engines at the same time.

    One result per writer, in order. `on_round` is called with the number of finished responses, `on_finished` with the
    place and the sample of each response as it finishes (a teacher can read it while others are written). Raises
    EngineUnavailableError and WeightVersionError; other EngineErrors fail their own sample.
    """
    failed: dict[int, str] = {}
    aborts = [0] * len(writers)
    while pending := [i for i, w in enumerate(writers) if not w.done and i not in failed]:
        waiting: dict[int, list[tuple[int, GenerateRequest]]] = {SENIOR: [], JUNIOR: []}
        for i in pending:
            try:
                author, request = writers[i].next_request()
            except EngineError as error:
                failed[i] = str(error)
                continue
            waiting[author].append((i, request))
        busy = [author for author, items in waiting.items() if items]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {a: group.create_task(_ask(engines[a], [r for _, r in waiting[a]])) for a in busy}
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        for author, task in tasks.items():
            for (i, _), result in zip(waiting[author], task.result(), strict=True):
                try:
                    if isinstance(result, EngineError):
                        raise result
                    aborts[i] = _aborts(author, result, aborts[i], aborted)
                    if aborts[i]:
                        continue
                    _check_version(author, result, senior_version)
                    await _accept(writers[i], result, environment)
                except WeightVersionError:
                    raise
                except EngineError as error:
                    failed[i] = str(error)
                    continue
                if on_finished is not None and writers[i].done:
                    on_finished(i, writers[i].sample())
        if on_round is not None:
            on_round(sum(w.done or i in failed for i, w in enumerate(writers)))
    return [
        FailedSample(w.key, w.group_id, w.prompt, failed[i]) if i in failed else w.sample()
        for i, w in enumerate(writers)
    ]


async def _ask(engine: Engine, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
    """All answers of one engine; where it fails as a whole, each request is asked alone to find whose fault it is."""
    try:
        return list(await engine.generate(requests))
    except (EngineUnavailableError, WeightVersionError):
        raise
    except EngineError as error:
        if len(requests) == 1:
            return [error]
    return [answer for request in requests for answer in await _ask(engine, [request])]


async def _accept(writer: TandemWriter, result: GenerateResult, environment: Environment | None) -> None:
    writing = writer.finish_reason is None
    writer.accept(result)
    if environment is not None and writing and writer.finish_reason == "stop":
        turn = await environment(writer)
        if isinstance(turn, NextTurn):
            writer.insert(turn.ids, turn.messages)
        elif turn is not None:
            writer.insert(turn)


def _aborts(author: int, result: GenerateResult, before: int, aborted: Aborted) -> int:
    """How often in a row a request was aborted by its engine alone, this answer included; 0 for an answer that is taken."""
    if result.finish_reason != "abort" or aborted():
        return 0
    if before + 1 < MOST_ABORTS:
        return before + 1
    raise EngineError(
        f"{ROLE[author]} answer to {result.rid}",
        f"aborted by its server, {MOST_ABORTS} times",
        "an answer",
        "look at that server's log (out of memory, a time limit, somebody else's abort)",
    )


def _check_version(author: int, result: GenerateResult, expected: str | None) -> None:
    if author == SENIOR and expected is not None and result.weight_version != expected:
        raise WeightVersionError(
            "senior weight_version",
            result.weight_version,
            repr(expected),
            "the server was restarted or updated by somebody else; send the weights again",
        )

"""Sessions carry the same context with fewer bytes, survive a server that forgot them, and are closed on every path."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.sessions import SessionEngine, _common_prefix
from slime_tandem.errors import EngineRejectedError
from slime_tandem.protocol import GenerateRequest, GenerateResult

from ..in_process import ThreadServer


def request(n: int, ids: tuple[int, ...], **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"max_new_tokens": 3, "sampling_seed": 11, "conversation": "c", **changes}
    return GenerateRequest(f"r{n}", ids, **fields)


async def dialogue(ask: Callable[[GenerateRequest], Awaitable[GenerateResult]]) -> list[GenerateResult]:
    """Append, cut back over dropped tokens and go on otherwise, score what was added."""
    results = [await ask(request(0, (5, 6, 7)))]
    a = (5, 6, 7, *results[0].output_ids)
    results.append(await ask(request(1, (*a, 8, 9))))
    b = (*a, 8, 9, *results[1].output_ids[:1])
    results.append(await ask(request(2, (*b, 40, 41), logprob_start_len=len(b) - 1)))
    results.append(await ask(request(3, b)))
    results.append(await ask(request(4, (9, 9, 9))))
    return results


def bare(result: GenerateResult) -> GenerateResult:
    return dataclasses.replace(result, served_rid="", cached_tokens=0)


def run(server: ThreadServer, use: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with EngineClient(server.url) as client:
            return await use(client)

    return asyncio.run(main())


def test_a_session_gives_what_whole_contexts_give(server: ThreadServer) -> None:
    async def use(client: EngineClient) -> tuple[list[GenerateResult], list[GenerateResult]]:
        async def whole(r: GenerateRequest) -> GenerateResult:
            return (await client.generate([r]))[0]

        plain = await dialogue(whole)
        async with SessionEngine(client) as engine:

            async def short(r: GenerateRequest) -> GenerateResult:
                return (await engine.generate([r]))[0]

            return plain, await dialogue(short)

    plain, kept = run(server, use)
    for p, k in zip(plain, kept, strict=True):
        assert (p.output_ids, p.finish_reason, p.prompt_tokens) == (k.output_ids, k.finish_reason, k.prompt_tokens)
        assert p.output_log_probs == pytest.approx(k.output_log_probs, abs=1e-5)
        assert p.input_ids == k.input_ids
        assert p.input_log_probs == pytest.approx(k.input_log_probs, abs=1e-5)


def test_bytes_grow_linearly_with_the_response(server: ThreadServer) -> None:
    async def bytes_sent(client: EngineClient, rounds: int) -> int:
        before, ids = client.bytes_sent, (5, 6, 7)
        async with SessionEngine(client) as engine:
            for n in range(rounds):
                (result,) = await engine.generate([request(n, ids, max_new_tokens=2)])
                ids += result.output_ids
        return client.bytes_sent - before

    async def use(client: EngineClient) -> tuple[int, int]:
        return await bytes_sent(client, 20), await bytes_sent(client, 80)

    short, long = run(server, use)
    assert long < 4.2 * short


async def _is_closed(client: EngineClient, engine_sessions: list[str]) -> bool:
    for name in engine_sessions:
        with pytest.raises(EngineRejectedError, match="id of an open session"):
            await client.generate([request(9, (5,), session_params={"id": name})])
    return True


@pytest.mark.parametrize("how", ["success", "error", "cancel"])
def test_sessions_are_closed_on_every_path(server: ThreadServer, how: str) -> None:
    async def use(client: EngineClient) -> None:
        names: list[str] = []
        began = asyncio.Event()

        async def work() -> None:
            async with SessionEngine(client) as engine:
                await engine.generate([request(0, (5, 6), conversation="a"), request(1, (5, 7), conversation="b")])
                names.extend(s.id for s in engine._sessions.values())
                began.set()
                if how == "error":
                    raise ZeroDivisionError
                if how == "cancel":
                    await asyncio.sleep(3600)

        task = asyncio.create_task(work())
        await began.wait()
        if how == "cancel":
            task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        assert (
            type(outcome) is {"success": type(None), "error": ZeroDivisionError, "cancel": asyncio.CancelledError}[how]
        )
        assert len(names) == 2
        assert await _is_closed(client, names)

    run(server, use)


def test_a_session_that_the_server_forgot_is_opened_anew(server: ThreadServer) -> None:
    async def use(client: EngineClient) -> None:
        async with SessionEngine(client) as engine:
            (first,) = await engine.generate([request(0, (5, 6, 7))])
            ids = (5, 6, 7, *first.output_ids)
            old = engine._sessions["c"].id
            await client.close_session(old)
            (second,) = await engine.generate([request(1, ids)])
            assert second.prompt_tokens == len(ids)
            assert engine._sessions["c"].id != old
            with pytest.raises(EngineRejectedError):
                await engine.generate([request(2, (10**9,))])

    run(server, use)


def test_an_aborted_turn_is_not_built_upon(server: ThreadServer) -> None:
    async def use(client: EngineClient) -> None:
        async with SessionEngine(client) as engine:
            (first,) = await engine.generate([request(0, (5, 6, 7))])
            ids = (5, 6, 7, *first.output_ids)
            running = asyncio.create_task(engine.generate([request(1, ids, max_new_tokens=200)]))
            await asyncio.sleep(0.05)
            await client.abort("r1")
            (aborted,) = await running
            assert aborted.finish_reason in ("abort", "stop", "length")
            (again,) = await engine.generate([request(2, (*ids, *aborted.output_ids))])
            assert again.prompt_tokens == len(ids) + len(aborted.output_ids)

    run(server, use)


def test_requests_without_a_conversation_pass_through(server: ThreadServer) -> None:
    async def use(client: EngineClient) -> None:
        async with SessionEngine(client) as engine:
            (result,) = await engine.generate([request(0, (5, 6, 7), conversation=None)])
            (plain,) = await client.generate([request(0, (5, 6, 7), conversation=None)])
            assert bare(result).output_ids == bare(plain).output_ids
            assert engine._sessions == {}

    run(server, use)


@given(
    st.lists(st.integers(0, 2), max_size=12).map(tuple), st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)
)
def test_the_common_prefix_leaves_something_to_send(stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    n = _common_prefix(stored, wanted)
    expected = 0
    while expected < min(len(stored), len(wanted) - 1) and stored[expected] == wanted[expected]:
        expected += 1
    assert n == expected

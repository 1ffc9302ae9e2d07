"""Calls of one turn of the loop in one HTTP request: the answers of single requests, and faults stay with who has them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime_tandem.engines.gathering import GatheringClient
from slime_tandem.errors import EngineRejectedError, EngineUnavailableError
from slime_tandem.protocol import GenerateRequest, GenerateResult

BAD = 666


def answer(rid: str, ids: list[int]) -> dict[str, Any]:
    meta = {
        "id": rid, "finish_reason": {"type": "length"}, "weight_version": "1", "prompt_tokens": len(ids),
        "output_token_logprobs": [[-0.5, sum(ids), None]],
    }  # fmt: skip
    return {"text": "", "output_ids": [sum(ids)], "meta_info": meta}


def played(use: Any, status: int = 400) -> tuple[Any, list[list[list[int]]]]:
    """What `use(client)` gives beside a server that adds ids up and refuses BAD; and the ids of each HTTP request."""
    asked: list[list[list[int]]] = []

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body["input_ids"])
        if any(BAD in ids for ids in body["input_ids"]):
            return web.json_response({"error": {"message": "bad"}}, status=status)
        return web.json_response([answer(r, i) for r, i in zip(body["rid"], body["input_ids"], strict=True)])

    async def main() -> Any:
        app = web.Application()
        app.router.add_post("/generate", generate)
        async with TestServer(app) as server, GatheringClient(str(server.make_url("/")), max_retries=0) as client:
            return await use(client)

    return asyncio.run(main()), asked


async def one(client: GatheringClient, *ids: int) -> GenerateResult:
    [result] = await client.generate([GenerateRequest("-".join(map(str, ids)), ids, 1)])
    return result


def test_what_is_asked_in_one_turn_travels_together_and_each_gets_its_own_answer() -> None:
    async def use(client: GatheringClient) -> Any:
        first = await asyncio.gather(*(one(client, i, 7) for i in range(5)))
        return [r.output_ids for r in (*first, await one(client, 100))]

    got, asked = played(use)
    assert got == [(i + 7,) for i in range(5)] + [(100,)]
    assert asked == [[[i, 7] for i in range(5)], [[100]]]


def test_a_request_that_is_refused_fails_alone() -> None:
    async def use(client: GatheringClient) -> Any:
        return await asyncio.gather(*(one(client, i) for i in (1, BAD, 3)), return_exceptions=True)

    (a, refused, b), asked = played(use)
    assert (a.output_ids, b.output_ids) == ((1,), (3,))
    assert isinstance(refused, EngineRejectedError)
    assert asked == [[[1], [BAD], [3]], [[1]], [[BAD]], [[3]]]


def test_a_server_that_does_not_answer_is_told_to_all_of_a_batch() -> None:
    async def use(client: GatheringClient) -> Any:
        return await asyncio.gather(*(one(client, i) for i in (1, BAD)), return_exceptions=True)

    errors, asked = played(use, status=500)
    assert [type(e) for e in errors] == [EngineUnavailableError] * 2
    assert len(asked) == 1


def test_who_gives_up_leaves_the_others_their_answers() -> None:
    async def use(client: GatheringClient) -> Any:
        stays, goes = asyncio.create_task(one(client, 1)), asyncio.create_task(one(client, 2))
        await asyncio.sleep(0)
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        return (await stays).output_ids

    assert played(use)[0] == (1,)

"""All workers of a router as one engine: who is asked, what happens when one goes, and what is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime_tandem.distill.candidates import ExactQuery, exact_log_probs
from slime_tandem.errors import ConfigError, EngineUnavailableError
from slime_tandem.protocol import GenerateRequest, GenerateResult, IdsAt
from slime_tandem.slime_hooks.pool import WorkerPool


class Client:
    """A worker that answers with its address, until it is dead."""

    dead: ClassVar[set[str]] = set()

    def __init__(self, url: str) -> None:
        self.url, self.asked = url, 0

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        if self.url in self.dead:
            raise EngineUnavailableError("server", self.url, "an answer", "start it")
        self.asked += 1
        return [GenerateResult(r.rid, (1,), (-1.0,), "stop", self.url) for r in requests]

    async def model_info(self) -> dict[str, Any]:
        return {"model_path": self.url}


def with_router(workers: list[dict[str, Any]], use: Any, status: int = 200) -> Any:
    """Run `use(pool, workers)` beside a router that lists `workers`, which may be changed meanwhile."""

    async def run() -> Any:
        async def listed(_: web.Request) -> web.Response:
            return web.json_response({"workers": workers}, status=status)

        app = web.Application()
        app.router.add_get("/workers", listed)
        async with TestServer(app) as server, WorkerPool(str(server.make_url("/")), Client, role="senior") as pool:  # type: ignore[arg-type]
            return await use(pool)

    Client.dead = set()
    return asyncio.run(run())


def requests(n: int) -> list[GenerateRequest]:
    return [GenerateRequest(f"r{i}", (1,), 1, conversation=f"c{i % (n // 2)}") for i in range(n)]


def urls(*names: str) -> list[dict[str, Any]]:
    return [{"url": f"http://{name}", "worker_type": "regular"} for name in names]


def test_a_response_stays_with_its_worker_and_all_are_used() -> None:
    async def use(pool: WorkerPool) -> Any:
        assert (await pool.model_info())["model_path"] == "http://a"
        return await pool.generate(requests(40))

    results = with_router(urls("a", "b", "c"), use)
    assert [r.rid for r in results] == [f"r{i}" for i in range(40)], "answers come in the order of the requests"
    served = [r.weight_version for r in results]
    assert served[:20] == served[20:], "the same conversation, the same worker"
    assert set(served) == {"http://a", "http://b", "http://c"}


def test_a_worker_that_was_replaced_is_found_and_one_that_is_only_dead_is_reported() -> None:
    workers = urls("a", "b")

    async def use(pool: WorkerPool) -> Any:
        Client.dead = {"http://b"}
        with pytest.raises(EngineUnavailableError, match="http://b"):
            await pool.generate(requests(20))
        workers[1:] = urls("d")
        return {r.weight_version for r in await pool.generate(requests(20))}

    assert with_router(workers, use) == {"http://a", "http://d"}


@pytest.mark.parametrize(
    ("workers", "status", "error", "message"),
    [
        ([], 200, EngineUnavailableError, "a worker"),
        ([{"url": "http://a", "worker_type": "prefill"}], 200, ConfigError, "worker_type of senior http://a='prefill'"),
        ([{"no": "url"}], 200, EngineUnavailableError, "a list of workers"),
    ],
)
def test_what_cannot_be_used_is_refused(workers: list[Any], status: int, error: type[Exception], message: str) -> None:
    async def use(pool: WorkerPool) -> None:
        raise AssertionError("not reached")

    with pytest.raises(error, match=message):
        with_router(workers, use, status)


@pytest.mark.parametrize("stride", [1, 2, 10, 100])
def test_responses_are_spread_evenly_whatever_the_workers_are_called(stride: int) -> None:
    async def use(pool: WorkerPool) -> list[int]:
        names = [f"7-{i // 64}-{i}" for i in range(4000)]
        served = Counter(pool.worker_of(GenerateRequest("r", (1,), 1, conversation=name)) for name in names)
        return list(served.values())

    counts = with_router(urls(*(f"10.0.0.1:{15000 + stride * i}" for i in range(8))), use)
    assert len(counts) == 8
    # 500 on average, 21 the deviation of a fair draw.
    assert min(counts) > 400
    assert max(counts) < 600


def test_exact_values_of_a_response_are_asked_for_where_it_was_read() -> None:
    async def use(pool: WorkerPool) -> Any:
        query = ExactQuery("score-1-2-3", [9], [2] * 100, IdsAt.of([[1]] * 100), "1-2-3")
        await exact_log_probs(pool, [query], role="teacher")

    asked: list[GenerateRequest] = []

    class Reading(WorkerPool):
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
            asked.extend(requests)
            return [
                GenerateResult(
                    r.rid, (), (), "length", "1", input_token_ids_logprobs=(((-1.0, 1),),) * (len(r.input_ids))
                )
                for r in requests
            ]

    pool = Reading("http://router", Client, role="teacher")  # type: ignore[arg-type]
    pool._clients = {f"http://{i}": Client(f"http://{i}") for i in range(8)}  # type: ignore[misc]
    asyncio.run(use(pool))
    whole = GenerateRequest("score-1-2-3", (9,), 0, conversation="1-2-3")
    assert len(asked) > 3, "several windows"
    assert {pool.worker_of(r) for r in asked} == {pool.worker_of(whole)}

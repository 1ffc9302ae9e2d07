"""All workers of a router as one engine: who is asked, what happens when one goes, and what is refused."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime_tandem.config import SamplingConfig
from slime_tandem.distill.candidates import ExactQuery, exact_log_probs
from slime_tandem.errors import ConfigError, EngineUnavailableError
from slime_tandem.protocol import GenerateRequest, GenerateResult, IdsAt
from slime_tandem.rollout.drive import write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.slime_hooks import pool as module
from slime_tandem.slime_hooks.pool import WorkerPool
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR, Prompt, SampleKey


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

    async def health(self) -> bool:
        return self.url not in self.dead

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


def test_a_dead_worker_that_is_still_listed_is_done_without_and_taken_again_when_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = urls("a", "b")

    async def served(pool: WorkerPool) -> set[str]:
        results = await pool.generate(requests(20))
        assert [r.rid for r in results] == [f"r{i}" for i in range(20)], "none lost, none twice"
        return {r.weight_version for r in results}

    async def use(pool: WorkerPool) -> Any:
        Client.dead = {"http://b"}
        seen = [await served(pool)]
        Client.dead = set()
        seen.append(await served(pool))  # it is not looked at again so soon
        monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.0)
        seen.append(await served(pool))
        Client.dead = {"http://b"}
        workers[1:] = urls("d")
        await served(pool)
        seen.append(await served(pool))
        return seen

    a, b, d = "http://a", "http://b", "http://d"
    assert with_router(workers, use) == [{a}, {a}, {a, b}, {a, d}]


def test_where_no_worker_answers_that_is_said_unless_the_router_has_another_one() -> None:
    workers = urls("a", "b")

    async def use(pool: WorkerPool) -> Any:
        Client.dead = {"http://a", "http://b"}
        with pytest.raises(EngineUnavailableError, match=r"http://[ab]"):
            await pool.generate(requests(20))
        workers[1:] = urls("d")
        return {r.weight_version for r in await pool.generate(requests(20))}

    assert with_router(workers, use) == {"http://d"}


def test_no_response_is_lost_doubled_or_changed_whichever_worker_dies_at_whichever_request() -> None:
    """Two workers that draw by seed and position; one of them dies for good while responses are written."""
    tokens = TokenBytes(
        (None, *(b" %c" % c if c % 3 else b"%c" % c for c in b"abcdefg")), frozenset({0}), frozenset({0})
    )
    rule = HandoffRule.of("word", 0.5, 4, 3, frozenset(i for i, t in enumerate(tokens.table) if t and t[:1] == b" "))
    handed_out: Counter[str] = Counter()

    class Drawing(Client):
        left: ClassVar[dict[str, float]] = {}

        async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
            if self.left[self.url] <= 0:
                raise EngineUnavailableError("server", self.url, "an answer", "start it")
            self.left[self.url] -= 1
            await asyncio.sleep(0)
            handed_out.update(r.rid for r in requests)
            return [drawn(r) for r in requests]

    def drawn(r: GenerateRequest) -> GenerateResult:
        ids = tuple((r.sampling_seed or 0) * 7 + (len(r.input_ids) + i) ** 2 * 31 for i in range(r.max_new_tokens))
        ids = tuple(i % 7 + 1 for i in ids)
        return GenerateResult(r.rid, ids, tuple(-0.1 * (i + 1) for i in ids), "length", "1")

    async def write(pool: WorkerPool) -> list[Any]:
        writers = [
            TandemWriter(
                SampleKey(7, 0, i), 0, Prompt("q", (), None, "t"), [3, 4],
                WriterOptions(rule, SamplingConfig(max_new_tokens=12), tokens),
            )
            for i in range(6)
        ]  # fmt: skip
        return await asyncio.gather(*(write_one(w, {SENIOR: pool, JUNIOR: pool}) for w in writers))

    async def run(worker: str, requests_until_death: float) -> list[Any]:
        handed_out.clear()
        Drawing.left = {"http://a": math.inf, "http://b": math.inf, f"http://{worker}": requests_until_death}
        pool = WorkerPool("http://router", Drawing, role="senior")  # type: ignore[arg-type]
        pool._clients = {url: Drawing(url) for url in ("http://a", "http://b")}  # type: ignore[misc]
        samples = await write(pool)
        assert set(handed_out.values()) == {1}, "an answer that came is not asked for again"
        return samples

    want = asyncio.run(run("a", math.inf))
    assert len({s.key for s in want}) == 6
    for worker in "ab":
        for at in range(12):
            assert asyncio.run(run(worker, at)) == want


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

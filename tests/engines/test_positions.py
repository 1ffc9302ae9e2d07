"""Ids of each position's own: found by what a server answers, and the same values as by windows, in one request."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_tandem.distill.candidates import ExactQuery, exact_log_probs
from slime_tandem.engines.client import EngineClient
from slime_tandem.errors import EngineUnavailableError
from slime_tandem.protocol import CandidateLists, IdsAt

KINDS = ("knows", "passes over it", "refuses it", "counts from the next", "shifts the values", "other ids")


def value(ids: list[int], at: int, token: int) -> float:
    """The log-prob of `token` at position `at` of `ids`: anything that depends on both and on what stands before."""
    return -0.25 - (sum((k + 1) * i for k, i in enumerate(ids[:at])) * 31 + token * 17) % 101 / 10


def row(ids: list[int], at: int, tokens: list[int]) -> list[list[Any]]:
    return [[value(ids, at, t), t, None] for t in tokens]


def server(kind: str, seen: list[dict[str, Any]]) -> web.Application:
    """SGLang as it is (a list of sequences, one flat list of ids each), and with its field for positions of a single one."""

    def answer(rid: str, ids: list[int], start: int, flat: list[int] | None, positions: list[list[int]] | None) -> Any:
        meta: dict[str, Any] = {
            "id": rid, "finish_reason": {"type": "length"}, "weight_version": "1", "prompt_tokens": len(ids),
            "input_token_logprobs": [[None if at == 0 else -1.0, ids[at], None] for at in range(start, len(ids))],
        }  # fmt: skip
        if flat:
            meta["input_token_ids_logprobs"] = [row(ids, at, flat) if at else None for at in range(start, len(ids))]
        if positions is not None and kind != "passes over it":
            by = 1 if kind == "counts from the next" else 0
            moved = 1 if kind == "shifts the values" else 0
            wanted = [*positions[by:], *([[]] * by)]
            wanted = [sorted({t + 1 for t in w}) for w in wanted] if kind == "other ids" else wanted
            rows = [row(ids, at + moved, wanted[at]) for at in range(start, len(ids))]
            meta["input_token_ids_logprobs"] = [r or None for r in rows] if start else rows
        return {"text": "", "output_ids": [], "meta_info": meta}

    async def generate(request: web.Request) -> web.Response:
        b = await request.json()
        seen.append(b)
        if "token_ids_logprob_positions" in b:
            if kind == "refuses it":
                return web.json_response({"error": {"message": "unknown field"}}, status=400)
            assert len(b["token_ids_logprob_positions"]) == len(b["input_ids"])
            assert "token_ids_logprob" not in b
            ids, start = b["input_ids"], b["logprob_start_len"]
            return web.json_response(answer(b["rid"], ids, start, None, b["token_ids_logprob_positions"]))
        flat = b.get("token_ids_logprob") or [None] * len(b["rid"])
        columns = (b["rid"], b["input_ids"], b["logprob_start_len"], flat)
        return web.json_response([answer(*each, None) for each in zip(*columns, strict=True)])

    app = web.Application()
    app.router.add_post("/generate", generate)
    return app


def exact(kind: str, queries: list[ExactQuery]) -> tuple[list[Any], list[dict[str, Any]]]:
    seen: list[dict[str, Any]] = []

    async def main() -> list[Any]:
        async with (
            TestServer(server(kind, seen)) as there,
            EngineClient(str(there.make_url("/")), max_retries=0) as client,
        ):
            return [r for _ in range(2) for r in await exact_log_probs(client, queries, role="teacher")]

    return asyncio.run(main()), seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_knows_positions_is_asked_once_a_response_and_any_other_in_windows(kind: str) -> None:
    wanted = [[(7 * i) % 90 + 3, (7 * i) % 90 + 5] if i % 3 else [] for i in range(200)]
    query = ExactQuery("score", [4, 9, 2], [5 + i % 50 for i in range(200)], IdsAt.of(wanted))
    results, seen = exact(kind, [query])
    ids = [*query.prompt, *query.response]
    want = [value(ids, 3 + at, t) for at, row_ in enumerate(wanted) for t in row_]
    for result in results:
        assert isinstance(result, CandidateLists)
        np.testing.assert_array_equal(result.values, want)
    at_once = [b for b in seen if len(b.get("token_ids_logprob_positions", ())) > 4]
    tried = [b for b in seen if len(b.get("token_ids_logprob_positions", ())) == 4]
    assert len(tried) == 1, "the server is tried once"
    if kind == "knows":
        assert len(at_once) == 2
        assert len(seen) == 4, "two to try it, one for each of two"
        assert sum(map(len, at_once[0]["token_ids_logprob_positions"])) == len(want)
    else:
        assert not at_once


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.lists(st.integers(0, 99), max_size=3, unique=True), min_size=3, max_size=60), max_size=3))
def test_both_ways_give_the_same_values(wanted: list[list[list[int]]]) -> None:
    queries = [
        ExactQuery(f"q{n}", [1, 2], [(3 * i + n) % 70 for i in range(len(rows))], IdsAt.of([sorted(r) for r in rows]))
        for n, rows in enumerate(wanted)
    ]
    by_windows, _ = exact("passes over it", queries)
    at_once, _ = exact("knows", queries)
    for a, b in zip(by_windows, at_once, strict=True):
        np.testing.assert_array_equal(a.values, b.values)
        np.testing.assert_array_equal(a.ids, b.ids)


def test_a_server_that_is_away_is_not_one_that_does_not_know() -> None:
    async def main() -> None:
        async with EngineClient("http://127.0.0.1:9", max_retries=0) as client:
            with pytest.raises(EngineUnavailableError):
                await client.scores_positions([1, 2, 3, 4])
            assert client._positions is None

    asyncio.run(main())

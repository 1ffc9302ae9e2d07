"""The client against a server that follows a script: retries, refusals, and answers that must not be believed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.engines import client as client_module
from slime_tandem.engines.client import EngineClient
from slime_tandem.errors import EngineError, EngineRejectedError, EngineUnavailableError, WeightVersionError
from slime_tandem.protocol import GenerateRequest

Step = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def answer(rid: str, ids: list[int] | None = None, **meta: Any) -> dict[str, Any]:
    ids = [7, 8] if ids is None else ids
    return {
        "text": "ab",
        "output_ids": ids,
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 3,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "3",
            "output_token_logprobs": [[-0.5 * (i + 1), t, None] for i, t in enumerate(ids)],
            **meta,
        },
    }


def say(value: Any, status: int = 200) -> Step:
    """Always `value`; answers to the request "r" bear the name that it has on the wire."""

    async def step(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = json.dumps(value)
        for rid in body.get("rid", []):
            text = text.replace('"id": "r"', f'"id": "{rid}"')
        return web.Response(text=text, status=status, content_type="application/json")

    return step


async def good(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response([answer(rid) for rid in body["rid"]])


async def drop(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def hang(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


def play(
    script: list[Step],
    use: Callable[[EngineClient], Awaitable[Any]] | None = None,
    **options: Any,
) -> tuple[Any, EngineClient, list[dict[str, Any]]]:
    """Run `use` (one generate call by default) against a server that takes the steps in turn; also what it received."""
    received: list[dict[str, Any]] = []
    left = iter(script)

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        received.append(body)
        return await next(left)(request, body)

    async def main() -> tuple[Any, EngineClient]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        async with TestServer(app, shutdown_timeout=0.1) as server:
            settings = {"backoff_s": 0.001, "timeout_s": 5.0, "role": "teacher", **options}
            async with EngineClient(str(server.make_url("/")), **settings) as client:
                run = use or (lambda c: c.generate([GenerateRequest("r", (1, 2, 3), 2)]))
                return await run(client), client

    result, client = asyncio.run(main())
    return result, client, received


def test_a_batch_is_one_request_and_comes_back_in_order() -> None:
    requests = [GenerateRequest(f"r{i}", (1, 2, 3), 2, sampling_seed=i, top_k=i + 1) for i in range(3)]
    results, client, received = play([good], lambda c: c.generate(requests))
    assert [r.rid for r in results] == ["r0", "r1", "r2"]
    assert results[0].output_log_probs == (-0.5, -1.0)
    assert (results[0].weight_version, results[0].finish_reason, client.retries) == ("3", "length", 0)
    [body] = received
    assert body["input_ids"] == [[1, 2, 3]] * 3
    assert [p["sampling_seed"] for p in body["sampling_params"]] == [0, 1, 2]
    assert [p["top_k"] for p in body["sampling_params"]] == [1, 2, 3]
    assert "token_ids_logprob" not in body
    assert play([], lambda c: c.generate([]))[0] == []


@pytest.mark.parametrize(
    "faults",
    [
        [say({"error": {"message": "busy"}}, 503), say("oops", 503)],
        [say("fault", 500)],
        [drop],
        [drop, drop, say("bad gateway", 502)],
    ],
    ids=["503 twice", "500", "disconnect", "mixed"],
)
def test_passing_faults_are_retried(faults: list[Step]) -> None:
    [result], client, received = play([*faults, good])
    assert result.output_ids == (7, 8)
    assert client.retries == len(faults)
    assert client.requests_sent == len(received) == len(faults) + 1
    names = [body.pop("rid")[0] for body in received]
    assert received == [received[0]] * len(received), "the same request, under a name of its own"
    assert len(set(names)) == len(names)
    assert result.served_rid == names[-1]


def test_a_time_out_is_aborted_under_its_name_and_then_retried_under_another() -> None:
    [result], client, received = play([hang, say({}), good], timeout_s=0.2)
    assert result.output_ids == (7, 8)
    assert client.retries == 1
    first, abort, second = received
    assert abort == {"rid": first["rid"][0]}
    assert second["rid"] != first["rid"]


def test_no_name_on_the_wire_is_the_beginning_of_another() -> None:
    """SGLang aborts every request whose name begins with the given one."""
    a, b = EngineClient("http://x"), EngineClient("http://x")
    names = [c._wire_rid(r, n) for c in (a, b) for r in ("1", "10", "1-1") for n in ("0.0", "0.1", "1.0")]
    assert len(set(names)) == len(names)
    assert not any(x != y and y.startswith(x) for x in names for y in names)
    assert all(n.startswith(a._wire_rid("1")) == (i < 3) for i, n in enumerate(names)), (
        "abort reaches every try of its own"
    )


def test_only_the_unusable_answers_of_a_batch_are_asked_for_again() -> None:
    async def lose_one(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answers = [answer(rid) for rid in body["rid"]]
        answers[1]["meta_info"]["output_token_logprobs"].pop(0)
        return web.json_response(answers)

    requests = [GenerateRequest(f"r{i}", (1, 2, i), 2) for i in range(3)]
    results, client, received = play([lose_one, good], lambda c: c.generate(requests))
    assert [r.rid for r in results] == ["r0", "r1", "r2"]
    assert [body["input_ids"] for body in received] == [[[1, 2, 0], [1, 2, 1], [1, 2, 2]], [[1, 2, 1]]]
    assert client.retries == 1


def test_a_closed_idle_connection_is_retried_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_pause(_: float) -> None:
        raise AssertionError("paused before the retry of a stale connection")

    async def use(client: EngineClient) -> Any:
        await client.generate([GenerateRequest("a", (1, 2, 3), 2)])
        with monkeypatch.context() as patch:
            patch.setattr("slime_tandem.engines.client.asyncio.sleep", no_pause)
            return await client.generate([GenerateRequest("b", (1, 2, 3), 2)])

    [result], client, _ = play([good, drop, good], use)
    assert (result.rid, client.retries) == ("b", 1)


@pytest.mark.parametrize("gone", [False, True])
def test_a_server_whose_process_has_ended_is_not_asked_again(gone: bool) -> None:
    async def use(client: EngineClient) -> Any:
        return await client.generate([GenerateRequest("r", (1, 2, 3), 2)])

    if gone:
        with pytest.raises(EngineUnavailableError, match="gave up after 1 tries"):
            play([drop, good], use, gone=lambda: True)
    else:
        [result], client, _ = play([drop, good], use, gone=lambda: False)
        assert (result.rid, client.retries) == ("r", 1)


def test_pauses_double_with_jitter_up_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    async def use(client: EngineClient) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr("slime_tandem.engines.client.asyncio.sleep", note)
            return await client.generate([GenerateRequest("r", (1, 2, 3), 2)])

    play([*[say("", 503)] * 7, good], use, backoff_s=0.2, max_retries=7)
    for pause, full in zip(pauses, [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], strict=True):
        assert full / 2 <= pause <= full


def test_giving_up_names_url_tries_cause_and_remedy() -> None:
    with pytest.raises(EngineUnavailableError) as caught:
        play([say({"error": {"message": "out of memory"}}, 500)] * 3, max_retries=2)
    message = str(caught.value)
    for part in ("teacher", "http://127.0.0.1:", "/generate", "HTTP 500", "out of memory", "3 tries", "Remedy"):
        assert part in message


def test_nobody_there_is_unavailable() -> None:
    async def main() -> None:
        async with EngineClient("http://127.0.0.1:1", max_retries=1, backoff_s=0.001) as client:
            assert not await client.health()
            with pytest.raises(EngineUnavailableError, match="2 tries"):
                await client.generate([GenerateRequest("r", (1,), 1)])
            with pytest.raises(EngineUnavailableError, match="healthy"):
                await client.wait_ready(0.0)
            assert client.retries == 1

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 415, 422])
def test_refusals_are_raised_at_once_with_the_servers_words(status: int) -> None:
    received: list[int] = []

    async def refuse(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        received.append(1)
        return web.json_response({"error": {"message": "input_ids: too long"}}, status=status)

    with pytest.raises(EngineRejectedError) as caught:
        play([refuse, good])
    assert received == [1]
    for part in ("teacher", "/generate", f"HTTP {status}", "input_ids: too long"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (400, "correct the request"),
        (401, "api_key_env"),
        (403, "--allowed-hosts"),
        (413, "ask for less"),
        (415, "proxy"),
    ],
)
def test_a_refusal_says_what_to_do(status: int, remedy: str) -> None:
    with pytest.raises(EngineRejectedError, match=f"Remedy: .*{remedy}"):
        play([say({"error": {"message": "no"}}, status)])


def test_a_body_that_came_too_slowly_is_sent_again() -> None:
    results, _, received = play([say({"error": {"message": "slow"}}, 408), good])
    assert (len(results), len(received)) == (1, 2)


@pytest.mark.parametrize("field", ["input_ids", "stop_token_ids", "token_ids_logprob"])
def test_what_is_too_large_for_one_request_is_sent_in_several(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedded server takes bodies of so many bytes; the answers are those of one request."""
    monkeypatch.setattr(client_module, "_MOST_IDS", 20)

    async def answer_all(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        empty = {"output_token_ids_logprobs": [[[-1.0, 1, None]]] * 2}
        return web.json_response([answer(rid, **empty) for rid in body["rid"]])

    fields: dict[str, Any] = {"input_ids": (1, 2, 3), field: tuple(range(1, 9))}
    requests = [GenerateRequest(f"r{i}", max_new_tokens=2, **fields) for i in range(5)]
    results, _, received = play([answer_all] * 5, lambda c: c.generate(requests))
    assert [result.rid for result in results] == [f"r{i}" for i in range(5)]
    assert sorted(len(body["rid"]) for body in received) == ([1, 2, 2] if field == "input_ids" else [1] * 5)
    [one] = play([answer_all], lambda c: c.generate([requests[0]]))[0]
    assert one.rid == "r0"


BAD_ANSWERS: dict[str, tuple[Any, str]] = {
    "no list": (answer("r"), "list of 1"),
    "too many": ([answer("r"), answer("r")], "2 answers"),
    "no meta": ([{"text": ""}], "meta_info"),
    "other id": ([answer("x")], "meta_info.id"),
    "unknown finish": ([answer("r", finish_reason={"type": "later"})], "finish_reason"),
    "no finish": ([answer("r", finish_reason=None)], "meta_info"),
    "lost log-prob": ([answer("r", output_token_logprobs=[[-1.0, 8, None]])], "retracted"),
    "no log-probs": ([answer("r", output_token_logprobs=None)], "0 log-probs"),
    "shifted ids": ([answer("r", output_token_logprobs=[[-1.0, 8, None], [-1.0, 7, None]])], "other ids"),
    "null": ([answer("r", output_token_logprobs=[[None, 7, None], [-1.0, 8, None]])], "finite"),
    "nan": ([answer("r", output_token_logprobs=[[math.nan, 7, None], [-1.0, 8, None]])], "finite"),
    "infinity": ([answer("r", output_token_logprobs=[[-math.inf, 7, None], [-1.0, 8, None]])], "finite"),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_answers_that_do_not_hold_are_errors(case: str) -> None:
    value, part = BAD_ANSWERS[case]
    with pytest.raises(EngineError, match=part) as caught:
        play([say(value)] * 3)
    assert not isinstance(caught.value, (EngineRejectedError, EngineUnavailableError))


def test_an_answer_that_is_no_json_is_an_error() -> None:
    async def page(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text="<html>")

    with pytest.raises(EngineError, match="JSON"):
        play([page])  # asked once: what stands before a server answers pages for as long as it stands there


def scoring(**meta: Any) -> Any:
    request = GenerateRequest("r", (1, 2, 3), 0, logprob_start_len=1, top_logprobs_num=1)
    defaults = {
        "input_token_logprobs": [[None, 2, None], [-1.5, 3, None]],
        "input_top_logprobs": [None, [[-0.1, 9, None]]],
    }
    return play([say([answer("r", [], **{**defaults, **meta})])] * 3, lambda c: c.generate([request]))[0][0]


def test_input_log_probs_keep_none_at_the_first_position_only() -> None:
    result = scoring()
    assert (result.input_log_probs, result.input_ids) == ((None, -1.5), (2, 3))
    assert result.input_top_logprobs == (None, ((-0.1, 9),))
    for bad in ([[None, 2, None]], [[None, 2, None], [None, 3, None]], [[None, 2, None], [math.nan, 3, None]]):
        with pytest.raises(EngineError, match="input_token_logprobs"):
            scoring(input_token_logprobs=bad)
    for bad_top in ([None], [None, None]):
        with pytest.raises(EngineError, match="input_top_logprobs"):
            scoring(input_top_logprobs=bad_top)


def test_an_aborted_answer_may_lack_its_input_log_probs() -> None:
    result = scoring(finish_reason={"type": "abort", "message": "x"}, input_token_logprobs=[], input_top_logprobs=[])
    assert (result.finish_reason, result.input_log_probs) == ("abort", ())


def test_requests_of_sessions_travel_one_by_one() -> None:
    async def single(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response([answer(body["rid"][0])])

    requests = [GenerateRequest(f"r{i}", (1, 2, 3), 2, session_params={"id": "s", "rid": f"p{i}"}) for i in range(2)]
    results, _, received = play([single, single], lambda c: c.generate(requests))
    assert [r.rid for r in results] == ["r0", "r1"]
    assert sorted(body["session_params"]["rid"] for body in received) == ["p0", "p1"]


def test_a_weight_update_is_checked_against_what_the_server_reports() -> None:
    def use(client: EngineClient) -> Awaitable[None]:
        return client.update_weights_from_disk("/weights", "4")

    idle = say({})
    _, _, received = play([idle, say({"success": True}), say({"weight_version": "4"})], use)
    assert received[1] == {"model_path": "/weights", "weight_version": "4", "flush_cache": True}
    with pytest.raises(WeightVersionError, match="'4'"):
        play([idle, say({"success": True}), say({"weight_version": "3"})], use)
    with pytest.raises(EngineRejectedError, match="no such folder"):
        play([idle, say({"success": False, "message": "no such folder"}, 400)], use)
    with pytest.raises(EngineError, match="success"):
        play([idle, say({"success": False, "message": "no"})], use)


def test_a_server_that_is_not_idle_gets_no_weights() -> None:
    """SGLang ends itself when it cannot flush after an update: it is asked first, and waits."""

    def use(client: EngineClient) -> Awaitable[None]:
        return client.update_weights_from_disk("/weights", "4")

    asked: list[str] = []

    async def busy(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        asked.append(request.path_qs)
        return web.json_response({"message": "Flush cache failed."}, status=400)

    with pytest.raises(EngineRejectedError, match="Flush cache failed"):
        play([busy], use)
    assert asked == ["/flush_cache?timeout=30"]


def test_the_key_is_sent() -> None:
    seen: list[str | None] = []

    async def note(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return await good(request, body)

    play([note], api_key="abc")
    play([note])
    assert seen == ["Bearer abc", None]


def test_a_server_that_scores_at_temperature_one_is_refused_where_another_was_asked_for() -> None:
    """SGLang takes `custom_params` and does nothing with them: its answer says nothing of a temperature."""
    request = GenerateRequest("r", (1, 2, 3), 0, logprob_start_len=0, input_temperature=0.5)
    scored = answer("r", [], input_token_logprobs=[[None, 1, None], [-1.0, 2, None], [-1.0, 3, None]])
    with pytest.raises(EngineRejectedError, match=r"those at temperature 0\.5.*opd\.teacher_temperature=1"):
        play([say([scored])], lambda c: c.generate([request]))
    scored["meta_info"]["input_temperature"] = 0.5
    result, _, received = play([say([scored])], lambda c: c.generate([request]))
    assert result[0].input_ids[-1] == 3
    assert received[0]["sampling_params"][0]["custom_params"] == {"input_temperature": 0.5}


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=12,
)


@given(JSONS)
def test_an_answer_is_read_as_the_standard_library_reads_it(value: object) -> None:
    """NaN, infinities and lone surrogates included, whichever library reads it first."""
    raw = json.dumps(value).encode()
    assert repr(client_module._decoded(raw)) == repr(json.loads(raw))
    for broken in (raw[:-1] + b"\xff", b"[" + raw, raw + b"]"):
        with pytest.raises(ValueError):  # noqa: PT011 - either library's
            client_module._decoded(broken)


@given(
    st.dictionaries(st.sampled_from(["rid", "sampling_params", "top_logprobs_num"]), JSONS),
    st.dictionaries(
        st.sampled_from(["input_ids", "token_ids_logprob"]), st.lists(st.lists(st.integers(0, 2**20)).map(tuple))
    ),
)
def test_a_request_says_the_same_whoever_writes_it(rest: dict[str, object], ids: dict[str, object]) -> None:
    content = {**rest, **ids}
    try:
        plain = json.loads(json.dumps(content, allow_nan=False))
    except ValueError:
        with pytest.raises(ValueError, match="JSON compliant"):
            client_module._encoded(content)
        return
    assert json.loads(client_module._encoded(content)) == plain


def test_numbers_are_finite_one_by_one_where_their_sum_is_not() -> None:
    made = EngineClient("http://engine")
    assert made._finites("x", [-1e308, -1e308, -1e308]) == (-1e308, -1e308, -1e308)
    assert made._finites("x", [-1, -0.5]) == (-1.0, -0.5)
    assert made._finites("x", []) == ()
    for bad in (math.nan, -math.inf, None, "0", True):
        with pytest.raises(EngineError, match=r"x\[3\] what"):
            made._finites("x", [-1.0, bad], first=2, what=" what")

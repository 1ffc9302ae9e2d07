"""The embedded server over HTTP, in a process of its own: answers, stops, sessions, aborts, weight updates, bad input."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import server_fuzz
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.processes import ServerProcess
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.errors import EngineRejectedError
from slime_tandem.models.hf import load_tokenizer
from slime_tandem.protocol import GenerateRequest, GenerateResult

from ...in_process import ThreadServer, ask
from ...waiting import PATIENCE_S

TOLERANCE = 1e-5
VOCAB, CONTEXT, BOS, EOS = 304, 256, 0, 1


def http(
    server: ThreadServer | ServerProcess, path: str, body: Any = None, method: str | None = None, key: str = ""
) -> tuple[int, Any]:
    return ask(server.url, path, body, method, {"Authorization": key} if key else {})


def with_client(server: ThreadServer, use: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with EngineClient(server.url, max_retries=0) as client:
            return await use(client)

    return asyncio.run(main())


def generate(server: ThreadServer, *requests: GenerateRequest) -> list[GenerateResult]:
    return with_client(server, lambda client: client.generate(requests))  # type: ignore[no-any-return]


def request(rid: str, ids: list[int], n: int, seed: int = 7, **changes: Any) -> GenerateRequest:
    return GenerateRequest(rid, tuple(ids), n, sampling_seed=seed, **changes)


def same(a: GenerateResult, b: GenerateResult) -> bool:
    return a.output_ids == b.output_ids and np.allclose(a.output_log_probs, b.output_log_probs, atol=TOLERANCE, rtol=0)


def prompts(n: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, rng.integers(1, 40)).tolist() for _ in range(n)]


def test_log_probs_over_http_equal_transformers(server: ThreadServer, references: dict[str, Any]) -> None:
    requests = []
    for i, ids in enumerate(prompts(12, seed=1)):
        start = (-1, 0, len(ids) - 1)[i % 3]
        requests.append(
            request(f"r{i}", ids, 8, i, logprob_start_len=start, top_logprobs_num=i % 4, token_ids_logprob=(5, 3))
        )
    for asked, got in zip(requests, generate(server, *requests), strict=True):
        n, ids = len(asked.input_ids), [*asked.input_ids, *got.output_ids]
        log_probs = references["llama"].log_probs(ids)
        assert got.rid == asked.rid
        assert got.prompt_tokens == n
        want = [log_probs[n - 1 + i, token].item() for i, token in enumerate(got.output_ids)]
        np.testing.assert_allclose(got.output_log_probs, want, atol=TOLERANCE, rtol=0)
        start = asked.logprob_start_len
        if start >= 0:
            assert got.input_ids == asked.input_ids[start:]
            assert got.input_log_probs[0] is None
            want = [log_probs[i - 1, ids[i]].item() for i in range(start + 1, n)]
            np.testing.assert_allclose(np.array(got.input_log_probs[1:], float), want, atol=TOLERANCE, rtol=0)
        for i, chosen in enumerate(got.output_token_ids_logprobs):
            assert [t for _, t in chosen] == [5, 3]
            np.testing.assert_allclose([v for v, _ in chosen], log_probs[n - 1 + i, [5, 3]], atol=TOLERANCE, rtol=0)
        for i, top in enumerate(got.output_top_logprobs):
            values = log_probs[n - 1 + i].topk(asked.top_logprobs_num).values
            np.testing.assert_allclose([v for v, _ in top], values, atol=TOLERANCE, rtol=0)
        assert len(got.output_top_logprobs) == (len(got.output_ids) if asked.top_logprobs_num else 0)


def test_single_batched_and_concurrent_calls_agree(server: ThreadServer) -> None:
    requests = [request(f"r{i}", ids, 10, i) for i, ids in enumerate(prompts(40, seed=2))]
    batched = generate(server, *requests)
    single = [generate(server, r)[0] for r in requests[:5]]

    async def at_once(client: EngineClient) -> list[GenerateResult]:
        return [r for [r] in await asyncio.gather(*(client.generate([r]) for r in requests))]

    concurrent = with_client(server, at_once)
    assert all(map(same, batched, concurrent))
    assert all(map(same, batched[:5], single))


def test_the_answer_has_sglangs_form(server: ThreadServer, folders: dict[str, Path]) -> None:
    body = {
        "input_ids": [5, 6, 7],
        "rid": "x",
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [4],
    }
    for method in ("POST", "PUT"):
        status, answer = http(server, "/generate", body, method)
        assert status == 200
        meta = answer["meta_info"]
        ids = answer["output_ids"]
        assert len(ids) == 3
        assert answer["text"] == load_tokenizer(folders["llama"]).decode(ids, skip_special_tokens=True)
        assert {
            k: meta[k] for k in ("id", "finish_reason", "prompt_tokens", "completion_tokens", "weight_version")
        } == {
            "id": "x",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "weight_version": "default",
        }
        assert [e[1:] for e in meta["output_token_logprobs"]] == [[i, None] for i in ids]
        assert [e[1:] for e in meta["input_token_logprobs"]] == [[i, None] for i in (5, 6, 7)]
        assert meta["input_token_logprobs"][0][0] is None
        assert meta["input_top_logprobs"][0] is None
        assert meta["input_token_ids_logprobs"][0] is None
        assert [len(e) for e in meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]] == [2] * 5
        assert [e[0][1:] for e in meta["input_token_ids_logprobs"][1:] + meta["output_token_ids_logprobs"]] == [
            [4, None]
        ] * 5
    status, answer = http(server, "/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}})
    assert status == 200
    assert "output_token_logprobs" not in answer["meta_info"]


def test_batch_forms(server: ThreadServer) -> None:
    shared = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    status, batch = http(server, "/generate", {"input_ids": [[5, 6], [7]], "rid": "b", "sampling_params": shared})
    assert status == 200
    assert [a["meta_info"]["id"] for a in batch] == ["b_0", "b_1"]
    own = [shared, {**shared, "max_new_tokens": 4}]
    status, batch = http(server, "/generate", {"input_ids": [[5, 6], [7]], "rid": ["p", "q"], "sampling_params": own})
    assert [(a["meta_info"]["id"], len(a["output_ids"])) for a in batch] == [("p", 2), ("q", 4)]
    status, one = http(server, "/generate", {"text": "the cat", "sampling_params": shared})
    status, many = http(server, "/generate", {"text": ["the cat"], "sampling_params": shared})
    assert one["output_ids"] == many[0]["output_ids"]


def test_scoring_alone(server: ThreadServer, references: dict[str, Any]) -> None:
    ids = list(range(20, 50))
    [got] = generate(server, request("s", ids, 0, logprob_start_len=9))
    want = [references["llama"].log_probs(ids)[i - 1, ids[i]].item() for i in range(10, 30)]
    np.testing.assert_allclose(np.array(got.input_log_probs[1:], float), want, atol=TOLERANCE, rtol=0)
    assert (got.output_ids, got.finish_reason) == ((), "length")


def test_eos_ends_an_answer_unless_ignored(server: ThreadServer) -> None:
    def call(ignore: bool) -> Any:
        shared = {"max_new_tokens": 100, "temperature": 4.0, "ignore_eos": ignore}
        params = [{**shared, "sampling_seed": i} for i in range(32)]
        return http(server, "/generate", {"input_ids": [[9, i + 2] for i in range(32)], "sampling_params": params})[1]

    free, ended = call(True), call(False)
    stopped = [a for a in ended if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert stopped
    for a, b in zip(free, ended, strict=True):
        want = a["output_ids"]
        if EOS in want[:-1]:
            assert b["output_ids"] == want[: want.index(EOS) + 1]
            assert b["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
        else:
            assert b["output_ids"] == want


def test_stops_and_what_the_text_shows(server: ThreadServer, folders: dict[str, Path]) -> None:
    decode = load_tokenizer(folders["llama"]).decode
    base = {"max_new_tokens": 24, "sampling_seed": 5, "ignore_eos": True, "skip_special_tokens": False}

    def call(**params: Any) -> Any:
        return http(server, "/generate", {"input_ids": [40, 41], "sampling_params": {**base, **params}})[1]

    ids = call()["output_ids"]
    place = next(i for i in range(4, 20) if ids[i] not in ids[:i] and decode([ids[i]]).isascii())
    needle, whole = decode([ids[place]]), decode(ids[: place + 1])
    cut = whole.index(needle)
    by_id = call(stop_token_ids=[ids[place]])
    assert by_id["output_ids"] == ids[: place + 1]
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[place]}
    assert by_id["text"] == decode(ids[:place])
    assert call(stop_token_ids=[ids[place]], no_stop_trim=True)["text"] == whole
    end = next(i for i in range(1, 25) if needle in decode(ids[:i]))
    by_text = call(stop=needle)
    assert by_text["output_ids"] == ids[:end]
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": needle}
    assert by_text["text"] == whole[:cut]
    pattern = "[" + "".join(f"\\x{ord(c):02x}" for c in needle[:1]) + "]"
    by_regex = call(stop_regex=pattern, no_stop_trim=True)
    assert by_regex["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
    assert by_regex["output_ids"] == ids[: next(i for i in range(1, 25) if needle[0] in decode(ids[:i]))]


def test_sessions_append_cut_and_close(server: ThreadServer) -> None:
    async def talk(client: EngineClient) -> None:
        name = await client.open_session()
        first = [11, 12, 13, 14]
        [a] = await client.generate([request("t1", first, 5, session_params={"id": name})])
        context = first + list(a.output_ids)

        async def turn(rid: str, new: list[int], want_ids: list[int], **params: Any) -> GenerateResult:
            asked = {"id": name, "rid": a.served_rid, **params}
            [got, want] = [
                (await client.generate([r]))[0]
                for r in (
                    request(rid, new, 4, session_params=asked, logprob_start_len=2),
                    request("plain", want_ids, 4, logprob_start_len=2),
                )
            ]
            assert got.prompt_tokens == len(want_ids)
            assert got.input_ids == tuple(want_ids[2:])
            assert same(got, want)
            return got

        t2 = await turn("t2", [21, 22], [*context, 21, 22])
        await turn("t3", [21, 22], [*context[:6], 21, 22], offset=6)
        await turn("t4", [BOS, 21], [*context, 21])
        await turn("t5", [21, 22], [*first, 21, 22], drop_previous_output=True)
        t6 = await turn("t6", [21], [*context, 21], replace=True)
        both = await client.generate(
            [
                request(f"after-{i}", [33], 3, session_params={"id": name, "rid": r.served_rid})
                for i, r in enumerate((a, t6))
            ]
        )
        assert [r.prompt_tokens for r in both] == [len(context) + 1, len(context) + 1 + 4 + 1]
        own = a.served_rid
        for bad in ({"rid": t2.served_rid}, {"rid": "never"}, {"rid": own, "offset": 99}, {"rid": own, "offset": -1}):
            with pytest.raises(EngineRejectedError, match="session_params"):
                await client.generate([request("bad", [5], 1, session_params={"id": name, **bad})])
        await client.close_session(name)
        with pytest.raises(EngineRejectedError, match=r"session_params\.id"):
            await client.generate([request("late", [5], 1, session_params={"id": name, "rid": own})])
        await client.close_session(name)

    with_client(server, talk)


def test_abort_answers_with_what_was_written(server: ThreadServer) -> None:
    async def run(client: EngineClient) -> list[GenerateResult]:
        # Never ends by itself before 240 tokens: sampling hits no stop id, EOS is 1 in 304.
        waiting = [asyncio.create_task(client.generate([request(f"long-{i}", [5, 6], 250, i)])) for i in range(24)]
        while not all(task.done() for task in waiting):
            await client.abort("long-3")
            await asyncio.sleep(0.005)
        return [(await task)[0] for task in waiting]

    results = with_client(server, run)
    assert results[3].finish_reason == "abort"
    assert len(results[3].output_ids) == len(results[3].output_log_probs) < 250
    assert {r.finish_reason for i, r in enumerate(results) if i != 3} <= {"stop", "length"}
    status, answer = http(server, "/abort_request", {})
    assert status == 400
    assert "rid" in answer["error"]["message"]
    assert http(server, "/abort_request", {"abort_all": True})[0] == 200


def test_a_client_that_goes_away_frees_its_rows(server: ThreadServer) -> None:
    async def run(client: EngineClient) -> list[GenerateResult]:
        gone = asyncio.create_task(client.generate([request(f"gone-{i}", [5, i], 250) for i in range(2, 100)]))
        await asyncio.sleep(0.2)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await client.generate([request("next", [5, 6], 3)])

    assert with_client(server, run)[0].finish_reason in ("length", "stop")


def test_information_and_health(server: ThreadServer, folders: dict[str, Path]) -> None:
    for path in ("/model_info", "/get_model_info"):
        status, info = http(server, path)
        assert status == 200
        assert info["model_path"] == info["tokenizer_path"] == str(folders["llama"])
        assert (info["is_generation"], info["weight_version"]) == (True, "default")
        assert (info["vocab_size"], info["context_length"]) == (VOCAB, CONTEXT)
    assert http(server, "/get_weight_version") == (200, {"weight_version": "default"})
    for path in ("/health", "/health_generate"):
        assert http(server, path)[0] == 200
    generate(server, request("w", list(range(2, 30)), 1))
    assert generate(server, request("w", list(range(2, 30)), 1))[0].cached_tokens == 27
    for method in ("GET", "POST"):
        assert http(server, "/flush_cache", b"" if method == "POST" else None, method)[0] == 200
        assert generate(server, request("w", list(range(2, 30)), 1))[0].cached_tokens == 0
    assert http(server, "/nowhere")[0] == 404
    assert http(server, "/generate")[0] == 405


BAD = {
    "not json": (b"{", "body"),
    "no object": ([1], "body"),
    "no prompt": ({}, "input_ids"),
    "two prompts": ({"input_ids": [1], "text": "a"}, "input_ids"),
    "empty ids": ({"input_ids": []}, "input_ids"),
    "empty ids in a batch": ({"input_ids": [[5], []]}, r"input_ids[1]"),
    "id out of vocabulary": ({"input_ids": [5, VOCAB]}, "input_ids"),
    "negative id": ({"input_ids": [5, -1]}, "input_ids"),
    "float id": ({"input_ids": [5, 1.0]}, "input_ids"),
    "boolean id": ({"input_ids": [5, True]}, "input_ids"),
    "string ids": ({"input_ids": "5 6"}, "input_ids"),
    "huge id": ({"input_ids": [2**70]}, "input_ids"),
    "mixed batch": ({"input_ids": [[5], 5]}, r"input_ids[1]"),
    "longer than the context": ({"input_ids": [5] * (CONTEXT + 1)}, "input_ids"),
    "longer with the output": ({"input_ids": [5] * 200, "sampling_params": {"max_new_tokens": 57}}, "max_new_tokens"),
    "empty text": ({"text": ""}, "text"),
    "text of a wrong type": ({"text": 5}, "text"),
    "unknown field": ({"input_ids": [5], "imput_ids": [5]}, "imput_ids"),
    "unserved field": ({"input_ids": [5], "lora_path": "x"}, "lora_path"),
    "stream": ({"input_ids": [5], "stream": True}, "stream"),
    "rid of a wrong type": ({"input_ids": [5], "rid": 5}, "rid"),
    "too few rids": ({"input_ids": [[5], [6]], "rid": ["a"]}, "rid"),
    "rid twice": ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "rid"),
    "parameters of a wrong type": ({"input_ids": [5], "sampling_params": 5}, "sampling_params"),
    "too many parameters": ({"input_ids": [5], "sampling_params": [{}, {}]}, "sampling_params"),
    "return_logprob of a wrong type": ({"input_ids": [5], "return_logprob": 1}, "return_logprob"),
    "start beyond the input": ({"input_ids": [5], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    "start below -1": ({"input_ids": [5], "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    "negative top": ({"input_ids": [5], "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    "top beyond the vocabulary": (
        {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 305},
        "top_logprobs_num",
    ),
    "chosen id": ({"input_ids": [5], "return_logprob": True, "token_ids_logprob": [VOCAB]}, "token_ids_logprob"),
    "session of a wrong type": ({"input_ids": [5], "session_params": 5}, "session_params"),
    "no such session": ({"input_ids": [5], "session_params": {"id": "none"}}, "session_params.id"),
    "more prompts than a request may have": ({"input_ids": [[5]] * 4097}, "input_ids"),
    "a million prompts of nothing": ({"input_ids": [[]] * 1_000_000}, "input_ids"),
    "a million ids": ({"input_ids": [5] * 1_000_000}, "input_ids"),
    "half of a surrogate pair": ({"text": "a\ud800"}, "text"),
    "text beyond any context": ({"text": "a" * (CONTEXT * 128 + 1)}, "text"),
    "text longer than the context": ({"text": "é" * 400}, "ids of text"),
    "a rid without end": ({"input_ids": [5], "rid": "r" * 1025}, "rid"),
    "a rid of a list": ({"input_ids": [[5], [6]], "rid": [["a"], "b"]}, "rid"),
    "a number of 400 digits as a start": (
        {"input_ids": [5], "return_logprob": True, "logprob_start_len": 10**400},
        "logprob_start_len",
    ),
    "a number of 400 digits of candidates": (
        {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 10**400},
        "top_logprobs_num",
    ),
    "more candidates than an answer may hold": (
        {
            "input_ids": [[5]] * 4096,
            "return_logprob": True,
            "top_logprobs_num": 300,
            "sampling_params": {"max_new_tokens": 9},
        },
        "top_logprobs_num",
    ),
    "chosen ids without end": (
        {"input_ids": [5], "return_logprob": True, "token_ids_logprob": [5] * (VOCAB + 1)},
        "token_ids_logprob",
    ),
    "a thousand patterns and more": (
        {"input_ids": [[5]] * 1100, "sampling_params": [{"stop_regex": f"a{{{i}}}"} for i in range(1100)]},
        "stop_regex",
    ),
    "a thousand lists of stops and more": (
        {"input_ids": [[5]] * 1100, "sampling_params": [{"stop_token_ids": [i % 304, i // 304]} for i in range(1100)]},
        "stop_token_ids",
    ),
    "nested": ({"input_ids": json.loads("[" * 900 + "]" * 900)}, "input_ids"),
    "nested parameters": (
        {"input_ids": [5], "sampling_params": json.loads('{"n":' * 900 + "1" + "}" * 900)},
        "sampling_params.n",
    ),
    "a field without end": ({"input_ids": [5], "f" * 10_000: 1}, "fff"),
    "unknown session parameter": ({"input_ids": [5], "session_params": {"id": "none", "x": 1}}, "session_params"),
}
BAD_PARAMS = {
    "temperature": [-1, math.nan, math.inf, -math.inf, "hot", True, 10**400, -(10**400), 1.1e6, [], {}],
    "top_p": [0, 1.5, -0.1, "x", 10**400, math.nan],
    "top_k": [0, -2, 1.5, "x", 2**31, 2**63 - 1, 2**63, 9223372036854775808, 2**64, 10**400, -(2**63) - 1, True],
    "max_new_tokens": [-1, 1.5, "x", True, -(10**400)],
    "stop": [5, [""], [5], ["s"] * 257, "s" * 4097, [["s"]], {}],
    "stop_token_ids": [5, [VOCAB], [-1], ["x"], {}, "5", [2**70], [5] * (VOCAB + 1), [[5]], [True], False, 0],
    "stop_regex": [
        "(",
        5,
        "a{99999999999999999999}",
        "(?=a)",
        "x" * 2001,
        "(" * 900 + ")" * 900,
        ["a"] * 257,
        r"(a)\1",
    ],
    "sampling_seed": [1.5, "x", 2**64, -(2**63) - 1, 10**400, True, math.nan],
    "ignore_eos": [1],
    "skip_special_tokens": ["yes"],
    "no_stop_trim": [0],
    "min_p": [-0.1, 1.5, "x", 10**400, math.nan],
    "custom_params": [
        5,
        {"other": 1},
        {"truncated_logprobs": 1},
        {"truncated_logprobs": True},
        {"input_temperature": 0},
        {"input_temperature": "1"},
    ],
    "n": [2, True, [1], math.nan, 10**400],
    "repetition_penalty": [1.1],
    "frequency_penalty": [0.5],
    "json_schema": ["{}"],
    "temprature": [1.0],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused_by_name(case: str, server: ThreadServer) -> None:
    body, field = BAD[case]
    status, answer = http(server, "/generate", body)
    assert status == 400
    message = answer["error"]["message"]
    assert field in message.split(": expected")[0]
    assert "Remedy:" in message


def test_bad_sampling_parameters_are_refused_by_name_and_the_server_lives(server: ThreadServer) -> None:
    for name, values in BAD_PARAMS.items():
        for value in values:
            status, answer = http(server, "/generate", {"input_ids": [5], "sampling_params": {name: value}})
            assert status == 400, (name, value, answer)
            assert answer["error"]["message"].startswith(f"sampling_params.{name}"), answer
    neutral = {"n": 1, "min_p": 0.0, "repetition_penalty": 1.0, "json_schema": None, "temperature": None, "top_k": -1}
    status, _ = http(server, "/generate", {"input_ids": [5], "sampling_params": {**neutral, "max_new_tokens": 1}})
    assert status == 200
    assert http(server, "/health_generate")[0] == 200


EDGES = {
    "temperature": [0, 1e-7, 1e-6, 5e-324, 1e6, -0.0],
    "top_k": [-1, 1, 2, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1],
    "top_p": [5e-324, 1e-9, 1.0, 1],
    "min_p": [0, 5e-324, 1.0, 1],
    "sampling_seed": [0, -(2**63), 2**64 - 1],
    "max_new_tokens": [0, 1, CONTEXT - 2],
    "stop": [[], "s" * 4096, ["s", "\0", "\ud800"] * 85],
    "stop_regex": [[], r"(?s)(?:.+)+\u0001", "(?s)(?:.+)+\x01", "(a+)+$", "[\ud800]"],
    "stop_token_ids": [[], [5] * VOCAB],
}


def test_the_edges_of_what_is_allowed_are_answered_in_one_batch_with_honest_requests(server: ThreadServer) -> None:
    """Whatever is let through goes into a step with others': none may fail it, or change another's tokens."""
    honest = [request(f"h{i}", [5, 6, i + 2], 20, i, return_logprob=False) for i in range(8)]
    alone = [result.output_ids for result in generate(server, *honest)]
    params = [
        {"max_new_tokens": 30, "ignore_eos": True, name: value} for name, values in EDGES.items() for value in values
    ]
    body = {
        "input_ids": [[5, 6]] * len(params),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": 0,
    }

    async def both() -> tuple[list[GenerateResult], tuple[int, Any]]:
        async with EngineClient(server.url, max_retries=0) as client:
            edges = asyncio.to_thread(http, server, "/generate", body)
            return await asyncio.gather(client.generate(honest), edges)

    results, (status, answer) = asyncio.run(both())
    assert status == 200, answer
    assert len(answer) == len(params)
    assert [result.output_ids for result in results] == alone


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_answered_500_or_not_at_all(seed: int, server: ThreadServer) -> None:
    """The requests of `scripts/benchmarks/server_fuzz.py`, a hundred thousand of which it sends beside honest ones."""
    draw = random.Random(seed)
    shots = [server_fuzz.shot(draw, key="none", target="/nonexistent") for _ in range(5)]
    port = int(server.url.rsplit(":", 1)[1])

    async def fire() -> list[str]:
        return await asyncio.gather(*(server_fuzz.fire(port, one, PATIENCE_S) for one in shots))

    fine = {"200", "400", "401", "403", "404", "405", "408", "411", "413", "415", "417", "503"}
    for one, status in zip(shots, asyncio.run(fire()), strict=True):
        assert status in fine or (status == "closed" and not one.finished), (status, b"".join(one.parts)[:2000])
    assert http(server, "/health")[0] == 200


@pytest.fixture
def own_server(folders: dict[str, Path], tmp_path: Path) -> Iterator[ServerProcess]:
    options = ServeOptions(cache_tokens=512, api_key="open sesame")
    with ServerProcess(folders["llama"], options, log_file=tmp_path / "log") as process:
        yield process


def test_weight_updates_and_the_key(
    own_server: ServerProcess,
    folders: dict[str, Path],
    references: dict[str, Any],
    model_copy: Callable[[str], Path],
) -> None:
    """One server process for both, starting one takes seconds."""
    server = own_server
    for key in ("", "Bearer wrong", "open sesame", "Bearer open sesamé"):
        status, answer = http(server, "/model_info", key=key.encode().decode("latin-1"))
        assert status == 401
        assert "Authorization" in answer["error"]["message"]
    assert http(server, "/health")[0] == 200
    assert http(server, "/model_info", key="Bearer open sesame")[0] == 200

    job = request("u", list(range(2, 30)), 6, logprob_start_len=20)

    def check(result: GenerateResult, name: str, version: str) -> None:
        log_probs = references[name].log_probs([*job.input_ids, *result.output_ids])
        want = [log_probs[27 + i, token].item() for i, token in enumerate(result.output_ids)]
        np.testing.assert_allclose(result.output_log_probs, want, atol=TOLERANCE, rtol=0)
        assert result.weight_version == version

    truncated = model_copy("llama")
    (truncated / "model.safetensors").write_bytes((truncated / "model.safetensors").read_bytes()[:5000])
    nan = model_copy("other")
    tensors = {name: tensor.clone() for name, tensor in load_file(nan / "model.safetensors").items()}
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, nan / "model.safetensors", metadata={"format": "pt"})
    broken = [truncated, nan, folders["qwen3"], Path("/nonexistent/folder")]

    async def run() -> None:
        with pytest.raises(EngineRejectedError, match="API key"):
            async with EngineClient(server.url, api_key="wrong") as client:
                await client.model_info()
        async with EngineClient(server.url, api_key="open sesame") as client:
            check((await client.generate([job]))[0], "llama", "default")
            await client.update_weights_from_disk(str(folders["other"]), "step-1")
            [got] = await client.generate([job])
            check(got, "other", "step-1")
            assert got.cached_tokens == 0
            for folder in broken:
                with pytest.raises(EngineRejectedError, match="model"):
                    await client.update_weights_from_disk(str(folder), "step-2")
                check((await client.generate([job]))[0], "other", "step-1")
            # Requests on both sides of an update: each is answered whole under one version, in order.
            before = asyncio.create_task(client.generate([request(f"b{i}", [5, i], 60, i) for i in range(2, 6)]))
            for _ in range(5):  # when these are answered, the server has long read the others
                await client.model_info()
            update = asyncio.create_task(client.update_weights_from_disk(str(folders["llama"]), "step-3"))
            assert {r.weight_version for r in await before} == {"step-1"}
            await update
            check((await client.generate([job]))[0], "llama", "step-3")

    asyncio.run(run())
    for body, field in (
        ({"model_path": 5}, "model_path"),
        ({"model_path": "x", "weight_version": 5}, "weight_version"),
        ({"model_path": "x", "weight_version": "v" * 1025}, "weight_version"),
        ({"model_path": "x" * 10_000}, "model_path"),
        ({"model_path": "\ud800"}, "model_path"),
        ({"model_path": "a\0b"}, "model_path"),
        ({"model_path": "x", "flush_cache": False}, "flush_cache"),
    ):
        status, answer = http(server, "/update_weights_from_disk", body, key="Bearer open sesame")
        assert status == 400
        assert answer["error"]["message"].startswith(field)

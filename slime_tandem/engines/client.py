"""The async HTTP client for SGLang's native API: our embedded server and real SGLang alike.

Disconnects, time-outs and 5xx answers are retried with exponential back-off; that is safe because one answer alone is used, and
because draws depend on the sampling seed and the position only, where the engine honours seeds (real SGLang: with
`--enable-deterministic-inference`, docs/sglang.md). A repeat has a name of its own on the
wire, and one that timed out is aborted first: SGLang refuses a name that is still at work. 4xx answers are raised at once, but
for 408, a body that came too slowly. Every answer is checked before it is handed on: a missing, misplaced or non-finite
log-prob is asked for again, then an error, never a guess. It does not know who writes next, nor what a response is: it asks
one server what it is given to ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import operator
import random
import secrets
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from slime_tandem.engines import handoff_wire
from slime_tandem.engines.connections import ConnectionLostError, Connections
from slime_tandem.engines.one_by_one import OneByOne
from slime_tandem.errors import (
    EngineError,
    EngineRejectedError,
    EngineUnavailableError,
    WeightVersionError,
)
from slime_tandem.protocol import CandidateLists, GenerateRequest, GenerateResult, IdsAt, IdText
from slime_tandem.types import JUNIOR

_LARGE = 2**13
"""Bytes of an answer that takes about a millisecond and more to read, with what its task does next; a handoff's is smaller."""
_LONGEST_PAUSE_S = 5.0
_PROBE_TIMEOUT_S = 5.0
_IDLE_S = 30.0
_UNUSABLE_RETRIES = 2
"""Repeats of an answer that lacks something: SGLang loses a log-prob of a retracted request, the next try has it."""
_MOST_IDS = 2**20
"""Ids in one HTTP request, of inputs and stops: an embedded server takes bodies of 16 MiB, and up to 4096 sequences."""
_MOST_SEQUENCES = 4096
_SAME_NATS = 0.1
"""Two prefills in bfloat16 differ by less; a position and its neighbour by more."""
_REMEDIES = {
    401: "send the server's API key (engine.api_key_env)",
    403: "call the server by the address that it is bound to, or start it with --allowed-hosts",
    413: "ask for less at once: fewer or shorter sequences, fewer ids",
    415: "send JSON as application/json; look for a proxy between that changes the request",
}
# OSError: a server that cannot be reached or found; ConnectionError is one, also for an answer that is no HTTP.
_RETRIED = (OSError, TimeoutError)


class EngineClient:
    """One server, one connection pool. Use as an async context manager.

    `role` names the server in errors (senior, junior, teacher). `timeout_s` bounds one try; `max_retries` further tries follow,
    `backoff_s` before the first, doubling, at most 5 s. `gone`: whether the server's process has ended, where that is known:
    then nothing is asked again, who started it can start it anew at once. `retries` counts the repeats that happened,
    `requests_sent` and `bytes_sent` the HTTP requests and the bytes of their bodies.

    >>> EngineClient("http://127.0.0.1:30000/", role="junior").base_url
    'http://127.0.0.1:30000'
    """

    def __init__(
        self,
        base_url: str,
        *,
        role: str = "senior",
        api_key: str | None = None,
        timeout_s: float = 120.0,
        max_retries: int = 5,
        backoff_s: float = 0.2,
        max_connections: int = 256,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.role = role
        self.retries = 0
        self.requests_sent = 0
        self.bytes_sent = 0
        # Several clients may share a server (two runs and one junior): their request names must differ.
        self._name = secrets.token_hex(4)
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._backoff_s = backoff_s
        self._max_connections = max_connections
        self._gone = gone
        self._turn = OneByOne()
        self._connections: Connections | None = None
        self._positions: bool | None = None  # whether it scores each position's own ids; None: not tried
        self._under_way: dict[str, str] = {}  # a request's name -> its name on the wire

    async def __aenter__(self) -> EngineClient:
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        self._connections = Connections(self.base_url, headers, self._max_connections)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connections is not None:
            await self._connections.close()
            self._connections = None

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Answer all requests, in order, in one HTTP request (several where one would be too large); none for an empty list.

        Requests with `session_params` or `token_ids_at` travel one by one (SGLang takes one of either per call).
        Raises EngineRejectedError, EngineUnavailableError, and EngineError for an answer that, asked for again, still does not
        hold what was asked for.
        """
        if not requests:
            return []
        if len(requests) > 1 and any(r.session_params is not None or r.token_ids_at is not None for r in requests):
            single = await asyncio.gather(*(self.generate([r]) for r in requests))
            return [result for [result] in single]
        if len(requests) > 1 and (len(requests) > _MOST_SEQUENCES or sum(map(_ids_in, requests)) > _MOST_IDS):
            half = len(requests) // 2
            parts = await asyncio.gather(self.generate(requests[:half]), self.generate(requests[half:]))
            return [*parts[0], *parts[1]]
        results: dict[int, GenerateResult] = {}
        for repeat in itertools.count():
            missing = [i for i in range(len(requests)) if i not in results]
            fault = await self._generate_once(requests, missing, repeat, results)
            if fault is None:
                return [results[i] for i in range(len(requests))]
            if repeat >= min(_UNUSABLE_RETRIES, self._max_retries):
                raise fault
            self.retries += 1
        raise AssertionError("unreachable")

    async def _generate_once(
        self, requests: Sequence[GenerateRequest], which: Sequence[int], repeat: int, results: dict[int, GenerateResult]
    ) -> EngineError | None:
        """Ask for the requests `which` and fill in the usable answers; the fault of the last unusable one, None if there
        is none."""
        part = [requests[i] for i in which]
        rids: list[str] = []  # of the try under way

        def body(attempt: int) -> dict[str, Any]:
            rids[:] = [self._wire_rid(r.rid, f"{repeat}.{attempt}") + _rule_of(r) for r in part]
            for r, rid in zip(part, rids, strict=True):
                self._under_way[r.rid] = rid
            return _generate_body(part, rids)

        async def give_up() -> None:
            await asyncio.gather(*map(self._abort_quietly, rids))

        try:
            answer = await self._call("POST", "/generate", body, on_timeout=give_up)
        finally:
            for r in part:
                self._under_way.pop(r.rid, None)
        if part[0].token_ids_at is not None:
            answer = [answer]
        if not isinstance(answer, list) or len(answer) != len(part):
            got = f"{len(answer)} answers" if isinstance(answer, list) else type(answer).__name__
            return self._bad("/generate", got, f"a list of {len(part)} answers")
        fault: EngineError | None = None
        for i, request, rid, one in zip(which, part, rids, answer, strict=True):
            try:
                results[i] = self._result(request, rid, one)
            except EngineRejectedError:
                raise
            except EngineError as error:
                fault = error
        return fault

    def _wire_rid(self, rid: str, attempt: str = "") -> str:
        """SGLang aborts by prefix (scheduler.py, abort_request): the dot keeps `1` from naming `10` as well."""
        return f"{self._name}-{rid}.{attempt}"

    async def _abort_quietly(self, rid: str) -> None:
        with contextlib.suppress(*_RETRIED):
            await self._open().ask("POST", "/abort_request", _encoded({"rid": rid}), _PROBE_TIMEOUT_S)

    async def health(self) -> bool:
        """Whether GET /health answers 200 within five seconds; one try."""
        try:
            status, _ = await self._open().ask("GET", "/health", None, _PROBE_TIMEOUT_S)
            return status == 200
        except _RETRIED:
            return False

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server is healthy; raises EngineUnavailableError after `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        while not await self.health():
            if time.monotonic() > end:
                raise EngineUnavailableError(
                    f"{self.role} engine",
                    self.base_url,
                    f"a healthy server within {timeout_s:g} s",
                    "check that it runs and that the URL is right",
                )
            await asyncio.sleep(0.1)

    async def model_info(self) -> dict[str, Any]:
        """GET /model_info: model_path, tokenizer_path, weight_version and what else the server reports."""
        info = await self._call("GET", "/model_info")
        if not isinstance(info, dict):
            raise self._bad("/model_info", type(info).__name__, "an object")
        return info

    async def flush_cache(self) -> None:
        """Forget all kept prefixes on the server, once it is idle; EngineRejectedError if it is busy for half a minute."""
        await self._call("POST", f"/flush_cache?timeout={_IDLE_S:g}", {}, parse=False)

    async def update_weights_from_disk(self, path: str, weight_version: str) -> None:
        """Make the server serve the folder `path` (as the server sees it) under `weight_version`.

        Raises EngineRejectedError if the server refuses the folder (it keeps its old weights), WeightVersionError if it reports
        another version afterwards.
        """
        # SGLang 0.5.15 ends its scheduler when it cannot flush after an update (weight_updater.py:101), and the step behind a
        # request's last token, or a request whose client has gone, keeps it from that: wait until it has nothing left.
        await self.flush_cache()
        body = {"model_path": path, "weight_version": weight_version, "flush_cache": True}
        answer = await self._call("POST", "/update_weights_from_disk", body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise self._bad("/update_weights_from_disk", answer, "success: true")
        served = (await self.model_info()).get("weight_version")
        if served != weight_version:
            raise WeightVersionError(
                f"{self.role} engine {self.base_url} weight_version",
                served,
                f"{weight_version!r}, the version just sent",
                "check that no other process updates this server",
            )

    async def abort(self, rid: str) -> None:
        """Abort the running request `rid` of this client, which is answered with finish reason abort; nothing if none runs.

        By its whole name on the wire: SGLang's front end ignores a name that it does not know exactly.
        """
        name = self._under_way.get(rid)
        if name is not None:
            await self._call("POST", "/abort_request", {"rid": name}, parse=False)

    async def scores_positions(self, ids: Sequence[int]) -> bool:
        """Whether the server knows `GenerateRequest.token_ids_at`, tried once with `ids`, four or more of its vocabulary.

        By what it answers: SGLang 0.5.15 passes over a field that it does not know, and another version might count positions
        otherwise. The ids must come back at the positions where they were asked for, with the values that the flat list gives.
        """
        if self._positions is None:
            asked = [[], sorted({ids[0], ids[2]}), [], [ids[1]]]
            probe = GenerateRequest("positions", tuple(ids[:4]), 0, logprob_start_len=0)
            flat = replace(probe, rid="flat", token_ids_logprob=tuple(sorted(set(ids[:3]))))
            try:
                [there] = await self.generate([replace(probe, token_ids_at=IdsAt.of(asked))])
                [known] = await self.generate([flat])
            except EngineUnavailableError:
                raise
            except EngineError:
                self._positions = False
            else:
                given, want = CandidateLists.of(there.input_token_ids_logprobs), IdsAt.of(asked)
                values = CandidateLists.of(known.input_token_ids_logprobs)
                at = values.find(want.rows, want.ids)
                self._positions = (
                    np.array_equal(given.starts, want.starts)
                    and np.array_equal(given.ids, want.ids)
                    and bool((at >= 0).all())
                    and bool((np.abs(given.values - values.values[at]) < _SAME_NATS).all())
                )
        return self._positions

    async def open_session(self, session_id: str | None = None, capacity_of_str_len: int = 2**20) -> str:
        """Open a server-side context; returns its id, for `GenerateRequest.session_params["id"]`."""
        body = {"session_id": session_id, "capacity_of_str_len": capacity_of_str_len}
        answer = await self._call("POST", "/open_session", body)
        if not isinstance(answer, str) or not answer:
            raise self._bad("/open_session", answer, "a session id")
        return answer

    async def close_session(self, session_id: str) -> None:
        """Forget a server-side context."""
        await self._call("POST", "/close_session", {"session_id": session_id}, parse=False)

    def _open(self) -> Connections:
        if self._connections is None:
            raise RuntimeError("EngineClient is closed: use it inside `async with`")
        return self._connections

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | Callable[[int], dict[str, Any]] | None = None,
        *,
        parse: bool = True,
        on_timeout: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """One request with retries; returns the parsed JSON (None with `parse=False`).

        `body` may depend on the attempt (0, 1, ...); `on_timeout` is awaited after an attempt that timed out, before the next.
        """
        url = f"{self.base_url}{path}"
        cause = ""
        for attempt in itertools.count():
            stale = False
            content = body(attempt) if callable(body) else body
            data = None if content is None else _encoded(content)
            self.requests_sent += 1
            self.bytes_sent += len(data or b"")
            try:
                status, raw = await self._open().ask(method, path, data, self._timeout_s)
            except _RETRIED as error:
                cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                # The server closed an idle kept-alive connection just as it was used again: nothing to wait for.
                stale = attempt == 0 and isinstance(error, ConnectionLostError) and error.stale
                if on_timeout is not None and isinstance(error, TimeoutError):
                    await on_timeout()
            else:
                if status == 200:
                    if len(raw) > _LARGE:
                        await self._turn()
                    return self._parse(path, raw) if parse else None
                message = _server_message(raw)
                if status < 500 and status != 408:
                    raise self._rejected(f"{method} {url}", status, message)
                cause = f"HTTP {status}: {message}"
            if attempt >= self._max_retries or self._gone():
                raise self._unavailable(f"{method} {url}", cause, attempt + 1)
            self.retries += 1
            if not stale:
                pause = min(_LONGEST_PAUSE_S, self._backoff_s * 2**attempt)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
        raise AssertionError("unreachable")

    def _rejected(self, what: str, status: int, message: str) -> EngineRejectedError:
        return EngineRejectedError(
            f"{self.role} engine {what}",
            f"HTTP {status}",
            f"a request that the server accepts; it says: {message}",
            _REMEDIES.get(status, "correct the request"),
        )

    def _unavailable(self, what: str, cause: str, tries: int) -> EngineUnavailableError:
        return EngineUnavailableError(
            f"{self.role} engine {what}",
            cause,
            f"an answer within {self._timeout_s:g} s; gave up after {tries} tries",
            "check that the server runs (its log) and that the URL is right; raise engine.max_retries or "
            "engine.request_timeout_s if it is only slow",
        )

    def _parse(self, path: str, raw: bytes) -> Any:
        try:
            return _decoded(raw)
        except ValueError:
            raise self._bad(path, raw[:80].decode("utf-8", "replace"), "JSON") from None

    def _bad(self, field: str, value: object, expected: str) -> EngineError:
        remedy = "check the server's version and log, and any router between"
        return EngineError(f"{self.role} engine {self.base_url} {field}", value, expected, remedy)

    def _result(self, request: GenerateRequest, wire_rid: str, answer: Any) -> GenerateResult:
        """Check one answer object and take it apart."""
        where = f"answer {request.rid!r}"
        try:
            meta, output_ids = answer["meta_info"], answer["output_ids"]
            reason = meta["finish_reason"]
            finish, version, rid = reason["type"], meta["weight_version"], meta["id"]
            # SGLang leaves it out for a request aborted while it still waited (tokenizer_manager.py:2721).
            prompt_tokens = int(meta["prompt_tokens"] if finish != "abort" else meta.get("prompt_tokens", 0))
        except (KeyError, TypeError) as error:
            raise self._bad(
                where, repr(answer)[:120], f"meta_info and output_ids as SGLang sends them ({error!r})"
            ) from None
        if rid != wire_rid:
            raise self._bad(f"{where} meta_info.id", rid, f"{wire_rid!r}, answers in the order of the requests")
        if finish not in ("stop", "length", "abort"):
            raise self._bad(f"{where} finish_reason.type", finish, "stop, length or abort")
        authors, log_probs, senior_log_probs = self._written(request, meta, where, output_ids)
        if request.input_temperature != 1.0 and finish != "abort":
            self._require_heat(request, meta, where)
        kept_ids = self._kept_ids(meta, where, output_ids) if request.truncated_logprobs else ()
        input_log_probs, given_ids = (
            self._scored(request, meta, where, prompt_tokens) if finish != "abort" else ((), ())
        )
        return GenerateResult(
            rid=request.rid,
            output_ids=tuple(output_ids),
            output_log_probs=log_probs,
            finish_reason=finish,
            weight_version=str(version),
            matched=reason.get("matched"),
            text=str(answer.get("text") or ""),
            prompt_tokens=prompt_tokens,
            cached_tokens=int(meta.get("cached_tokens") or 0),
            input_log_probs=input_log_probs,
            input_ids=given_ids,
            served_rid=wire_rid,
            authors=authors,
            senior_log_probs=senior_log_probs,
            kept_ids=kept_ids,
            **self._candidates(request, meta, where, len(output_ids), len(input_log_probs)),
        )

    def _written(
        self, request: GenerateRequest, meta: dict[str, Any], where: str, output_ids: list[int]
    ) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float | None, ...]]:
        """(authors, log-probs, the senior's log-probs) of the output ids; each is empty where it was not asked for."""
        if request.handoff is not None:
            # A request that only scores has nothing that anybody wrote.
            return self._tandem(request, meta, where, len(output_ids)) if request.max_new_tokens else ((), (), ())
        if not request.return_logprob:
            return (), (), ()
        # Of a request that only scores, SGLang 0.5.15 under load reports a log-prob of the token that it did not write.
        entries = (meta.get("output_token_logprobs") or []) if request.max_new_tokens else []
        if len(entries) != len(output_ids):
            raise self._bad(
                f"{where} output_token_logprobs",
                f"{len(entries)} log-probs",
                f"one for each of the {len(output_ids)} output ids (SGLang 0.5.15 loses the first one of a request that "
                "was retracted, output_streamer.py:444)",
            )
        log_probs = self._finites(f"{where} output_token_logprobs", [e[0] for e in entries])
        if list(map(_SECOND, entries)) != output_ids:
            raise self._bad(f"{where} output_token_logprobs", "other ids", "the ids of output_ids")
        return (), log_probs, ()

    def _scored(
        self, request: GenerateRequest, meta: dict[str, Any], where: str, prompt_tokens: int
    ) -> tuple[tuple[float | None, ...], tuple[int, ...]]:
        """(log-probs, ids) of the input from `logprob_start_len` on; empty where they were not asked for."""
        first = request.logprob_start_len
        if not request.return_logprob or first < 0:
            return (), ()
        entries = meta.get("input_token_logprobs") or []
        if len(entries) != prompt_tokens - first:
            raise self._bad(
                f"{where} input_token_logprobs",
                f"{len(entries)} entries",
                f"{prompt_tokens - first}: positions {first} to {prompt_tokens - 1}",
            )
        ids = tuple(int(e[1]) for e in entries)
        # SGLang reports nothing for the first position, whatever was computed for it.
        values = [e[0] for e in entries]
        unread = (None,) if values and values[0] is None else ()
        return (*unread, *self._finites(f"{where} input_token_logprobs", values[len(unread) :], len(unread))), ids

    def _tandem(
        self, request: GenerateRequest, meta: dict[str, Any], where: str, count: int
    ) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float | None, ...]]:
        """(authors, their log-probs, the senior's log-probs) that a fused engine reports of `count` output tokens.

        The senior's is None of a junior's token that the senior of a catch-up engine has not read.

        SGLang's own list of log-probs is not used: it loses one of a request that was retracted, this report does not.
        """
        assert request.handoff is not None
        entries = meta.get(handoff_wire.REPORT) or []
        if count and not entries:
            raise EngineRejectedError(
                f"{self.role} engine {self.base_url} {where}",
                "no report of authors",
                "a fused engine",
                "start it with `slime-tandem serve --fused`, or set engine.mode=two_servers",
            )
        reported = list(map(_FIRST, entries))
        if handoff_wire.REFUSED in reported:
            raise EngineRejectedError(
                f"{self.role} engine {self.base_url} {where}",
                f"a rule that the engine does not know (boundary table {request.handoff.table or 'none'})",
                "an engine that was started with this boundary table, by this version",
                "start it again with the tandem settings of this run; its log names the reason",
            )
        if len(entries) != count or reported.count(0) + reported.count(1) != count:
            raise self._bad(
                f"{where} {handoff_wire.REPORT}", f"{len(entries)} entries", f"an author for each of {count} ids"
            )
        authors = tuple(map(int, reported))
        if not request.return_logprob:
            return authors, (), ()
        name = f"{where} {handoff_wire.REPORT}"
        log_probs = self._finites(name, [e[1] for e in entries], what=" log-prob")
        try:
            seniors = handoff_wire.senior_log_probs(entries)
        except ValueError as error:
            raise self._bad(name, str(error), "late log-probs of tokens that were reported") from None
        if _are_finite(seniors):
            return authors, log_probs, tuple(seniors)
        return (
            authors,
            log_probs,
            tuple(
                None
                if value is None and author == JUNIOR and len(e) > 3
                else self._finite(f"{name}[{i}] senior's", value)
                for i, (value, author, e) in enumerate(zip(seniors, authors, entries, strict=True))
            ),
        )

    def _kept_ids(self, meta: dict[str, Any], where: str, output_ids: list[int]) -> tuple[tuple[int, ...], ...]:
        """The ids that each output id was drawn from, itself among them; empty for the whole vocabulary."""
        entries = meta.get("output_kept_ids")
        if entries is None and output_ids:
            raise EngineRejectedError(
                f"{self.role} engine {self.base_url} {where}",
                "no output_kept_ids",
                "the kept ids of truncated sampling, which an embedded server (`slime-tandem serve`) reports "
                "and SGLang does not",
                "set sampling.truncation_replay=recompute, or use an embedded server",
            )
        entries = entries or []
        if len(entries) != len(output_ids):
            expected = f"{len(output_ids)}, one per output id"
            raise self._bad(f"{where} output_kept_ids", f"{len(entries)} lists", expected)
        for i, (kept, token) in enumerate(zip(entries, output_ids, strict=True)):
            if kept and token not in kept:
                raise self._bad(f"{where} output_kept_ids[{i}]", kept[:20], f"a list that holds the drawn id {token}")
        return tuple(map(tuple, entries))

    def _require_heat(self, request: GenerateRequest, meta: dict[str, Any], where: str) -> None:
        if meta.get("input_temperature") != request.input_temperature:
            raise EngineRejectedError(
                f"{self.role} engine {self.base_url} {where}",
                "input log-probs at temperature 1",
                f"those at temperature {request.input_temperature:g}, which an embedded server (`slime-tandem serve`) "
                "computes and SGLang does not",
                "set opd.teacher_temperature=1, or use an embedded server",
            )

    def _candidates(
        self, request: GenerateRequest, meta: dict[str, Any], where: str, outputs: int, inputs: int
    ) -> dict[str, CandidateLists]:
        """The four candidate lists, as many entries as there are positions; those not asked for are left out."""
        asked = {
            "top_logprobs": request.top_logprobs_num > 0,
            "token_ids_logprobs": bool(request.token_ids_logprob) or request.token_ids_at is not None,
        }
        found: dict[str, CandidateLists] = {}
        if not request.return_logprob:
            return found
        for kind in (k for k, wanted in asked.items() if wanted):
            for side, count in (("output", outputs), ("input", inputs)):
                name = f"{side}_{kind}"
                entries = (meta.get(name) or []) if count else []
                if request.token_ids_at is not None:  # nothing was asked at some
                    entries = [row or [] for row in entries]
                if len(entries) != count:
                    raise self._bad(f"{where} {name}", f"{len(entries)} entries", f"{count}, one per position")
                found[name] = self._lists(f"{where} {name}", entries, may_lack_first=side == "input")
        return found

    def _lists(self, where: str, entries: Sequence[Any], *, may_lack_first: bool) -> CandidateLists:
        """Lists of [log-prob, id, text] in arrays; the first may be missing where nothing predicts the first token."""
        rows = [[], *entries[1:]] if may_lack_first and entries and not entries[0] else entries
        for i, row in enumerate(rows):
            if type(row) is not list:
                raise self._bad(f"{where}[{i}]", row, "a list of [log-prob, id, text]")
        flat = list(itertools.chain.from_iterable(rows))
        starts = np.concatenate(([0], np.cumsum(list(map(len, rows)), dtype=np.int64)))
        n = len(flat)
        try:
            # `struct` takes numbers alone, in a third of the time that numpy does.
            values = np.frombuffer(struct.pack(f"{n}d", *map(_FIRST, flat)), dtype=np.float64)
            ids = np.frombuffer(struct.pack(f"{n}q", *map(_SECOND, flat)), dtype=np.int64)
            # Of numbers that are whole some may have been true or false.
            usable = bool(np.isfinite(values).all())
            usable = usable and all(type(flat[i][0]) is float for i in np.flatnonzero(values == np.rint(values)))
        except (struct.error, OverflowError, TypeError, LookupError):
            usable = False
        if usable:
            return CandidateLists(ids, starts, values)
        try:
            ids = np.array([int(e[1]) for e in flat], dtype=np.int64)
            raw = list(map(_FIRST, flat))
        except (TypeError, ValueError, LookupError, OverflowError):
            raise self._bad(where, str(flat)[:120], "lists of [log-prob, id, text]") from None
        places = np.repeat(np.arange(len(rows)), np.diff(starts)).tolist()
        each = [self._finite(f"{where}[{i}]", value) for i, value in zip(places, raw, strict=True)]
        return CandidateLists(ids, starts, np.array(each, dtype=np.float64))

    def _finites(self, where: str, values: Sequence[Any], first: int = 0, what: str = "") -> tuple[float, ...]:
        """`_finite` of all; the place of one in a message counts from `first`."""
        if _are_finite(values):
            return tuple(values)
        return tuple(self._finite(f"{where}[{i}]{what}", value) for i, value in enumerate(values, first))

    def _finite(self, where: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._bad(where, value, "a finite log-prob")
        return float(value)


def _are_finite(values: Sequence[Any]) -> bool:
    """True for finite floats alone (none, ints, or a sum past the largest float: look at each)."""
    return set(map(type, values)) == {float} and math.isfinite(sum(values))


_FIRST, _SECOND = operator.itemgetter(0), operator.itemgetter(1)


_IDS = ("input_ids", "token_ids_logprob")
"""The parts of a request that are long: ids and nothing else."""


def _encoded(content: dict[str, Any]) -> bytes:
    """The body as JSON; ValueError for a NaN or an infinity, which orjson would write as null.

    So what orjson writes is taken where it holds no null, in a text or as a value; the rest is `json`'s, which refuses those.
    """
    lists = [name for name in _IDS if content.get(name) and not isinstance(content[name][0], int)]
    short = {name: value for name, value in content.items() if name not in lists}
    try:
        rest = orjson.dumps(short)
    except TypeError:  # half a surrogate pair, a number of more than 64 bits
        rest = b"null"
    if b"null" in rest:
        rest = json.dumps(short, allow_nan=False).encode()
    if not lists:
        return rest
    parts = [rest[:-1]]
    for name in lists:
        parts.append(b'%s"%s":[' % (b"," if len(parts) > 1 or len(rest) > 2 else b"", name.encode()))
        for i, ids in enumerate(content[name]):
            parts += (b"," if i else b"", *(ids.json if isinstance(ids, IdText) else (orjson.dumps(ids),)))
        parts.append(b"]")
    return b"".join((*parts, b"}"))  # long contexts are copied here and nowhere else


def _decoded(raw: bytes) -> Any:
    """What an answer says; ValueError where it is no JSON.

    What orjson refuses is left to `json`: NaN and Infinity, which are complained of by the place at which they stand.
    """
    with contextlib.suppress(ValueError):
        return orjson.loads(raw)
    return json.loads(raw)


def _rule_of(request: GenerateRequest) -> str:
    """The suffix of the request's name that says to a fused engine who writes; "" for a plain request."""
    if request.handoff is None:
        return ""
    assert request.session_params is None, "the length of a session's input is the server's knowledge"
    return handoff_wire.suffix(request.handoff, len(request.input_ids))


def _ids_in(request: GenerateRequest) -> int:
    return len(request.input_ids) + len(request.stop_token_ids) + len(request.token_ids_logprob or ())


def _generate_body(requests: Sequence[GenerateRequest], rids: list[str]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "rid": rids,
        "input_ids": [r.input_ids for r in requests],
        "sampling_params": [r.sampling_params() for r in requests],
        "return_logprob": [r.return_logprob for r in requests],
        "logprob_start_len": [r.logprob_start_len for r in requests],
        "top_logprobs_num": [r.top_logprobs_num for r in requests],
    }
    first = requests[0].token_ids_at
    if first is not None:  # one sequence, not a list of one: what SGLang takes per-position ids in
        single = {name: value[0] for name, value in body.items()}
        bounds, ids = first.starts.tolist(), first.ids.tolist()
        single["token_ids_logprob_positions"] = [ids[a:b] for a, b in itertools.pairwise(bounds)]
        single["input_ids"] = list(single["input_ids"])
        return single
    if any(r.token_ids_logprob is not None for r in requests):
        # SGLang refuses a null within the list, and takes an empty list for none.
        body["token_ids_logprob"] = [r.token_ids_logprob or () for r in requests]
    if requests[0].session_params is not None:
        body["session_params"] = requests[0].session_params
    return body


def _server_message(raw: bytes) -> str:
    """The error text of an answer, in the shapes that SGLang, its router and we use."""
    text = raw.decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        return text[:500]
    if isinstance(parsed, dict):
        inner = parsed.get("error", parsed.get("message", parsed))
        return str(inner["message"] if isinstance(inner, dict) and "message" in inner else inner)[:500]
    return text[:500]

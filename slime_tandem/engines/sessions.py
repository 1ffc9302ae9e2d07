"""Contexts kept on the server: each request of a response sends only what the server does not have yet.

Without sessions every request carries the whole context, and the bytes sent grow with the square of the response's length. With
them they grow linearly (`session_params` of SGLang: append to a stored turn, cut to `offset` first). Costs one HTTP request per
sequence, because SGLang takes one session per call; `docs/results/tandem-rollout.md` has both measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from slime_tandem.engines.client import EngineClient
from slime_tandem.errors import EngineError, EngineRejectedError, EngineUnavailableError
from slime_tandem.protocol import GenerateRequest, GenerateResult, IdText

_REOPENED = 2
"""Times that a refused request is tried again in a new session."""


@dataclass
class _Session:
    id: str
    turn: str | None = None
    given: Sequence[int] = ()
    written: tuple[int, ...] = ()

    def kept(self, wanted: Sequence[int]) -> int:
        """How many ids of `wanted` the server has as its beginning; at least one is left to send.

        A context that grew out of the last one is not looked through again: what it was given is its beginning.
        """
        if isinstance(wanted, IdText) and wanted.shares(self.given) and len(self.given) <= len(wanted):
            first = len(self.given)
            new = wanted[first : first + len(self.written)]
            same = next((i for i, (a, b) in enumerate(zip(self.written, new, strict=False)) if a != b), len(new))
            return min(first + same, len(wanted) - 1)
        return _common_prefix((*self.given, *self.written), tuple(wanted))


class SessionEngine:
    """An `Engine` over one client that keeps a server-side session per `GenerateRequest.conversation`.

    Use as an async context manager around a rollout: every session is closed at its end, on success, error and cancellation.
    A session that the server no longer has (it was restarted, or forgot it) is opened anew with the whole context.
    Requests without `conversation` are passed on as they are.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._sessions: dict[str, _Session] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.shield(self.close())

    async def close(self) -> None:
        """Close all sessions; those that the server no longer has are closed already."""
        sessions, self._sessions = self._sessions, {}

        async def close(session: _Session) -> None:
            with contextlib.suppress(EngineRejectedError, EngineUnavailableError):
                await self._client.close_session(session.id)

        await asyncio.gather(*(close(s) for s in sessions.values()))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Answer all requests, in order; one HTTP request each. Raises like `EngineClient.generate`."""
        names = [r.conversation for r in requests if r.conversation is not None]
        assert len(set(names)) == len(names), "one request per conversation at a time"
        return list(await asyncio.gather(*(self._one(r) for r in requests)))

    async def _one(self, request: GenerateRequest) -> GenerateResult:
        name = request.conversation
        if name is None:
            return (await self._client.generate([request]))[0]
        for _ in range(_REOPENED):
            try:
                return await self._in_session(name, request)
            except EngineRejectedError:
                # Perhaps the server lost the session, if need be between opening and first use. A request that is itself at
                # fault is refused in a new session, too.
                lost = self._sessions.pop(name, None)
                if lost is not None:
                    with contextlib.suppress(EngineRejectedError):
                        await self._client.close_session(lost.id)
        return await self._in_session(name, request)

    async def _in_session(self, name: str, request: GenerateRequest) -> GenerateResult:
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session(await self._client.open_session())
        keep = session.kept(request.input_ids)
        params: dict[str, object] = {"id": session.id}
        if session.turn is not None and keep:
            params |= {"rid": session.turn, "offset": keep}
        else:
            keep = 0
        sent = dataclasses.replace(request, input_ids=request.input_ids[keep:], session_params=params)
        (result,) = await self._client.generate([sent])
        if result.prompt_tokens != len(request.input_ids) and result.finish_reason != "abort":
            raise EngineError(
                f"answer {request.rid!r} meta_info.prompt_tokens",
                result.prompt_tokens,
                f"{len(request.input_ids)}, the session's context and what was added",
                "set engine.sessions=false; this server keeps other contexts than it was given",
            )
        # An aborted turn may not be stored: the next request then goes on from the turn before it.
        if result.finish_reason != "abort":
            session.turn, session.given, session.written = result.served_rid, request.input_ids, result.output_ids
        return result


def _common_prefix(stored: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """Length of what both begin with, leaving at least one id to send."""
    limit = min(len(stored), len(wanted) - 1)
    if stored[:limit] == wanted[:limit]:
        return limit
    low, high = 0, limit
    while low < high:  # slices compare in C; a loop over ids would cost more than the request
        middle = (low + high + 1) // 2
        low, high = (middle, high) if stored[:middle] == wanted[:middle] else (low, middle - 1)
    return low

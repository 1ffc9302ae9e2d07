"""The servers of one model behind slime's router, asked directly.

The router (sglang_router 0.3.2) knows a fixed form of request: it drops `stop_regex`, refuses lists, and does not pass aborts
on. It is asked for its workers alone, as slime does itself to abort (rollout/sglang_rollout.py, `abort`); each response stays
with one worker, which then finds its prefix in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Self

import aiohttp

from slime_tandem.engines.client import EngineClient
from slime_tandem.errors import ConfigError, EngineUnavailableError
from slime_tandem.protocol import GenerateRequest, GenerateResult

_TIMEOUT_S = 10.0


class WorkerPool:
    """All workers of a router as one engine; an async context manager.

    `client(url)` makes the client of a worker. Workers are listed anew when one cannot be reached: slime restarts dead engines
    under other addresses. Raises EngineUnavailableError where the router does not answer or has no worker, ConfigError for
    workers that split prefill and decode.
    """

    def __init__(self, router: str, client: Callable[[str], EngineClient], *, role: str) -> None:
        self.router, self.role = router.rstrip("/"), role
        self._client = client
        self._clients: dict[str, EngineClient] = {}
        self._stack = contextlib.AsyncExitStack()
        self._listing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.refresh()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def refresh(self) -> None:
        """Ask the router who serves."""
        remedy = "look at the engines' logs"
        try:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{self.router}/workers") as answer,
            ):
                listed = [
                    (worker["url"], worker.get("worker_type", "regular")) for worker in (await answer.json())["workers"]
                ]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise EngineUnavailableError(
                f"{self.role} router {self.router}/workers", why, "a list of workers", remedy
            ) from error
        for url, kind in listed:
            if kind != "regular":
                expected = "regular workers: a response's runs continue on the server that holds its prefix"
                where = f"worker_type of {self.role} {url}"
                raise ConfigError(where, kind, expected, "do not split prefill and decode")
        urls = [str(url) for url, _ in listed]
        if not urls:
            raise EngineUnavailableError(f"{self.role} router {self.router}", [], "a worker", remedy)
        for url in urls:
            if url not in self._clients:
                self._clients[url] = await self._stack.enter_async_context(self._client(url))
        for url in self._clients.keys() - set(urls):
            del self._clients[url]  # its connections close with the pool

    def worker_of(self, request: GenerateRequest) -> str:
        """The worker of a request's response: always the same one, as long as the workers are the same."""
        name = (request.conversation or request.rid).encode()
        # Of a linear sum like CRC-32 the order of the workers follows from their addresses: some would get twice their share.
        return max(self._clients, key=lambda url: blake2b(url.encode() + b"\0" + name, digest_size=8).digest())

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """As `EngineClient.generate`, each request by its response's worker."""
        try:
            return await self._ask(requests)
        except EngineUnavailableError:
            before = set(self._clients)
            async with self._listing:
                await self.refresh()
            if set(self._clients) == before:
                raise
            return await self._ask(requests)

    async def _ask(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        parts: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            parts.setdefault(self.worker_of(request), []).append(i)
        clients = {url: self._clients[url] for url in parts}
        answers = await asyncio.gather(*(clients[url].generate([requests[i] for i in at]) for url, at in parts.items()))
        out = {
            i: result
            for at, results in zip(parts.values(), answers, strict=True)
            for i, result in zip(at, results, strict=True)
        }
        return [out[i] for i in range(len(requests))]

    async def abort(self, rid: str) -> None:
        """Abort the running request `rid`, wherever it runs; nothing if none does."""
        await asyncio.gather(*(client.abort(rid) for client in list(self._clients.values())))

    async def model_info(self) -> dict[str, Any]:
        """What one of the workers says of its model."""
        return await next(iter(self._clients.values())).model_info()

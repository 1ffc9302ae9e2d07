"""The servers of one model behind slime's router, asked directly.

The router (sglang_router 0.3.2) knows a fixed form of request: it drops `stop_regex`, refuses lists, and does not pass aborts
on. It is asked for its workers alone, as slime does itself to abort (rollout/sglang_rollout.py, `abort`); each response stays
with one worker, which then finds its prefix in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Self

import aiohttp

from slime_tandem.engines.client import EngineClient
from slime_tandem.errors import ConfigError, EngineUnavailableError
from slime_tandem.protocol import GenerateRequest, GenerateResult

_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 10.0
"""Between two looks after workers that did not answer."""


class WorkerPool:
    """All workers of a router as one engine; an async context manager.

    `client(url)` makes the client of a worker. What one cannot be asked, another one is: a router lists a dead worker until
    slime's health check, or its own, has found it. Such a worker is left out until it answers /health again; meanwhile workers
    are listed anew, since slime restarts dead engines under other addresses. Raises EngineUnavailableError where no worker
    answers, or the router does not, ConfigError for workers that split prefill and decode.
    """

    def __init__(self, router: str, client: Callable[[str], EngineClient], *, role: str) -> None:
        self.router, self.role = router.rstrip("/"), role
        self._client = client
        self._clients: dict[str, EngineClient] = {}
        self._stack = contextlib.AsyncExitStack()
        self._listing = asyncio.Lock()
        self._down: set[str] = set()
        self._looked = 0.0

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
            self._down.discard(url)

    def worker_of(self, request: GenerateRequest) -> str:
        """The worker of a request's response: always the same one, as long as the same workers answer."""
        name = (request.conversation or request.rid).encode()
        # Of a linear sum like CRC-32 the order of the workers follows from their addresses: some would get twice their share.
        return max(self._up(), key=lambda url: blake2b(url.encode() + b"\0" + name, digest_size=8).digest())

    def _up(self) -> list[str]:
        return [url for url in self._clients if url not in self._down] or list(self._clients)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """As `EngineClient.generate`, each request by its response's worker, or by another one where that cannot be reached."""
        if self._down:
            await self._look_again()
        out: dict[int, GenerateResult] = {}
        tried: set[str] = set()
        while left := [i for i in range(len(requests)) if i not in out]:
            failure = await self._ask(requests, left, out)
            if failure is None:
                continue
            tried |= self._down
            if tried >= set(self._clients):
                async with self._listing:
                    await self.refresh()
                if tried >= set(self._clients):
                    self._down.clear()  # nobody is better than another one
                    raise failure
        return [out[i] for i in range(len(requests))]

    async def _ask(
        self, requests: Sequence[GenerateRequest], which: Sequence[int], out: dict[int, GenerateResult]
    ) -> EngineUnavailableError | None:
        """Ask for the requests `which` and fill in the answers; why a worker could not be reached, which is down then."""
        parts: dict[str, list[int]] = {}
        for i in which:
            parts.setdefault(self.worker_of(requests[i]), []).append(i)
        clients = {url: self._clients[url] for url in parts}
        answers = await asyncio.gather(
            *(clients[url].generate([requests[i] for i in at]) for url, at in parts.items()), return_exceptions=True
        )
        failure = None
        for (url, at), answer in zip(parts.items(), answers, strict=True):
            if isinstance(answer, EngineUnavailableError):
                failure = answer
                self._down.add(url)
                self._looked = time.monotonic()
            elif isinstance(answer, BaseException):
                raise answer
            else:
                out.update(zip(at, answer, strict=True))
        return failure

    async def _look_again(self) -> None:
        """After a while: who is listed now, and who of those that did not answer does."""
        if time.monotonic() - self._looked < _LOOK_AGAIN_S or self._listing.locked():
            return
        async with self._listing:
            self._looked = time.monotonic()
            with contextlib.suppress(EngineUnavailableError):
                await self.refresh()
            down = sorted(self._down & self._clients.keys())
            healthy = await asyncio.gather(*(self._clients[url].health() for url in down))
            self._down = {url for url, well in zip(down, healthy, strict=True) if not well}

    async def abort(self, rid: str) -> None:
        """Abort the running request `rid`, wherever it runs; nothing if none does."""
        await asyncio.gather(*(client.abort(rid) for client in list(self._clients.values())))

    async def model_info(self) -> dict[str, Any]:
        """What one of the workers says of its model."""
        return await self._clients[self._up()[0]].model_info()

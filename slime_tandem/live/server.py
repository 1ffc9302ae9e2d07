"""Serves the live page on a loopback address: the page, and its changes as server-sent events.

Who may ask is decided as for the embedded server (`engines.embedded.doorway`): a request must call the server by a name of its
own and must not come from a page of another origin. Nothing can be written, and the page's policy runs its own script alone.
Everybody on this machine can read it. One thread reads the folder and renders, however many browsers look; each of them gets
what changed since it last got anything, so a slow one costs itself some changes and nobody else any time. It knows no run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from aiohttp import web

from slime_tandem.engines.embedded.doorway import Doorway
from slime_tandem.errors import PortInUseError
from slime_tandem.live.page import LivePage

HOST = "127.0.0.1"
PORT = 6070
MAX_BROWSERS = 256
POLL_S = 1.0
_BEAT_S = 5.0
_SEND_S = 30.0
"""Within which a browser must take what it is sent, else it is left; it comes back by itself."""
_FIRST_S = 2.0
_CHUNK = 2**15
_BUFFER = 2**18
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer:
    """One page's server; `async with` it. `port` None: PORT, or any that is free if that one is taken; 0: any."""

    def __init__(self, page: LivePage, *, port: int | None = None, poll_s: float = POLL_S) -> None:
        self.page = page
        self._wanted, self._poll_s = port, poll_s
        self._boot = secrets.token_hex(4)
        self._doorway = Doorway(HOST, remedy="open the address that was printed")
        self._changed = asyncio.Condition()
        self._tasks = contextlib.AsyncExitStack()
        self.browsers = 0
        """Of those that get events now."""
        self.port = 0

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.port}/"

    async def __aenter__(self) -> LiveServer:
        self._following = asyncio.create_task(self._follow())
        self._tasks.push_async_callback(_ended, self._following)
        async with self._changed:
            # The folder of a long run may take a while: the page then says so until it is read.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_S):
                    await self._changed.wait_for(partial(self._is_newer, 0))
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/events", self._events)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        self._tasks.push_async_callback(runner.cleanup)
        self.port = await self._listen(runner)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._tasks.aclose()

    async def wait(self) -> None:
        """Until the server is cancelled; raises what following the folder ended with."""
        await asyncio.shield(self._following)

    async def _listen(self, runner: web.AppRunner) -> int:
        for port in (PORT, 0) if self._wanted is None else (self._wanted,):
            site = web.TCPSite(runner, HOST, port)
            try:
                await site.start()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            address: tuple[str, int] = runner.addresses[0]
            return address[1]
        raise PortInUseError(
            "--port", self._wanted, "a port that nobody listens on", "choose another one, or 0 for any"
        )

    async def _follow(self) -> None:
        while True:
            if await asyncio.to_thread(self.page.refresh):
                async with self._changed:
                    self._changed.notify_all()
            await asyncio.sleep(self._poll_s)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        refusal = self._doorway.refusal(request)
        if refusal is not None:
            return web.Response(status=refusal.status, text=refusal.message + "\n", headers=_HEADERS)
        return await handler(request)

    async def _page(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self.page.whole, self._boot)
        policy = (
            f"default-src 'none'; script-src 'sha256-{self.page.script_hash}'; style-src 'unsafe-inline'; "
            "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'; trusted-types live"
        )
        headers = {**_HEADERS, "Content-Security-Policy": policy}
        return web.Response(
            body=text.encode("utf-8", "replace"), content_type="text/html", charset="utf-8", headers=headers
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.browsers >= MAX_BROWSERS:
            return web.Response(
                status=503, text=f"{MAX_BROWSERS} browsers look at this page already\n", headers=_HEADERS
            )
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        self.browsers += 1
        try:
            await response.prepare(request)
            _bound_buffer(request)
            async for message in self._messages(self._seen(request)):
                for start in range(0, len(message), _CHUNK):
                    async with asyncio.timeout(_SEND_S):
                        await response.write(message[start : start + _CHUNK])
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # it went away
        finally:
            self.browsers -= 1
        return response

    async def _messages(self, seen: int) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n"
        while True:
            parts = self.page.newer(seen)
            for i, (version, name, html) in enumerate(parts, 1):
                data = json.dumps({"name": name, "html": html})
                # Whoever goes away between two of them has had neither: only the last says how far the browser is.
                number = f"id: {self._boot}-{version}\n" if i == len(parts) else ""
                yield f"{number}event: part\ndata: {data}\n\n".encode()
                seen = version
            age = max(0.0, time.time() - self.page.changed_at)
            yield f'event: beat\ndata: {{"age": {age:.1f}}}\n\n'.encode()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S), self._changed:
                    await self._changed.wait_for(partial(self._is_newer, seen))

    def _is_newer(self, version: int) -> bool:
        return self.page.version > version

    def _seen(self, request: web.Request) -> int:
        """The change that a browser had last; 0, which is none, where that was another server's."""
        boot, _, number = request.headers.get("Last-Event-ID", request.query.get("since", "")).partition("-")
        known = number.isascii() and number.isdigit() and len(number) < 16
        return int(number) if boot == self._boot and known else 0


def _bound_buffer(request: web.Request) -> None:
    """How much the system keeps for a browser that does not read: without this it is some MiB."""
    own = None if request.transport is None else request.transport.get_extra_info("socket")
    if own is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def watch(page: LivePage, port: int | None, say: Callable[[str], None]) -> None:
    """Serve until cancelled; `say` gets the address. Raises PortInUseError."""
    async with LiveServer(page, port=port) as server:
        say(f"live page of {page.folder}: {server.url} (Ctrl-C ends it)")
        await server.wait()

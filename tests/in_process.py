"""The embedded server in a thread of the test process, for tests that want its answers and not its process.

A server process takes seconds to start, nearly all of them imports. What is about processes (starts, kills, ports, logs, keys
in the environment) is tested on `engines.processes.ServerProcess`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from aiohttp import web

from slime_tandem.engines.embedded.doorway import Doorway
from slime_tandem.engines.embedded.engine_thread import EngineThread
from slime_tandem.engines.embedded.server import Server, load_served, model_info
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.models.hf import load_model


def ask(
    url: str, path: str, body: Any = None, method: str | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, Any]:
    """(status, parsed JSON or text) of one plain request; POST if there is a body, which is bytes or becomes JSON."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    named = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{url}{path}", data=data, method=method, headers=named)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, raw = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, raw = error.code, error.read()
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode()


class ThreadServer:
    """`embedded.server.serve` for the model folder `model` on a free port, without a process; use as a context manager.

    `load` makes the model of a weight update.
    """

    def __init__(
        self,
        model: Path,
        *,
        max_batch: int = 256,
        cache_tokens: int = 4096,
        api_key: str | None = None,
        load: Callable[[str], Any] = load_model,
    ) -> None:
        self.model = str(model)
        options = ServeOptions(max_batch=max_batch, cache_tokens=cache_tokens)
        self.runner, self._facts = load_served(self.model, options)
        self._info = model_info(self.model, self.runner, self._facts, options)
        self._doorway, self._load = Doorway(options.host, api_key=api_key), load
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=f"serves {model}", daemon=True)
        self.url = ""

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        engine = EngineThread(self.runner, self._load, self._ended.set)
        runner = Server(engine, self._facts, self._info, self._doorway).runner()
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
            self.url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
            self._ready.set()
            await self._ended.wait()
        finally:
            await engine.stop(10.0)
            await runner.cleanup()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60), "the thread died"
        return self

    def __exit__(self, *_: Any) -> None:
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def is_alive(self) -> bool:
        """Whether it still answers: a dead engine ends it."""
        return self._thread.is_alive()

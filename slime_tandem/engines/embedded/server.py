"""The embedded server: the part of SGLang's native HTTP API that we use, over one transformers model on the CPU.

`serve` blocks until SIGTERM or SIGINT; `python -m slime_tandem.engines.embedded.server MODEL --port N` does the same. Requests
are checked at the door (`doorway`), then field by field (400 with the field's name; large ones in a thread of their own), run
in the engine's thread, and answered in SGLang's JSON. No request holds the event loop: `/health` always answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from slime_tandem.engines.embedded.doorway import Bodies, Doorway, RefusedBodyError
from slime_tandem.engines.embedded.engine_thread import EngineThread
from slime_tandem.engines.embedded.last_resort import LastResort
from slime_tandem.engines.embedded.native_api import (
    Bounds,
    Item,
    RequestParser,
    ServedModel,
    Sessions,
    answers,
    refuse,
)
from slime_tandem.engines.embedded.runner import Output, Runner
from slime_tandem.engines.serve_options import DEFAULT, ServeOptions
from slime_tandem.errors import DataError, EngineUnavailableError, ModelError, PortInUseError, TandemError
from slime_tandem.models.hf import check_model_folder, load_model, load_tokenizer

_STOP_TIMEOUT_S = 3.0
"""For the engine's step, then for the connections; what is left is ended `_GRACE_S` after the signal."""
_GRACE_S = 10.0
_IDLE_S = 30.0
"""Within which a connection must have sent the head of its next request."""
_SENT_S = 120.0
"""Within which a client must have taken its answer."""
_LARGE_ANSWER = 2**13
"""Numbers in an answer from which on it is written outside the event loop."""
_PIECE = 4096
_LONGEST_PATH = 4096
_SILENT = logging.getLogger("slime_tandem.engines.embedded.http")
"""aiohttp's: it writes a traceback for each request that is no HTTP, so that a stranger could fill the disk."""
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _json(value: Any, status: int = 200) -> web.Response:
    # allow_nan=False: NaN is no JSON, and no log-prob either.
    return web.Response(
        body=json.dumps(value, allow_nan=False).encode(), status=status, content_type="application/json"
    )


def _error(message: str, status: int) -> web.Response:
    return _json({"error": {"message": message}}, status)


def _encode(value: Any) -> str:
    """JSON of an answer, made of small pieces: one call of the encoder would hold the interpreter until all is written."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{_encode(inside)}' for key, inside in value.items())}}}"
    if isinstance(value, list) and value and isinstance(value[-1], list):
        return f"[{','.join(map(_encode, value))}]"
    if isinstance(value, list):
        parts = (value[at : at + _PIECE] for at in range(0, len(value), _PIECE))
        return f"[{','.join(json.dumps(part, allow_nan=False)[1:-1] for part in parts)}]"
    return json.dumps(value, allow_nan=False)


def _numbers(outputs: Sequence[Output]) -> int:
    """About how many numbers the answers hold."""
    lists = (
        many
        for out in outputs
        for many in (out.input_top, out.input_chosen, out.output_top, out.output_chosen, out.kept_ids)
    )
    count = sum(len(lists_of) * len(lists_of[-1] or ()) for lists_of in lists if lists_of)
    return count + sum(len(out.output_ids) + len(out.log_probs) + len(out.input_log_probs) for out in outputs)


def served_model(model: Any, tokenizer: Any, max_tokens: int, vocab_size: int) -> ServedModel:
    """What request checks need, read from a model and its tokenizer."""
    eos: set[int] = set()
    for source in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        eos.update([] if source is None else [source] if isinstance(source, int) else source)
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def decode(ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        if backend is not None:
            texts: list[str] = backend.decode_batch(ids, skip_special_tokens=skip_special_tokens)
            return texts
        return [str(tokenizer.decode(one, skip_special_tokens=skip_special_tokens)) for one in ids]

    return ServedModel(
        vocab_size=vocab_size,
        max_tokens=max_tokens,
        eos_ids=frozenset(eos),
        bos_id=tokenizer.bos_token_id,
        encode=lambda text: list(tokenizer.encode(text)),
        decode=decode,
    )


class Server:
    """HTTP handlers over an engine thread. `info` is what /model_info reports, the weight version apart.

    `doorway` decides whose requests are read at all.
    """

    def __init__(
        self,
        engine: EngineThread,
        model: ServedModel,
        info: dict[str, Any],
        doorway: Doorway,
    ) -> None:
        self._engine = engine
        self._model = model
        self._info = info
        self._doorway = doorway
        self._bodies = Bodies()
        self._parser = RequestParser(model)
        self._sessions = Sessions()

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.put("/generate", self._generate),
                web.post("/open_session", self._open_session),
                web.post("/close_session", self._close_session),
                web.post("/abort_request", self._abort_request),
                web.get("/health", self._health),
                web.get("/health_generate", self._health_generate),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/get_weight_version", self._weight_version),
                web.get("/flush_cache", self._flush_cache),
                web.post("/flush_cache", self._flush_cache),
                web.post("/update_weights_from_disk", self._update_weights),
            ]
        )
        return app

    def runner(self) -> web.AppRunner:
        """The application with the time-outs that belong to it; to be set up, given a site, and cleaned up."""
        return web.AppRunner(
            self.application(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_STOP_TIMEOUT_S,
            keepalive_timeout=_IDLE_S,
            auto_decompress=False,  # a compressed body is refused: a small one may be endless
            logger=_SILENT,
        )

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ask the doorway, turn errors into answers, and send the answer."""
        response = await self._answer(request, handler)
        try:
            async with asyncio.timeout(_SENT_S):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = self._doorway.refusal(request)
        if refusal is not None:
            return _error(refusal.message, refusal.status)
        try:
            return await handler(request)
        except RefusedBodyError as error:
            return _error(error.refusal.message, error.refusal.status)
        except DataError as error:
            return _error(str(error), 400)
        except EngineUnavailableError as error:
            return _error(str(error), 503)
        except web.HTTPException as error:
            return _error(f"{request.method} {request.path}: {error.reason}", error.status)
        except Exception as error:  # noqa: BLE001 - the last resort of a server: answer 500 and go on
            return _error(f"internal error: {type(error).__name__}: {error}", 500)

    async def _body(self, request: web.Request) -> dict[str, Any]:
        return (await self._bodies.read(request))[0]

    async def _generate(self, request: web.Request) -> web.Response:
        body, large = await self._bodies.read(request)
        if large or _has_patterns(body):
            loop = asyncio.get_running_loop()
            items, batched = await loop.run_in_executor(self._bodies.parsing, self._parser.parse, body, self._sessions)
        else:
            items, batched = self._parser.parse(body, self._sessions)
        del body
        outputs = await self._engine.generate([item.job for item in items])
        failed = next((out.error for out in outputs if out.error is not None), None)
        if failed is not None:
            return _error(f"internal error: a step of the model failed: {failed}", 500)
        for item, out in zip(items, outputs, strict=True):
            if item.turn is not None and out.finish != "abort":
                self._sessions.store(item.turn, out.output_ids)
        if _numbers(outputs) <= _LARGE_ANSWER:
            made = answers(items, outputs, self._model)
            return _json(made if batched else made[0])
        written = await asyncio.to_thread(self._written, items, outputs, batched)
        return web.Response(body=written, content_type="application/json")

    def _written(self, items: list[Item], outputs: list[Output], batched: bool) -> bytes:
        """A large answer's JSON."""
        made = answers(items, outputs, self._model)
        text = f"[{','.join(map(_encode, made))}]" if batched else _encode(made[0])
        return text.encode()

    async def _open_session(self, request: web.Request) -> web.Response:
        session_id = (await self._body(request)).get("session_id")
        if session_id is not None and (not isinstance(session_id, str) or not 0 < len(session_id) <= Bounds.NAME):
            raise refuse("session_id", session_id, f"null or a non-empty string of at most {Bounds.NAME} characters")
        return _json(self._sessions.open(session_id))

    async def _close_session(self, request: web.Request) -> web.Response:
        self._sessions.close(str((await self._body(request)).get("session_id")))
        return web.Response()

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        rid, everything = body.get("rid"), body.get("abort_all", False)
        if not isinstance(everything, bool):
            raise refuse("abort_all", everything, "true or false")
        if not everything and (not isinstance(rid, str) or not rid):
            raise refuse("rid", rid, "a non-empty string, or abort_all")
        # A batch sent under one rid runs as rid_0, rid_1, ...
        self._engine.abort(
            lambda job: everything or job.rid == rid or job.rid.startswith(f"{rid}_"), "aborted by /abort_request"
        )
        return web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.alive else 503)

    async def _health_generate(self, _: web.Request) -> web.Response:
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        items, _batched = self._parser.parse(body, self._sessions)
        [output] = await self._engine.generate([items[0].job])
        return web.Response(status=200 if output.error is None else 503)

    async def _model_info(self, _: web.Request) -> web.Response:
        engine = self._engine
        return _json(
            {**self._info, "weight_version": engine.weight_version, "stop_regex_stopped": engine.patterns_stopped}
        )

    async def _weight_version(self, _: web.Request) -> web.Response:
        return _json({"weight_version": self._engine.weight_version})

    async def _flush_cache(self, _: web.Request) -> web.Response:
        self._engine.flush()
        return web.Response(text="Cache flushed.\n")

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not 0 < len(path) <= _LONGEST_PATH or not _is_path(path):
            raise refuse("model_path", path, "the folder that holds the new weights")
        if version is not None and (not isinstance(version, str) or len(version) > Bounds.NAME):
            raise refuse("weight_version", version, f"a string of at most {Bounds.NAME} characters")
        if body.get("flush_cache", True) is not True:
            raise refuse("flush_cache", body["flush_cache"], "true, old keys and values do not fit new weights")
        try:
            await self._engine.update(path, version)
        except ModelError as error:
            return _json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        self._info["model_path"] = path
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})


def _has_patterns(body: dict[str, Any]) -> bool:
    """Whether a request brings patterns; to read many takes seconds, which the event loop does not wait for."""
    params = body.get("sampling_params")
    return any(
        isinstance(one, dict) and one.get("stop_regex") for one in (params if isinstance(params, list) else [params])
    )


def _is_path(path: str) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeError:  # half of a surrogate pair
        return False


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded, so that a busy one is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                "port", port, f"a free port on {host}", "stop the other process, or choose another port (0: any)"
            ) from None
        raise EngineUnavailableError(
            "host", f"{host}:{port}", f"an address to bind to ({error.strerror})", "check host and port"
        ) from None
    return sock


def _allow_connections() -> None:
    """As many open connections as the system grants: half-open ones must not keep others out until they have timed out."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS calls it endless, and grants less
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(model: str, options: ServeOptions = DEFAULT) -> None:
    """Serve the model folder `model` until SIGTERM or SIGINT; prints one line with the URL when ready.

    Raises DataError for an option out of its bounds, PortInUseError, ModelError, EngineUnavailableError.
    """
    options.check()
    check_model_folder(model)
    sock = _listen(options.host, options.port)
    try:
        bound = sock.getsockname()[1]
        if options.port_file is not None:
            scratch = Path(f"{options.port_file}.part")
            scratch.write_text(f"{bound}\n", encoding="utf-8")
            scratch.replace(options.port_file)
        torch.set_num_threads(options.threads)
        _allow_connections()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        runner, facts = load_served(model, options)
        info = model_info(model, runner, facts, options)

        def load(path: str) -> Any:
            return load_model(path, options.dtype, options.trust_remote_code)

        shown = f"[{options.host}]" if ":" in options.host else options.host
        line = f"slime-tandem: serving {info['served_model_name']} at http://{shown}:{bound}"
        doorway = Doorway(options.host, options.hosts, options.api_key)
        asyncio.run(_run(sock, runner, lambda engine: Server(engine, facts, info, doorway), load, line))
    finally:
        sock.close()


def model_info(model: str, runner: Runner, facts: ServedModel, options: ServeOptions) -> dict[str, Any]:
    """What /model_info tells of a model folder that is served, the weight version apart."""
    return {
        "model_path": model,
        "tokenizer_path": model,
        "served_model_name": options.served_name or model,
        "is_generation": True,
        "vocab_size": facts.vocab_size,
        "context_length": runner.kv.context_length,
        "max_total_tokens": facts.max_tokens,
        "dtype": options.dtype,
        "engine": "slime_tandem",
    }


def load_served(model: str, options: ServeOptions) -> tuple[Runner, ServedModel]:
    """The model with its KV cache, and what request checks need of it; DataError for a cache that memory cannot hold."""
    tokenizer = load_tokenizer(model, options.trust_remote_code)
    hf_model = load_model(model, options.dtype, options.trust_remote_code)
    gc.freeze()  # what is here by now stays; answers of many lists must not have it searched again and again
    facts: list[ServedModel] = []

    def decode(ids: list[list[int]]) -> list[str]:
        return facts[0].decode(ids, False)

    try:
        runner = Runner(
            hf_model,
            decode,
            max_batch=options.max_batch,
            cache_tokens=options.cache_tokens,
            weight_version=options.weight_version,
        )
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        expected = "a KV cache that fits into this machine's memory"
        raise DataError("cache_tokens", options.cache_tokens, expected, "lower it") from error
    max_tokens = min(runner.kv.context_length, options.cache_tokens)
    facts.append(served_model(hf_model, tokenizer, max_tokens, runner.kv.vocab_size))
    return runner, facts[0]


async def _run(
    sock: socket.socket,
    runner: Runner,
    make: Callable[[EngineThread], Server],
    load: Callable[[str], Any],
    ready_line: str,
) -> None:
    loop = asyncio.get_running_loop()
    ended, died = asyncio.Event(), asyncio.Event()

    def on_death() -> None:
        died.set()
        ended.set()

    engine = EngineThread(runner, load, on_death)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not the loop's own handlers: they need the pipe by which the last resort learns of a signal.
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(ended.set))
    last_resort = LastResort(_GRACE_S)
    app_runner = make(engine).runner()
    await app_runner.setup()
    try:
        await web.SockSite(app_runner, sock, backlog=1024).start()
        print(ready_line, flush=True)
        await ended.wait()
    finally:
        # The engine first: whoever still waits gets a 503 now, then the connections close.
        in_time = await engine.stop(_STOP_TIMEOUT_S)
        await app_runner.cleanup()
        if not in_time:
            # Its thread is in a library's call, an endless read perhaps. All is answered: nothing is lost with it.
            print("slime-tandem: the engine was still at work", file=sys.stderr, flush=True)
            os._exit(0)
        last_resort.end()
    if died.is_set():
        raise EngineUnavailableError(
            "engine thread", "dead", "a running engine", "read the traceback above and restart the server"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m slime_tandem.engines.embedded.server MODEL ...`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_tandem.engines.embedded.server",
        description="Serve a local model folder over SGLang's native HTTP API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="local Hugging Face folder (safetensors)")
    ServeOptions.add_flags(parser)
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT):  # while loading; `serve` installs its own afterwards
        signal.signal(number, lambda *_: os._exit(0))
    try:
        api_key = None
        if args.api_key_env is not None:
            api_key = os.environ.pop(args.api_key_env, None)  # no process that this one starts needs it
            if not api_key:
                raise DataError("--api-key-env", args.api_key_env, "a variable that is set", "export it")
        serve(args.model, ServeOptions.from_args(args, api_key))
    except TandemError as error:
        print(f"slime-tandem: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # All is closed and answered by now; taking torch and transformers apart would take another second.
    os._exit(code)

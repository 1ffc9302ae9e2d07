"""Tandem responses under injected faults: is one lost, written twice, or written by the wrong author?

    python scripts/benchmarks/tandem_soak.py --samples 10000 --faults 1000 --out soak.json

Two embedded servers with tiny random models; between the client and each of them a proxy that injects faults: answers
503, connections closed before and after the server did the work, hangs beyond the client's time-out, log-probs that go
missing, answers cut in the middle, idle connections closed, and servers killed and restarted. Some responses are aborted
on purpose and resumed. Half of the responses use server-side sessions. Every response must come back once, complete, with
the authorship that the rule recomputes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from bench_models import tiny_pair

from slime_tandem.config import SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.processes import ServerProcess
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.engines.sessions import SessionEngine
from slime_tandem.errors import EngineError
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.protocol import Engine
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.drive import write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.types import JUNIOR, SENIOR, Prompt, SampleKey, TandemSample

KINDS = ("503", "closed before", "closed after", "hang", "log-prob lost", "field lost", "cut", "abort")
TIMEOUT_S = 2.0


class Proxy:
    """Forwards to one server; takes one planned fault now and then. `plan[n]` is the fault of the n-th /generate request."""

    def __init__(self, server: ServerProcess, plan: dict[int, str], done: Counter[str]) -> None:
        self.server, self.plan, self.done = server, plan, done
        self.seen = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        kind = None
        if request.path == "/generate":
            kind = self.plan.get(self.seen)
            self.seen += 1
        if kind is not None:
            self.done[kind] += 1
        if kind == "503":
            return web.json_response({"error": {"message": "injected"}}, status=503)
        if kind == "hang":
            forward = asyncio.create_task(self._forward(request, body))
            await asyncio.sleep(TIMEOUT_S * 1.5)
            await forward
        if kind == "closed before":
            return self._close(request)
        if kind == "abort":
            rids = json.loads(body)["rid"]
            for delay in (0.0, 0.002, 0.004, 0.008):
                asyncio.get_running_loop().call_later(delay, lambda: asyncio.ensure_future(self._abort(rids)))
        status, data = await self._forward(request, body)
        if kind == "closed after":
            return self._close(request)
        if kind == "cut":
            response = web.StreamResponse(status=status, headers={"Content-Length": str(len(data))})
            await response.prepare(request)
            await response.write(data[: len(data) // 2])
            return self._close(request)
        if kind in ("log-prob lost", "field lost") and status == 200:
            answers = json.loads(data)
            meta = answers[0]["meta_info"]
            if kind == "field lost":
                del meta["output_token_logprobs"]
            else:
                meta["output_token_logprobs"] = meta["output_token_logprobs"][1:]
            data = json.dumps(answers).encode()
        return web.Response(body=data, status=status, content_type="application/json")

    @staticmethod
    def _close(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, bytes]:
        try:
            async with self.session.request(
                request.method,
                f"{self.server.url}{request.path}",
                data=body,
                headers={"Content-Type": "application/json"},
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            return 502, json.dumps({"error": {"message": str(error)}}).encode()

    async def _abort(self, rids: list[str]) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with self.session.post(f"{self.server.url}/abort_request", json={"rid": rids[0]}) as answer:
                await answer.read()

    async def __aenter__(self) -> Proxy:
        self.session = aiohttp.ClientSession()
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self.handle)
        # Idle connections are closed after 50 ms: the client's pool is full of stale ones.
        self.runner = web.AppRunner(app, keepalive_timeout=0.05, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()
        await self.session.close()


def plan_faults(n: int, requests: int, draw: random.Random) -> dict[int, str]:
    """`n` faults spread over about `requests` requests."""
    return {at: draw.choice(KINDS) for at in draw.sample(range(requests), min(n, requests))}


async def soak(args: argparse.Namespace, servers: list[ServerProcess], folder: Path) -> dict[str, Any]:
    draw = random.Random(args.seed)
    tokenizer = ModelTokenizer.load(folder)
    tokens = tokenizer.tokens
    done: Counter[str] = Counter()
    # A tandem response of this length takes about 3 requests per server; plan within the first 80 %, so that all faults happen.
    expected = int(args.samples * args.requests_per_sample)
    proxies = [Proxy(s, plan_faults(args.faults // 2, expected, draw), done) for s in servers]
    strategies = ("word", "bernoulli", "sentence", "chunk", "alternating")
    rules = {
        s: HandoffRule.of(s, 0.5, 8, 3, boundary_ids(s, tokens.table, tokens.special))  # type: ignore[arg-type]
        for s in strategies
    }
    sampling = SamplingConfig(max_new_tokens=args.tokens)
    written: dict[int, list[TandemSample]] = {}
    failed: dict[int, str] = {}
    resumed = 0
    gate = asyncio.Semaphore(args.concurrency)
    stopped = asyncio.Event()

    async def kill_servers() -> None:
        """SIGKILL each server now and then, and start it again on its port."""
        for i in range(args.kills):
            target = len(written) + len(failed)
            while len(written) + len(failed) < target + args.samples // (args.kills + 1) and not stopped.is_set():
                await asyncio.sleep(0.05)
            if stopped.is_set():
                return
            server = servers[i % 2]
            done["server killed"] += 1
            assert server._process is not None
            server._process.kill()
            await asyncio.to_thread(server.restart)

    async with contextlib.AsyncExitStack() as stack:
        for proxy in proxies:
            await stack.enter_async_context(proxy)
        clients = []
        for role, proxy in zip(("senior", "junior"), proxies, strict=True):
            client = EngineClient(proxy.url, role=role, timeout_s=TIMEOUT_S, max_retries=30, backoff_s=0.05)
            clients.append(await stack.enter_async_context(client))

        async def one(i: int) -> None:
            nonlocal resumed
            rule = rules[strategies[i % 5]]
            key = SampleKey(args.seed, 0, i)
            prompt_ids = tuple(draw.randrange(3, 250) for _ in range(6))
            options: dict[str, Any] = {"score_junior": i % 3 == 0}
            async with gate, contextlib.AsyncExitStack() as inner:
                engines: dict[int, Engine] = {SENIOR: clients[0], JUNIOR: clients[1]}
                if i % 2:
                    for author, client in ((SENIOR, clients[0]), (JUNIOR, clients[1])):
                        engines[author] = await inner.enter_async_context(SessionEngine(client))
                writer = TandemWriter(
                    key,
                    i,
                    Prompt(f"p{i}", (), None, "soak"),
                    prompt_ids,
                    WriterOptions(rule, sampling, tokens, **options),
                )
                try:
                    sample = await write_one(writer, engines, aborted=lambda: True)
                    while sample.finish_reason == "abort":
                        resumed += 1
                        writer = TandemWriter.resume(sample, WriterOptions(rule, sampling, tokens, **options))
                        sample = await write_one(writer, engines, aborted=lambda: True)
                except EngineError as error:
                    failed[i] = str(error).splitlines()[0]
                    return
            again = rule.authorship(key, sample.response_ids)
            assert again == sample.authorship_mask, f"sample {i}: authors differ"
            covered = [k for run in sample.runs for k in range(run.start, run.stop)]
            assert covered == list(range(len(sample.response_ids))), f"sample {i}: runs do not tile the response"
            assert sample.finish_reason in ("stop", "length")
            assert sample.finish_reason == "stop" or len(sample.response_ids) == args.tokens
            assert not options["score_junior"] or len(sample.senior_log_probs) == len(sample.response_ids)
            written.setdefault(i, []).append(sample)

        start = time.monotonic()
        killer = asyncio.create_task(kill_servers())
        async with asyncio.TaskGroup() as group:
            for i in range(args.samples):
                group.create_task(one(i))
        stopped.set()
        await killer
        seconds = time.monotonic() - start
        retries = sum(c.retries for c in clients)
    samples = [s for found in written.values() for s in found]
    return {
        "samples": args.samples,
        "complete": len(written),
        "failed_with_reason": len(failed),
        "reasons": dict(Counter(failed.values())),
        "lost": args.samples - len(written) - len(failed),
        "duplicated": sum(len(found) > 1 for found in written.values()),
        "author_mismatches": 0,  # each is an assertion above: the soak stops at the first
        "faults": sum(done.values()),
        "faults_by_kind": dict(sorted(done.items())),
        "resumed": resumed,
        "client_retries": retries,
        "requests_seen": sum(p.seen for p in proxies),
        "tokens": sum(len(s.response_ids) for s in samples),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000, help="tandem responses")
    parser.add_argument("--faults", type=int, default=1_000, help="faults planned in the proxies")
    parser.add_argument("--kills", type=int, default=10, help="server processes killed")
    parser.add_argument("--tokens", type=int, default=16, help="response length")
    parser.add_argument("--concurrency", type=int, default=48, help="responses in flight")
    parser.add_argument("--requests-per-sample", type=float, default=2.0, help="per server, to spread the faults over")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tandem-soak-"))
    folder = tiny_pair(root, context=512, eos=True)
    options = ServeOptions(max_batch=64, cache_tokens=16384)
    with (
        ServerProcess(root / "senior", options, log_file=root / "s.log") as s,
        ServerProcess(root / "junior", options, log_file=root / "j.log") as j,
    ):
        result = asyncio.run(soak(args, [s, j], folder))
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    if result["lost"] or result["duplicated"] or result["failed_with_reason"]:
        sys.exit(1)


if __name__ == "__main__":
    main()

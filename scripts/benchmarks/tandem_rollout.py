"""Tandem against solo rollouts on the same two engines: tokens per second, requests, dropped tokens, bytes sent.

Two SGLang servers, one per GPU, dummy weights with the dimensions of a published model, random prompts:

    python scripts/benchmarks/tandem_rollout.py gpu --tokenizer FOLDER --size 4b --out results.json \
        --server "" --server "--disable-overlap-schedule"

Servers that run already (`--senior-url`, `--junior-url` in place of `--server`) are taken as they are. Every variant
writes the same samples: same seeds, same rule (word, prob_senior 0.5). Ratios are wall-clock time over the solo time at
the same concurrency.

    python scripts/benchmarks/tandem_rollout.py traffic      # bytes sent for 1k, 4k, 16k tokens; CPU, embedded servers,
    tiny models
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_models import SIZES, make_folder, tiny_pair

from slime_tandem.config import SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.protocol import Engine, GenerateRequest, GenerateResult
from slime_tandem.engines.sessions import SessionEngine
from slime_tandem.engines.sglang import free_port
from slime_tandem.rollout.drive import write_lockstep, write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.tandem import TandemWriter
from slime_tandem.types import JUNIOR, SENIOR, Prompt, SampleKey, TandemSample


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a rollout is driven. `window`: most tokens per request; `stop`: the server stops at the boundary."""

    lockstep: bool = True
    sessions: bool = False
    window: int | None = None
    stop: bool = True
    cohorts: int = 1


VARIANTS = {
    "free": Variant(lockstep=False),
    "free-sessions": Variant(lockstep=False, sessions=True),
    "lockstep": Variant(),
    "lockstep-sessions": Variant(sessions=True),
    "lockstep-2cohorts": Variant(cohorts=2),
    "lockstep-w3": Variant(window=3),
    "lockstep-w4": Variant(window=4),
    "lockstep-w6": Variant(window=6),
    "lockstep-w4-nostop": Variant(window=4, stop=False),
    "lockstep-w3-nostop": Variant(window=3, stop=False),
    "lockstep-w6-nostop": Variant(window=6, stop=False),
    "lockstep-w4-2cohorts": Variant(window=4, cohorts=2),
    "lockstep-w4-sessions": Variant(window=4, sessions=True),
}


class Counting:
    """An engine that adds up what the client does: calls, and the time that a call takes."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.calls, self.seconds = engine, 0, 0.0

    async def generate(self, requests: Any) -> list[GenerateResult]:
        start = time.perf_counter()
        results = await self.engine.generate(requests)
        self.calls += 1
        self.seconds += time.perf_counter() - start
        return results


async def tandem(
    clients: dict[int, EngineClient], writers: list[TandemWriter], v: Variant
) -> tuple[list[TandemSample], dict[str, float]]:
    """(samples, measured) of one rollout."""
    before = {a: (c.bytes_sent, c.requests_sent) for a, c in clients.items()}
    rounds = 0

    def count(_: int) -> None:
        nonlocal rounds
        rounds += 1

    async with contextlib.AsyncExitStack() as stack:
        engines: dict[int, Any] = {}
        for author, client in clients.items():
            inner: Engine = await stack.enter_async_context(SessionEngine(client)) if v.sessions else client
            engines[author] = Counting(inner)
        start = time.perf_counter()
        if v.lockstep:
            parts = [writers[i :: v.cohorts] for i in range(v.cohorts)]
            written = await asyncio.gather(*(write_lockstep(p, engines, on_round=count) for p in parts))
            samples = [s for part in written for s in part]
        else:
            samples = list(await asyncio.gather(*(write_one(w, engines) for w in writers)))
        wall = time.perf_counter() - start
    failed = [s for s in samples if not isinstance(s, TandemSample)]
    if failed:
        raise SystemExit(f"{len(failed)} samples failed: {failed[0]}")
    tokens = sum(len(s.response_ids) for s in samples)
    asked = sum(s.requests for s in samples)
    return samples, {
        "wall_s": wall,
        "tokens": tokens,
        "tok_s": tokens / wall,
        "rounds": rounds / v.cohorts,
        "requests_per_token": asked / tokens,
        "http_per_token": sum(c.requests_sent - before[a][1] for a, c in clients.items()) / tokens,
        "dropped_per_token": sum(s.discarded_tokens for s in samples) / tokens,
        "bytes_per_token": sum(c.bytes_sent - before[a][0] for a, c in clients.items()) / tokens,
        "mean_call_ms": 1e3 * sum(e.seconds for e in engines.values()) / max(1, sum(e.calls for e in engines.values())),
    }


async def solo(client: EngineClient, prompts: list[tuple[int, ...]], new_tokens: int, tag: int) -> dict[str, float]:
    """The senior alone: one request a sample, all at once."""
    requests = [GenerateRequest(f"solo{tag}-{i}", ids, new_tokens, sampling_seed=i) for i, ids in enumerate(prompts)]
    start = time.perf_counter()
    results = await asyncio.gather(*(client.generate([r]) for r in requests))
    wall = time.perf_counter() - start
    tokens = sum(len(r.output_ids) for [r] in results)
    return {"wall_s": wall, "tokens": tokens, "tok_s": tokens / wall}


def make_writers(
    prompts: list[tuple[int, ...]], rule: HandoffRule, tokens: Any, new_tokens: int, v: Variant, seed: int
) -> list[TandemWriter]:
    """One writer per prompt. Without `stop`, the boundary ids count as a user's own: the client cuts."""
    sampling = SamplingConfig(max_new_tokens=new_tokens)
    return [
        TandemWriter(
            SampleKey(seed, 0, i), i, Prompt(f"p{i}", (), None, "bench"), ids, rule, sampling, tokens,
            custom_boundary=not v.stop, tokens_per_request=v.window,
        )
        for i, ids in enumerate(prompts)
    ]  # fmt: skip


async def measure(args: argparse.Namespace, urls: tuple[str, str], label: str, rows: list[dict[str, Any]]) -> None:
    """All variants and concurrencies on one pair of servers; each row is printed as it comes."""
    from slime_tandem.local.tokenizer import ModelTokenizer
    from slime_tandem.rollout.boundaries import boundary_ids

    tokens = ModelTokenizer.load(Path(args.tokenizer)).tokens
    rule = HandoffRule("word", 0.5, 32, 16, boundary_ids("word", tokens.table, tokens.special))
    high = len(tokens.table) - len(tokens.special) - 1
    async with (
        EngineClient(urls[0], role="senior", timeout_s=600, max_connections=0) as senior,
        EngineClient(urls[1], role="junior", timeout_s=600, max_connections=0) as junior,
    ):
        clients = {SENIOR: senior, JUNIOR: junior}
        draw = random.Random(0)

        def fresh(n: int) -> list[tuple[int, ...]]:
            return [tuple(draw.randrange(high) for _ in range(args.prompt_tokens)) for _ in range(n)]

        for client in clients.values():
            await client.wait_ready(600)
        warm = VARIANTS["lockstep-w4"]
        await asyncio.gather(solo(senior, fresh(32), 32, -1), solo(junior, fresh(32), 32, -2))
        await tandem(clients, make_writers(fresh(32), rule, tokens, 24, warm, 10**6), warm)
        for c in args.concurrency:
            alone = [await solo(senior, fresh(c), args.new_tokens, c * 10 + i) for i in range(2)]
            best = min(alone, key=lambda r: r["wall_s"])
            rows.append({"server": label, "variant": "solo", "concurrency": c, **best})
            print(json.dumps(rows[-1]), flush=True)
            for i, name in enumerate(args.variants):
                v = VARIANTS[name]
                for client in clients.values():
                    await client.flush_cache()
                writers = make_writers(fresh(c), rule, tokens, args.new_tokens, v, 1000 * c + i)
                _, row = await tandem(clients, writers, v)
                row["x_solo"] = row["wall_s"] / row["tokens"] / (best["wall_s"] / best["tokens"])
                rows.append({"server": label, "variant": name, "concurrency": c, **row})
                print(
                    json.dumps({k: round(x, 4) if isinstance(x, float) else x for k, x in rows[-1].items()}), flush=True
                )


@contextlib.contextmanager
def sglang_pair(args: argparse.Namespace, extra: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Two servers, one per GPU, stopped by their own process groups."""
    processes: list[subprocess.Popen[bytes]] = []
    urls = []
    try:
        for gpu in range(2):
            port = free_port("127.0.0.1")
            urls.append(f"http://127.0.0.1:{port}")
            env = {
                **os.environ,
                "CUDA_VISIBLE_DEVICES": str(gpu % args.gpus),
                "HF_HUB_OFFLINE": "1",
                "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
            }
            command = [
                sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port),
                "--host", "127.0.0.1", "--load-format", "dummy", "--attention-backend", "triton",
                "--sampling-backend", "pytorch", "--grammar-backend", "none", "--log-level", "warning",
                "--context-length", "32768", "--mem-fraction-static", str(args.mem), "--cuda-graph-max-bs-decode", "256",
                *extra.split(),
            ]  # fmt: skip
            log = (folder / f"server{gpu}.log").open("ab")
            processes.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
            )
        end = time.monotonic() + 420
        for i, (url, process) in enumerate(zip(urls, processes, strict=True)):
            while True:
                with contextlib.suppress(OSError):
                    if urllib.request.urlopen(f"{url}/health", timeout=2).status == 200:
                        break
                if process.poll() is not None or time.monotonic() > end:
                    tail = (folder / f"server{i}.log").read_text(errors="replace")[-4000:]
                    raise SystemExit(f"server {i} ({extra!r}) did not come up:\n{tail}")
                time.sleep(0.5)
        yield urls[0], urls[1]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def table(rows: list[dict[str, Any]]) -> None:
    """Ratios first."""
    print("\nserver | variant | conc | x solo | tok/s | ms/call | rounds | req/token | dropped/token | bytes/token")
    for r in rows:
        print(
            f"{r['server'] or 'default'} | {r['variant']} | {r['concurrency']} | {r.get('x_solo', 1):.2f} | {r['tok_s']:.0f} | "
            f"{r.get('mean_call_ms', 0):.0f} | {r.get('rounds', 0):.0f} | {r.get('requests_per_token', 0):.2f} | "
            f"{r.get('dropped_per_token', 0):.2f} | {r.get('bytes_per_token', 0):.0f}"
        )


def gpu(args: argparse.Namespace) -> None:
    """The benchmark on GPUs (or on running servers)."""
    rows: list[dict[str, Any]] = []
    try:
        if args.senior_url:
            asyncio.run(measure(args, (args.senior_url, args.junior_url), "running", rows))
        else:
            folder = Path(tempfile.mkdtemp()) / "model"
            make_folder(folder, args.size, Path(args.tokenizer))
            for extra in args.server:
                with sglang_pair(args, extra, folder) as urls:
                    asyncio.run(measure(args, urls, extra, rows))
    finally:
        table(rows)
        if args.out:
            Path(args.out).write_text(json.dumps(rows, indent=1))


def traffic(args: argparse.Namespace) -> None:
    """Bytes sent per response length, whole contexts against sessions; two embedded servers with tiny random models."""
    from slime_tandem.engines.launch import ServerProcess
    from slime_tandem.local.tokenizer import ModelTokenizer
    from slime_tandem.rollout.boundaries import boundary_ids

    root = Path(tempfile.mkdtemp())
    tiny_pair(root, context=32768, eos=False)
    tokens = ModelTokenizer.load(root / "senior").tokens
    tokens = dataclasses.replace(tokens, eos_ids=frozenset())  # nobody ends: lengths are exact
    rule = HandoffRule("word", 0.5, 32, 16, boundary_ids("word", tokens.table, tokens.special))

    async def main(urls: tuple[str, str]) -> list[dict[str, Any]]:
        rows = []
        async with EngineClient(urls[0]) as senior, EngineClient(urls[1], role="junior") as junior:
            for n in args.lengths:
                for name in ("free", "free-sessions"):
                    writers = make_writers([tuple(range(5, 105))], rule, tokens, n, VARIANTS[name], 1)
                    _, row = await tandem({SENIOR: senior, JUNIOR: junior}, writers, VARIANTS[name])
                    rows.append({"variant": name, "tokens": n, "bytes": round(row["bytes_per_token"] * n), **row})
                    print(
                        f"{name:14} {n:6} tokens: {rows[-1]['bytes']:>12,} bytes, {row['bytes_per_token']:.0f} per token"
                    )
        return rows

    options: dict[str, Any] = {"max_batch": 4, "cache_tokens": 40000}
    with (
        ServerProcess(root / "senior", log_file=root / "s.log", **options) as s,
        ServerProcess(root / "junior", log_file=root / "j.log", **options) as j,
    ):
        rows = asyncio.run(main((s.url, j.url)))
    if args.out:
        Path(args.out).write_text(json.dumps(rows, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("gpu", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sub.add_argument("--tokenizer", required=True, help="folder with the tokenizer of the dimensions' model")
    sub.add_argument("--size", default="4b", choices=sorted(SIZES), help="both models")
    sub.add_argument("--server", action="append", default=[], help="extra server flags; once per server setting")
    sub.add_argument("--senior-url", help="running server")
    sub.add_argument("--junior-url", help="running server")
    sub.add_argument("--concurrency", type=int, nargs="+", default=[16, 64, 256], help="responses in flight")
    sub.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), help="drivers")
    sub.add_argument("--prompt-tokens", type=int, default=200, help="prompt length")
    sub.add_argument("--new-tokens", type=int, default=128, help="response length")
    sub.add_argument("--gpus", type=int, default=2, help="1: both servers on one card")
    sub.add_argument("--mem", type=float, default=0.8, help="--mem-fraction-static of each server")
    sub.add_argument("--out", help="JSON file")
    sub.set_defaults(run=gpu)
    sub = commands.add_parser("traffic", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sub.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="response lengths, tokens")
    sub.add_argument("--out", help="JSON file")
    sub.set_defaults(run=traffic)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()

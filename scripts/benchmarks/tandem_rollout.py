"""Tandem against solo rollouts on the same two engines: tokens per second, requests, dropped tokens, bytes sent.

Two SGLang servers, one per GPU, dummy weights with the dimensions of a published model, random prompts:

    python scripts/benchmarks/tandem_rollout.py gpu --tokenizer FOLDER --size 4b --out results.json \
        --server "" --server "--disable-overlap-schedule"

Servers that run already (`--senior-url`, `--junior-url` in place of `--server`) are taken as they are. The rule is word,
prob_senior 0.5. Ratios are time per token over that of the solo rollout at the same concurrency: medians over `--repeats`
rollouts of each, taken in turn. `--profile` says where the rounds of a lockstep rollout go: its calls are repeated with one
new token each (prefill, and everything a call costs beside decoding), and a decoding step is timed by itself.

    python scripts/benchmarks/tandem_rollout.py traffic      # bytes sent for 1k, 4k, 16k tokens; CPU, embedded servers,
    tiny models
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import http.client
import json
import math
import operator
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_models import SIZES, make_folder, tiny_pair

from slime_tandem.config import SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.processes import DIRECT
from slime_tandem.engines.sessions import SessionEngine
from slime_tandem.engines.sglang import free_port
from slime_tandem.protocol import Engine, GenerateRequest, GenerateResult
from slime_tandem.rollout.drive import write_lockstep, write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.signals import terminate_as_interrupt
from slime_tandem.types import JUNIOR, SENIOR, Prompt, SampleKey, TandemSample


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a rollout is driven. `window`: most tokens per request; `stop`: the server stops at the boundary. Free-running
    requests may wait for others: `tick_ms` until the clock's next tick, `one_call` until the engine's last call is back."""

    lockstep: bool = True
    sessions: bool = False
    window: int | None = None
    stop: bool = True
    cohorts: int = 1
    tick_ms: float = 0.0
    one_call: bool = False


VARIANTS = {
    "free": Variant(lockstep=False),
    "free-sessions": Variant(lockstep=False, sessions=True),
    "free-tick10": Variant(lockstep=False, tick_ms=10),
    "free-tick30": Variant(lockstep=False, tick_ms=30),
    "one-call": Variant(lockstep=False, one_call=True),
    "one-call-w4": Variant(lockstep=False, one_call=True, window=4),
    "lockstep": Variant(),
    "lockstep-sessions": Variant(sessions=True),
    "lockstep-2cohorts": Variant(cohorts=2),
    "lockstep-w3": Variant(window=3),
    "lockstep-w4": Variant(window=4),
    "lockstep-w6": Variant(window=6),
    "lockstep-w8": Variant(window=8),
    "lockstep-w12": Variant(window=12),
    "lockstep-w4-nostop": Variant(window=4, stop=False),
    "lockstep-w3-nostop": Variant(window=3, stop=False),
    "lockstep-w6-nostop": Variant(window=6, stop=False),
    "lockstep-w4-2cohorts": Variant(window=4, cohorts=2),
    "lockstep-w4-sessions": Variant(window=4, sessions=True),
}


PROFILE = ("prefill_share", "decode_share", "rest_share", "barrier_share", "longest_mean")


@dataclasses.dataclass
class Call:
    """One call of an engine: when it began and what it took, in seconds of the monotonic clock."""

    requests: list[GenerateRequest]
    start: float
    seconds: float = 0.0
    lengths: list[int] = dataclasses.field(default_factory=list)


class Recording:
    """An engine that notes every call."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.calls = engine, list[Call]()

    async def generate(self, requests: Any) -> list[GenerateResult]:
        call = Call(list(requests), time.perf_counter())
        results = await self.engine.generate(requests)
        call.seconds = time.perf_counter() - call.start
        call.lengths = [len(r.output_ids) for r in results]
        self.calls.append(call)
        return results


class Gathering:
    """An engine whose callers wait for each other, so that one prefill step of the server serves several of them."""

    def __init__(self, engine: Engine, v: Variant) -> None:
        self.engine, self.v = engine, v
        self.waiting: list[tuple[list[GenerateRequest], asyncio.Future[list[GenerateResult]]]] = []
        self.at_work = False

    async def generate(self, requests: Any) -> list[GenerateResult]:
        if self.v.tick_ms:
            tick = self.v.tick_ms / 1e3
            await asyncio.sleep(tick - time.perf_counter() % tick)
            return list(await self.engine.generate(requests))
        if not self.v.one_call:
            return list(await self.engine.generate(requests))
        mine: asyncio.Future[list[GenerateResult]] = asyncio.get_running_loop().create_future()
        self.waiting.append((list(requests), mine))
        if not self.at_work:
            self.at_work = True
            await asyncio.sleep(0)  # others that became ready in the same moment
            while self.waiting:
                batch, self.waiting = self.waiting, []
                results = list(await self.engine.generate([r for rs, _ in batch for r in rs]))
                for rs, future in batch:
                    future.set_result(results[: len(rs)])
                    results = results[len(rs) :]
            self.at_work = False
        return await mine


async def tandem(
    clients: dict[int, EngineClient], writers: list[TandemWriter], v: Variant
) -> tuple[list[TandemSample], dict[str, float], dict[int, list[Call]]]:
    """(samples, measured, calls of each engine) of one rollout."""
    before = {a: (c.bytes_sent, c.requests_sent) for a, c in clients.items()}
    rounds = 0

    def count(_: int) -> None:
        nonlocal rounds
        rounds += 1

    async with contextlib.AsyncExitStack() as stack:
        engines: dict[int, Any] = {}
        for author, client in clients.items():
            inner: Engine = await stack.enter_async_context(SessionEngine(client)) if v.sessions else client
            engines[author] = Gathering(Recording(inner), v)
        start = time.perf_counter()
        if v.lockstep:
            parts = [writers[i :: v.cohorts] for i in range(v.cohorts)]
            written = await asyncio.gather(*(write_lockstep(p, engines, on_round=count) for p in parts))
            samples = [s for part in written for s in part]
        else:
            samples = list(await asyncio.gather(*(write_one(w, engines) for w in writers)))
        wall = time.perf_counter() - start
    calls = {a: e.engine.calls for a, e in engines.items()}
    failed = [s for s in samples if not isinstance(s, TandemSample)]
    if failed:
        raise SystemExit(f"{len(failed)} samples failed: {failed[0]}")
    tokens = sum(len(s.response_ids) for s in samples)
    asked = sum(s.requests for s in samples)
    return (
        samples,
        {
            "wall_s": wall,
            "tokens": tokens,
            "tok_s": tokens / wall,
            "rounds": rounds / v.cohorts,
            "requests_per_token": asked / tokens,
            "http_per_token": sum(c.requests_sent - before[a][1] for a, c in clients.items()) / tokens,
            "dropped_per_token": sum(s.discarded_tokens for s in samples) / tokens,
            "bytes_per_token": sum(c.bytes_sent - before[a][0] for a, c in clients.items()) / tokens,
            "mean_call_ms": 1e3 * statistics.mean(c.seconds for of_one in calls.values() for c in of_one),
        },
        calls,
    )


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
    rule = rule if v.stop else dataclasses.replace(rule, mark=None)
    return [
        TandemWriter(
            SampleKey(seed, 0, i), i, Prompt(f"p{i}", (), None, "bench"), ids,
            WriterOptions(rule, sampling, tokens, tokens_per_request=v.window),
        )
        for i, ids in enumerate(prompts)
    ]  # fmt: skip


async def measure(args: argparse.Namespace, urls: tuple[str, str], label: str, rows: list[dict[str, Any]]) -> None:
    """All variants and concurrencies on one pair of servers; each row is printed as it comes."""
    from slime_tandem.models.tokenizer import ModelTokenizer
    from slime_tandem.rollout.boundaries import boundary_ids

    tokens = ModelTokenizer.load(Path(args.tokenizer)).tokens
    rule = HandoffRule.of("word", 0.5, 32, 16, boundary_ids("word", tokens.table, tokens.special))
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
            measured: dict[str, list[dict[str, float]]] = {name: [] for name in ("solo", *args.variants)}
            for repeat in range(args.repeats):
                for i, name in enumerate(measured):
                    for client in clients.values():
                        await client.flush_cache()
                    if name == "solo":
                        row = await solo(senior, fresh(c), args.new_tokens, c * 10 + repeat)
                    else:
                        v, seed = VARIANTS[name], 10**5 * repeat + 1000 * c + i
                        writers = make_writers(fresh(c), rule, tokens, args.new_tokens, v, seed)
                        _, row, calls = await tandem(clients, writers, v)
                        if args.profile and name == "lockstep":
                            row |= await profile(clients, calls, row["wall_s"])
                    measured[name].append(row)
            alone = statistics.median(r["wall_s"] / r["tokens"] for r in measured["solo"])
            for name, several in measured.items():
                ratios = [r["wall_s"] / r["tokens"] / alone for r in several]
                shared = [k for k in several[0] if all(k in r for r in several)]
                row = {k: statistics.median(r[k] for r in several) for k in shared}
                row |= {"x_solo": statistics.median(ratios), "x_least": min(ratios), "x_most": max(ratios)}
                rows.append({"server": label, "variant": name, "concurrency": c, **row})
                print(
                    json.dumps({k: round(x, 4) if isinstance(x, float) else x for k, x in rows[-1].items()}), flush=True
                )


async def profile(clients: dict[int, EngineClient], calls: dict[int, list[Call]], wall: float) -> dict[str, float]:
    """Where the rounds of a lockstep rollout went, as shares of its time; along the engine that was last in each round.

    `prefill`: the same calls in the same order with one new token each; `decode`: the steps behind the first token, each at
    the time of a step of as many sequences as were still at work (to the next power of two); `barrier`: what the engine that
    was first waited, on average;
    `rest`: what these do not explain.
    """

    ordered = sorted((call for of_one in calls.values() for call in of_one), key=operator.attrgetter("start"))
    author = {id(call): a for a, of_one in calls.items() for call in of_one}
    rounds: list[list[Call]] = []
    for call in ordered:  # the calls of a round begin together; the next round begins when both are back
        if rounds and call.start < rounds[-1][0].start + rounds[-1][0].seconds:
            rounds[-1].append(call)
        else:
            rounds.append([call])
    for client in clients.values():
        await client.flush_cache()

    async def again(call: Call, tag: str) -> float:
        shorter = [dataclasses.replace(r, rid=f"{r.rid}-{tag}", max_new_tokens=1) for r in call.requests]
        begin = time.perf_counter()
        await clients[author[id(call)]].generate(shorter)
        return time.perf_counter() - begin

    prefill = decode = barrier = 0.0
    steps: dict[int, float] = {}
    for n, of_round in enumerate(rounds):
        repeated = await asyncio.gather(*(again(call, f"again{n}") for call in of_round))
        at = max(range(len(of_round)), key=lambda i: of_round[i].seconds)
        last = of_round[at]
        alive = [sum(n > step for n in last.lengths) for step in range(1, max(last.lengths))]
        for size in (2 ** round(math.log2(n)) for n in alive):
            if size not in steps:
                steps[size] = await step_seconds(clients[author[id(last)]], last, size, n)
            decode += steps[size]
        prefill += repeated[at]
        barrier += sum(last.seconds - call.seconds for call in of_round) / len(calls)
    return {
        "prefill_share": prefill / wall,
        "decode_share": decode / wall,
        "rest_share": 1 - (prefill + decode) / wall,
        "barrier_share": barrier / wall,
        "longest_mean": statistics.mean(max(n for c in r for n in c.lengths) for r in rounds),
        **{f"step_ms_{size}": 1e3 * seconds for size, seconds in steps.items()},
    }


async def step_seconds(client: EngineClient, call: Call, size: int, tag: int) -> float:
    """Seconds of one decoding step with `size` sequences of the call's contexts."""
    ids = [r.input_ids for r in call.requests] * (size // len(call.requests) + 1)
    took = []
    for length in (8, 40):
        jobs = [GenerateRequest(f"step{tag}-{length}-{i}", x, length) for i, x in enumerate(ids[:size])]
        begin = time.perf_counter()
        await client.generate(jobs)
        took.append(time.perf_counter() - begin)
    return (took[1] - took[0]) / 32


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
                with contextlib.suppress(OSError, http.client.HTTPException):
                    if DIRECT.open(f"{url}/health", timeout=2).status == 200:
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
            f"{r['server'] or 'default'} | {r['variant']} | {r['concurrency']} | "
            f"{r['x_solo']:.2f} ({r['x_least']:.2f}-{r['x_most']:.2f}) | {r['tok_s']:.0f} | "
            f"{r.get('mean_call_ms', 0):.0f} | {r.get('rounds', 0):.0f} | {r.get('requests_per_token', 0):.2f} | "
            f"{r.get('dropped_per_token', 0):.2f} | {r.get('bytes_per_token', 0):.0f}"
        )
        if "prefill_share" in r:
            print(
                "    profile: "
                + ", ".join(f"{k} {v:.2f}" for k, v in r.items() if k in PROFILE or k.startswith("step_ms"))
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
    from slime_tandem.engines.processes import ServerProcess
    from slime_tandem.engines.serve_options import ServeOptions
    from slime_tandem.models.tokenizer import ModelTokenizer
    from slime_tandem.rollout.boundaries import boundary_ids

    root = Path(tempfile.mkdtemp())
    tiny_pair(root, context=32768, eos=False)
    tokens = ModelTokenizer.load(root / "senior").tokens
    tokens = dataclasses.replace(tokens, eos_ids=frozenset())  # nobody ends: lengths are exact
    rule = HandoffRule.of("word", 0.5, 32, 16, boundary_ids("word", tokens.table, tokens.special))

    async def main(urls: tuple[str, str]) -> list[dict[str, Any]]:
        rows = []
        async with EngineClient(urls[0]) as senior, EngineClient(urls[1], role="junior") as junior:
            for n in args.lengths:
                for name in ("free", "free-sessions"):
                    writers = make_writers([tuple(range(5, 105))], rule, tokens, n, VARIANTS[name], 1)
                    _, row, _ = await tandem({SENIOR: senior, JUNIOR: junior}, writers, VARIANTS[name])
                    rows.append({"variant": name, "tokens": n, "bytes": round(row["bytes_per_token"] * n), **row})
                    print(
                        f"{name:14} {n:6} tokens: {rows[-1]['bytes']:>12,} bytes, {row['bytes_per_token']:.0f} per token"
                    )
        return rows

    options = ServeOptions(max_batch=4, cache_tokens=40000)
    with (
        ServerProcess(root / "senior", options, log_file=root / "s.log") as s,
        ServerProcess(root / "junior", options, log_file=root / "j.log") as j,
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
    sub.add_argument("--repeats", type=int, default=3, help="rollouts per cell; the median counts")
    sub.add_argument("--profile", action="store_true", help="where the rounds of `lockstep` go")
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
    with terminate_as_interrupt():  # servers end with this script, also when it is stopped from outside
        args.run(args)


if __name__ == "__main__":
    main()

"""Tokens per second of one SGLang that holds senior and junior, against each of them alone on the same GPU.

Dummy weights with the dimensions of published models, random prompts, responses of a fixed length, on a machine with one GPU:

    PYTHONPATH=. python scripts/benchmarks/fused_engine.py --tokenizer FOLDER --out fused.jsonl

SGLang must be importable by this very Python (or by `--sglang-python`). Prints one JSON line per row and a table at the
end. The yardstick is (T_senior + T_junior) / T_senior: what two models cost that share nothing and waste nothing.
`--cells 1024@64 8192@16x3 512@48:6000/3` measures these combinations only (tokens @ concurrency x rounds : tokens of the
prompts / repeats); of cells with a prompt of their own the prefill is timed alone, too, and its time taken off
(`decode_tokens_per_s`). `--attention every_step catch_up` measures the fused engine in both modes of
`engine.fused_attention`, `--prefill triton flashinfer` each with both values of `engine.fused_prefill`. `--profile 64` also
lets SGLang's profiler record ten decode steps of each engine at that concurrency. `--two-servers 128` keeps senior and junior
up side by side on the card and has them write in tandem, for the cells with that many tokens at most. `--cards 0 1` gives each
of these two servers a card of its own, `--fused-server "--tp-size 2"` lets the fused engine have both cards, `--no-solo` leaves
the models alone out. `--repeats` runs every cell several times; the median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import http.client
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from bench_models import QWEN3, SIZES, make_folder
from tandem_rollout import VARIANTS, make_writers, tandem
from traces import gpu_time

from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.fused.launch import environment, override_args, write_tables
from slime_tandem.engines.processes import DIRECT
from slime_tandem.engines.sglang import free_port
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.protocol import GenerateRequest, GenerateResult
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.handoff import HandoffRule, author_key
from slime_tandem.rollout.writer import handoff_of
from slime_tandem.signals import terminate_as_interrupt
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR, SampleKey

PROMPT_IDS = 150000
"""Prompts are drawn from the ids below: ordinary tokens of any Qwen vocabulary."""
CAP = 32
MESSAGE = 32
"""Tokens of a second turn's message."""
NAMES = {"every_step": "fused", "catch_up": "fused, catching up,"}
"""How the rows of the fused engine are called, by its attention."""
PREFILLS = ("auto", "triton", "flashinfer")
PROFILED_STEPS = 10


def table() -> frozenset[int]:
    """A boundary table of the density of the paper's rule on a Qwen vocabulary, 35%: dummy models write any id alike."""
    return frozenset(random.Random(1).sample(range(QWEN3["vocab_size"]), k=int(0.35 * QWEN3["vocab_size"])))


@contextlib.contextmanager
def served(
    args: argparse.Namespace,
    folder: Path,
    log: Path,
    override: dict[str, Any] | None,
    memory: float = 0.8,
    card: str | None = None,
) -> Iterator[str]:
    """A running SGLang; its URL. Ends the processes that it started, no others.

    `memory`: the share of what is free on the card at its start that weights and pool may take.
    `card`: the only one that it sees.
    """
    port = free_port("127.0.0.1")
    env = dict(os.environ) if override is None else environment(os.environ, cuda=True)
    env |= {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
    if card is not None:
        env["CUDA_VISIBLE_DEVICES"] = card
    if args.device == "cpu":
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_COMPILE_DISABLE": "1"}
    command = [
        args.sglang_python, "-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1",
        "--port", str(port), "--load-format", "dummy", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--context-length", "32768", "--log-level", "warning",
    ]  # fmt: skip
    if args.device == "cpu":
        command += [
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
            "--dtype",
            "float32",
            "--disable-cuda-graph",
        ]
        command += ["--mem-fraction-static", "0.2", "--max-total-tokens", "16384"]
    else:
        command += [
            "--attention-backend",
            args.solo_attention if override is None else "triton",
            "--dtype",
            "bfloat16",
            "--mem-fraction-static",
            str(memory),
        ]
        command += ["--cuda-graph-max-bs-decode", str(max(at_once for _, at_once, *_ in args.cells))]
    if override is not None:
        command += ["--json-model-override-args", json.dumps(override), *args.fused_server.split()]
    command += args.server.split()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + args.start_timeout
        while True:
            if process.poll() is not None or time.monotonic() > end:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
                raise SystemExit(f"the server of {folder.name} did not come up:\n{tail}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if DIRECT.open(f"{url}/health", timeout=5).status == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(2)  # until the driver has the memory back


class FixedLength(GenerateRequest):
    """A request that an end-of-sequence id does not end: dummy weights draw one now and then."""

    def sampling_params(self) -> dict[str, Any]:
        return {**super().sampling_params(), "ignore_eos": True}


def requests(count: int, rule: HandoffRule | None, length: int, prompt: int) -> list[GenerateRequest]:
    rng = random.Random(count)
    handoffs = [None] * count if rule is None else [handoff_of(rule, author_key(key(i))) for i in range(count)]
    return [
        FixedLength(f"r{i}", tuple(rng.randrange(PROMPT_IDS) for _ in range(prompt)), length, handoff=handoffs[i])
        for i in range(count)
    ]


def turns(jobs: list[GenerateRequest], results: list[GenerateResult]) -> list[GenerateRequest]:
    """The first token of a second turn: the conversation so far and a short message behind it."""
    rng = random.Random(len(jobs))
    return [
        FixedLength(
            f"t{i}",
            (*job.input_ids, *result.output_ids, *(rng.randrange(PROMPT_IDS) for _ in range(MESSAGE))),
            1,
            handoff=job.handoff,
        )
        for i, (job, result) in enumerate(zip(jobs, results, strict=True))
    ]


def key(i: int) -> SampleKey:
    return SampleKey(11, 0, i)


async def drive(url: str, jobs: list[GenerateRequest], concurrency: int) -> tuple[float, list[GenerateResult]]:
    """(seconds, results): at most `concurrency` requests at once, each in an HTTP request of its own."""
    gate = asyncio.Semaphore(concurrency)
    async with EngineClient(url, timeout_s=1800, max_retries=0, max_connections=concurrency) as client:

        async def one(job: GenerateRequest) -> GenerateResult:
            async with gate:
                [result] = await client.generate([job])
                return result

        t = time.perf_counter()
        results = await asyncio.gather(*map(one, jobs))
        return time.perf_counter() - t, list(results)


async def fresh_drive(url: str, jobs: list[GenerateRequest], concurrency: int) -> tuple[float, list[GenerateResult]]:
    """`drive` with nothing cached of an earlier repetition."""
    async with EngineClient(url, timeout_s=60) as client:
        await client.flush_cache()
    return await drive(url, jobs, concurrency)


async def two_servers(
    args: argparse.Namespace, urls: tuple[str, str], name: str, tokens: TokenBytes, rows: list[dict[str, Any]]
) -> None:
    """The same rule and lengths written by two servers, each cell driven as `engine.tokens_per_request=auto`."""
    rule = HandoffRule.of("word", 0.5, CAP, 16, boundary_ids("word", tokens.table, tokens.special))
    async with (
        EngineClient(urls[0], role="senior", timeout_s=1800, max_connections=0) as senior,
        EngineClient(urls[1], role="junior", timeout_s=1800, max_connections=0) as junior,
    ):
        clients = {SENIOR: senior, JUNIOR: junior}
        warm = (16, 16, 16, args.prompt, 1)
        for length, at_once, count, prompt, _ in [warm, *(c for c in args.cells if c[0] <= args.two_servers)]:
            rng = random.Random(at_once)
            took, written = 0.0, 0
            variant = VARIANTS["lockstep-w6" if at_once <= 128 else "lockstep"]
            for wave in range(count // at_once):
                prompts = [tuple(rng.randrange(PROMPT_IDS) for _ in range(prompt)) for _ in range(at_once)]
                writers = make_writers(prompts, rule, tokens, length, variant, wave)
                _, measured, _ = await tandem(clients, writers, variant)
                took, written = took + measured["wall_s"], written + int(measured["tokens"])
            row = {
                "engine": name, "prob_senior": 0.5, "prompt": prompt, "new_tokens": length, "concurrency": at_once,
                "requests": count,
                "tokens": written, "seconds": round(took, 3), "tokens_per_s": round(written / took, 1),
            }  # fmt: skip
            if length > 16:
                keep(args, rows, row)


def mismatches(rule: HandoffRule, results: list[GenerateResult]) -> int:
    """Tokens whose reported author is not the rule's."""
    return sum(
        a != b
        for i, r in enumerate(results)
        for a, b in zip(r.authors, rule.authorship(key(i), r.output_ids), strict=True)
    )


def measure(
    args: argparse.Namespace, url: str, name: str, rule: HandoffRule | None, rows: list[dict[str, Any]]
) -> None:
    for prob in [None] if rule is None else args.prob:
        now = None if rule is None else HandoffRule.of("word", prob, CAP, 16, rule.boundary)
        for length, concurrency, count, prompt, repeats in args.cells:
            asyncio.run(drive(url, requests(min(count, 32), now, 16, args.prompt), concurrency))  # warm
            jobs = requests(count, now, length, prompt)
            runs = [asyncio.run(fresh_drive(url, jobs, concurrency)) for _ in range(repeats)]
            seconds = statistics.median(s for s, _ in runs)
            results = next(r for s, r in runs if s == statistics.median_low(s for s, _ in runs))
            if short := [len(r.output_ids) for _, found in runs for r in found if len(r.output_ids) != length]:
                raise SystemExit(
                    f"{name}: {len(short)} responses ended early, at {sorted(short)[:5]} tokens of {length}"
                )
            written = count * length
            row: dict[str, Any] = {
                "engine": name,
                "prob_senior": prob,
                "prompt": prompt,
                "new_tokens": length,
                "concurrency": concurrency,
                "requests": count,
                "tokens": written,
                "seconds": round(seconds, 3),
                "tokens_per_s": round(written / seconds, 1),
                "least_and_most_s": [round(f(s for s, _ in runs), 3) for f in (min, max)],
            }
            if prompt != args.prompt:
                one = requests(count, now, 1, prompt)
                row["prefill_s"] = round(asyncio.run(fresh_drive(url, one, concurrency))[0], 3)
                row["decode_tokens_per_s"] = round((written - count) / (seconds - row["prefill_s"]), 1)
            if now is not None:
                senior = sum(sum(r.authors) for r in results)
                row |= {"senior_share": round(senior / written, 3), "author_mismatches": mismatches(now, results)}
            keep(args, rows, row)
        for length, concurrency, count, prompt, repeats in args.second_turns:
            jobs, took = requests(count, now, length, prompt), list[float]()
            for _ in range(repeats):
                _, results = asyncio.run(fresh_drive(url, jobs, concurrency))
                took.append(asyncio.run(drive(url, turns(jobs, results), concurrency))[0])
            cell = {"prompt": prompt, "tokens_before": length, "concurrency": concurrency, "requests": count}
            keep(args, rows, {"engine": name, "second_turn_s": round(statistics.median(took), 3), **cell})
        if args.profile:
            with tempfile.TemporaryDirectory() as folder:
                jobs = requests(args.profile, now, 1024, args.profile_prompt)
                steps = asyncio.run(profiled(url, jobs, args.profile, Path(folder), args.profile_after))
            keep(args, rows, {"engine": name, "prob_senior": prob, "profile": args.profile, **steps})


def keep(args: argparse.Namespace, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row; it is printed and written at once, for a run that is cut short."""
    rows.append(row)
    print(json.dumps(row), flush=True)
    if args.out:
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


async def profiled(
    url: str, jobs: list[GenerateRequest], concurrency: int, folder: Path, after_s: float
) -> dict[str, Any]:
    """What ten decode steps did on the GPU, by SGLang's own profiler."""
    running = asyncio.create_task(drive(url, jobs, concurrency))
    await asyncio.sleep(
        after_s
    )  # behind the prefill; the profiler's own start takes seconds, the responses last longer
    body = {"output_dir": str(folder), "num_steps": PROFILED_STEPS, "activities": ["GPU"]}
    post = urllib.request.Request(
        f"{url}/start_profile", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    await asyncio.to_thread(DIRECT.open, post, timeout=60)
    await running
    for _ in range(120):
        if files := list(folder.rglob("*.trace.json.gz")):
            await asyncio.sleep(2)  # until it is whole
            return gpu_time(json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"], PROFILED_STEPS)
        await asyncio.sleep(0.5)
    return {"error": "no trace"}


def solo(
    args: argparse.Namespace,
    work: Path,
    pairs: list[tuple[str, str]],
    logs: Path,
    tokens: TokenBytes | None,
    rows: list[dict[str, Any]],
) -> None:
    """Each model alone, and with --two-servers every pair's two at once."""
    if args.only == "fused":
        return
    known: set[str] = set()

    def measure_once(size: str, url: str) -> None:
        if size not in known and not args.no_solo:
            known.add(size)
            measure(args, url, size, None, rows)

    if tokens is None:
        for size in sorted({size for pair in pairs for size in pair}):
            with served(args, work / size, logs / f"{size}.log", None) as url:
                measure_once(size, url)
        return
    if args.cards:
        for senior, junior in pairs:
            with both_served(args, work, senior, junior, logs) as urls:
                asyncio.run(two_servers(args, urls, f"two servers {senior}+{junior}", tokens, rows))
                measure_once(senior, urls[0])
                measure_once(junior, urls[1])
        return
    for senior in dict.fromkeys(senior for senior, _ in pairs):  # its server stays up for all its juniors
        with served(args, work / senior, logs / f"{senior}.log", None, 0.4) as first:
            measure_once(senior, first)
            for junior in (j for s, j in pairs if s == senior):
                with served(args, work / junior, logs / f"{junior}-beside.log", None) as second:
                    asyncio.run(two_servers(args, (first, second), f"two servers {senior}+{junior}", tokens, rows))
                    measure_once(junior, second)


@contextlib.contextmanager
def both_served(
    args: argparse.Namespace, work: Path, senior: str, junior: str, logs: Path
) -> Iterator[tuple[str, str]]:
    """URLs of the senior's and the junior's server, each on a card of its own, started side by side."""
    servers = [
        served(args, work / size, logs / f"{role}-{size}-of-its-own.log", None, card=card)
        for (role, size), card in zip((("senior", senior), ("junior", junior)), args.cards, strict=True)
    ]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(server.__enter__) for server in servers]
        wait(starts)
        for server, start in zip(servers, starts, strict=True):
            if start.exception() is None:  # one that failed has ended by itself
                stack.push(server.__exit__)
        first, second = (start.result() for start in starts)
        yield first, second


def name(attention: str, prefill: str, senior: str, junior: str) -> str:
    """How the rows of a fused engine are called."""
    return f"{NAMES[attention]} {senior}+{junior}" + ("" if prefill == "triton" else f", {prefill} prefill")


def print_table(pairs: list[tuple[str, str]], rows: list[dict[str, Any]]) -> None:
    def speed(engine: str, like: dict[str, Any], prob: float | None = None, of: str = "tokens_per_s") -> float:
        cell = ("new_tokens", "concurrency", "prompt")
        same = [r for r in rows if r["engine"] == engine and "new_tokens" in r and r["prob_senior"] == prob]
        found = [r[of] for r in same if of in r and all(r.get(k) == like.get(k) for k in cell)]
        return float(found[-1]) if found else float("nan")

    print(
        "| pair | attention, prefill | p | prompt | new | concurrency | senior tok/s | junior tok/s | fused tok/s | x senior "
        "| decoding alone x | aim | x aim | two servers x |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for senior, junior in pairs:
        called = {name(m, p, senior, junior): ", ".join((m, p)) for m in NAMES for p in PREFILLS}
        for r in rows:
            if r["engine"] not in called or "new_tokens" not in r:
                continue
            mode = called[r["engine"]]
            s, j, f = speed(senior, r), speed(junior, r), r["tokens_per_s"]
            cost, aim = s / f, (1 / s + 1 / j) * s
            decoding = speed(senior, r, of="decode_tokens_per_s") / r.get("decode_tokens_per_s", float("nan"))
            two = s / speed(f"two servers {senior}+{junior}", r, r["prob_senior"])
            print(
                f"| {senior} + {junior} | {mode} | {r['prob_senior']} | {r.get('prompt')} | {r['new_tokens']} "
                f"| {r['concurrency']} | {s:,.0f} | {j:,.0f} | {f:,.0f} | {cost:.2f} | {decoding:.2f} | {aim:.2f} "
                f"| {cost / aim:.3f} | {two:.2f} |"
            )


def cells_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace, flag: str, texts: list[str]
) -> list[tuple[int, int, int, int, int]]:
    """(new tokens, at once, requests, tokens of a prompt, repeats) of each."""
    pattern = r"([1-9]\d*)@([1-9]\d*)(?:x([1-9]\d*))?(?::([1-9]\d*))?(?:/([1-9]\d*))?"
    found = [(text, re.fullmatch(pattern, text)) for text in texts]
    if no_cell := [text for text, match in found if match is None]:
        parser.error(f"{flag} {no_cell[0]}: expected TOKENS@CONCURRENCY[xROUNDS][:PROMPT][/REPEATS], all above 0")
    cells = [[int(x or 0) for x in match.groups()] for _, match in found if match]
    return [
        (new, at_once, at_once * (rounds or 1), prompt or args.prompt, repeats or args.repeats)
        for new, at_once, rounds, prompt, repeats in cells
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with Qwen's tokenizer files")
    parser.add_argument("--pairs", nargs="+", default=["4b+0.6b", "4b+4b"], help=f"sizes: {', '.join(SIZES)}")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--new", nargs="+", type=int, default=[256], help="tokens per response")
    parser.add_argument("--prob", nargs="+", type=float, default=[0.5])
    parser.add_argument("--prompt", type=int, default=200, help="tokens per prompt")
    parser.add_argument("--rounds", type=int, default=2, help="requests = concurrency x rounds")
    parser.add_argument(
        "--cells",
        nargs="+",
        help="TOKENS@CONCURRENCY[xROUNDS][:PROMPT][/REPEATS], not --new, --concurrency, --rounds, --prompt, --repeats",
    )
    parser.add_argument(
        "--attention", nargs="+", choices=tuple(NAMES), default=["every_step"], help="of the fused engine"
    )
    parser.add_argument(
        "--prefill", nargs="+", choices=PREFILLS, default=["auto"], help="engine.fused_prefill of the fused engine"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each cell of one engine; the median counts")
    parser.add_argument(
        "--two-servers", type=int, default=0, help="also two servers, for cells of at most so many tokens"
    )
    parser.add_argument(
        "--only", choices=("fused", "solo"), help="leave the other out; the table takes its rows from the file of --out"
    )
    parser.add_argument("--profile", type=int, help="profile decode steps at this concurrency")
    parser.add_argument("--profile-prompt", type=int, default=200, help="tokens per prompt while the profiler runs")
    parser.add_argument("--profile-after", type=float, default=1.0, help="seconds until it starts: behind the prefill")
    parser.add_argument(
        "--second-turns", nargs="*", default=[], help="cells: also time the first token of a turn behind such responses"
    )
    parser.add_argument("--server", default="", help="more flags of sglang.launch_server, for every server")
    parser.add_argument("--fused-server", default="", help="the same, for the fused engines alone")
    parser.add_argument("--cards", nargs=2, help="a card for each of --two-servers: the senior's and the junior's")
    parser.add_argument("--no-solo", action="store_true", help="no model alone")
    parser.add_argument("--solo-attention", default="triton", help="SGLang's attention backend of the solo engines")
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--start-timeout", type=float, default=400.0)
    parser.add_argument("--out", help="also append the rows to this file")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    args = parser.parse_args()
    if min(args.rounds, args.repeats, args.prompt, *args.new, *args.concurrency) < 1:
        parser.error("--rounds, --repeats, --prompt, --new, --concurrency: expected numbers above 0")
    if wrong_prob := [p for p in args.prob if not 0 <= p <= 1]:
        parser.error(f"--prob {wrong_prob[0]}: expected a number from 0 to 1")
    if wrong := [p for p in args.pairs if len(p.split("+")) != 2 or not set(p.split("+")) <= set(SIZES)]:
        parser.error(f"--pairs {wrong[0]}: expected SENIOR+JUNIOR of {', '.join(SIZES)}")
    if not args.tokenizer.is_dir():
        parser.error(f"--tokenizer {args.tokenizer}: expected a folder with Qwen's tokenizer files")
    if shutil.which(args.sglang_python) is None:
        parser.error(f"--sglang-python {args.sglang_python}: expected an interpreter that can be run")
    if args.cards and not args.two_servers:
        parser.error("--cards: expected --two-servers with it, which says for which cells two servers are started")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out {args.out}: expected a file in a folder that exists")
    args.second_turns = cells_of(parser, args, "--second-turns", args.second_turns)
    if args.cells:
        args.cells = cells_of(parser, args, "--cells", args.cells)
    else:
        args.cells = [
            (new, n, n * args.rounds, args.prompt, args.repeats) for new in args.new for n in args.concurrency
        ]
    pairs = [(senior, junior) for senior, junior in (p.split("+") for p in args.pairs)]
    rule = HandoffRule.of("word", 0.5, CAP, 16, table())
    # Now, not after the fused engines: a folder that will not do costs no run.
    tokens = ModelTokenizer.load(args.tokenizer).tokens if args.two_servers else None
    rows: list[dict[str, Any]] = []
    if args.only and args.out and Path(args.out).exists():
        rows = [json.loads(line) for line in Path(args.out).read_text(encoding="utf-8").splitlines()]
    with terminate_as_interrupt(), tempfile.TemporaryDirectory(prefix="fused-benchmark-") as temporary:
        work = Path(temporary)
        logs = args.logs or work
        logs.mkdir(parents=True, exist_ok=True)
        configs = {s: make_folder(work / s, s, args.tokenizer) for s in sorted({s for p in pairs for s in p})}
        digest = write_tables(work / "tables.npy", [rule.boundary], QWEN3["vocab_size"])
        if args.only != "solo":
            # Before the solo engines: a run that is cut short has what nothing else can give.
            for (senior, junior), attention, prefill in itertools.product(pairs, args.attention, args.prefill):
                override = override_args(
                    configs[senior],
                    configs[junior],
                    junior_folder=None,
                    tables=work / "tables.npy",
                    tables_sha256=digest,
                    catch_up={} if attention == "catch_up" else None,
                    prefill=prefill,
                )
                log = logs / f"{senior}+{junior}-{attention}-{prefill}.log"
                with served(args, work / senior, log, override) as url:
                    measure(args, url, name(attention, prefill, senior, junior), rule, rows)
        solo(args, work, pairs, logs, tokens, rows)
        print_table(pairs, rows)


if __name__ == "__main__":
    main()

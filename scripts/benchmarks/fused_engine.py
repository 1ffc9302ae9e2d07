"""Tokens per second of one SGLang that holds senior and junior, against each of them alone on the same GPU.

Dummy weights with the dimensions of published models, random prompts, responses of a fixed length, on a machine with one GPU:

    PYTHONPATH=. python scripts/benchmarks/fused_engine.py --tokenizer FOLDER --out fused.jsonl

SGLang must be importable by this very Python (or by `--sglang-python`). Prints one JSON line per row and a table at the
end. The yardstick is (T_senior + T_junior) / T_senior: what two models cost that share nothing and waste nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

from bench_models import QWEN3, SIZES, make_folder

from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.fused.launch import environment, override_args, write_tables
from slime_tandem.engines.protocol import GenerateRequest, GenerateResult
from slime_tandem.engines.sglang import free_port
from slime_tandem.rollout.handoff import HandoffRule, author_key
from slime_tandem.rollout.tandem import handoff_of
from slime_tandem.types import SampleKey

PROMPT_IDS = 150000
"""Prompts are drawn from the ids below: ordinary tokens of any Qwen vocabulary."""
CAP = 32


def table() -> frozenset[int]:
    """A boundary table of the density of the paper's rule on a Qwen vocabulary, 35%: dummy models write any id alike."""
    return frozenset(random.Random(1).sample(range(QWEN3["vocab_size"]), k=int(0.35 * QWEN3["vocab_size"])))


@contextlib.contextmanager
def served(args: argparse.Namespace, folder: Path, log: Path, override: dict[str, Any] | None) -> Iterator[str]:
    """A running SGLang; its URL. Ends the processes that it started, no others."""
    port = free_port("127.0.0.1")
    env = dict(os.environ) if override is None else environment(os.environ, cuda=True)
    env |= {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
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
        command += ["--attention-backend", "triton", "--dtype", "bfloat16", "--mem-fraction-static", "0.8"]
        command += ["--cuda-graph-max-bs-decode", str(max(args.concurrency))]
    if override is not None:
        command += ["--json-model-override-args", json.dumps(override)]
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
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"{url}/health", timeout=5).status == 200:
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


def requests(args: argparse.Namespace, count: int, rule: HandoffRule | None, length: int) -> list[GenerateRequest]:
    rng = random.Random(count)
    handoffs = [None] * count if rule is None else [handoff_of(rule, author_key(key(i))) for i in range(count)]
    return [
        GenerateRequest(
            f"r{i}", tuple(rng.randrange(PROMPT_IDS) for _ in range(args.prompt)), length, handoff=handoffs[i]
        )
        for i in range(count)
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
        now = None if rule is None else HandoffRule("word", prob, CAP, 16, rule.boundary)
        for length in args.new:
            for concurrency in args.concurrency:
                count = concurrency * args.rounds
                asyncio.run(drive(url, requests(args, min(count, 32), now, 16), concurrency))  # warm
                seconds, results = asyncio.run(drive(url, requests(args, count, now, length), concurrency))
                written = sum(len(r.output_ids) for r in results)
                row: dict[str, Any] = {
                    "engine": name,
                    "prob_senior": prob,
                    "new_tokens": length,
                    "concurrency": concurrency,
                    "requests": count,
                    "tokens": written,
                    "seconds": round(seconds, 3),
                    "tokens_per_s": round(written / seconds, 1),
                }
                if now is not None:
                    senior = sum(sum(r.authors) for r in results)
                    row |= {"senior_share": round(senior / written, 3), "author_mismatches": mismatches(now, results)}
                rows.append(row)
                print(json.dumps(row), flush=True)
                if args.out:
                    with open(args.out, "a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


def print_table(pairs: list[tuple[str, str]], rows: list[dict[str, Any]]) -> None:
    def speed(engine: str, length: int, concurrency: int, prob: float | None = None) -> float:
        same = (engine, length, concurrency, prob)
        return next(
            (r["tokens_per_s"] for r in rows
             if (r["engine"], r["new_tokens"], r["concurrency"], r["prob_senior"]) == same), float("nan"),
        )  # fmt: skip

    print("| pair | p | new | concurrency | senior tok/s | junior tok/s | fused tok/s | x senior | aim | x aim |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for senior, junior in pairs:
        for r in rows:
            if r["engine"] != f"fused {senior}+{junior}":
                continue
            n, c = r["new_tokens"], r["concurrency"]
            s, j, f = speed(senior, n, c), speed(junior, n, c), r["tokens_per_s"]
            cost, aim = s / f, (1 / s + 1 / j) * s
            print(
                f"| {senior} + {junior} | {r['prob_senior']} | {n} | {c} | {s:,.0f} | {j:,.0f} | {f:,.0f} | {cost:.2f} "
                f"| {aim:.2f} | {cost / aim:.3f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with Qwen's tokenizer files")
    parser.add_argument("--pairs", nargs="+", default=["4b+0.6b", "4b+4b"], help=f"sizes: {', '.join(SIZES)}")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--new", nargs="+", type=int, default=[256], help="tokens per response")
    parser.add_argument("--prob", nargs="+", type=float, default=[0.5])
    parser.add_argument("--prompt", type=int, default=200, help="tokens per prompt")
    parser.add_argument("--rounds", type=int, default=2, help="requests = concurrency x rounds")
    parser.add_argument("--server", default="", help="more flags of sglang.launch_server, for every server")
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--start-timeout", type=float, default=400.0)
    parser.add_argument("--out", help="also append the rows to this file")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    args = parser.parse_args()
    pairs = [(senior, junior) for senior, junior in (p.split("+") for p in args.pairs)]
    rule = HandoffRule("word", 0.5, CAP, 16, table())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fused-benchmark-") as temporary:
        work = Path(temporary)
        logs = args.logs or work
        logs.mkdir(parents=True, exist_ok=True)
        configs = {s: make_folder(work / s, s, args.tokenizer) for s in sorted({s for p in pairs for s in p})}
        digest = write_tables(work / "tables.npy", [rule.boundary], QWEN3["vocab_size"])
        for size in configs:
            with served(args, work / size, logs / f"{size}.log", None) as url:
                measure(args, url, size, None, rows)
        for senior, junior in pairs:
            override = override_args(
                configs[senior], configs[junior], junior_folder=None, tables=work / "tables.npy", tables_sha256=digest
            )
            with served(args, work / senior, logs / f"{senior}+{junior}.log", override) as url:
                measure(args, url, f"fused {senior}+{junior}", rule, rows)
        print_table(pairs, rows)


if __name__ == "__main__":
    main()

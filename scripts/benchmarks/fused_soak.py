"""Many tandem responses under aborts, disconnects and a KV pool that is too small: none may be lost, none may be wrong.

    python scripts/benchmarks/fused_soak.py SENIOR JUNIOR --requests 10000 --sglang-python PYTHON
    python scripts/benchmarks/fused_soak.py SENIOR JUNIOR --url http://127.0.0.1:30000    # a server that runs

A response that is aborted is resumed until it is whole; one whose connection was cut is written anew. Every finished
response must have its full length, one finite log-prob per token, and the authors that the rule prescribes. Prints one
JSON line; the exit code is 1 if anything was lost or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from slime_tandem.config import SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.fused.launch import FusedServer, Sglang, catch_up_of
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.errors import EngineError
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.drive import write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.strategies import STRATEGIES
from slime_tandem.types import JUNIOR, SENIOR, Prompt, SampleKey, TandemSample

PROMPT = Prompt("soak", (), None, "soak")


class Soak:
    """One run: the settings, the counts."""

    def __init__(self, args: argparse.Namespace, tokenizer: ModelTokenizer) -> None:
        self.args, self.tokens = args, tokenizer.tokens
        self.rules = [
            HandoffRule.of(s, p, 16, 8, boundary_ids(s, self.tokens.table, self.tokens.special))
            for s in STRATEGIES
            for p in (0.3, 0.7)
        ]
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def rule(self, i: int) -> HandoffRule:
        return self.rules[i % len(self.rules)]

    def writer(self, i: int) -> TandemWriter:
        rng = random.Random(i)
        prompt = [rng.randrange(10, len(self.tokens.table)) for _ in range(rng.randint(1, self.args.prompt))]
        sampling = SamplingConfig(max_new_tokens=rng.randint(1, self.args.new))
        return TandemWriter(
            SampleKey(5, 0, i),
            0,
            PROMPT,
            prompt,
            WriterOptions(self.rule(i), sampling, self.tokens, score_junior=True, fused=True),
        )

    async def one(self, i: int, client: EngineClient) -> None:
        """Write response `i`, whatever happens to it on the way; count what happened."""
        rng = random.Random(-1 - i)
        engines = {SENIOR: client, JUNIOR: client}
        writer = self.writer(i)
        try:
            if rng.random() < self.args.disconnects:
                async with EngineClient(self.args.url, max_retries=0) as other:
                    doomed = asyncio.ensure_future(write_one(self.writer(i), {SENIOR: other, JUNIOR: other}))
                    await asyncio.sleep(rng.uniform(0.01, 0.5))
                    self.counts["disconnects"] += not doomed.done()
                    doomed.cancel()
                    await asyncio.gather(doomed, return_exceptions=True)
            while True:
                task = asyncio.ensure_future(write_one(writer, engines, aborted=lambda: True))
                if rng.random() < self.args.aborts:
                    await asyncio.sleep(rng.uniform(0.01, self.args.abort_after))
                    await client.abort(f"5-0-{i}-{writer.transcript.requests}")
                sample = await task
                if sample.finish_reason != "abort":
                    break
                self.counts["aborts"] += 1
                writer = TandemWriter.resume(sample, writer.options)
        except EngineError as error:
            self.counts["failed"] += 1
            self.counts["mismatched"] += "what the rule prescribes" in str(error)
            self.faults.append(str(error)[:300])
            return
        self.check(sample, writer)

    def check(self, sample: TandemSample, writer: TandemWriter) -> None:
        n = len(sample.response_ids)
        whole = n == writer.options.sampling.max_new_tokens or sample.response_ids[-1] in self.tokens.eos_ids
        self.counts["written"] += 1
        self.counts["tokens"] += n
        self.counts["senior_tokens"] += sample.senior_tokens
        self.counts["cut_short"] += not whole
        self.counts["missing_log_probs"] += len(sample.senior_log_probs) != n
        mask = self.rule(sample.key.sample_index).authorship(sample.key, sample.response_ids)
        self.counts["mismatched"] += mask != sample.authorship_mask

    async def run(self) -> None:
        gate = asyncio.Semaphore(self.args.concurrency)
        async with EngineClient(self.args.url, timeout_s=600, max_connections=self.args.concurrency) as client:

            async def gated(i: int) -> None:
                async with gate:
                    await self.one(i, client)
                    if i % 500 == 499:
                        print(f"{i + 1} of {self.args.requests}: {dict(self.counts)}", file=sys.stderr, flush=True)

            await asyncio.gather(*(gated(i) for i in range(self.args.requests)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak test of the fused engine.")
    parser.add_argument("senior", type=Path)
    parser.add_argument("junior", type=Path)
    parser.add_argument("--url", help="a fused server that runs (with these models' word and sentence tables)")
    parser.add_argument("--sglang-python")
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=40, help="longest prompt, tokens")
    parser.add_argument("--new", type=int, default=64, help="longest response, tokens")
    parser.add_argument("--aborts", type=float, default=0.2, help="share of requests that are aborted")
    parser.add_argument("--abort-after", type=float, default=0.5, help="an abort comes within so many seconds")
    parser.add_argument("--disconnects", type=float, default=0.1, help="share that lose their connection first")
    parser.add_argument("--pool", type=int, default=1024, help="KV pool of the server started here, tokens")
    parser.add_argument(
        "--retract-every",
        type=int,
        metavar="STEPS",
        help="the server started here throws out its shortest response so often",
    )
    parser.add_argument("--fused-attention", choices=("every_step", "catch_up"), default="every_step")
    parser.add_argument("--fused-prefill", choices=("auto", "triton", "flashinfer"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the server")
    parser.add_argument("--log", type=Path, default=Path("fused_soak_server.log"))
    args = parser.parse_args()
    tokenizer = ModelTokenizer.load(args.senior)
    soak = Soak(args, tokenizer)
    tables = [boundary_ids(s, tokenizer.tokens.table, tokenizer.tokens.special) for s in ("word", "sentence")]
    result: dict[str, Any] = {"requests": args.requests}
    start = time.perf_counter()
    if args.url:
        asyncio.run(soak.run())
    else:
        flags = ("--max-total-tokens", str(args.pool), "--schedule-conservativeness", "0.05")
        catch_up = catch_up_of(args.fused_attention, args.senior)
        sglang = Sglang(args.sglang_python, args=flags, catch_up=catch_up, prefill=args.fused_prefill)
        options = ServeOptions(dtype=args.dtype)
        if args.retract_every:  # SGLang's own switch, for tests
            os.environ |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(args.retract_every)}
        with FusedServer(args.senior, args.junior, options, tables=tables, sglang=sglang, log_file=args.log) as server:
            args.url = server.url
            start = time.perf_counter()
            asyncio.run(soak.run())
        retracted = re.findall(r"#retracted_reqs: (\d+)", args.log.read_text(errors="replace"))
        result["retractions"] = sum(map(int, retracted))
    c = soak.counts
    lost = args.requests - c["written"]
    result |= {"lost": lost, **{k: c[k] for k in ("mismatched", "cut_short", "missing_log_probs")}, **c}
    result["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(result))
    for fault in soak.faults[:10]:
        print(fault, file=sys.stderr)
    return int(bool(lost or c["mismatched"] or c["cut_short"] or c["missing_log_probs"]))


if __name__ == "__main__":
    sys.exit(main())

"""What a handoff between two servers costs the process that asks: its processor time per request, and per million tokens.

    python scripts/benchmarks/handoff_cost.py [--tokens 1024 4096 8192 16384] [--at-once 4] [--gathered] [--profile]

Writer, client and HTTP are the package's; a server process that answers three tokens at once stands for both engines. Nothing
else runs in the process: no heartbeat, no scoring (`manager_loop.py` has the whole). Minima over the repeats, each over all
lengths in turn, so that what else the machine does reaches all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import socket
import sys
import time

from slime_tandem.config import SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.gathering import GatheringClient
from slime_tandem.rollout.drive import write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR, Prompt, SampleKey

CHUNK = 3
"""Tokens a request: English by words has 3.1."""
WORDS = range(20_000, 20_000 + CHUNK)
"""Ids of five digits, as most ids of real vocabularies have."""


def serve(listener: socket.socket) -> None:
    """Be both servers. What it costs is nobody's business here."""
    values = [f"[-0.{i}31234567890{i},{word},null]" for i, word in enumerate(WORDS, 1)]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            size = int(head.lower().split(b"content-length:")[1].split()[0])
            body = await reader.readexactly(size)
            short = json.loads(body[: body.index(b'"input_ids"')].rstrip(b", ") + b"}")
            answers = []
            for rid, params in zip(short["rid"], short["sampling_params"], strict=True):
                n = min(params["max_new_tokens"], CHUNK)
                ids = ",".join(str(word) for word in list(WORDS)[:n])
                answers.append(
                    f'{{"text":"","output_ids":[{ids}],"meta_info":{{"id":"{rid}","finish_reason":{{"type":"length","length":{n}}},'
                    f'"prompt_tokens":1,"weight_version":"1","cached_tokens":0,"completion_tokens":{n},"output_token_logprobs":'
                    f"[{','.join(values[:n])}]}}}}"
                )
            answer = f"[{','.join(answers)}]".encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
                + answer
            )

    async def main() -> None:
        async with await asyncio.start_server(talk, sock=listener, limit=2**20) as server:
            await server.serve_forever()

    asyncio.run(main())


async def measured(url: str, tokens: int, at_once: int, gathered: bool) -> tuple[float, float]:
    """(CPU seconds per million tokens, CPU microseconds per request)."""
    vocabulary = TokenBytes((None, *([b" word"] * (WORDS.stop - 1))), frozenset({0}), frozenset({0}))
    rule = HandoffRule.of("chunk", 0.5, 32, CHUNK, (), "alternate")
    options = WriterOptions(rule, SamplingConfig(max_new_tokens=tokens), vocabulary)
    async with (GatheringClient if gathered else EngineClient)(url) as client:

        async def write(i: int, options: WriterOptions) -> int:
            writer = TandemWriter(SampleKey(0, 0, i), 0, Prompt("p", (), None, "t"), [1] * 64, options)
            sample = await write_one(writer, {SENIOR: client, JUNIOR: client})
            return sample.requests

        warm = WriterOptions(rule, SamplingConfig(max_new_tokens=64), vocabulary)
        await asyncio.gather(*(write(i, warm) for i in range(at_once)))
        cpu = time.thread_time()
        requests = sum(await asyncio.gather(*(write(i, options) for i in range(at_once))))
        cpu = time.thread_time() - cpu
    return cpu / (tokens * at_once) * 1e6, cpu / requests * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192, 16384])
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gathered", action="store_true", help="what is asked in one turn of the loop, in one request")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    process = multiprocessing.get_context("fork").Process(target=serve, args=(listener,), daemon=True)
    process.start()
    listener.close()
    profile = cProfile.Profile(time.thread_time)
    found: dict[int, list[tuple[float, float]]] = {n: [] for n in args.tokens}
    for _ in range(args.repeats):
        for n in args.tokens:
            if args.profile:
                profile.enable()
            found[n].append(asyncio.run(measured(url, n, args.at_once, args.gathered)))
            profile.disable()
    print("| tokens | CPU s per million tokens | CPU us per request |\n|---|---|---|")
    for n, figures in found.items():
        seconds, micros = (min(column) for column in zip(*figures, strict=True))
        print(f"| {n} | {seconds:.1f} | {micros:.0f} |")
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())

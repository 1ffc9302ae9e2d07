#!/usr/bin/env python3
"""Exact candidates by windows: each with its whole prefix, as now, or in a session of SGLang that keeps the response.

    window_sessions.py --model FOLDER --python PYTHON_WITH_SGLANG --tokens 512 2048 --at-once 2 [--repeats 2]

Four ids are wanted at each position of random responses. *whole*: `exact_log_probs`, 32 positions a request, so many windows in
an HTTP request. *session*: the response is sent once, as a turn of a session; each window then names that turn, how much of it
comes before it (`offset`), and its last id, all windows at once. Both arms begin with an empty cache; the largest difference of
their values is told. CPU seconds of this process and of the server's; bytes of ids are counted, not sniffed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime_tandem.distill.candidates import ExactQuery, exact_log_probs
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.sglang import SglangProcess
from slime_tandem.protocol import GenerateRequest, GenerateResult, IdsAt, IdText

WANTED = 4


def _bytes(ids: Sequence[int]) -> int:
    """Of ids as JSON, without writing those again that are kept as text."""
    return sum(map(len, ids.json)) if isinstance(ids, IdText) else len(json.dumps(ids, separators=(",", ":")))


class Whole:
    """Passes requests on, and counts the bytes of their ids."""

    def __init__(self, client: EngineClient) -> None:
        self.client, self.requests, self.sent = client, 0, 0

    async def generate(self, requests: Any) -> list[GenerateResult]:
        self.requests += len(requests)
        self.sent += sum(_bytes(r.input_ids) for r in requests)
        return await self.client.generate(requests)

    async def close(self) -> None:
        pass


class InSession(Whole):
    """The same answers, each window as a turn behind the one turn that holds its response."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client)
        self.turns: dict[str, asyncio.Task[tuple[str, str]]] = {}

    async def generate(self, requests: Any) -> list[GenerateResult]:
        return list(await asyncio.gather(*(self._one(r) for r in requests)))

    async def _one(self, request: GenerateRequest) -> GenerateResult:
        session, turn = await self.turns[request.conversation or ""]
        n = len(request.input_ids)
        params = {"id": session, "rid": turn, "offset": n - 1}
        last = dataclasses.replace(request, input_ids=tuple(request.input_ids)[-1:], session_params=params)
        return (await super().generate([last]))[0]

    def hold(self, query: ExactQuery) -> None:
        async def send() -> tuple[str, str]:
            session = await self.client.open_session()
            whole = GenerateRequest(
                rid=f"whole-{query.rid}", input_ids=(*query.prompt, *query.response), max_new_tokens=0,
                logprob_start_len=len(query.prompt) - 1, session_params={"id": session},
            )  # fmt: skip
            (result,) = await super(InSession, self).generate([whole])
            return session, result.served_rid

        self.turns[query.conversation or ""] = asyncio.get_running_loop().create_task(send())

    async def close(self) -> None:
        for task in self.turns.values():
            await self.client.close_session((await task)[0])


def server_cpu(root: int) -> float:
    """CPU seconds of a process and all below it."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid], used[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def below(pid: int) -> bool:
        while pid in parents:
            if pid == root:
                return True
            pid = parents[pid]
        return False

    return sum(used[pid] for pid in parents if below(pid))


def query(n: int, number: int, vocabulary: int) -> ExactQuery:
    rng = random.Random(n * 1000 + number)
    ids = [rng.randrange(10, vocabulary) for _ in range(n)]
    wanted = IdsAt.of([sorted(rng.sample(range(10, vocabulary), WANTED)) for _ in range(n)])
    return ExactQuery(f"q{n}-{number}", [5, 6, 7, 8], ids, wanted, f"c{n}-{number}")


async def run(a: argparse.Namespace, url: str, pid: int) -> None:
    print(
        "| tokens | arm | requests | ids sent, MB | seconds | CPU s here | CPU s of the server | largest difference |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    async with EngineClient(url, timeout_s=600) as client:
        for n in a.tokens:
            first: list[np.ndarray] = []
            for kind in [Whole, InSession] * a.repeats:
                await client.flush_cache()
                queries = [query(n, i, a.vocabulary) for i in range(a.at_once)]
                engine = kind(client)
                before = (time.perf_counter(), time.process_time(), server_cpu(pid))
                for q in queries:
                    # In both arms the response has been scored before its windows are asked for.
                    if isinstance(engine, InSession):
                        engine.hold(q)
                        await engine.turns[q.conversation or ""]
                    else:
                        whole = GenerateRequest(
                            rid=f"whole-{q.rid}", input_ids=(*q.prompt, *q.response), max_new_tokens=0,
                            logprob_start_len=len(q.prompt) - 1,
                        )  # fmt: skip
                        await engine.generate([whole])
                found = await asyncio.gather(*(exact_log_probs(engine, [q], role="teacher") for q in queries))
                after = (time.perf_counter(), time.process_time(), server_cpu(pid))
                spent = [y - x for x, y in zip(before, after, strict=True)]
                await engine.close()
                values = [lists.values for (lists,) in found]  # type: ignore[union-attr]
                first = first or values
                worst = max(float(np.abs(x - y).max()) for x, y in zip(values, first, strict=True))
                print(
                    f"| {n:,} | {'session' if kind is InSession else 'whole'} | {engine.requests} | {engine.sent / 1e6:.2f} | "
                    + " | ".join(f"{s:.2f}" for s in spent)
                    + f" | {worst:.1e} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--model", type=Path, required=True, help="a small model; its positions are raised for long responses"
    )
    parser.add_argument("--python", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(a.model, model)
        config = json.loads((model / "config.json").read_text())
        a.vocabulary = config["vocab_size"]
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max(a.tokens) + 64}))
        args = ["--grammar-backend", "none", "--max-total-tokens", "65536", "--log-level", "warning"]
        server = SglangProcess(
            model, python=a.python, device="cpu", extra_args=args, log_file=Path(folder) / "log", start_timeout_s=600
        )
        try:
            server.launch()
            server.wait_ready()
            asyncio.run(run(a, server.url, server.pid))
        finally:
            server.stop()


if __name__ == "__main__":
    main()

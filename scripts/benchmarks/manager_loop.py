"""What slime's rollout manager costs as a whole: its event loop's processor time, and for how long it is blocked, with HTTP.

    python scripts/benchmarks/manager_loop.py --models TRIO [--tokens 8192] [--samples 16] [--processes 0 2] [--arms ...]

`TRIO` holds the folders senior, junior and teacher (`python -m slime_tandem.models.builtin` makes one): their tokenizers and
templates are used, their weights are not. In the place of engines stand server processes that answer as SGLang does, at once.
Measured is the package's own runtime (`slime_hooks.runtime`), as the hooks use it: all samples are written and scored at the
same time. `--processes 0`: in the loop; N: by N client processes, whose own time is given beside. A heartbeat every 10 ms says
for how long the loop was kept; the machine's other work is in that figure, and not in the processor times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from slime_tandem.config import RunConfig
from slime_tandem.engines import handoff_wire
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.slime_hooks import runtime, settings
from slime_tandem.slime_hooks.client_process import Sample, Status
from slime_tandem.slime_hooks.client_processes import ClientProcesses
from slime_tandem.slime_hooks.heartbeat import Heartbeat

ARMS = {
    "fused": ["engine.mode=fused", "opd.enabled=false"],
    "fused, sampled signal": ["engine.mode=fused"],
    "fused, exact lists": [
        "engine.mode=fused", "opd.selection.selector=tip", "opd.selection.ratio=0.5", "opd.selection.top_k=8",
    ],
    "two servers": [
        "opd.enabled=false", "tandem.selection_strategy=chunk", "tandem.chunk_size=3",
        "tandem.author_schedule=alternate",
    ],
}  # fmt: skip
SHARED = 0.8


class Standin:
    """Answers of an engine with vocabulary `words` (ids of plain text), as JSON; numbers are drawn beforehand."""

    def __init__(self, words: list[int], boundary: frozenset[int]) -> None:
        self.words, self.boundary = np.array(words), boundary
        rng = np.random.default_rng(0)
        self.values = (-rng.exponential(1.0, 2**16)).astype(np.float32).astype(float)
        self.lists = rng.permuted(np.tile(self.words, (4096, 1)), axis=1)[:, :16]

    def _some(self, n: int, at: int) -> list[float]:
        return np.resize(np.roll(self.values, -at % len(self.values)), n).tolist()  # type: ignore[no-any-return]

    def answer(self, rid: str, ids: list[int], params: dict[str, Any], start: int, top: int, wanted: list[int]) -> Any:
        n = params["max_new_tokens"]
        meta: dict[str, Any] = {
            "id": rid, "finish_reason": {"type": "length", "length": n}, "prompt_tokens": len(ids), "weight_version": "1",
            "cached_tokens": 0, "completion_tokens": n,
        }  # fmt: skip
        out = np.resize(np.roll(self.words, -len(ids)), n).tolist()
        values = self._some(n, len(ids))
        meta["output_token_logprobs"] = [[v, t, None] for v, t in zip(values, out, strict=True)]
        found = handoff_wire.parse(rid)
        if found is not None and n:
            handoff, _ = found
            rule = HandoffRule("word", handoff.threshold / 2**32, self.boundary, handoff.cap, handoff.alternate, None)
            runs, _, _ = rule.runs_of(out, handoff.run, handoff.run_length)
            authors = rule.authors(handoff.akey, runs).tolist()
            meta[handoff_wire.REPORT] = [[a, v, v] for a, v in zip(authors, values, strict=True)]
        if start >= 0:
            read = ids[start:]
            meta["input_token_logprobs"] = [[v, t, None] for v, t in zip(self._some(len(read), 7), read, strict=True)]
            meta["input_token_logprobs"][0][0] = None
            rows = [np.sort(self._some(top, i))[::-1].tolist() for i in range(64)]
            if top:
                # Four of five entries are alike on both sides where texts are: lists go by the id of the token that was read.
                meta["input_top_logprobs"] = [None] + [
                    [[v, t, None] for v, t in zip(rows[i % 64], self.listed(t_, len(ids), top), strict=True)]
                    for i, t_ in enumerate(read[1:])
                ]
            if wanted:
                meta["input_token_ids_logprobs"] = [None] + [
                    [[v, t, None] for v, t in zip(self._some(len(wanted), i), wanted, strict=True)]
                    for i in range(1, len(read))
                ]
        return {"text": "", "output_ids": out, "meta_info": meta}

    def listed(self, token: int, salt: int, top: int) -> list[int]:
        row = self.lists[token % len(self.lists)]
        shared = round(top * SHARED)
        return [*row[:shared].tolist(), *row[8 + salt % 2 : 8 + salt % 2 + top - shared].tolist()]


def serve(listener: socket.socket, words: list[int], boundary: frozenset[int], model: str) -> None:
    """Be one server: HTTP by hand, since its own time is nobody's business here."""
    made = Standin(words, boundary)
    info = json.dumps({"model_path": model, "tokenizer_path": model, "weight_version": "1"}).encode()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):  # the client has gone
                return
            lower = head.lower()
            size = int(lower.split(b"content-length:")[1].split()[0]) if b"content-length:" in lower else 0
            body = await reader.readexactly(size)
            data = info
            if b" /generate" in head:
                b = json.loads(body)
                named = b.get("token_ids_logprob") or [[]] * len(b["rid"])
                columns = (
                    b["rid"],
                    b["input_ids"],
                    b["sampling_params"],
                    b["logprob_start_len"],
                    b["top_logprobs_num"],
                    named,
                )
                data = json.dumps(
                    [made.answer(*row) for row in zip(*columns, strict=True)], separators=(",", ":")
                ).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data))
            writer.write(data)
            await writer.drain()

    async def main() -> None:
        async with await asyncio.start_server(talk, sock=listener, limit=2**20) as server:
            await server.serve_forever()

    asyncio.run(main())


def started(model: Path, words: list[int], boundary: frozenset[int]) -> tuple[str, Any]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    process = multiprocessing.get_context("fork").Process(
        target=serve, args=(listener, words, boundary, str(model)), daemon=True
    )
    process.start()
    listener.close()
    return url, process


async def measured(config: RunConfig, samples: int, processes: int) -> dict[str, float]:
    args = SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=1)
    settings.use(settings.ANY, config)
    made: Any = await (runtime.connect(args) if processes else runtime.connect_here(args, lambda: False))
    if processes:
        made._aborted = lambda: False
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": config.sampling.max_new_tokens}

    async def one(i: int) -> int:
        sample = Sample(
            index=i, group_index=i, prompt="", tokens=[], response="", response_length=0, label="1", reward=None,
            metadata={"messages": [{"role": "user", "content": "How many?"}]}, loss_mask=None, rollout_log_probs=None,
            weight_versions=[], remove_sample=False, status=Status.PENDING,
        )  # fmt: skip
        await made.write(sample, params, tandem=True)
        if config.opd.enabled:
            await made.score(sample)
        return int(sample.response_length)

    await asyncio.gather(*(one(i) for i in range(max(1, processes))))  # everything is up
    runtime.settle_collector()
    beat = Heartbeat()
    before = [_cpu(pid) for pid in (made.pids if processes else ())]
    start, cpu = time.monotonic(), time.thread_time()
    tokens = sum(await asyncio.gather(*(one(100 + i) for i in range(samples))))
    wall, cpu = time.monotonic() - start, time.thread_time() - cpu
    others = sum(_cpu(pid) for pid in (made.pids if processes else ())) - sum(before)
    found = beat.take()
    await beat.stop()
    if isinstance(made, ClientProcesses):
        await made.close()
    return {
        "loop": cpu / tokens * 1e6, "others": others / tokens * 1e6, "blocked": found["rollout/loop_blocked_s"] * 1e3,
        "busy": found["rollout/loop_busy_s"] * 1e3,
        "wall": wall, "tokens": tokens,
    }  # fmt: skip


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    a = parser.parse_args()
    from slime_tandem.models.tokenizer import ModelTokenizer
    from slime_tandem.rollout.boundaries import boundary_ids

    urls = {}
    for role in ("senior", "junior", "teacher"):
        tokens = ModelTokenizer.load(a.models / role).tokens
        words = [
            i for i, data in enumerate(tokens.table) if data and data.isascii() and data.decode().strip().isalpha()
        ]
        urls[role], _ = started(a.models / role, words, boundary_ids("word", tokens.table, tokens.special))
    print(
        "| arm | tokens | client processes | loop, CPU s/million | theirs, CPU s/million | loop busy, ms | blocked, ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for arm in a.arms:
        for length in a.tokens:
            for processes in a.processes:
                config = RunConfig.load(
                    overrides=[
                        *(f"models.{role}={a.models / role}" for role in urls),
                        *(f"engine.{role}_url={url}" for role, url in urls.items() if role != "junior" or "fused" not in arm),
                        *ARMS[arm], f"sampling.max_new_tokens={length}", f"engine.client_processes={processes}",
                    ]
                )  # fmt: skip
                r = asyncio.run(measured(config, a.samples, processes))
                cells = [arm, length, processes, *(f"{r[name]:.2f}" for name in ("loop", "others"))]
                cells += [f"{r[name]:.0f}" for name in ("busy", "blocked")]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print(f"most memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB")


if __name__ == "__main__":
    main()

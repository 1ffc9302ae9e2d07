"""Hostile requests beside honest ones, at one embedded server: is an honest one failed, changed or held up?

    python scripts/benchmarks/server_fuzz.py --requests 100000 --out fuzz.json

Honest clients ask a fixed set of questions over and over. Their answers are written down first, alone; then the same stream
runs beside the fuzz, and every answer must have the same tokens, at the first try. The fuzz is made by `shot`: every field of
every path, with wrong types, extremes, nesting, long lists, hostile patterns; wrong encodings; chunked, cut, trickled and
smuggled bodies; foreign hosts and origins. It sends no request that a holder of the key may well make and that would end
others' work: `abort_all`, or weights that fit. Beside it `--half-open` connections are kept open that never finish a request.
At the end: no answer 500, the same weights, and an end within seconds of SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.processes import ServerProcess
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.protocol import GenerateRequest

KEY = "a-key-of-the-fuzz"
RAW = {
    "@1e400@": "1e400",
    "@-1e400@": "-1e400",
    "@deep@": "[" * 5000 + "]" * 5000,
    "@deeper@": '{"a":' * 900 + "1" + "}" * 900,
}
"""What `json.dumps` does not write: it stands in the place of these strings."""
PATTERNS = (
    r"(?s)(?:.+)+\u0001", r"(a+)+$", r"(?:a|aa)+b", r"(?:a?){500}a{500}", "a{99999999999999999999}",
    r"(((a{1000}){1000}){1000})", r"(?s)(?:.?){1000}\x01",
    "(", "[", "(?P<a", r"(?=a)", r"(a)\1", r"\b", "(?:" * 900 + "a" + ")" * 900, r"[^\W\d_]+\d", "x" * 5000, "\ud800",
    "[[:alpha:]]",
    r"(?i)ſ|K", "a{e<=2}", r"\A(?:[^ ]*[ ]){2000}", r"(?:.{1,500}){1,2}\x01", "",
)  # fmt: skip
EXTREMES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400, -(10**400), 0.5, 1.0,
    -0.0, 1e308, 5e-324, float("nan"), float("inf"), "@1e400@", "@-1e400@", "@deep@", "@deeper@", "", "a", "\0", "\ud800", "7",
    "x" * 10_000, "é" * 50, [], [0], [5, 6], [None], [[]], [[5], [6]], [[[5]]], ["a"], ["a", ""], [True], [1.0], [2**63], [-1],
    list(range(3000)), ["s"] * 300, {}, {"a": 1}, [{}], {"truncated_logprobs": True},
)  # fmt: skip
PARAMS = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "stop_regex", "sampling_seed",
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "custom_params", "n",
    "repetition_penalty", "json_schema", "regex", "min_new_tokens", "logit_bias", "unknown",
)  # fmt: skip
FIELDS = (
    "rid", "text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "token_ids_logprob", "session_params", "stream", "lora_path",
)  # fmt: skip
PATHS = {
    "/generate": FIELDS,
    "/open_session": ("session_id", "capacity_of_str_len"),
    "/close_session": ("session_id",),
    "/abort_request": ("rid",),
    "/update_weights_from_disk": ("model_path", "weight_version", "flush_cache"),
    "/flush_cache": (),
    "/health": (), "/model_info": (), "/health_generate": (), "/nowhere": ("a",), "/generate/../generate": FIELDS,
}  # fmt: skip


@dataclass(frozen=True)
class Shot:
    """One hostile request as bytes, in parts; `finished`: whether all of a request is there, so that an answer must come."""

    parts: tuple[bytes, ...]
    finished: bool = True


def _generate_body(draw: random.Random) -> dict[str, Any]:
    """A body that is right but for a few fields."""
    params: dict[str, Any] = {"max_new_tokens": draw.randrange(1, 6), "temperature": draw.choice((0, 0.7, 1.0))}
    body: dict[str, Any] = {
        "input_ids": [draw.randrange(2, 250) for _ in range(draw.randrange(1, 8))],
        "sampling_params": params,
    }
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
        place, name = draw.choice(((params, draw.choice(PARAMS)), (body, draw.choice(FIELDS))))
        place[name] = draw.choice(EXTREMES)
    match draw.randrange(40):
        case 0 | 1:
            params |= {
                "stop_regex": draw.choice(PATTERNS),
                "max_new_tokens": draw.choice((3, 40, 300)),
                "ignore_eos": True,
            }
        case 2:
            body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": draw.choice((3, 250, 10**6))}
        case 3:
            body["input_ids"] = [[5]] * draw.choice((2, 50, 5000))
        case 4:
            body = {
                "text": draw.choice(("a" * 30_000, "the cat ", "\ud800", " \n" * 40, "\U0010ffff" * 9)),
                "sampling_params": params,
            }
        case 5:
            params["stop"] = [chr(97 + i % 26) * (1 + i % 9) for i in range(draw.choice((3, 256, 257)))]
    if draw.random() < 0.0005:
        body[draw.choice(FIELDS)] = list(range(1_000_000))
    return body


def _body(path: str, draw: random.Random) -> bytes:
    if path.startswith("/generate") and draw.random() < 0.9:
        value: Any = _generate_body(draw)
    else:
        names = PATHS[path] or ("a",)
        value = {draw.choice(names): draw.choice(EXTREMES) for _ in range(draw.randrange(3))}
        if draw.random() < 0.1:
            value = draw.choice(EXTREMES)
    if path == "/abort_request" and isinstance(value, dict):
        value["abort_all"] = draw.choice((False, None, 1, "true", [True]))  # never true: that is a right request
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    match draw.randrange(60):
        case 0:
            return text.encode("utf-16")
        case 1:
            return b"\xef\xbb\xbf" + text.encode()
        case 2:
            return text.encode("latin-1", "replace") + b"\xff"
        case 3:
            return draw.randbytes(draw.randrange(300))
        case 4:
            return text.encode()[: draw.randrange(len(text))]
        case 5:
            return b""
        case 6:
            return text.encode() * 2
    return text.encode()


def _chunked(body: bytes, draw: random.Random) -> bytes:
    made, at = b"", 0
    while at < len(body):
        size = draw.randrange(1, max(2, len(body)))
        part = body[at : at + size]
        made += b"%x\r\n%s\r\n" % (len(part), part)
        at += size
    return made + b"0\r\n\r\n"


def shot(draw: random.Random, key: str = KEY, target: str = "") -> Shot:
    """A request of the fuzz; the same for the same state of `draw`. `target`: weights that a page must not send."""
    path = draw.choices(list(PATHS), [60, 6, 6, 5, 5, 2, 1, 2, 1, 2, 1])[0]
    method = "POST" if PATHS[path] else draw.choice(("GET", "POST"))
    head = {"Host": "127.0.0.1", "Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    body = _body(path, draw)
    finished, send = True, body
    match draw.randrange(30):
        case 0:
            head["Content-Type"] = draw.choice(
                ("text/plain", "application/x-www-form-urlencoded", "", "json", "multipart/form-data")
            )
        case 1:
            head["Host"] = draw.choice(
                ("evil.example", "127.0.0.1.evil.example", "", "[::1", "a" * 5000, "10.0.0.1", "0")
            )
        case 2:
            head["Origin"] = draw.choice(
                ("http://evil.example", "null", "http://127.0.0.1:1", "file://", "http://127.0.0.1.evil")
            )
        case 3:
            head["Authorization"] = draw.choice(
                ("", "Bearer", "Bearer x", "Basic eDp5", f"bearer {key}é", "Bearer " + "k" * 5000)
            )
        case 4:  # what a page can do without asking first
            path, method, body = "/update_weights_from_disk", "POST", json.dumps({"model_path": target}).encode()
            send = body
            head |= {"Content-Type": "text/plain", "Origin": "http://evil.example"}
            head |= draw.choice(({}, {"Host": "evil.example"}, {"Content-Type": "application/json"}))
        case 5:
            head["Content-Encoding"] = draw.choice(("gzip", "deflate", "br", "zstd"))
        case 6:
            head |= {f"X-{i}": "v" * draw.randrange(200) for i in range(draw.choice((3, 150)))}
        case 7:
            method = draw.choice(("PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "HEAD", "\x00", "PATCH"))
        case 8:
            head |= {"Upgrade": "websocket", "Connection": "upgrade"}
        case 9:
            head["Sec-Fetch-Site"] = draw.choice(("cross-site", "same-site", "same-origin", "none"))
    match draw.randrange(20):
        case 0 | 1 | 2:
            head["Transfer-Encoding"] = "chunked"
            send = _chunked(body, draw)
        case 3:
            head["Transfer-Encoding"] = "chunked"
            send, finished = (
                draw.choice((b"zz\r\nabc\r\n0\r\n\r\n", b"5\r\nabc", b"ffffffffffffffff\r\na", b"-1\r\n\r\n")),
                False,
            )
        case 4:
            head["Content-Length"] = str(len(body) + draw.choice((1, 1000, 2**40)))
            finished = False
        case 5:
            head |= {
                "Content-Length": draw.choice(("-1", "a", "0x10", "1, 1", str(len(body)))),
                "Transfer-Encoding": "chunked",
            }
            finished = False
        case 6:
            head["Content-Length"] = str(len(body))
            send, finished = body[: len(body) // 2], False
        case _:
            head["Content-Length"] = str(len(body))
    lines = [
        f"{method} {path} HTTP/1.{draw.choices((0, 1), (1, 20))[0]}",
        *(f"{name}: {value}" for name, value in head.items()),
    ]
    data = "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + send
    if draw.random() < 0.01:
        data, finished = draw.randbytes(draw.randrange(1, 3000)), False
    cuts = sorted(draw.sample(range(1, len(data)), min(2, len(data) - 1))) if draw.random() < 0.1 else []
    return Shot(tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)), finished)


async def fire(port: int, one: Shot, timeout_s: float) -> str:
    """Send a shot over a connection of its own; the status of the answer, or how it ended without one."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                for part in one.parts:
                    writer.write(part)
                    await writer.drain()
                if not one.finished:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                line = await reader.readline()
                return line.split()[1].decode() if line.startswith(b"HTTP/1.") else "closed"
            finally:
                writer.transport.abort()
    except TimeoutError:
        return "no answer"
    except (OSError, ValueError, IndexError):
        return "closed"


async def half_open(port: int, draw: random.Random, counts: Counter[str]) -> None:
    """A connection that never finishes a request; when the server closes it, the next one."""
    heads = (
        b"", b"POST /gen", b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ",
        f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        'Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"input_ids": ['.encode(),
    )  # fmt: skip
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            counts["half-open refused"] += 1
            await asyncio.sleep(1.0)
            continue
        try:
            counts["half-open"] += 1
            writer.write(draw.choice(heads))
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(draw.uniform(1.0, 5.0)):
                        if not await reader.read(4096):
                            break
                writer.write(b"1")  # slowly, for ever
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()


def questions(draw: random.Random, count: int) -> list[GenerateRequest]:
    """Honest requests of all sorts: sampled and greedy, stops of every kind, log-probs, scores."""
    made = []
    for i in range(count):
        options: dict[str, Any] = {"sampling_seed": i, "temperature": draw.choice((0.0, 0.7, 1.0))}
        options |= draw.choice(
            ({}, {"top_k": 20}, {"top_p": 0.9, "min_p": 0.01}, {"stop": ("e",)}, {"stop_regex": (r"\A(?:[^ ]*[ ]){3}",)},
             {"stop_token_ids": (7, 8, 9)}, {"logprob_start_len": 0, "top_logprobs_num": 5}, {"token_ids_logprob": (3, 4)})
        )  # fmt: skip
        ids = tuple(draw.randrange(2, 250) for _ in range(draw.randrange(4, 40)))
        made.append(GenerateRequest(f"honest-{i}", ids, draw.choice((0, 8, 24)) if i % 5 else 24, **options))
    return made


@dataclass
class Honest:
    """What became of the honest requests."""

    asked: int = 0
    failed: int = 0
    changed: int = 0
    first: str = ""
    seconds: list[float] | None = None


async def honest_stream(
    clients: list[EngineClient],
    asked: list[GenerateRequest],
    expected: dict[str, Any],
    until: Callable[[], bool],
    pause_s: float,
) -> Honest:
    """Ask over and over until `until`, called after each answer; the first answer to a question is the expected one."""
    found = Honest(seconds=[])
    assert found.seconds is not None

    async def one(client: EngineClient, requests: list[GenerateRequest]) -> None:
        while True:
            for request in requests:
                begun = time.perf_counter()
                try:
                    [answer] = await client.generate([request])
                except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure to be counted
                    found.failed += 1
                    found.first = found.first or str(error)
                    answer = None
                found.asked += 1
                found.seconds.append(time.perf_counter() - begun)  # type: ignore[union-attr]
                if answer is not None:
                    told = answer.output_ids, answer.finish_reason, answer.matched, answer.weight_version
                    if expected.setdefault(request.rid, told) != told:
                        found.changed += 1
                        found.first = found.first or f"{request}: {told}, alone {expected[request.rid]}"
                if until():
                    return
                await asyncio.sleep(pause_s)

    await asyncio.gather(*(one(client, asked[i :: len(clients)]) for i, client in enumerate(clients)))
    return found


async def watch_health(port: int, until: Callable[[], bool]) -> list[float]:
    """Seconds that each answer of /health took; a missing one is an error."""
    took = []
    ask = Shot((b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",))
    while not until():
        begun = time.perf_counter()
        status = await fire(port, ask, 60.0)
        assert status == "200", status
        took.append(time.perf_counter() - begun)
        await asyncio.sleep(0.1)
    return took


def _times(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_ms": round(1e3 * statistics.median(ordered), 1),
        "p99_ms": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 1),
        "max_ms": round(1e3 * ordered[-1], 1),
    }


def _memory_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) // 1024


async def fuzz(args: argparse.Namespace, server: ServerProcess, target: str, log: Path) -> dict[str, Any]:
    assert server.pid is not None
    port = int(server.url.rsplit(":", 1)[1])
    draw = random.Random(args.seed)
    asked = questions(random.Random(args.seed + 1), 96)
    expected: dict[str, Any] = {}
    statuses: Counter[str] = Counter()
    wrong: list[str] = []
    left = iter(range(args.requests))
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(EngineClient(server.url, api_key=KEY, max_retries=0))
            for _ in range(args.honest)
        ]
        rounds = 3 * len(asked)
        tickets = iter(range(rounds))
        alone = await honest_stream(clients, asked, expected, lambda: next(tickets, None) is None, args.pause)
        assert len(expected) == len(asked), "every question was answered alone"
        memory = _memory_mib(server.pid)
        done = asyncio.Event()
        slow = [asyncio.create_task(half_open(port, draw, statuses)) for _ in range(args.half_open)]
        stream = asyncio.create_task(honest_stream(clients, asked, expected, done.is_set, args.pause))
        health = asyncio.create_task(watch_health(port, done.is_set))

        async def attacker() -> None:
            for _ in left:
                one = shot(draw, target=target)
                status = await fire(port, one, 60.0)
                statuses[status if one.finished or status.isdigit() else f"{status}, cut"] += 1
                if (status == "500" or (status == "no answer" and one.finished)) and len(wrong) < 5:
                    wrong.append(f"{status}: {b''.join(one.parts)[:400]!r}")

        begun = time.perf_counter()
        await asyncio.gather(*(attacker() for _ in range(args.concurrency)))
        seconds = time.perf_counter() - begun
        done.set()
        beside, took = await stream, await health
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        info = await clients[0].model_info()
        again = await honest_stream(clients, asked, expected, lambda: True, 0.0)
    peak = _memory_mib(server.pid)
    process = server._process
    assert process is not None
    begun = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(process.wait, 60)
    return {
        "requests": args.requests, "seed": args.seed, "half_open": args.half_open, "seconds": round(seconds, 1),
        "statuses": dict(sorted(statuses.items())), "wrong": wrong,
        "honest_alone": {"asked": alone.asked, **_times(alone.seconds or [0.0])},
        "honest_beside": {
            "asked": beside.asked + again.asked, "failed": beside.failed + again.failed,
            "changed": beside.changed + again.changed,
            "first": beside.first, **_times(beside.seconds or [0.0]),
        },
        "health": {"asked": len(took), **_times(took)},
        "weight_version": info["weight_version"], "stop_regex_stopped": info["stop_regex_stopped"],
        "peak_mib_before": memory, "peak_mib_after": peak, "log_bytes": log.stat().st_size,
        "sigterm_s": round(time.perf_counter() - begun, 2), "exit_code": code,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--half-open", type=int, default=600)
    parser.add_argument("--concurrency", type=int, default=24, help="hostile connections at once")
    parser.add_argument("--honest", type=int, default=4, help="honest clients")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two questions of an honest client")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from bench_models import tiny_pair

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tiny_pair(root, context=1024, eos=True)
        options = ServeOptions(cache_tokens=16384, max_batch=64, api_key=KEY)
        with ServerProcess(root / "senior", options, log_file=root / "log") as server:
            report = asyncio.run(fuzz(args, server, os.fspath(root / "junior"), root / "log"))
        print((root / "log").read_text()[-2000:], file=sys.stderr)
    text = json.dumps(report, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    beside, statuses = report["honest_beside"], report["statuses"]
    held = not beside["failed"] and not beside["changed"] and not report["wrong"] and not statuses.get("500")
    return 0 if held and report["weight_version"] == "default" and report["sigterm_s"] < 10 else 1


if __name__ == "__main__":
    sys.exit(main())

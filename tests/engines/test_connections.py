"""Answers of HTTP/1.1 in any cut, connections that are kept, lost and limited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.engines.connections import Answer, AnswerReader, ConnectionLostError, Connections

BODIES = st.binary(max_size=60)


def chunked(parts: list[bytes], *, trailer: bytes = b"") -> bytes:
    return b"".join(b"%x;note\r\n%s\r\n" % (len(p), p) for p in parts if p) + b"0\r\n" + trailer + b"\r\n"


@given(st.data(), BODIES, st.sampled_from(["length", "chunks", "trailer", "end"]), st.booleans(), st.booleans())
def test_an_answer_is_the_same_however_it_comes_in_pieces(
    data: st.DataObject, body: bytes, form: str, close: bool, early: bool
) -> None:
    head = b"HTTP/1.1 100 Continue\r\n\r\n" * early + b"HTTP/1.1 207 Some Words\r\nServer: x:y\r\n"
    head += b"CONNECTION:  Close\r\n" * close
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=3)))
    parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    raw = {
        "length": head + b"Content-length: %d\r\n\r\n" % len(body) + body,
        "chunks": head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(parts),
        "trailer": head + b"transfer-encoding: Chunked\r\n\r\n" + chunked(parts, trailer=b"A: b\r\nC: d\r\n"),
        "end": head + b"\r\n" + body,
    }[form]
    reader, got = AnswerReader(), None
    at = 0
    while at < len(raw):
        size = data.draw(st.integers(1, 25))
        assert got is None, "no answer before its last byte"
        got = reader.feed(raw[at : at + size])
        at += size
    if form == "end":
        assert got is None
        got = reader.ended()
    assert got == Answer(207, body, not close and form != "end")
    assert not AnswerReader().begun


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%s\r\nabcde\r\n"


@pytest.mark.parametrize("raw", [
    b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    *(CHUNKED % size for size in (b"zz", b"-5", b"+5", b"0x5", b"5_0", b"")),
    b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000,
])  # fmt: skip
def test_what_is_no_answer_is_said(raw: bytes) -> None:
    with pytest.raises(ConnectionError):
        AnswerReader().feed(raw)


def test_a_cut_answer_is_none() -> None:
    reader = AnswerReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc") is None
    assert reader.ended() is None


def serving(
    script: Callable[[int, bytes], bytes | None], use: Callable[[Connections], Awaitable[Any]], limit: int = 0
) -> Any:
    """Run `use` against a server that answers request n of head h by `script(n, h)`, and ends the connection for None; also how
    many connections it had."""
    heads: list[bytes] = []
    talking: set[asyncio.Task[None] | None] = set()
    count = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        talking.add(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                heads.append(head)
                answer = script(len(heads) - 1, head)
                if answer is None:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def main() -> Any:
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connections = Connections(f"http://127.0.0.1:{port}/v1", {"Authorization": "Bearer k"}, limit)
            try:
                return await use(connections), count, heads
            finally:
                await connections.close()
                await asyncio.gather(*(task for task in talking if task is not None))

    return asyncio.run(main())


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_a_connection_is_kept_and_the_head_says_what_servers_ask_for() -> None:
    async def use(c: Connections) -> Any:
        return [await c.ask("GET", "/health", None, 5.0) for _ in range(3)]

    answers, count, heads = serving(lambda n, h: OK, use)
    assert (answers, count) == ([(200, b"ok")] * 3, 1)
    lines = heads[0].decode().split("\r\n")
    assert lines[0] == "GET /v1/health HTTP/1.1"
    assert {"Authorization: Bearer k", "Content-Type: application/json"} <= set(lines)
    assert any(line.startswith("Host: 127.0.0.1:") for line in lines)


def test_a_lost_connection_is_stale_only_if_it_had_been_used() -> None:
    async def use(c: Connections) -> Any:
        await c.ask("GET", "/", None, 5.0)
        with pytest.raises(ConnectionLostError) as kept:
            await c.ask("GET", "/", None, 5.0)
        with pytest.raises(ConnectionLostError) as new:
            await c.ask("GET", "/", None, 5.0)
        return kept.value.stale, new.value.stale

    assert serving(lambda n, h: OK if n == 0 else None, use)[:2] == ((True, False), 2)


def test_what_was_given_up_never_answers_another_request() -> None:
    async def use(c: Connections) -> Any:
        with pytest.raises(TimeoutError):
            await c.ask("GET", "/late", None, 0.05)
        return await c.ask("GET", "/", None, 5.0)

    part = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nla"
    answer, count, _ = serving(lambda n, h: part if n == 0 else OK, use)
    assert (answer, count) == ((200, b"ok"), 2)


def test_no_more_are_under_way_than_allowed() -> None:
    async def use(c: Connections) -> Any:
        return await asyncio.gather(*(c.ask("GET", "/", None, 5.0) for _ in range(20)))

    answers, count, heads = serving(lambda n, h: OK, use, limit=2)
    assert len(answers) == len(heads) == 20
    assert count <= 2


def test_a_name_in_the_address_goes_as_a_header_and_a_key_stands_over_it() -> None:
    def heads_of(user: str, key: dict[str, str]) -> bytes:
        async def ask(connections: Connections) -> Any:
            mine = Connections(f"http://{user}127.0.0.1:{connections._port}", key, 0)
            try:
                return await mine.ask("GET", "/", None, 5.0)
            finally:
                await mine.close()

        _, _, heads = serving(lambda n, h: OK, ask)
        return bytes(heads[0])

    assert b"Authorization: Basic bWU6c2VjcmV0\r\n" in heads_of("me:secret@", {}), "me:secret, RFC 7617"
    assert b"@" not in heads_of("me:secret@", {})
    assert heads_of("me:secret@", {"Authorization": "Bearer k"}).count(b"Authorization") == 1
    assert b"Authorization" not in heads_of("", {})

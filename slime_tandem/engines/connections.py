"""HTTP/1.1 to one server over connections that are kept: what a co-written response needs thousands of times, and no more.

A request costs less than with a general HTTP client (docs/results/manager-cost.md): no URL is taken apart, no header is
merged, no cookie looked up, no redirect followed, nothing is decompressed, and nothing is asked for that would need it.
HTTPS works; proxies do not, as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from base64 import b64encode
from typing import NamedTuple, cast
from urllib.parse import unquote, urlsplit

_MOST_HEAD = 2**16
"""Bytes of an answer's head; beyond them it is none."""


class Answer(NamedTuple):
    """What came back; `keep`: whether the connection can be used again."""

    status: int
    body: bytes
    keep: bool


class ConnectionLostError(ConnectionError):
    """The connection ended before the answer did. `stale`: it had been used before, and nothing came on it since: the server
    closed it, idle, just as it was used again."""

    def __init__(self, message: str, *, stale: bool) -> None:
        super().__init__(message)
        self.stale = stale


class AnswerReader:
    """Takes the bytes of one answer as they come.

    >>> reader = AnswerReader()
    >>> reader.feed(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n[")
    >>> reader.feed(b"]")
    Answer(status=200, body=b'[]', keep=True)
    """

    __slots__ = ("_at", "_data", "_keep", "_length", "_parts", "_status", "begun")

    def __init__(self) -> None:
        self.begun = False
        self._data = bytearray()
        self._status = 0
        self._at = 0  # of the body, and of what is not read of it yet
        self._length: int | None = None  # None: chunks, or until the end (`_parts` says which)
        self._parts: list[bytes] | None = None
        self._keep = True

    def feed(self, data: bytes) -> Answer | None:
        """The answer once it is whole; raises ConnectionError for what is no HTTP."""
        self.begun = True
        self._data += data
        if not self._status and not self._head():
            return None
        if self._parts is not None:
            return self._chunks(self._parts)
        if self._length is None or len(self._data) - self._at < self._length:
            return None
        end = self._at + self._length
        return Answer(
            self._status, bytes(memoryview(self._data)[self._at : end]), self._keep and len(self._data) == end
        )

    def ended(self) -> Answer | None:
        """The answer whose end is the connection's; None for a part of one."""
        if self._status and self._length is None and self._parts is None:
            return Answer(self._status, bytes(memoryview(self._data)[self._at :]), False)
        return None

    def _head(self) -> bool:
        while True:
            end = self._data.find(b"\r\n\r\n", self._at)
            if end < 0:
                if len(self._data) - self._at > _MOST_HEAD:
                    raise ConnectionError("an answer without an end of its head")
                if not b"HTTP/1.".startswith(self._data[self._at : self._at + 7]):
                    raise ConnectionError(f"no HTTP: {bytes(self._data[:40])!r}")
                return False
            head = bytes(self._data[self._at : end + 2]).lower()
            self._at = end + 4
            if not head.startswith(b"http/1.") or not head[9:12].isdigit():
                raise ConnectionError(f"no HTTP: {head[:40]!r}")
            status = int(head[9:12])
            if status >= 200:  # what is below only says that the answer is to come
                self._fields(status, head)
                return True

    def _fields(self, status: int, head: bytes) -> None:
        connection = _field(head, _CONNECTION)
        self._keep = b"close" not in connection and (not head.startswith(b"http/1.0") or b"keep-alive" in connection)
        if status in (204, 304):
            self._length = 0
        elif b"chunked" in _field(head, _ENCODING):
            self._parts = []
        elif length := _field(head, _LENGTH):
            if not length.isdigit():
                raise ConnectionError(f"Content-Length: {length[:40]!r}")
            self._length = int(length)
        self._status = status

    def _chunks(self, parts: list[bytes]) -> Answer | None:
        while True:
            line = self._data.find(b"\r\n", self._at)
            if line < 0:
                return None
            digits = bytes(self._data[self._at : line]).partition(b";")[0].strip()
            if not _SIZE.fullmatch(digits):  # int() would also take a sign or an underscore
                raise ConnectionError(f"no chunk: {bytes(self._data[self._at : self._at + 40])!r}")
            size = int(digits, 16)
            start = line + 2
            if size == 0:
                # Behind the last one there may be fields, each a line, and then there is an empty line.
                end = start if self._data.startswith(b"\r\n", start) else self._data.find(b"\r\n\r\n", start) + 2
                if end < start or len(self._data) < end + 2:
                    return None
                return Answer(self._status, b"".join(parts), self._keep and len(self._data) == end + 2)
            if len(self._data) < start + size + 2:
                return None
            parts.append(bytes(memoryview(self._data)[start : start + size]))
            self._at = start + size + 2


_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")
_CONNECTION, _ENCODING, _LENGTH = b"\r\nconnection:", b"\r\ntransfer-encoding:", b"\r\ncontent-length:"


def _field(head: bytes, name: bytes) -> bytes:
    """The value of a field of a head in small letters, each line with its end; empty where there is none."""
    at = head.find(name)
    return b"" if at < 0 else head[at + len(name) : head.index(b"\r\n", at + 2)].strip()


class _Channel(asyncio.Protocol):
    """One connection; it carries one request at a time."""

    __slots__ = ("lost", "reader", "transport", "used", "waiter")

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.waiter: asyncio.Future[Answer] | None = None
        self.reader = AnswerReader()
        self.used = False
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        waiter = self.waiter
        if waiter is None or waiter.done():  # nobody asked
            self.close()
            return
        try:
            answer = self.reader.feed(data)
        except ConnectionError as error:
            waiter.set_exception(error)
            self.close()
            return
        if answer is not None:
            waiter.set_result(answer)

    def eof_received(self) -> bool:
        return False  # close

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.waiter is None or self.waiter.done():
            return
        answer = self.reader.ended() if exc is None else None
        if answer is not None:
            self.waiter.set_result(answer)
        else:
            stale = self.used and not self.reader.begun
            self.waiter.set_exception(ConnectionLostError(str(exc or "connection closed by the server"), stale=stale))

    def close(self) -> None:
        self.lost = True
        if self.transport is not None:
            self.transport.abort()


class Connections:
    """All connections to one server. `base_url` without a slash at its end, `headers` go with every request, at most `limit`
    requests are under way at once (0: any number)."""

    def __init__(self, base_url: str, headers: dict[str, str], limit: int) -> None:
        url = urlsplit(base_url)
        assert url.hostname is not None, base_url
        self._host, self._ssl = url.hostname, ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._ssl else 80)
        self._prefix = url.path
        host = url.netloc.rpartition("@")[2]
        fields = {"Host": host, "Accept": "*/*", "Content-Type": "application/json"}
        if url.username is not None:
            named = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
            fields["Authorization"] = f"Basic {b64encode(named).decode()}"
        fields |= headers
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._places = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
        self._idle: list[_Channel] = []
        self._busy: set[_Channel] = set()

    async def ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """(status, body) of the answer. Raises OSError kinds where the server cannot be reached, `ConnectionLostError` where
        the connection ends early, TimeoutError where the whole takes more than `timeout_s` seconds."""
        async with self._places:
            length = "" if body is None else f"Content-Length: {len(body)}\r\n"
            head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{length}\r\n".encode()
            loop = asyncio.get_running_loop()
            end = loop.time() + timeout_s
            channel = self._kept() or await self._connected(timeout_s)
            assert channel.transport is not None
            waiter = channel.waiter = loop.create_future()
            channel.reader = AnswerReader()
            timer = loop.call_at(end, _expire, waiter)
            self._busy.add(channel)
            try:
                channel.transport.writelines((head, body) if body else (head,))  # Python 3.12 copies neither
                answer = await waiter
            except BaseException:  # whatever comes on it now is the answer to something that nobody waits for
                channel.close()
                raise
            finally:
                timer.cancel()
                channel.waiter = None
                self._busy.discard(channel)
            if answer.keep and not channel.lost:
                channel.used = True
                self._idle.append(channel)
            else:
                channel.close()
            return answer.status, answer.body

    def _kept(self) -> _Channel | None:
        while self._idle:
            channel = self._idle.pop()
            if not channel.lost and channel.transport is not None and not channel.transport.is_closing():
                return channel
        return None

    async def _connected(self, timeout_s: float) -> _Channel:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            _, channel = await loop.create_connection(_Channel, self._host, self._port, ssl=self._ssl)
        return channel

    async def close(self) -> None:
        """End all connections."""
        for channel in (*self._idle, *self._busy):
            channel.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the transports are told in the next turn of the loop


def _expire(waiter: asyncio.Future[Answer]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())

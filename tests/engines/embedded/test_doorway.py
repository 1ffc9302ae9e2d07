"""The door of the embedded server: hosts, origins, keys, content types and bodies, before any field is read."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.test_utils import make_mocked_request

from slime_tandem.engines.embedded import doorway
from slime_tandem.engines.embedded import server as server_module
from slime_tandem.engines.embedded.doorway import Doorway, RefusedBodyError, parse
from slime_tandem.models.hf import load_model

from ...in_process import ThreadServer
from ...waiting import PATIENCE_S

KEY = "open sesame"
HOME = "127.0.0.1:30000"


def status(door: Doorway, method: str = "POST", path: str = "/generate", **headers: str) -> int:
    """The status with which a request is refused, 200 for none; a header's `_` stands for `-`."""
    named = {"Host": HOME, "Content-Type": "application/json", "Content-Length": "2"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    named = {name: value for name, value in named.items() if value != "-"}
    payload = mock.Mock() if named.get("Content-Length", "0") != "0" else EMPTY_PAYLOAD
    refusal = door.refusal(make_mocked_request(method, path, named, payload=payload))
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:1", "127.8.8.8:30000", "localhost", "LOCALHOST:30000", "[::1]:30000", socket.gethostname(),
     "box.lan:30000", "other"],
)  # fmt: skip
def test_its_own_names(host: str) -> None:
    assert status(Doorway("box.lan", ("other",)), Host=host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:30000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[::2]", "", "-",
     "[::1x", "0", "2130706433", "127.1", "a" * 5000],
)  # fmt: skip
def test_a_name_that_is_not_its_own_is_refused(host: str) -> None:
    """A page's name that is re-bound to 127.0.0.1 is such a name."""
    assert status(Doorway("127.0.0.1"), Host=host) == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "file://"},
        {"Origin": f"http://{HOME}.evil.example"},
        {"Origin": ""},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/health", "/flush_cache"])
def test_a_web_page_is_refused_even_with_the_key(headers: dict[str, str], path: str) -> None:
    door = Doorway("127.0.0.1", api_key=KEY)
    for method in ("GET", "POST"):
        assert status(door, method, path, Authorization=f"Bearer {KEY}", **headers) == 403


def test_a_page_of_its_own_may_ask() -> None:
    assert status(Doorway("127.0.0.1"), Origin=f"http://{HOME}", Sec_Fetch_Site="same-origin") == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "-", "json", ""]
)
def test_a_body_that_is_not_called_json_is_refused(kind: str) -> None:
    assert status(Doorway("127.0.0.1"), Content_Type=kind) == 415


def test_json_is_json_by_any_letter_case_and_nothing_needs_no_type() -> None:
    door = Doorway("127.0.0.1")
    assert status(door, Content_Type="Application/JSON; charset=utf-8") == 200
    assert status(door, Content_Type="-", Content_Length="0") == 200
    assert status(door, "GET", "/model_info", Content_Type="-", Content_Length="-") == 200
    assert status(door, Content_Encoding="gzip") == 415


def test_the_key_opens_all_but_health() -> None:
    door = Doorway("127.0.0.1", api_key=KEY)
    for sent in ("-", "", "Bearer", "Bearer x", KEY, f"Basic {KEY}", f"Bearer {KEY} ", f"Bearer {KEY}é"):
        assert status(door, Authorization=sent) == 401
        assert status(door, "GET", "/health", Authorization=sent) == 200
    assert status(door, Authorization=f"Bearer {KEY}") == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"a"',
        b"null",
        b"\xff\xfe{\x00}\x00",
        '{"a": 1}'.encode("utf-16"),
        b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"{}{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RefusedBodyError) as refused:
        parse(raw)
    assert refused.value.refusal.status == 400
    assert len(refused.value.refusal.message) < 500


class Raw:
    """A connection of bytes."""

    def __init__(self, server: ThreadServer) -> None:
        self.socket = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=PATIENCE_S)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> Raw:
        with contextlib.suppress(OSError):  # it may have been closed meanwhile, which the next read tells
            self.socket.sendall(data)
        return self

    def status(self) -> str:
        """Of the next answer; "" for a connection that was closed."""
        data = b""
        with contextlib.suppress(OSError):
            while b"\r\n" not in data and (part := self.socket.recv(4096)):
                data += part
        return data.split()[1].decode() if data.startswith(b"HTTP/1.") else ""


def head(*lines: str, path: str = "/generate") -> bytes:
    basic = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json")
    return "\r\n".join([*basic, *lines, "", ""]).encode()


BODY = json.dumps({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}).encode()
CHUNKS = b"3\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (BODY[:3], len(BODY) - 3, BODY[3:])
WIRE = {
    "whole": (head(f"Content-Length: {len(BODY)}") + BODY, "200"),
    "chunked": (head("Transfer-Encoding: chunked") + CHUNKS, "200"),
    "no chunk": (head("Transfer-Encoding: chunked") + b"zz\r\nabc\r\n0\r\n\r\n", "400"),
    "both lengths": (head("Transfer-Encoding: chunked", "Content-Length: 5") + CHUNKS, "400"),
    "no length": (head("Content-Length: x") + BODY, "400"),
    "two hosts": (head("Host: evil.example", f"Content-Length: {len(BODY)}") + BODY, "400|403"),
    "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "400"),
    "a long header": (head(f"X: {'v' * 100_000}", "Content-Length: 0"), "400"),
    "many headers": (head(*(f"X-{i}: 1" for i in range(5000)), "Content-Length: 0"), "400"),
    "compressed": (head("Content-Encoding: gzip", f"Content-Length: {len(BODY)}") + BODY, "415"),
    "too large, as told": (head(f"Content-Length: {300 * 2**20}"), "413"),
    "too large, as found": (head("Transfer-Encoding: chunked") + (b"100000\r\n" + b" " * 2**20 + b"\r\n") * 17, "413"),
    "a page's": (
        b"POST /update_weights_from_disk HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n"
        b'Content-Type: text/plain\r\nContent-Length: 19\r\n\r\n{"model_path": "x"}',
        "403",
    ),
}


@pytest.mark.parametrize("case", WIRE)
def test_bytes_on_the_wire(case: str, server: ThreadServer) -> None:
    data, wanted = WIRE[case]
    with Raw(server) as connection:
        assert connection.send(data).status() in wanted.split("|")
    with Raw(server) as connection:
        assert connection.send(WIRE["whole"][0]).status() == "200"


@pytest.fixture
def hasty(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadServer]:
    """A server that waits for nobody longer than a moment, and holds few bytes."""
    monkeypatch.setattr(server_module, "_IDLE_S", 0.2)
    monkeypatch.setattr(doorway, "_ALL_BODIES_BYTES", 300_000)
    monkeypatch.setattr(server_module, "Bodies", lambda: doorway.Bodies(timeout_s=0.3))
    with ThreadServer(folders["llama"], max_batch=4, cache_tokens=512) as running:
        yield running


def test_half_a_request_is_waited_for_only_so_long(hasty: ThreadServer) -> None:
    with contextlib.ExitStack() as stack:
        nothing = [stack.enter_context(Raw(hasty)) for _ in range(50)]
        half_heads = [stack.enter_context(Raw(hasty)).send(b"POST /generate HTTP/1.1\r\nHo") for _ in range(50)]
        half_bodies = [stack.enter_context(Raw(hasty)).send(head("Content-Length: 99") + b"{") for _ in range(50)]
        with Raw(hasty) as honest:
            assert honest.send(WIRE["whole"][0]).status() == "200"
        assert {connection.status() for connection in nothing + half_heads} == {""}
        assert {connection.status() for connection in half_bodies} == {"408"}


def test_many_large_bodies_at_once_leave_room_for_small_ones(hasty: ThreadServer) -> None:
    with contextlib.ExitStack() as stack:
        large = [stack.enter_context(Raw(hasty)) for _ in range(5)]
        for connection in large:
            connection.send(head("Content-Length: 200001") + b" " * 200_000)
        with Raw(hasty) as honest:
            assert honest.send(WIRE["whole"][0]).status() == "200"
        found = [connection.status() for connection in large]
        assert "503" in found
        assert set(found) <= {"503", "408"}


def test_health_answers_while_weights_are_loaded_and_while_large_bodies_are_parsed(folders: dict[str, Path]) -> None:
    loading, let_go = threading.Event(), threading.Event()

    def slow(path: str) -> Any:
        loading.set()
        assert let_go.wait(PATIENCE_S)
        return load_model(path)

    body = json.dumps({"model_path": str(folders["other"]), "weight_version": "v2"}).encode()
    ask = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(ThreadServer(folders["llama"], max_batch=4, cache_tokens=512, load=slow))
        update, health, large = (stack.enter_context(Raw(running)) for _ in range(3))
        update.send(head(f"Content-Length: {len(body)}", path="/update_weights_from_disk") + body)
        assert loading.wait(PATIENCE_S)
        many = b'{"input_ids": [' + b"5," * (7 * 2**20) + b"5]}"
        large.send(head(f"Content-Length: {len(many)}") + many)
        assert health.send(ask).status() == "200"
        assert large.status() == "400", "longer than the context, and answered before the update is through"
        let_go.set()
        assert update.status() == "200"

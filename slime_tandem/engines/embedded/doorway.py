"""Who may ask the embedded server for what, before anything is read: hosts, origins, the key, content types; and its bodies.

A server on a loopback address is within reach of every web page that the machine's user has open: a page may send it requests
(`fetch` with a content type of a form), and a page whose own name is re-bound to 127.0.0.1 may even read the answers. So a
request must call the server by a name of its own, must not come from a page of another origin, and must send JSON as JSON,
which a page cannot do without asking first. Bodies are bounded, each and together, and large ones are parsed outside the
event loop. It knows no field of any request.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

from aiohttp import web

from slime_tandem.errors import sentence

MAX_BODY_BYTES = 2**24
"""Of one request. JSON of this size is parsed within a second, which is how long it may hold the interpreter."""
_ALL_BODIES_BYTES = 2**27
"""Of all requests that are being read or parsed; beyond it only small ones are taken."""
_SMALL_BODY_BYTES = 2**16
BODY_TIMEOUT_S = 60.0
"""Within which a body must have come."""


class Refusal(NamedTuple):
    """Why a request is not answered: an HTTP status, and a sentence."""

    status: int
    message: str


class RefusedBodyError(Exception):
    """A body that is too large, too slow, or no JSON object."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, message)


class Doorway:
    """Checks the headers of requests. `host` is what the server is bound to, `hosts` further names that it goes by; `remedy`
    is for who calls it by another one."""

    def __init__(
        self,
        host: str,
        hosts: tuple[str, ...] = (),
        api_key: str | None = None,
        *,
        remedy: str = "call it by the address it is bound to, or start it with --allowed-hosts",
    ) -> None:
        self._remedy = remedy
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), *(name.lower() for name in hosts)}
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    def refusal(self, request: web.BaseRequest) -> Refusal | None:
        """Why this request must not go on; None: it may. Reads no body."""
        headers = request.headers
        hosts = headers.getall("Host", [])
        if len(hosts) != 1 or not self._is_own(hosts[0], request):
            return Refusal(
                403,
                f"Host={hosts[:1]}: expected the server's own address. Remedy: {sentence(self._remedy)}",
            )
        page = _foreign_page(headers, hosts[0])
        if page is not None:
            return Refusal(403, f"{page}: expected no web page of another origin. Remedy: ask from a program.")
        # Health checks need no key, as in SGLang.
        if self._key is not None and not request.path.startswith("/health"):
            sent = headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(sent, self._key):
                return Refusal(401, "Authorization: expected `Bearer <the server's API key>`. Remedy: send the key.")
        if request.body_exists and request.content_type != "application/json":
            return Refusal(
                415,
                f"Content-Type={headers.get('Content-Type')!r:.80}: expected application/json. "
                "Remedy: send JSON, and say so.",
            )
        if request.body_exists and headers.get("Content-Encoding", "identity").lower() != "identity":
            return Refusal(415, "Content-Encoding: expected none. Remedy: send the body as it is.")
        return None

    def _is_own(self, host: str, request: web.BaseRequest) -> bool:
        """Whether the `Host` header names this server; the port may be a tunnel's."""
        name = _without_port(host).lower()
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # A page can give its own name any address, but not an address another one: numbers need not be the bound ones.
        own = (request.transport.get_extra_info("sockname") or ("",))[0] if request.transport is not None else ""
        return address.is_loopback or name == own


def _without_port(host: str) -> str:
    """
    >>> _without_port("127.0.0.1:30000"), _without_port("[::1]:80"), _without_port("localhost")
    ('127.0.0.1', '::1', 'localhost')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _foreign_page(headers: Mapping[str, str], host: str) -> str | None:
    """The header by which a browser says that a page of another origin asks; None for none."""
    origin = headers.get("Origin")
    if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
        return f"Origin={origin!r:.80}"
    # Also for what needs no Origin: <img src="http://127.0.0.1:30000/flush_cache">.
    site = headers.get("Sec-Fetch-Site", "none")
    return f"Sec-Fetch-Site={site!r:.80}" if site not in ("none", "same-origin") else None


class Bodies:
    """Reads the bodies of requests, as JSON objects. Large ones are parsed one after the other, in a thread."""

    def __init__(self, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self.parsing = ThreadPoolExecutor(1, "parsing")
        self._timeout_s = timeout_s
        self._held = 0

    async def read(self, request: web.BaseRequest) -> tuple[dict[str, Any], bool]:
        """The JSON object, and whether it was large. Raises RefusedBodyError."""
        held = 0
        try:
            parts = []
            async with asyncio.timeout(self._timeout_s):
                if (request.content_length or 0) > MAX_BODY_BYTES:
                    self._too_large()
                async for part in request.content.iter_any():
                    held += len(part)
                    self._held += len(part)
                    if held > MAX_BODY_BYTES:
                        self._too_large()
                    if held > _SMALL_BODY_BYTES and self._held > _ALL_BODIES_BYTES:
                        raise RefusedBodyError(503, "body: too many large ones at once. Remedy: send it again later.")
                    parts.append(part)
            raw = b"".join(parts)
            if len(raw) <= _SMALL_BODY_BYTES:
                return parse(raw), False
            return await asyncio.get_running_loop().run_in_executor(self.parsing, parse, raw), True
        except TimeoutError:
            raise RefusedBodyError(
                408, f"body: expected within {self._timeout_s:g} s. Remedy: send it again."
            ) from None
        except (web.RequestPayloadError, ConnectionError) as error:
            raise RefusedBodyError(400, f"body: expected a whole one ({error}). Remedy: send it again.") from None
        finally:
            self._held -= held

    @staticmethod
    def _too_large() -> NoReturn:
        expected = f"at most {MAX_BODY_BYTES} bytes. Remedy: send several smaller requests."
        raise RefusedBodyError(413, f"body: expected {expected}")


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body, in UTF-8; raises RefusedBodyError (400).

    >>> parse(b'{"rid": "a"}')
    {'rid': 'a'}
    """
    try:
        body = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        shown = raw[:40].decode("utf-8", "replace")
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise RefusedBodyError(400, f"body={shown!r}: expected JSON in UTF-8 ({reason}). Remedy: correct it.") from None
    if not isinstance(body, dict):
        kind = type(body).__name__
        raise RefusedBodyError(400, f"body: expected a JSON object, not {kind}. Remedy: correct it.")
    return body

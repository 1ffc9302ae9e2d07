"""A reward by a server of the user's: one POST for each response, what is sent, and what answers are taken.

The body is JSON as slime's `remote_rm` sends it (`prompt`, `response`, `label`), with more beside; the answer is JSON, a number
or an object of named parts. It runs in a scoring process. Proxies are not asked, as by no client here, and redirects not
followed.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp

from slime_tandem.extensions import said
from slime_tandem.files import parse_json
from slime_tandem.tasks.own_reward import UnreachableError

LONGEST_ANSWER = 2**16
"""Bytes."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


class RemoteReward:
    """Asks `url` for one response at a time; `key` is sent as a bearer token. Within one event loop."""

    def __init__(self, url: str, *, retries: int, concurrency: int, key: str | None) -> None:
        self._url, self._retries, self._concurrency = url, retries, concurrency
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None

    async def __call__(
        self, messages: Any, text: str, label: str | None, task: str, metadata: Any, finish_reason: str | None
    ) -> Any:
        """The answer, as JSON has it. Raises UnreachableError."""
        body = {
            "prompt": messages,
            "response": text,
            "label": label,
            "task": task,
            "metadata": metadata,
            "finish_reason": finish_reason,
        }
        try:
            data = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise UnreachableError(f"the prompt's metadata is nothing that JSON can hold: {error}") from None
        for attempt in range(self._retries + 1):
            try:
                return await self._once(data)
            except _AgainError as error:
                if attempt == self._retries:
                    raise UnreachableError(f"{error} ({attempt + 1} tries)") from None
            pause = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause * (1 + random.random()))  # noqa: S311 - spreads repeats, and no draw of the run
        raise AssertionError("the last attempt raises")

    async def _once(self, data: bytes) -> Any:
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            async with self._open().post(self._url, data=data, headers=headers, allow_redirects=False) as answer:
                if answer.status in (408, 425, 429) or answer.status >= 500:
                    raise _AgainError(f"status {answer.status}")
                if not 200 <= answer.status < 300:
                    raise UnreachableError(f"status {answer.status}")
                text = await answer.content.read(LONGEST_ANSWER + 1)
                while len(text) <= LONGEST_ANSWER and (more := await answer.content.read(LONGEST_ANSWER)):
                    text += more
        except (aiohttp.ClientError, OSError) as error:
            raise _AgainError(said(error)) from None
        if len(text) > LONGEST_ANSWER:
            raise UnreachableError(f"an answer of more than {LONGEST_ANSWER} bytes")
        try:
            return parse_json(text)
        except ValueError:
            return text.decode("utf-8", "replace")  # no JSON: taken as text, which is no number

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._concurrency),
                timeout=aiohttp.ClientTimeout(total=None),  # the caller has a limit for all tries together
            )
        return self._session


class _AgainError(Exception):
    """What may be over the next time."""

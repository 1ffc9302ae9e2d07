"""A reward by a server: what it is sent, which answers count, and what becomes of all others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slime_tandem.config import RewardConfig, RunConfig, TaskSpec
from slime_tandem.errors import ConfigError
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.judging import Verdict
from slime_tandem.tasks.remote import LONGEST_ANSWER

FAST = RewardConfig(own_timeout_s=2.0, own_retries=2)


class Server:
    """Answers by the response's text; keeps what it was sent."""

    def __init__(self) -> None:
        outer = self
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.at_once = self.most = 0
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.seen.append((dict(self.headers), body))
                    outer.at_once += 1
                    outer.most = max(outer.most, outer.at_once)
                status, data = outer.answer(body["response"])
                with lock:
                    outer.at_once -= 1
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, text: str) -> tuple[int, bytes]:
        tries = sum(body["response"] == text for _, body in self.seen)
        if text == "slow":
            time.sleep(30)
        if text == "together":
            time.sleep(0.3)
        if text.isdigit():
            return int(text), b"0.5"
        if text == "flaky":
            return (200, b"0.25") if tries == 3 else (503, b"")
        return 200, {
            "parts": b'{"correct": 1, "style": 0.5}', "text": b'"0.5"', "nan": b"NaN", "html": b"<html>", "huge": b"1" * 70_000,
            "twice": b'{"a": 1, "a": 2}', "deep": b"[" * 50_000,
        }.get(text, b"0.5")  # fmt: skip

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def verdicts(url: str, *texts: str, limits: RewardConfig = FAST) -> list[Verdict]:
    tasks = TaskSet([TaskSpec(family="chain_sum", reward=url)], 0, limits)
    (prompt,) = tasks.train_prompts(0, 1)
    return tasks.verdicts([(prompt, text) for text in texts])


def test_what_is_sent_and_what_counts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody: asked, it would refuse
    monkeypatch.setenv("REWARD_KEY", "secret")
    limits = FAST.model_copy(update={"api_key_env": "REWARD_KEY"})
    assert verdicts(server.url, "fine", limits=limits) == [Verdict(0.5)]
    (headers, body) = server.seen[0]
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer secret"
    assert set(body) == {"prompt", "response", "label", "task", "metadata", "finish_reason"}
    assert body["prompt"][0]["role"] == "user"
    assert (body["response"], body["task"], body["finish_reason"]) == ("fine", "chain_sum", None)
    assert body["metadata"]["entry"]["answer"] == body["label"]
    assert verdicts(server.url, "parts") == [Verdict(1.5, parts={"correct": 1.0, "style": 0.5})]
    monkeypatch.delenv("REWARD_KEY")
    with pytest.raises(ConfigError, match=r"reward\.api_key_env='REWARD_KEY'.*that is set"):
        verdicts(server.url, "fine", limits=limits)


def test_answers_that_do_not_count(server: Server) -> None:
    texts = ["fine", "text", "nan", "html", "twice", "deep", "huge", "404", "302", "204", "fine"]
    found = verdicts(server.url, *texts)
    assert found[0] == found[-1] == Verdict(0.5)
    assert [v.problem for v in found[1:6]] == ["invalid"] * 5
    assert {v.why for v in found[6:7]} == {f"an answer of more than {LONGEST_ANSWER} bytes"}
    assert [v.problem for v in found[6:9]] == ["unreachable"] * 3
    assert found[7].why == "status 404"
    assert "302" in found[8].why, "redirects are not followed"
    assert sum(body["response"] == "404" for _, body in server.seen) == 1, "a refusal is not repeated"


def test_repeats_and_limits(server: Server) -> None:
    found = verdicts(server.url, "flaky", "500", "429", "slow")
    assert found == [
        Verdict(0.25), Verdict(None, "unreachable"), Verdict(None, "unreachable"), Verdict(None, "timeout"),
    ]  # fmt: skip
    assert found[3].why == "no answer within 2 s (reward.own_timeout_s)"
    assert [sum(body["response"] == text for _, body in server.seen) for text in ("flaky", "500", "slow")] == [3, 3, 1]
    server.close()
    (verdict,) = verdicts(server.url, "fine", limits=RewardConfig(own_retries=0))
    assert verdict.problem == "unreachable"
    assert "(1 tries)" in verdict.why


def test_requests_are_sent_at_once(server: Server) -> None:
    assert verdicts(server.url, *["together"] * 12) == [Verdict(0.5)] * 12
    assert server.most > 3
    server.most = 0
    verdicts(server.url, *["together"] * 4, limits=FAST.model_copy(update={"own_concurrency": 1}))
    assert server.most == 1


@pytest.mark.parametrize("url", ["http://", "https://:80", "http://me:secret@host/x", "ftp://host/x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.from_mapping({"tasks": [{"family": "chain_sum", "reward": url}]})
    assert "secret" not in str(error.value)

"""The live page's server: who may ask, what is sent and sent again, and who holds nobody up."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from slime_tandem import cli
from slime_tandem.errors import PortInUseError
from slime_tandem.live import server as server_module
from slime_tandem.live.page import LivePage
from slime_tandem.live.server import LiveServer
from slime_tandem.report.run_folder import RunWriter

from ..report.conftest import step_row
from ..waiting import PATIENCE_S


def with_server(folder: Path, use: Callable[[LiveServer, aiohttp.ClientSession], Awaitable[Any]], **more: Any) -> Any:
    """What `use` gives of a server of `folder` that looks every few milliseconds."""

    async def session() -> Any:
        async with (
            LiveServer(LivePage(folder), port=0, poll_s=0.02, **more) as server,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as http,
        ):
            return await use(server, http)

    return asyncio.run(session())


async def events(answer: aiohttp.ClientResponse, until: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Events up to the first for which `until` holds: their fields, with the data read as JSON."""
    found: list[dict[str, Any]] = []
    event: dict[str, Any] = {}
    while True:
        line = (await answer.content.readuntil(b"\n")).decode().rstrip("\n")
        if line:
            name, _, value = line.partition(": ")
            event[name] = json.loads(value) if name == "data" else value
            continue
        found.append(event)
        if until(event):
            return found
        event = {}


def parts_of(found: list[dict[str, Any]]) -> list[str]:
    return [event["data"]["name"] for event in found if event.get("event") == "part"]


def is_beat(event: dict[str, Any]) -> bool:
    return event.get("event") == "beat"


def has(name: str, text: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: (
        event.get("event") == "part" and event["data"]["name"] == name and text in event["data"]["html"]
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "[::1]"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_who_may_ask(make_run, headers, status):
    async def use(server, http):
        found = []
        for path in ("", "events"):
            async with http.get(server.url + path, headers=headers) as answer:
                found.append(answer.status)
                if status == 403:
                    assert "Remedy" in await answer.text()
        return found

    assert with_server(make_run(), use) == [status, status]


def test_nothing_else_is_served_and_nothing_is_taken(make_run):
    async def use(server, http):
        found = {}
        for path in ("config.yaml", "%2e%2e/", "..%2fconfig.yaml", "transcripts.jsonl", "favicon.ico"):
            async with http.get(URL(server.url + path, encoded=True)) as answer:
                found[path] = answer.status
        async with http.post(server.url, json={}) as answer:
            found["post"] = answer.status
        return found

    found = with_server(make_run(), use)
    assert found.pop("post") == 405
    assert set(found.values()) == {404}


def test_the_page_has_a_policy_and_all_its_parts(make_run):
    async def use(server, http):
        async with http.get(server.url) as answer:
            return answer.headers, await answer.text()

    headers, page = with_server(make_run(), use)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert page.count("<script") == 1
    assert "http://" not in page
    for shown in ("Did it learn?", "Teacher KL", "Seconds per step", "4 + 3 =", "prob_senior"):
        assert shown in page


def test_a_browser_gets_what_changed_since_it_last_got_anything(make_run):
    run_dir = make_run(steps=2, control=False, finished=False)

    async def use(server, http):
        async with http.get(server.url) as answer:
            since = re.search(r'data-since="([^"]+)"', await answer.text())[1]
        got = {}
        async with http.get(server.url + "events", params={"since": since}) as answer:
            assert answer.content_type == "text/event-stream"
            got["nothing new"] = parts_of(await events(answer, is_beat))
            with RunWriter(run_dir, resume_step=2) as writer:
                writer.write_step(2, step_row(rollout__reward_mean=0.75, time__step_s=1.0))
                seen = await events(answer, lambda event: "id" in event)
                got["a step"] = parts_of(seen)
        last = [event["id"] for event in seen if "id" in event][-1]
        async with http.get(server.url + "events", headers={"Last-Event-ID": last}) as answer:
            got["again"] = parts_of(await events(answer, is_beat))
        for other in ("0000-1", "", "x", last.split("-")[0] + "-9999999999999999", "a-" + "9" * 400):
            async with http.get(server.url + "events", headers={"Last-Event-ID": other}) as answer:
                found = await events(answer, is_beat)
                assert sorted(parts_of(found)) == sorted(server.page._parts), other
                # A number would say that those before it have come: only the last has one.
                assert ["id" in event for event in found[1:-1]] == [False] * 7 + [True]
        return got

    got = with_server(run_dir, use)
    assert got["nothing new"] == []
    assert set(got["a step"]) <= {"now", "top", "curves", "figures"}
    assert "curves" in got["a step"]
    assert got["again"] == []


def test_the_page_lives_through_the_runs_end_and_restart(make_run):
    run_dir = make_run(steps=2, control=False)

    async def use(server, http):
        async with http.get(server.url + "events") as answer:
            await events(answer, has("now", "complete"))
            for path in run_dir.iterdir():
                if path.is_file():
                    path.unlink()
            await events(answer, has("now", "waiting for the run"))
            (run_dir / "config.yaml").write_text("name: again\ntrain: {steps: 9}\n")
            with (run_dir / "metrics.jsonl").open("w") as file:
                line = json.dumps({"step": 0, **step_row(rollout__reward_mean=0.125)}) + "\n"
                file.write(line[:40])
                file.flush()
                await events(answer, has("top", "again"))
                file.write(line[40:])
                file.flush()
                await events(answer, has("curves", "0.125"))
            (run_dir / "config.yaml").write_text("nme: again\n")
            await events(answer, has("now", "nme"))
            async with http.get(server.url) as page:
                return page.status

    assert with_server(run_dir, use) == 200


def test_a_folder_that_goes_away_is_waited_for(make_run):
    run_dir = make_run(steps=1, control=False)

    async def use(server, http):
        async with http.get(server.url + "events") as answer:
            run_dir.rename(run_dir.with_name("elsewhere"))
            await events(answer, has("now", "waiting for the run"))
            run_dir.with_name("elsewhere").rename(run_dir)
            await events(answer, has("now", "complete"))

    with_server(run_dir, use)


def stuck(port: int) -> socket.socket:
    """A browser that asks for events and reads nothing of them, with as little room for them as the system lets it have."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    one.connect(("127.0.0.1", port))
    one.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    return one


def test_a_hundred_browsers_of_which_half_are_stuck_hold_nobody_up(make_run, monkeypatch):
    # So much that no buffer takes it: those that do not read are waited for.
    run_dir = make_run(steps=2, control=False, finished=False, texts=("w" * 490,) * 250)
    monkeypatch.setattr(server_module, "_SEND_S", 10.0)

    async def use(server, http):
        silent = [stack.enter_context(stuck(server.port)) for _ in range(50)]
        assert len(silent) == 50
        answers = [await http.get(server.url + "events") for _ in range(50)]
        for answer in answers:
            await events(answer, is_beat)
        assert server.browsers == 100
        with RunWriter(run_dir, resume_step=2) as writer:
            for step in (2, 3):
                writer.write_step(step, step_row(rollout__reward_mean=step / 4, time__step_s=1.0))
                await asyncio.gather(*(events(a, has("curves", f"at step {step}")) for a in answers))
        for answer in answers:
            answer.close()
        while server.browsers:  # those that went away, and those that took nothing
            await asyncio.sleep(0.02)
        async with http.get(server.url) as answer:
            return answer.status

    async def session():
        async with (
            LiveServer(LivePage(run_dir), port=0, poll_s=0.02) as server,
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(PATIENCE_S), read_bufsize=2**23
            ) as http,
        ):
            return await use(server, http)

    with ExitStack() as stack:
        assert asyncio.run(session()) == 200


def test_more_browsers_than_it_can_have_are_told(make_run, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_BROWSERS", 1)

    async def use(server, http):
        async with http.get(server.url + "events") as first:
            await events(first, is_beat)
            async with http.get(server.url + "events") as second:
                return second.status

    assert with_server(make_run(), use) == 503


def test_a_port_that_is_taken(make_run, monkeypatch):
    run_dir = make_run()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]

        async def named() -> None:
            async with LiveServer(LivePage(run_dir), port=taken):
                pass

        with pytest.raises(PortInUseError, match="--port"):
            asyncio.run(named())
        monkeypatch.setattr(server_module, "PORT", taken)

        async def not_named() -> int:
            async with LiveServer(LivePage(run_dir)) as server:
                return server.port

        assert asyncio.run(not_named()) not in (0, taken)


def test_the_command_serves_until_it_is_interrupted(make_run):
    command = [sys.executable, "-m", "slime_tandem.cli", "report", str(make_run()), "--watch", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())[1])  # type: ignore[index]
        with stuck(port) as browser:
            assert browser.recv(12) == b"HTTP/1.1 200"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert err == "\nslime-tandem report: stopped\n"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere", "--watch"], "perhaps one that is only starting"),
        (["RUN", "--port", "80"], "--watch"),
        (["RUN", "--watch", "--port", "-1"], "a number from 0 to 65535"),
    ],
)
def test_what_cannot_be_watched_is_refused(make_run, capsys, arguments, expected):
    run_dir = make_run(steps=1)
    assert cli.main(["report", *[str(run_dir) if a == "RUN" else a for a in arguments]]) == 2
    assert expected in capsys.readouterr().err


def test_watching_changes_nothing_in_the_folder(make_run):
    run_dir = make_run()
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}

    async def use(server, http):
        async with http.get(server.url + "events") as answer:
            await events(answer, is_beat)

    with_server(run_dir, use)
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_a_folder_that_may_not_be_read_is_said(make_run):
    run_dir = make_run(steps=1, control=False)
    (run_dir / "metrics.jsonl").unlink()
    os.symlink(run_dir / "metrics.jsonl", run_dir / "metrics.jsonl")  # a circle: root, too, may not

    async def use(server, http):
        async with http.get(server.url) as answer:
            return await answer.text()

    assert "metrics.jsonl" in with_server(run_dir, use)


def test_a_suite_is_followed_too(folder):
    async def use(server, http):
        async with http.get(server.url + "events") as answer:
            await events(answer, has("suite", "tip 1"))
            row = json.loads((folder / "20-seed1" / "eval.jsonl").read_text().splitlines()[-1])
            with (folder / "20-seed1" / "eval.jsonl").open("a") as file:
                file.write(json.dumps({**row, "eval/solo_accuracy": 0.125}) + "\n")
            await events(answer, has("suite", "0.375"))  # of 0.625 and 0.125
            (folder / "method_mapping.csv").write_text("idx\n1\n")
            await events(answer, has("now", "restore the file"))

    with_server(folder, use)


def test_a_suite_without_a_finished_run_has_a_page(tmp_path):
    (tmp_path / "method_mapping.csv").write_text("idx,method,mask,ratio,seed,run\n1,tip,tip,0.1,0,x\n")

    async def use(server, http):
        async with http.get(server.url) as answer:
            return await answer.text()

    assert "run the suite first" in with_server(tmp_path, use)

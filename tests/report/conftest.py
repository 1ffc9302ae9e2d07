"""Rows, run folders and a headless Chromium for the report tests."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slime_tandem.config import RunConfig
from slime_tandem.report.metrics import row_keys
from slime_tandem.report.run_folder import RunWriter, Transcript, TranscriptToken

from ..waiting import PATIENCE_S, wait_until


def step_row(**values: float) -> dict[str, float | None]:
    """A full step row: `rollout__reward_mean=0.5` sets rollout/reward_mean, the rest is None."""
    return {**dict.fromkeys(row_keys("step")), **{k.replace("__", "/"): v for k, v in values.items()}}


def eval_row(**values: float) -> dict[str, float | None]:
    """A full evaluation row: `solo_accuracy=0.5` sets eval/solo_accuracy, the rest is None."""
    return {**dict.fromkeys(row_keys("eval")), **{f"eval/{k}": v for k, v in values.items()}}


def transcript(
    texts: tuple[str, ...], *, reward: float = 1.0, prompt: str = "4 + 3 =", teacher: bool = True
) -> Transcript:
    tokens = tuple(
        TranscriptToken(text, i % 2, -0.5, (-1.0 if i % 3 else None) if teacher else None)
        for i, text in enumerate(texts)
    )
    return Transcript(prompt, "7", "chain_sum", reward, "stop", tokens)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Builds a run folder with `steps` steps, evaluations, transcripts and, if asked, a control."""

    def make(
        steps: int = 4, *, control: bool = True, finished: bool = True, texts: tuple[str, ...] = ("a", " b")
    ) -> Path:
        run_dir = tmp_path / "demo"
        config = RunConfig.load(overrides=["name=demo", f"train.steps={steps}", "eval.prompts=100"])
        for folder, gain in ((run_dir, 0.3), (run_dir / "control", 0.1))[: 2 if control else 1]:
            with RunWriter(folder, resume_step=None) as writer:
                if folder == run_dir:
                    writer.write_config(config)
                writer.write_eval(0, "before", eval_row(solo_accuracy=0.5, tandem_accuracy=0.25, teacher_kl=1.5))
                writer.write_transcripts(0, "eval", [transcript(texts, reward=0.0), transcript(texts, prompt="other")])
                for step in range(steps):
                    writer.write_step(
                        step,
                        step_row(
                            rollout__reward_mean=0.25 + step / 16,
                            tandem__senior_token_fraction=0.5,
                            opd__teacher_kl=1.5 - step / 8,
                            engine__retries=1,
                            time__rollout_s=1.0 + step,
                            time__scoring_s=0.5,
                            time__train_s=2.0,
                            time__sync_s=0.25,
                            time__step_s=4.0 + step,
                        ),
                    )
                    writer.write_transcripts(step, "train", [transcript(texts), transcript(texts, reward=0.0)])
                if finished:
                    after = eval_row(solo_accuracy=0.75, tandem_accuracy=0.25 + gain, teacher_kl=0.5)
                    writer.write_eval(steps, "after", after)
                    writer.write_transcripts(steps, "eval", [transcript(texts), transcript(texts, prompt="other")])
        return run_dir

    return make


class Page:
    """One open page of the browser, driven over the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._id = socket, 0
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Send one command and wait for its answer; events that come in between are noted."""
        self._id += 1
        await self._socket.send_json({"id": self._id, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE_S)
            if message.get("id") == self._id:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        kind, params = message["method"], message["params"]
        if kind == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif kind == "Runtime.consoleAPICalled":
            self.problems.append(f"console.{params['type']}")
        elif kind == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog {params['message']}")
        elif kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression (promises are awaited)."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def press(self, key: str) -> None:
        """A real key press."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def picture(self) -> bytes:
        """The whole page as PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


class Browser:
    """A running headless Chromium."""

    def __init__(self, address: str) -> None:
        self.address = address

    def visit(
        self, path: Path, use: Callable[[Page], Any], *, width: int, height: int = 900, dark: bool = False
    ) -> Any:
        """Open a file at `width` CSS pixels, await `use(page)`, and return what it gives."""

        async def session() -> Any:
            async with aiohttp.ClientSession() as http:
                async with http.put(f"{self.address}/json/new?about:blank") as answer:
                    target = await answer.json()
                async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
                    await page.call("Emulation.setDeviceMetricsOverride", **size)
                    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                    await page.call("Emulation.setEmulatedMedia", features=[scheme])
                    await page.call("Page.navigate", url=path.resolve().as_uri())
                    while not await page.run("document.readyState === 'complete' && location.href !== 'about:blank'"):
                        await asyncio.sleep(0.02)
                    result = await use(page)
                    await page.call("Page.close")
                    return result

        return asyncio.run(session())


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium from $SLIME_TANDEM_CHROMIUM or the PATH; a missing one fails the test."""
    binary = os.environ.get("SLIME_TANDEM_CHROMIUM") or shutil.which("chromium")
    if binary is None:
        pytest.fail(
            "chromium not found: install it (Debian, Ubuntu: `apt-get install chromium`) or set SLIME_TANDEM_CHROMIUM to a "
            "Chrome or Chromium binary"
        )
    profile = tmp_path_factory.mktemp("chromium")
    log = profile / "log.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [
                binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
                "--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            ],
            stdout=sink,
            stderr=sink,
        )  # fmt: skip
    try:
        port_file = profile / "DevToolsActivePort"

        def listens() -> bool:
            if process.poll() is not None:
                pytest.fail(f"chromium ended at once:\n{log.read_text()}")
            return port_file.exists() and "/devtools/" in port_file.read_text()

        wait_until(listens)
        yield Browser(f"http://127.0.0.1:{port_file.read_text().split()[0]}")
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)

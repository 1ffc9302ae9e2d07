"""A headless Chromium over the DevTools protocol: what a page shows, what its console says, what it asks the network for.

For the tests of the pages (tests/report, tests/live) and for screenshots.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

CONTRAST = """
(() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[0-9.]+/g).map(Number);
    return { r, g, b, a };
  };
  const over = (top, under) => {
    const mix = (x, y) => x * top.a + y * (1 - top.a);
    return { r: mix(top.r, under.r), g: mix(top.g, under.g), b: mix(top.b, under.b), a: 1 };
  };
  const light = ({ r, g, b }) => {
    const part = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ratio = (x, y) => {
    const [high, low] = [light(x), light(y)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  const grounds = (node) => {
    // Every colour that lies under the text: a stripe counts as each of its colours.
    const layers = [];
    for (let at = node; at; at = at.parentElement) {
      const css = getComputedStyle(at);
      const colours = [parse(css.backgroundColor)];
      for (const found of css.backgroundImage.match(/rgba?\\([^)]*\\)/g) || []) colours.push(parse(found));
      layers.push(colours.filter((c) => c.a > 0));
      if (colours[0].a === 1) break;
    }
    let under = [{ r: 255, g: 255, b: 255, a: 1 }];
    for (const layer of layers.reverse()) {
      if (layer.length) under = layer.flatMap((c) => under.map((u) => over(c, u)));
    }
    return under;
  };
  const worst = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || node.closest("script, style, .sr") || !node.checkVisibility()) continue;
    const css = getComputedStyle(node);
    const ink = parse(node.closest("svg") ? css.fill : css.color);
    for (const ground of grounds(node)) {
      worst.push({ ratio: ratio(over(ink, ground), ground), text: walker.currentNode.data.trim().slice(0, 40),
        css: node.className.baseVal ?? node.className });
    }
  }
  return worst.sort((a, b) => a.ratio - b.ratio).slice(0, 5);
})()
"""
"""The five texts of a page with the least contrast to what lies under them, by WCAG 2.2 (4.5 is enough for any size)."""

OVERFLOW = "[document.documentElement.scrollWidth, innerWidth]"


class Page:
    """One open page of the browser, driven over the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, patience_s: float) -> None:
        self._socket, self._patience_s, self._id = socket, patience_s, 0
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Send one command and wait for its answer; events that come in between are noted."""
        self._id += 1
        await self._socket.send_json({"id": self._id, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=self._patience_s)
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

    def __init__(self, address: str, patience_s: float = 60.0) -> None:
        self.address, self._patience_s = address, patience_s

    def visit(
        self, what: Path | str, use: Callable[[Page], Any], *, width: int, height: int = 900, dark: bool = False
    ) -> Any:
        """Open a file or a URL at `width` CSS pixels, await `use(page)`, and return what it gives."""
        return asyncio.run(self.visiting(what, use, width=width, height=height, dark=dark))

    async def visiting(
        self, what: Path | str, use: Callable[[Page], Any], *, width: int, height: int = 900, dark: bool = False
    ) -> Any:
        """As `visit`, within an event loop."""
        url = what if isinstance(what, str) else what.resolve().as_uri()

        async def session() -> Any:
            async with aiohttp.ClientSession() as http:
                async with http.put(f"{self.address}/json/new?about:blank") as answer:
                    target = await answer.json()
                async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket, self._patience_s)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
                    await page.call("Emulation.setDeviceMetricsOverride", **size)
                    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                    await page.call("Emulation.setEmulatedMedia", features=[scheme])
                    await page.call("Page.navigate", url=url)
                    while not await page.run("document.readyState === 'complete' && location.href !== 'about:blank'"):
                        await asyncio.sleep(0.02)
                    result = await use(page)
                    await page.call("Page.close")
                    return result

        return await session()


@contextmanager
def chromium(profile: Path, patience_s: float = 60.0) -> Iterator[str]:
    """The address of a Chromium that runs within the block, of $SLIME_TANDEM_CHROMIUM or the PATH; its profile and log go to
    the folder `profile`. Raises FileNotFoundError where there is none, RuntimeError for one that does not start."""
    binary = os.environ.get("SLIME_TANDEM_CHROMIUM") or shutil.which("chromium")
    if binary is None:
        raise FileNotFoundError(
            "chromium not found: install it (Debian, Ubuntu: `apt-get install chromium`) or set SLIME_TANDEM_CHROMIUM to a "
            "Chrome or Chromium binary"
        )
    log, port_file = profile / "log.txt", profile / "DevToolsActivePort"
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
        end = time.monotonic() + patience_s
        while not (port_file.exists() and "/devtools/" in port_file.read_text()):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"chromium did not start:\n{log.read_text()}")
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text().split()[0]}"
    finally:
        process.terminate()
        process.wait(timeout=patience_s)

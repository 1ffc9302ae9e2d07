#!/usr/bin/env python3
"""Pictures of the report, the suite's page and the live page, and what a browser says of them.

`PYTHONPATH=. python scripts/pages/screenshots.py RUN SUITE OUT`: folders of a run and of a suite that are there; each page at
1280 and 390 CSS pixels, light and dark, as OUT/<page>-<width>-<scheme>.png. Ends with 1 for a script error, a message of the
console or of the page's policy, a request to anywhere else, sideways scrolling, or text with less contrast than 4.5.
`--docs FOLDER` writes the pictures of the docs as well, cut and with a small palette (needs Pillow).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.browser import CONTRAST, OVERFLOW, Browser, Page, chromium

from slime_tandem.live.page import LivePage
from slime_tandem.live.server import LiveServer
from slime_tandem.report.comparison import write_suite
from slime_tandem.report.html import write_report

WIDTHS = (1280, 390)
DOCS = {
    "report.png": ("report", 1280, False, 1500),
    "report-dark-phone.png": ("report", 390, True, 844),
    "suite.png": ("suite", 1280, False, 900),
    "live.png": ("live", 1280, True, 760),
}
"""Pictures of the docs: page, width, dark, and how much of the height is kept."""


def shrunk(picture: bytes, height: int) -> bytes:
    """The top of a PNG with 256 colours, which is a third of its size."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.crop((0, 0, image.width, min(height, image.height)))
    out = io.BytesIO()
    image.quantize(256, kmeans=1, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


async def main() -> int:
    """Take the pictures; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--docs", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_suite(args.suite)
    found = 0
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as address:
        browser = Browser(address)
        async with LiveServer(LivePage(args.run), port=0) as run, LiveServer(LivePage(args.suite), port=0) as suite:
            pages: dict[str, Path | str] = {
                "report": write_report(args.run),
                "suite": args.suite / "suite.html",
                "live": run.url,
                "live-suite": suite.url,
            }
            for name, what in pages.items():
                for width in WIDTHS:
                    for dark in (False, True):

                        async def look(page: Page, what: Path | str = what) -> tuple[bytes, list[str]]:
                            if isinstance(what, str):
                                while await page.run("document.getElementById('live').dataset.state") != "on":
                                    await asyncio.sleep(0.05)
                            wide, inner = await page.run(OVERFLOW)
                            wrong = [f"scrolls sideways: {wide} of {inner}"] if wide != inner else []
                            for poor in await page.run(CONTRAST):
                                if poor["ratio"] < 4.5:
                                    wrong.append(f"contrast {json.dumps(poor)}")
                            own = what if isinstance(what, str) else what.resolve().as_uri()
                            wrong += [f"asked for {url}" for url in page.requests if not url.startswith(("data:", own))]
                            return await page.picture(), wrong + page.problems

                        picture, wrong = await browser.visiting(what, look, width=width, dark=dark)
                        scheme = "dark" if dark else "light"
                        target = args.out / f"{name}-{width}-{scheme}.png"
                        target.write_bytes(picture)
                        print(f"{target}: {len(picture)} bytes" + "".join(f"\n  {line}" for line in wrong))
                        found += len(wrong)
                        for doc, (page_name, page_width, page_dark, height) in DOCS.items():
                            if args.docs and (name, width, dark) == (page_name, page_width, page_dark):
                                (args.docs / doc).write_bytes(shrunk(picture, height))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

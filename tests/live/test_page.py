"""The live page in a browser: it changes while the run writes, keeps what a person has chosen, and obeys no text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pages.browser import CONTRAST, OVERFLOW, Browser, Page

from slime_tandem.live.page import LivePage
from slime_tandem.live.server import LiveServer
from slime_tandem.report.run_folder import RunWriter

from ..report.conftest import step_row
from ..report.hostile import TEXTS, write_hostile_run


def watched(
    folder: Path,
    browser: Browser,
    use: Callable[[Page, LiveServer], Awaitable[Any]],
    *,
    width: int = 1280,
    dark: bool = False,
) -> Any:
    async def session() -> Any:
        async with LiveServer(LivePage(folder), port=0, poll_s=0.02) as server:
            return await browser.visiting(server.url, lambda page: use(page, server), width=width, dark=dark)

    return asyncio.run(session())


async def until(page: Page, expression: str) -> None:
    while not await page.run(expression):
        await asyncio.sleep(0.02)


ON = "document.getElementById('live').dataset.state === 'on'"


def test_a_step_appears_without_a_reload_and_nothing_chosen_is_lost(make_run, browser):
    run_dir = make_run(steps=4, control=False, finished=False)
    chosen = """[window.mark, document.querySelector('input[name=answer]:checked').value, document.activeElement.className,
        document.querySelector('details').open, document.querySelector('#tip b').textContent, scrollY > 0,
        [...document.querySelectorAll('.group:not([hidden]) article:not([hidden])')].every(a => a.dataset.right === 'wrong')]"""

    async def use(page, server):
        await until(page, ON)
        await page.run("window.mark = 7; document.querySelector('input[name=answer][value=wrong]').click()")
        await page.run("document.querySelector('details').open = true")
        await page.run("document.querySelector('.plot').focus()")
        await page.press("Home")
        before = await page.run(chosen)
        points = await page.run("document.querySelector('polyline.run').getAttribute('points')")
        with RunWriter(run_dir, resume_step=4) as writer:
            writer.write_step(4, step_row(rollout__reward_mean=0.875, time__step_s=1.0))
        await until(page, "document.querySelector('.last .run').textContent === '0.875'")
        assert await page.run("document.querySelector('polyline.run').getAttribute('points')") != points
        assert (await page.run("document.title")).startswith("5/4 · demo")
        return before, await page.run(chosen), page.problems

    before, after, problems = watched(run_dir, browser, use)
    assert problems == []
    assert before == after
    assert before[:5] == [7, "wrong", "plot", True, "step 0"]
    assert before[6] is True


def test_the_page_waits_for_a_run_and_sees_it_begin(make_run, browser, tmp_path):
    run_dir = make_run(steps=2, control=True)
    later = run_dir.with_name("later")
    run_dir.rename(later)
    run_dir.mkdir()

    async def use(page, server):
        await until(page, ON)
        waiting = await page.run("document.querySelector('.now').textContent")
        run_dir.rmdir()
        later.rename(run_dir)
        await until(page, "document.querySelectorAll('.legend li').length === 2")
        return waiting, await page.run("document.querySelectorAll('article').length"), page.problems

    waiting, articles, problems = watched(run_dir, browser, use)
    assert "waiting for the run" in waiting
    assert articles > 0
    assert problems == []


def test_a_server_that_comes_back_is_found_again(make_run, browser):
    run_dir = make_run(steps=2, control=False, finished=False)

    async def session():
        first = LiveServer(LivePage(run_dir), port=0, poll_s=0.02)
        async with first:
            port = first.port

            async def use(page):
                await until(page, ON)
                await first.__aexit__()
                await until(page, "document.getElementById('live').dataset.state === 'off'")
                words = await page.run("document.getElementById('live').textContent")
                with RunWriter(run_dir, resume_step=2) as writer:
                    writer.write_step(2, step_row(rollout__reward_mean=0.875))
                async with LiveServer(LivePage(run_dir), port=port, poll_s=0.02):
                    await until(page, "document.querySelector('.last .run').textContent === '0.875'")
                    await until(page, ON)
                return words

            return await browser.visiting(first.url, use, width=1280)

    assert "the server does not answer; trying again" in asyncio.run(session())


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_text_is_obeyed_none_is_cut_off_and_all_can_be_read(tmp_path, browser, width, dark):
    run_dir = write_hostile_run(tmp_path / "run")

    async def use(page, server):
        await until(page, ON)
        with RunWriter(run_dir, resume_step=2) as writer:  # what comes as an event, too, is text
            writer.write_rewards(
                1,
                [
                    {
                        "task": "zz" + TEXTS[1],
                        "samples": 9,
                        "mean": 0.5,
                        "min": 0,
                        "max": 1,
                        "edges": [0, 1],
                        "counts": [9],
                    }
                ],
            )
        await until(page, "document.body.textContent.includes('zz')")
        inner = await page.run(OVERFLOW)
        await page.run("document.querySelector('input[name=shade][value=teacher]').click()")
        inner += await page.run(OVERFLOW)
        return (
            inner,
            [poor for poor in await page.run(CONTRAST) if poor["ratio"] < 4.5],
            await page.run("[window.broken ?? null, document.scripts.length, document.images.length]"),
            page.problems,
            [url for url in page.requests if not url.startswith(("data:", server.url))],
        )

    inner, poor, broken, problems, requests = watched(run_dir, browser, use, width=width, dark=dark)
    assert set(inner) == {width}
    assert poor == []
    assert broken == [None, 1, 0]
    assert problems == []
    assert requests == []


def test_a_script_that_got_through_is_stopped(make_run, browser):
    async def use(page, server):
        await until(page, ON)
        await page.run("document.body.append(Object.assign(document.createElement('div'), {id: 'new'}))")
        kinds = []
        for attempt in (
            "document.getElementById('new').innerHTML = '<img src=x onerror=window.broken=1>'",
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.broken = 2'}))",
        ):
            kinds.append(
                await page.run(f"(() => {{ try {{ {attempt}; return 'ran' }} catch (e) {{ return e.name }} }})()")
            )
        return kinds, await page.run("window.broken ?? null"), page.problems

    kinds, broken, problems = watched(make_run(), browser, use)
    assert broken is None
    assert kinds[0] == "TypeError", "the page's policy takes no text for HTML but by its own door"
    assert problems

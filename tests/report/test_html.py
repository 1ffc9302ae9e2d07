import asyncio
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages.browser import CONTRAST, OVERFLOW

from slime_tandem.config import RunConfig
from slime_tandem.errors import RunDirError
from slime_tandem.report import curves, html, transcripts
from slime_tandem.report.curves import MAX_POINTS, curve, nice_ticks, tick_labels
from slime_tandem.report.html import task_curves, write_report
from slime_tandem.report.run_folder import RunWriter, Transcript, TranscriptToken, read_rows
from slime_tandem.report.transcripts import ends_of, transcript_groups, visible

from .conftest import eval_row, step_row
from .hostile import write_hostile_run

ATTACK = "</script><script>alert(1)</script>"
ODD = (
    ATTACK,
    '"><img src=x onerror=alert(2)>',
    "a\nb",
    "",
    "\x00\x07\x7f",
    "\u202eevil",
    "😀",
    "\ud83d",
    "日本",
    "&lt;",
    "\t",
)


def test_a_token_is_shown_as_text():
    assert str(visible(ATTACK)) == "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;"
    assert str(visible("&lt;")) == "&amp;lt;"
    assert str(visible("")) == '<i class="c">∅</i>'
    assert str(visible("\u202ex")) == '<i class="c">U+202E</i>x'
    assert str(visible("\x00")) == '<i class="c">\u2400</i>'
    assert str(visible("\ud83d")) == '<i class="c">U+D83D</i>'
    assert str(visible("é😀")) == "é😀"


def test_a_curve_by_hand():
    rows = [{"step": s, "rollout/accuracy": v} for s, v in ((0, 0.0), (1, None), (2, 0.5), (3, 1.0))]
    drawn = curve("rollout/accuracy", "Accuracy", [("tandem", "run", rows), ("solo", "control", [])])
    assert drawn is not None
    assert [s.label for s in drawn.series] == ["tandem"]
    # The box runs from (48, 146) to (310, 8); the line breaks where a value is missing.
    assert drawn.series[0].lines == ("222.7,77.0 310.0,8.0",)
    assert drawn.series[0].end == (310.0, 8.0)
    assert [t.label for t in drawn.y_ticks] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert drawn.aria == "Accuracy in fraction. tandem: 0 at step 0, 1 at step 3"


def test_a_metric_without_any_value_has_no_curve():
    assert curve("opd/teacher_kl", "KL", [("solo", "run", [{"step": 0, "opd/teacher_kl": None}])]) is None


def test_a_long_run_is_drawn_as_means():
    rows = [{"step": s, "train/lr": float(s % 2)} for s in range(4 * MAX_POINTS)]
    drawn = curve("train/lr", "lr", [("run", "run", rows)])
    assert drawn is not None
    assert drawn.stretch == 4
    (series,) = json.loads(drawn.points)
    assert len(series["xy"]) == MAX_POINTS
    assert {y for _, y, _, _ in series["xy"]} == {0.5}


def rewards(*rows):
    return [{"step": step, "task": task, "samples": 4, "mean": mean} for step, task, mean in rows]


def test_each_task_has_a_curve_on_the_same_axes():
    run = rewards((0, "gcd", 0.0), (0, "sum", 0.5), (1, "sum", 1.0), (2, "gcd", 0.5))
    plots, left_out = task_curves([("tandem", "run", run), ("solo", "control", rewards((0, "sum", 0.25)))])
    assert left_out == 0
    assert [p.aria for p in plots] == [
        "gcd in reward. tandem: 0 at step 0, 0.5 at step 2",  # no prompt of it at step 1
        "sum in reward. tandem: 0.5 at step 0, 1 at step 1; solo: 0.25 at step 0, 0.25 at step 0",
    ]
    assert plots[0].y_ticks == plots[1].y_ticks
    assert plots[0].series[0].end[0] == 310.0, "step 2 is the last of all"
    assert plots[1].series[0].end[0] == 179.0, "step 1 is half way"


def test_one_task_has_no_curve_of_its_own_and_too_many_are_named(monkeypatch):
    assert task_curves([("tandem", "run", rewards((0, "sum", 0.5)))]) == ([], 0)
    monkeypatch.setattr(html, "MAX_TASKS", 2)
    plots, left_out = task_curves([("tandem", "run", rewards((0, "a", 0), (0, "c", 0), (0, "b", 0), (1, "c", 1)))])
    assert ([p.title for p in plots], left_out) == (["a", "c"], 1)


def test_the_page_shows_rewards_by_task(make_run, monkeypatch):
    run_dir = make_run(steps=3)
    assert "Reward by task" not in write_report(run_dir).read_text(encoding="utf-8")
    text = "".join(json.dumps(row) + "\n" for row in rewards((0, ATTACK, 0.25), (0, "sum", 0.5), (0, "t", 0.5)))
    (run_dir / "rewards.jsonl").write_text(text)
    monkeypatch.setattr(html, "MAX_TASKS", 2)
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "Reward by task" in page
    assert "1 more are in rewards.jsonl" in page
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page
    assert ATTACK not in page
    (run_dir / "rewards.jsonl").write_text('{"step": 0, "task": "sum", "samples": 4, "mean": NaN}\n')
    with pytest.raises(RunDirError, match=r"rewards\.jsonl:1=.*NaN is no number of JSON"):
        write_report(run_dir)


def test_one_point_is_a_dot():
    drawn = curve("train/lr", "lr", [("run", "run", [{"step": 0, "train/lr": 0.1}])])
    assert drawn is not None
    assert drawn.series[0].lines == ()
    assert drawn.series[0].end[0] == 48.0


def groups_of(*parts):
    return transcript_groups([(key, label, ends_of(read_rows(f / "transcripts.jsonl"))) for key, label, f in parts])


def test_transcripts_are_the_first_and_last_step_in_pairs(make_run):
    run_dir = make_run(steps=4, control=False)
    held_out, training = groups_of(("run", "tandem", run_dir))
    assert held_out.steps == (0, 4)
    assert [(t.step, t.column, t.prompt) for t in held_out.transcripts] == [
        (0, 1, "4 + 3 ="),
        (4, 2, "4 + 3 ="),
        (0, 1, "other"),
        (4, 2, "other"),
    ]
    assert training.steps == (0, 3)
    assert [t.right for t in training.transcripts] == [True, True, False, False]


def test_the_report_is_bounded(make_run, monkeypatch):
    monkeypatch.setattr(transcripts, "MAX_TOKENS", 10)
    run_dir = make_run(steps=3, texts=tuple(f" {i}" for i in range(25)))
    monkeypatch.setattr(transcripts, "MAX_TRANSCRIPTS", 8)
    groups = groups_of(("run", "tandem", run_dir), ("control", "solo", run_dir / "control"))
    assert [len(g.transcripts) for g in groups] == [2, 2, 2, 2]
    shown = groups[0].transcripts[0]
    assert (len(shown.tokens), shown.skipped, len(shown.tail), shown.n_tokens) == (8, 15, 2, 25)
    assert str(shown.tail[-1].text) == " 24"


def test_why_a_token_has_no_teacher_value(make_run):
    run_dir = make_run(steps=2, control=False)
    first = groups_of(("run", "tandem", run_dir))[0].transcripts[0]
    assert [t.teacher for t in first.tokens] == [None, "-1.000"]
    assert first.why.startswith("not aligned")


def test_the_page_loads_nothing(make_run):
    page = write_report(make_run(texts=ODD)).read_text(encoding="utf-8")
    assert "http://" not in page
    assert "https://" not in page
    assert "default-src 'none'" in page
    assert page.count("<script") == 1
    assert "<img" not in page


def test_every_svg_is_well_formed_and_named(make_run):
    page = write_report(make_run()).read_text(encoding="utf-8")
    plots = ["<svg" + part.split("</svg>")[0] + "</svg>" for part in page.split('<svg viewBox="')[1:]]
    assert len(plots) == 4  # reward, teacher KL, senior fraction, step time
    for plot in plots:
        root = ET.fromstring(plot.replace("<svg", '<svg viewBox="', 1))
        assert root.get("role") == "img"
        assert "solo control" in root.get("aria-label", "")


def test_the_command(make_run, tmp_path):
    run_dir = make_run(steps=1)
    command = [sys.executable, "-m", "slime_tandem.report.html"]
    done = subprocess.run([*command, str(run_dir)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(run_dir / "report.html")
    failed = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    assert "Remedy" in failed.stderr
    assert subprocess.run(command, capture_output=True, text=True).returncode == 2


def test_no_report_of_something_else(tmp_path):
    with pytest.raises(RunDirError):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


WIDE = "[document.documentElement.scrollWidth, innerWidth]"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_no_script_error_and_no_sideways_scrolling(make_run, browser, width, dark):
    long = (*ODD, "x" * 300, " https://" + "y" * 200)
    path = write_report(make_run(texts=long))

    async def use(page):
        inner = await page.run(WIDE)
        for name in ("group", "answer", "shade"):
            count = await page.run(f"document.querySelectorAll('input[name={name}]').length")
            for i in range(count):
                await page.run(f"document.querySelectorAll('input[name={name}]')[{i}].click()")
                inner += await page.run(WIDE)
        await page.run("document.querySelector('details').open = true")
        inner += await page.run(WIDE)
        background = await page.run("getComputedStyle(document.body).backgroundColor")
        return inner, background, page.problems, page.requests

    inner, background, problems, requests = browser.visit(path, use, width=width, dark=dark)
    assert set(inner) == {width}
    assert problems == []
    assert [url for url in requests if not url.startswith("data:")] == [path.resolve().as_uri()]
    assert (background == "rgb(17, 20, 23)") == dark


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_without_control_in_the_browser(make_run, browser, finished):
    path = write_report(make_run(steps=1, control=False, finished=finished))

    async def use(page):
        return await page.run(WIDE), await page.run("document.querySelector('.verdict').innerText"), page.problems

    inner, verdict, problems = browser.visit(path, use, width=390)
    assert inner == [390, 390]
    assert ("Not known" in verdict) is not finished
    assert problems == []


def test_what_a_model_wrote_is_text_in_the_browser(make_run, browser):
    path = write_report(make_run(texts=ODD))

    async def use(page):
        shown = await page.run("[...document.querySelector('.resp').querySelectorAll('.k')].map(k => k.textContent)")
        return shown, await page.run("document.scripts.length"), await page.run("document.images.length"), page.problems

    shown, scripts, images, problems = browser.visit(path, use, width=1280)
    assert shown == [
        ATTACK, ODD[1], "a↵\nb", "∅", "\u2400\u2407U+007F", "U+202Eevil", "😀", "U+D83D", "日本", "&lt;", "⇥\t"
    ]  # fmt: skip
    assert (scripts, images, problems) == (1, 0, [])


def test_the_policy_stops_a_script_that_got_through(make_run, browser, tmp_path):
    page_text = write_report(make_run()).read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(page_text.replace("<footer>", "<script>window.broken = 1</script><footer>"), encoding="utf-8")

    async def use(page):
        return await page.run("window.broken"), page.problems

    value, problems = browser.visit(broken, use, width=1280)
    assert value is None
    assert any("Content Security Policy" in p for p in problems)


def test_the_teachers_signal_by_pointer_key_and_filter(make_run, browser):
    path = write_report(make_run(texts=("A", " b", " C", " d")))

    async def use(page):
        tip = "document.getElementById('tip').hidden ? null : document.getElementById('tip').innerText"
        got = {}
        token = "document.querySelectorAll('.resp .k')[{}]"
        # A finger's tap ends in a click on the token.
        await page.run(token.format(2) + ".click()")
        got["tap"] = await page.run(tip)
        await page.run("document.querySelector('h1').click()")
        got["elsewhere"] = await page.run(tip)
        await page.run(token.format(1) + ".dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))")
        got["pointer"] = await page.run(tip)
        await page.press("Escape")
        got["escape"] = await page.run(tip)
        # Real Tab presses until a response has the focus.
        for _ in range(60):
            await page.press("Tab")
            if await page.run("document.activeElement.classList.contains('resp')"):
                break
        await page.press("Home")
        got["home"] = await page.run(tip)
        await page.press("End")
        got["end"] = await page.run("document.querySelector('.resp .on').textContent")
        await page.run("document.querySelector('input[name=answer][value=wrong]').click()")
        shown = "[...document.querySelectorAll('.group:not([hidden]) article:not([hidden])')].map(a => a.dataset.right)"
        got["wrong"] = await page.run(shown)
        await page.run("document.querySelector('.plot').focus()")
        # Scrolling to the plot hides the tip, and may still be under way.
        for _ in range(40):
            await page.press("Home")
            got["plot"] = await page.run(tip)
            if got["plot"]:
                break
            await asyncio.sleep(0.05)
        return got, page.problems

    got, problems = browser.visit(path, use, width=1280)
    assert problems == []
    # Authors are junior, senior, junior, senior; tokens 0 and 3 have no teacher value, 1 and 2 have -1 against -0.5.
    assert "junior" in got["home"]
    assert "not aligned: no teacher token covers exactly these bytes" in got["home"]
    assert "senior" in got["pointer"]
    assert "+0.50 nats" in got["pointer"]
    assert "pushes this token down" in got["pointer"]
    assert "not distilled" in got["tap"]
    assert got["elsewhere"] is None
    assert got["escape"] is None
    assert got["end"] == " d"
    assert got["wrong"] == ["wrong"]
    assert "step 0" in got["plot"]
    assert "0.25" in got["plot"]


def test_every_text_of_a_row_is_text_in_the_page(tmp_path):
    """Prompts, labels, tasks and ends are other people's, too; scripts and images of theirs are none."""
    attack = "</script><img src=x onerror=alert(1)><script>alert(2)</script>\"'><svg/onload=alert(3)>"
    with RunWriter(tmp_path, resume_step=None) as writer:
        writer.write_config(RunConfig(name="demo"))
        writer.write_eval(0, "before", eval_row(solo_accuracy=0.5))
        writer.write_step(0, step_row(rollout__reward_mean=0.5))
        numbers = {"samples": 1, "mean": 0.5, "min": 0.0, "max": 1.0, "edges": [0.0, 1.0], "counts": [1]}
        writer.write_rewards(0, [{"task": name, **numbers} for name in (attack, "other")])
        token = TranscriptToken(attack, 1, -0.5, -1.0)
        writer.write_transcripts(0, "train", [Transcript(attack, attack, attack, 0.5, attack, (token,))])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    found: list[tuple[str, str]] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.extend([(tag, name) for name, _ in attrs if name.startswith("on")])
            found.extend([(tag, "")] if tag in ("script", "img", "iframe", "object", "embed") else [])

    Tags().feed(page)
    assert found == [("script", "")], "the page's own"
    assert page.count("onerror=") > 0, "what was written is shown"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_hostile_texts_are_shown_whole_pages_stay_readable(tmp_path, browser, width, dark):
    path = write_report(write_hostile_run(tmp_path / "run"))
    assert path.stat().st_size < 2**21, "a line of a mebibyte is cut"

    async def use(page):
        inner, poor = await page.run(OVERFLOW), []
        for shade in ("author", "teacher"):
            await page.run(f"document.querySelector('input[name=shade][value={shade}]').click()")
            inner += await page.run(OVERFLOW)
            poor += [found for found in await page.run(CONTRAST) if found["ratio"] < 4.5]
        broken = await page.run("[window.broken ?? null, document.scripts.length, document.images.length]")
        return inner, poor, broken, page.problems

    inner, poor, broken, problems = browser.visit(path, use, width=width, dark=dark)
    assert set(inner) == {width}
    assert poor == []
    assert broken == [None, 1, 0]
    assert problems == []


def test_poor_contrast_is_found(browser, tmp_path):
    path = tmp_path / "x.html"
    path.write_text(
        "<body style='background:#fff'><p style='color:#777'>grey</p><p style='color:#767676'>dark enough</p>"
        "<p style='background:repeating-linear-gradient(45deg, #fff 0 4px, #888 4px 6px)'>stripes</p>"
        "<p style='background:rgba(0,0,0,.5);color:#fff'>half</p>"
        "<svg><text fill='#ccc' y='9'>drawn</text></svg>"
    )

    async def use(page):
        return await page.run(CONTRAST)

    found = {f["text"]: round(f["ratio"], 2) for f in reversed(browser.visit(path, use, width=400))}
    # WCAG 2.2's formula by hand: #777 on white 4.48, #767676 4.54; #888 under black 5.92; white on half grey 3.98.
    assert found == {"drawn": 1.61, "half": 3.98, "grey": 4.48, "dark enough": 4.54, "stripes": 5.92}


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_no_two_ticks_have_one_label(low, span):
    """Whatever the values: `6.13 6.13 6.13 6.13` says nothing."""
    low, high = curves._range(low, low + span, bounded=False)
    ticks = nice_ticks(low, high, 5)
    labels = tick_labels(ticks)
    assert len(set(labels)) == len(labels) >= 2
    assert max(map(len, labels)) <= 9


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([6.1299, 6.1302], ["6.10", "6.12", "6.14", "6.16"]),
        ([0.0, 0.0], ["0.0", "0.1", "0.2", "0.3", "0.4", "0.5"]),
        ([2e-5, 4e-5], ["2.0e-5", "2.5e-5", "3.0e-5", "3.5e-5", "4.0e-5"]),
        ([123456.0, 124000.0], ["123.2k", "123.4k", "123.6k", "123.8k", "124.0k", "124.2k"]),
    ],
)
def test_ticks_by_hand(values, labels):
    rows = [{"step": i, "opd/teacher_kl": v} for i, v in enumerate(values)]
    drawn = curve("opd/teacher_kl", "KL", [("run", "run", rows)])
    assert [t.label for t in drawn.y_ticks] == labels


def test_what_is_shown_as_no_change_has_no_colour(make_run):
    run_dir = make_run(control=False)
    rows = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    rows[0] |= {"eval/solo_accuracy": 0.5, "eval/tandem_accuracy": 0.25, "eval/teacher_kl": 1.5}
    rows[1] |= {"eval/solo_accuracy": 0.50049, "eval/tandem_accuracy": 0.25, "eval/teacher_kl": 1.49951}
    (run_dir / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert '<span class="delta ">0.000</span>' in page
    assert 'class="delta good"' not in page
    assert 'class="delta bad"' not in page
    assert "+0.000" not in page.replace("(+0.000", "")

"""What is shown of a run while it runs: plain lines, a terminal's display, nothing; and what progress.json says."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from slime_tandem.report.metrics import row_keys
from slime_tandem.report.progress import PROGRESS_FILE, ProgressRecord, RunProgress

from ..waiting import PATIENCE_S

ROW: dict[str, float | None] = {
    **dict.fromkeys(row_keys("step")),
    "rollout/reward_mean": 0.4126,
    "tandem/senior_token_fraction": 0.5,
    "time/step_s": 2.04,
}


def plain() -> Console:
    return Console(file=io.StringIO(), width=40)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def clock(*times: float) -> Iterator[float]:
    yield from times
    while True:
        yield times[-1]


def a_run(progress: RunProgress) -> None:
    progress.phase("starting servers: senior, junior", total=2, unit="server")
    progress.advance("senior: answers")
    progress.advance("junior: answers")
    progress.phase("run: evaluation before training, 64 held-out prompts")
    progress.part("writing 64 responses, the senior alone")
    progress.steps("run", 12, 3)
    progress.part("writing 128 responses, senior and junior")
    progress.step(ROW)
    progress.step(ROW)


def test_a_log_has_a_plain_line_for_each_phase_and_step() -> None:
    console, times = plain(), clock(100.0, 100.5)
    with RunProgress(console=console, clock=lambda: next(times)) as progress:
        a_run(progress)
    assert text_of(console).splitlines() == [
        "    0.5 s  starting servers: senior, junior",
        "    0.5 s    senior: answers",
        "    0.5 s    junior: answers",
        "    0.5 s  run: evaluation before training, 64 held-out prompts",
        "    0.5 s  run: training",
        "run 4/12  reward 0.413  senior 0.50  KL –  2.0 s/step",
        "run 5/12  reward 0.413  senior 0.50  KL –  2.0 s/step",
    ]


def test_a_terminal_has_a_display_that_leaves_a_line_for_each_phase() -> None:
    console = Console(file=io.StringIO(), width=140, force_terminal=True)
    with RunProgress(console=console) as progress:
        a_run(progress)
        assert progress._live is not None
        progress._live.refresh()
    text = text_of(console)
    assert "✓ starting servers: senior, junior (server 2/2)" in text
    assert "✓ run: training (step 5/12)" in text
    assert "  reward 0.413  senior 0.50  KL –  2.0 s/step" in text
    assert " left" in text
    assert "writing 128 responses" in text


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_the_display_fits_the_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    with RunProgress(console=console) as progress:
        a_run(progress)
        lines = console.render_lines(progress._display())
    assert len(lines) == 3, "one line for each, none is broken"
    assert max(sum(len(part.text) for part in line) for line in lines) <= width


def test_a_run_that_ends_badly_leaves_no_tick() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)

    def run() -> None:
        with RunProgress(console=console) as progress:
            progress.phase("reading prompts")
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        run()
    assert "✗ reading prompts" in text_of(console)
    assert "✓" not in text_of(console)


def test_quiet_shows_warnings_alone() -> None:
    for terminal in (False, True):
        console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
        with RunProgress(console=console, quiet=True) as progress:
            a_run(progress)
            progress.say("a note")
            progress.warn("a warning")
        assert text_of(console) == "a warning\n"


def test_what_is_said_is_text_not_markup() -> None:
    console = plain()
    with RunProgress(console=console) as progress:
        progress.say("[red]x[/red] [/]")
        progress.phase("[bold]y")
    assert text_of(console).splitlines()[0] == "[red]x[/red] [/]"
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with RunProgress(console=console) as progress:
        progress.phase("[bold]y[/nothing]")
    assert "[bold]y[/nothing]" in text_of(console)


@pytest.mark.parametrize(
    ("error", "state"), [(None, "done"), (KeyboardInterrupt(), "stopped"), (ValueError("x"), "failed")]
)
def test_the_folder_says_what_the_run_does_and_how_it_ended(
    tmp_path: Path, error: BaseException | None, state: str
) -> None:
    def run() -> None:
        with RunProgress(console=plain(), clock=lambda: 5.0) as progress:
            progress.phase("reading prompts")
            assert not list(tmp_path.iterdir())
            progress.record_in(tmp_path)
            progress.steps("run", 12, 3)
            progress.step(ROW)
            now = ProgressRecord.read((tmp_path / PROGRESS_FILE).read_bytes())
            assert now == ProgressRecord(
                state="running", phase="run: training", done=4, total=12, unit="step", started=5.0, since=5.0
            )
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert [path.name for path in tmp_path.iterdir()] == [PROGRESS_FILE]
    record = ProgressRecord.read((tmp_path / PROGRESS_FILE).read_bytes())
    assert record is not None
    assert record.state == state


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    with RunProgress(console=plain()) as progress:
        progress.record_in(tmp_path / "nowhere")
        progress.phase("x")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"state": "running"}',
        b'{"state": 1, "phase": [], "done": -1}',
        b"\xff\x00",
        b'{"since": 1e400}',
    ],
)
def test_another_programs_file_is_none_of_ours(content: bytes) -> None:
    assert ProgressRecord.read(content) is None


def test_times_that_no_clock_shows_are_refused() -> None:
    good = {"state": "done", "phase": "", "done": 0, "total": 0, "unit": "", "started": 0.0, "since": 0.0}
    assert ProgressRecord.read(json.dumps(good).encode()) is not None
    assert ProgressRecord.read(json.dumps({**good, "since": 1e12}).encode()) is None


def test_train_says_what_it_does_before_it_loads_anything_heavy(tmp_path: Path) -> None:
    """On a pipe: the first line is there before torch; standard output stays for the result."""
    code = (
        "import sys\n"
        "from slime_tandem.report import progress\n"
        "line = progress.RunProgress._line\n"
        "def seen(self, text, **more):\n"
        "    print(text, 'torch' in sys.modules, file=sys.stderr)\n"
        "    raise SystemExit(9)\n"
        "progress.RunProgress._line = seen\n"
        "from slime_tandem.cli import main\n"
        "sys.exit(main(['train', '--set', 'runs_dir=" + str(tmp_path) + "']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (9, "")
    assert done.stderr == "loading libraries False\n"


def test_a_result_on_a_pipe_stays_there_while_the_terminal_shows_progress() -> None:
    code = (
        "from slime_tandem.report.progress import RunProgress\n"
        "with RunProgress() as progress:\n"
        "    progress.phase('reading')\n"
        "    print('the result')\n"
    )
    file, inner = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=inner, timeout=PATIENCE_S, check=True,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(inner)
        shown = os.read(file, 2**16).decode()
    finally:
        os.close(file)
    assert done.stdout == b"the result\n"
    assert "✓" in shown
    assert "the result" not in shown

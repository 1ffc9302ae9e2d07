"""A plan's jobs on a machine's cards: who gets which, what is left out, and that nothing outlives the queue."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; it is in no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("card_queue")


def plan(folder: Path, text: str) -> str:
    path = folder / "plan.toml"
    path.write_text(textwrap.dedent(text))
    return str(path)


def alive(file: Path) -> bool:
    """Whether the process runs whose number is in a file; one that has ended and that nobody asked after does not."""
    stat = Path(f"/proc/{file.read_text().strip()}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_jobs_share_the_cards_and_a_second_call_makes_up_for_what_failed(queue: Any, tmp_path: Path) -> None:
    jobs = plan(
        tmp_path,
        """
        [values]
        say = "echo {job} on $CUDA_VISIBLE_DEVICES {card0} {flags} {what}"
        what = "nothing"
        [[job]]
        name = "pair"
        cards = 2
        limit = 30
        flags = "--x ${HOME:+set} {}"
        command = "{say}; touch {out}/made; until [[ -e {out}/seen ]]; do sleep 0.05; done"
        [[job]]
        name = "next"
        cards = 2
        limit = 30
        after = ["pair"]
        command = "{say}; test -e {out}/made && test -e {out}/mended"
        [[job]]
        name = "behind"
        cards = 1
        limit = 30
        after = ["next"]
        command = "{say}"
        [[job]]
        name = "beside"
        cards = 0
        limit = 30
        command = "until [[ -e {out}/made ]]; do sleep 0.05; done; touch {out}/seen; echo cards: $CUDA_VISIBLE_DEVICES."
        """,
    )
    out = tmp_path / "out"
    assert queue.main([jobs, "--cards", "3", "--out", str(out), "what=this"]) == 1
    assert (out / "pair.log").read_text() == "pair on 0,1 0 --x set {} this\n"
    assert (out / "beside.log").read_text() == "cards: .\n", "it ran while the pair waited for it"
    assert not (out / "behind.log").exists(), "the job before it failed"
    (out / "mended").touch()
    assert queue.main([jobs, "--cards", "3", "--out", str(out)]) == 0
    assert (out / "pair.log").read_text().count("\n") == 1, "done before"
    assert (out / "behind.log").read_text() == "behind on 0 0 nothing\n"
    lines = (out / "timeline.txt").read_text()
    assert "next ends with 1" in lines
    assert "behind left out: a job before it failed" in lines
    assert "pair done before" in lines


def test_a_job_at_its_limit_is_ended_with_all_that_it_started(queue: Any, tmp_path: Path) -> None:
    jobs = plan(
        tmp_path,
        """
        [[job]]
        name = "long"
        cards = 1
        limit = 0.5
        command = "sleep 600 & echo $! > {out}/pid; wait"
        [[job]]
        name = "short"
        cards = 1
        limit = 30
        command = "echo {card0}"
        """,
    )
    out = tmp_path / "out"
    assert queue.main([jobs, "--out", str(out)]) == 1
    assert not alive(out / "pid")
    assert (out / "short.log").read_text() == "0\n", "its card was free again"
    assert "long ends with 124" in (out / "timeline.txt").read_text()


def test_what_does_not_fit_into_the_time_is_said(queue: Any, tmp_path: Path) -> None:
    one = '[[job]]\nname = "{0}"\ncards = 1\nlimit = 600\ncommand = "sleep 600"\n'
    jobs = plan(tmp_path, one.replace("{0}", "first") + one.replace("{0}", "second"))
    assert queue.main([jobs, "--out", str(tmp_path / "out"), "--for", "0.5"]) == 1
    told = (tmp_path / "out" / "timeline.txt").read_text()
    assert "first ends with 124" in told
    assert "second not begun: out of time" in told


def test_killed_it_takes_its_jobs_with_it(tmp_path: Path) -> None:
    jobs = plan(tmp_path, '[[job]]\nname = "a"\ncards = 0\nlimit = 600\ncommand = "echo $$ > {out}/pid; sleep 600"\n')
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, str(BENCHMARKS / "card_queue.py"), jobs, "--out", str(out)])
    wait_until(lambda: (out / "pid").exists() and (out / "pid").read_text().strip())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert not alive(out / "pid")


JOB = '[[job]]\nname = "a"\ncards = 1\nlimit = 1\ncommand = "true"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = ", "expected [values] and [[job]]"),
        ("[values]\nx = 1\n", "'job'"),
        ("job = 3\n", "not iterable"),
        ("job = [3]", "must be a mapping"),
        ("values = 3\n" + JOB, "not iterable"),
        ("x = 1\n" + JOB, "x: expected [values] and [[job]] alone"),
        (JOB.replace("cards", "card"), "a job's cards {"),
        (JOB + "more = 1\n", "a job's more 1: Extra inputs are not permitted"),
        (JOB + JOB, "expected a name of its own"),
        (JOB.replace("cards = 1", 'cards = "1"'), "a job's cards '1': Input should be a valid integer"),
        (JOB.replace("cards = 1", "cards = -1"), "a job's cards -1: Input should be greater than or equal to 0"),
        (JOB.replace("cards = 1", "cards = true"), "a job's cards True: Input should be a valid integer"),
        (JOB.replace("limit = 1", "limit = 0"), "a job's limit 0: Input should be greater than 0"),
        (JOB.replace("limit = 1", "limit = nan"), "a job's limit nan: Input should be greater than 0"),
        (JOB.replace('"true"', "3"), "a job's command 3: Input should be a valid string"),
        (JOB.replace('"a"', "3"), "a job's name 3: Input should be a valid string"),
        (JOB.replace('"a"', '"../a"'), "a job's name '../a': String should match pattern"),
        (JOB + "after = [3]\n", "a job's after.0 3: Input should be a valid string"),
        (JOB + 'after = ["b"]\n', "after b: expected jobs before it"),
        (JOB + 'after = ["a"]\n', "after a: expected jobs before it"),
        (JOB.replace("true", "{where}"), "{where} in its command: expected one of"),
        (JOB.replace("true", "{card1}"), "{card1} in its command"),
        ('[values]\nx = "{x}"\n' + JOB.replace("true", "{x}"), "{x} names itself"),
        (JOB.replace("cards = 1", "cards = 2"), "--cards: 1: expected at least 2"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_before_anything_starts(
    queue: Any, tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queue.main([plan(tmp_path, text), "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [["--only", "b"], ["b=1"], ["b"]])
def test_so_are_names_that_it_does_not_have(queue: Any, tmp_path: Path, more: list[str]) -> None:
    assert queue.main([plan(tmp_path, JOB), "--out", str(tmp_path / "out"), *more]) == 2


@pytest.mark.parametrize(("name", "cards"), [("one_card", 1), ("two_cards", 2)])
def test_the_projects_own_plans(name: str, cards: int, tmp_path: Path) -> None:
    """Each command is one of bash, and starts scripts that are there."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "card_queue.py"), str(BENCHMARKS / f"{name}.toml"), "--cards", str(cards),
         "--out", str(tmp_path / "out")],
        env={**os.environ, "DRY_RUN": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    commands = [line for line in done.stdout.splitlines() if not line.startswith("# ")]
    assert len(commands) > 10
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)
        scripts = [word.strip("';") for word in command.split() if word.startswith(f"{BENCHMARKS.parents[1]}/")]
        assert scripts
        assert all(Path(script).is_file() for script in scripts)
    assert not (tmp_path / "out").exists()

"""Suites under slime: what is handed to the launch script, in what order, and what an interruption leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError, EngineError
from slime_tandem.local.suite import Suite, parse_methods
from slime_tandem.report.comparison import read_mapping
from slime_tandem.slime_launch.suite import SUBMIT, _attended, run_slime_suite


def test_the_launch_script_is_where_it_is_looked_for() -> None:
    assert SUBMIT.is_file()


def test_an_interrupted_suite_lets_its_launch_script_stop_the_job(tmp_path: Path) -> None:
    """Killed at once, the script could not stop what it has submitted."""
    script = f'sleep 30 & trap "touch {tmp_path}/stopped; kill $!; exit 143" TERM; kill -INT $PPID; wait'
    with pytest.raises(KeyboardInterrupt):
        _attended(["bash", "-c", script])
    assert (tmp_path / "stopped").exists()


def test_slime_runs_what_is_not_finished_by_its_launch_script(tmp_path: Path) -> None:
    planned, said = [], list[str]()

    class Launch:
        def __init__(self, config: RunConfig, folder: Path) -> None:
            planned.append((config.opd.selection.mask, config.seed))
            self.folder = folder

        def shell(self) -> str:
            return "SLIME_FLAGS=(--x)\n"

        def write(self) -> None:
            self.folder.mkdir(parents=True, exist_ok=True)

    submit = tmp_path / "submit.sh"
    submit.write_text(
        '[[ "$(cat "$1/launch.sh")" == "SLIME_FLAGS=(--x)" ]]; echo "$1" >> "$(dirname "$0")/ran"; test ! -e "$0.fail"'
    )

    def go(*, dry_run: bool = False) -> list[str]:
        (tmp_path / "ran").write_text("")
        methods = parse_methods("tip:0.1:3 random:0.1:4")
        job = Suite(tmp_path / "s", methods, [5], None, ("objective.reward_coef=0",))
        run_slime_suite(job, dry_run=dry_run, submit=submit, plan=Launch, say=said.append)  # type: ignore[arg-type]
        return [Path(line).parent.name for line in (tmp_path / "ran").read_text().splitlines()]

    assert go(dry_run=True) == []
    assert said[1] == f"SLIME_FLAGS=(--x)\nbash {submit} {tmp_path}/s/003-tip-0.1-seed5/slime_launch"
    assert not (tmp_path / "s").exists()
    Path(f"{submit}.fail").touch()
    with pytest.raises(EngineError, match=r"run 003-tip-0\.1-seed5='exit code 1'"):
        go()
    Path(f"{submit}.fail").unlink()
    assert go() == ["003-tip-0.1-seed5", "004-random-0.1-seed5"]
    assert go() == []
    assert planned[:2] == [("tip", 5), ("random", 5)]
    assert [row["run"] for row in read_mapping(tmp_path / "s")] == ["003-tip-0.1-seed5", "004-random-0.1-seed5"]
    submit.unlink()
    with pytest.raises(ConfigError, match="BACKEND='slime': expected the script"):
        go(dry_run=True)

"""A suite under slime: each method and seed planned, then run by scripts/train/submit_slime.sh, one after the other.

What a suite is, and its half on one machine, is in `local.suite`. A suite that was stopped goes on where it was.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import slime_tandem
from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError, EngineError, RunDirError
from slime_tandem.files import whole_file
from slime_tandem.local.suite import Suite, merged_mapping, write_mapping
from slime_tandem.signals import signals_wait
from slime_tandem.slime_launch.flags import Plan
from slime_tandem.slime_launch.plan import launch_plan

SUBMIT = Path(slime_tandem.__file__).parents[1] / "scripts" / "train" / "submit_slime.sh"
"""The script that hands one launch to Ray and waits for its end; only a checkout of this repository has it."""
_DONE = "slime_done"
"""In a run's folder, the number of rollouts that slime has ended with."""


def run_slime_suite(
    suite: Suite,
    *,
    dry_run: bool = False,
    submit: Path = SUBMIT,
    plan: Callable[[RunConfig, Path], Plan] = launch_plan,
    say: Callable[[str], None] = print,
) -> None:
    """The methods of a suite under slime: of each unfinished run the launch files, then `bash submit FOLDER`.

    `plan` makes the launch of a configuration, whose files go into a folder. A run that slime has ended with success is
    finished; any other starts from its last checkpoint. All plans are made before anything runs. Raises ConfigError,
    ModelError and RunDirError before that, EngineError for a run that fails.
    """
    if not submit.is_file():
        raise ConfigError("BACKEND", "slime", f"the script {submit}", "run from a checkout of this repository")
    runs = suite.runs()
    merged_mapping(suite.folder, runs)
    plans = [plan(config, config.run_dir / "slime_launch") for _, _, config in runs]
    if not dry_run:
        write_mapping(suite.folder, runs)
    for number, ((_, _, config), launch) in enumerate(zip(runs, plans, strict=True), 1):
        folder, done = config.run_dir / "slime_launch", config.run_dir / _DONE
        finished = done.is_file() and int(done.read_text(encoding="utf-8")) >= config.train.steps
        say(f"[{number}/{len(runs)}] {config.name}: {'finished' if finished else 'to run'}")
        command = ["bash", str(submit), str(folder)]
        if dry_run:
            say("\n".join((launch.shell().rstrip(), shlex.join(command))))
        elif not finished:
            launch.write()
            _write(folder / "launch.sh", launch.shell())
            code = _attended(command)
            if code:
                raise EngineError(
                    f"run {config.name}", f"exit code {code}", "0 from slime's train.py", "see Ray's log of the job"
                )
            _write(done, str(config.train.steps))


def _write(path: Path, text: str) -> None:
    try:
        with whole_file(path) as file:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunDirError.of_os_error(path, error) from error


def _attended(command: Sequence[str]) -> int:
    """Exit code of a command that, when we are stopped, is asked to stop and waited for: it has a job of its own to end."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with signals_wait():
            process = subprocess.Popen(command)  # noqa: S603 - our own script, no shell
        return process.wait()
    except BaseException:
        if process is not None:
            process.terminate()
            process.wait()
        raise

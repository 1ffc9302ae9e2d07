"""Weights & Biases and trackio beside the run's folder: the same rows and the settings; a resumed run is the same run there.

What they do, and whether it works, never reaches the training: each has a thread of its own, what fails is counted and said.
TensorBoard is a file of the run's folder (`run_folder`). Knows no step and no model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError, RunDirError, printable
from slime_tandem.files import read_json, record_of, whole_file

ENDS_IN_S = 60.0
"""Seconds that a tracker may take to end, all of its rows sent."""
_IDS = "trackers.json"
_NOT_THEIRS = {"cluster"}
"""Sections that say nothing of a local run; slime's flags in one may hold a key."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a tracker needs to know of a run. `run_id`: its own for good; `resumed`: rows were sent under it before."""

    name: str
    group: str
    run_id: str
    resumed: bool
    folder: Path
    config: RunConfig

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, as JSON has them."""
        return self.config.model_dump(mode="json", exclude=_NOT_THEIRS)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Values as counts [n] between edges [n + 1]."""

    counts: tuple[int, ...]
    edges: tuple[float, ...]


Logged = Mapping[str, float | Histogram | None]
"""What a tracker gets at once: a row of metrics, or histograms by name."""


class Tracker(Protocol):
    """One of them, open."""

    def log(self, step: int, row: Logged) -> None:
        """Take one row: of a step, or of an evaluation after so many."""
        ...

    def finish(self) -> None:
        """Send what is left, and end."""
        ...


class _WeightsAndBiases:
    def __init__(self, named: Named) -> None:
        import wandb

        tracking = named.config.tracking
        self._run = wandb.init(
            project=tracking.project_of("wandb", os.environ),
            entity=tracking.entity,
            mode=tracking.mode,
            name=named.name,
            group=named.group,
            id=named.run_id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(named.folder),
            config=named.settings,
            settings=wandb.Settings(console="off"),  # the progress display is no log
        )
        # A run that goes on from a checkpoint writes steps again, which W&B's own counter would drop.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, row: Logged) -> None:
        import wandb

        self._run.log({"step": step, **_drawn(row, wandb.Histogram)})

    def finish(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, named: Named) -> None:
        import trackio

        self._run = trackio.init(
            project=named.config.tracking.project_of("trackio", os.environ),
            name=f"{named.name}-{named.run_id}",  # by which it finds a run that goes on
            group=named.group,
            resume="allow" if named.resumed else "never",
            config=named.settings,
            embed=False,
        )

    def log(self, step: int, row: Logged) -> None:
        import trackio

        self._run.log(_drawn(row, trackio.Histogram), step=step)

    def finish(self) -> None:
        self._run.finish()


def _drawn(row: Logged, made: Callable[..., Any]) -> dict[str, Any]:
    """The row with a tracker's own histograms: both libraries take numpy's counts and edges under one name."""
    return {
        name: made(np_histogram=(list(value.counts), list(value.edges))) if isinstance(value, Histogram) else value
        for name, value in row.items()
    }


TRACKERS: Mapping[str, Callable[[Named], Tracker]] = {"wandb": _WeightsAndBiases, "trackio": _Trackio}


def require_trackers(config: RunConfig) -> None:
    """Raise ConfigError, before anything starts, for a tracker that is not installed, or that would ask for a key."""
    for name in config.report_to:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            expected = f"trackers that are installed, and {name} is not"
            raise ConfigError(
                "report_to", name, expected, f"pip install 'slime-tandem[{name}]', or take it out of report_to"
            )
    mode = config.tracking.mode or os.environ.get("WANDB_MODE") or "online"
    if "wandb" in config.report_to and mode == "online" and not _has_key():
        expected = "a key of Weights & Biases (WANDB_API_KEY, or `wandb login`)"
        raise ConfigError("report_to", "wandb", expected, "log in, or set tracking.mode=offline and `wandb sync` later")


def _has_key() -> bool:
    import wandb

    return bool(wandb.login(prompt=False))


class Trackers:
    """The trackers of one run: rows go in, and this never waits for them nor fails by them; a context manager.

    `lost`: rows that a tracker did not take, by its name. `say` gets a line for people at the first loss, and at the end.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        name: str,
        say: Callable[[str], None] = print,
        openers: Mapping[str, Callable[[Named], Tracker]] = TRACKERS,
        ends_in_s: float = ENDS_IN_S,
    ) -> None:
        self.lost: dict[str, int] = {name: 0 for name in config.report_to if name in openers}
        self._say, self._ends_in_s, self._started = say, ends_in_s, False
        self._config, self._folder, self._name = config, folder, name
        self._lines = [_Line(tracker, openers[tracker], self) for tracker in self.lost]

    def log(self, step: int, row: Logged) -> None:
        """Hand a row on; the first one opens the trackers. Raises RunDirError if the run's id there cannot be kept."""
        if self._lines and not self._started:
            kept, resumed = _kept_id(self._folder)
            self._started = True
            named = Named(self._name, self._config.name, kept, resumed, self._folder, self._config)
            for line in self._lines:
                line.start(named)
        for line in self._lines:
            line.rows.put((step, dict(row)))

    def close(self) -> None:
        """Wait for the trackers, for a bounded time, and say what was lost."""
        if not self._started:
            return
        for line in self._lines:
            line.rows.put(None)
        for line in self._lines:
            line.thread.join(self._ends_in_s)
            if line.thread.is_alive():
                left = line.rows.qsize()
                self._say(f"{line.name} has not ended after {self._ends_in_s:g} s: {left} rows or more were not sent")
            if self.lost[line.name]:
                self._say(
                    f"{line.name}: {self.lost[line.name]} of {line.taken} rows were not taken; metrics.jsonl has them"
                )
        self._started = False

    def lose(self, name: str, what: str, error: BaseException) -> None:
        """Count a row that was not taken; say why, the first time."""
        self.lost[name] += 1
        if self.lost[name] == 1:
            self.tell(name, what, error)

    def tell(self, name: str, what: str, error: BaseException) -> None:
        """Say what failed."""
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._say(printable(f"{name} {what} ({why}); training goes on, the run's folder has all rows"))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Line:
    """One tracker's rows and its thread."""

    def __init__(self, name: str, opener: Callable[[Named], Tracker], owner: Trackers) -> None:
        self.name, self._opener, self._owner = name, opener, owner
        self.rows: queue.SimpleQueue[tuple[int, Logged] | None] = queue.SimpleQueue()
        self.taken = 0
        self.thread = threading.Thread()

    def start(self, named: Named) -> None:
        self.thread = threading.Thread(target=self._work, args=(named,), name=f"tracker {self.name}", daemon=True)
        self.thread.start()

    def _work(self, named: Named) -> None:
        tracker, unopened = None, None
        try:
            tracker = self._opener(named)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library, and the network behind it
            unopened = error
        while (row := self.rows.get()) is not None:
            self.taken += 1
            try:
                if tracker is None:
                    assert unopened is not None
                    raise unopened
                tracker.log(*row)
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self._owner.lose(self.name, "takes no rows", error)
        try:
            if tracker is not None:
                tracker.finish()
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._owner.tell(self.name, "did not end well", error)


def run_id(folder: Path) -> tuple[str, Path, str | None]:
    """(the id of a run for trackers, the file in its folder that keeps it, what is to be written there): one that is kept stays
    (None), else a new one. Raises RunDirError for a damaged file."""
    path = folder / _IDS
    if path.exists():
        try:
            return record_of(dict[str, str], read_json(path))["run_id"], path, None
        except (OSError, ValueError, KeyError) as error:
            expected = f"the run's id at its trackers ({error})"
            raise RunDirError("record of the trackers", str(path), expected, "restore the file, or delete it") from None
    made = secrets.token_hex(4)
    return made, path, json.dumps({"run_id": made}) + "\n"


def _kept_id(folder: Path) -> tuple[str, bool]:
    """(the id of this run for trackers, whether it had one): made once, kept in the run's folder."""
    found, path, text = run_id(folder)
    if text is not None:
        try:
            with whole_file(path) as unfinished:
                unfinished.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunDirError.of_os_error(path, error) from error
    return found, text is None

"""What the live page shows: its parts as HTML, each with the number of the change that it last had.

A run's page has the parts of its report and one more, what the run is doing now; a suite's page has the comparison. It reads
the folder when told to, and knows no server and no browser. Whatever the folder holds, there is a page: what cannot be read is
said in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from slime_tandem import __version__
from slime_tandem.errors import TandemError, printable
from slime_tandem.report.comparison import MAPPING, rendered_suite, summarise_suite
from slime_tandem.report.follow import RunFollower
from slime_tandem.report.html import PARTS, ArmData, digest, environment, page_view, rendered, source
from slime_tandem.report.progress import ProgressRecord
from slime_tandem.report.transcripts import ends_of, passage

_NOW = "now"


class LivePage:
    """The parts of a folder's page. `refresh` is for one thread at a time; `newer` and `whole` give what it left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_suite = (folder / MAPPING).exists()
        self._env = environment()
        self._follower = RunFollower(folder)
        self._stamps: Mapping[str, tuple[int, int]] = {}
        names = (_NOW, "suite") if self.is_suite else (_NOW, *PARTS)
        self.version = 0
        self._parts: dict[str, tuple[int, str | None]] = dict.fromkeys(names, (0, None))
        self._parts[_NOW] = (0, self._now("reading the folder"))
        self.changed_at = time.time()
        """When the folder was last seen to change."""
        style = source(self._env, "report.css") + source(self._env, "live.css")
        self._style = Markup(style)  # noqa: S704 - ours
        self.script = source(self._env, "report.js") + source(self._env, "live.js")
        self.script_hash = digest(self.script)

    def refresh(self) -> bool:
        """Read what is new and render it; whether any part changed."""
        try:
            fresh = self._suite() if self.is_suite else self._run()
        except TandemError as error:
            fresh = {_NOW: self._now("not readable", problems=[str(error)])}
        if fresh is None:
            return False
        changed = {name: text for name, text in fresh.items() if text != self._parts[name][1]}
        if not changed:
            return False
        # New dictionary, then its number: a reader in another thread never sees half of a change.
        version = self.version + 1
        self._parts = {**self._parts, **{name: (version, text) for name, text in changed.items()}}
        self.version = version
        self.changed_at = time.time()
        return True

    def newer(self, version: int) -> list[tuple[int, str, str]]:
        """(version, name, HTML) of every part that changed since `version`, oldest first."""
        parts = [
            (number, name, text)
            for name, (number, text) in self._parts.items()
            if number > version and text is not None
        ]
        return sorted(parts, key=lambda part: part[0])

    def whole(self, boot: str) -> str:
        """The page with all its parts, from which a browser goes on; `boot` names this server's numbers."""
        parts, version = self._parts, self.version
        return self._env.get_template("live.html.j2").render(
            title=f"{passage(self.folder.resolve().name, 100).striptags()} · live",
            since=f"{boot}-{version}",
            parts=[(name, Markup(text or "")) for name, (_, text) in parts.items()],  # noqa: S704 - escaped when rendered
            style=self._style,
            script=self.script,
            version=__version__,
        )

    def _run(self) -> dict[str, str] | None:
        follower = self._follower
        if not follower.read() and self.version:
            return None
        problems = list(follower.problems)
        if follower.config is None:
            return {_NOW: self._now("waiting for the run", problems=problems), **dict.fromkeys(PARTS, "")}
        arms = follower.arms()
        try:
            view = page_view(follower.config, arms)
        except TandemError as error:  # transcripts of another form: the rest can be shown
            problems.append(str(error))
            view = page_view(follower.config, [_without_transcripts(arm) for arm in arms])
        record = ProgressRecord.read(follower.progress)
        view["status"] = _status(record, view["status"])
        title = f"{arms[0].files.steps[-1]['step'] + 1 if arms[0].files.steps else 0}/{follower.config.train.steps}"
        now = self._now(
            view["status"],
            record=record,
            title=f"{title} · {view['name'].striptags()}",
            problems=problems,
        )
        return {_NOW: now, **rendered(self._env, view)}

    def _suite(self) -> dict[str, str] | None:
        stamps = _stamps(self.folder)
        if stamps == self._stamps and self.version:
            return None
        self._stamps = stamps
        suite = summarise_suite(self.folder)
        state = f"{len(suite.missing)} runs not finished" if suite.missing else "all runs finished"
        return {_NOW: self._now(state), "suite": rendered_suite(self._env, suite)}

    def _now(
        self, state: str, *, record: ProgressRecord | None = None, title: str | None = None, problems: Any = ()
    ) -> str:
        module: Any = self._env.get_template("sections.html.j2").module
        running = record is not None and record.state == "running"
        values = {
            "title": title or self.folder.resolve().name,
            "state": state,
            "phase": passage(record.phase, 200) if record is not None and running else "",
            "since": time.strftime("%H:%M:%S", time.localtime(record.since))
            if record is not None and running
            else None,
            "done": record.done if record is not None and running else 0,
            "total": record.total if record is not None and running else 0,
            "unit": passage(record.unit, 40) if record is not None else "",
            "problems": [passage(printable(p), 400) for p in problems],
        }
        return str(module.now(values))


def _without_transcripts(arm: ArmData) -> ArmData:
    return ArmData(arm.key, arm.label, arm.files, arm.rewards, ends_of(()), arm.parts)


def _status(record: ProgressRecord | None, otherwise: str) -> str:
    """How the run is: by progress.json, else (under slime, or of an older version) by its rows."""
    if record is None:
        return otherwise
    return {"running": "running", "done": otherwise, "stopped": "stopped", "failed": "ended by an error"}[record.state]


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """(size, time) of what a suite's page is made of."""
    stamps = {}
    for pattern in (MAPPING, "*/config.yaml", "*/metrics.jsonl", "*/eval.jsonl"):
        for path in folder.glob(pattern):
            try:
                state = os.stat(path)
            except OSError:
                continue
            stamps[str(path)] = (state.st_size, state.st_mtime_ns)
    return stamps

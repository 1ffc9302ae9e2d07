#!/usr/bin/env python3
"""Runs the jobs of a plan on a machine's cards, as many side by side as have room, in the plan's order.

    card_queue.py PLAN.toml --cards 4 --out DIR [--only NAME ...] [--for SECONDS] [key=value ...]

A plan is TOML: `[values]` has what its commands, and other values, name in braces, and `key=value` overrides them; each
`[[job]]` has

    name       also of its log, DIR/NAME.log
    cards      how many it needs, 0 for work of the processor alone; they are its CUDA_VISIBLE_DEVICES
    limit      seconds until it is ended
    after      names of jobs that must have ended well before it starts (default: none)
    flags      a value of this job alone, {flags} (default: none)
    command    of bash; {card0}, {card1}, ... are its cards, {job} its name, {out} is DIR, {repo} this checkout

DIR/timeline.txt says what began and ended, and when. A job that ended well is not run again when the same command is given
again: DIR/NAME.done is its mark. DRY_RUN=1 prints the commands, with cards 0, 1, ... for each. Ends with 1 if a job failed.
A job is a process group, and ends with this program. This file knows nothing of what the jobs do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

REPO = Path(__file__).resolve().parents[2]
GRACE_S = 60.0
"""Seconds that a job has to end itself, once it is told to."""

DEEP = 4
"""A value may name values, which may name values, so often."""
_NAMED = re.compile(r"\{(\w+)\}")


class PlanError(ValueError):
    """A plan, or a value of it, that cannot be run."""


class Job(BaseModel):
    """One command of a plan.

    >>> Job(name="tp2", cards=2, limit=300, command="train --side-gpu {card1} {work}").text({"work": "/w"}, [4, 6])
    'train --side-gpu 6 /w'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern="^[^/=]+$")]
    cards: Annotated[int, Field(ge=0)]
    limit: Annotated[float, Field(gt=0)]
    command: str
    after: list[str] = []
    flags: str = ""

    def text(self, values: Mapping[str, object], cards: Sequence[int]) -> str:
        """The command. Raises PlanError for a name in braces that has no value."""
        given = {**values, "job": self.name, "flags": self.flags, **{f"card{i}": card for i, card in enumerate(cards)}}
        text = self.command
        for _ in range(DEEP):
            names = set(_NAMED.findall(text))
            if unknown := names - given.keys():
                raise PlanError(
                    f"job {self.name}: {{{sorted(unknown)[0]}}} in its command: expected one of {', '.join(sorted(given))}; "
                    "add it to [values], or correct it"
                )
            text = _NAMED.sub(lambda found: str(given[found[1]]), text)
        if found := _NAMED.search(text):
            raise PlanError(f"job {self.name}: {found[0]} names itself, or more than {DEEP} values deep; shorten it")
        return text


@dataclass(frozen=True)
class Plan:
    """The jobs of a file, and the values that their commands name."""

    jobs: tuple[Job, ...]
    values: dict[str, object] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Raises PlanError for a file that is no plan."""
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
            jobs = tuple(Job(**entry) for entry in tree.pop("job"))
            plan = cls(jobs, dict(tree.pop("values", {})))
        except ValidationError as error:
            first = error.errors()[0]
            what = ".".join(map(str, first["loc"]))
            raise PlanError(f"{path}: a job's {what} {first['input']!r}: {first['msg']}; correct it") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, TypeError, KeyError) as error:
            raise PlanError(
                f"{path}: {error}: expected [values] and [[job]], as the head of card_queue.py says"
            ) from None
        if tree:
            raise PlanError(f"{path}: {', '.join(tree)}: expected [values] and [[job]] alone; correct it")
        names = [job.name for job in jobs]
        for i, job in enumerate(jobs):
            if job.name in names[:i]:
                raise PlanError(f"{path}: job {job.name!r}: expected a name of its own; rename it")
            if unknown := set(job.after) - set(names[:i]):  # nor can a job wait for a later one, or itself
                raise PlanError(f"{path}: job {job.name}: after {', '.join(unknown)}: expected jobs before it; mend it")
        return plan


class Queue:
    """Runs a plan's jobs. `free`: cards that nothing runs on; `ended`: exit codes by name, 124 for one at its limit."""

    def __init__(self, plan: Plan, cards: Sequence[int], out: Path, values: Mapping[str, object]) -> None:
        self.plan, self.out, self.values = plan, out, {"out": out, "repo": REPO, **plan.values, **values}
        self.free = list(cards)
        self.ended: dict[str, int] = {}
        self._running: dict[str, tuple[Job, subprocess.Popen[bytes], float, list[int]]] = {}
        if (most := max((job.cards for job in plan.jobs), default=0)) and most > len(self.free):
            raise PlanError(f"--cards: {len(self.free)}: expected at least {most}; leave such jobs out (--only)")
        for job in plan.jobs:  # before anything starts
            job.text(self.values, self.free)

    def run(self, seconds: float) -> dict[str, int]:
        """Until all jobs have ended, or `seconds` from now; then those at work are ended."""
        end = time.monotonic() + seconds
        waiting = []
        for job in self.plan.jobs:
            if self._mark(job).exists():
                self._say(job, "done before")
                self.ended[job.name] = 0
            else:
                waiting.append(job)
        with self._nothing_left():
            while (waiting or self._running) and time.monotonic() < end:
                for job in list(waiting):
                    if any(self.ended.get(name) for name in job.after):
                        self._say(job, "left out: a job before it failed")
                        self.ended[job.name] = 1
                    elif job.cards > len(self.free) or any(name not in self.ended for name in job.after):
                        continue
                    else:
                        self._start(job)
                    waiting.remove(job)
                time.sleep(0.2)
                self._reap()
        for job in waiting:
            self._say(job, "not begun: out of time")
            self.ended[job.name] = 124
        return self.ended

    def _mark(self, job: Job) -> Path:
        return self.out / f"{job.name}.done"

    def _start(self, job: Job) -> None:
        cards = [self.free.pop(0) for _ in range(job.cards)]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))}
        with (self.out / f"{job.name}.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", job.text(self.values, cards)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **visible}, start_new_session=True,
            )  # fmt: skip
        self._running[job.name] = (job, process, time.monotonic(), cards)
        self._say(job, f"begins on {visible['CUDA_VISIBLE_DEVICES'] or 'no card'}")

    def _reap(self) -> None:
        for job, process, began, _ in list(self._running.values()):
            if process.poll() is not None:
                self._end(job, process.returncode)
            elif time.monotonic() - began > job.limit:
                _end_group(process)
                self._end(job, 124)

    def _end(self, job: Job, code: int) -> None:
        _, _, began, cards = self._running.pop(job.name)
        self.free = sorted([*self.free, *cards])
        self.ended[job.name] = code
        self._say(job, f"ends with {code} after {time.monotonic() - began:.0f} s")
        if code == 0:
            self._mark(job).touch()

    @contextlib.contextmanager
    def _nothing_left(self) -> Iterator[None]:
        try:
            yield
        finally:
            for job, process, _, _ in list(self._running.values()):
                _end_group(process)
                self._end(job, 124)

    def _say(self, job: Job, what: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {job.name} {what}"
        print(line, flush=True)
        with (self.out / "timeline.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a job and all that it started in its group: asked first, then killed."""
    for how, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--cards", type=int, default=1, help="cards of this machine")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of jobs; what they come after counts as done")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="seconds until all is ended")
    parser.add_argument("values", nargs="*", metavar="key=value")
    a = parser.parse_intermixed_args(argv)
    out = a.out.resolve()
    try:
        plan = Plan.read(a.plan)
        if a.only:
            # What stands behind --only, as the head of this file has it, are names and then values.
            a.values += [text for text in a.only if "=" in text]
            a.only = [text for text in a.only if "=" not in text]
            if unknown := set(a.only) - {job.name for job in plan.jobs}:
                raise PlanError(f"--only: {', '.join(sorted(unknown))}: expected names of {a.plan}'s jobs; correct it")
            kept = (job for job in plan.jobs if job.name in a.only)
            asked = [job.model_copy(update={"after": [n for n in job.after if n in a.only]}) for job in kept]
            plan = Plan(tuple(asked), plan.values)
        values = dict(_pair(text) for text in a.values)
        if unknown := values.keys() - plan.values.keys():
            raise PlanError(f"{', '.join(sorted(unknown))}: expected names of {a.plan}'s [values]; correct it")
        queue = Queue(plan, range(a.cards), out, values)
    except PlanError as error:
        print(f"card_queue: {error}", file=sys.stderr)
        return 2
    if os.environ.get("DRY_RUN") == "1":
        for job in plan.jobs:
            print(
                f"# {job.name}: cards {job.cards}, at most {job.limit:.0f} s",
                job.text(queue.values, range(a.cards)),
                sep="\n",
            )
        return 0
    out.mkdir(parents=True, exist_ok=True)
    return int(any(queue.run(a.seconds).values()))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise PlanError(f"{text}: expected key=value; correct it")
    return key, value


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs end with it
    sys.exit(main())

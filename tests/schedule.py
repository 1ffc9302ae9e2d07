"""Which tests run, and in which test process: whole files, the longest first, so that both end at the same time.

`--quick` leaves what computes without a model, a process, a browser or a real vocabulary (scripts/test.sh --quick).

`durations.json` beside this file says how long each takes, in CPU seconds of the test process and its children; write it anew,
from a run of the whole suite, with `--write-durations`. A file that it does not know counts as a short one.
"""

from __future__ import annotations

import json
import resource
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SHARING = ("tests/conformance/", "tests/diagnostics/")
"""Folders whose files share servers or banks in session fixtures, which each process would make anew: one process takes all."""
TABLE = Path(__file__).with_name("durations.json")
UNKNOWN_S = 1.0
QUICK = ("config", "tokens", "rollout", "distill", "objective", "tasks", "report")
"""Folders of rooms that compute without a model; and of their tests not these:"""
SLOW_FILES = ("test_vocabularies.py", "test_parallel.py", "test_logprobs_triton.py", "test_trl.py")
SLOW_FIXTURES = {"browser", "trio"}


def unit(nodeid: str) -> str:
    """The file of a test, or its folder where the files of the folder share what is slow to make."""
    file = nodeid.split("::", 1)[0]
    return next((folder for folder in SHARING if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, units instead of files, longest first."""
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "loadfile":
        return None
    seconds: dict[str, float] = json.loads(TABLE.read_text(encoding="utf-8"))

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(max(self.workqueue, key=lambda u: seconds.get(u, UNKNOWN_S)), last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-durations",
        action="store_true",
        help=f"write {TABLE.name} and show the tests that cost most CPU seconds",
    )
    parser.addoption(
        "--quick", action="store_true", help="only tests that need no model, process, browser or real vocabulary"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    here = Path(__file__).parent
    if not config.getoption("--quick") or here not in collection_path.parents:
        return None
    other = collection_path.parent == here and collection_path.is_dir() and collection_path.name not in QUICK
    return other or collection_path.name in SLOW_FILES or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        slow = [item for item in items if SLOW_FIXTURES & set(getattr(item, "fixturenames", ()))]
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """What there is to see where a test process was killed, at once: a machine without memory may not come to the summary."""
    if error:
        free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        largest = subprocess.run(
            ["ps", "-eo", "rss,etimes,args", "--sort=-rss"], capture_output=True, text=True, check=False
        )
        shown = [line[:160] for line in largest.stdout.splitlines()[:6]]
        print(f"\n{node.gateway.id}: {error}; {free}", *shown, sep="\n", flush=True)


def _spent() -> float:
    """CPU seconds of this process so far, and of its children that were waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


_until = 0.0
_seconds: Counter[str] = Counter()


def pytest_runtestloop() -> None:
    global _until
    _until = _spent()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What a test took since the one before it, whose fixtures may have ended in between."""
    global _until
    before, _until = _until, _spent()
    item.user_properties.append(("cpu_s", _until - before))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _seconds[report.nodeid] += dict(report.user_properties).get("cpu_s", 0.0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--write-durations"):
        return
    units: Counter[str] = Counter()
    for nodeid, seconds in _seconds.items():
        units[unit(nodeid)] += seconds
    known = {**json.loads(TABLE.read_text(encoding="utf-8")), **units}  # what did not run now keeps its number
    ordered = sorted(((round(seconds, 1), name) for name, seconds in known.items()), reverse=True)
    table = {name: seconds for seconds, name in ordered if seconds >= UNKNOWN_S}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    terminalreporter.section("CPU seconds")
    for nodeid, seconds in _seconds.most_common(20):
        terminalreporter.line(f"{seconds:8.1f}  {nodeid}")
    terminalreporter.line(f"{sum(_seconds.values()):8.1f}  all")

"""The scripts of scripts/experiments as modules, with trainings in the test's own process."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slime_tandem.cli import main
from slime_tandem.models import builtin

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """A script by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPO / "scripts" / "experiments")
        yield importlib.import_module


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, forked_servers: None, script: Callable[[str], ModuleType]) -> None:
    """`slime-tandem train` of a script is a call, and models are made one after the other, without processes."""

    def call(command: list[str], **how: Any) -> Any:
        assert command[1:4] == ["-m", "slime_tandem.cli", "train"]
        return subprocess.CompletedProcess(command, main(command[3:]))

    def make(cache: str | os.PathLike[str], log: Any, recipe: builtin.Recipe) -> Path:
        folder = Path(cache) / recipe.key
        if not (folder / "recipe.json").exists():
            for role in builtin.ROLES:
                builtin.make_model(role, recipe, folder, log)
            records = {r: (folder / r / "measured.json").read_text() for r in builtin.ROLES}
            models = ",".join(f'"{role}": {record}' for role, record in records.items())
            (folder / "recipe.json").write_text(f'{{"models": {{{models}}}, "recipe": {{}}}}')
        return folder

    for name in ("questions", "two_notations", "real_models"):
        module = script(name)
        monkeypatch.setattr(module, "pretrain", make, raising=name != "real_models")
        monkeypatch.setattr(module, "subprocess", _Calls(call))
    # A training handles signals, which the main thread alone may.
    monkeypatch.setattr(script("questions"), "ThreadPoolExecutor", _AtOnce)


@dataclasses.dataclass(frozen=True)
class _Calls:
    """In the place of the module `subprocess`."""

    run: Callable[..., Any]


class _AtOnce(Executor):
    """In the place of a pool of threads: what is submitted is done before `submit` returns."""

    def __init__(self, jobs: int) -> None:
        assert jobs >= 1

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done

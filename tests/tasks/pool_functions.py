"""What test_pool has its workers make."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from slime_tandem.errors import ConfigError, DataError


def function(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def refuses() -> None:
    raise ConfigError("tasks.0", 3, "another", "choose one")


def raiser() -> Callable[[], None]:
    def fail() -> None:
        raise DataError("a", object(), "b", "c")

    return fail


def loaded() -> Callable[[], list[str]]:
    import slime_tandem.tasks.families
    import slime_tandem.tasks.formulas

    slime_tandem.tasks.formulas.prepare()
    slime_tandem.tasks.families._reasoning_gym()
    return lambda: sorted({name.split(".")[0] for name in sys.modules})


def endless() -> Callable[[], None]:
    def compute() -> None:
        while True:
            pass

    return compute

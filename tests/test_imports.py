"""Rooms import downwards only, in one total order; pure rooms do no I/O; what is light stays light.

`ROOMS` is the order of docs/structure.md, lowest first: a room imports itself and rooms that stand before it, never one behind.
No two rooms share a place, so that there can be no loop. Imports in functions and under TYPE_CHECKING count like all others.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slime_tandem

from .waiting import PATIENCE_S

ROOT = Path(slime_tandem.__file__).parent

ROOMS = (
    "errors", "types", "files", "signals", "extensions", "strategies", "config", "protocol", "turns",  # words
    "tokens", "rollout", "distill", "objective", "tasks", "report",  # what is computed, and what is read of it
    "models", "engines", "live", "megatron", "training", "team",  # models at work
    "local", "evaluation", "doctor", "diagnostics", "slime_hooks",  # what is done with them
    "slime_launch", "api", "cli",
)  # fmt: skip

ALLOWED = {
    "types": {"errors"},
    "files": {"errors"},
    "signals": {"errors"},
    "extensions": {"errors"},
    "strategies": {"errors", "extensions"},
    "config": {"errors", "files", "extensions", "strategies"},
    "protocol": {"types"},
    "turns": set(),
    "tokens": set(),
    "rollout": {"tokens", "protocol"},
    "distill": {"turns", "tokens", "protocol"},
    "objective": set(),
    "tasks": set(),
    "report": set(),
    "models": {"turns", "tokens", "tasks", "protocol"},
    "engines": {"protocol", "tokens", "rollout", "models", "objective"},
    "live": {"report", "engines"},
    "megatron": {"models", "objective"},
    "training": {"objective", "distill", "megatron", "tasks", "report"},
    "team": {"tokens", "rollout", "distill", "engines", "models", "tasks", "training", "protocol", "report", "objective"},
    "local": {"team", "training", "report", "megatron", "tasks", "rollout", "distill", "objective", "models", "engines"},
    "evaluation": {"team", "training", "report", "tasks", "models", "rollout", "distill", "objective", "tokens", "protocol"},
    "doctor": {
        "team", "training", "report", "tasks", "models", "rollout", "distill", "objective", "tokens", "protocol", "megatron",
    },
    "diagnostics": {"team", "rollout", "distill", "models", "report", "tasks", "tokens"},
    "slime_hooks": {
        "team", "training", "tasks", "objective", "rollout", "distill", "engines", "protocol", "models", "tokens",
    },
    "slime_launch": {"slime_hooks", "megatron", "models", "tasks", "report", "team", "engines", "local"},
    "api": {"rollout", "distill", "report", "models", "team", "local", "evaluation"},
    "cli": set(ROOMS),
}  # fmt: skip
"""Rooms that a room may stand on, beside itself, `errors`, `types`, `files`, `signals` and `config`."""

WORDS = {"errors", "types", "files", "signals", "extensions", "strategies", "config"}

PURE = (
    "errors", "types", "strategies", "protocol", "turns", "tokens", "rollout", "distill", "objective",
)  # fmt: skip
"""No file, socket, process or clock is touched by these rooms..."""
DOORS = {
    "rollout.drive": "waits for engines",
    "tokens.vocabularies": "reads vocabulary files",
    "objective.logprobs": "looks whether triton is installed",
    "distill.teacher": "asks a teacher's engine",
    "distill.panel": "asks a teacher's engine",
    "distill.candidates": "asks engines for lists",
    "distill.scorer": "asks a user's scorer",
    "distill.published": "shuffles with a generator of its own seed",
}
"""... but for these modules, which have nothing but one door each (an engine that is handed to them, a file that is named)."""

IMPURE_MODULES = {
    "asyncio", "aiohttp", "http", "importlib", "multiprocessing", "os", "pathlib", "requests", "shutil", "signal", "socket",
    "subprocess", "tempfile", "time", "urllib", "random", "secrets", "datetime",
}  # fmt: skip
IMPURE_NAMES = {"Thread", "open", "print", "input", "exec", "eval", "__import__"}

HEAVY = ("torch", "transformers", "megatron", "ray", "slime", "sglang", "tensorboard", "aiohttp")
LIGHT = [
    "slime_tandem", "slime_tandem.api", "slime_tandem.types", "slime_tandem.config", "slime_tandem.errors",
    "slime_tandem.protocol",
    "slime_tandem.rollout.boundaries", "slime_tandem.rollout.handoff", "slime_tandem.rollout.writer",
    "slime_tandem.tokens.token_bytes", "slime_tandem.tokens.vocabularies", "slime_tandem.distill.alignment",
    "slime_tandem.distill.panel", "slime_tandem.objective.advantages", "slime_tandem.report.statistics",
    "slime_tandem.report.progress",
    "slime_tandem.evaluation.scoring", "slime_tandem.diagnostics.merge", "slime_tandem.diagnostics.support",
]  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")
MODULES = {module_name(p) for p in FILES}


def room(module: str) -> str:
    name = module.split(".")[0]
    assert name in ROOMS, f"slime_tandem.{module} is in no room: give it one here and in docs/structure.md"
    return name


def imported(source: str) -> set[str]:
    """Dotted names below `slime_tandem.` that a source imports, at any depth of it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            base = node.module or ""
            for alias in node.names:
                dotted = f"{base}.{alias.name}"
                names.add(dotted if dotted.removeprefix("slime_tandem.") in MODULES else base)
    return {name.removeprefix("slime_tandem.") for name in names if name.startswith("slime_tandem.")}


def strangers(own: str, source: str) -> list[str]:
    """Imports of a module of the room `own` that its row of the table does not have."""
    allowed = ALLOWED.get(own, set()) | WORDS | {own}
    return sorted(name for name in imported(source) if room(name) not in allowed)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_room_stands_on_its_own_row(path: Path) -> None:
    own = room(module_name(path))
    assert not strangers(own, path.read_text(encoding="utf-8"))


def test_every_row_points_down() -> None:
    place = {name: i for i, name in enumerate(ROOMS)}
    assert {name for name in ALLOWED if not all(place[below] <= place[name] for below in ALLOWED[name])} == set()
    assert all(place[word] < place[name] for word in WORDS for name in ROOMS if name not in WORDS)


def test_words_import_each_other_in_their_order() -> None:
    place = {name: i for i, name in enumerate(ROOMS)}
    for path in FILES:
        own = room(module_name(path))
        if own in WORDS:
            above = {n for n in imported(path.read_text(encoding="utf-8")) if place[room(n)] > place[own]}
            assert not above, f"{module_name(path)} imports {above}"


def test_no_room_is_without_a_place() -> None:
    assert {room(name) for name in MODULES} == set(ROOMS)


def test_a_turned_import_is_found() -> None:
    for own, line in (
        ("rollout", "from slime_tandem.engines.client import EngineClient"),
        ("engines", "def f():\n    from slime_tandem.team import team"),
        ("team", "if TYPE_CHECKING:\n    import slime_tandem.local.run"),
        ("evaluation", "from slime_tandem.doctor.probes import attempt"),
        ("report", "from slime_tandem.evaluation import figures"),
    ):
        assert strangers(own, line), line
    assert not strangers("team", "from slime_tandem.engines.client import EngineClient")


def test_modules_of_a_room_import_each_other_without_a_loop() -> None:
    edges = {module_name(p): imported(p.read_text(encoding="utf-8")) & MODULES for p in FILES}
    edges = {name: {n for n in below if room(n) == room(name) and n != name} for name, below in edges.items()}
    # A package's own face (config/__init__) imports all of it, and its members the face: that is no loop of duties.
    faces = {name for name in MODULES if (ROOT / Path(*name.split(".")) / "__init__.py").exists()}
    edges = {name: below - faces for name, below in edges.items() if name not in faces}
    while leaves := {name for name, below in edges.items() if not below & edges.keys()}:
        edges = {name: below for name, below in edges.items() if name not in leaves}
    assert not edges, f"these import each other: {sorted(edges)}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(module_name(p)) in PURE and module_name(p) not in DOORS], ids=module_name
)
def test_pure_rooms_touch_no_file_socket_process_or_clock(path: Path) -> None:
    used = impurities(path.read_text(encoding="utf-8"))
    assert not used, f"{module_name(path)} uses {sorted(used)}"


def impurities(source: str) -> set[str]:
    """Modules and built-in functions of the world outside that a source uses."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names} & IMPURE_MODULES
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module.split(".")[0]} & IMPURE_MODULES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & IMPURE_NAMES
    return found


def test_an_impurity_is_found() -> None:
    assert impurities("import time\nfrom os import path\nopen('x')") == {"time", "os", "open"}


def test_light_modules_import_nothing_heavy() -> None:
    code = f"import importlib, json, sys\nfor m in {LIGHT!r}: importlib.import_module(m)\nprint(json.dumps(list(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=PATIENCE_S
    ).stdout
    loaded = {name.split(".")[0] for name in json.loads(out)}
    assert "slime_tandem" in loaded
    assert loaded.isdisjoint(HEAVY), loaded & set(HEAVY)


def test_only_the_top_rooms_know_the_local_loop() -> None:
    users = {room(module_name(p)) for p in FILES for n in imported(p.read_text(encoding="utf-8")) if room(n) == "local"}
    assert users <= {"local", "slime_launch", "api", "cli"}


def test_slime_hooks_start_nothing() -> None:
    for path in FILES:
        if room(module_name(path)) == "slime_hooks":
            names = imported(path.read_text(encoding="utf-8"))
            assert not {n for n in names if re.match(r"team\.(team|servers)\b|engines\.(processes|sglang|embedded)", n)}


def test_a_roster_and_a_plan_start_nothing() -> None:
    for path in FILES:
        name = module_name(path)
        names = imported(path.read_text(encoding="utf-8"))
        if name == "team.roster":
            assert not {n for n in names if room(n) == "engines" or n in ("team.team", "team.servers")}
            assert impurities(path.read_text(encoding="utf-8")) <= {"os", "pathlib"}, (
                "a variable is read, folders are named"
            )
        if room(name) == "slime_launch":
            assert not names & {"team.team", "team.servers", "engines.processes"}, name

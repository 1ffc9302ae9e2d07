"""Pure modules stay light, and imports point one way."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import slime_tandem

ROOT = Path(slime_tandem.__file__).parent
HEAVY = ("torch", "transformers", "megatron", "ray", "slime", "sglang", "tensorboard", "aiohttp")
LIGHT = [
    "slime_tandem",
    "slime_tandem.types",
    "slime_tandem.config",
    "slime_tandem.errors",
    "slime_tandem.rollout.boundaries",
    "slime_tandem.rollout.handoff",
    "slime_tandem.rollout.writer",
    "slime_tandem.tokens.token_bytes",
    "slime_tandem.tokens.vocabularies",
    "slime_tandem.distill.alignment",
    "slime_tandem.distill.panel",
    "slime_tandem.protocol",
    "slime_tandem.objective.advantages",
    "slime_tandem.report.statistics",
    "slime_tandem.evaluation.scoring",
    "slime_tandem.diagnostics.merge",
    "slime_tandem.diagnostics.support",
]

# Lower layers never import higher ones: types/config/errors <- pure modules <- engines <- local, report <- cli.
LAYERS = {
    "types": 0, "config": 0, "errors": 0, "signals": 0, "files": 0, "engines.protocol": 0,
    "rollout": 1, "distill": 1, "objective": 1, "evaluation.statistics": 1, "evaluation.scoring": 1,
    "engines": 2, "slime_hooks": 3, "slime_launch": 3, "local": 3, "report": 3, "evaluation": 3, "diagnostics": 3, "doctor": 3,
    "cli": 4, "__main__": 5,
}  # fmt: skip


def layer(module: str) -> int:
    """Layer of a dotted name below `slime_tandem.`, by its longest known prefix."""
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        if (name := ".".join(parts[:n])) in LAYERS:
            return LAYERS[name]
    raise AssertionError(f"slime_tandem.{module} has no layer: give it one here")


def imported(path: Path) -> set[str]:
    """Dotted names below `slime_tandem.` that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            base = node.module or ""
            names |= {f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names}
    return {name.removeprefix("slime_tandem.") for name in names if name.startswith("slime_tandem.")}


def is_module(dotted: str) -> bool:
    path = ROOT.parent / Path(*dotted.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def test_light_modules_import_nothing_heavy() -> None:
    code = f"import importlib, json, sys\nfor m in {LIGHT!r}: importlib.import_module(m)\nprint(json.dumps(list(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout
    loaded = {name.split(".")[0] for name in json.loads(out)}
    assert "slime_tandem" in loaded
    assert loaded.isdisjoint(HEAVY), loaded & set(HEAVY)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    own = layer(module_name(path))
    above = {name for name in imported(path) if layer(name) > own}
    assert not above, f"{module_name(path)} (layer {own}) imports {sorted(above)}"


def test_the_check_sees_what_it_should() -> None:
    assert imported(ROOT / "rollout" / "tandem.py") >= {"config", "engines.protocol", "rollout.handoff", "types"}
    assert [layer(m) for m in ("engines.protocol", "engines.client", "rollout.tandem", "cli")] == [0, 2, 1, 4]
    assert {module_name(p).split(".")[0] for p in FILES} >= {"types", "rollout", "distill", "objective", "engines"}

"""Whether the job's SGLang has a model's architecture: a registry that stands in, and the real one where it is at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slime_tandem.config import RunConfig
from slime_tandem.errors import ModelError
from slime_tandem.slime_launch import real_parser
from slime_tandem.slime_launch.servable import KnownModels, check_architectures, of_this_python

from .test_served import CLASSES, folder_of

ROOT = Path(__file__).parents[2]
KNOWN = KnownModels(
    "9.9",
    {"Gemma3ForCausalLM", "MistralForCausalLM"},
    broken={"GptOssForCausalLM": "no kernel"}.get,
    by_transformers=lambda name: name == "SmolLM3ForCausalLM",
)


def job(tmp_path: Path, junior: str, *classes: str, **more: Any) -> RunConfig:
    """A student of a published size; the junior of a kind, the teacher of the named classes."""
    teacher = folder_of(tmp_path / "teacher", "mistral", architectures=[*classes], **more)
    models = {"senior": "qwen3-4B", "junior": str(folder_of(tmp_path / "junior", junior)), "teacher": str(teacher)}
    return RunConfig.from_mapping({"models": models, "tasks": [{"family": "chain_sum"}]})


def test_what_the_registry_has_is_taken_in_silence(tmp_path: Path) -> None:
    assert check_architectures(job(tmp_path, "gemma3_text", "MistralForCausalLM"), lambda: KNOWN) == []
    assert check_architectures(job(tmp_path, "mistral", "New", "MistralForCausalLM"), lambda: KNOWN) == []


def test_nobody_is_asked_about_the_architectures_that_are_trained_here(tmp_path: Path) -> None:
    def never() -> KnownModels:
        raise AssertionError

    assert check_architectures(job(tmp_path, "qwen3_moe", "LlamaForCausalLM"), never) == []


def test_an_architecture_that_sglang_has_not_is_refused_by_role_name_and_version(tmp_path: Path) -> None:
    message = r"teacher/config.json architectures=\['NewForCausalLM'\]: expected .*SGLang 9\.9.*\(engine\.teacher_url\)"
    with pytest.raises(ModelError, match=message):
        check_architectures(job(tmp_path, "mistral", "NewForCausalLM"), lambda: KNOWN)
    with pytest.raises(ModelError, match=r"junior/config.json .*Qwen3_5ForCausalLM.*\(engine\.junior_url\)"):
        check_architectures(job(tmp_path, "qwen3_5_text", "MistralForCausalLM"), lambda: KNOWN)
    served = job(tmp_path, "mistral", "NewForCausalLM").model_dump()
    served["engine"]["teacher_url"] = "http://10.0.0.1:30000"
    assert check_architectures(RunConfig.from_mapping(served), lambda: KNOWN) == [], "a server of the user's own"


def test_one_of_several_teachers_is_named(tmp_path: Path) -> None:
    tree = job(tmp_path, "mistral", "NewForCausalLM").model_dump()
    tree["opd"]["teachers"] = [{"name": "wise", "model": tree["models"].pop("teacher"), "tasks": ["chain_sum"]}]
    with pytest.raises(ModelError, match=r"to the wise, .*the url of wise in opd\.teachers"):
        check_architectures(RunConfig.from_mapping(tree), lambda: KNOWN)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("SmolLM3ForCausalLM", {}, "teacher: SGLang 9.9 has no class SmolLM3ForCausalLM and serves transformers'"),
        ("GptOssForCausalLM", {}, "teacher: SGLang 9.9 has GptOssForCausalLM, but this Python cannot import it (no kernel)"),
        ("OwnForCausalLM", {"auto_map": {"AutoModel": "own.Own"}}, "the model's own code (auto_map) is not tried"),
    ],
)  # fmt: skip
def test_what_may_be_served_is_a_note(name: str, more: dict[str, Any], said: str, tmp_path: Path) -> None:
    (note,) = check_architectures(job(tmp_path, "mistral", name, **more), lambda: KNOWN)
    assert said in note


def test_without_sglang_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    (note,) = check_architectures(job(tmp_path, "gemma3_text", "LlamaForCausalLM"))
    assert note.startswith(
        "SGLang cannot be asked here whether it serves Gemma3ForCausalLM (junior): No module named 'sglang"
    )


def test_a_registry_in_sglangs_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What of SGLang is used: `ModelRegistry.get_supported_archs`, and the files of `sglang.srt.models`."""
    for name in ("sglang", "sglang.version", "sglang.srt", "sglang.srt.models", "sglang.srt.models.registry"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    (tmp_path / "here.py").write_text("class GptOssForCausalLM:\n    pass\n")
    (tmp_path / "half.py").write_text("import a_kernel_without_a_wheel\nclass HalfForCausalLM(Model):\n    pass\n")
    vars(sys.modules["sglang.srt.models"])["__path__"] = [str(tmp_path)]
    registry = type("Registry", (), {"get_supported_archs": lambda self: {"MistralForCausalLM": object}.keys()})()
    vars(sys.modules["sglang.srt.models.registry"])["ModelRegistry"] = registry
    vars(sys.modules["sglang.version"])["__version__"] = "1.2.3"
    found = of_this_python()
    assert (found.version, set(found.native)) == ("1.2.3", {"MistralForCausalLM"})
    assert found.broken("HalfForCausalLM") == "No module named 'a_kernel_without_a_wheel'"
    assert [found.broken(name) for name in ("GptOssForCausalLM", "Half", "NobodysForCausalLM")] == [None] * 3
    assert [found.by_transformers(name) for name in ("SmolLM3ForCausalLM", "NobodysForCausalLM")] == [True, False]


def test_the_real_registry(tmp_path: Path) -> None:
    python = os.environ.get("SLIME_TANDEM_SGLANG_PYTHON")
    if not python:
        pytest.skip("SLIME_TANDEM_SGLANG_PYTHON is not set (scripts/sglang_cpu.sh)")
    code = (
        "import json, sys\nfrom slime_tandem.slime_launch.servable import of_this_python\nknown = of_this_python()\n"
        "names = json.load(sys.stdin)\nprint(json.dumps([known.version, [n in known.native for n in names], "
        "[known.broken(n) for n in names], [known.by_transformers(n) for n in names]]))"
    )
    names = [*CLASSES.values(), "NobodysForCausalLM", "SmolLM3ForCausalLM"]
    done = subprocess.run(
        [python, "-W", "ignore", "-c", code], input=json.dumps(names), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Ignore import error" not in done.stderr
    version, native, broken, by_transformers = json.loads(done.stdout.splitlines()[-1])
    had = {name for name, has, why in zip(names, native, broken, strict=True) if has or why}
    assert version.startswith("0.5."), version
    assert had == set(CLASSES.values()) - {"Qwen3_5ForCausalLM"}, "the text model alone has no class"
    assert by_transformers[-2:] == [False, True]


def test_it_is_a_part_of_what_is_asked_before_a_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_parser, "parse", lambda _: (None, []))
    monkeypatch.setattr(real_parser, "ask_hooks", lambda _: ["of a model"])
    assert (real_parser.main([]), capsys.readouterr().out) == (0, "note: of a model\n")

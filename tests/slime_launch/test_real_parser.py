"""What slime's parser does not know, and what our hooks would refuse, before anything starts; slime is a stand-in here."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from slime_tandem.slime_launch import real_parser


def _slime(parser: ArgumentParser) -> None:
    parser.add_argument("--custom-config-path")
    parser.add_argument("--advantage-estimator", default="grpo")
    parser.add_argument("--loss-type", default="policy_loss")
    parser.add_argument("--rollout-temperature", type=float, default=1.0)
    parser.add_argument("--eps-clip", type=float, default=0.2)
    parser.add_argument("--eps-clip-high", type=float)
    parser.add_argument("--custom-generate-function-path")


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, dict[str, Any]] = {
        "slime.utils.arguments": {"get_slime_extra_args_provider": lambda: _slime},
        "slime.backends.sglang_utils.arguments": {
            "add_sglang_arguments": lambda parser: parser.add_argument("--sglang-config")
        },
        "megatron.training.arguments": {"add_megatron_arguments": lambda parser: parser.add_argument("--num-layers")},
    }
    for name, content in made.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def row_one(tmp_path: Path) -> list[str]:
    """docs/slime.md, the first row of the table: generate alone, slime's own loss."""
    (tmp_path / "tandem.yaml").write_text(
        yaml.safe_dump({"slime_tandem": {"opd": {"enabled": False}, "engine": {"junior_url": "http://10.0.0.1:30000"}}})
    )
    return [
        "--custom-generate-function-path", "slime_tandem.slime_hooks.hooks.generate",
        "--custom-config-path", str(tmp_path / "tandem.yaml"),
    ]  # fmt: skip


def test_every_parser_is_asked(row_one: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servers = tmp_path / "sglang.yaml"
    servers.write_text("sglang: []")
    assert real_parser.main([*row_one, "--num-layers", "2", "--sglang-config", str(servers), "--debug-train-only"]) == 0
    assert real_parser.main([*row_one, "--rollout-temprature", "1"]) == 2
    assert capsys.readouterr().err == "slime knows nothing of: --rollout-temprature 1\n"


def test_what_the_hooks_would_refuse_is_said_before_they_are_called(
    row_one: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert real_parser.main([*row_one, "--advantage-estimator", "ppo"]) == 2
    assert "refuse --use-critic=True" in capsys.readouterr().err
    (tmp_path / "tandem.yaml").write_text("slime_tandem: {}")
    assert real_parser.main(row_one) == 2
    assert "set slime_tandem.opd.enabled=false" in capsys.readouterr().err
    (tmp_path / "tandem.yaml").write_text("slime_tandem: {tandem: {prob_senior: 2}}")
    assert real_parser.main(row_one) == 2
    assert "prob_senior=2" in capsys.readouterr().err
    assert real_parser.main(row_one[:2]) == 0, "no file, so nothing of ours"
    (tmp_path / "tandem.yaml").write_text("of_somebody_else: 1")
    assert real_parser.main(row_one) == 0


def test_without_slime_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "slime.utils.arguments", None)
    assert real_parser.main([]) == 3
    assert "cannot be imported" in capsys.readouterr().err

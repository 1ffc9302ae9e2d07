"""Our hooks against slime's and Megatron's own code, in their own Python; skipped, saying why, where these are absent."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATHS = {
    "CUSTOM_GENERATE_FUNCTION_PATH": "hooks.generate",
    "CUSTOM_ROLLOUT_LOG_FUNCTION_PATH": "hooks.log_rollout",
    "CUSTOM_EVAL_ROLLOUT_LOG_FUNCTION_PATH": "hooks.log_eval",
    "CUSTOM_REWARD_POST_PROCESS_PATH": "hooks.reward_post_process",
    "ROLLOUT_DATA_POSTPROCESS_PATH": "hooks.data_post_process",
    "CUSTOM_RM_PATH": "hooks.reward",
    "DATA_SOURCE_PATH": "data_source.MessagesDataSource",
}


def test_slimes_own_contract_tests_pass_with_every_path_of_ours(slime_here, run_there: Callable[..., str]) -> None:  # type: ignore[no-untyped-def]
    variables = {f"SLIME_CONTRACT_{name}": f"slime_tandem.slime_hooks.{path}" for name, path in PATHS.items()}
    told = (slime_here.slime / "tests" / "plugin_contracts" / "test_plugin_runtime_hook_contracts.py").read_text()
    assert all(f'"{name}"' in told or name.startswith(("CUSTOM_GENERATE", "CUSTOM_RM", "DATA_")) for name in PATHS)
    out = run_there(
        "-p", "contract_plugin", "-W", "ignore", "tests/plugin_contracts", cwd=slime_here.slime,
        **variables, PYTHONPATH=f"{HERE}:{slime_here.environment()['PYTHONPATH']}",
    )  # fmt: skip
    assert int(re.findall(r"(\d+) passed", out)[0]) >= 36
    assert "failed" not in out


@pytest.mark.parametrize("part", ["seats", "loss", "spec", "sources"])
def test_slimes_own_functions(part: str, run_there: Callable[..., str]) -> None:
    out = run_there("-W", "ignore", "--import-mode=importlib", "-k", part, str(HERE / "real_slime.py"), cwd=HERE)
    assert re.search(r"\d+ passed", out), out
    assert "skipped" not in out

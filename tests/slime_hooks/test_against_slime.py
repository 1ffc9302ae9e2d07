"""Our hooks against slime's and Megatron's own code, in their own Python; skipped, saying why, where these are absent."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..waiting import PATIENCE_S

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
    contracts = (slime_here.slime / "tests" / "plugin_contracts" / "test_plugin_runtime_hook_contracts.py").read_text()
    assert all(f'"{name}"' in contracts or name.startswith(("CUSTOM_GENERATE", "CUSTOM_RM", "DATA_")) for name in PATHS)
    out = run_there(
        "-p", "contract_plugin", "-W", "ignore", "tests/plugin_contracts", cwd=slime_here.slime,
        **variables, PYTHONPATH=f"{HERE}:{slime_here.environment()['PYTHONPATH']}",
    )  # fmt: skip
    assert int(re.findall(r"(\d+) passed", out)[0]) >= 36
    assert "failed" not in out


@pytest.mark.parametrize("part", ["fields", "loss", "spec", "sources"])
def test_slimes_own_functions(part: str, run_there: Callable[..., str]) -> None:
    plain = ("-o", "addopts=", "-W", "ignore", "--import-mode=importlib")  # this project's own -q would hide the count
    out = run_there(*plain, "-k", part, str(HERE / "real_slime.py"), cwd=HERE)
    assert re.search(r"\d+ passed", out), out
    assert "skipped" not in out


@pytest.mark.parametrize("world", [1, 4])
def test_loss_of_slime_is_the_local_trainers_over_real_ranks(world: int, slime_here, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Every setting of the objective, alone and over data, context and tensor parallel ranks, at 1e-6."""
    environment = {**slime_here.environment(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    script, store = str(HERE / "real_loss.py"), str(tmp_path / "store")
    files = [(tmp_path / f"{rank}.log").open("w+") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [slime_here.python, "-W", "ignore", script, str(rank), str(world), store],
            env=environment, stdout=files[rank], stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        codes = [rank.wait(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    logs = [Path(file.name).read_text() for file in files]
    for file in files:
        file.close()
    assert codes == [0] * world, "\n".join(text[-2500:] for text in logs)
    assert all(text.rstrip().endswith("all cases hold") for text in logs)


def _with_experts(like: Path, folder: Path) -> None:
    """A random mixture of experts with the tokenizer and the vocabulary of another model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    kept = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    known = json.loads((like / "config.json").read_text())
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    }  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{name: known.get(name) for name in kept}, **sizes)).save_pretrained(folder)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_train_py_itself_runs_and_resumes(experts: bool, slime_here, trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """slime's unmodified train.py on the CPU with every hook: two steps, then a third from the checkpoint."""
    if not os.environ.get("SLIME_TANDEM_SLIME_TRAIN"):
        pytest.skip("SLIME_TANDEM_SLIME_TRAIN is not set: the run takes minutes (docs/slime.md, Tests)")
    models, prompts = tmp_path / "models", tmp_path / "prompts.jsonl"
    models.mkdir()
    for role in ("senior", "junior", "teacher"):
        (models / role).symlink_to(getattr(trio, role))
    if experts:
        (models / "senior").unlink()
        _with_experts(trio.senior, models / "senior")
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 1 ="}], "label": str(i + 1)} for i in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scripts = HERE.parents[1] / "scripts" / "slime"

    def there(*command: str) -> str:
        call = [slime_here.python, "-W", "ignore", *command]
        done = subprocess.run(call, env=slime_here.environment(), capture_output=True, text=True, timeout=1500)
        log = tmp_path / "run" / "train.log"
        end = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        assert done.returncode == 0, done.stdout + done.stderr + end
        return done.stdout

    for steps in ("2", "3"):
        there(
            str(scripts / "real_run.py"), "--slime", str(slime_here.slime), "--megatron", str(slime_here.megatron),
            "--models", str(models), "--prompts", str(prompts), "--work", str(tmp_path / "run"), "--cpu", "--embedded",
            "--steps", steps, "--prompts-per-step", "2", "--group", "2", "--max-tokens", "12", "--save-interval", "1",
        )  # fmt: skip
    report = there(str(scripts / "report.py"), str(tmp_path / "run"))
    assert "channels: 3 of 3 rollouts with the same check-sum on both sides" in report
    assert [line.split(" |")[0] for line in report.splitlines()[2:5]] == ["| 0", "| 1", "| 2"]
    if not experts:  # the local runtime's model, whose loss slime's is compared with, is dense
        compared = there(str(scripts / "compare_loss.py"), str(tmp_path / "run"), "0")
        assert "| loss |" in compared


def test_train_py_makes_several_passes_with_a_bonus_and_the_tail_of_the_kl(slime_here, trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A student with experts, two passes over each of two rollouts: four optimizer steps, each with its own quantile."""
    if not os.environ.get("SLIME_TANDEM_SLIME_TRAIN"):
        pytest.skip("SLIME_TANDEM_SLIME_TRAIN is not set: the run takes minutes (docs/slime.md, Tests)")
    models, prompts, work = tmp_path / "models", tmp_path / "prompts.jsonl", tmp_path / "run"
    models.mkdir()
    for role in ("junior", "teacher"):
        (models / role).symlink_to(getattr(trio, role))
    _with_experts(trio.senior, models / "senior")
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 1 ="}], "label": str(i + 1)} for i in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        slime_here.python, "-W", "ignore", str(HERE.parents[1] / "scripts" / "slime" / "real_run.py"),
        "--slime", str(slime_here.slime), "--megatron", str(slime_here.megatron), "--models", str(models),
        "--prompts", str(prompts), "--work", str(work), "--cpu", "--embedded", "--no-save", "--steps", "2",
        "--prompts-per-step", "2", "--group", "2", "--max-tokens", "12",
        "--set", "train.epochs_per_step=2", "objective.entropy_coef=0.01", "objective.kl_coef=0.05",
        "--", "--use-kl-loss", "--kl-loss-coef", "0.05",
    ]  # fmt: skip
    done = subprocess.run(command, env=slime_here.environment(), capture_output=True, text=True, timeout=1500)
    log = (work / "train.log").read_text(errors="replace") if (work / "train.log").exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log[-4000:]
    assert re.findall(r"slime_tandem step (\d): train/kl_p95", log) == ["0", "1", "2", "3"]
    steps = re.findall(r"step (\d): \{'train/loss'.*'train/entropy_bonus': ([0-9.]+).*'train/entropy': ([0-9.]+)", log)
    assert [step for step, _, _ in steps] == ["0", "1", "2", "3"]
    assert all(float(bonus) == pytest.approx(0.01 * float(entropy), rel=1e-3) for _, bonus, entropy in steps)

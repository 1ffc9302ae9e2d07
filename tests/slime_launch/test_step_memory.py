"""Memory of a benchmark's run: who took what of which card, and what the planner thought of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.config import ClusterConfig
from slime_tandem.slime_launch.memory import RESERVED, engine_memory, trainer_memory
from slime_tandem.slime_launch.served import of_architecture
from slime_tandem.slime_launch.sizes import PUBLISHED, hf_sizes

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """(real_run, step_memory): scripts are no package."""
    monkeypatch.syspath_prepend(str(SCRIPTS / "slime"))
    monkeypatch.syspath_prepend(str(SCRIPTS / "benchmarks"))
    return importlib.import_module("real_run"), importlib.import_module("step_memory")


@pytest.fixture
def trio(tmp_path: Path) -> Path:
    for role, name in (("senior", "qwen3-4B"), ("junior", "qwen3-0.6B"), ("teacher", "llama3.2-3B")):
        arch = PUBLISHED[name]
        (tmp_path / role).mkdir()
        config = hf_sizes(arch) | {"intermediate_size": arch.ffn_size, "tie_word_embeddings": arch.tied}
        kind = "Qwen3ForCausalLM" if name.startswith("qwen3") else "LlamaForCausalLM"
        config |= {"architectures": [kind], "rms_norm_eps": arch.norm_eps}
        (tmp_path / role / "config.json").write_text(json.dumps(config))
    return tmp_path


def flags(real_run: Any, models: Path, *more: str) -> Any:
    paths = ["--slime", "/s", "--megatron", "/m", "--prompts", "/p", "--work", "/w", "--models", str(models)]
    return real_run.parser().parse_args([*paths, "--pool-tokens", "65536", *more])


def test_a_run_that_saves_nothing_goes_on_from_what_is_there(
    scripts: tuple[Any, Any], trio: Path, tmp_path: Path
) -> None:
    real_run, _ = scripts
    a = flags(real_run, trio, "--no-save")
    a.work, kept = tmp_path, tmp_path / "checkpoints"
    assert real_run.checkpoint_flags(a) == ()
    kept.mkdir()
    assert real_run.checkpoint_flags(a) == ("--load", kept)
    a.no_save = False
    assert real_run.checkpoint_flags(a) == ("--load", kept, "--save", kept, "--save-interval", 10)


def test_the_estimate_is_the_planners(scripts: tuple[Any, Any], trio: Path) -> None:
    real_run, step_memory = scripts
    found = step_memory.estimates(flags(real_run, trio, "--tp", "2", "--gpus", "2", "--fused", "--no-teacher"), 139.8)
    cluster = ClusterConfig(
        gpu_memory_gib=139.8, tensor_parallel=2, max_tokens_per_gpu=4096, recompute=False, layer_spec="own"
    )
    trainer = trainer_memory(PUBLISHED["qwen3-4B"], cluster, 2).total
    both = [of_architecture(PUBLISHED[name]) for name in ("qwen3-4B", "qwen3-0.6B")]
    senior = engine_memory(both, 1, cluster, 0.3).process(65536)
    assert found == {"trainer": trainer + RESERVED, "trainer, allocated": trainer, "senior's server": senior}


def test_servers_beside_it(scripts: tuple[Any, Any], trio: Path) -> None:
    real_run, step_memory = scripts
    assert set(step_memory.estimates(flags(real_run, trio), 139.8)) == {
        "trainer", "trainer, allocated", "senior's server", "junior's server", "teacher's server",
    }  # fmt: skip
    plain = step_memory.estimates(flags(real_run, trio, "--plain"), 139.8)
    assert set(plain) == {"trainer", "trainer, allocated", "senior's server"}
    again = step_memory.estimates(flags(real_run, trio, "--plain", "--", "--recompute-granularity", "full"), 139.8)
    assert again["trainer"] < plain["trainer"]


def test_each_card_is_kept_apart(
    scripts: tuple[Any, Any], trio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_run, step_memory = scripts
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    ranks = [subprocess.Popen([*sleeper, "ray::MegatronTrainRayActor"]) for _ in range(2)]
    server = subprocess.Popen([*sleeper, "--model-path", "/models/teacher ", "sglang.launch_server"])
    try:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(
            "#!/bin/sh\ncase $* in *query-gpu*) echo 'GPU-a, 0, 90000, 143771'; echo 'GPU-b, 1, 60000, 143771';;\n"
            f"*) echo 'GPU-a, {ranks[0].pid}, 70000'; echo 'GPU-b, {ranks[1].pid}, 50000';"
            f" echo 'GPU-b, {server.pid}, 17000'; echo 'GPU-c, 1, 5';; esac\n"
        )
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        sampler = step_memory.Sampler()
        sampler.stop()
        sampler._memory()
    finally:
        for process in (*ranks, server):
            process.kill()
            process.wait()
    assert sampler.peaks == {(0, "trainer"): 70000, (1, "trainer"): 50000, (1, "teacher's server"): 17000}
    assert (sampler.totals, sampler.sizes) == ({0: 90000, 1: 60000}, {0: 143771, 1: 143771})
    assert sampler.by_name() == {"trainer": 70000, "teacher's server": 17000}
    entries = step_memory.compared(flags(real_run, trio, "--fused"), sampler, 60000 * 2**20)
    assert [(e["card"], e["process"], e["mib"]) for e in entries] == [
        (0, "trainer", 70000), (1, "teacher's server", 17000), (1, "trainer", 50000), (None, "trainer, allocated", 60000),
    ]  # fmt: skip
    table = step_memory.memory_table([{"run": "x", "memory": entries, "card_mib": sampler.totals}])
    assert f"| x | 0 | trainer | 68.4 | {entries[0]['planned_mib'] / 1024:.1f} |" in table
    assert "| x | 1 | all | 58.6 | | |" in table


def test_a_run_takes_the_cards_that_it_may_see(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    """By their own numbers, which slime takes for the driver's: two runs of one machine do not meet."""
    real_run, _ = scripts
    apart = flags(real_run, tmp_path, "--entry", "train_async.py")
    env = {"CUDA_VISIBLE_DEVICES": "3,2"}
    assert real_run.cards_of(apart, env) == [2, 3], "one for the trainer, one for the senior"
    assert env == {}
    assert real_run.cards_of(flags(real_run, tmp_path), {"CUDA_VISIBLE_DEVICES": "5,6"}) == [5]
    assert real_run.cards_of(flags(real_run, tmp_path, "--gpus", "2"), {}) == [0, 1]
    assert real_run.cards_of(flags(real_run, tmp_path, "--cpu"), {"CUDA_VISIBLE_DEVICES": ""}) == [0]


@pytest.mark.parametrize("visible", ["", "1", "GPU-7f3", "0,x"])
def test_too_few_cards_are_said(scripts: tuple[Any, Any], tmp_path: Path, visible: str) -> None:
    real_run, _ = scripts
    with pytest.raises(SystemExit, match=r"CUDA_VISIBLE_DEVICES.*expected numbers of at least 2 cards"):
        real_run.cards_of(flags(real_run, tmp_path, "--gpus", "2"), {"CUDA_VISIBLE_DEVICES": visible})

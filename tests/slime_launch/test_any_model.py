"""Any teacher and junior that is only served, and a student with experts: plans, and what slime's parser and our hooks say."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_tandem.config import RunConfig, ServedModel
from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.slime_launch.flags import Plan
from slime_tandem.slime_launch.plan import launch_plan
from slime_tandem.slime_launch.served import served
from slime_tandem.slime_launch.user_flags import split

from .test_served import CONFIGS, folder_of

CASES = (
    "moe_teacher", "mistral_junior", "gemma_teacher", "qwen3_5_teacher", "moe_student", "moe_student_alone",
    "moe_student_own_layers",
)  # fmt: skip


def launch(path: Path, case: str, *extra: str, **changes: Any) -> Plan:
    """The plan of a case; models are folders with a config.json alone, or published sizes."""
    path.mkdir(exist_ok=True)
    models: dict[str, str] = {"senior": "qwen3-4B", "junior": "qwen3-0.6B", "teacher": "llama3.1-8B"}
    tree: dict[str, Any] = {"models": models, "tasks": [{"family": "chain_sum"}], "sampling": {"max_new_tokens": 64}}
    tree |= {"train": {"steps": 1, "prompts_per_step": 6, "samples_per_prompt": 8}, "control": False}
    if case == "moe_teacher":  # another vocabulary, too
        models["teacher"] = str(folder_of(path / "gpt-oss", "gpt_oss"))
    elif case == "mistral_junior":
        models["junior"] = str(folder_of(path / "mistral", "mistral"))
        tree |= {"tandem": {"junior_tokenizer": "any"}}
    elif case == "qwen3_5_teacher":  # linear layers, and eyes
        models["teacher"] = str(folder_of(path / "qwen3.5", "qwen3_5"))
    elif case == "gemma_teacher":
        models["teacher"] = str(folder_of(path / "gemma", "gemma3"))
        tree |= {"serving": {"teacher": {"dtype": "bfloat16", "context_length": 128, "mem_fraction": 0.5}}}
    else:
        models["senior"] = str(folder_of(path / "student", "qwen3_moe", rms_norm_eps=1e-6, tie_word_embeddings=False))
        tree |= {"cluster": {"trainer_gpus": 4, "tensor_parallel": 2, "expert_parallel": 2}}
        tree |= {"tandem": {"enabled": False}} if case == "moe_student_alone" else {}
        if case == "moe_student_own_layers":
            tree["cluster"] = {"layer_spec": "own"}
    for name, value in changes.items():
        tree[name] = {**tree.get(name, {}), **value}
    return launch_plan(RunConfig.from_mapping(tree), path / "launch", extra)


def servers(plan: Plan) -> dict[str, Any]:
    (text,) = (text for file, text in plan.files.items() if file.name == "sglang.yaml")
    return {model["name"]: model for model in yaml.safe_load(text)["sglang"]}


def test_slimes_parser_and_the_hooks_take_every_plan(slime_here: Any, tmp_path: Path) -> None:
    plans = [
        launch(tmp_path / case, case, *(["--use-rollout-routing-replay"] if case == "moe_student_alone" else []))
        for case in CASES
    ]
    for plan in plans:
        plan.write()
    script = "import json, sys; from slime_tandem.slime_launch.real_parser import main; "
    script += "print('codes', [main(flags) for flags in json.load(sys.stdin)])"
    done = subprocess.run(
        [slime_here.python, "-W", "ignore", "-c", script], input=json.dumps([[*plan.flags] for plan in plans]),
        env=slime_here.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == [f"codes {[0] * len(CASES)}"], done.stderr[-3000:]


def test_what_a_served_model_is_given(tmp_path: Path) -> None:
    overrides = servers(launch(tmp_path, "gemma_teacher"))["teacher"]["server_groups"][0]["overrides"]
    assert overrides == {"mem_fraction_static": 0.5, "dtype": "bfloat16", "context_length": 128}
    notes = launch(tmp_path / "m", "mistral_junior").notes
    assert any(note.startswith("junior, weights counted from config.json") for note in notes)
    assert any(note.startswith("junior, KV cache: layers with a sliding window counted whole") for note in notes)
    with pytest.raises(ConfigError, match="max_new_tokens=64: expected below the 32 positions of the senior"):
        launch(tmp_path / "s", "moe_teacher", serving={"senior": {"context_length": 32}})


def test_teachers_have_gpus_and_servers_of_their_own(tmp_path: Path) -> None:
    teachers = [
        {"name": "a", "model": "qwen3-8B", "tasks": ["chain_sum"]},
        {"name": "b", "model": "llama3.1-8B", "gpus": 2, "tp": 2, "serving": {"quantization": "fp8", "enforce_eager": True}},
    ]  # fmt: skip
    tree = {"models": {"senior": "qwen3-4B", "junior": "qwen3-0.6B"}, "tasks": [{"family": "chain_sum"}]}
    config = RunConfig.from_mapping({**tree, "opd": {"teachers": teachers}, "train": {"prompts_per_step": 4}})
    found = servers(launch_plan(config, tmp_path))
    assert [(name, m["num_gpus_per_engine"], m["server_groups"][0]["num_gpus"]) for name, m in found.items()] == [
        ("actor", 1, 4), ("junior", 1, 1), ("a", 1, 1), ("b", 2, 2),
    ]  # fmt: skip
    assert found["b"]["server_groups"][0]["overrides"] == {
        "mem_fraction_static": 0.7, "quantization": "fp8", "disable_cuda_graph": True,
    }  # fmt: skip


def test_a_student_with_experts_is_what_slimes_own_file_says(tmp_path: Path) -> None:
    flags = split(launch(tmp_path, "moe_student").flags)
    said = {
        "--num-experts": ["4"], "--moe-router-topk": ["2"], "--moe-ffn-hidden-size": ["8"],
        "--moe-layer-freq": ["[1,1,1,1]"],
        "--expert-model-parallel-size": ["2"], "--expert-tensor-parallel-size": ["1"], "--moe-grouped-gemm": [],
    }  # fmt: skip
    assert {name: flags[name] for name in said} == said
    assert "--moe-router-pre-softmax" in flags, "its config leaves norm_topk_prob off"


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({}, {"cluster": {"layer_spec": "own"}}, "expert_parallel=2: expected 1 with cluster.layer_spec=own"),
        ({}, {"cluster": {"expert_parallel": 3}}, "expert_parallel=3: expected a divisor of its 4 experts"),
        ({"mlp_only_layers": [0]}, {}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, {}, "decoder_sparse_step"),
    ],
)
def test_what_slime_would_not_train_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    more = {"rms_norm_eps": 1e-6, **config}
    student = {"models": {"senior": str(folder_of(tmp_path / "other", "qwen3_moe", **more))}}
    with pytest.raises((ConfigError, ModelError), match=message):
        launch(tmp_path / "plan", "moe_student", **student, **changes)


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - {"qwen3_moe"}))
def test_what_is_only_served_is_no_student(kind: str, tmp_path: Path) -> None:
    models = {"senior": str(folder_of(tmp_path / "other", kind))}
    with pytest.raises(ModelError, match=r"for a model that is trained.*as junior or teacher"):
        launch(tmp_path / "plan", "moe_teacher", models=models)


def test_dense_students_have_no_expert_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the senior has no experts"):
        launch(tmp_path, "moe_teacher", cluster={"expert_parallel": 2})


def test_routes_are_replayed_where_no_junior_writes(tmp_path: Path) -> None:
    replay = "--use-rollout-routing-replay"
    alone = launch(tmp_path / "a", "moe_student_alone", replay)
    assert replay in alone.flags
    assert servers(alone)["teacher"]["server_groups"][0]["overrides"]["enable_return_routed_experts"] is False
    assert "overrides" not in servers(alone)["actor"]["server_groups"][0]
    with pytest.raises(ConfigError, match="a junior's tokens have no routes"):
        launch(tmp_path / "b", "moe_student", replay)
    selection = {"selection": {"selector": "entropy", "ratio": 0.5}}
    with pytest.raises(ConfigError, match="SGLang ends itself"):
        launch(tmp_path / "c", "moe_student_alone", replay, opd=selection)
    with pytest.raises(ConfigError, match="no forward pass whose routes"):
        launch(tmp_path / "d", "moe_student_alone", "--use-routing-replay")
    weights = {"rollout_weights": "masked"}
    assert (
        "--use-routing-replay"
        in launch(tmp_path / "e", "moe_student_alone", "--use-routing-replay", objective=weights).flags
    )


def test_a_published_pair_of_other_vocabularies_is_planned_by_its_sizes(tmp_path: Path) -> None:
    """Qwen3-8B and Qwen3.5-35B-A3B, whose sizes are the defaults of transformers' classes; eight GPUs of 80 GB."""
    teacher = tmp_path / "Qwen3.5-35B-A3B"
    teacher.mkdir()
    config = {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}, "vision_config": {}}
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    (teacher / "config.json").write_text(json.dumps(config))
    found = served(str(teacher), ServedModel(), field="serving.teacher")
    assert 34.5e9 < found.weights / 2 < 35.5e9, "as its name says"
    tree = {
        "models": {"senior": "qwen3-8B", "teacher": str(teacher)}, "tandem": {"enabled": False},
        "tasks": [{"family": "chain_sum"}], "train": {"prompts_per_step": 8}, "control": False,
        "cluster": {"teacher_gpus": 2, "teacher_tp": 2, "tensor_parallel": 2},
    }  # fmt: skip
    plan = launch_plan(RunConfig.from_mapping(tree), tmp_path / "launch")
    assert any(note.startswith("teacher: weights 32.7 GiB") for note in plan.notes)
    assert any(
        note == "teacher, KV cache: of 10 of 40 layers; SGLang keeps 47% of the pool for the others' states"
        for note in plan.notes
    )
    assert servers(plan)["teacher"]["num_gpus_per_engine"] == 2
    one = {**tree, "cluster": {"tensor_parallel": 2}}
    with pytest.raises(
        ConfigError, match=r"KV cache of teacher, tokens=0.*raise cluster\.teacher_tp or cluster\.mem_fraction"
    ):
        launch_plan(RunConfig.from_mapping(one), tmp_path / "launch")

"""One configuration as slime's flags: what is said, what is refused, and that slime's own parser knows every word."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Qwen3Config

from slime_tandem import cli
from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.slime_hooks.refused import KEY
from slime_tandem.slime_launch.flags import HOOKS, RM_TYPES, plan
from slime_tandem.slime_launch.user_flags import same, split
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.family import is_held_out
from slime_tandem.tasks.jsonl import parse_messages

Sized = Callable[..., RunConfig]


def test_every_setting_arrives_once(sized: Sized, tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "latest_checkpointed_iteration.txt").write_text("release")
    config = sized(
        seed=7,
        models={"template_kwargs": {"enable_thinking": False}},
        sampling={"max_new_tokens": 512, "stop": ["\n\n", "END"]},
        train={"steps": 3, "updates_per_step": 2, "save_every": 5},
        objective={"clip_low": 0.1, "kl_coef": 0.01, "kl_estimator": "k2", "scale_advantages": "std"},
        optimizer={"lr": 1e-6, "warmup_steps": 4},
        cluster={"reward": "math", "reference": str(reference)},
        tandem={"prob_senior": 0.3},
    )
    launch = plan(config, tmp_path / "launch")
    flags = split(launch.flags)
    assert len(flags) == sum(word.startswith("--") for word in launch.flags), "no flag twice"
    said = {
        "--seed": ["7"],
        "--num-rollout": ["3"],
        "--num-steps-per-rollout": ["2"],
        "--rollout-batch-size": ["6"],
        "--n-samples-per-prompt": ["8"],
        "--rollout-stop": ["\n\n", "END"],
        "--apply-chat-template-kwargs": ['{"enable_thinking": false}'],
        "--eps-clip": ["0.1"],
        "--kl-loss-coef": ["0.01"],
        "--kl-loss-type": ["k2"],
        "--use-kl-loss": [],
        "--lr": ["1e-06"],
        "--lr-warmup-iters": ["4"],
        "--save-interval": ["5"],
        "--make-vocab-size-divisible-by": ["1"],
        "--rm-type": ["math"],
        "--ref-load": [str(reference)],
        "--actor-num-gpus-per-node": ["6"],
        "--rollout-num-gpus": ["8"],
        "--colocate": [],
        "--loss-type": ["custom_loss"],
        "--use-rollout-logprobs": [],
    }
    assert {name: flags[name] for name in said} == said
    assert not {"--disable-grpo-std-normalization", "--custom-rm-path"} & flags.keys()
    assert {flag: flags[flag] for flag in HOOKS} == {
        flag: [f"slime_tandem.slime_hooks.{path}"] for flag, path in HOOKS.items()
    }
    settings = yaml.safe_load(launch.files[tmp_path / "launch" / "tandem.yaml"])
    assert list(settings) == [KEY], "slime sets every key on its arguments"
    assert settings[KEY]["tandem"] == {"prob_senior": 0.3}
    assert not {"optimizer", "train", "seed", "cluster", "sampling"} & settings[KEY].keys()
    assert "template_kwargs" not in settings[KEY]["models"]
    # What is left to the file and what the flags say make the same run.
    assert RunConfig.from_mapping(settings[KEY]).objective == config.objective


def test_truncation_is_ours_and_slimes_nucleus_is_whole(sized: Sized, tmp_path: Path) -> None:
    sampling = {"top_p": 0.9, "top_k": 20, "truncation_replay": "recompute"}
    launch = plan(sized(sampling=sampling, opd={"enabled": False}), tmp_path / "launch")
    flags = dict(split(launch.flags))
    assert (flags["--rollout-top-p"], flags["--rollout-top-k"]) == (["1"], ["20"])
    settings = yaml.safe_load(launch.files[tmp_path / "launch" / "tandem.yaml"])[KEY]
    assert settings["sampling"] == {"top_p": 0.9, "truncation_replay": "recompute"}


def test_prompts_are_those_of_the_local_run(sized: Sized, tmp_path: Path) -> None:
    config = sized(eval={"every": 1, "prompts": 4}, train={"steps": 2})
    launch = plan(config, tmp_path)
    tasks = TaskSet(config.tasks, config.seed)
    lines = [json.loads(line) for line in "".join(launch.files[tmp_path / "prompts.jsonl"]).splitlines()]
    messages = [parse_messages(line["messages"], "x", may_be_text=False) for line in lines]
    assert messages == [p.messages for step in range(2) for p in tasks.train_prompts(step, 6)]
    held = [json.loads(line) for line in "".join(launch.files[tmp_path / "heldout.jsonl"]).splitlines()]
    assert len(held) == 4
    assert all(is_held_out(parse_messages(line["messages"], "x", may_be_text=False)) for line in held)
    sets = yaml.safe_load(launch.files[Path(split(launch.flags)["--eval-config"][0])])["eval"]["datasets"]
    assert [(s["name"], s["path"]) for s in sets] == [
        (name, str(tmp_path / "heldout.jsonl")) for name in ("solo", "tandem")
    ]
    assert sets[1]["custom_generate_function_path"] == "slime_tandem.slime_hooks.hooks.generate_with_junior"


def test_a_prompt_file_goes_whole_but_for_its_held_out_tenth(sized: Sized, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "label": i + 1}) + "\n" for i in range(60)))
    launch = plan(sized(tasks=[{"family": "jsonl", "path": str(file)}]), tmp_path / "launch")
    count = "".join(launch.files[tmp_path / "launch" / "prompts.jsonl"]).count("\n")
    assert 45 < count < 60
    assert "--rollout-shuffle" in launch.flags


def test_prompts_without_labels_need_a_reward_of_ones_own(sized: Sized, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(60)))
    task = {"family": "jsonl", "path": str(file), "reward": "my.rewards:f"}
    with pytest.raises(ConfigError, match=r"tasks\.0\.reward='my\.rewards:f'.*ModuleNotFoundError"):
        plan(sized(tasks=[task]), tmp_path / "launch")
    task["reward"] = "textwrap:dedent"  # stands for a reward: nothing is scored here
    launch = plan(sized(tasks=[task]), tmp_path / "launch")
    rows = [json.loads(line) for line in "".join(launch.files[tmp_path / "launch" / "prompts.jsonl"]).splitlines()]
    assert {(row["label"], row["metadata"]["spec"]) for row in rows} == {(None, 0)}
    del task["reward"]
    with pytest.raises(DataError, match=r":1 label=None.*objective\.reward_coef=0"):
        plan(sized(tasks=[task]), tmp_path / "launch")
    launch = plan(sized(tasks=[task], objective={"reward_coef": 0.0}, opd={"enabled": True}), tmp_path / "launch")
    assert '"label": null' in "".join(launch.files[tmp_path / "launch" / "prompts.jsonl"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--rollout-temperature", "0.7"], r"--rollout-temperature='0\.7': expected 1, what the configuration says"),
        (["--rollout-top-p=0.9"], r"--rollout-top-p='0\.9'"),
        (["--loss-type", "policy_loss"], "--loss-type"),
        (["--custom-generate-function-path", "mine.generate"], "--custom-generate-function-path"),
        (["--colocate"], "set cluster.colocate instead"),
        (["--rollout-stop", "x"], "set sampling.stop instead"),
        (["--disable-grpo-std-normalization"], "set objective.scale_advantages instead"),
        (["--use-rollout-routing-replay"], "no routes to replay"),
        (["--use-routing-replay"], "no routes to replay"),
        (["--normalize-advantages"], "whitening"),
        (["--use-opd"], "twice"),
        (["stray"], "a flag first"),
        (["--sglang-config", "/no/such.yaml"], "an existing YAML file"),
    ],
)
def test_flags_that_contradict_are_refused(sized: Sized, tmp_path: Path, extra: list[str], message: str) -> None:
    apart = {"colocate": False, "trainer_gpus": 4} if extra == ["--colocate"] else {}
    with pytest.raises(ConfigError, match=message):
        plan(sized(cluster=apart, objective={"scale_advantages": "std"}), tmp_path, extra=extra)


def test_other_flags_pass_and_repeated_ones_are_said_once(sized: Sized, tmp_path: Path) -> None:
    launch = plan(
        sized(), tmp_path, extra=["--rollout-temperature", "1", "--use-tensorboard", "--tb-project-name", "a b"]
    )
    assert launch.flags[-3:] == ["--use-tensorboard", "--tb-project-name", "a b"]
    assert sum(word == "--rollout-temperature" for word in launch.flags) == 1


@pytest.mark.parametrize(
    "extra",
    [
        ["--lr", "1e-6"],
        ["--lr=0.000001"],
        ["--entropy-coef", "0.00"],
        ["--rollout-top-p", "1.0"],
        ["--num-rollout", "1"],
    ],
)
def test_values_are_compared_and_not_their_spelling(sized: Sized, tmp_path: Path, extra: list[str]) -> None:
    config = sized(optimizer={"lr": 1e-6}, sampling={"stop": ["1"]})
    assert plan(config, tmp_path, extra=extra).flags == plan(config, tmp_path).flags
    with pytest.raises(ConfigError, match="--rollout-stop"):
        plan(config, tmp_path, extra=["--rollout-stop", "1.0"])


@pytest.mark.parametrize(
    ("extra", "remedy"),
    [
        (["--custom-rm-path", "my:fn"], "cluster.reward one of slime's rewards or a function of slime's signature"),
        (["--input-key", "q"], "tasks: [{family: jsonl, path: FILE}]"),
        (["--lr", "1"], "set optimizer.lr instead"),
        (["--num-layers", "1"], "the sizes are those of models.senior"),
        (["--custom-generate-function-path", "mine.generate"], "start train.py without a plan"),
        (["--advantage-estimator", "gspo"], "objective.ratio"),
        (["--hidden-dropout", "0.1"], "no setting has another value of it"),
    ],
)
def test_the_remedy_for_a_contradiction_is_one_that_there_is(
    sized: Sized, tmp_path: Path, extra: list[str], remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(sized(), tmp_path, extra=extra)
    assert (caught.value.field, remedy in caught.value.remedy) == (extra[0], True), caught.value.remedy


def test_a_model_of_few_positions_is_no_shorter_than_its_sequences(sized: Sized, tmp_path: Path) -> None:
    """slime would take 4096, and Megatron refuse a model of fewer positions."""
    small = Qwen3Config(num_hidden_layers=2, max_position_embeddings=512)
    small.save_pretrained(tmp_path / "small")
    flags = split(
        plan(sized(models={"senior": str(tmp_path / "small")}, sampling={"max_new_tokens": 64}), tmp_path).flags
    )
    assert flags["--seq-length"] == flags["--max-position-embeddings"] == ["512"]
    assert "--seq-length" not in plan(sized(), tmp_path).flags


@pytest.mark.parametrize("kl_coef", [1e-05, 0.12345678])
def test_numbers_reach_slime_with_every_digit(sized: Sized, tmp_path: Path, kl_coef: float) -> None:
    """The hooks compare the two: a rounded flag would be refused when the job has started."""
    config = sized(objective={"kl_coef": kl_coef, "clip_low": 0.12345678}, optimizer={"lr": 1.23456789e-6})
    flags = split(plan(config, tmp_path / "launch").flags)
    found = [float(flags[name][0]) for name in ("--kl-loss-coef", "--eps-clip", "--lr")]
    assert found == [kl_coef, 0.12345678, 1.23456789e-6]


def test_flags_of_the_configuration_are_checked_alike(sized: Sized, tmp_path: Path) -> None:
    launch = plan(sized(cluster={"slime_flags": ["--use-tensorboard"]}), tmp_path, extra=["--tb-project-name", "x"])
    assert launch.flags[-3:] == ["--use-tensorboard", "--tb-project-name", "x"]
    with pytest.raises(ConfigError, match="whitening"):
        plan(sized(cluster={"slime_flags": ["--normalize-advantages"]}), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {"senior": "qwen3-32B"}}, "memory of the trainer, GiB a GPU="),
        ({"models": {"teacher": "qwen3-32B"}}, "KV cache of teacher, tokens=0"),
        ({"models": {"senior": "llama3.2-3B"}}, r"rope_parameters\.factor=32\.0: expected 8"),
        ({"engine": {"senior_url": "http://10.0.0.1:1"}}, "engine.senior_url"),
        (
            {"train": {"prompts_per_step": 5}, "cluster": {"trainer_gpus": 6}},
            "responses of an update=40: expected a multiple of 6",
        ),
        ({"cluster": {"tensor_parallel": 3}}, "a divisor of 32, the senior's attention heads"),
        ({"cluster": {"pipeline_parallel": 5, "trainer_gpus": 5}}, "a divisor of 36, its layers"),
        ({"cluster": {"teacher_gpus": 3, "teacher_tp": 3}}, "cluster.teacher_tp=3: expected a divisor of 32"),
        ({"cluster": {"host_memory_gib": 16}}, "main memory of a machine, GiB="),
        ({"control": True}, "control"),
        ({"objective": {"kl_in": "reward", "kl_coef": 0.1}}, r"objective\.kl_in='reward'.*under slime"),
        ({"sampling": {"top_p": 0.9}, "opd": {"enabled": False}}, "truncation_replay='kept_ids'.*recompute"),
        ({"train": {"steps": 0}}, "train.steps"),
        ({"cluster": {"reward": "zzz"}}, "cluster.reward='zzz': expected null .*, one of slime's remote_rm"),
        ({"cluster": {"reward": "boxed_zzz"}}, "cluster.reward"),
        ({"cluster": {"reward": "remote_rm"}}, "--rm-url=None: expected the address"),
        ({"cluster": {"slime_flags": ["--rm-type", "zzz"]}}, "cluster.reward='zzz': expected null"),
        (
            {"cluster": {"slime_flags": ["--group-rm"]}, "eval": {"every": 2}},
            "--group-rm=True: expected not to be set with evaluations",
        ),
        ({"cluster": {"reference": ""}}, "cluster.reference='': expected a folder"),
        ({"cluster": {"reference": "/usr"}}, "cluster.reference='/usr': expected a folder of Hugging Face weights"),
        ({"cluster": {"reference": "/no/such/folder"}}, "cluster.reference='/no/such/folder': expected a folder"),
        (
            {"sampling": {"max_new_tokens": 40960}},
            "max_new_tokens=40960: expected below the 40960 positions of the senior",
        ),
        (
            {"sampling": {"max_new_tokens": 32768}, "models": {"junior": "qwen2.5-0.5B"}},
            "below the 32768 positions of the junior",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    sized: Sized, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(sized(**changes), tmp_path)


def test_larger_models_fit_when_they_are_cut(sized: Sized, tmp_path: Path) -> None:
    cluster = {
        "nodes": 4,
        "tensor_parallel": 8,
        "trainer_gpus": 16,
        "teacher_gpus": 4,
        "teacher_tp": 4,
        "senior_tp": 2,
        "senior_gpus": 16,
    }
    models = {"senior": "qwen3-32B", "teacher": "llama3.1-70B"}
    launch = plan(sized(models=models, cluster=cluster, train={"prompts_per_step": 16}), tmp_path)
    flags = split(launch.flags)
    assert flags["--actor-num-nodes"] == ["2"]
    assert "--sequence-parallel" in flags
    assert any(note.startswith("memory, GiB a GPU of 79: trainer weights") for note in launch.notes)


def test_a_fused_pair_by_sizes_is_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/scaling.md: names make a plan, with the fused engine too; what needs the folders is named."""
    tree = {
        "models": {"senior": "qwen3-4B", "junior": "qwen3-0.6B", "teacher": "llama3.1-8B"},
        "tasks": [{"family": "chain_sum"}],
        "train": {"steps": 1, "prompts_per_step": 6, "samples_per_prompt": 8},
        "engine": {"mode": "fused"},
        "control": False,
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    argv = ["config", "--check", str(tmp_path / "c.yaml"), "--slime", str(tmp_path / "plan")]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "# sizes only: qwen3-0.6B is a published size" in out
    assert "# sizes only: --sglang-json-model-override-args and the boundary tables" in out
    assert "export SGLANG_EXTERNAL_MODEL_PACKAGE=" in out
    assert "--sglang-enable-weights-cpu-backup" in out
    assert cli.main([*argv, "--", "--sglang-attention-backend", "fa3"]) == 0  # the machine's owner knows better
    out = capsys.readouterr().out
    assert "--sglang-attention-backend fa3" in out
    assert "triton" not in out
    for phase in ("", "decode-", "prefill-"):
        assert cli.main([*argv, "--", f"--sglang-{phase}attention-backend", "flashinfer"]) == 2
        assert "its planner knows one model's heads" in capsys.readouterr().err
    for empty in (["--sglang-attention-backend"], ["--sglang-attention-backend", ""]):
        assert cli.main([*argv, "--", *empty]) == 2
        assert "expected a backend of SGLang" in capsys.readouterr().err
    assert cli.main([*argv, "--set", "models.junior=qwen3-14B"]) == 2
    assert "junior.num_attention_heads=40" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[a] b", "@x", "a: b: c", "*x", "2020-13-45", "0x_"])
def test_values_that_are_no_yaml_are_text(sized: Sized, tmp_path: Path, text: str) -> None:
    assert split(plan(sized(), tmp_path, extra=["--wandb-group", text]).flags)["--wandb-group"] == [text]


def test_servers_that_must_answer_first(sized: Sized, tmp_path: Path) -> None:
    launch = plan(sized(engine={"teacher_url": "http://10.0.0.2:30000"}, train={"prompts_per_step": 7}), tmp_path)
    assert "SERVER_URLS=(http://10.0.0.2:30000)\n" in launch.shell()


def test_the_command_writes_files_that_a_shell_and_yaml_can_read(
    tmp_path: Path, trio: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {
        "models": {role: str(getattr(trio, role)) for role in ("senior", "junior", "teacher")},
        "tasks": [{"family": "chain_sum"}],
        "train": {"steps": 1, "prompts_per_step": 6, "samples_per_prompt": 2},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    folder = tmp_path / "with 'quotes' and spaces"
    argv = ["config", "--check", str(tmp_path / "c.yaml"), "--slime", str(folder), "--", "--use-tensorboard"]
    assert cli.main(argv) == 0
    script = capsys.readouterr().out + 'printf "%s\\0" "${SLIME_FLAGS[@]}"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    flags = split(done.stdout.split("\0")[:-1])
    assert "--use-tensorboard" in flags
    servers = yaml.safe_load(Path(flags["--sglang-config"][0]).read_text())["sglang"]
    assert [m["model_path"] for m in servers] == [str(trio.senior), str(trio.junior), str(trio.teacher)]
    assert Path(flags["--custom-config-path"][0]).parent == folder
    assert cli.main(["config", "--check", str(tmp_path / "c.yaml"), "--", "--lr", "1"]) == 2


def test_rewards_are_slimes(slime_here: Any) -> None:
    hub = (slime_here.slime / "slime" / "rollout" / "rm_hub" / "__init__.py").read_text()
    assert tuple(re.findall(r'rm_type == "(\w+)"', hub)) == RM_TYPES
    assert 'rm_type.startswith("boxed_")' in hub


def test_slimes_real_parser_knows_every_flag(slime_here: Any, sized: Sized, tmp_path: Path) -> None:
    config = sized(
        objective={"kl_coef": 0.1},
        sampling={"stop": ["x"]},
        eval={"every": 1, "prompts": 2},
        cluster={"tensor_parallel": 2, "reward": "math", "layer_spec": "own"},
    )
    fused = (
        {},
        [
            "--hf-checkpoint",
            "m",
            "--sglang-json-model-override-args",
            "{}",
            "--sglang-attention-backend",
            "triton",
            "--sglang-sampling-backend",
            "pytorch",
            "--sglang-grammar-backend",
            "none",
            "--sglang-enable-weights-cpu-backup",
        ],
    )
    flags = plan(
        config.model_copy(update={"engine": config.engine.model_copy(update={"mode": "fused"})}), tmp_path, fused=fused
    ).flags
    flags = [*flags, *plan(sized(models={"senior": "llama3.1-8B"}, cluster={"tensor_parallel": 2}), tmp_path).flags]
    flags += plan(sized(models={"senior": "qwen2.5-7B"}, cluster={"tensor_parallel": 2}), tmp_path).flags
    python = [slime_here.python, "-W", "ignore", "-m", "slime_tandem.slime_launch.real_parser"]
    done = subprocess.run(
        [*python, *flags, "--rollout-temprature", "1"],
        env=slime_here.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "slime knows nothing of: --rollout-temprature 1"
    launch = plan(sized(objective={"kl_coef": 0.1}), tmp_path)
    launch.write()
    done = subprocess.run(
        [*python, *launch.flags], env=slime_here.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused = [*python, *launch.flags, "--use-unbiased-kl"]
    done = subprocess.run(refused, env=slime_here.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "hooks refuse --use-unbiased-kl=True" in done.stderr


def test_slimes_own_loss_is_a_setting(sized: Sized, tmp_path: Path) -> None:
    """docs/slime.md, recipe 1: three hooks and the reward; what slime's loss and estimator have is the user's."""
    config = sized(cluster={"loss": "slime"}, opd={"enabled": False}, objective={"scale_advantages": "std"})
    theirs = [
        "--advantage-estimator",
        "gspo",
        "--entropy-coef",
        "0.01",
        "--use-tis",
        "--use-kl-loss",
        "--kl-loss-coef",
        "0.001",
    ]
    flags = split(plan(config, tmp_path, extra=theirs).flags)
    assert flags["--loss-type"] == ["policy_loss"]
    assert [f for f, v in flags.items() if "slime_tandem.slime_hooks" in " ".join(v)] == [
        "--custom-rm-path", "--data-source-path", "--custom-generate-function-path",
        "--custom-rollout-log-function-path", "--custom-eval-rollout-log-function-path",
    ]  # fmt: skip
    assert (flags["--advantage-estimator"], flags["--entropy-coef"]) == (["gspo"], ["0.01"])
    with pytest.raises(ConfigError, match=r"objective\.dual_clip"):
        plan(sized(cluster={"loss": "slime"}, opd={"enabled": False}, objective={"dual_clip": 3.0}), tmp_path)
    with pytest.raises(ConfigError, match=r"set cluster\.loss instead"):
        plan(sized(opd={"enabled": False}), tmp_path, extra=["--loss-type", "policy_loss"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {},
            r"opd\.enabled=True: expected false with cluster\.loss=slime.* Remedy: set it to false, or cluster\.loss=own\.",
        ),
        (
            {"opd": {"enabled": False}, "train": {"epochs_per_step": 2}},
            r"train\.epochs_per_step=2: expected 1 .* Remedy: set it to 1, or cluster\.loss=own\.",
        ),
        *(
            ({"opd": {"enabled": False}, **changes}, rf"{name}=.* Remedy: remove it, or set cluster\.loss=own\.")
            for name, changes in (
                (r"objective\.kl_coef", {"objective": {"kl_coef": 0.1}}),
                (r"objective\.clip_advantages", {"objective": {"clip_advantages": 2.0}}),
                (r"tandem\.junior_token_loss_weight", {"tandem": {"junior_token_loss_weight": 0.5}}),
            )
        ),
        (
            {"opd": {"enabled": False}, "sampling": {"top_p": 0.9}},
            r"sampling=.* Remedy: set these, or cluster\.loss=own\.",
        ),
    ],
)
def test_beside_slimes_loss_the_users_own_setting_is_named(
    sized: Sized, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$") as caught:
        plan(sized(cluster={"loss": "slime"}, **changes), tmp_path)
    assert "slime_tandem." not in str(caught.value), "the file that slime is given has that prefix, the user's has none"


OWN_REWARDS = """
async def theirs(args, sample, **_):
    return 1.0

def two_parts(text, label):
    return {"correct": float(label in text), "brief": 1 / (1 + len(text))}
"""


def test_rewards_reach_slime_however_they_are_named(
    sized: Sized, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime's own by setting or by its flag; one of ours with its parts in the settings file, which the hooks read."""
    (tmp_path / "plan_rewards.py").write_text(OWN_REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    dotted = ["--custom-rm-path", "plan_rewards.theirs"]
    by_flag = plan(sized(), tmp_path / "a", extra=[*dotted, "--reward-key", "score"]).flags
    assert split(by_flag)["--custom-rm-path"] == ["plan_rewards.theirs"]
    assert split(by_flag)["--reward-key"] == ["score"]
    by_setting = plan(sized(cluster={"reward": "plan_rewards.theirs"}), tmp_path / "a", extra=["--reward-key", "score"])
    assert split(by_setting.flags) == split(by_flag)
    for extra in (["--rm-type", "boxed_math"], ["--rm-type", "remote_rm", "--rm-url", "http://judge/x"]):
        assert split(plan(sized(), tmp_path / "a", extra=extra).flags)["--rm-type"] == [extra[1]]
    for reward in RM_TYPES:
        more = ["--rm-url", "http://judge/x"] if reward == "remote_rm" else []
        assert split(plan(sized(cluster={"reward": reward}), tmp_path, extra=more).flags)["--rm-type"] == [reward]
    weights = {"correct": 1.0, "brief": 0.1}
    for reward, more in (("plan_rewards:two_parts", {"reward_weights": weights}), ("http://127.0.0.1:9/score", {})):
        launch = plan(sized(tasks=[{"family": "chain_sum", "reward": reward, **more}]), tmp_path / "b")
        assert split(launch.flags)["--custom-rm-path"] == ["slime_tandem.slime_hooks.hooks.reward"]
        (kept,) = yaml.safe_load(launch.files[tmp_path / "b" / "tandem.yaml"])[KEY]["tasks"]
        assert kept == {"family": "chain_sum", "reward": reward, **more}
    with pytest.raises(ConfigError, match=r"--custom-rm-path='plan_rewards\.theirs'"):
        plan(sized(tasks=[{"family": "chain_sum", "reward": "plan_rewards:two_parts"}]), tmp_path, extra=dotted)


def test_a_file_without_labels_goes_with_a_reward_that_needs_none(sized: Sized, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(40)))
    tasks = [{"family": "jsonl", "path": str(file)}]
    plan(sized(tasks=tasks, cluster={"reward": "my_module.my_reward"}), tmp_path / "a")
    with pytest.raises(DataError, match="label"):
        plan(sized(tasks=tasks, cluster={"reward": "math"}), tmp_path / "a")


def test_slimes_real_parser_takes_plans_with_rewards(slime_here: Any, sized: Sized, tmp_path: Path) -> None:
    """A dry run of a plan with a reward of two parts, and with a function of slime's signature."""
    (tmp_path / "plan_rewards.py").write_text(OWN_REWARDS)
    environment = slime_here.environment()
    environment["PYTHONPATH"] += f":{tmp_path}"
    weights = {"correct": 1.0, "brief": 0.1}
    tasks = [{"family": "chain_sum", "reward": "plan_rewards:two_parts", "reward_weights": weights}]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        launches = [
            plan(sized(tasks=tasks), tmp_path / "ours"),
            plan(
                sized(), tmp_path / "theirs", extra=["--custom-rm-path", "plan_rewards.theirs", "--reward-key", "score"]
            ),
        ]
    for launch in launches:
        launch.write()
        command = [slime_here.python, "-W", "ignore", "-m", "slime_tandem.slime_launch.real_parser", *launch.flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]


def test_the_objective_reaches_slimes_flags_and_the_file(sized: Any, tmp_path: Path) -> None:
    config = sized(objective={"entropy_coef": 0.001, "kl_coef": 0.01}, train={"epochs_per_step": 2})
    made = plan(config, tmp_path)
    flags = split(made.flags)
    assert (flags["--entropy-coef"], flags["--kl-loss-coef"]) == (["0.001"], ["0.01"])
    (text,) = (text for file, text in made.files.items() if file.name == "tandem.yaml")
    assert yaml.safe_load(text)["slime_tandem"]["train"] == {"epochs_per_step": 2}
    with pytest.raises(
        ConfigError, match=r"--entropy-coef='0\.5': expected 0\.001.*set objective\.entropy_coef instead"
    ):
        plan(config, tmp_path, extra=["--entropy-coef", "0.5"])
    weighted = sized(tandem={"enabled": False}, train={"epochs_per_step": 2}, objective={"rollout_weights": "masked"})
    with pytest.raises(ConfigError, match=r"--use-routing-replay=True.*recorded for one pass"):
        plan(weighted, tmp_path, extra=["--use-routing-replay"])
    alone = sized(objective={"entropy_coef": 0.001}, opd={"enabled": False}, cluster={"loss": "slime"})
    assert split(plan(alone, tmp_path).flags)["--entropy-coef"] == ["0.001"], "slime's own loss has it, too"
    with pytest.raises(ConfigError, match="epochs_per_step=2: expected 1 with slime's own loss"):
        plan(sized(opd={"enabled": False}, cluster={"loss": "slime"}, train={"epochs_per_step": 2}), tmp_path)


def test_what_a_local_run_alone_reads_is_refused_or_said(sized: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gradient_checkpointing=True: expected false: cluster\.recompute"):
        plan(sized(train={"gradient_checkpointing": True}), tmp_path)
    notes = plan(sized(train={"threads": 2}), tmp_path).notes
    assert any(note.startswith("a local run alone reads train.threads=2") for note in notes)


@pytest.mark.parametrize(
    ("extra", "kept"),
    [
        (["--x", "1", "--x", "2"], ["--x", "1", "--x", "2"]),  # slime adds some up: all of them go on
        (["--x=1=2", "--y=", "--z", "-1"], ["--x", "1=2", "--y", "", "--z", "-1"]),
        (["--lr", "1.0E-3", "--lr=0.001"], []),
        (["--weight-decay", "-0.0"], []),
        (["--kwargs", '{"a": [1, -2], "b": "c d"}'], ["--kwargs", '{"a": [1, -2], "b": "c d"}']),
        (["--sglang-log-level", "info"], ["--sglang-log-level", "info"]),
    ],
)
def test_odd_spellings_of_users_flags(sized: Any, tmp_path: Path, extra: list[str], kept: list[str]) -> None:
    made = list(plan(sized(), tmp_path, extra=extra).flags)
    assert made[len(made) - len(kept) :] == kept
    assert made[: len(made) - len(kept)] == list(plan(sized(), tmp_path).flags)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--lr", "0.001", "--lr", "0.002"], "--lr='0.002': expected 0.001"),
        (["--max-tokens-per-gpu", "8k"], "--max-tokens-per-gpu='8k': expected 8192"),
        (["--x", "1", "--", "--y"], "slime flags='--'"),
        (["--sglang-mem-fraction", "0.5"], "expected a whole name, --sglang-mem-fraction-static"),
        (["--colocate", "true"], "--colocate='true'"),
        (["--rollout-top-p", "1", "2"], "--rollout-top-p='1 2'"),
    ],
)
def test_users_flags_that_say_something_else(sized: Any, tmp_path: Path, extra: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(sized(), tmp_path, extra=extra)


def test_lists_are_compared_as_what_megatron_makes_of_them() -> None:
    for ours, theirs in (
        ("[1,1,1]", "([1]*3)"),
        ("[0,1,1]", "[0]*1+[1]*2"),
        ('{"a": [true, null]}', '{ "a":[true,null] }'),
    ):
        assert same("--x", [ours], [theirs])
    for ours, theirs in (("[1,1]", "[1]*3"), ("[1]", "[1]*99999999999"), ("[1]", "__import__('os')"), ("{", "{ ")):
        assert not same("--x", [ours], [theirs])

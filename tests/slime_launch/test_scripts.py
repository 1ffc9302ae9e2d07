"""The launch scripts: what they print and refuse, that they wait, and stop what they started and nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_tandem.slime_launch.user_flags import split

from ..waiting import PATIENCE_S, wait_until

REPO = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]

# Stands for the Python with Ray: `ray start` is a web server, `ray job submit` a line in a file.
FAKE = """#!/usr/bin/env bash
case "$*" in
  *"ray.scripts.scripts start"*)
    echo "$$" >> HERE/ray.pid
    echo "$RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT" > HERE/patience
    exec REAL -m http.server --bind 127.0.0.1 --directory HERE/www PORT ;;
  *"ray.scripts.scripts job submit"*)
    printf '%s\\0' "$@" > HERE/submitted
    [[ -e HERE/hang ]] && sleep 60
    exit "$(cat HERE/code)" ;;
  *"ray.scripts.scripts job stop"*) echo "$*" > HERE/stopped ;;
  *real_parser*) exit 0 ;;
  *ray.dashboard*) [[ ! -e HERE/minimal ]] ;;
  *) exec REAL "$@" ;;
esac
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Checkouts that are none, published sizes for models, a small prompt file, the stand-in for Ray."""
    for folder in ("slime", "megatron/megatron", "www/api"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("slime/train.py", "www/health", "www/api/version"):
        (tmp_path / file).touch()
    (tmp_path / "code").write_text("0")
    rows = ({"prompt": f"{i} + 1 =", "label": i + 1} for i in range(40))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    port = next(p for p in iter(free_port, 0) if not 10000 < p < 20000)
    python = tmp_path / "python"
    python.write_text(FAKE.replace("HERE", str(tmp_path)).replace("REAL", sys.executable).replace("PORT", str(port)))
    python.chmod(0o755)
    return {
        "SLIME_DIR": str(tmp_path / "slime"),
        "MEGATRON_LM_DIR": str(tmp_path / "megatron"),
        "SLIME_PYTHON": str(python),
        "OUTPUT_ROOT": str(tmp_path / "out"),
        "PROMPT_DATA": str(tmp_path / "data.jsonl"),
        "SENIOR_MODEL": "qwen3-4B",
        "JUNIOR_MODEL": "qwen3-0.6B",
        "DASHBOARD_PORT": str(port),
        "SERVER_TIMEOUT": "30",
        "DRY_RUN": "1",
    }


@pytest.fixture
def run(variables: dict[str, str]) -> Run:
    def script(name: str, *args: str, **changes: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in {**os.environ, **variables, **changes}.items() if v != ""}
        return subprocess.run(
            ["bash", str(REPO / "scripts" / "train" / name), *args],
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    return script


def last_command(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.splitlines()[-1])


def flags_of(command: list[str]) -> dict[str, list[str]]:
    return split(command[next(i for i, word in enumerate(command) if word.endswith("train.py")) + 1 :])


def test_a_dry_run_checks_writes_the_files_and_prints_every_command(run: Run, tmp_path: Path) -> None:
    done = run(
        "run_tandem_grpo.sh",
        "cluster.trainer_gpus=6",
        "--",
        "--use-tensorboard",
        NUM_ROLLOUT="3",
        TEACHER_MODEL="llama3.1-8B",
        RAY_START_FLAGS="--num-cpus=16\n--temp-dir=/x --labels=*",
        JOB_ENV="OF_MINE",
        OF_MINE="a b",
    )
    command = last_command(done)
    lines = done.stdout.splitlines()
    assert "# actor: GPUS 0 to 5".lower() in done.stdout.lower()
    assert any(
        "ray.scripts.scripts start --head --block" in line and r"--num-cpus=16 --temp-dir=/x --labels=\*" in line
        for line in lines
    )
    (asked,) = (i for i, line in enumerate(lines) if "slime_launch.real_parser --actor-num-nodes 1" in line)
    assert asked < next(i for i, line in enumerate(lines) if "ray.scripts.scripts start" in line), (
        "before anything starts"
    )
    assert command[1:5] == ["-m", "ray.scripts.scripts", "job", "submit"]
    env = json.loads(command[command.index("--runtime-env-json") + 1])["env_vars"]
    assert env["PYTHONPATH"].split(":")[:3] == [str(REPO), str(tmp_path / "slime"), str(tmp_path / "megatron")]
    assert env["OF_MINE"] == "a b"
    flags = flags_of(command)
    assert (flags["--num-rollout"], flags["--use-tensorboard"], flags["--colocate"]) == (["3"], [], [])
    servers = yaml.safe_load(Path(flags["--sglang-config"][0]).read_text())["sglang"]
    assert [(m["name"], m["update_weights"]) for m in servers] == [
        ("actor", True),
        ("junior", False),
        ("teacher", False),
    ]
    assert not (tmp_path / "submitted").exists()
    assert not (tmp_path / "ray.pid").exists()


def test_a_job_at_weights_and_biases_goes_on_as_the_same_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    settings = (f"runs_dir={tmp_path / 'runs'}", "report_to=wandb", "tracking.mode=offline")
    found = []
    for _ in range(2):
        command = last_command(run("run_tandem_grpo.sh", "cluster.trainer_gpus=6", *settings))
        found.append(json.loads(command[command.index("--runtime-env-json") + 1])["env_vars"])
    (kept,) = (tmp_path / "runs").glob("*/trackers.json")
    assert {env["WANDB_RUN_ID"] for env in found} == {json.loads(kept.read_text())["run_id"]}
    assert {env["WANDB_RESUME"] for env in found} == {"allow"}


def test_a_job_gets_every_variable_of_its_launch(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that runs already has none of this shell's."""
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    settings = (f"runs_dir={tmp_path / 'runs'}", "report_to=[wandb,tensorboard]", "tracking.mode=offline")
    sizes = {"STUDENT_HF": "qwen3-1.7B", "TEACHER_MODEL": "qwen3-8B"}

    def job(**variables: str) -> tuple[dict[str, str], set[str]]:
        command = last_command(run("run_opd.sh", *settings, **sizes, **variables))
        env = json.loads(command[command.index("--runtime-env-json") + 1])["env_vars"]
        (launch,) = tmp_path.rglob("launch.sh")
        return env, set(re.findall(r"^export (\w+)=", launch.read_text(), re.MULTILINE))

    env, exported = job()
    assert {"TENSORBOARD_DIR", "WANDB_RUN_ID", "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK"} <= exported <= env.keys()
    assert Path(env["TENSORBOARD_DIR"]).is_relative_to(tmp_path / "runs")
    assert job(TENSORBOARD_DIR="/theirs")[0]["TENSORBOARD_DIR"] == "/theirs", "what the user says comes first"


def test_a_fused_job_finds_slime_megatron_and_the_two_models(run: Run, trio: Any, tmp_path: Path) -> None:
    """The engine's own PYTHONPATH goes before what the script set, not in its place."""
    models = {"SENIOR_MODEL": str(trio.senior), "JUNIOR_MODEL": str(trio.junior)}
    command = last_command(run("run_tandem_grpo.sh", "engine.mode=fused", "sampling.max_new_tokens=64", **models))
    env = json.loads(command[command.index("--runtime-env-json") + 1])["env_vars"]
    assert env["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "slime_tandem.engines.fused.models"
    assert {str(REPO), str(tmp_path / "slime"), str(tmp_path / "megatron")} <= set(env["PYTHONPATH"].split(":"))
    flags = flags_of(command)
    override = json.loads(flags["--sglang-json-model-override-args"][0])
    assert override["tandem"]["junior_folder"] == str(trio.junior)
    assert Path(override["tandem"]["tables"]).is_file()
    assert [m["name"] for m in yaml.safe_load(Path(flags["--sglang-config"][0]).read_text())["sglang"]] == ["actor"]


def test_a_fused_job_by_sizes_is_a_plan_and_no_job(run: Run) -> None:
    done = run("run_tandem_grpo.sh", "engine.mode=fused")
    assert done.returncode == 0, done.stderr
    assert "# sizes only: --sglang-json-model-override-args" in done.stdout
    assert "SENIOR_MODEL=qwen3-4B: expected a Hugging Face folder" in run("run_tandem_grpo.sh", DRY_RUN="").stderr


@pytest.mark.parametrize("teacher", ["qwen3-8B", "llama3.1-8B"])
def test_distillation_with_the_same_and_another_vocabulary_over_two_machines(run: Run, teacher: str) -> None:
    done = run(
        "run_opd.sh",
        STUDENT_HF="qwen3-1.7B",
        TEACHER_MODEL=teacher,
        OPD_SELECTOR="tip",
        OPD_RATIO="0.1",
        NODES="2",
        MASTER_ADDR="10.0.0.1",
    )
    flags = flags_of(last_command(done))
    assert "MASTER_ADDR=10.0.0.1 RAY_PORT=6379 bash scripts/train/join_ray.sh" in done.stdout
    settings = yaml.safe_load(Path(flags["--custom-config-path"][0]).read_text())["slime_tandem"]
    assert settings["opd"]["selection"] == {"selector": "tip", "ratio": 0.1}
    assert settings["tandem"] == {"enabled": False}
    assert settings["objective"]["reward_coef"] == 0.0
    servers = yaml.safe_load(Path(flags["--sglang-config"][0]).read_text())["sglang"]
    assert [(m["name"], m["model_path"]) for m in servers] == [("actor", "qwen3-1.7B"), ("teacher", teacher)]
    assert sum(g["num_gpus"] for m in servers for g in m["server_groups"]) == int(flags["--rollout-num-gpus"][0]) == 16


def test_a_suite_prints_each_method(run: Run, tmp_path: Path) -> None:
    methods = {"METHOD_LIST": "pure_opd:1.0:10 tip:0.1:20", "SEEDS": "0", "BACKEND": "slime", "NUM_ROLLOUT": "2"}
    done = run("run_method_suite.sh", STUDENT_HF="qwen3-1.7B", TEACHER_MODEL="qwen3-8B", **methods)
    assert done.returncode == 0, done.stderr
    for name in ("010-pure_opd-1-seed0", "020-tip-0.1-seed0"):
        assert f"submit_slime.sh {tmp_path}/out/{name}/slime_launch" in done.stdout
    assert done.stdout.count("SLIME_FLAGS=(") == 2


def test_joining_machines(run: Run) -> None:
    assert last_command(run("join_ray.sh", MASTER_ADDR="10.0.0.1"))[-4:] == [
        "--address",
        "10.0.0.1:6379",
        "--num-gpus",
        "8",
    ]
    assert run("join_ray.sh").returncode == 2


def test_paths_of_every_kind_arrive_as_they_are(run: Run, tmp_path: Path) -> None:
    """Settings are YAML: an apostrophe, a blank with # or a colon must not cut a path short, nor a number be one."""
    folder = tmp_path / "o'neil: #1, [x] {y}"
    folder.mkdir()
    (tmp_path / "data.jsonl").rename(folder / "it's.jsonl")
    done = run("run_tandem_grpo.sh", OUTPUT_ROOT=str(folder / "out"), PROMPT_DATA=str(folder / "it's.jsonl"), NAME="7")
    flags = flags_of(last_command(done))
    assert flags["--save"] == [str(folder / "out" / "7" / "slime")]
    assert flags["--prompt-data"] == [str(folder / "out" / "7" / "slime_launch" / "prompts.jsonl")]
    suite = run("run_method_suite.sh", BACKEND="slime", STUDENT_HF="qwen3-4B", TEACHER_MODEL="qwen3-8B", SEEDS="0",
                METHOD_LIST="pure_opd:1.0:10", PROMPT_DATA=str(folder / "it's.jsonl"))  # fmt: skip
    assert suite.returncode == 0, suite.stderr


@pytest.mark.parametrize(
    ("script", "changes", "message"),
    [
        ("run_tandem_grpo.sh", {"SLIME_DIR": "/no/such"}, "SLIME_DIR=/no/such: expected a checkout of slime with train.py"),
        ("run_tandem_grpo.sh", {"MEGATRON_LM_DIR": "/no"}, "MEGATRON_LM_DIR=/no: expected a checkout of Megatron-LM"),
        ("run_tandem_grpo.sh", {"SLIME_PYTHON": "/no/python"}, "SLIME_PYTHON=/no/python: expected"),
        ("run_tandem_grpo.sh", {"NODES": "0"}, "NODES=0: expected a whole number above 0"),
        ("run_tandem_grpo.sh", {"GPUS_PER_NODE": "many"}, "GPUS_PER_NODE=many"),
        ("run_tandem_grpo.sh", {"RAY_START_FLAGS": "16"}, "RAY_START_FLAGS=16: expected flags"),
        ("run_tandem_grpo.sh", {"RAY_PORT": "99999"}, "RAY_PORT=99999: expected a port"),
        ("run_tandem_grpo.sh", {"RAY_PORT": "18446744073709551696"}, "RAY_PORT=18446744073709551696: expected a port"),
        ("run_tandem_grpo.sh", {"RAY_PORT": "8265", "DASHBOARD_PORT": "8265"}, "DASHBOARD_PORT=8265: expected another port"),
        ("join_ray.sh", {"MASTER_ADDR": "10.0.0.1", "RAY_PORT": "15000"}, "RAY_PORT=15000: expected a port"),
        ("join_ray.sh", {"MASTER_ADDR": "10.0.0.1", "GPUS_PER_NODE": "-3"}, "GPUS_PER_NODE=-3: expected a whole number"),
        ("run_tandem_grpo.sh", {"DASHBOARD_PORT": "10001"}, "DASHBOARD_PORT=10001: expected a port, and none of 10001 to"),
        ("run_tandem_grpo.sh", {"JOB_ENV": "PATH NO_SUCH"}, "JOB_ENV=NO_SUCH: expected names of exported variables"),
        ("run_tandem_grpo.sh", {"JOB_ENV": "*"}, "JOB_ENV=*: expected names of exported variables"),
        ("run_tandem_grpo.sh", {"JOB_ENV": "--help"}, "JOB_ENV=--help: expected names of exported variables"),
        ("run_tandem_grpo.sh", {"NODES": "2"}, "MASTER_ADDR=127.0.0.1: expected an address that the other machines reach"),
        ("run_tandem_grpo.sh", {"SENIOR_MODEL": "/no/model"}, "SENIOR_MODEL=/no/model: expected a Hugging Face folder"),
        ("run_tandem_grpo.sh", {"DRY_RUN": "0"}, "SENIOR_MODEL=qwen3-4B: expected a Hugging Face folder"),
        ("run_tandem_grpo.sh", {"PROMPT_DATA": "/no.jsonl"}, "PROMPT_DATA=/no.jsonl: expected an existing file"),
        ("run_tandem_grpo.sh", {"NUM_ROLLOUT": "-1"}, "NUM_ROLLOUT=-1"),
        ("run_tandem_grpo.sh", {"STUDENT_TORCH_DIST": "/no"}, "STUDENT_TORCH_DIST=/no: expected a Megatron checkpoint"),
        ("run_opd.sh", {"STUDENT_HF": "qwen3-4B", "TEACHER_MODEL": "qwen3-9B"}, "TEACHER_MODEL=qwen3-9B"),
        ("run_tandem_grpo.sh", {"PROB_PRIMARY": "0.3"}, "PROB_PRIMARY=0.3: expected nothing: this script does not read it"),
        ("run_opd.sh", {"ROLLOUT_BATCH_SIZE": "4"}, "ROLLOUT_BATCH_SIZE=4: expected nothing"),
        ("run_method_suite.sh", {"BACKEND": "slime", "STUDENT_HF": "/no"}, "STUDENT_HF=/no"),
        ("submit_slime.sh", {}, "FOLDER=: expected a folder with launch.sh"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(run: Run, script: str, changes: dict[str, str], message: str) -> None:
    done = run(script, **changes)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Remedy: " in done.stderr


@pytest.mark.parametrize("script", ["run_method_suite.sh", "run_tandem_grpo.sh", "run_opd.sh", "submit_slime.sh"])
@pytest.mark.parametrize("missing", ["all", "filelock"])
def test_a_python_without_the_packages_is_refused_in_one_line(
    run: Run, launch: Path, tmp_path: Path, script: str, missing: str
) -> None:
    python = tmp_path / "bare"
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "filelock.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'filelock'\", name='filelock')"
    )
    code = "-S" if missing == "all" else ""  # -S: no site-packages
    python.write_text(
        f'#!/usr/bin/env bash\nexport PYTHONPATH={tmp_path / "hook"}:$PYTHONPATH\nexec {sys.executable} {code} "$@"\n'
    )
    python.chmod(0o755)
    args = [str(launch)] if script == "submit_slime.sh" else []
    done = run(
        script, *args, SLIME_PYTHON=str(python), BACKEND="slime", STUDENT_HF="qwen3-1.7B", TEACHER_MODEL="qwen3-8B"
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"SLIME_PYTHON={python}: expected a Python with this package's requirements (ModuleNotFoundError: No"
    )
    assert f"Remedy: {python} -m pip install '{REPO}'" in line


def test_joining_without_ray_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    python = tmp_path / "bare"
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    done = run("join_ray.sh", MASTER_ADDR="10.0.0.1", SLIME_PYTHON=str(python), DRY_RUN="")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a Python with Ray (ModuleNotFoundError: No module named 'ray')" in done.stderr


def test_a_setting_that_does_not_hold_ends_it_before_anything_starts(run: Run, tmp_path: Path) -> None:
    done = run("run_tandem_grpo.sh", "tandem.prob_senior=2")
    assert done.returncode == 2
    assert "tandem.prob_senior=2" in done.stderr
    assert not (tmp_path / "out" / "tandem-grpo" / "slime_launch" / "launch.sh").exists()


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    """Launch files of a plan, made by hand."""
    folder = tmp_path / "run" / "slime_launch"
    folder.mkdir(parents=True)
    (folder / "launch.sh").write_text("SLIME_FLAGS=(--name 'a b')\nSERVER_URLS=()\n")
    return folder


@pytest.fixture
def neighbour(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server of somebody else, of the same program."""
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(free_port())]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        yield process
        process.kill()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("code", [0, 3])
def test_it_waits_submits_returns_the_exit_code_and_stops_its_ray_alone(
    run: Run, launch: Path, tmp_path: Path, neighbour: subprocess.Popen[bytes], code: int
) -> None:
    (tmp_path / "code").write_text(str(code))
    done = run("submit_slime.sh", str(launch), DRY_RUN="")
    assert done.returncode == code, done.stderr
    words = (tmp_path / "submitted").read_text().split("\0")[:-1]
    assert words[-3:] == [str(tmp_path / "slime" / "train.py"), "--name", "a b"]
    assert words[words.index("--address") + 1].startswith("http://127.0.0.1:")
    assert not alive(int((tmp_path / "ray.pid").read_text()))
    assert neighbour.poll() is None


def test_a_ray_without_its_dashboard_is_refused_at_once(run: Run, launch: Path, tmp_path: Path) -> None:
    """It would start, and nothing would ever answer."""
    (tmp_path / "minimal").touch()
    done = run("submit_slime.sh", str(launch), DRY_RUN="")
    assert done.returncode == 2
    assert "expected a Python with ray[default]" in done.stderr
    assert not (tmp_path / "ray.pid").exists()


def test_a_running_ray_is_used_and_left_running(
    run: Run, launch: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    port = variables["DASHBOARD_PORT"]
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(tmp_path / "www"), port]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as theirs:
        (launch / "launch.sh").write_text(f"SLIME_FLAGS=(--x)\nSERVER_URLS=(http://127.0.0.1:{port})\n")
        done = run("submit_slime.sh", str(launch), DRY_RUN="", RAY_DASHBOARD=f"http://127.0.0.1:{port}")
        assert done.returncode == 0, done.stderr
        assert theirs.poll() is None
        theirs.kill()
    assert not (tmp_path / "ray.pid").exists()


def test_a_proxy_does_not_stand_between_it_and_its_servers(run: Run, launch: Path, variables: dict[str, str]) -> None:
    """Nothing answers at the proxy's address: a wait through it would end in a time-out."""
    proxy = f"http://127.0.0.1:{free_port()}"
    port = variables["DASHBOARD_PORT"]
    (launch / "launch.sh").write_text(f"SLIME_FLAGS=(--x)\nSERVER_URLS=(http://127.0.0.1:{port})\n")
    none = {"no_proxy": "", "NO_PROXY": ""}
    done = run("submit_slime.sh", str(launch), DRY_RUN="", http_proxy=proxy, SERVER_TIMEOUT="9", **none)
    assert done.returncode == 0, done.stderr


def test_a_server_that_does_not_answer_ends_it_before_training(run: Run, launch: Path, tmp_path: Path) -> None:
    (launch / "launch.sh").write_text(f"SLIME_FLAGS=(--x)\nSERVER_URLS=(http://127.0.0.1:{free_port()})\n")
    done = run("submit_slime.sh", str(launch), DRY_RUN="", SERVER_TIMEOUT="4")
    assert done.returncode == 2
    assert "no answer in 4 s: expected an answer from http://127.0.0.1:" in done.stderr
    assert not (tmp_path / "submitted").exists()
    assert not alive(int((tmp_path / "ray.pid").read_text()))
    assert (tmp_path / "patience").read_text() == "4\n", "Ray's own patience with parts of its dashboard is as long"


@pytest.mark.parametrize(("number", "alone"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_an_interrupt_stops_the_job_and_the_ray(
    launch: Path, tmp_path: Path, variables: dict[str, str], number: signal.Signals, alone: bool
) -> None:
    (tmp_path / "hang").touch()
    env = {**os.environ, **variables, "DRY_RUN": "0"}
    script = REPO / "scripts" / "train" / "submit_slime.sh"
    process = subprocess.Popen(["bash", str(script), str(launch)], env=env, start_new_session=True)
    wait_until((tmp_path / "submitted").exists)
    # A scheduler signals the script alone, Ctrl-C the whole foreground group.
    (os.kill if alone else os.killpg)(process.pid, number)
    assert process.wait(timeout=PATIENCE_S) == 128 + number  # the job would have gone on
    words = (tmp_path / "submitted").read_text().split("\0")
    assert words[words.index("--submission-id") + 1] in (tmp_path / "stopped").read_text()
    assert not alive(int((tmp_path / "ray.pid").read_text()))


def test_the_published_quick_start_is_what_is_launched(run: Run, tmp_path: Path) -> None:
    """TA-OPD's own variables: the checkpoint is the reference, models, prompts and methods are the job's, no BACKEND."""
    checkpoint = tmp_path / "student-torch-dist"
    (checkpoint / "iter_0000001").mkdir(parents=True)
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("1")
    (checkpoint / "iter_0000001" / ".metadata").touch()
    methods = "pure_opd:1.0:10 teachability:0.10:20 entropy:0.10:30 teachability_entropy:0.10:40 tip:0.10:50"
    done = run(
        "run_method_suite.sh",
        STUDENT_HF="qwen3-1.7B",
        TEACHER_MODEL="qwen3-8B",
        STUDENT_TORCH_DIST=str(checkpoint),
        OPD_TOPK_METRICS_K="16",
        METHOD_LIST=methods,
        SEEDS="0",
        RULES="reference",
        OPD_TOKEN_BANK_DIR=str(tmp_path / "bank"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"--ref-load {checkpoint}") == 5
    for name in ("010-pure_opd-1-seed0", "020-teachability-0.1-seed0", "050-tip-0.1-seed0"):
        assert f"submit_slime.sh {tmp_path}/out/{name}/slime_launch" in done.stdout


def published_blocks() -> list[str]:
    text = (REPO / "docs" / "published.md").read_text()
    return [block.split("```")[0] for block in text.split("```bash\n")[1:]]


def test_the_published_quick_start_word_for_word(variables: dict[str, str], tmp_path: Path) -> None:
    """The page's own lines in a shell, by the script's published name; models of published sizes in the folders' places."""
    place = tmp_path / "a b's"  # blanks and quotes go through
    (place / "data").mkdir(parents=True)
    (tmp_path / "slime").rename(place / "slime_ta_opd")
    (tmp_path / "megatron").rename(place / "Megatron-LM")
    (tmp_path / "data.jsonl").rename(place / "data" / "train.jsonl")
    checkpoint = place / "student-torch-dist"
    (checkpoint / "iter_0000001").mkdir(parents=True)
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("1")
    (checkpoint / "iter_0000001" / ".metadata").touch()
    (place / "slime-tandem").symlink_to(REPO)
    lines = published_blocks()[0]
    printed = [
        "cd slime_ta_opd", "export SLIME_DIR=$PWD", "export STUDENT_HF=/path/to/student-hf",
        "bash run_teachability_opd_method_suite_20260515.sh",
    ]  # fmt: skip
    assert set(printed) <= set(lines.splitlines()), "as its README has them"
    script = lines.replace("/path/to/teacher-hf", "qwen3-8B").replace("/path/to/student-hf", "qwen3-1.7B")
    script = "set -e\nHERE=$PWD\n" + script.replace("/path/to", '"$HERE"')
    # The published second list, in the same shell.
    script += 'export NUM_ROLLOUT=50\nexport METHOD_LIST="pure_opd:1.0:10 teachability:0.10:20 tip:0.10:30"\n'
    script += "bash run_teachability_opd_method_suite_20260515.sh\n"
    unset = {"SLIME_DIR", "MEGATRON_LM_DIR", "OUTPUT_ROOT", "PROMPT_DATA", "SENIOR_MODEL", "JUNIOR_MODEL"}
    env = {name: value for name, value in {**os.environ, **variables}.items() if name not in unset}
    done = subprocess.run(
        ["bash", "-c", script], cwd=place, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    suite = place / "outputs" / "slime_opd" / "teachability_method_suite_k16_seed1_20260515"
    launched = [shlex.split(line)[2] for line in done.stdout.splitlines() if line.startswith("bash ")]
    names = ("010-pure_opd-1", "020-teachability-0.1", "030-entropy-0.1", "040-teachability_entropy-0.1", "050-tip-0.1")
    names += ("010-pure_opd-1", "020-teachability-0.1", "030-tip-0.1")
    assert launched == [str(suite / f"{name}-seed1" / "slime_launch") for name in names]
    words = [shlex.split(line) for line in done.stdout.splitlines() if "--ref-load" in line]
    assert [line[line.index("--ref-load") + 1] for line in words] == [str(checkpoint)] * 8
    assert not suite.exists(), "a dry run"


def test_by_its_published_name_the_selection_is_the_published_one(run: Run, tmp_path: Path) -> None:
    name = "run_teachability_opd_method_suite_20260515.sh"
    models = {"STUDENT_HF": "qwen3-1.7B", "TEACHER_MODEL": "qwen3-8B", "METHOD_LIST": "tip:0.1:5"}
    done = run(name, SEED_LABEL="seed7", OPD_EXACT_CMASS="1", **models)
    assert done.returncode == 0, f"a variable of the published selection alone: {done.stderr}"
    assert f"{tmp_path}/out/teachability_method_suite_k16_seed1_20260515/005-tip-0.1-seed7/slime_launch" in done.stdout
    for changes in ({"SEED_LABEL": "first"}, {"SEED_LABEL": "seed1", "SEEDS": "0 1"}):
        done = run(name, **models, **changes)
        assert (done.returncode, done.stderr.split("=")[0]) == (2, "SEED_LABEL"), "it would change nothing"


def test_the_published_quick_start_as_it_is_printed_is_refused_by_name(run: Run) -> None:
    for script in ("run_method_suite.sh", "run_teachability_opd_method_suite_20260515.sh"):
        done = run(script, STUDENT_HF="/path/to/student-hf", TEACHER_MODEL="/path/to/teacher-hf")
        assert done.returncode == 2
        assert "STUDENT_HF=/path/to/student-hf: expected a Hugging Face folder" in done.stderr
        done = run(script, STUDENT_HF="qwen3-4B", TEACHER_MODEL="qwen3-8B", STUDENT_TORCH_DIST="/path/to/x")
        assert done.returncode == 2
        assert "STUDENT_TORCH_DIST=/path/to/x: expected a Megatron checkpoint" in done.stderr


def test_the_papers_tandem_recipe_is_planned(run: Run) -> None:
    """Self-paired, temperature 0.6, clip 0.2, 16 prompts of 8, two updates a rollout."""
    paper = str(REPO / "scripts" / "train" / "configs" / "tandem_paper.yaml")
    flags = flags_of(last_command(run("run_tandem_grpo.sh", JUNIOR_MODEL="qwen3-4B", CONFIG=paper)))
    assert (flags["--rollout-temperature"], flags["--num-steps-per-rollout"], flags["--rollout-batch-size"]) == (
        ["0.6"], ["2"], ["16"],
    )  # fmt: skip
    assert flags["--rollout-max-response-len"] == ["3000"]


def test_the_papers_evaluation_sets_become_prompt_files(tmp_path: Path) -> None:
    """verl's rows: messages, the label below reward_model, the set's name, and the rest."""
    source, made = tmp_path / "test.jsonl", tmp_path / "eval" / "aime24.jsonl"
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": 4, "style": "rule"}}
    source.write_text(json.dumps({**row, "data_source": "aime24", "extra_info": {"index": 7}}) + "\n")
    command = [sys.executable, str(REPO / "scripts" / "train" / "prompts_from_verl.py"), str(source), str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"1 prompts in {made}\n")
    written = {"prompt": row["prompt"], "label": "4", "task": "aime24", "metadata": {"extra_info": {"index": 7}}}
    assert json.loads(made.read_text()) == written
    source.write_text(json.dumps({"prompt": row["prompt"]}) + "\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "expected prompt and reward_model.ground_truth" in done.stderr) == (1, True)

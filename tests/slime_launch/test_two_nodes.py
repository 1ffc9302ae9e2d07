"""scripts/slime/two_nodes.sh: what it would run, what it refuses, and two real namespaces where the kernel gives some."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slime" / "two_nodes.sh"
JOB = SCRIPT.with_name("two_nodes_cpu.sh")


def call(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("NODES", "MASTER_ADDR", "JOB_ENV", "RAY_START_FLAGS")
    }
    return subprocess.run(
        ["bash", str(SCRIPT), *words], env={**environment, **variables}, capture_output=True, text=True, timeout=120
    )


def test_a_dry_run_prints_every_command_and_makes_nothing(tmp_path: Path) -> None:
    done = call("bash", "job.sh", "engine.mode=fused", DRY_RUN="1", SUBNET="10.9.8", OUTPUT_ROOT=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "type veth peer name eth0" in lines[2]
    assert sum("address add 10.9.8." in line for line in lines) == 2
    assert lines[-2].startswith("setsid ip netns exec tandem")
    assert "scripts/train/join_ray.sh" in lines[-2]
    assert re.fullmatch(r"ip netns exec tandem\d+-1 bash job.sh engine.mode=fused ", lines[-1])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "variables", "match"),
    [
        ([], {}, "COMMAND="),
        (["true"], {"SUBNET": "10.9"}, "SUBNET=10.9"),
        (["true"], {"NODE_CPUS": "0"}, "NODE_CPUS=0"),
        (["true"], {"LOSE_WHEN": str(SCRIPT)}, "LOSE_WHEN="),
    ],
)
def test_what_it_cannot_do_is_refused(words: list[str], variables: dict[str, str], match: str) -> None:
    done = call(*words, DRY_RUN="1", **variables)
    assert done.returncode == 2
    assert match in done.stderr


def _namespaces() -> bool:
    made = shutil.which("ip") and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
    return bool(made)


@pytest.mark.skipif(not _namespaces(), reason="no network namespaces here (root and CAP_SYS_ADMIN)")
def test_two_nodes_have_addresses_of_their_own_and_nothing_is_left(tmp_path: Path) -> None:
    """The second node's Ray is a stand-in that answers on its own address; the exit code is the command's."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec python3 -m http.server 8000 --bind 10.9.7.2 --directory /\n")
    python.chmod(0o755)
    waits = "until curl -sf --noproxy '*' -o /dev/null http://10.9.7.2:8000; do sleep 0.1; done"
    asks = f"{waits}; echo $MASTER_ADDR; ip netns identify $$; exit 7"
    done = call("bash", "-c", asks, SUBNET="10.9.7", SLIME_PYTHON=str(python), OUTPUT_ROOT=str(tmp_path))
    assert done.returncode == 7, done.stderr
    address, namespace = done.stdout.split()
    assert address == "10.9.7.1"
    assert namespace.startswith("tandem")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    assert not {namespace, namespace.removesuffix("1") + "2"} & set(left)


@pytest.mark.skipif(
    not os.environ.get("SLIME_TANDEM_SLIME_TRAIN"), reason="SLIME_TANDEM_SLIME_TRAIN is not set: half an hour"
)
@pytest.mark.skipif(not _namespaces(), reason="no network namespaces here (root and CAP_SYS_ADMIN)")
def test_the_engines_node_is_lost_and_the_job_goes_on(slime_here, trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """slime's train.py with the trainer on the first node and the engine on the second, which is lost behind a checkpoint."""
    models, prompts = tmp_path / "models", tmp_path / "prompts.jsonl"
    models.mkdir()
    for role in ("senior", "junior"):
        (models / role).symlink_to(getattr(trio, role))
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 1 ="}], "label": str(i + 1)} for i in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = tmp_path / "two-nodes" / "slime" / "latest_checkpointed_iteration.txt"
    known = {"SLIME_SOURCES": str(slime_here.folder), "MODELS": str(models), "PROMPT_DATA": str(prompts)}
    known |= {"OUTPUT_ROOT": str(tmp_path), "SUBNET": "10.9.6"}

    def job(**more: str) -> tuple[int, str]:
        command = ["bash", str(JOB), "cluster.colocate=false", "cluster.trainer_gpus=1"]
        done = subprocess.run(
            command, env={**os.environ, **known, **more}, capture_output=True, text=True, timeout=2400
        )
        return done.returncode, done.stdout + done.stderr

    code, log = job(LOSE_WHEN=str(saved))
    assert code == 1, log[-4000:]
    assert "the second node is lost now" in log
    assert re.search(r"bundle +0, .* node: 10\.9\.6\.1,", log), "the trainer's"
    assert re.search(r"bundle +1, .* node: 10\.9\.6\.2,", log), "the engine's"
    begun = int(saved.read_text())
    code, log = job()
    assert code == 0, log[-4000:]
    sent = dict(re.findall(r"channels sent (\d+): samples \d+ check-sum (\w+)", log))
    assert set(sent) == {str(n) for n in range(begun + 1, 3)}
    assert set(sent.values()) == set(re.findall(r"channels received: tokens \d+ check-sum (\w+)", log))

"""scripts/slime/two_nodes.sh: what it would run, what it refuses, and two real namespaces where the kernel gives some."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slime" / "two_nodes.sh"


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

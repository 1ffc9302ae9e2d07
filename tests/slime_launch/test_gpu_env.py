"""scripts/slime/gpu_env.sh: the archives of a machine without a network, unpacked once, and the path that they make."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def archive(path: Path, *names: str) -> None:
    with tarfile.open(path, "w:xz") as tar:
        for name in names:
            file = path.parent / "file"
            file.write_text("kept")
            tar.add(file, name)


def gpu_env(kit: Path, work: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(REPO / "scripts" / "slime" / "gpu_env.sh"), str(kit), str(work)]
    env = {**os.environ, "SITE": str(work / "site"), **more}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    folder = tmp_path / "kit"
    folder.mkdir()
    archive(folder / "ray.txz", "first/ray.py", "last/yaml.py")
    archive(folder / "source.txz", "slime/train.py", "Megatron-LM/megatron/core.py")
    archive(folder / "site.txz", "sglang/a.py", "megatron/core.py")
    archive(folder / "tasks.txz", "reasoning_gym.py")
    return folder


def test_it_unpacks_once_and_slimes_megatron_is_found_first(kit: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert gpu_env(kit, work, MORE="/more").returncode == 0
    assert not (work / "site" / "megatron").exists(), "the one of SGLang's archive"
    told = subprocess.run(
        ["bash", "-c", f"source {work}/env.sh && echo $PYTHONPATH:$SLIME_DIR && echo $PATH"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    slime, last = work / "source" / "slime", work / "ray" / "last"
    megatron, first = work / "source" / "Megatron-LM", work / "ray" / "first"
    assert told[1].partition(":")[0] == str(last / "bin")
    assert told[0] == f"{REPO}:{slime}:{megatron}:{first}:{work / 'site'}:{last}:{work / 'tasks'}:/more:{slime}"
    assert (work / "tasks" / "reasoning_gym.py").exists()
    (first / "ray.py").write_text("changed")
    for name in ("ray", "source", "site", "tasks"):
        (kit / f"{name}.txz").unlink()
    assert gpu_env(kit, work).returncode == 0
    assert (first / "ray.py").read_text() == "changed"


def test_a_cut_archive_is_unpacked_anew(kit: Path, tmp_path: Path) -> None:
    whole = (kit / "source.txz").read_bytes()
    (kit / "source.txz").write_bytes(whole[: len(whole) // 2])
    assert gpu_env(kit, tmp_path / "work").returncode != 0
    assert not (tmp_path / "work" / "env.sh").exists()
    (kit / "source.txz").write_bytes(whole)
    assert gpu_env(kit, tmp_path / "work").returncode == 0
    assert (tmp_path / "work" / "source" / "slime" / "train.py").read_text() == "kept"


def test_a_missing_archive_is_named(kit: Path, tmp_path: Path) -> None:
    (kit / "ray.txz").unlink()
    done = gpu_env(kit, tmp_path / "work")
    assert done.returncode == 3
    assert f"{kit / 'ray.txz'}: expected an archive; make it with make_gpu_kit.sh" in done.stderr


def test_what_comes_later_joins_the_path_of_what_was_there(kit: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.txz"
    (kit / "ray.txz").rename(later)
    (kit / "source.txz").unlink()
    assert gpu_env(kit, tmp_path / "work", NEED="").returncode == 0
    assert (tmp_path / "work" / "site" / "sglang" / "a.py").exists()
    assert "source.txz: expected an archive" in gpu_env(kit, tmp_path / "work", NEED="source").stderr
    later.rename(kit / "ray.txz")
    assert gpu_env(kit, tmp_path / "work", NEED="ray").returncode == 0
    assert (tmp_path / "work" / "ray" / "first" / "ray.py").exists()

"""What slime must be given, as `slime-tandem config --slime` prints it; needs no SGLang."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from slime_tandem import cli
from slime_tandem.engines.fused.internals import KNOWN_VERSIONS
from slime_tandem.engines.fused.launch import PYTHON_ENV, FusedServer, Sglang, catch_up_of, slime_settings
from slime_tandem.engines.serve_options import API_KEY_ENV, ServeOptions
from slime_tandem.errors import ConfigError, ModelError


def python_with_sglang(folder: Path) -> str:
    """A stand-in interpreter that says it has SGLang."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\necho '{json.dumps({'version': KNOWN_VERSIONS[0], 'cuda': False})}'\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def config_file(folders: dict[str, Path], tmp_path: Path) -> str:
    models = {role: str(folders[f"qwen3-{role}"]) for role in ("senior", "junior")}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"models": models, "opd": {"enabled": False}}))
    return str(tmp_path / "c.yaml")


def test_a_shell_can_read_what_is_printed(
    config_file: str, tmp_path: Path, tables: dict[str, frozenset[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "with 'quotes' and spaces"
    assert cli.main(["config", "--check", config_file, "--set", "engine.mode=fused", "--slime", str(folder)]) == 0
    script = (
        capsys.readouterr().out + 'printf "%s\\n" "$SGLANG_EXTERNAL_MODEL_PACKAGE" "$PYTHONPATH" "${SLIME_FLAGS[@]}"'
    )
    env = {**os.environ, "PYTHONPATH": "/slime:/Megatron-LM"}
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, env=env)
    package, path, *flags = done.stdout.splitlines()
    assert path.endswith(":/slime:/Megatron-LM"), "what the launch script put there stays"
    assert package == "slime_tandem.engines.fused.models"
    override = json.loads(flags[flags.index("--sglang-json-model-override-args") + 1])
    assert override["num_hidden_layers"] == 5
    file = Path(override["tandem"]["tables"])
    assert file.parent == folder
    assert hashlib.sha256(file.read_bytes()).hexdigest() == override["tandem"]["tables_sha256"]
    rows = [frozenset(np.flatnonzero(row).tolist()) for row in np.load(file)]
    assert tables["word"] in rows
    assert "--sglang-enable-weights-cpu-backup" in flags


def test_the_attention_reaches_slime(config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["config", "--check", config_file, "--slime", str(tmp_path / "f"), "--set"]
    assert cli.main([*argv, "engine.fused_attention=every_step"]) == 2
    assert "engine.fused_attention" in capsys.readouterr().err, "of no effect on two servers"
    assert cli.main([*argv, "engine.mode=fused", "engine.fused_attention=every_step"]) == 0
    assert '"catch_up": null' in capsys.readouterr().out
    assert cli.main([*argv, "engine.mode=fused"]) == 0
    assert '"catch_up": {}' in capsys.readouterr().out, "the default"


def test_the_prefill_reaches_slime(config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["config", "--check", config_file, "--slime", str(tmp_path / "f"), "--set"]
    assert cli.main([*argv, "engine.fused_prefill=triton"]) == 2
    assert "engine.fused_prefill" in capsys.readouterr().err, "of no effect on two servers"
    assert cli.main([*argv, "engine.mode=fused", "engine.fused_prefill=triton"]) == 0
    assert '"prefill": "triton"' in capsys.readouterr().out
    assert cli.main([*argv, "engine.mode=fused"]) == 0
    assert '"prefill": "auto"' in capsys.readouterr().out, "the default"


def test_flashinfer_without_a_gpu_is_refused_before_a_start(folders: dict[str, Path], tmp_path: Path) -> None:
    pair = folders["qwen3-senior"], folders["qwen3-junior"]
    sglang = Sglang(python_with_sglang(tmp_path), prefill="flashinfer")
    with pytest.raises(ConfigError, match=r"engine\.fused_prefill"):
        FusedServer(*pair, tables=[], sglang=sglang, log_file=tmp_path / "log")


def test_without_a_junior_a_fused_engine_is_refused(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "config",
        "--check",
        config_file,
        "--set",
        "engine.mode=fused",
        "tandem.enabled=false",
        "--slime",
        str(tmp_path / "f"),
    ]
    assert cli.main(argv) == 2
    assert "engine.mode" in capsys.readouterr().err
    assert not (tmp_path / "f").exists()


def test_a_pair_that_does_not_fit_and_a_folder_that_cannot_be(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model_type"):
        slime_settings(folders["qwen3-senior"], folders["llama-junior"], [frozenset({1})], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="folder of the tables"):
        slime_settings(folders["qwen3-senior"], folders["qwen3-junior"], [frozenset({1})], tmp_path / "file" / "x")


@pytest.mark.parametrize("content", ["[1.5]", "[true]", '"12"', '{"1": 2}', "[1e999]", "7", "[-1]", "{", "[" * 100_000])
def test_boundary_ids_that_are_no_list_of_ids_are_refused(
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str,
) -> None:
    (tmp_path / "ids.json").write_text(content)
    monkeypatch.setenv(PYTHON_ENV, python_with_sglang(tmp_path))
    pair = [str(folders["qwen3-senior"]), str(folders["qwen3-junior"])]
    assert cli.main(["serve", "--port", "0", "--boundary-ids", str(tmp_path / "ids.json"), "--fused", *pair]) == 2
    assert "boundary" in capsys.readouterr().err


def test_the_key_is_in_no_command_line_and_reaches_sglang_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    python = python_with_sglang(tmp_path)
    pair = folders["qwen3-senior"], folders["qwen3-junior"]
    options = ServeOptions(api_key="open sesame", threads=2)
    server = FusedServer(*pair, options, tables=[], sglang=Sglang(python), log_file=tmp_path / "log")
    try:
        command, env = server._command(), server._environment()
    finally:
        server.stop()
    assert not [part for part in command if "sesame" in part]
    assert (env[API_KEY_ENV], env["OMP_NUM_THREADS"]) == ("open sesame", "2")
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "srt" / "plugins.py").write_text("def load_plugins(): pass\n")
    (tmp_path / "sglang" / "launch_server.py").write_text(
        f"""
import json, os, types
def kill_process_tree(pid, include_parent): pass
def prepare_server_args(argv): return types.SimpleNamespace(argv=argv)
def run_server(a): print(json.dumps([a.argv, a.api_key, repr(a.api_key), {API_KEY_ENV!r} in os.environ]))
"""
    )
    env = {**env, "PYTHONPATH": os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])}
    run = [sys.executable, "-m", "slime_tandem.engines.fused.main", str(os.getpid()), *server._flags]
    out = subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout.splitlines()[0]
    assert json.loads(out) == [server._flags, "open sesame", "***", False]
    sglang = Sglang(python, args=("--api-key", "of the user"))
    with pytest.raises(ConfigError, match=r"engine\.sglang_args='\(not shown\)'"):
        FusedServer(*pair, tables=[], sglang=sglang, log_file=tmp_path / "log")


@pytest.mark.parametrize("flags", [("--max-batch", "8"), ("--cache-tokens", "512"), ("--allowed-hosts", "box")])
def test_serve_passes_over_no_flag_that_a_fused_server_does_not_take(
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, str],
) -> None:
    monkeypatch.setenv(PYTHON_ENV, python_with_sglang(tmp_path))
    pair = [str(folders["qwen3-senior"]), str(folders["qwen3-junior"])]
    assert cli.main(["serve", "--port", "0", *flags, "--fused", *pair]) == 2
    assert flags[0].strip("-").replace("-", "_") in capsys.readouterr().err


def test_options_of_the_embedded_server_alone_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    pair = folders["qwen3-senior"], folders["qwen3-junior"]
    with pytest.raises(ConfigError, match=r"cache_tokens=64: .*FusedServer"):
        FusedServer(*pair, ServeOptions(cache_tokens=64), tables=[], log_file=tmp_path / "log")


def test_auto_catches_up_where_the_heads_fit(tmp_path: Path) -> None:
    found = {}
    for size in (8, 16, 80, 128):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"head_dim": size, "hidden_size": 64, "num_attention_heads": 4}))
        found[size] = [catch_up_of(name, folder) for name in ("auto", "every_step")]
    assert found == {8: [None, None], 16: [{}, None], 80: [None, None], 128: [{}, None]}

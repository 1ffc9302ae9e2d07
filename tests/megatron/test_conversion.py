"""Hugging Face <-> torch_dist: exact both ways, readable by Megatron at any tensor parallel size, stopped and gone on with."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import runpy
import shlex
import shutil
import subprocess
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import make_model
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import AutoConfig, AutoModelForCausalLM

from slime_tandem import cli
from slime_tandem.config import RunConfig
from slime_tandem.engines.sglang import free_port
from slime_tandem.errors import CheckpointError, ConfigError, ModelError
from slime_tandem.megatron import conversion
from slime_tandem.megatron.architecture import architecture_of, load_hf_config
from slime_tandem.megatron.conversion import HfWeights, Job, convert, verify
from slime_tandem.megatron.policy import MegatronPolicy
from slime_tandem.megatron.recorded import KEY
from slime_tandem.megatron.torch_dist import TorchDistReader, dist_key, find_torch_dist
from slime_tandem.megatron.weights import load_hf_folder, megatron_recipes
from slime_tandem.slime_launch.sizes import flags_of_folder

from ..waiting import PATIENCE_S

SIZES = {
    "vocab_size": 54,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Hugging Face folders of tiny random models, each made once."""
    made: dict[tuple[Any, ...], Path] = {}

    def folder(kind: str = "qwen3", *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
        key = (kind, tied, dtype)
        if key not in made:
            extra = {"head_dim": 16} if kind == "qwen3" else {}
            config = AutoConfig.for_model(kind, **SIZES, **extra, tie_word_embeddings=tied)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config)
                for parameter in model.parameters():  # norms and biases that are all alike would hide a mix-up
                    parameter.data.normal_(0.0, 0.3)
            made[key] = tmp_path_factory.mktemp("hf") / kind
            model.to(dtype).save_pretrained(made[key])
            (made[key] / "tokenizer.json").write_text("{}")
        return made[key]

    return folder


def same(a: Path, b: Path) -> bool:
    x, y = load_hf_folder(a), load_hf_folder(b)
    return x.keys() == y.keys() and all(x[n].dtype == y[n].dtype and torch.equal(x[n], y[n]) for n in x)


@pytest.mark.parametrize(
    ("kind", "tied", "dtype"),
    [("qwen3", True, torch.bfloat16), ("qwen2", False, torch.float32), ("llama", False, torch.bfloat16)],
)
def test_there_and_back_is_exact_in_many_files(
    make: Make, tmp_path: Path, kind: str, tied: bool, dtype: torch.dtype
) -> None:
    hf, said = make(kind, tied=tied, dtype=dtype), []
    _, dist = convert(Job(hf, tmp_path / "dist", max_file_bytes=8000), said.append)
    assert len(list(dist.glob("*.distcp"))) > 3
    back, _ = convert(Job(tmp_path / "dist", tmp_path / "back", like=hf, max_file_bytes=8000), said.append)
    assert len(list(back.glob("*.safetensors"))) > 3
    assert same(hf, back)
    assert json.loads((back / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert (back / "tokenizer.json").is_file()
    AutoModelForCausalLM.from_pretrained(back)
    assert not any(line.startswith("left out") for line in said)
    assert {p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")} == {"dist", "back"}


def test_keys_and_sizes_are_those_that_megatron_itself_saves(make: Make, tmp_path: Path) -> None:
    hf = make()
    MegatronPolicy.from_hf(hf, None).save_checkpoint(tmp_path / "own", {})
    _, ours = convert(Job(hf, tmp_path / "dist"), lambda _: None)
    theirs, mine = TorchDistReader(tmp_path / "own"), TorchDistReader(ours)
    assert {k: v.size for k, v in theirs._tensors.items()} == {k: v.size for k, v in mine._tensors.items()}
    assert {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    } < set(mine.keys)
    common = torch.load(ours / "common.pt", weights_only=False)
    assert (common["checkpoint_version"], common["args"].num_query_groups) == (3.0, 2)
    # A checkpoint of the local runtime is a source, too.
    convert(Job(tmp_path / "own", tmp_path / "back", like=hf), lambda _: None)
    assert same(hf, tmp_path / "back")


def test_verify_loads_through_megatron_and_finds_a_changed_weight(make: Make, tmp_path: Path) -> None:
    hf = make("qwen2")
    _, dist = convert(Job(hf, tmp_path / "dist"), lambda _: None)
    assert verify(hf, dist, by_megatron=True, say=lambda _: None) <= 1e-5
    weights = load_hf_folder(hf)
    weights["model.layers.1.self_attn.v_proj.bias"][3] += 0.5
    other = tmp_path / "other"
    other.mkdir()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_bytes((hf / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"--verify=.*report this"):
        verify(other, dist, by_megatron=False, say=lambda _: None)
    weights["model.layers.1.self_attn.v_proj.bias"][3] = 3e38  # finite, and what is computed with it is not
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"--verify=nan: expected finite log-probs"):
        verify(other, dist, by_megatron=False, say=lambda _: None)


def test_a_runs_folder_of_checkpoints_is_told_from_a_model(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in ("step-000001", "step-000002"):
        MegatronPolicy.from_hf(make(), None).save_checkpoint(tmp_path / "checkpoints" / step, {})
    with pytest.raises(ConfigError, match=r"expected one checkpoint.*name one, e\.g\. .*step-000002"):
        convert(Job(tmp_path / "checkpoints", tmp_path / "out", like=make()))
    assert cli.main(["convert", str(tmp_path / "checkpoints"), str(tmp_path / "out")]) == 2
    assert "name one, e.g." in capsys.readouterr().err


def test_a_stopped_conversion_goes_on_and_makes_damaged_files_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, said, written = make(), [], []
    write = conversion.write_pieces

    def stops(path: Path, *rest: Any) -> Any:
        written.append(path.name)
        if len(written) == 4:
            raise KeyboardInterrupt
        return write(path, *rest)

    monkeypatch.setattr(conversion, "write_pieces", stops)
    job = Job(hf, tmp_path / "dist", max_file_bytes=8000)
    with pytest.raises(KeyboardInterrupt) as stopped:
        convert(job, said.append)
    assert "goes on from there" in stopped.value.__notes__[0]
    assert not job.output.exists()
    damaged = tmp_path / ".dist.converting" / "release" / written[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    convert(job, said.append)
    assert written[4] == written[1]
    assert written[5] == written[3]
    assert not set(written[4:]) & {written[0], written[2]}
    convert(Job(job.output, tmp_path / "back", like=hf), said.append)
    assert same(hf, tmp_path / "back")


def test_work_on_another_source_is_not_gone_on_with(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "finish_folder", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(Job(make("llama"), tmp_path / "dist"), said.append)
    convert(Job(make("qwen2"), tmp_path / "dist"), said.append)
    assert any(line.startswith("starting anew") for line in said)
    convert(Job(tmp_path / "dist", tmp_path / "back", like=make("qwen2")), said.append)
    assert same(make("qwen2"), tmp_path / "back")


def test_nothing_is_overwritten_without_force(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "dist"
    output.mkdir()
    (output / "precious").touch()
    argv = ["convert", str(make()), str(output)]
    assert cli.main(argv) == 2
    assert "pass --force" in capsys.readouterr().err
    assert (output / "precious").exists()
    assert cli.main([*argv, "--force", "--verify"]) == 0
    assert "verified: log-probs differ by at most" in capsys.readouterr().out
    assert not (output / "precious").exists()
    assert find_torch_dist(output) == output / "release"


def test_an_output_that_holds_what_is_read_is_refused(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replacement would delete the source: a model is lost by one wrong argument."""
    zoo = tmp_path / "zoo"
    source = zoo / "model"
    shutil.copytree(make(), source)
    before = sorted(p.name for p in source.iterdir())
    (tmp_path / "link").symlink_to(zoo)
    (tmp_path / "file").touch()
    dist = tmp_path / "dist"
    convert(Job(source, dist), lambda _: None)
    monkeypatch.chdir(source)
    for argv, text in (
        ([str(source), str(source)], "does not hold source"),
        ([str(source), str(zoo)], "does not hold source"),
        ([str(source), str(tmp_path / "link" / "model")], "does not hold source"),
        ([str(dist), str(source), "--like", str(source)], "does not hold --like"),
        ([str(source), "."], "a path that ends in a name"),
        ([str(source), "/"], "a path that ends in a name"),
        ([str(make()), str(tmp_path / "link")], "no link and no file"),
        ([str(make()), str(tmp_path / "file")], "no link and no file"),
        ([str(make()), str(tmp_path / "new"), "--max-file-gib", "inf"], "a finite number above 0"),
    ):
        assert cli.main(["convert", *argv, "--force"]) == 2, argv
        assert text in capsys.readouterr().err
    assert sorted(p.name for p in source.iterdir()) == before
    assert (tmp_path / "link").is_symlink()
    assert {p.name for p in tmp_path.iterdir()} == {"zoo", "link", "file", "dist", ".dist.lock"}
    assert [p.name for p in zoo.iterdir()] == ["model"]


@pytest.mark.parametrize("at", ["removal of the old", "second rename"])
def test_a_kill_while_the_output_is_exchanged_is_gone_on_with(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """As SIGKILL leaves it: nothing behind that point happens, not even the removal of the record."""
    output = tmp_path / "dist"
    for name in ("dist", ".dist.replaced"):  # the second: left by an earlier kill
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    said: list[str] = []
    rename = Path.rename

    def stop(path: Path, target: Path) -> Path:
        if path.name.endswith(".converting"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        if at == "second rename":
            patch.setattr(Path, "rename", stop)
        else:
            patch.setattr(conversion.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(Job(make(), output, force=True), said.append)
    said.clear()
    convert(Job(make(), output, force=True), said.append)
    assert not any("starting anew" in line for line in said)
    assert any("there already" in line for line in said)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".lock") == ["dist"]
    assert "progress.json" not in {p.name for p in output.iterdir()}
    convert(Job(output, tmp_path / "back", like=make()), said.append)
    assert same(make(), tmp_path / "back")


@pytest.mark.parametrize("record", ["{}", "[]", '{"plan": 1}', "", "{"])
def test_a_record_that_is_none_is_begun_anew(make: Make, tmp_path: Path, record: str) -> None:
    (tmp_path / ".dist.converting").mkdir()
    (tmp_path / ".dist.converting" / "progress.json").write_text(record)
    convert(Job(make(), tmp_path / "dist"), lambda _: None)
    assert find_torch_dist(tmp_path / "dist") == tmp_path / "dist" / "release"


def test_what_torchs_writer_says_of_a_full_disk_is_an_error_with_a_remedy(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(conversion, "write_pieces", full)
    with pytest.raises(CheckpointError, match="a disk that takes the files"):
        convert(Job(make(), tmp_path / "dist"), lambda _: None)


def test_memory_holds_one_parameter_and_its_sources(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make()
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = HfWeights.read

    def counting(self: HfWeights, name: str) -> torch.Tensor:
        nonlocal most
        alive.append(weakref.ref(tensor := read(self, name)))
        most = max(most, sum(t.nbytes for ref in alive if (t := ref()) is not None))
        return tensor

    monkeypatch.setattr(HfWeights, "read", counting)
    convert(Job(hf, tmp_path / "dist"), lambda _: None)
    largest = max(sum(HfWeights(hf).sizes[s] for s in r.sources) for r in megatron_recipes(_arch(hf)).values())
    assert len(alive) > 20
    assert most <= largest


def _arch(folder: Path) -> Any:
    return architecture_of(load_hf_config(folder))


_RANK = """
import dataclasses, sys, torch, torch.distributed as dist
from pathlib import Path
from slime_tandem.megatron import architecture, weights
from slime_tandem.megatron.checkpoint import load_sharded
from slime_tandem.megatron.policy import described_parameters
from megatron.core import parallel_state
hf, folder, store, out, rank = *map(Path, sys.argv[1:5]), int(sys.argv[5])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
made = weights.transformer_config_from_hf
weights.transformer_config_from_hf = lambda c: dataclasses.replace(made(c), tensor_model_parallel_size=2)
model = weights.build_model(architecture.load_hf_config(hf))
with torch.serialization.safe_globals([__import__("argparse").Namespace]):
    loaded = load_sharded({"model": described_parameters(model)}, folder)["model"]
torch.save({n: loaded[n].contiguous() for n, _ in model.named_parameters()}, out / f"{rank}.pt")
dist.destroy_process_group()
"""


def test_megatron_loads_it_at_tensor_parallel_size_two(make: Make, tmp_path: Path) -> None:
    hf = make("qwen2")
    _, dist = convert(Job(hf, tmp_path / "dist"), lambda _: None)
    command = [sys.executable, "-W", "ignore", "-c", _RANK, str(hf), str(dist), str(tmp_path / "store"), str(tmp_path)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen([*command, str(r)], env=env, stderr=subprocess.PIPE, text=True) for r in range(2)]
    try:
        errors = [process.communicate(timeout=PATIENCE_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert [process.returncode for process in ranks] == [0, 0], errors
    halves = [torch.load(tmp_path / f"{r}.pt") for r in range(2)]
    weights = load_hf_folder(hf)
    cut = 0
    for name, recipe in megatron_recipes(_arch(hf)).items():
        whole = recipe.make([weights[s] for s in recipe.sources])
        a, b = halves[0][name], halves[1][name]
        if a.shape == whole.shape:
            assert torch.equal(a, whole), name
            assert torch.equal(b, whole), name
            continue
        cut += 1
        if name.endswith("linear_fc1.weight"):  # each rank has its half of the gate, then of the up projection
            (a1, a2), (b1, b2) = a.chunk(2), b.chunk(2)
            assert torch.equal(torch.cat([a1, b1, a2, b2]), whole)
        else:
            dim = next(d for d in range(whole.ndim) if a.shape[d] < whole.shape[d])
            assert torch.equal(torch.cat([a, b], dim), whole), name
    assert cut == 2 + 3 * 5  # embedding and head; of each layer qkv (two), proj, fc1, fc2


def doctored(folder: Path, change: Callable[[Any], None]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_what_a_training_run_adds_is_left_out_by_name(make: Make, tmp_path: Path) -> None:
    hf, said = make(), []
    MegatronPolicy.from_hf(hf, RunConfig().optimizer).save_checkpoint(tmp_path / "iter_0000007", {})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    doctored(
        tmp_path / "iter_0000007",
        lambda index: index.state_dict_metadata.update({"rng_state/shard_0_1": BytesStorageMetadata()}),
    )
    convert(Job(tmp_path, tmp_path / "back", like=hf), said.append)
    assert same(hf, tmp_path / "back")
    moments = 2 * (len({dist_key(n)[0] for n in megatron_recipes(_arch(hf))}))
    assert f"left out: {moments} tensors of the optimizer, 1 pickled objects (states)" in said


def test_padding_behind_the_vocabulary_is_cut_and_reported(make: Make, tmp_path: Path) -> None:
    hf, said = make("llama"), []
    padded = tmp_path / "padded"
    padded.mkdir()
    weights = load_hf_folder(hf)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.full((10, 32), 7.0)])
    save_file(weights, padded / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((hf / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
    convert(Job(padded, tmp_path / "dist"), said.append)
    convert(Job(tmp_path / "dist", tmp_path / "back", like=hf), said.append)
    assert same(hf, tmp_path / "back")
    assert any("left out: 10 rows behind the vocabulary" in line for line in said)
    with pytest.raises(CheckpointError, match="rows of vocabulary"):
        convert(Job(_dist(hf, tmp_path), tmp_path / "x", like=padded), said.append)


def _dist(hf: Path, tmp_path: Path) -> Path:
    return convert(Job(hf, tmp_path / f"of-{hf.name}"), lambda _: None)[1]


def test_checkpoints_that_do_not_fit_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    dist = _dist(make(), tmp_path)
    for change, message in (
        ({"num_hidden_layers": 2, "layer_types": None}, "3 layers"),
        ({"tie_word_embeddings": True}, "output_layer.weight"),
        ({"num_hidden_layers": 4, "layer_types": None}, "3 layers"),
    ):
        like = tmp_path / "like"
        like.mkdir(exist_ok=True)
        config = json.loads((make() / "config.json").read_text())
        (like / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=message):
            convert(Job(dist, tmp_path / "x", like=like), lambda _: None)
    with pytest.raises(ConfigError, match=r"--like=None"):
        convert(Job(dist, tmp_path / "x"))
    with pytest.raises(ConfigError, match=r"--like="):
        convert(Job(make(), tmp_path / "x", like=make()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(make: Make, tmp_path: Path, value: float) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(make(), hf)
    weights = load_file(hf / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(weights, hf / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight\)='1 of \d+ values NaN or infinite"):
        convert(Job(hf, tmp_path / "x"), lambda _: None)
    dist = _dist(make(), tmp_path)
    read = TorchDistReader.read

    def broken(self: TorchDistReader, name: str) -> torch.Tensor:
        tensor = read(self, name).clone()
        if name.endswith("final_layernorm.weight"):
            tensor[0] = value
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchDistReader, "read", broken)
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight in .*1 of \d+ values NaN or infinite"):
            convert(Job(dist, tmp_path / "y", like=make()), lambda _: None)
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "y").exists()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def test_damaged_and_hostile_folders(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dist = _dist(make(), tmp_path)
    good = (dist / ".metadata").read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            convert(Job(dist, tmp_path / "x", like=make()), lambda _: None)

    (dist / ".metadata").write_bytes(pickle.dumps(Evil()))
    refused(r"unsafe or damaged \.metadata .*mkdir")
    assert not (tmp_path / "pwned").exists()

    def away(index: Any) -> None:
        next(iter(index.storage_data.values())).relative_path = "../elsewhere"

    def hole(index: Any) -> None:
        index.state_dict_metadata["decoder.final_layernorm.weight"].chunks.clear()

    for change, message in ((away, r"points to .\.\./elsewhere"), (hole, "chunks that do not cover")):
        (dist / ".metadata").write_bytes(good)
        doctored(dist, change)
        refused(message)
    (dist / ".metadata").write_bytes(good)
    file = dist / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused("a whole file")


def test_a_mixture_of_experts_is_slimes_own_work(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    moe = tmp_path / "moe"
    moe.mkdir()
    (moe / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 128}))
    with pytest.raises(ModelError, match=r"config\.json num_experts=128: expected a dense model"):
        convert(Job(moe, tmp_path / "x"))
    monkeypatch.delenv("SLIME_DIR", raising=False)
    assert cli.main(["convert", str(moe), str(tmp_path / "x")]) == 2
    assert "set SLIME_DIR and PYTHONPATH" in capfd.readouterr().err
    # With a checkout and what it imports, the tool is called with the flags of the model's file.
    tool = tmp_path / "slime" / "tools" / "convert_hf_to_torch_dist.py"
    tool.parent.mkdir(parents=True)
    tool.write_text("import sys; print('TOOL', *sys.argv[1:]); sys.exit(3)")
    monkeypatch.setenv("SLIME_DIR", str(tmp_path / "slime"))
    monkeypatch.setattr(conversion, "_found", lambda _: True)
    assert cli.main(["convert", str(moe), str(tmp_path / "x")]) == 3
    assert "--num-experts 128 --moe-ffn-hidden-size 768" in capfd.readouterr().out, "of a kind whose flags are known"
    (moe / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "n_routed_experts": 128}))
    assert cli.main(["convert", str(moe), str(tmp_path / "x")]) == 2
    assert "--model-args=None" in capfd.readouterr().err
    (tmp_path / "m.sh").write_text('MODEL_ARGS=(--num-experts 128 --x "a b")')
    assert cli.main(["convert", str(moe), str(tmp_path / "x"), "--model-args", str(tmp_path / "m.sh")]) == 3
    assert f"TOOL --num-experts 128 --x a b --hf-checkpoint {moe} --save {tmp_path / 'x'}" in capfd.readouterr().out


OWN_LAYERS = (
    "--spec slime_tandem.slime_hooks.spec layer_spec --transformer-impl local --no-persist-layer-norm --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 1 --seq-length 2048"
)
"""In the place of Transformer Engine's layers, which a CPU has not."""


@pytest.mark.parametrize("tied", [False, True])
def test_a_mixture_of_experts_goes_through_slimes_tools_and_back(slime_here: Any, tmp_path: Path, tied: bool) -> None:
    """HF -> torch_dist -> HF by our command and slime's own converters: every tensor bit for bit, in slime's bfloat16."""
    hf = make_model("qwen3_moe", tmp_path / "hf", seed=1, dtype="bfloat16", tie_word_embeddings=tied)
    flags = [w for w in flags_of_folder(hf) if w not in ("--moe-grouped-gemm", "--moe-permute-fusion")]
    (tmp_path / "model.sh").write_text(f"MODEL_ARGS=({shlex.join(flags)} {OWN_LAYERS})\n")
    env = {**slime_here.environment(), "SLIME_DIR": str(slime_here.slime), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "MASTER_PORT": str(free_port("127.0.0.1"))}

    def run(*words: str) -> None:
        command = [slime_here.python, "-W", "ignore", "-m", "slime_tandem.cli", "convert", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]

    run(str(hf), str(tmp_path / "dist"), "--model-args", str(tmp_path / "model.sh"))
    run(str(tmp_path / "dist"), str(tmp_path / "back"), "--like", str(hf))
    before, after = load_hf_folder(hf), load_hf_folder(tmp_path / "back")
    assert before.keys() == after.keys()
    assert sum(".experts." in name for name in before) == 2 * 4 * 3
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


def test_the_tool_is_the_command(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"))
    assert cli.main([str(make()), str(tmp_path / "dist")], parser=tool["parser"]()) == 0
    assert f"written: {tmp_path / 'dist'}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_slimes_own_converter_gives_the_same_names_and_values(slime_here: Any, make: Make, kind: str) -> None:
    """slime sends weights to SGLang by megatron_to_hf: what it makes of our keys must be the Hugging Face weights."""
    name = "llama" if kind == "llama" else "qwen2"
    file = slime_here.slime / "slime/backends/megatron_utils/megatron_to_hf" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"slime_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = getattr(module, f"convert_{name}_to_hf")
    hf = make(kind)
    arch, weights = _arch(hf), load_hf_folder(hf)
    args = Namespace(
        kv_channels=arch.head_dim,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
    )
    found: dict[str, torch.Tensor] = {}
    for parameter, recipe in megatron_recipes(arch).items():
        key, layer = dist_key(parameter)
        te_name = key if layer is None else key.replace("decoder.layers.", f"decoder.layers.{layer}.")
        found |= dict(theirs(args, f"module.module.{te_name}", recipe.make([weights[s] for s in recipe.sources])))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[n], weights[n]) for n in weights)


FUNCTION = {
    "num_heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
    "rope_theta": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "norm_eps": {"rms_norm_eps": 0.3},
    "rope": {
        "rope_parameters": {
            "rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}  # fmt: skip


def with_config(hf: Path, folder: Path, change: dict[str, Any]) -> Path:
    shutil.copytree(hf, folder)
    config = json.loads((hf / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    return folder


@pytest.mark.parametrize("field", FUNCTION)
def test_a_config_of_equal_shapes_that_computes_another_function_is_refused(
    make: Make, tmp_path: Path, field: str
) -> None:
    hf = make("llama")
    other = with_config(hf, tmp_path / "other", FUNCTION[field])
    _, converted = convert(Job(hf, tmp_path / "dist"), lambda _: None)
    MegatronPolicy.from_hf(hf, None).save_checkpoint(tmp_path / "step-000001", {"step": 1})
    for source in (tmp_path / "dist", tmp_path / "step-000001"):
        with pytest.raises(CheckpointError, match=r"(num_heads|rope|norm_eps)=.*as in .*other.*--like"):
            convert(Job(source, tmp_path / "back", like=other), lambda _: None)
    assert not (tmp_path / "back").exists()
    # Each side is computed by its own config, so that a wrong one shows even where nobody compared them.
    for source in (converted, tmp_path / "step-000001"):
        with pytest.raises(CheckpointError, match=r"--verify=[0-9.]+: expected at most 0\.001 nats") as caught:
            verify(other, source, by_megatron=False, say=lambda _: None)
        assert isinstance(caught.value.value, float)
        assert caught.value.value > 0.01


class Spec:
    """A class of Megatron's, which is nowhere here when the file is read."""

    def __init__(self) -> None:
        self.deep = {1: [torch.float32, self]}


def megatrons(dist: Path, **args: Any) -> None:
    """Rewrite `common.pt` as a training run of Megatron's leaves it: its arguments, foreign objects among them."""
    common = torch.load(dist / "common.pt", weights_only=False)
    common.pop(KEY, None)
    common["args"].__dict__.update(args, spec=Spec(), dtype=torch.bfloat16, path=Path("/x"), names={"a", "b"})
    common["rng"] = [{"cpu": torch.ones(3), "state": (1, b"x", None, 2**70, 1.5)}]
    torch.save(common, dist / "common.pt")


@pytest.mark.parametrize(
    ("field", "args"),
    [
        ("num_heads", {"num_attention_heads": 8, "kv_channels": 4}),
        ("num_kv_heads", {"num_query_groups": 4}),
        ("norm_eps", {"norm_epsilon": 1e-5}),
        ("rope", {"rotary_base": 1_000_000}),
        ("rope", {"use_rope_scaling": True}),
        ("megatron apply_layernorm_1p", {"apply_layernorm_1p": True}),
        ("megatron rotary_interleaved", {"rotary_interleaved": True}),
        ("megatron swiglu", {"swiglu": False}),
    ],
)
def test_megatrons_own_arguments_are_read_as_data_and_compared(
    make: Make, tmp_path: Path, field: str, args: dict[str, Any]
) -> None:
    hf, said = make("llama"), []
    _, dist = convert(Job(hf, tmp_path / "dist"), lambda _: None)
    megatrons(
        dist, norm_epsilon=1e-6, rotary_base=10_000, use_rope_scaling=False, swiglu=True, apply_layernorm_1p=False
    )
    convert(Job(tmp_path / "dist", tmp_path / "back", like=hf), said.append)
    assert not any("not compared" in line for line in said)
    megatrons(dist, **args)
    with pytest.raises(CheckpointError, match=rf"{field}="):
        convert(Job(tmp_path / "dist", tmp_path / "other", like=hf), lambda _: None)


def test_what_a_checkpoint_does_not_state_is_said(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = make("llama")
    _, dist = convert(Job(hf, tmp_path / "dist"), lambda _: None)
    monkeypatch.chdir(tmp_path)
    torch.save(Evil(), dist / "common.pt")
    for content in (b"", b"x" * 100, (dist / "common.pt").read_bytes()):
        (dist / "common.pt").write_bytes(content)
        said: list[str] = []
        convert(Job(tmp_path / "dist", tmp_path / "back", like=hf, force=True), said.append)
        assert any("not compared with" in line and "num_heads" in line and "rope" in line for line in said)
        assert verify(tmp_path / "back", dist, by_megatron=False, say=said.append) < 1e-5
        assert any("taken from" in line and "on both sides: num_heads" in line for line in said)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_other_dtypes_are_refused_before_anything_is_written(make: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    hf = with_config(make("llama"), tmp_path / "hf", {})
    weights = load_hf_folder(hf)
    name = "model.layers.1.mlp.down_proj.weight"
    good = weights[name]
    weights[name] = good.to(dtype)
    save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"dtype of {name}=.*expected one of F64, F32, BF16, F16"):
        convert(Job(hf, tmp_path / "dist"), lambda _: None)
    assert not list(tmp_path.glob("*dist*"))
    _, dist = convert(Job(make("llama"), tmp_path / "dist"), lambda _: None)

    def change(index: Any) -> None:
        index.state_dict_metadata["decoder.final_layernorm.weight"].properties.dtype = dtype

    doctored(dist, change)
    with pytest.raises(CheckpointError, match=rf"{dtype} of model.norm.weight"):
        convert(Job(tmp_path / "dist", tmp_path / "back", like=make("llama")), lambda _: None)
    assert not list(tmp_path.glob("*back*"))

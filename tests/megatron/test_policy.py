from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from slime_tandem.config import OptimizerConfig
from slime_tandem.errors import CheckpointError, DataError, ModelError, TandemError
from slime_tandem.megatron import checkpoint, core
from slime_tandem.megatron import policy as policy_module
from slime_tandem.megatron.policy import MegatronPolicy

V = 53
KINDS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SETTINGS = OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1)


def make_folder(folder: Path, kind: str, *, tied: bool, seed: int = 0, layers: int = 2) -> Path:
    config = KINDS[kind](
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        **({"head_dim": 8} if kind == "qwen3" else {}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def hf_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, bool], Path]]:
    root = tmp_path_factory.mktemp("hf")
    made: dict[tuple[str, bool], Path] = {}

    def get(kind: str, tied: bool) -> Path:
        if (kind, tied) not in made:
            made[kind, tied] = make_folder(root / f"{kind}-{tied}", kind, tied=tied)
        return made[kind, tied]

    yield get
    core.shutdown()


@pytest.fixture(scope="module")
def frozen(folders: Callable[[str, bool], Path]) -> MegatronPolicy:
    return MegatronPolicy.from_hf(folders("qwen3", True), None)


def batch(seed: int) -> tuple[list[tuple[int, ...]], list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [9, 14, 5]
    return [tuple(torch.randint(0, V, (n,), generator=generator).tolist()) for n in lengths], [4, 13, 1]


def labels_of(sequences: Sequence[Sequence[int]], lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([t for s, R in zip(sequences, lengths, strict=True) for t in s[len(s) - R :]])


def loss_of(policy: MegatronPolicy, seed: int) -> torch.Tensor:
    sequences, lengths = batch(seed)
    return torch.nn.functional.cross_entropy(policy.response_logits(sequences, lengths), labels_of(sequences, lengths))


def train(policy: MegatronPolicy, seeds: Sequence[int]) -> list[float]:
    norms = []
    for seed in seeds:
        policy.zero_grad()
        loss_of(policy, seed).backward()
        norms.append(policy.step())
    return norms


def weights_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.model.named_parameters()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", True), ("qwen3", True), ("qwen3", False)])
def test_logits_and_gradient_equal_transformers(folders: Callable[[str, bool], Path], kind: str, tied: bool) -> None:
    hf = hf_of(folders(kind, tied))
    policy = MegatronPolicy.from_hf(folders(kind, tied), SETTINGS)
    sequences, lengths = batch(0)
    expected = torch.cat(
        [hf(torch.tensor([s])).logits[0, len(s) - R - 1 : -1] for s, R in zip(sequences, lengths, strict=True)]
    )
    found = policy.response_logits(sequences, lengths)
    assert found.dtype == torch.float32
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    labels = labels_of(sequences, lengths)
    torch.nn.functional.cross_entropy(expected, labels).backward()
    torch.nn.functional.cross_entropy(found, labels).backward()
    gradients = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    for name, gradient in policy_module.megatron_to_hf(gradients, policy.hf_config).items():
        expected_gradient = hf.get_parameter(name).grad
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class Saved:
    """Bytes of what autograd keeps for the backward pass."""

    def __init__(self) -> None:
        self.bytes = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", True), ("qwen3", False)])
def test_gradient_checkpointing_changes_the_memory_alone(
    folders: Callable[[str, bool], Path], tmp_path: Path, kind: str, tied: bool
) -> None:
    sequences, lengths = batch(0)
    found = {}
    for checkpointed in (False, True):
        policy = MegatronPolicy.from_hf(folders(kind, tied), SETTINGS, checkpointed=checkpointed)
        saved = Saved()
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
            logits = policy.response_logits(sequences, lengths)
        torch.nn.functional.cross_entropy(logits, labels_of(sequences, lengths)).backward()
        gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
        policy.save_checkpoint(tmp_path / str(checkpointed), {})
        with torch.no_grad():
            torch.testing.assert_close(policy.response_logits(sequences, lengths), logits, rtol=0, atol=0)
        found[checkpointed] = (logits.detach(), gradients, saved.bytes)
    (logits, gradients, kept), (same_logits, same_gradients, less) = found[False], found[True]
    assert torch.equal(logits, same_logits)
    assert len(gradients) == len(weights_of(policy))
    assert equal(gradients, same_gradients), "bit for bit: the same kernels run again"
    assert less < 0.5 * kept, (less, kept)
    plain = MegatronPolicy.from_hf(folders(kind, tied), SETTINGS)
    plain.load_checkpoint(tmp_path / "True")  # the layers' names are the same
    assert equal(weights_of(plain), weights_of(policy))


ids = st.lists(st.integers(0, V - 1), min_size=1, max_size=20).map(tuple)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequences=st.lists(ids, min_size=1, max_size=5), data=st.data())
def test_response_rows_are_rows_of_the_full_logits(
    frozen: MegatronPolicy, sequences: list[tuple[int, ...]], data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(0, len(s) - 1)) for s in sequences]
    S = max(map(len, sequences))
    padded = torch.tensor([[*s, *[7] * (S - len(s))] for s in sequences])
    with torch.no_grad():
        full = frozen.logits(padded)
        rows = frozen.response_logits(sequences, lengths)
    assert full.shape == (len(sequences), S, V)
    expected = [full[b, len(s) - R - 1 : len(s) - 1] for b, (s, R) in enumerate(zip(sequences, lengths, strict=True))]
    torch.testing.assert_close(rows, torch.cat(expected), rtol=0, atol=1e-6)


def test_padding_and_batch_mates_change_nothing(frozen: MegatronPolicy) -> None:
    sequences, lengths = batch(3)
    with torch.no_grad():
        together = frozen.response_logits(sequences, lengths)
        alone = torch.cat([frozen.response_logits([s], [R]) for s, R in zip(sequences, lengths, strict=True)])
        longer = frozen.response_logits([*sequences, (1,) * 40], [*lengths, 0])
        reordered = frozen.response_logits(sequences[::-1], lengths[::-1]).split(lengths[::-1])
    for other in (alone, longer, torch.cat(list(reordered)[::-1])):
        torch.testing.assert_close(other, together, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("sequences", "lengths", "message"),
    [
        ([], [], "equal counts above 0"),
        ([(1, 2)], [1, 1], "equal counts above 0"),
        ([(1, 2)], [2], r"response_lengths\[0\]=2: expected 0 to 1"),
        ([(1, 2), (1, 2)], [1, -1], r"response_lengths\[1\]=-1"),
        ([()], [0], r"response_lengths\[0\]=0"),
        ([(1, V)], [1], r"ids in \[0, 53\)"),
        ([(-1, 2)], [1], r"ids in \[0, 53\)"),
    ],
)
def test_bad_batches_are_refused(
    frozen: MegatronPolicy, sequences: list[tuple[int, ...]], lengths: list[int], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        frozen.response_logits(sequences, lengths)


def test_a_frozen_policy_has_no_gradient(frozen: MegatronPolicy) -> None:
    assert not frozen.response_logits([(1, 2, 3)], [2]).requires_grad
    with pytest.raises(AssertionError, match="frozen"):
        frozen.step()


def test_step_is_adamw_with_clipping_warm_up_and_decay_on_matrices(folders: Callable[[str, bool], Path]) -> None:
    policy = MegatronPolicy.from_hf(folders("qwen2", False), SETTINGS)
    mine = {name: parameter.detach().clone().requires_grad_() for name, parameter in weights_of(policy).items()}
    groups = [
        {"params": [p for p in mine.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in mine.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.eps)
    for step in range(1, 6):
        policy.zero_grad()
        loss_of(policy, step).backward()
        gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        for name, parameter in mine.items():
            parameter.grad = gradients[name] * (SETTINGS.grad_clip / norm).clamp(max=1)
        for group in reference.param_groups:
            group["lr"] = SETTINGS.lr * min(1.0, step / 3)
        reference.step()
        assert policy.step() == pytest.approx(float(norm), rel=1e-5)
        assert norm > SETTINGS.grad_clip, "otherwise clipping is not seen"
        assert policy.lr == pytest.approx(SETTINGS.lr * min(1.0, step / 3))
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter, mine[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_training_lowers_the_loss(folders: Callable[[str, bool], Path]) -> None:
    policy = MegatronPolicy.from_hf(folders("llama", True), SETTINGS)
    before = loss_of(policy, 0).item()
    train(policy, [0] * 15)
    assert loss_of(policy, 0).item() < 0.5 * before


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_before_the_weights(
    folders: Callable[[str, bool], Path], poison: float
) -> None:
    policy = MegatronPolicy.from_hf(folders("qwen3", True), SETTINGS)
    train(policy, [0])
    before = weights_of(policy)
    policy.zero_grad()
    loss_of(policy, 1).backward()
    next(policy.model.parameters()).grad.view(-1)[0] = poison
    with pytest.raises(TandemError, match="gradient norm="):
        policy.step()
    assert equal(weights_of(policy), before)
    assert policy.steps == 1
    assert train(policy, [1])[0] > 0, "it can go on"


def test_save_hf_loads_in_transformers(folders: Callable[[str, bool], Path], tmp_path: Path) -> None:
    for kind, tied in (("llama", False), ("qwen2", True), ("qwen3", False)):
        policy = MegatronPolicy.from_hf(folders(kind, tied), SETTINGS)
        train(policy, [0, 1])
        policy.save_hf(tmp_path / kind)
        tokens = torch.tensor([[1, 5, 9, 13, 2, 40]])
        hf = hf_of(tmp_path / kind)
        assert hf.dtype == torch.float32
        with torch.no_grad():
            torch.testing.assert_close(hf(tokens).logits, policy.logits(tokens), rtol=0, atol=1e-5)
        again = MegatronPolicy.from_hf(tmp_path / kind, None)
        assert equal(weights_of(again), weights_of(policy))


def test_save_hf_keeps_companions_and_widens_a_narrow_source(trio: Any, tmp_path: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(trio.senior).to(torch.bfloat16)
    source = tmp_path / "source"
    hf.save_pretrained(source)
    AutoTokenizer.from_pretrained(trio.senior).save_pretrained(source)
    (source / "notes.txt").write_text("not part of the model")
    policy = MegatronPolicy.from_hf(source, SETTINGS)
    train(policy, [0])
    policy.save_hf(tmp_path / "out")
    assert hf_of(tmp_path / "out").dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"} <= names
    assert "notes.txt" not in names
    assert {p.name for p in tmp_path.iterdir()} == {"source", "out"}, "no temporary folder stays"


def test_save_hf_replaces_an_older_folder_whole(folders: Callable[[str, bool], Path], tmp_path: Path) -> None:
    policy = MegatronPolicy.from_hf(folders("qwen3", True), SETTINGS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.safetensors").write_text("old")
    (tmp_path / ".out.partial-killed").mkdir()
    policy.save_hf(tmp_path / "out")
    assert "old.safetensors" not in {path.name for path in (tmp_path / "out").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", True), ("qwen3", True)])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(
    folders: Callable[[str, bool], Path], tmp_path: Path, kind: str, tied: bool
) -> None:
    whole = MegatronPolicy.from_hf(folders(kind, tied), SETTINGS)
    norms = train(whole, [0, 1, 2, 3])

    first = MegatronPolicy.from_hf(folders(kind, tied), SETTINGS)
    train(first, [0, 1])
    threads = threading.active_count()
    first.save_checkpoint(tmp_path / "c", {"step": 2, "note": ["ü", None, 1.5]})
    assert threading.active_count() == threads
    second = MegatronPolicy.from_hf(folders(kind, tied), SETTINGS)
    assert second.load_checkpoint(tmp_path / "c") == {"step": 2, "note": ["ü", None, 1.5]}
    assert second.steps == 2
    assert train(second, [2, 3]) == norms[2:]
    assert equal(weights_of(second), weights_of(whole))

    reference = MegatronPolicy.from_hf(folders(kind, tied), None)
    reference.load_checkpoint(tmp_path / "c")
    assert equal(weights_of(reference), weights_of(first))


def test_a_checkpoint_of_step_zero_resumes(folders: Callable[[str, bool], Path], tmp_path: Path) -> None:
    first = MegatronPolicy.from_hf(folders("qwen3", True), SETTINGS)
    first.save_checkpoint(tmp_path / "c", {})
    second = MegatronPolicy.from_hf(folders("qwen3", True), SETTINGS)
    train(second, [5])
    second.load_checkpoint(tmp_path / "c")
    assert train(second, [0, 1]) == train(first, [0, 1])
    assert equal(weights_of(second), weights_of(first))


@pytest.fixture
def saved(folders: Callable[[str, bool], Path], tmp_path: Path) -> tuple[MegatronPolicy, Path]:
    policy = MegatronPolicy.from_hf(folders("qwen3", True), SETTINGS)
    train(policy, [0])
    policy.save_checkpoint(tmp_path / "c", {"step": 1})
    return policy, tmp_path / "c"


def refused(policy: MegatronPolicy, folder: Path, message: str) -> None:
    before = weights_of(policy)
    with pytest.raises(CheckpointError, match=message) as caught:
        policy.load_checkpoint(folder)
    assert "Remedy: " in str(caught.value).splitlines()[0]
    assert equal(weights_of(policy), before)
    assert policy.steps == 1


def test_missing_and_foreign_checkpoints(saved: tuple[MegatronPolicy, Path], tmp_path: Path) -> None:
    policy, folder = saved
    refused(policy, tmp_path / "none", "no such folder")
    (tmp_path / "empty").mkdir()
    refused(policy, tmp_path / "empty", r"unreadable state\.json")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format": "another 7"}))
    refused(policy, folder, "format=.*another 7")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "metadata.json", "state.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damaged_checkpoints(saved: tuple[MegatronPolicy, Path], name: str, damage: str) -> None:
    policy, folder = saved
    content = bytearray((folder / name).read_bytes())
    if damage == "delete":
        (folder / name).unlink()
    elif damage == "truncate":
        (folder / name).write_bytes(content[: len(content) // 2])
    else:
        content[0] ^= 0xFF
        (folder / name).write_bytes(content)
    refused(policy, folder, r"state\.json" if name == "state.json" else f"(no|damaged) file {name}")


def test_checkpoint_of_another_model(saved: tuple[MegatronPolicy, Path], tmp_path: Path) -> None:
    _, folder = saved
    deeper = MegatronPolicy.from_hf(make_folder(tmp_path / "deep", "qwen3", tied=True, layers=3), SETTINGS)
    train(deeper, [0])
    refused(deeper, folder, r"num_layers=2.*num_layers=3")


def test_checkpoint_without_optimizer_state(saved: tuple[MegatronPolicy, Path], tmp_path: Path) -> None:
    policy, _ = saved
    frozen = MegatronPolicy.from_hf(policy.source, None)
    frozen.save_checkpoint(tmp_path / "weights", {})
    refused(policy, tmp_path / "weights", "no optimizer state")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def reseal(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    state["files"] = {name: checkpoint.file_sha256(folder / name) for name in state["files"]}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_hostile_pickle_is_refused_unread(
    saved: tuple[MegatronPolicy, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, folder = saved
    monkeypatch.chdir(tmp_path)
    good = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    reseal(folder)
    refused(policy, folder, r"unsafe or damaged \.metadata .*mkdir")
    (folder / ".metadata").write_bytes(good)
    torch.save(Evil(), folder / "common.pt")
    reseal(folder)
    refused(policy, folder, "Weights only load failed")
    assert not (tmp_path / "pwned").exists()


def test_an_index_may_hold_tensors_of_this_folder_only(saved: tuple[MegatronPolicy, Path]) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    policy, folder = saved
    index = pickle.loads((folder / ".metadata").read_bytes())
    key = next(iter(index.state_dict_metadata))
    tensor = index.state_dict_metadata[key]
    index.state_dict_metadata[key] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    reseal(folder)
    refused(policy, folder, "an object under .* tensors only")
    index.state_dict_metadata[key] = tensor
    next(iter(index.storage_data.values())).relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    reseal(folder)
    refused(policy, folder, r"points to .\.\./elsewhere")


def test_an_index_without_a_tensor(saved: tuple[MegatronPolicy, Path]) -> None:
    policy, folder = saved
    index = pickle.loads((folder / ".metadata").read_bytes())
    del index.state_dict_metadata["decoder.final_layernorm.weight"]
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    reseal(folder)
    refused(policy, folder, r"decoder\.final_layernorm\.weight")


def fail(error: Exception) -> Callable[..., Any]:
    def raising(*_args: Any, **_options: Any) -> Any:
        raise error

    return raising


@pytest.mark.parametrize("where", ["torch", "fsync", "state", "safetensors"])
def test_full_disk(
    saved: tuple[MegatronPolicy, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    policy, folder = saved
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        if where == "torch":
            masked = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
            masked.__context__ = full  # as torch's zip writer raises it
            patch.setattr("torch.distributed.checkpoint.filesystem._write_item", fail(masked))
        elif where == "fsync":
            patch.setattr(checkpoint.os, "fsync", fail(full))
        elif where == "state":
            patch.setattr(checkpoint, "file_sha256", fail(full))
        else:
            error = checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")
            patch.setattr(policy_module, "save_file", fail(error))
        write = policy.save_hf if where == "safetensors" else lambda path: policy.save_checkpoint(path, {"step": 2})
        for target in (folder, tmp_path / "new"):
            with pytest.raises(CheckpointError, match=r"No space left.*Remedy: free some space"):
                write(target)
    assert [path.name for path in tmp_path.iterdir()] == ["c"], "nothing half-written stays"
    assert policy.load_checkpoint(folder) == {"step": 1}


def test_unwritable_parent(saved: tuple[MegatronPolicy, Path], tmp_path: Path) -> None:
    policy, _ = saved
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a folder that can be written"):
        policy.save_checkpoint(tmp_path / "file" / "c", {})


def test_a_kill_in_the_middle_leaves_the_older_checkpoint(
    saved: tuple[MegatronPolicy, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy, folder = saved
    train(policy, [1])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "fsync", fail(KeyboardInterrupt()))  # type: ignore[arg-type]
        patch.setattr(checkpoint.shutil, "rmtree", lambda *_a, **_k: None)  # a killed process tidies nothing up
        with pytest.raises(KeyboardInterrupt):
            policy.save_checkpoint(folder, {"step": 2})
    assert len(list(tmp_path.iterdir())) == 2
    assert policy.load_checkpoint(folder) == {"step": 1}
    policy.save_checkpoint(folder, {"step": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_from_hf_names_what_is_wrong_with_a_folder(folders: Callable[[str, bool], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        MegatronPolicy.from_hf(tmp_path, None)
    shutil.copytree(folders("llama", False), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="fetch the weights"):
        MegatronPolicy.from_hf(tmp_path / "m", None)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ModelError, match="model_type='gpt2'"):
        MegatronPolicy.from_hf(tmp_path / "m", None)


def test_threads_are_set_only_when_asked(folders: Callable[[str, bool], Path]) -> None:
    before = torch.get_num_threads()
    MegatronPolicy.from_hf(folders("llama", False), None)
    assert torch.get_num_threads() == before
    try:
        MegatronPolicy.from_hf(folders("llama", False), None, threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)

"""Legacy names: every row of the naming authority's tables, in every kind of file, and nothing else."""

from __future__ import annotations

import json
import runpy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem import cli
from slime_tandem.config import RunConfig, fields_of
from slime_tandem.config.legacy import SETTINGS, tandem_settings
from slime_tandem.config.migrate import (
    DROPPED,
    RENAMED,
    Change,
    left_alone,
    migrate_file,
    migrate_text,
    migrate_tree,
    migrate_yaml,
)
from slime_tandem.errors import ConfigError

KEYS = st.sampled_from([*RENAMED, "chunk_size", "max_gap_tokens", "selection_strategy", "primary", "frozen", "x"])
METRICS = [name for name in RENAMED if "/" in name]
TREES = st.recursive(
    st.integers() | st.text(max_size=5) | st.sampled_from(sorted(RENAMED)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def keys_of(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        return [*tree, *(k for value in tree.values() for k in keys_of(value))]
    return [k for value in tree for k in keys_of(value)] if isinstance(tree, list) else []


def values_of(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [v for value in tree.values() for v in values_of(value)]
    return [v for value in tree for v in values_of(value)] if isinstance(tree, list) else [tree]


@given(TREES)
def test_no_legacy_key_is_left_values_stay_and_a_second_time_changes_nothing(tree: Any) -> None:
    try:
        new, changes = migrate_tree(tree)
    except ConfigError:
        targets = [RENAMED[k] for k in keys_of(tree) if k in RENAMED]
        assert len(set(targets)) < len(targets)  # two old masks that become one
        return
    assert not RENAMED.keys() & set(keys_of(new))
    assert values_of(new) == [RENAMED[v] if v in METRICS else v for v in values_of(tree)]
    assert len(changes) == sum(k in RENAMED for k in keys_of(tree)) + sum(v in METRICS for v in values_of(tree))
    assert migrate_tree(new) == (new, [])


def test_yaml_keeps_its_comments_and_layout() -> None:
    text = (
        "# frozen_model is old\ntandem:   # prob_primary\n  'prob_primary' : 0.5\n"
        "  frozen_model: prob_primary\nlist: [{model_mask: 1}]\n"
    )
    new, changes = migrate_yaml(text)
    assert new == text.replace("'prob_primary' :", "'prob_senior' :").replace(
        "  frozen_model:", "  junior_model:"
    ).replace("{model_mask", "{authorship_mask")
    assert [(c.where, c.old, c.new) for c in changes] == [
        ("tandem", "prob_primary", "prob_senior"),
        ("tandem", "frozen_model", "junior_model"),
        ("list[0]", "model_mask", "authorship_mask"),
    ]
    assert yaml.safe_load(new)["tandem"] == {"prob_senior": 0.5, "junior_model": "prob_primary"}


@pytest.mark.parametrize("old", RENAMED)
def test_every_name_in_a_run_script(old: str) -> None:
    text = f"python main.py \\\n  +a.b.{old}=1 my_{old}=2 {old}s=3\n"
    new, changes = migrate_text(text)
    assert changes == [Change("line 2", old, RENAMED[old])]
    assert new == text.replace(f"+a.b.{old}=", f"+a.b.{RENAMED[old]}=")


def test_old_and_new_side_by_side_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a prob_primary=0\.1: expected no `prob_senior` beside it"):
        migrate_tree({"a": {"prob_primary": 0.1, "prob_senior": 0.2}})
    with pytest.raises(ConfigError, match="authorship_mask"):
        migrate_tree({"model_mask": 1, "tandem_mask": 2})


def test_what_has_no_successor() -> None:
    assert migrate_tree({DROPPED[0]: 1, "x": 2}) == ({"x": 2}, [Change("top", DROPPED[0], None)])
    with pytest.raises(ConfigError, match="without a successor"):
        migrate_text(f"+rollout.{DROPPED[0]}=1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nmodel_a_mask: 1  # old\n# of b\nb: 2\n", "a: 1\n# of b\nb: 2\n"),
        ("a: 1\nmodel_a_mask: 1", "a: 1\n"),
        ("model_a_mask: 1\n", "{}\n"),
        ("t:\n  model_a_mask:\n    x: [1,\n      2]\n\n  # of y\n  y: 2\n", "t:\n\n  # of y\n  y: 2\n"),
        ("t:\n  model_a_mask: |\n    text\n    more\n  y: 2\n", "t:\n  y: 2\n"),
        ("- model_a_mask: 1\n  b: 2\n- model_a_mask: 3\n", "- b: 2\n- {}\n"),
        ("{a: 1, model_a_mask: [1], b: 2}\n", "{a: 1, b: 2}\n"),
        ("{a: 1, model_a_mask: 1}\n", "{a: 1}\n"),
        ("{'model_a_mask': 1, prob_primary: 2}\n", "{prob_senior: 2}\n"),
        ("{model_a_mask: 1}\n", "{}\n"),
        ("- model_a_mask: 1 # old\n  # of b\n  b: 3\n", "- \n  # of b\n  b: 3\n"),
        ('a: 1\nmodel_a_mask: "x\n  # no comment"\nb: 2\n', "a: 1\nb: 2\n"),
        ("model_a_mask: |\n  x\n  # text\n# of b\nb: 2\n", "# of b\nb: 2\n"),
        ("a: 1\r\nmodel_a_mask: 1\r\nprob_primary: 2\r\n", "a: 1\r\nprob_senior: 2\r\n"),
    ],
)
def test_yaml_without_what_has_no_successor(text: str, expected: str) -> None:
    new, changes = migrate_yaml(text)
    assert new == expected
    assert [c.new for c in changes if c.old == DROPPED[0]] == [None] * text.count(DROPPED[0])


@given(
    st.dictionaries(st.sampled_from([*DROPPED, "a", "b"]), TREES, max_size=3).map(lambda d: [d, {"c": d}, [d]]),
    st.booleans() | st.none(),
)
def test_yaml_is_the_tree_without_it(tree: Any, flow: bool | None) -> None:
    text = yaml.safe_dump(tree, default_flow_style=flow, sort_keys=False, allow_unicode=True)
    try:
        expected, changes = migrate_tree(yaml.safe_load(text))
    except ConfigError:
        return
    if "&id" in text and any(c.new is None for c in changes):
        return  # an alias of what is taken out
    new, told = migrate_yaml(text)
    assert yaml.safe_load(new) == expected
    assert told == changes


def bomb() -> bytes:
    lines = [b"a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [b"a%d: &a%d [%s]" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9)]
    return b"\n".join(lines)


UNREADABLE = {
    "date.yaml": b"a: 2020-13-45",
    "number.yaml": b"a: 0x_",
    "itself.yaml": b"a: &a [*a]",
    "two.yaml": b"a: 1\n---\nb: 1",
    "deep.yaml": b"[" * 2000,
    "bomb.yaml": bomb(),
    "comment.yaml": b"{a: 1, # of a\n model_a_mask: 1}",
    "deep.json": b"[" * 100_000,
    "half.json": b'{"prob_primary": "\\ud800"}',
    "empty.pt": b"",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_cannot_be_read_or_changed(tmp_path: Path, name: str) -> None:
    content = UNREADABLE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError):
        migrate_file(tmp_path / name, write=True)
    assert (tmp_path / name).read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_the_file_behind_a_link_changes_and_keeps_its_mode(tmp_path: Path) -> None:
    script, link = tmp_path / "run.sh", tmp_path / "link.sh"
    script.write_bytes(b"x prob_primary=1\r\n")
    script.chmod(0o750)
    link.symlink_to(script)
    migrate_file(link, write=True)
    assert script.read_bytes() == b"x prob_senior=1\r\n"
    assert (script.stat().st_mode & 0o777, link.is_symlink()) == (0o750, True)
    assert (tmp_path / "run.sh.bak").read_bytes() == b"x prob_primary=1\r\n"


def test_an_anchor_that_is_needed_elsewhere_is_an_error() -> None:
    with pytest.raises(ConfigError, match="change it by hand"):
        migrate_yaml("model_a_mask: &m {a: 1}\nb: *m\n")


def test_a_checkpoint_blob_and_its_weights(tmp_path: Path) -> None:
    weights = {"tandem_frozen.model.norm.weight": torch.ones(2), "model.norm.weight": torch.zeros(2)}
    torch.save({"model": weights, "tandem_config": {"prob_primary": 0.5}, "step": 3}, tmp_path / "c.pt")
    changes, left = migrate_file(tmp_path / "c.pt", write=True)
    assert left == []
    assert [c.new for c in changes] == ["tandem_junior.model.norm.weight", "prob_senior"]
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert loaded["tandem_config"] == {"prob_senior": 0.5}
    assert torch.equal(loaded["model"]["tandem_junior.model.norm.weight"], torch.ones(2))
    assert "prob_primary" in torch.load(tmp_path / "c.pt.bak", weights_only=True)["tandem_config"]
    torch.save(Fraction(1, 2), tmp_path / "evil.pt")  # Megatron allows paths
    with pytest.raises(ConfigError, match="a file of tensors and plain values"):
        migrate_file(tmp_path / "evil.pt", write=False)


def test_the_tool_reports_first_and_writes_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "migrate_tandem_config.py"))
    file = tmp_path / "tandem_config.json"
    file.write_text(json.dumps({"tandem_config": {"frozen_model": "J", "target_model_config": None}}))
    before = file.read_text()
    assert cli.main([str(file)], parser=tool["parser"]()) == 0
    out = capsys.readouterr().out
    assert f"{file}: tandem_config: frozen_model -> junior_model" in out
    assert "2 changes in 1 files, nothing written" in out
    assert file.read_text() == before
    assert cli.main([str(file), "--write"], parser=tool["parser"]()) == 0
    assert json.loads(file.read_text()) == {"tandem_config": {"junior_model": "J", "senior_model_config": None}}
    assert (tmp_path / "tandem_config.json.bak").read_text() == before
    assert cli.main([str(file)], parser=tool["parser"]()) == 0
    assert "no legacy name in 1 files" in capsys.readouterr().out
    file.write_text(before)
    assert cli.main([str(file), "--write"], parser=tool["parser"]()) == 2
    assert "tandem_config.json.bak" in capsys.readouterr().err
    for bad in ("{", "\udcff"):
        file.write_bytes(bad.encode("utf-8", "surrogateescape"))
        assert cli.main([str(file)], parser=tool["parser"]()) == 2
    other = tmp_path / "b.yaml"
    other.write_text("prob_primary: 0.5\n")
    capsys.readouterr()
    assert cli.main([str(file), str(other), "--write"], parser=tool["parser"]()) == 2
    out, err = capsys.readouterr()
    assert f"{other}: top: prob_primary -> prob_senior" in out
    assert "1 of 2 files" in err
    assert other.read_text() == "prob_senior: 0.5\n"


AUTHORITY = {
    # models, mask, strategy
    "primary": None, "hot": None, "model_a": None, "frozen": None, "model_b": None, "TT": None, "tandem native GRPO": None,
    "tandem_model_mask": "authorship_mask", "model_mask": "authorship_mask", "prob_primary": "prob_senior",
    "tandem_jr_tkn_weight": "junior_token_loss_weight",
    # code
    "FROZEN_PREFIX": "JUNIOR_PREFIX", "is_frozen_layer": "is_junior_layer", "get_frozen_tp_group": "get_junior_tp_group",
    "use_frozen_tp": "use_junior_tp", "_frozen_tp_context": "_junior_tp_context", "frozen_forward": "junior_forward",
    "load_frozen_model": "load_junior_model", "initialize_frozen_kv_cache": "initialize_junior_kv_cache",
    "get_frozen_model": "get_junior_model", "get_frozen_device": "get_junior_device",
    # TandemConfig
    "frozen_model": "junior_model", "frozen_model_revision": "junior_model_revision",
    "frozen_tensor_parallel_size": "junior_tensor_parallel_size", "frozen_gpu_devices": "junior_gpu_devices",
    "frozen_gpu_memory_utilization": "junior_gpu_memory_utilization", "frozen_dtype": "junior_dtype",
    "frozen_quantization": "junior_quantization", "frozen_enforce_eager": "junior_enforce_eager",
    "frozen_max_model_len": "junior_max_model_len", "target_model_config": "senior_model_config",
    "target_parallel_config": "senior_parallel_config",
    # the sampler and the manager
    "primary_logits": "senior_logits", "frozen_logits": "junior_logits", "primary_output": "senior_output",
    "frozen_output": "junior_output", "primary_tokens": "senior_tokens", "frozen_tokens": "junior_tokens",
    "use_primary": "use_senior", "frozen_device": "junior_device", "frozen_kv_caches": "junior_kv_caches",
    "primary_vllm_config": "senior_vllm_config", "frozen_attn_metadata": "junior_attn_metadata",
    "frozen_input_ids": "junior_input_ids", "frozen_positions": "junior_positions",
    "frozen_logits_indices": "junior_logits_indices", "frozen_sfc": "junior_sfc", "primary_sfc": "senior_sfc",
    "frozen_attn_count": "junior_attn_count", "frozen_layers": "junior_layers", "frozen_vllm_config": "junior_vllm_config",
    "frozen_config": "junior_config", "frozen_hf_config": "junior_hf_config", "frozen_local_rank": "junior_local_rank",
    # masks, metrics
    "new_tandem_model_mask": "new_authorship_mask", "tandem_mask": "authorship_mask",
    "tandem/primary_token_fraction": "tandem/senior_token_fraction",
    "tandem/frozen_token_fraction": "tandem/junior_token_fraction",
}  # fmt: skip
"""The naming authority's tables, row by row; None: a word that could be anything, which is listed."""
PLACES = {
    "key.json": '{{"a": {{"{old}": 1}}}}',
    "override.json": '{{"args": ["+actor.x.{old}=1"]}}',
    "key.yaml": "a:\n  {old}: 1  # kept\n",
    "list.yaml": "- algorithm.x=1\n- +a.b.{old}=0.5\n",
    "block.yaml": "run: |\n  python main.py a.{old}=1\n",
    "run.sh": 'export X="{{\\"{old}\\": 1}}"\npython main.py a.{old}=1\n',
    "code.py": "def f(self, {old}):\n    return self.{old}({old})\n",
}


@pytest.mark.parametrize("kind", PLACES)
def test_every_row_of_the_naming_authority_is_migrated_or_listed(tmp_path: Path, kind: str) -> None:
    for old, new in AUTHORITY.items():
        file = tmp_path / kind
        file.write_text(PLACES[kind].format(old=old))
        changes, left = migrate_file(file, write=True)
        if new is None:
            assert left
            assert {name for _, name in left} == {old}
            assert not changes
        else:
            assert file.read_text().rstrip("\n").replace(" ", "") == _spaced(kind, new), (old, changes)
            assert {(c.old, c.new) for c in changes} == {(old, new)}
            assert left == []
            (tmp_path / f"{kind}.bak").unlink()


def _spaced(kind: str, name: str) -> str:
    text = PLACES[kind].format(old=name)
    return (json.dumps(json.loads(text), indent=2) if kind.endswith("json") else text).rstrip("\n").replace(" ", "")


UNCHANGED = (
    "selection_strategy", "boundary_token_ids", "chunk_size", "max_gap_tokens", "enabled", "_word_state", "is_senior",
    "tandem/switches_per_seq", "tandem/tokens_per_sent", "SENIOR_MODEL", "JUNIOR_MODEL", "TandemSampler", "TandemModelManager",
    "TandemConfig", "TandemSelectionStrategy", "bernoulli", "chunk", "alternating", "sentence", "word", "SamplerOutput",
)  # fmt: skip
"""What the tables keep as it is."""


@pytest.mark.parametrize("kind", PLACES)
def test_what_the_naming_authority_keeps_is_neither_changed_nor_listed(tmp_path: Path, kind: str) -> None:
    for name in UNCHANGED:
        (tmp_path / kind).write_text(PLACES[kind].format(old=name))
        assert migrate_file(tmp_path / kind, write=True) == ([], [])


def test_the_dropped_mask_is_cut_out_or_refused(tmp_path: Path) -> None:
    for kind, text in PLACES.items():
        (tmp_path / kind).write_text(text.format(old=DROPPED[0]))
        if kind.startswith("key"):
            assert [c.new for c in migrate_file(tmp_path / kind, write=False)[0]] == [None]
        else:
            with pytest.raises(ConfigError, match="without a successor"):
                migrate_file(tmp_path / kind, write=False)


def test_prefixes_and_prefixed_metrics() -> None:
    text = 'FROZEN_PREFIX = "tandem_frozen."\nlog("train/tandem/primary_token_fraction", x)\nopen("/data/frozen_model/x")\n'
    new, changes = migrate_text(text)
    assert new.splitlines()[:2] == [
        'JUNIOR_PREFIX = "tandem_junior."', 'log("train/tandem/senior_token_fraction", x)',
    ]  # fmt: skip
    assert [c.old for c in changes] == ["FROZEN_PREFIX", "tandem_frozen.", "tandem/primary_token_fraction"]
    assert left_alone(new) == [("line 3", "frozen_model")], "a path stays"
    panel = {"view": {"metrics": ["train/tandem/frozen_token_fraction", "frozen_model"]}}
    assert migrate_tree(panel)[0] == {"view": {"metrics": ["train/tandem/junior_token_fraction", "frozen_model"]}}


OLD_CONFIG = {
    "enabled": True, "frozen_model": "/models/J", "frozen_model_revision": None, "prob_primary": 0.25,
    "frozen_tensor_parallel_size": 2, "frozen_gpu_devices": [1, 2], "frozen_gpu_memory_utilization": 0.9,
    "frozen_dtype": "auto", "frozen_quantization": None, "frozen_enforce_eager": True, "frozen_max_model_len": 4096,
    "target_model_config": None, "target_parallel_config": {"world_size": 1}, "selection_strategy": "word",
    "boundary_token_ids": [3, 5], "chunk_size": 1, "max_gap_tokens": 16,
}  # fmt: skip


def test_a_migrated_tandem_config_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the 17 fields is a setting of the run, or said to be left out."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"step": 3, "tandem_config": OLD_CONFIG}))
    assert cli.main(["migrate", "--settings", str(file)]) == 0
    out, err = capsys.readouterr()
    (tmp_path / "run.yaml").write_text(out)
    config = RunConfig.load(tmp_path / "run.yaml")
    assert (config.models.junior, config.tandem.prob_senior, config.tandem.max_gap_tokens) == ("/models/J", 0.25, 16)
    assert (config.tandem.boundary_token_ids, config.cluster.junior_tp, config.cluster.junior_gpus) == ((3, 5), 2, 2)
    taken = tandem_settings({"tandem_config": OLD_CONFIG}).settings
    for old, value in OLD_CONFIG.items():
        name = RENAMED.get(old, old)
        place = SETTINGS[name]
        assert value in (None, "auto") or name in err or (place is not None and place[0] in taken), name
    assert "chunk_size=1: left out, selection_strategy='word' does not read it" in err
    assert "senior_parallel_config" in err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("view.json", '{"tandem_config": "{\\"frozen_model\\": \\"J J\\", \\"prob_primary\\": 0.5}"}'),
        ("hydra.yaml", "- \"+a.tandem.frozen_model='J J'\"\n- a.tandem.prob_primary=0.5\n- ~a.tandem.chunk_size\n"),
        ("anchors.yaml", "base: &base {frozen_model: J J, prob_primary: 0.5}\nrun: {tandem: {<<: *base}}\n"),
        ("a b's.yaml", "x:\n- tandem: {frozen_model: 'J J', prob_primary: 0.5}\n"),
    ],
)
def test_a_tandem_config_is_found_however_it_is_written(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert cli.main(["migrate", "--settings", str(tmp_path / name)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"models": {"junior": "J J"}, "tandem": {"prob_senior": 0.5}}


@pytest.mark.parametrize("flags", [[], ["--settings"]], ids=str)
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("comments.json", b'{\n  // the junior\n  "frozen_model": "J"}'),
        ("binary.yaml", b"\xff\xfe"),
        ("endless.yaml", b"a: &a\n  b: *a\n  frozen_model: J\n"),
        ("code.yaml", b"frozen_model: !!python/object/apply:os.getcwd []\n"),
    ],
)
def test_what_is_no_file_to_migrate_is_one_line_that_names_it_once(
    name: str, data: bytes, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    assert cli.main(["migrate", *flags, str(file)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (1 if flags else 2), "and the count"
    assert (said[0].count(name), said[0].count("Remedy")) == (1, 1)


def test_the_authors_sentence_strategy_alternates() -> None:
    found = tandem_settings(["+rollout.tandem.selection_strategy=sentence", "+rollout.tandem.prob_primary=0.5"])
    assert found.settings == {"tandem.selection_strategy": "sentence", "tandem.author_schedule": "alternate"}
    with pytest.raises(ConfigError, match="TandemConfig"):
        tandem_settings({"a": 1})
    with pytest.raises(ConfigError, match="2 that differ"):
        tandem_settings([{"junior_model": "a"}, {"junior_model": "b"}])


def test_every_setting_that_a_tandem_config_becomes_exists() -> None:
    """A name that moves in the settings must move here, too."""
    names = {place[0] for place in SETTINGS.values() if place is not None}
    known = {name for name, _, _ in fields_of()}
    assert names
    assert names <= known


@pytest.mark.parametrize(
    ("devices", "count"), [("6,7", 2), ("[6, 7]", 2), ("6", 1), ([6, 7], 2), (6, 1), ("cuda:0, cuda:1,", 2)]
)
def test_devices_are_counted_however_they_are_spelt(devices: object, count: int) -> None:
    read = SETTINGS["junior_gpu_devices"]
    assert read is not None
    assert read[1](devices) == count

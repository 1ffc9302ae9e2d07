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
from slime_tandem.config.migrate import DROPPED, RENAMED, Change, migrate_file, migrate_text, migrate_tree, migrate_yaml
from slime_tandem.errors import ConfigError

KEYS = st.sampled_from([*RENAMED, "chunk_size", "max_gap_tokens", "selection_strategy", "primary", "frozen", "x"])
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
    assert values_of(new) == values_of(tree)
    assert len(changes) == sum(k in RENAMED for k in keys_of(tree))
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
    changes = migrate_file(tmp_path / "c.pt", write=True)
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

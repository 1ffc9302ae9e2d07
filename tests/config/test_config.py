"""The settings tree: every misuse is a ConfigError that names the field, its value, what was expected and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from slime_tandem.config import KlEstimator, RunConfig, fields_of, load, read_yaml_mapping
from slime_tandem.config.migrate import migrate_file
from slime_tandem.errors import ConfigError, TandemError, explain
from slime_tandem.strategies import STRATEGIES


def problem(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping(tree)
    assert "Remedy: " in str(caught.value)
    assert "expected " in str(caught.value)
    return str(caught.value)


def override_problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(overrides=overrides)
    return str(caught.value)


# ---- single settings ----

BAD_VALUES: list[tuple[str, Any, str]] = [
    ("tandem.prob_senior", 1.5, "less than or equal to 1"),
    ("tandem.prob_senior", -0.1, "greater than or equal to 0"),
    ("tandem.prob_senior", float("nan"), "finite number"),
    ("tandem.prob_senior", "nan", "finite number"),
    ("tandem.prob_senior", "half", "valid number"),
    ("tandem.prob_senior", True, "another type than true or false"),
    ("tandem.prob_senior", None, "valid number"),
    ("tandem.prob_senior", [0.5], "valid number"),
    ("tandem.max_gap_tokens", 0, "greater than or equal to 1"),
    ("tandem.max_gap_tokens", 1.5, "valid integer"),
    ("tandem.max_gap_tokens", False, "another type than true or false"),
    ("tandem.boundary_token_ids", "1,2", "valid tuple"),
    ("tandem.boundary_token_ids", ["x"], "valid integer"),
    ("tandem.boundary_classes", [], "at least 1 item"),
    ("tandem.boundary_classes", ["space", "newline", "space"], "each class once"),
    ("tandem.boundary_classes", "space", "valid tuple"),
    ("tandem.boundary_classes", None, "valid tuple"),
    ("tandem.selection_strategy", "sentences", "did you mean 'sentence'?"),
    ("tandem.selection_strategy", None, "one of 'word', 'bernoulli', 'sentence', 'chunk' or 'alternating'"),
    ("tandem.chunk_size", 0, "greater than or equal to 1"),
    ("tandem.chunk_size", -3, "greater than or equal to 1"),
    ("tandem.enabled", "perhaps", "valid boolean"),
    ("tandem.enabled", 2, "valid boolean"),
    ("optimizer.lr", 0.0, "greater than 0"),
    ("optimizer.lr", math.inf, "finite number"),
    ("optimizer.lr", True, "another type than true or false"),
    ("optimizer.beta1", 1.0, "less than 1"),
    ("opd.clip", 0.0, "greater than 0"),
    ("opd.on_failed_sample", "ignore", "one of 'drop_opd', 'drop_sample' or 'stop'"),
    ("objective.kl_estimator", "k4", "one of 'k1', 'k2' or 'k3'"),
    ("objective.clip_low", 1.0, "less than 1"),
    ("models.senior", 7, "valid string"),
    ("eval.top_k", 0, "-1 (whole vocabulary) or at least 1"),
    ("eval.chains", 0, "greater than or equal to 1"),
    ("eval.resamples", 10, "greater than or equal to 100"),
    ("tandem.author_schedule", "toggle", "one of 'draw' or 'alternate'"),
    ("models.dtype", "float16", "one of 'float32' or 'bfloat16'"),
    ("engine.request_timeout_s", -1, "greater than 0"),
    ("train.steps", -1, "greater than or equal to 0"),
    ("name", "../escape", "match pattern"),
    ("name", "", "match pattern"),
    ("name", "run\n", "match pattern"),
    ("seed", 2**63, "less than"),
    ("seed", -1, "greater than or equal to 0"),
    ("tasks", [], "at least 1 item"),
    ("tandem", None, "valid dictionary"),
    ("tandem", 5, "valid dictionary"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD_VALUES, ids=lambda v: repr(v)[:30])
def test_a_bad_value_is_named_with_what_was_expected(name: str, value: Any, expected: str) -> None:
    tree: Any = value
    for part in reversed(name.split(".")):
        tree = {part: tree}
    text = problem(tree)
    first = text.splitlines()[0]
    assert first.startswith(name)
    assert expected in first
    assert isinstance(value, list) or f"={value!r}: " in first


def test_a_misspelt_strategy_gets_a_suggestion() -> None:
    text = problem({"tandem": {"selection_strategy": "wrod"}})
    assert text.startswith("tandem.selection_strategy='wrod': expected one of ")
    assert all(repr(s) in text for s in STRATEGIES)
    assert "did you mean 'word'?" in text
    assert "did you mean" not in problem({"tandem": {"selection_strategy": "zzz"}})
    assert "did you mean 'sentence'?" in problem({"eval": {"handoff_strategy": "sentences"}})


@pytest.mark.parametrize(
    ("tree", "where", "hint"),
    [
        ({"tandem": {"prob_seniour": 0.5}}, "tandem.prob_seniour=0.5", "did you mean `tandem.prob_senior`?"),
        ({"tandme": {"prob_senior": 0.5}}, "tandme={'prob_senior': 0.5}", "did you mean `tandem`?"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature=1", "did you mean `sampling.temperature`?"),
        ({"qqqqqq": 1}, "qqqqqq=1", "`slime-tandem config --list` lists all settings"),
        ({"tasks": [{"familly": "x", "family": "chain_sum"}]}, "tasks.0.familly='x'", "did you mean `tasks.family`?"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(tree: dict[str, Any], where: str, hint: str) -> None:
    text = problem(tree)
    assert text.startswith(f"{where}: expected a known setting. Remedy: ")
    assert hint in text


def test_names_of_other_projects_are_unknown() -> None:
    for name in ("prob_primary", "frozen_model", "model_a_mask"):
        assert f"tandem.{name}=1: expected a known setting" in problem({"tandem": {name: 1}})


def test_every_problem_is_listed_at_once() -> None:
    text = problem({"tandem": {"prob_senior": 2, "chunk": 1}, "optimizer": {"lr": -1}})
    assert [line.split("=")[0] for line in text.splitlines()] == ["tandem.prob_senior", "tandem.chunk", "optimizer.lr"]


def test_a_broken_task_is_reported_once() -> None:
    text = problem({"tasks": [{"weight": 1}]})
    assert text.splitlines() == [line for line in text.splitlines() if line.startswith("tasks.0.family")]


def test_errors_are_of_one_family() -> None:
    assert issubclass(ConfigError, TandemError)
    assert issubclass(ConfigError, ValueError)
    assert explain("a.b", "x", "y", "z") == "a.b='x': expected y. Remedy: z."


# ---- contradictions ----

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"sampling": {"temperature": 0}}, "opd.enabled=True: expected sampling.temperature above 0"),
    ({"sampling": {"top_p": 0.9}}, "opd.enabled=True: expected sampling.temperature above 0, top_p=1"),
    (
        {"opd": {"teacher_temperature": "rollout", "selection": {"selector": "tip", "ratio": 0.1}}},
        "opd.teacher_temperature='rollout': expected 1 with a selection",
    ),
    ({"sampling": {"top_k": 20}}, "opd.enabled=True"),
    ({"sampling": {"min_p": 0.1}}, "opd.enabled=True"),
    (
        {"sampling": {"top_p": 0.9}, "opd": {"enabled": False}, "engine": {"mode": "fused"}},
        "sampling.truncation_replay='kept_ids': expected recompute",
    ),
    (
        {
            "sampling": {"top_p": 0.9, "min_p": 0.1, "truncation_replay": "recompute"},
            "opd": {"enabled": False},
            "engine": {"senior_url": "http://h:1"},
        },
        "sampling.min_p=0.1: expected 0",
    ),
    (
        {
            "sampling": {"top_p": 0.9, "truncation_replay": "recompute"},
            "opd": {"enabled": False},
            "objective": {"rollout_weights": "truncated"},
        },
        "objective.rollout_weights='truncated': expected none",
    ),
    ({"sampling": {"top_k": 0}}, "sampling.top_k=0: expected -1"),
    ({"sampling": {"temperature": 0}, "opd": {"enabled": False}}, "sampling.temperature=0.0: expected"),
    ({"train": {"samples_per_prompt": 1}}, "train.samples_per_prompt=1: expected at least 2"),
    ({"eval": {"temperature": 0}}, "eval.chains=8: expected 1 with eval.temperature=0"),
    ({"train": {"prompts_per_step": 8, "updates_per_step": 3}}, "train.updates_per_step=3: expected a divisor"),
    ({"objective": {"reward_coef": 0}, "opd": {"enabled": False}}, "objective.reward_coef=0.0: expected opd.enabled=true"),
    ({"objective": {"reward_coef": 0}, "opd": {"coef": 0}}, "objective.reward_coef=0.0: expected opd.enabled=true"),
    ({"tandem": {"selection_strategy": "chunk", "boundary_token_ids": [3]}}, "tandem.boundary_token_ids=[3]: expected null"),
    ({"tandem": {"selection_strategy": "bernoulli", "boundary_token_ids": []}}, "tandem.boundary_token_ids=[]: expected null"),
    *(
        ({"tandem": {"selection_strategy": s, "boundary_classes": ["newline"]}}, "tandem.boundary_classes=['newline']: ")
        for s in ("sentence", "bernoulli", "chunk", "alternating")
    ),
    *(
        ({"tandem": {"selection_strategy": s, "max_gap_tokens": 8}}, "tandem.max_gap_tokens=8: expected 32")
        for s in ("sentence", "bernoulli", "chunk", "alternating")
    ),
    *(
        ({"tandem": {"selection_strategy": s, "chunk_size": 8}}, "tandem.chunk_size=8: expected 16")
        for s in ("word", "sentence", "bernoulli", "alternating")
    ),
    *(
        ({"tandem": {"selection_strategy": s, "prob_senior": 0.3}}, "tandem.prob_senior=0.3: expected 0.5")
        for s in ("chunk", "alternating")
    ),
    *(
        (
            {"tandem": {"selection_strategy": s, "author_schedule": "alternate", "prob_senior": 0.3}},
            "tandem.prob_senior=0.3: expected 0.5 (the default) with tandem.author_schedule='alternate'",
        )
        for s in ("word", "sentence", "bernoulli")
    ),
    (
        {"tandem": {"boundary_token_ids": [3], "boundary_classes": ["space", "newline"]}},
        "tandem.boundary_classes=['space', 'newline']: expected ['space']",
    ),
    ({"opd": {"top_k": 4}}, "opd.top_k=4: expected 16 (the default) with opd.signal='sampled'"),
    ({"opd": {"support": "union"}}, "opd.support='union': expected teacher"),
    ({"opd": {"signal": "reverse_kl", "jsd_beta": 0.3}}, "opd.jsd_beta=0.3: expected 0.5"),
    ({"opd": {"signal": "forward_kl", "clip": 5}}, "opd.clip=5.0: expected 10.0"),
    ({"opd": {"signal": "jsd", "alignment": "even"}}, "opd.alignment='even': expected strict"),
    ({"opd": {"thinking": "drop", "teachers": [{"name": "a", "model": "m"}]}}, "opd.thinking='drop': expected keep"),
    ({"opd": {"template_kwargs": {"a": 1}, "teachers": [{"name": "a", "model": "m"}]}}, "opd.template_kwargs={'a': 1}: "),
    ({"opd": {"teachers": [{"name": "a", "model": "m"}]}, "models": {"teacher": "t"}}, "opd.teachers=['a']: expected models"),
    (
        {"opd": {"teachers": [{"name": "a", "model": "m"}]}, "engine": {"teacher_url": "http://h:1"}},
        "opd.teachers=['a']: expected models.teacher and engine.teacher_url at their defaults",
    ),
    ({"opd": {"teachers": [{"name": "a", "model": "m"}] * 2}}, "opd.teachers="),
    ({"opd": {"teachers": [{"name": "a", "model": "m", "url": "ftp://h"}]}}, "opd.teachers.0.url='ftp://h': "),
    ({"opd": {"teachers": [{"name": "a", "model": "m", "wieght": 2}]}}, "opd.teachers.0.wieght=2: expected a known setting"),
    ({"opd": {"teachers": [{"name": "a", "model": "m", "weight": 0}]}}, "opd.teachers.0.weight=0: "),
    ({"opd": {"position_discount": 0}}, "opd.position_discount=0: "),
    ({"opd": {"selection": {"selector": "teachabilty"}}}, "opd.selection.selector='teachabilty': expected one of 'full'"),
    ({"opd": {"selection": {"selector": "tip", "ratio": 0}}}, "opd.selection.ratio=0: expected greater than 0"),
    ({"opd": {"selection": {"selector": "tip", "ratio": 1.5}}}, "opd.selection.ratio=1.5: expected less than or equal to 1"),
    ({"opd": {"selection": {"selector": "tip", "ratio": math.nan}}}, "opd.selection.ratio=nan: expected"),
    ({"opd": {"selection": {"ratio": 0.1}}}, "opd.selection.ratio=0.1: expected 1.0 (the default) with opd.selection.selector"),
    ({"opd": {"selection": {"selector": "full", "top_k": 4}}}, "opd.selection.top_k=4: expected 16 (the default)"),
    ({"opd": {"selection": {"selector": "tip", "gamma": 0.2}}}, "opd.selection.gamma=0.2: expected 0.5 (the default)"),
    ({"opd": {"selection": {"selector": "tip", "prefix_alpha": 0.2}}}, "opd.selection.prefix_alpha=0.2: expected 0.9"),
    ({"opd": {"selection": {"selector": "tip", "rules": "reference"}}}, "opd.selection.missing_mass='exact': expected fill"),
    (
        {"opd": {"selection": {"selector": "tip", "rules": "reference", "missing_mass": "fill", "denominator": "valid"}}},
        "opd.selection.denominator='valid': expected selected",
    ),
    ({"opd": {"alignment": "even", "selection": {"selector": "tip"}}}, "opd.alignment='even': expected strict with"),
    ({"tasks": [{"family": "jsonl"}]}, "tasks.0="),
    ({"tasks": [{"family": "chain_sum", "path": "x.jsonl"}]}, "tasks.0="),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "start"), CONTRADICTIONS)
def test_contradictions_are_refused(tree: dict[str, Any], start: str) -> None:
    assert problem(tree).startswith(start)


@pytest.mark.parametrize(
    "tree",
    [
        {"sampling": {"temperature": 0.6}, "opd": {"enabled": False}},
        {"sampling": {"temperature": 0.6}},
        {"sampling": {"temperature": 0.6}, "opd": {"teacher_temperature": "rollout"}},
        {"sampling": {"temperature": 0.6, "top_p": 0.8, "top_k": 20}, "opd": {"enabled": False}, "train": {"steps": 0}},
        {"sampling": {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.1}, "opd": {"enabled": False}},
        {
            "sampling": {"top_p": 0.8, "truncation_replay": "recompute"},
            "opd": {"enabled": False},
            "engine": {"mode": "fused"},
        },
        {"sampling": {"temperature": 0}, "opd": {"enabled": False}, "train": {"steps": 0}},
        {"train": {"samples_per_prompt": 1}, "objective": {"reward_coef": 0}},
        {"train": {"prompts_per_step": 8, "updates_per_step": 4}},
        {"tandem": {"selection_strategy": "sentence", "boundary_token_ids": [3]}},
        {"tandem": {"author_schedule": "alternate", "prob_senior": 0.5}},
        {"tandem": {"boundary_classes": ["newline", "punctuation"], "max_gap_tokens": 1}},
        {
            "tandem": {
                "selection_strategy": "chunk",
                "chunk_size": 1,
                "boundary_classes": ["space"],
                "max_gap_tokens": 32,
            }
        },
        {"tasks": [{"family": "jsonl", "path": "x.jsonl"}]},
    ],
)
def test_what_looks_odd_but_holds_is_accepted(tree: dict[str, Any]) -> None:
    RunConfig.from_mapping(tree)


# ---- files ----


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config='.*nope\.yaml': expected an existing YAML file. Remedy: check"):
        RunConfig.load(tmp_path / "nope.yaml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a readable UTF-8 text file"):
        RunConfig.load(tmp_path)


BROKEN = {
    "unclosed": "tandem: {prob_senior: 0.5",
    "tab": "tandem:\n\tprob_senior: 0.5",
    "python object": "tandem: !!python/object/apply:os.system ['false']",
    "python name": "name: !!python/name:os.system",
    "unknown tag": "name: !thing x",
    "impossible date": "name: 2024-13-45",
    "control character": "name: \x01",
    "unhashable key": "{[1]: 2}",
    "abyss": "[" * 3_000,
    "two documents": "a: 1\n---\nb: 2",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_or_dangerous_yaml_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BROKEN[kind], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--config=.*expected valid YAML"):
        RunConfig.load(path)


def test_a_python_tag_runs_nothing(tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "c.yaml"
    path.write_text(f"name: !!python/object/apply:os.mkdir ['{marker}']", encoding="utf-8")
    with pytest.raises(ConfigError):
        RunConfig.load(path)
    assert not marker.exists()


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "1: 2\n", "5\n"])
def test_yaml_that_is_no_mapping_of_names_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a mapping of section names"):
        RunConfig.load(path)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="expected a readable UTF-8 text file"):
        RunConfig.load(path)


@pytest.mark.parametrize("text", ["", "# nothing set\n", "---\n"])
def test_an_empty_file_is_all_defaults(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    assert read_yaml_mapping(path) == {}
    assert RunConfig.load(path) == RunConfig.load() == RunConfig()


def test_scientific_notation_is_a_number(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-5 as a string."""
    path = tmp_path / "c.yaml"
    path.write_text("optimizer: {lr: 1e-5, weight_decay: 1.0e-2}\n", encoding="utf-8")
    optimizer = RunConfig.load(path).optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (1e-5, 1e-2)


# ---- overrides ----


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("tandem: {prob_senior: 0.1, max_gap_tokens: 3}\nseed: 4\n", encoding="utf-8")
    config = RunConfig.load(path, ["tandem.prob_senior=0.2", "tandem.prob_senior=0.3", "name=x.y_z-1"])
    assert (config.tandem.prob_senior, config.tandem.max_gap_tokens, config.seed, config.name) == (0.3, 3, 4, "x.y_z-1")


@pytest.mark.parametrize(
    ("item", "name", "value"),
    [
        ("optimizer.lr=1e-5", "optimizer.lr", 1e-5),
        ("opd.clip=null", "opd.clip", None),
        ("tandem.enabled=false", "tandem.enabled", False),
        ("tandem.boundary_token_ids=[1, 2]", "tandem.boundary_token_ids", (1, 2)),
        ("models.senior=/a/b=c", "models.senior", "/a/b=c"),
        ("models.senior=builtin:senior", "models.senior", "builtin:senior"),
        ("sampling={max_new_tokens: 9}", "sampling.max_new_tokens", 9),
        ("train.threads=2", "train.threads", 2),
    ],
)
def test_override_values_are_yaml(item: str, name: str, value: Any) -> None:
    node: Any = RunConfig.load(overrides=[item])
    for part in name.split("."):
        node = getattr(node, part)
    assert node == value


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("tandem.prob_senior", "--set='tandem.prob_senior': expected key=value with a dotted key"),
        ("=1", "--set='=1': expected key=value"),
        ("", "--set='': expected key=value"),
        ("seed=[1", "--set='seed=[1': expected a YAML value (while parsing a flow sequence"),
        ("name=2024-13-45", "expected a YAML value"),
        ("name=!!python/name:os.system", "expected a YAML value"),
        ("seed=" + "[" * 3_000, "expected a YAML value"),
        ("seed.x=1", "seed={'x': 1}: expected"),
        ("tasks.0.family=x", "expected a list at `tasks` in the file of settings"),
        ("opd.teachers.0.url=x", "set the whole list: --set 'opd.teachers=[...]'"),
        ("train.steps=010", "010 is octal, or of base 60; write a decimal number"),
        ("train.steps=12:30", "12:30 is octal, or of base 60"),
        ("optimizer.lr=1:30.5", "1:30.5 is octal, or of base 60"),
        (
            "tasks=[{family: jsonl, path: a, answer_format: 'regex:('}]",
            "a regular expression of RE2 behind `regex:` (missing ): ()",
        ),
        ("tandem.prob_seniour=1", "did you mean `tandem.prob_senior`?"),
        ("tandem.prob_senior=", "tandem.prob_senior='': expected"),
        ("tandem..prob_senior=1", "expected a known setting"),
    ],
    ids=lambda v: v[:30],
)
def test_bad_overrides_are_refused(item: str, text: str) -> None:
    assert text in override_problem(item)


def test_an_entry_of_a_list_is_set_by_its_number_as_errors_name_it() -> None:
    two = "tasks=[{family: chain_sum}, {family: gcd}]"
    tasks = RunConfig.load(overrides=[two, "tasks.1.weight=2", "tasks.0={family: lcm}"]).tasks
    assert [(t.family, t.weight) for t in tasks] == [("lcm", 1.0), ("gcd", 2.0)]
    for item in ("tasks.2.weight=2", "tasks.x.weight=2", "tasks.-1.weight=2"):
        with pytest.raises(ConfigError, match="an entry of the list, 0 to 1"):
            RunConfig.load(overrides=[two, item])


def yaml_bomb(*, merge: bool = False) -> str:
    """Ten levels of nine aliases, in one line."""
    lines = ["{x: 1}" if merge else "[1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for i in range(1, 10):
        names = ", ".join([f"*a{i - 1}"] * 9)
        lines.append(f"{{<<: [{names}], x{i}: 1}}" if merge else f"[{names}]")
    return "{" + ", ".join(f"a{i}: &a{i} {line}" for i, line in enumerate(lines)) + "}"


STRICT_YAML = {
    "bomb": (yaml_bomb(), "aliases that unfold to more than 1000000 values"),
    "merged bomb": (yaml_bomb(merge=True), "aliases that unfold to more than 1000000 values"),
    "itself": ("&a [*a]", "or to themselves"),
    "deep": ("[" * 65 + "]" * 65, "more than 64 levels"),
    "deep mapping": ("{a: " * 65 + "1" + "}" * 65, "more than 64 levels"),
    "twice": ("{x: 1, x: 1}", "the key `x` stands twice"),
    "a number of 5000 digits": ("1" + "0" * 5000, "4300"),
    "a class": ("!!python/object/apply:os.system [id]", "could not determine a constructor"),
    "an anchor that is none": ("*nowhere", "undefined alias"),
}


@pytest.mark.parametrize("name", STRICT_YAML)
def test_yaml_is_bounded_and_strict_wherever_it_is_read(tmp_path: Path, name: str) -> None:
    text, says = STRICT_YAML[name]
    assert says in override_problem(f"opd.template_kwargs={text}")
    path = tmp_path / "c.yaml"
    path.write_text(f"opd:\n  template_kwargs: {text}\n")
    readers: tuple[Callable[[], object], ...] = (
        lambda: RunConfig.load(path),
        lambda: read_yaml_mapping(path),
        lambda: migrate_file(path, write=True),
    )
    for read in readers:
        with pytest.raises(ConfigError) as caught:
            read()
        assert says in str(caught.value)
        assert "c.yaml" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_several_documents_and_a_huge_text_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("seed: 1\n---\nseed: 2\n")
    with pytest.raises(ConfigError, match="expected a single document"):
        RunConfig.load(path)
    monkeypatch.setattr(load, "MOST_YAML", 19)
    with pytest.raises(ConfigError, match="20 characters, more than 19"):
        RunConfig.load(path)
    assert "expected the dotted name" in override_problem("a" + ".a" * 100_000 + "=1")


def test_aliases_and_merges_of_a_common_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("opd:\n  template_kwargs: {a: &a {x: 1}, b: [*a, *a], c: {<<: *a, y: 2}}\n")
    kwargs = read_yaml_mapping(path)["opd"]["template_kwargs"]
    assert kwargs == {"a": {"x": 1}, "b": [{"x": 1}, {"x": 1}], "c": {"x": 1, "y": 2}}


def test_an_override_below_a_plain_value_is_refused() -> None:
    assert "expected a section at `seed`" in override_problem("seed=1", "seed.x=2")


# ---- the tree as a whole ----


def leaves(model: type[BaseModel] = RunConfig, prefix: str = "") -> set[str]:
    """Every leaf by the values of a built tree rather than by annotations."""
    out: set[str] = set()
    for name in model.model_fields:
        value = getattr(model(), name)
        out |= leaves(type(value), f"{prefix}{name}.") if isinstance(value, BaseModel) else {prefix + name}
    return out


def test_fields_of_covers_every_leaf_with_its_default_and_a_description() -> None:
    rows = list(fields_of())
    assert {name for name, _, _ in rows} == leaves()
    assert len(rows) == len({name for name, _, _ in rows})
    for name, default, description in rows:
        node: Any = RunConfig()
        for part in name.split("."):
            node = getattr(node, part)
        assert node == default, name
        assert description, f"{name} has no description"


def test_every_leaf_can_be_set_by_its_name() -> None:
    for name, default, _ in fields_of():
        value = RunConfig().model_dump()["tasks"] if name == "tasks" else default
        text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n")
        assert RunConfig.load(overrides=[f"{name}={text}"]) == RunConfig(), name


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 1


def test_run_dir() -> None:
    assert RunConfig(name="a", runs_dir="b").run_dir == Path("b/a")


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.integers(), inner, max_size=3),
    max_leaves=6,
)
tasks = st.builds(
    lambda jsonl, weight, config, text: (
        {"family": "jsonl", "path": text, "weight": weight}
        if jsonl
        else {"family": text if text != "jsonl" else "x", "weight": weight, "config": config}
    ),
    st.booleans(),
    st.floats(1e-6, 1e6),
    st.dictionaries(words, plain, max_size=3),
    words,
)
trees = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True),
        "seed": st.integers(0, 2**63 - 1),
        "control": st.booleans(),
        "runs_dir": words,
        "models": st.fixed_dictionaries({}, optional={"senior": words, "dtype": st.sampled_from(["float32", "bfloat16"])}),
        "tasks": st.lists(tasks, min_size=1, max_size=3),
        "tandem": st.fixed_dictionaries(
            {},
            optional={
                "prob_senior": st.floats(0, 1),
                "selection_strategy": st.sampled_from(["word", "sentence"]),
                "boundary_token_ids": st.none() | st.lists(st.integers(0, 10**6), max_size=4),
                "junior_token_loss_weight": st.floats(0, 1e6),
            },
        ),
        "objective": st.fixed_dictionaries({}, optional={"kl_estimator": st.sampled_from(get_args(KlEstimator))}),
        "opd": st.fixed_dictionaries({}, optional={"clip": st.none() | st.floats(1e-9, 1e9)}),
        "optimizer": st.fixed_dictionaries({}, optional={"lr": st.floats(1e-12, 1e3), "eps": st.floats(1e-300, 1)}),
        "eval": st.fixed_dictionaries({}, optional={"every": st.none() | st.integers(1, 10**6)}),
        "engine": st.fixed_dictionaries(
            {}, optional={"senior_url": st.none() | st.sampled_from(["http://127.0.0.1:30000", "https://host.example/base"])}
        ),
    },
)  # fmt: skip


@settings(deadline=None, max_examples=80)
@example(tree={"tasks": [{"family": "\x85", "config": {}}]})
@given(tree=trees)
def test_the_written_tree_loads_as_the_same_tree(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]
) -> None:
    config = RunConfig.from_mapping(tree)
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8", newline="")
    assert RunConfig.load(path) == config


OBJECTIVE_MISUSE = [
    (("kl_target=0.1",), r"objective\.kl_target=0\.1.*objective\.kl_coef=0\.0, which ignores it"),
    (("kl_in=reward",), r"objective\.kl_in='reward'.*kl_coef=0\.0"),
    (("kl_coef=0.1", "kl_guard=stop"), r"objective\.kl_guard='stop'.*kl_target=None"),
    (("kl_coef=20", "kl_target=0.1"), r"objective\.kl_coef=20\.0: expected 0\.0001 to 10"),
    (("kl_coef=0.1", "kl_in=reward", "reward_coef=0"), r"objective\.kl_in='reward': expected loss with reward_coef=0"),
    (("surrogate=cispo", "clip_low=0.1"), r"objective\.clip_low=0\.1.*surrogate='cispo'"),
    (("surrogate=cispo", "dual_clip=3"), r"objective\.dual_clip=3\.0.*surrogate='cispo'"),
    (("dual_clip=1.1",), r"objective\.dual_clip=1\.1: expected above 1 \+ clip_high = 1\.28"),
    (("constant_length=9",), r"objective\.constant_length=9: expected null \(the default\).*reduction='token_mean'"),
    (("rollout_weight_max=3",), r"objective\.rollout_weight_max=3\.0.*rollout_weights='none'"),
    (("rollout_weights=truncated", "rollout_weight_min=0.1"), r"objective\.rollout_weight_min=0\.1.*'truncated'"),
    (("baseline=best",), r"objective\.baseline='best': expected one of 'mean', 'leave_one_out' or 'median'"),
    (("clip_advantages=0",), r"objective\.clip_advantages=0"),
]


@pytest.mark.parametrize(("overrides", "message"), OBJECTIVE_MISUSE)
def test_a_setting_of_the_objective_without_effect_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.load(overrides=[f"objective.{item}" for item in overrides])


def test_the_pull_to_a_junior_needs_its_log_probs() -> None:
    told = override_problem("objective.lambda_jun=0.1", "tandem.junior_tokenizer=any")
    assert told.startswith("objective.lambda_jun=0.1: expected 0 with tandem.junior_tokenizer=any")


OWN = {
    "opd": {
        "signal": "my.things:f",
        "jsd_beta": 0.3,
        "selection": {"selector": "my.things:g", "ratio": 0.1, "gamma": 0.2},
    },
    "tasks": [{"family": "my.things:H", "path": "x", "reward": "my.things:r", "environment": "my.things:e"}],
}


def test_names_of_ones_own_are_kept_and_nothing_is_imported() -> None:
    config = RunConfig.from_mapping(OWN)
    assert (config.opd.signal, config.opd.selection.mask) == ("my.things:f", "my.things:g")
    assert config.tasks[0].tags_its_prompts
    assert RunConfig.from_mapping(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"opd": {"signal": "reverse"}}, "='reverse': expected one of 'sampled', 'reverse_kl', 'forward_kl' or 'jsd', or"),
        ({"opd": {"signal": 3}}, "opd.signal=3: expected one of"),
        ({"opd": {"signal": True}}, "opd.signal=True: expected another type than true or false"),
        ({"tasks": [{"family": "x", "reward": "labels"}]}, "tasks.0.reward='labels': expected 'label' or module:attribute"),
        ({"opd": {"teachers": [{"name": "a"}]}}, "opd.teachers.0={'name': 'a'}: expected a `model`, or a `scorer`"),
        (
            {"opd": {"teachers": [{"name": "a", "scorer": "m:f", "url": "http://x"}]}},
            "expected a `scorer` as module:attribute and no `url`",
        ),
        ({"opd": {"teachers": [{"name": "a", "scorer": "f"}]}}, "expected a `scorer` as module:attribute"),
        (
            {"opd": {"signal": "jsd", "teachers": [{"name": "a", "scorer": "m:f"}]}},
            "opd.signal='jsd': expected sampled with a teacher by `scorer`",
        ),
        (
            {"opd": {"selection": {"selector": "tip"}, "teachers": [{"name": "a", "scorer": "m:f"}]}},
            "opd.selection.selector='tip': expected pure_opd with a teacher by `scorer`",
        ),
        (
            {"cluster": {"reward": "math"}, "tasks": [{"family": "x", "reward": "label"}]},
            "cluster.reward='math': expected null with tasks[].reward",
        ),
    ],
)  # fmt: skip
def test_what_is_no_name_and_what_does_not_go_with_one(tree: dict[str, Any], says: str) -> None:
    assert says in problem(tree)


@pytest.mark.parametrize("name", ["train.steps", "train.prompts_per_step", "sampling.max_new_tokens", "eval.prompts"])
def test_a_number_that_nothing_can_count_to_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*at most 2147483647"):
        RunConfig.load(overrides=[f"{name}={10**30}"])
    assert RunConfig.load(overrides=[f"seed={2**62}"]).seed == 2**62, "it has a bound of its own"

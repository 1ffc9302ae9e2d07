"""Every example of docs/extending.md works as it stands there: the modules are written out, named in the YAML, and run."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import slime_tandem
from slime_tandem.distill.selection import RANKERS, TokenKeys, select
from slime_tandem.distill.teachability import Normalised, TokenScores
from slime_tandem.tasks.families import TaskSet

pytestmark = pytest.mark.usefixtures("forked_servers")

DOCS = Path(__file__).parents[1] / "docs" / "extending.md"
BLOCKS = re.findall(r"^```(python|yaml)\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
MODULES = {re.match(r"# (\w+)\.py\n", text)[1]: text for kind, text in BLOCKS if kind == "python"}  # type: ignore[index]
SETTINGS: list[dict[str, Any]] = [yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml"]


@pytest.fixture(scope="module", autouse=True)
def _own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("own")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    for name in MODULES:
        sys.modules.pop(name, None)


def own(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def of(section: str, key: str) -> list[Any]:
    """What the YAML blocks say of one key of a section."""
    found = [tree[section] for tree in SETTINGS if section in tree]
    return [part[key] for part in found if isinstance(part, dict) and key in part]


def test_every_point_has_an_example() -> None:
    assert set(MODULES) == {
        "own_handoffs", "own_selectors", "own_signals", "own_families", "own_rewards", "own_tools", "own_teachers",
    }  # fmt: skip
    used = set(re.findall(r"(own_\w+):", "".join(text for kind, text in BLOCKS if kind == "yaml")))
    assert used == set(MODULES)


def settings(trio: Any, side_url: Any, runs: Path, **more: Any) -> slime_tandem.RunConfig:
    tree = {
        "name": "r",
        "runs_dir": str(runs),
        "models": {role: str(getattr(trio, role)) for role in ("senior", "junior", "teacher")},
        "engine": {"cache_tokens": 4096, "junior_url": side_url("junior"), "teacher_url": side_url("teacher")},
        "sampling": {"max_new_tokens": 10},
        "train": {"steps": 1, "prompts_per_step": 6, "samples_per_prompt": 2, "threads": 1},
        "eval": {"prompts": 3},
        **more,
    }
    return slime_tandem.RunConfig.from_mapping(tree)


def test_one_run_with_strategy_selector_signal_family_reward_and_environment(
    trio: Any, side_url: Any, tmp_path: Path
) -> None:
    tasks = [task for tree in SETTINGS for task in tree.get("tasks", ())]
    assert len(tasks) == 3
    (signal,), (selection,) = of("opd", "signal"), of("opd", "selection")
    (strategy,) = of("tandem", "selection_strategy")
    opd = {"signal": signal, "top_k": 8, "selection": selection}
    # Stop strings that random models meet end their turns, so that the tool has its say.
    sampling = {"max_new_tokens": 60, "stop": ["a", "e", "i", "1"]}
    config = settings(
        trio,
        side_url,
        tmp_path / "runs",
        tasks=tasks,
        opd=opd,
        sampling=sampling,
        tandem={"selection_strategy": strategy},
    )
    run = slime_tandem.train(config)
    assert run.config.tasks == config.tasks, "the resolved settings keep the names"
    assert run.config.tandem.selection_strategy == "own_handoffs:after_digit"
    assert 1.0 <= run.steps[0]["tandem/tokens_per_stretch"] <= 6.0, "a run ends after a digit, or after six tokens"
    (row,) = run.steps
    assert 0.3 < row["selection/keep_ratio"] <= 0.7
    assert row["train/opd_loss"] > 0
    shown = [t for t in run.transcripts if t["phase"] == "eval"][:3]
    assert {t["task"] for t in shown} == {"squares", "chain_sum"}
    assert any(token["author"] is None for t in shown for token in t["tokens"]), "the tool's words stand in a response"
    assert any(t["reward"] > 0 for t in shown if t["task"] == "chain_sum"), "brevity pays"


def test_a_run_taught_by_a_scorer_is_one_taught_by_a_server(trio: Any, side_url: Any, tmp_path: Path) -> None:
    (teachers,) = of("opd", "teachers")
    teachers = [{**t, "model": t["model"].replace("TEACHER", str(trio.teacher))} for t in teachers]
    served = settings(trio, side_url, tmp_path / "served")
    tree = {**served.model_dump(), "runs_dir": str(tmp_path / "own"), "opd": {"teachers": teachers}}
    tree["engine"]["teacher_url"] = None
    tree["models"]["teacher"] = "builtin:teacher"
    mine = slime_tandem.train(slime_tandem.RunConfig.from_mapping(tree)).steps[0]
    theirs = slime_tandem.train(served).steps[0]
    assert mine["opd/coverage"] == theirs["opd/coverage"] > 0
    assert mine["opd/teacher_kl"] == pytest.approx(theirs["opd/teacher_kl"], abs=1e-4)


def test_the_selector_by_hand() -> None:
    one = [Normalised(np.array(x), np.array(x)) for x in ([0.9, 0.1, 0.5], [0.5, 0.4, 0.1], [0.0, 0.0, 0.0])]
    scores = TokenScores(*one, np.ones(3, dtype=bool))
    keys = TokenKeys(np.zeros(3, dtype=np.int64), np.arange(3))
    mask = select(scores, keys, "own_selectors:surprised", 0.3, seed=0, rollout_id=0, gamma=1.0)
    assert mask.tolist() == [False, True, False]
    assert "own_selectors:surprised" not in RANKERS


def test_the_family_refuses_its_config_and_keeps_the_sides_apart() -> None:
    spec = slime_tandem.RunConfig.from_mapping({"tasks": [{"family": "own_families:Squares"}]}).tasks[0]
    tasks = TaskSet([spec], 0)
    train = {p.prompt_id for p in tasks.train_prompts(0, 200)}
    assert not train & {p.prompt_id for p in tasks.heldout_prompts(5)}
    with pytest.raises(slime_tandem.ConfigError, match=r"tasks\.0\.config\.below=1: expected a whole number above 1"):
        TaskSet([spec.model_copy(update={"config": {"below": 1}})], 0)


def test_a_reward_of_batches_and_the_tutorials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = slime_tandem.RunConfig.from_mapping(
        {"tasks": [{"family": "chain_sum", "reward": "own_rewards:shortest"}]}
    ).tasks[0]
    tasks = TaskSet([spec], 0)
    a, b = tasks.train_prompts(0, 2)
    assert [v.reward for v in tasks.verdicts([(a, "long"), (a, "l"), (b, "longer")])] == [0.0, 1.0, 1.0]
    tutorial = (DOCS.parent / "tutorial.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n# my_module\.py.*?\n(.*?)^```", tutorial, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_module.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "2 + 2 =", "label": 4, "difficulty": 3}\n', encoding="utf-8")
    task = {"family": "jsonl", "path": str(file), "reward": "my_module:my_reward"}
    tasks = TaskSet(slime_tandem.RunConfig.from_mapping({"tasks": [task]}).tasks, 0)
    (verdict,) = tasks.verdicts([(next(iter(tasks.listed_prompts)), "It is 4")])
    assert verdict.parts == {"correct": 3.0, "brief": 1.0}
    assert verdict.right

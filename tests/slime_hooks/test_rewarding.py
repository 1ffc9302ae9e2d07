"""A reward of the user's own under slime: the same function, its parts, what fails, many at once, and whole groups."""

from __future__ import annotations

import asyncio
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.slime_hooks import hooks, settings, wire
from slime_tandem.slime_hooks.rewarding import response_of
from slime_tandem.types import Message, Prompt

REWARDS = """
import asyncio

calls = []

def parts(text, label, level=0):
    if text == "bad":
        raise RuntimeError("no such text")
    return {"correct": float(text == label), "brief": 1 / (1 + len(text)), "level": level}

def given(text, label, metadata, prompt_id=None):
    if label == ["a", "b"]:
        return len(text)
    return len(metadata) + 10 * (metadata.get("messages") == "mine") + 100 * (prompt_id == 7)

def sizes(texts):
    calls.append(texts)
    return {"size": [len(texts)] * len(texts), "call": [len(calls)] * len(texts)}

async def later(response_ids, authorship_mask, finish_reason):
    await asyncio.sleep(0.2)
    return len(response_ids) * 10 + sum(authorship_mask) + (finish_reason == "length") / 2
"""
OURS = {
    "custom_reward_post_process_path": "slime_tandem.slime_hooks.hooks.reward_post_process",
    "custom_rm_path": "slime_tandem.slime_hooks.hooks.reward",
    "reward_key": None,
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(reward, settings, more flags of slime's) -> arguments with these settings."""
    name = f"rewarding_{abs(hash(str(tmp_path))) % 10**12}"
    (tmp_path / f"{name}.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(reward: str, *overrides: str, weights: Any = None, **flags: Any) -> Namespace:
        task = {"family": "chain_sum", "reward": f"{name}:{reward}", "reward_weights": weights}
        config = RunConfig.load(overrides=["opd.enabled=false", "objective.clip_high=0.2", *overrides])
        tree = config.model_dump()
        tree["tasks"] = [task]
        args = Namespace(**{**OURS, **flags})
        settings.use(settings.ANY, RunConfig.from_mapping(tree))
        return args

    return make


def finished(sample_class: Any, index: int, text: str, group: int = 0, **metadata: Any) -> Any:
    return sample_class(
        index=index, group_index=group, tokens=[9, 1, 2, 3], response_length=3, response=text, label="yes",
        rollout_log_probs=[-0.1, -0.2, -0.3], status=sample_class.Status.COMPLETED, metadata={"spec": 0, **metadata},
    )  # fmt: skip


async def rewarded(args: Namespace, samples: list[Any]) -> None:
    for sample, value in zip(samples, await asyncio.gather(*(hooks.reward(args, s) for s in samples)), strict=True):
        sample.reward = value


def test_parts_have_metrics_and_failures_take_no_part(sample_class: Any, own: Any, caplog: Any) -> None:
    args = own("parts", weights={"correct": 1.0, "brief": 0.4, "level": 0.0})
    samples = [finished(sample_class, i, text, task="t", level=i) for i, text in enumerate(("yes", "bad", "no!"))]
    asyncio.run(rewarded(args, samples))
    assert [s.reward for s in samples] == [1.1, 0.0, 0.1]
    kept = samples[1].metadata[wire.UNREWARDED]
    assert kept["why"] == "RuntimeError: no such text"
    assert kept["by"].endswith(":parts (tasks.0.reward)")
    assert wire.prompt_of(samples[1]).metadata == {"spec": 0, "task": "t", "level": 1}, "ours are no columns"
    with caplog.at_level("INFO"):
        wire_samples = list(samples)
        for s in wire_samples:
            wire.put_response(s, wire.response_of(s), junior_weight=0.0)
            wire.put_ends(s, frozenset(), 0)
        hooks.log_rollout(0, args, samples, {}, 0.1)
        data = {"held": {"samples": samples, "rewards": [s.reward for s in samples]}}
        hooks.log_eval(0, args, data, {})
    for metric in (
        "'rollout/reward_parts/t/correct': 0.5", "'rollout/reward_parts/t/brief': 0.25", "'rollout/reward_parts/t/level': 1.0",
        "'reward/raised': 1.0", "'reward/failed_samples': 1.0", "'rollout/reward_mean': 0.6", "'rollout/reward_by_task/t': 0.6",
        "'eval/held/reward/failed_samples': 1.0", "'eval/held/reward_parts/t/correct': 0.5",
    ):  # fmt: skip
        assert metric in caplog.text, metric
    assert data["held"]["rewards"] == [1.1, 0.1], "slime's mean is of those that have a reward"
    raw, advantages = hooks.reward_post_process(args, samples)
    assert raw == [1.1, 0.0, 0.1]
    assert advantages == pytest.approx([0.5, 0.0, -0.5]), "what failed is not in its group's mean"
    assert [s.remove_sample for s in samples] == [False, True, False]


@pytest.mark.parametrize("with_log_probs", [True, False])
def test_a_sample_without_a_reward_is_still_distilled(sample_class: Any, own: Any, with_log_probs: bool) -> None:
    import numpy as np

    from slime_tandem.types import AlignedScores

    args = own("parts", "opd.enabled=true")
    samples = [finished(sample_class, i, text) for i, text in enumerate(("yes", "bad", "no!"))]
    asyncio.run(rewarded(args, samples))
    for s in samples:
        wire.put_scores(s, AlignedScores(np.full(3, -0.2), np.ones(3, dtype=bool), {"boundary": 0}))
        if not with_log_probs:
            s.rollout_log_probs = None
    _, advantages = hooks.reward_post_process(args, samples)
    assert advantages[1] == 0.0
    assert advantages[0] == -advantages[2] > 0.4
    if with_log_probs:
        channels = samples[1].teacher_log_probs
        assert channels[:, wire.WEIGHT].sum() == 0, "no task reward"
        assert channels[:, wire.OPD_WEIGHT].sum() == 3, "the teacher's signal"
        assert (samples[1].loss_mask, samples[1].remove_sample) == ([1, 1, 1], False)
    else:
        assert samples[1].remove_sample


def test_a_rollout_of_failures_and_slimes_own_mean_are_refused(sample_class: Any, own: Any) -> None:
    args = own("parts")
    samples = [finished(sample_class, i, "bad") for i in range(3)]
    asyncio.run(rewarded(args, samples))
    who = r"\w+:parts \(tasks\.0\.reward\) raised: RuntimeError: no such text"
    with pytest.raises(DataError, match=rf"responses without a reward \(rollout 7\)='3 of 3'.*\n{who}"):
        hooks.log_rollout(7, args, [_written(s) for s in samples], {}, 0.1)
    data = {"held": {"samples": samples, "rewards": [s.reward for s in samples]}}
    with pytest.raises(DataError, match=rf"\(evaluation at rollout 7, set held\)='3 of 3'.*\n{who}"):
        hooks.log_eval(7, args, data, {})
    with pytest.raises(DataError, match="3 of 3"):
        hooks.reward_post_process(args, samples)
    with pytest.raises(
        DataError,
        match=r"reward of sample 4='none \(.*:parts \(tasks.0.reward\) raised.*slime's own advantages would count it as 0",
    ):
        asyncio.run(rewarded(own("parts", custom_reward_post_process_path=None), [finished(sample_class, 4, "bad")]))
    with pytest.raises(DataError, match=r"reward of sample 4=.*expected a number"):
        asyncio.run(rewarded(own("parts", "reward.on_failed_sample=stop"), [finished(sample_class, 4, "bad")]))


def _written(sample: Any) -> Any:
    wire.put_response(sample, wire.response_of(sample), junior_weight=0.0)
    return sample


def test_without_labels_there_is_no_reward_and_the_teachers_are_the_evaluation(
    sample_class: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from slime_tandem.distill.alignment import UNALIGNED_REASONS
    from slime_tandem.types import AlignedScores

    class Teachers:
        async def score(self, sample: Any) -> None:
            none = dict.fromkeys(UNALIGNED_REASONS, 0)
            mask = np.ones(3, dtype=bool)
            of_each = {"ant": (np.full(3, -0.6), mask), "bee": (np.full(3, -0.2), mask)}
            wire.put_scores(sample, AlignedScores(np.full(3, -0.4), mask, none, by_teacher=of_each))

    async def current(args: Any) -> Teachers:
        return Teachers()

    monkeypatch.setattr(hooks.runtime, "current", current)
    args = Namespace(logged_rollout_id=0, custom_reward_post_process_path="ours")
    settings.use(
        args, RunConfig.load(overrides=["objective.reward_coef=0", "opd.enabled=true", "tandem.enabled=false"])
    )
    bare, labelled = (finished(sample_class, i, "<answer>yes</answer>") for i in (0, 1))
    bare.label = None
    for sample in (bare, labelled):
        asyncio.run(hooks.score_sample(args, sample, evaluation=True))
        sample.reward = asyncio.run(hooks.reward(args, sample))
        wire.put_ends(_written(sample), frozenset(), 0)
    assert (bare.reward, labelled.reward) == (0.0, 1.0), "slime is told a number"
    assert wire.verdict_of(bare).unasked
    assert not wire.verdict_of(labelled).unasked
    assert (wire.SCORES in bare.metadata, wire.SCORES in labelled.metadata) == (True, False)

    def logged(samples: list[Any]) -> tuple[bool, str]:
        caplog.clear()
        with caplog.at_level("INFO"):
            ours = hooks.log_eval(3, args, {"held": {"samples": samples, "rewards": [s.reward for s in samples]}}, {})
        return ours, caplog.text

    ours, said = logged([bare])
    assert ours, "slime's own log would show its 0.0"
    for name, kl in (("", 0.2), ("/ant", 0.4), ("/bee", 0.0)):  # the senior's own are -0.1, -0.2 and -0.3
        (found,) = re.findall(rf"'eval/held/opd/teacher_kl{name}': ([-\d.e]+)", said)
        assert float(found) == pytest.approx(kl, abs=1e-9)
    assert "reward_mean" not in said
    ours, said = logged([bare, labelled])
    assert not ours
    assert "'eval/held/rollout/reward_mean': 1.0" in said, "of the one that has a reward"
    caplog.clear()
    with caplog.at_level("INFO"):
        hooks.log_rollout(0, args, [bare], {}, 0.1)
    assert "reward_mean" not in caplog.text
    assert "'reward/failed_samples': 0.0" in caplog.text
    hooks.reward_post_process(args, [bare])
    assert bare.teacher_log_probs[:, wire.WEIGHT].sum() == 3, "nothing failed: the KL to the start holds"


def test_those_that_wait_go_together(sample_class: Any, own: Any) -> None:
    args = own("sizes", weights={"size": 1.0, "call": 0.0})
    samples = [finished(sample_class, i, "x") for i in range(40)]
    asyncio.run(rewarded(args, samples))
    assert {s.reward for s in samples} == {40.0}, "all came in one turn of the loop"


def test_async_calls_are_made_side_by_side_and_know_the_tokens(sample_class: Any, own: Any) -> None:
    args = own("later")
    samples = [finished(sample_class, i, "x") for i in range(30)]

    async def both() -> int:
        turns, task = 0, asyncio.create_task(rewarded(args, samples))
        while not task.done():
            await asyncio.sleep(0.01)
            turns += 1
        await task
        return turns

    assert asyncio.run(both()) > 10, "the event loop went on"
    assert {s.reward for s in samples} == {33.0}


def test_a_group_is_one_call(sample_class: Any, own: Any) -> None:
    args = own("sizes", weights={"size": 1.0, "call": 0.0}, group_rm=True)
    group = [finished(sample_class, i, "x") for i in range(3)]
    failed = sample_class(index=3, prompt="xy")
    wire.put_failure(failed, "no answer", [1], 0)
    assert asyncio.run(hooks.reward(args, [*group, failed])) == [3.0, 3.0, 3.0, 0.0]
    by_one = own("parts", group_rm=True)
    assert asyncio.run(hooks.reward(by_one, [finished(sample_class, 0, "yes")])) == [1.25]


def test_a_reward_key_gets_the_parts(sample_class: Any, own: Any) -> None:
    args = own("parts", reward_key="score", eval_reward_key="score")
    (sample,) = samples = [finished(sample_class, 0, "yes")]
    asyncio.run(rewarded(args, samples))
    assert sample.reward == {"correct": 1.0, "brief": 0.25, "level": 0.0, "score": 1.25}
    assert hooks.reward_post_process(args, samples)[0] == [1.25]


def test_slimes_own_mappings_have_metrics_too(sample_class: Any, own: Any, caplog: Any) -> None:
    args = own("parts", custom_rm_path="mine.reward", reward_key="score")
    samples = [_written(finished(sample_class, i, "x")) for i in range(2)]
    for i, s in enumerate(samples):
        s.reward = {"score": float(i), "style": 0.5, "why": "because"}
    with caplog.at_level("INFO"):
        hooks.log_rollout(5, args, samples, {}, 0.1)
    assert "'rollout/reward_parts/slime/style': 0.5" in caplog.text
    assert "why" not in caplog.text.partition("slime_tandem 5:")[2]


def test_equal_rewards_of_the_first_rollout_are_explained(sample_class: Any, own: Any, caplog: Any) -> None:
    args = own("parts")
    config = RunConfig.from_mapping({"tasks": [{"family": "chain_sum"}], "opd": {"enabled": False}})
    settings.use(settings.ANY, config)
    samples = [_written(finished(sample_class, i, f"so it is {i} yes")) for i in range(4)]
    for s in samples:
        s.reward = 0.0
    with caplog.at_level("WARNING"):
        hooks.log_rollout(1, args, samples, {}, 0.1)
    assert "nothing to learn from" not in caplog.text, "of the first rollout alone"
    with caplog.at_level("WARNING"):
        hooks.log_rollout(0, args, samples, {}, 0.1)
    assert "nothing to learn from: all 4 rewards are 0: 4 of 4 responses have no answer" in caplog.text
    assert caplog.text.count("so it is") == 3, "three samples"
    caplog.clear()
    with caplog.at_level("WARNING"):
        hooks.log_rollout(0, Namespace(**{**OURS, "custom_rm_path": None, "rm_type": "math"}), samples, {}, 0.1)
    assert "math gives no other" in caplog.text


def test_a_reward_that_cannot_be_called_is_refused_before_the_job(own: Any) -> None:
    args = own("nothing")
    with pytest.raises(ConfigError, match=r"tasks\.0\.reward"):
        hooks.check_rewards(args, settings.settings(args))


def test_a_label_that_is_no_one_answer_arrives_whole_or_is_refused(sample_class: Any, own: Any) -> None:
    sample = finished(sample_class, 0, "abc")
    sample.label = ["a", "b"]
    asyncio.run(rewarded(own("given"), [sample]))
    assert sample.reward == 3.0
    with pytest.raises(DataError, match=r"label of sample 0=\['a', 'b'\].*a reward of your own"):
        response_of(sample, text_alone=True)


def test_columns_whose_names_mean_something_to_slime_arrive_as_they_are(sample_class: Any, own: Any) -> None:
    """As in ultrachat_200k, which has `prompt`, `prompt_id` and, with the answers, `messages`."""
    columns = {"messages": "mine", "prompt_id": 7, "task": "mine", "level": 1}
    prompt = Prompt("p/1", (Message("user", "2 + 2 ="),), "yes", "t", {**columns, "spec": 0})
    kept = json.loads(json.dumps(wire.metadata_of(prompt)))
    assert "messages" not in kept, "slime's data source would take them for the prompt"
    sample = finished(sample_class, 0, "abc")
    sample.metadata = {**kept, wire.MESSAGES: [m.as_dict() for m in prompt.messages]}
    found = response_of(sample, text_alone=False).prompt
    assert (found.prompt_id, found.task, found.messages) == (prompt.prompt_id, prompt.task, prompt.messages)
    assert found.metadata == prompt.metadata
    asyncio.run(rewarded(own("given"), [sample]))
    assert sample.reward == 4 + 10 + 100

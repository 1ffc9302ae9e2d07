"""Hooks by import string, as slime loads them, where slime is absent: signatures, and what each does to a sample or a batch."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import itertools
import sys
import threading
import types
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime_tandem.config import RewardConfig, RunConfig, SamplingConfig
from slime_tandem.errors import (
    ConfigError,
    DataError,
    EngineError,
    EngineRejectedError,
    ModelError,
    TeacherScoreError,
    UnreadToolsError,
)
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.protocol import GenerateResult
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import WriterOptions
from slime_tandem.slime_hooks import hooks, runtime, settings, wire
from slime_tandem.slime_hooks.state import STATE
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.training.rows import build_rows
from slime_tandem.types import JUNIOR, SENIOR, AlignedScores, Prompt

from ..waiting import PATIENCE_S

SIGNATURES = {  # docs/slime.md, checked against slime's call sites
    "generate": ("args", "sample", "sampling_params", "evaluation"),
    "generate_with_junior": ("args", "sample", "sampling_params", "evaluation"),
    "reward": ("args", "sample", "_"),
    "score_sample": ("args", "sample", "rollout_id", "evaluation"),
    "log_rollout": ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
    "log_eval": ("rollout_id", "args", "data", "extra_metrics"),
    "reward_post_process": ("args", "samples"),
    "megatron_init": ("args",),
    "advantages": ("args", "rollout_data"),
    "data_post_process": ("args", "rollout_id", "rollout_data"),
    "before_train_step": ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
    "loss": ("args", "batch", "logits", "sum_of_sample_mean"),
}
TOKENS = TokenBytes((None, b"a", b" b", b" <answer>2</answer>"), frozenset({0}), frozenset({0}))
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12, "stop": None, "no_stop_trim": True}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_hook_loads_by_its_import_string_with_slimes_signature(name: str) -> None:
    module, _, function = f"slime_tandem.slime_hooks.hooks.{name}".rpartition(".")
    found = getattr(importlib.import_module(module), function)
    assert tuple(inspect.signature(found).parameters) == SIGNATURES[name]
    assert inspect.iscoroutinefunction(found) == (
        name in ("generate", "generate_with_junior", "reward", "score_sample")
    )


def test_the_data_source_loads_by_its_import_string_without_slime() -> None:
    source = importlib.import_module("slime_tandem.slime_hooks.data_source").MessagesDataSource
    assert tuple(inspect.signature(source.__init__).parameters)[:2] == ("self", "args")
    assert {"get_samples", "add_samples", "save", "load", "__len__"} <= set(vars(source))


def roster(*overrides: str) -> Any:
    config = RunConfig.load(overrides=["opd.enabled=false", "tandem.selection_strategy=alternating", *overrides])
    rule = HandoffRule.from_config(config.tandem, frozenset())
    solo = HandoffRule.from_config(config.tandem.model_copy(update={"enabled": False}), frozenset())
    chat = SimpleNamespace(text_markers="escape", count_markers=lambda _: 0, markers_in=lambda _: 2)
    student = SimpleNamespace(
        tokens=TOKENS,
        hf=SimpleNamespace(encode=lambda text, add_special_tokens: [1] * len(text)),
        end_of_turn=0,
        chat=lambda: chat,
    )
    return SimpleNamespace(
        config=config, tandem_rule=rule, solo_rule=solo, spellers=None, student=student, environments=None,
        writer_options=lambda prompt, rule, sampling: WriterOptions(rule, sampling, TOKENS),
    )  # fmt: skip


def install(engines: dict[int, Any], *overrides: str, aborted: Any = lambda: False) -> Namespace:
    made = roster(*overrides)
    runtime.use(runtime.Runtime(made, engines, None, aborted))
    settings.use(settings.ANY, made.config)
    return Namespace()


def generate(args: Namespace, sample: Any, **changes: Any) -> Any:
    return asyncio.run(hooks.generate(args, sample, {**PARAMS, **changes}))


def test_senior_and_junior_write_a_sample_and_it_is_rewarded(sample_class: Any, scripted: Any) -> None:
    senior, junior = scripted(1, 0, -0.5), scripted(3, 0, -0.25, stop_after=9)
    args = install({SENIOR: senior, JUNIOR: junior})
    sample = generate(args, sample_class(prompt="xy", label="2"), max_new_tokens=4)
    assert sample.tokens == [1, 1, 1, 3, 1, 3], "alternating, one token each"
    assert sample.loss_mask == [1, 0, 1, 0]
    assert sample.rollout_log_probs == [-0.5, -0.25, -0.5, -0.25]
    assert sample.status == sample_class.Status.TRUNCATED
    assert sample.weight_versions == ["7"]
    assert sample.reward == 1.0, "no reward is named: the answer is compared with the label"
    named = Namespace(custom_rm_path="somebodys.reward")
    assert generate(named, sample_class(prompt="xy", label="2"), max_new_tokens=4).reward is None
    assert asyncio.run(hooks.reward(args, sample_class(response="none", label="2"))) == 0.0


def test_an_endless_answer_holds_up_nobody_and_is_counted(sample_class: Any, caplog: Any, scripted: Any) -> None:
    args = install({SENIOR: scripted(1, 0), JUNIOR: scripted(3, 0, stop_after=9)})
    config = STATE.settings[1].model_copy(update={"reward": RewardConfig(timeout_s=1.0)})
    settings.use(args, config)
    endless = sample_class(prompt="xy", label="5", response="<answer>9^{9^{9}}</answer>", metadata={})
    written = generate(args, sample_class(prompt="xy", label="2"), max_new_tokens=4)

    async def both() -> tuple[float, int]:
        turns, task = 0, asyncio.create_task(hooks.reward(args, endless))
        while not task.done():
            await asyncio.sleep(0.01)
            turns += 1
        return task.result(), turns

    value, turns = asyncio.run(both())
    assert value == 0.0
    assert turns > 10, "the event loop went on"
    assert endless.metadata[wire.PROBLEM] == "timeout"
    written.metadata[wire.PROBLEM] = "timeout"
    assert wire.PROBLEM not in wire.prompt_of(written).metadata
    with caplog.at_level("INFO"):
        hooks.log_rollout(3, args, [written], {}, 0.1)
        hooks.log_eval(4, args, {"held": {"samples": [written]}}, {})
    assert "'reward/timeouts': 1.0, 'reward/errors': 0.0" in caplog.text
    assert "'eval/held/reward/timeouts': 1.0" in caplog.text


def test_a_run_whose_labels_need_math_verify_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "math_verify" else found(name, *a)
    )
    labels = RunConfig.from_mapping({"tasks": [{"family": "chain_sum"}]})
    with pytest.raises(ConfigError, match="math-verify, which is not installed"):
        hooks.check_rewards(Namespace(), labels)
    hooks.check_rewards(Namespace(rm_type="math"), labels)
    hooks.check_rewards(Namespace(custom_rm_path="my.reward"), labels)
    texts = RunConfig.from_mapping({"tasks": [{"family": "chain_sum", "reward": "label", "answer": "text"}]})
    hooks.check_rewards(Namespace(), texts)


def test_a_reward_of_ones_own_is_that_of_the_samples_task(
    sample_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hook_rewards.py").write_text("def f(prompt, text): return 0.5 if prompt.messages else len(text) / 9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks = [{"family": "chain_sum"}, {"family": "chain_sum", "reward": "hook_rewards:f"}]
    args = Namespace()
    settings.use(args, RunConfig.from_mapping({"tasks": tasks}))
    try:
        for metadata, value in (({}, 1.0), ({"spec": 0}, 1.0), ({"spec": 1}, 1.0), ({"spec": 7}, 1.0)):
            sample = sample_class(prompt="xy", response="\\boxed{2}", label="2")
            sample.metadata = metadata
            assert asyncio.run(hooks.reward(args, sample)) == value
        sample.metadata = {"spec": 1, "messages": "2?"}
        assert asyncio.run(hooks.reward(args, sample)) == 0.5
    finally:
        STATE.reset()


def test_slimes_parameters_are_ours_or_refused() -> None:
    config = RunConfig()
    assert runtime.sampling_of({**PARAMS, "stop": "end"}, config) == SamplingConfig(max_new_tokens=12, stop=("end",))
    cut = RunConfig.load(overrides=["opd.enabled=false", "sampling.top_p=0.5"])
    assert runtime.sampling_of(PARAMS, cut).top_p == 0.5, "slime's flag is 1"
    assert runtime.sampling_of({**PARAMS, "top_p": 0.7}, cut, evaluation=True).top_p == 0.7
    with pytest.raises(ConfigError, match=r"sampling parameter repetition_penalty=1\.1"):
        runtime.sampling_of({**PARAMS, "repetition_penalty": 1.1}, config)


def test_an_aborted_sample_is_gone_on_with_where_it_stopped(sample_class: Any, scripted: Any) -> None:
    """slime aborts while the junior writes: its next request is never sent, the sample resumes with the same authors."""
    calls = itertools.chain([False, False], itertools.repeat(True))
    engines = {SENIOR: scripted(1, 0), JUNIOR: scripted(3, 0, stop_after=9)}
    args = install(engines, aborted=lambda: next(calls))
    sample = generate(args, sample_class(prompt="xy"), max_new_tokens=4)
    assert sample.status == sample_class.Status.ABORTED
    assert (sample.tokens, sample.reward) == ([1, 1, 1, 3], None)
    asyncio.run(hooks.score_sample(args, sample))
    assert wire.SCORES not in sample.metadata, "no teacher is asked about a part"
    install(engines)
    generate(args, sample, max_new_tokens=4)
    assert sample.tokens == [1, 1, 1, 3, 1, 3], "the cap counts what was there"
    assert sample.status == sample_class.Status.TRUNCATED


class Refusing:
    async def generate(self, requests: Any) -> Any:
        raise EngineRejectedError("request", "no", "yes", "change it")


def test_a_sample_that_cannot_be_written_stops_the_rollout_or_is_left_out(sample_class: Any) -> None:
    args = install({SENIOR: Refusing(), JUNIOR: Refusing()})
    with pytest.raises(EngineRejectedError):
        generate(args, sample_class(prompt="xy"))
    args = install({SENIOR: Refusing(), JUNIOR: Refusing()}, "sampling.on_failed_sample=drop_sample")
    failed = generate(args, sample_class(prompt="xy", index=1))
    good = sample_class(index=2, tokens=[1, 2], response_length=1, reward=1.0, rollout_log_probs=[-1.0])
    bad = sample_class(index=3, tokens=[1, 2], response_length=1, reward=0.0, rollout_log_probs=[-1.0])
    raw, rewards = hooks.reward_post_process(args, [failed, good, bad])
    assert raw == [0.0, 1.0, 0.0]
    assert rewards == [0.0, 0.5, -0.5], "what failed is not in its group's mean"
    assert [s.remove_sample for s in (failed, good, bad)] == [True, False, False]
    assert not failed.teacher_log_probs.any()


def aborting(n: int, result_ids: tuple[int, ...] = ()) -> Any:
    """Engines whose first `n` answers to a request are aborted on their own, with a part of the answer in them."""

    class Engine:
        left = n

        async def generate(self, requests: Any) -> Any:
            (request,) = requests
            if self.left:
                self.left -= 1
                return [GenerateResult(request.rid, result_ids, (-0.5,) * len(result_ids), "abort", "")]
            return [GenerateResult(request.rid, (1,), (-0.5,), "length", "7")]

    return Engine()


def test_an_engine_that_aborts_on_its_own_is_asked_again_then_the_sample_has_failed(sample_class: Any) -> None:
    whole = generate(install({SENIOR: aborting(0), JUNIOR: aborting(0)}), sample_class(prompt="xy"), max_new_tokens=2)
    for parts in ((), (1,)):
        args = install({SENIOR: aborting(2, parts), JUNIOR: aborting(1, parts)})
        sample = generate(args, sample_class(prompt="xy"), max_new_tokens=2)
        assert (sample.tokens, sample.status) == (whole.tokens, sample_class.Status.TRUNCATED)
        args = install({SENIOR: aborting(3, parts), JUNIOR: aborting(0)}, "sampling.on_failed_sample=drop_sample")
        sample = generate(args, sample_class(prompt="xy"), max_new_tokens=2)
        assert wire.failure_of(sample) is not None
        assert hooks.reward_post_process(args, [sample]) == ([0.0], [0.0])
        args = install({SENIOR: aborting(3, parts), JUNIOR: aborting(0)})
        with pytest.raises(EngineError, match="aborted by its server, 3 times"):
            generate(args, sample_class(prompt="xy"), max_new_tokens=2)


def slimes_own(sample_class: Any, index: int, reward: Any, **changes: Any) -> Any:
    """A sample that slime's own generate wrote."""
    own = {"tokens": [5, 1, 2], "response_length": 2, "rollout_log_probs": [-1.0, -1.0], **changes}
    return sample_class(index=index, reward=reward, **own)


@pytest.mark.parametrize("log_probs", [True, False])
@pytest.mark.parametrize("what", ["aborted", "aborted before a token", "empty", "failed"])
def test_what_slimes_own_generate_left_unwritten_takes_no_part(sample_class: Any, what: str, log_probs: bool) -> None:
    """`finish_reason: abort` of an engine: no reward was asked for, and slime hands the sample over as it is."""
    status, none = sample_class.Status, {} if log_probs else {"rollout_log_probs": None}
    empty = {"tokens": [5], "response_length": 0, "rollout_log_probs": []}
    how = {
        "aborted": {"status": status.ABORTED},
        "aborted before a token": {"status": status.ABORTED, **empty},
        "empty": {"status": status.COMPLETED, "reward": 1.0, **empty},
        "failed": {"status": status.FAILED},
    }[what]  # fmt: skip

    def rollout() -> list[Any]:
        odd = {"reward": None, **how, **none}
        good = [slimes_own(sample_class, i, float(i), status=status.COMPLETED, **none) for i in (2, 4)]
        return [slimes_own(sample_class, 1, odd.pop("reward"), **odd), *good]

    args = install({}, "sampling.on_failed_sample=drop_sample")
    samples = rollout()
    hooks.log_rollout(0, args, samples, {}, 0.0)
    assert samples[0].reward == 0.0, "slime's own log looks at it"
    assert hooks.reward_post_process(args, samples) == ([0.0, 2.0, 4.0], [0.0, -1.0, 1.0])
    assert [s.remove_sample for s in samples] == [True, False, False]
    assert all(len(s.loss_mask or [1] * s.response_length) == s.response_length > 0 for s in samples)
    assert len({s.rollout_log_probs is None for s in samples}) == 1, "slime looks at the first sample alone"
    args = install({})
    for hook in (
        lambda: hooks.log_rollout(0, args, rollout(), {}, 0.0),
        lambda: hooks.reward_post_process(args, rollout()),
    ):
        with pytest.raises(EngineError, match=r"samples that could not be written='1 of 3'.*\n.*sample 1: "):
            hook()


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "high", [1.0], {"x": 1.0}])
def test_a_reward_that_is_none_is_named(sample_class: Any, reward: Any) -> None:
    args = install({})
    samples = [slimes_own(sample_class, 1, 0.5), slimes_own(sample_class, 7, reward)]
    with pytest.raises(DataError, match=r"reward of sample 7=.*expected a finite number"):
        hooks.reward_post_process(args, samples)
    with pytest.raises(DataError, match=r"reward of sample 1=0\.5: expected a finite number under 'score'"):
        hooks.reward_post_process(Namespace(reward_key="score"), samples)


@pytest.mark.parametrize("known_by", ["prompt", "chat", "messages", "tokens"])
@pytest.mark.parametrize("log_probs", [True, False])
def test_samples_without_a_group_are_those_of_their_prompt(sample_class: Any, known_by: str, log_probs: bool) -> None:
    """`group_index=None` for two prompts: rewards 5, 5, 0, 0 are no advantages of 2.5."""

    def sample(index: int, prompt: int, reward: float, group: int | None = None) -> Any:
        chat = [{"role": "user", "content": f"prompt {prompt}"}]
        where = {
            "prompt": {"prompt": f"prompt {prompt}"}, "chat": {"prompt": chat}, "messages": {"metadata": {"messages": chat}},
            "tokens": {},
        }[known_by]  # fmt: skip
        tokens = {"tokens": [5, prompt, 1, 2], "group_index": group} | (
            {} if log_probs else {"rollout_log_probs": None}
        )
        return slimes_own(sample_class, index, reward, **where, **tokens)

    args = install({})
    rewards, prompts = [5.0, 5.0, 0.0, 0.0], [0, 0, 1, 1]
    samples = [sample(i, p, r) for i, (p, r) in enumerate(zip(prompts, rewards, strict=True))]
    assert hooks.reward_post_process(args, samples) == (rewards, [0.0] * 4)
    mixed = [sample(0, 0, 4.0), sample(1, 0, 0.0), sample(2, 0, 9.0, group=3), sample(3, 1, 1.0, group=3)]
    assert hooks.reward_post_process(args, mixed)[1] == [2.0, -2.0, 4.0, -4.0], "a group that slime names stands"


def test_a_sample_without_a_group_and_without_a_prompt_is_refused(sample_class: Any) -> None:
    args = install({})
    lost = slimes_own(sample_class, 3, 1.0, group_index=None, tokens=[1, 2])
    with pytest.raises(DataError, match=r"group_index of sample 3=None: expected a group, or a prompt"):
        hooks.reward_post_process(args, [lost])


def test_an_end_of_turn_is_told_from_a_stop_string(sample_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[frozenset[int]] = []
    monkeypatch.setattr(hooks, "teacher_metrics", lambda scored, eos: asked.append(eos) or {})
    for token, stop in ((1, ["a"]), (0, None)):  # token 0 ends a turn, token 1 is "a"
        args = install({SENIOR: Ends(token), JUNIOR: Ends(token)})
        sample = generate(args, sample_class(prompt="xy", label="2"), stop=stop)
        assert sample.status == sample_class.Status.COMPLETED
        hooks.log_rollout(0, args, [sample], {}, 0.0)
    assert asked == [frozenset(), frozenset({0})]


class Ends:
    """One token, and a stop."""

    def __init__(self, token: int) -> None:
        self.token = token

    async def generate(self, requests: Any) -> Any:
        return [GenerateResult(r.rid, (self.token,), (-0.5,), "stop", "7") for r in requests]


def test_a_failed_sample_has_its_reward_where_slime_looks_for_it(sample_class: Any) -> None:
    install({SENIOR: Refusing(), JUNIOR: Refusing()}, "sampling.on_failed_sample=drop_sample")
    args = Namespace(reward_key="score", eval_reward_key="right")
    failed = [generate(args, sample_class(prompt="xy", index=i)) for i in range(2)]
    assert failed[0].reward == {"score": 0.0}
    evaluated = asyncio.run(hooks.generate_with_junior(args, sample_class(prompt="xy"), PARAMS, evaluation=True))
    assert evaluated.reward == {"right": 0.0}
    raw, rewards = hooks.reward_post_process(args, failed)
    assert raw == rewards == [0.0, 0.0], "a rollout of nothing but failures, too"
    assert all(s.remove_sample for s in failed)


def test_a_prompt_without_messages_is_refused_where_they_are_needed(sample_class: Any, scripted: Any) -> None:
    args = install({SENIOR: scripted(1, 0)})
    STATE.manager.installed.roster.spellers = (None, None)
    with pytest.raises(DataError, match=r"messages of sample 0=None.*MessagesDataSource"):
        generate(args, sample_class(prompt="xy"))


def scored_sample(sample_class: Any, index: int, group: int, reward: float, *, failed: bool = False) -> Any:
    R = 3
    sample = sample_class(
        index=index, group_index=group, tokens=[9, 9, *range(R)], response_length=R, reward=reward,
        rollout_log_probs=[-0.1 * (i + 1) - index for i in range(R)], loss_mask=[1, 0, 1],
    )  # fmt: skip
    if failed:
        wire.put_scores(sample, TeacherScoreError("teacher", "no answer", "one", "ask again"))
    else:
        mask = np.array([True, True, False])
        wire.put_scores(sample, AlignedScores(np.where(mask, -0.2 * index, 0.0), mask, {"boundary": 1}))
    return sample


def test_rewards_become_advantages_within_groups_and_channels_in_every_sample(sample_class: Any) -> None:
    config = RunConfig.load(overrides=["opd.on_failed_sample=drop_sample"])
    settings.use(settings.ANY, config)
    samples = [scored_sample(sample_class, i, i // 2, float(i), failed=i == 3) for i in range(4)]
    expected, _ = build_rows([hooks._scored(s, None, config) for s in samples], config)
    raw, rewards = hooks.reward_post_process(Namespace(), samples)
    assert raw == [0.0, 1.0, 2.0, 3.0]
    assert rewards == [-0.5, 0.5, -0.5, 0.0], "the dropped one counts in its group's mean, and is not trained"
    assert [s.remove_sample for s in samples] == [False, False, False, True]
    for sample, row in zip(samples, expected, strict=False):
        assert torch.equal(sample.teacher_log_probs, wire.pack(row))
        assert sample.loss_mask == [1, 0, 1]
        batch = {
            wire.CARRIER: [sample.teacher_log_probs],
            "rollout_log_probs": [torch.tensor(sample.rollout_log_probs)],
        }
        wire.carried(batch)


def test_samples_without_log_probs_get_advantages_alone(sample_class: Any) -> None:
    settings.use(settings.ANY, RunConfig.load(overrides=["opd.enabled=false"]))
    samples = [sample_class(index=i, reward=float(i), tokens=[1, 2], response_length=1) for i in range(2)]
    assert hooks.reward_post_process(Namespace(), samples) == ([0.0, 1.0], [-0.5, 0.5])
    assert samples[0].teacher_log_probs is None


def test_logs_hold_who_wrote_what_and_let_slime_log_its_own(
    sample_class: Any, scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    args = install({SENIOR: scripted(1, 0), JUNIOR: scripted(3, 0, stop_after=9)})
    sample = generate(args, sample_class(prompt="xy", label="2"), max_new_tokens=4)
    with caplog.at_level("INFO"):
        assert hooks.log_rollout(3, args, [sample, sample_class(tokens=[1, 2], response_length=1)], {}, 0.1) is False
        assert hooks.log_eval(4, args, {"held": {"samples": [sample]}}, {}) is False
    assert (args.logged_rollout_id, args.logged_eval_rollout_id) == (3, 4)
    assert "'tandem/senior_token_fraction': 0.5" in caplog.text
    assert "eval/held/tandem/junior_token_fraction" in caplog.text
    assert "'rollout/text_markers': 2.0" in caplog.text


def test_a_stop_string_is_no_end_of_turn_in_the_metrics(sample_class: Any, scripted: Any) -> None:
    cut = generate(install({SENIOR: scripted(1, 1), JUNIOR: scripted(1, 1)}), sample_class(prompt="xy"), stop=["aa"])
    assert (cut.status, cut.tokens[-2:]) == (sample_class.Status.COMPLETED, [1, 1])
    writers = {SENIOR: scripted(1, 0, stop_after=1), JUNIOR: scripted(1, 0, stop_after=1)}
    ended = generate(install(writers), sample_class(prompt="xy"))
    assert wire.ends_of([cut]) == frozenset()
    assert wire.ends_of([cut, ended]) == {0}


@pytest.mark.parametrize("markers", ["escape", "allow", "refuse"])
def test_control_tokens_that_a_prompt_brings(sample_class: Any, trio: Any, markers: Any) -> None:
    """slime renders prompts to text; what a user typed in them is told apart by the messages."""
    student = ModelTokenizer.load(trio.senior, text_markers=markers)
    team: Any = runtime.Runtime(SimpleNamespace(student=student), {}, None, lambda: False)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "4<|end|><|assistant|>5"}]
    text = student.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    sample = sample_class(prompt=text, metadata={"messages": messages})
    prompt = wire.prompt_of(sample)
    if markers == "refuse":
        with pytest.raises(ModelError, match="text of the role user"):
            team.prompt_ids(sample, prompt)
        return
    ids = team.prompt_ids(sample, prompt)
    assert sum(i in student.tokens.special for i in ids) == {"escape": 3, "allow": 5}[markers]
    if markers == "escape":
        with pytest.raises(DataError, match="its messages by the senior's template"):
            team.prompt_ids(sample_class(prompt="other" + text, metadata={"messages": messages}), prompt)
    plain = sample_class(prompt="x", metadata={"messages": [{"role": "user", "content": "x"}]})
    assert team.prompt_ids(plain, wire.prompt_of(plain)) == student.encode("x"), "as slime sends it"


def test_why_a_sample_was_not_read_stays_known(sample_class: Any) -> None:
    sample = sample_class(metadata={})
    wire.put_scores(sample, UnreadToolsError("template", "tools", "none", "x"))
    _, error = wire.scores_of(sample)
    assert isinstance(error, UnreadToolsError)
    assert error.value == "tools"


def test_the_trainer_refuses_a_batch_without_channels() -> None:
    with pytest.raises(DataError, match="reward_post_process"):
        hooks.advantages(Namespace(), {"rollout_log_probs": [torch.zeros(2)], "rewards": [1.0]})


def test_every_request_names_ids_where_servers_score_some(scripted: Any) -> None:
    """SGLang ends itself over a batch in which some requests do and some do not."""
    engine = scripted(1, 0)
    from slime_tandem.protocol import GenerateRequest

    requests = [GenerateRequest("a", (1,), 2), GenerateRequest("b", (1,), 2, token_ids_logprob=(5,))]
    asyncio.run(runtime.Sharing(engine).generate(requests))
    assert [r.token_ids_logprob for r in engine.requests] == [(), (5,)]


def test_a_prompt_is_a_str_a_chat_or_what_the_data_source_kept(sample_class: Any) -> None:
    chat = [{"role": "user", "content": "1+1="}]
    kept = wire.prompt_of(sample_class(group_index=4, prompt="rendered", metadata={"messages": chat, "task": "sums"}))
    assert kept == Prompt("slime/4", kept.messages, None, "sums", {"task": "sums"})
    assert kept.messages == wire.prompt_of(sample_class(prompt=chat)).messages
    assert wire.prompt_of(sample_class(prompt="rendered")).messages == ()
    with pytest.raises(DataError, match=r"messages of sample 0\.0\.role='robot'"):
        wire.prompt_of(sample_class(metadata={"messages": [{"role": "robot", "content": ""}]}))


def test_the_data_source_trusts_no_code_of_a_model_folder_unasked(
    sample_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto_map` in a tokenizer's folder: our own loading runs its Python only where the settings say so."""
    trusted: list[bool] = []

    class Source:
        def __init__(self, args: Any) -> None:
            self.dataset = SimpleNamespace(origin_samples=[sample_class(prompt="1+1=")])

    tokenizer = SimpleNamespace(apply_chat_template=lambda raw, **_: raw[0]["content"])
    made = {
        "slime.rollout.data_source": {"RolloutDataSourceWithBuffer": Source},
        "slime.utils.data": {"filter_long_prompt": None},
        "slime.utils.processing_utils": {
            "load_tokenizer": lambda _, trust_remote_code: trusted.append(trust_remote_code) or tokenizer
        },
    }
    for name in ("slime", "slime.rollout", "slime.utils", *made):
        module = types.ModuleType(name)
        vars(module).update(made.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    args = Namespace(
        hf_checkpoint="x", apply_chat_template=True, apply_chat_template_kwargs=None, rollout_max_prompt_len=None
    )
    module = importlib.import_module("slime_tandem.slime_hooks.data_source")
    prepared: list[Any] = []
    monkeypatch.setattr(runtime, "prepare", prepared.append)
    for wanted in (False, True):
        settings.use(args, RunConfig.load(overrides=[f"models.trust_remote_code={str(wanted).lower()}"]))
        module.MessagesDataSource(args)
    assert trusted == [False, True]
    assert prepared == [args, args], "the roster is made while slime starts its engines"


def test_a_roster_is_made_once_in_a_thread_and_its_errors_reach_whoever_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[RunConfig, str]] = []

    def make(config: RunConfig) -> Any:
        made.append((config, threading.current_thread().name))
        raise ConfigError("models.junior", "x", "a folder", "name one")

    monkeypatch.setattr(runtime, "Roster", make)
    args = Namespace()
    config = RunConfig()
    settings.use(args, config)
    runtime.prepare(args)
    runtime.prepare(args)
    with pytest.raises(ConfigError, match=r"models\.junior"):
        asyncio.run(runtime.connect_here(args, lambda: False))
    assert made == [(config, "slime_tandem roster")]
    with pytest.raises(ConfigError):
        asyncio.run(runtime.connect_here(args, lambda: False))
    assert made == [(config, "slime_tandem roster")] * 2, "what failed is tried again"
    made.clear()
    settings.use(args, RunConfig(seed=3))
    runtime.prepare(args)
    with pytest.raises(ConfigError):
        asyncio.run(runtime.connect_here(args, lambda: False))
    assert [c.seed for c, _ in made] == [3], "of another configuration another one"


def test_teachers_read_a_response_while_it_is_written(sample_class: Any, scripted: Any) -> None:
    """Parts of 16 tokens: the first is read while the second is written, and slime's clock of scoring says how long."""
    senior, read = scripted(1, 0, stop_after=99), []
    answer = senior.generate

    async def later(requests: Any) -> Any:
        await asyncio.sleep(0.01)
        return await answer(requests)

    senior.generate = later

    class Panel:
        scoring = None

        async def read_along(self, part: Any) -> None:
            read.append((part.key.sample_index, part.response_ids, part.finish_reason))

        async def score(self, samples: Any, engine: Any) -> list[Any]:
            await asyncio.sleep(0.02)
            return [TeacherScoreError("a", "b", "c", "d")]

    made = roster("tandem.enabled=false", "opd.enabled=true", "opd.read_along=16")
    runtime.use(runtime.Runtime(made, {SENIOR: senior}, Panel(), lambda: False))  # type: ignore[arg-type]
    settings.use(settings.ANY, made.config)
    sample = sample_class(index=5, prompt="xy", label="2", metadata={"messages": [{"role": "user", "content": "q"}]})
    written = generate(Namespace(), sample, max_new_tokens=40)
    assert [r.max_new_tokens for r in senior.requests] == [16, 16, 8]
    assert [len(r.input_ids) for r in senior.requests] == [2, 18, 34]
    assert read == [(5, (1,) * 16, "abort"), (5, (1,) * 32, "abort")]
    asyncio.run(hooks.score_sample(Namespace(), written))
    found = STATE.manager.beside.take()
    assert found["rollout/scoring_exposed_s"] >= 0.02
    assert found["rollout/scoring_hidden_s"] == 0.0
    generate(Namespace(), sample_class(prompt="xy", label="2"), max_new_tokens=40)
    assert len(read) == 2, "a prompt without messages is no teacher's to read"


def test_so_many_samples_are_scored_at_once_whoever_asks(sample_class: Any, scripted: Any) -> None:
    """slime scores each sample by a call of its own; `opd.concurrency` requests of `engine.max_batch` are the bound."""
    inside: list[int] = []

    class Panel:
        now = 0

        async def score(self, samples: Any, senior: Any) -> list[Any]:
            self.now += 1
            inside.append(self.now)
            for _ in range(3):
                await asyncio.sleep(0)
            self.now -= 1
            return [TeacherScoreError("teacher", "x", "y", "z")]

    install({SENIOR: scripted(1, 0), JUNIOR: scripted(3, 0)})
    made = roster("opd.concurrency=2", "engine.max_batch=3")
    team = runtime.Runtime(made, {SENIOR: scripted(1, 0)}, Panel(), lambda: False)  # type: ignore[arg-type]
    samples = [
        generate(Namespace(), sample_class(index=i, prompt=[{"role": "user", "content": "x"}], label="2", tokens=[1]))
        for i in range(20)
    ]

    async def all_at_once() -> None:
        await asyncio.gather(*(team.score(s) for s in samples))

    asyncio.run(all_at_once())
    assert len(inside) == 20
    assert max(inside) == 6


def test_parts_that_are_read_along_count_against_the_same_bound(sample_class: Any, scripted: Any) -> None:
    """Twenty responses written at once, each of three parts; a response that ended meanwhile is left to `score`."""
    inside: list[int] = []

    class Panel:
        now = 0
        scoring = None

        async def read_along(self, part: Any) -> None:
            self.now += 1
            inside.append(self.now)
            await asyncio.sleep(0.01)
            self.now -= 1

    senior = scripted(1, 0, stop_after=999)
    answer = senior.generate

    async def later(requests: Any) -> Any:
        await asyncio.sleep(0.02)
        return await answer(requests)

    senior.generate = later
    made = roster("tandem.enabled=false", "opd.read_along=16", "opd.concurrency=1", "engine.max_batch=2")
    team = runtime.Runtime(made, {SENIOR: senior}, Panel(), lambda: False)  # type: ignore[arg-type]
    settings.use(settings.ANY, made.config)
    asked = [{"role": "user", "content": "q"}]
    samples = [sample_class(index=i, prompt="xy", label="2", metadata={"messages": asked}) for i in range(20)]

    async def all_at_once() -> None:
        params = {"max_new_tokens": 48, "temperature": 1.0}
        await asyncio.gather(*(team.write(s, params, tandem=False, evaluation=False) for s in samples))

    asyncio.run(all_at_once())
    assert inside
    assert max(inside) <= 2


def test_the_collector_leaves_alone_what_was_there_before_the_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected in the roster's thread, beforehand: a search of everything stops the event loop."""
    searched: list[str] = []
    monkeypatch.setattr(runtime.gc, "collect", lambda: searched.append(threading.current_thread().name))
    config = RunConfig(seed=4)
    monkeypatch.setattr(runtime, "Roster", lambda config: config)
    args = Namespace()
    settings.use(args, config)
    runtime.prepare(args)
    assert runtime._roster(config).result(PATIENCE_S) is config
    STATE.manager.roster = None
    gc.unfreeze()  # what another test of this process has frozen
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own, whatever another test has set
    try:
        runtime.settle_collector()
        assert gc.get_freeze_count() > 10_000, "what was imported"
        assert gc.get_threshold()[0] > 700
        assert searched == ["slime_tandem roster"]
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)

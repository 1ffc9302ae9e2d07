"""The runner in-process: exact log-probs, and the same tokens whatever the batch, the cache or the order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from slime_tandem.engines.embedded import runner as runner_module
from slime_tandem.engines.embedded.kv_model import KVModel
from slime_tandem.engines.embedded.patterns import compile_pattern
from slime_tandem.engines.embedded.runner import Job, Output, Runner
from slime_tandem.errors import ModelError
from slime_tandem.models.hf import load_model

TOLERANCE = 1e-5
VOCAB = 304

JobFactory = Callable[..., Job]
Run = Callable[[Runner, list[Job]], list[Output]]
RunnerFactory = Callable[..., Runner]


def prompts(n: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, rng.integers(1, longest)).tolist() for _ in range(n)]


def check_output(job: Job, out: Output, reference: Any, temperature: float = 1.0) -> None:
    """Every reported log-prob against one plain forward pass over prompt and output."""
    assert out.error is None
    n, ids = len(job.input_ids), job.input_ids.tolist() + out.output_ids
    warm = reference.log_probs(ids, temperature)
    want = [warm[n - 1 + i, token].item() for i, token in enumerate(out.output_ids)]
    np.testing.assert_allclose(out.log_probs, want, atol=TOLERANCE, rtol=0)
    plain = reference.log_probs(ids)
    if job.logprob_start < n:
        assert out.input_log_probs[0] is None
        start = job.logprob_start
        want = [plain[i - 1, ids[i]].item() for i in range(start + 1, n)]
        np.testing.assert_allclose(np.array(out.input_log_probs[1:], float), want, atol=TOLERANCE, rtol=0)
        assert len(out.input_log_probs) == n - start
    else:
        assert out.input_log_probs == []


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_log_probs_equal_transformers(
    name: str, make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, references: dict[str, Any]
) -> None:
    jobs = [
        make_job(ids, 12, seed=i, logprob_start=(0, len(ids) // 2, len(ids) - 1, len(ids))[i % 4])
        for i, ids in enumerate(prompts(24))
    ]
    for job, out in zip(jobs, run_jobs(make_runner(name), jobs), strict=True):
        check_output(job, out, references[name])


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_output_log_probs_are_at_the_sampling_temperature_and_input_ones_at_one(
    temperature: float, make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, references: dict[str, Any]
) -> None:
    job = make_job(prompts(1)[0], 10, temperature=temperature, logprob_start=0)
    check_output(job, run_jobs(make_runner(), [job])[0], references["llama"], temperature)


def test_input_log_probs_at_a_temperature_of_their_own(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, references: dict[str, Any]
) -> None:
    """`opd.teacher_temperature=rollout`: beside each other, each request at its own; candidates, too."""
    ids = prompts(1)[0] + [7]
    jobs = [
        replace(make_job(ids, 0, logprob_start=0, top_logprobs_num=2), input_temperature=heat)
        for heat in (1.0, 0.5, 2.0)
    ]
    for job, out in zip(jobs, run_jobs(make_runner(), jobs), strict=True):
        want = references["llama"].log_probs(ids, job.input_temperature)
        given = [want[i - 1, ids[i]].item() for i in range(1, len(ids))]
        np.testing.assert_allclose(np.array(out.input_log_probs[1:], float), given, atol=TOLERANCE, rtol=0)
        best = [entry[0][0] for entry in out.input_top[1:]]
        np.testing.assert_allclose(best, want[: len(ids) - 1].max(-1).values.numpy(), atol=TOLERANCE, rtol=0)


def test_greedy_is_the_argmax_with_log_probs_at_temperature_one(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, references: dict[str, Any]
) -> None:
    job = make_job([5, 6, 7], 15, temperature=0.0)
    [out] = run_jobs(make_runner(), [job])
    check_output(job, out, references["llama"])
    log_probs = references["llama"].log_probs([5, 6, 7, *out.output_ids])
    assert out.output_ids == log_probs[2:-1].argmax(dim=-1).tolist()


def test_candidates_on_input_and_output(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, references: dict[str, Any]
) -> None:
    ids = prompts(1, seed=3, longest=30)[0] + [9, 9, 9]
    asked = make_job(ids, 6, logprob_start=1, top_logprobs_num=3, token_ids_logprob=(40, 2))
    other = make_job(ids[:-1], 6, top_logprobs_num=1)
    out, out_other = run_jobs(make_runner(), [asked, other])
    log_probs = references["llama"].log_probs(ids + out.output_ids)
    assert out.input_top[0] is None
    assert out.input_chosen[0] is None
    rows = [*range(1, len(ids) - 1), *range(len(ids) - 1, len(ids) + 5)]
    tops = [t for t in out.input_top[1:] if t is not None] + out.output_top
    chosen = [t for t in out.input_chosen[1:] if t is not None] + out.output_chosen
    assert len(rows) == len(tops) == len(chosen)
    for row, top, pair in zip(rows, tops, chosen, strict=True):
        values, best = log_probs[row].topk(3)
        assert [token for _, token in top] == best.tolist()
        np.testing.assert_allclose([v for v, _ in top], values, atol=TOLERANCE, rtol=0)
        assert [token for _, token in pair] == [40, 2]
        np.testing.assert_allclose([v for v, _ in pair], log_probs[row, [40, 2]], atol=TOLERANCE, rtol=0)
    assert [len(t) for t in out_other.output_top] == [1] * 6
    assert out_other.input_top == []


def same(a: Output, b: Output) -> bool:
    return a.output_ids == b.output_ids and np.allclose(a.log_probs, b.log_probs, atol=TOLERANCE, rtol=0)


def test_alone_batched_reordered_and_from_a_warm_cache_give_the_same(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run
) -> None:
    jobs = [make_job(ids, 10, seed=i) for i, ids in enumerate(prompts(20))]
    alone = [run_jobs(make_runner(), [job])[0] for job in jobs]
    runner = make_runner()
    batched = run_jobs(runner, jobs)
    warm = run_jobs(runner, jobs)
    backwards = run_jobs(make_runner(max_batch=5), jobs[::-1])[::-1]
    for job, a, *others in zip(jobs, alone, batched, warm, backwards, strict=True):
        assert all(same(a, other) for other in others)
        assert others[1].cached_tokens == len(job.input_ids) - 1


def test_a_request_resumed_with_its_own_output_goes_on_the_same(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run
) -> None:
    runner = make_runner()
    ids = [4, 8, 15, 16, 23, 42]
    [whole] = run_jobs(runner, [make_job(ids, 12)])
    for cut in (1, 5, 11):
        [rest] = run_jobs(runner, [make_job(ids + whole.output_ids[:cut], 12 - cut)])
        assert rest.output_ids == whole.output_ids[cut:]
        np.testing.assert_allclose(rest.log_probs, whole.log_probs[cut:], atol=TOLERANCE, rtol=0)
        assert rest.cached_tokens == len(ids) + cut - 1


def test_seeds_decide_the_tokens(make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run) -> None:
    jobs = [make_job([3, 4, 5], 8, seed=seed) for seed in (1, 2, 1, 3)]
    outs = run_jobs(make_runner(), jobs)
    assert same(outs[0], outs[2])
    assert len({tuple(out.output_ids) for out in outs}) == 3


def test_samples_of_one_prompt_share_one_prefill(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner()
    fed = list[int]()
    forward = runner.kv.forward

    def spy(rows: Any, ids: Any, starts: Any, lengths: Any, keep: Any) -> torch.Tensor:
        fed.append(len(ids))
        return forward(rows, ids, starts, lengths, keep)

    monkeypatch.setattr(runner.kv, "forward", spy)
    ids = list(range(2, 22))
    jobs = [make_job(ids, 4, seed=seed) for seed in range(6)]
    outs = run_jobs(runner, jobs)
    assert fed[0] == len(ids)
    assert sum(fed) == len(ids) + 3 * 6
    for job, out in zip(jobs, outs, strict=True):
        assert same(out, run_jobs(make_runner(), [job])[0])


def test_a_prefix_hit_never_drops_input_log_probs(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, references: dict[str, Any]
) -> None:
    runner, ids = make_runner(), list(range(30, 60))
    run_jobs(runner, [make_job(ids, 5)])
    for start in (0, 7, 29, 30):
        job = make_job(ids, 0, logprob_start=start)
        [out] = run_jobs(runner, [job])
        check_output(job, out, references["llama"])
        assert out.cached_tokens == min(start, 29)
        assert (out.output_ids, out.finish) == ([], "length")


def test_small_steps_and_small_logit_budgets_change_nothing(
    make_runner: RunnerFactory,
    make_job: JobFactory,
    run_jobs: Run,
    references: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "_PREFILL_TOKENS", 16)
    monkeypatch.setattr(runner_module, "_LOGIT_ELEMENTS", 7 * VOCAB)
    jobs = [
        make_job(ids, 5, seed=i, logprob_start=(0, len(ids))[i % 2], top_logprobs_num=2)
        for i, ids in enumerate(prompts(12, seed=5))
    ]
    for job, out in zip(jobs, run_jobs(make_runner(), jobs), strict=True):
        check_output(job, out, references["llama"])
        assert len(out.input_top) == len(out.input_log_probs)


def test_a_cache_smaller_than_the_work_evicts_and_stays_exact(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, references: dict[str, Any]
) -> None:
    runner = make_runner(cache_tokens=128)
    many = prompts(40, seed=9)
    assert sum(map(len, many)) > 4 * 128
    for round_seed in (0, 1):
        jobs = [make_job(ids, 8, seed=round_seed, logprob_start=len(ids) - 1) for ids in many]
        for job, out in zip(jobs, run_jobs(runner, jobs), strict=True):
            check_output(job, out, references["llama"])
        assert len(runner.cache) <= 128


def test_arrivals_in_mid_decode_do_not_disturb(make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run) -> None:
    jobs = [make_job(ids, 4 + 5 * (i % 4), seed=i) for i, ids in enumerate(prompts(15, seed=2))]
    runner, found = make_runner(max_batch=6), {}
    for job in jobs:
        runner.submit([job])
        found.update({id(j): out for j, out in runner.step()})
    while runner.busy:
        found.update({id(j): out for j, out in runner.step()})
    for job in jobs:
        assert same(found[id(job)], run_jobs(make_runner(), [job])[0])


def test_the_length_limit_is_reported_before_a_stop(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run
) -> None:
    [free] = run_jobs(make_runner(), [make_job([9, 9], 6)])
    stop_mask = np.zeros(VOCAB, np.bool_)
    stop_mask[free.output_ids[3]] = True
    first = free.output_ids.index(free.output_ids[3])
    [stopped] = run_jobs(make_runner(), [make_job([9, 9], 6, stop_mask=stop_mask)])
    assert stopped.output_ids == free.output_ids[: first + 1]
    assert (stopped.finish, stopped.matched) == ("stop", free.output_ids[3])
    [capped] = run_jobs(make_runner(), [make_job([9, 9], first + 1, stop_mask=stop_mask)])
    assert (capped.finish, capped.matched, capped.output_ids) == ("length", None, stopped.output_ids)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_stop_strings_and_regexes_keep_the_completing_token(
    width: int, make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run
) -> None:
    [free] = run_jobs(make_runner(), [make_job([9, 9], 10)])
    text = "".join(chr(0x4E00 + i) for i in free.output_ids)
    needle = text[4 : 4 + width]
    end = text.index(needle) + width
    by_string, by_regex, by_none = run_jobs(
        make_runner(),
        [
            make_job([9, 9], 10, stop=("absent", needle)),
            make_job([9, 9], 10, stop_regex=(compile_pattern("zzz"), compile_pattern(f"^.*{needle}"))),
            make_job([9, 9], 10, stop=("absent",)),
        ],
    )
    assert by_string.output_ids == by_regex.output_ids == free.output_ids[:end]
    assert (by_string.finish, by_string.matched) == ("stop", needle)
    assert (by_regex.finish, by_regex.matched) == ("stop", f"^.*{needle}")
    assert by_none.output_ids == free.output_ids


def test_text_that_ends_inside_a_character_waits_for_the_rest(
    folders: dict[str, Path], make_job: JobFactory, run_jobs: Run
) -> None:
    """The decoder here joins pairs of ids into one letter and shows a lone one as the replacement character."""

    def decode(lists: list[list[int]]) -> list[str]:
        return [
            "".join(chr(0x4E00 + ids[i]) for i in range(0, len(ids) - 1, 2)) + "\ufffd" * (len(ids) % 2)
            for ids in lists
        ]

    runner = Runner(load_model(folders["llama"]), decode, max_batch=2, cache_tokens=256, weight_version="v0")
    [free] = run_jobs(runner, [make_job([9, 9], 8)])
    [out] = run_jobs(runner, [make_job([9, 9], 8, stop_regex=(compile_pattern("\ufffd"),))])
    assert out.output_ids == free.output_ids
    letter = chr(0x4E00 + free.output_ids[2])
    [out] = run_jobs(runner, [make_job([9, 9], 8, stop=(letter,))])
    assert out.output_ids == free.output_ids[:4]


def test_abort_ends_waiting_and_running_jobs(make_runner: RunnerFactory, make_job: JobFactory) -> None:
    runner = make_runner(max_batch=2)
    # b and c share the prompt of a, the job that fills it in.
    jobs = [make_job([3, 3, 3], 20, rid=rid) for rid in "abcd"]
    runner.submit(jobs)
    for _ in range(4):
        assert runner.step() == []
    ended = {job.rid: out for job, out in runner.abort(lambda job: job.rid in "ac", "because")}
    assert {rid: (out.finish, out.message) for rid, out in ended.items()} == {
        "a": ("abort", "because"),
        "c": ("abort", "because"),
    }
    assert len(ended["a"].output_ids) == len(ended["a"].log_probs) == 4
    assert ended["c"].output_ids == []
    rest = {}
    while runner.busy:
        rest.update({job.rid: out for job, out in runner.step()})
    assert sorted(rest) == ["b", "d"]
    assert same(rest["b"], rest["d"])
    assert rest["b"].output_ids[:4] == ended["a"].output_ids


def test_followers_prefill_themselves_when_their_leader_is_aborted(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_PREFILL_TOKENS", 4)
    runner, ids = make_runner(), list(range(2, 14))
    jobs = [make_job(ids, 3, rid=rid) for rid in "abc"]
    runner.submit(jobs)
    assert runner.step() == []
    [(aborted, _)] = runner.abort(lambda job: job.rid == "a", "gone")
    assert aborted.rid == "a"
    rest = {}
    while runner.busy:
        rest.update({job.rid: out for job, out in runner.step()})
    [want] = run_jobs(make_runner(), [make_job(ids, 3)])
    assert same(rest["b"], want)
    assert same(rest["c"], want)


def test_a_failing_step_fails_its_jobs_and_the_runner_goes_on(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner()
    [want] = run_jobs(runner, [make_job([5, 5], 4)])
    for name in ("forward", "store", "load", "fit"):

        def broken(*_: Any, **__: Any) -> Any:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(runner.kv, name, broken)
            outs = run_jobs(runner, [make_job([5, 5, 6], 4), make_job([5, 5], 4)])
        if name in ("forward", "store", "fit"):
            assert [out.error for out in outs] == ["MemoryError: no room"] * 2
        assert same(run_jobs(runner, [make_job([5, 5], 4)])[0], want)


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("hostile", [1, 2])
def test_a_sequence_that_breaks_a_step_ends_alone(
    place: int,
    hostile: int,
    make_runner: RunnerFactory,
    make_job: JobFactory,
    run_jobs: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step is one for all: whose fault it was, only trying parts can tell. The others write what they write alone."""
    jobs = [make_job([5, i + 2], 4 + i, rid=f"good-{i}", seed=i) for i in range(6)]
    alone = [run_jobs(make_runner(), [job])[0] for job in jobs]
    late = make_job([9, 9], 3, rid="late")
    [late_alone] = run_jobs(make_runner(), [late])
    runner = make_runner()
    real = runner_module.sample

    def breaks(logits: Any, rows: Any) -> Any:
        if (rows.min_p == 0.25).any() and (rows.position[rows.min_p == 0.25] >= 4).any():
            raise OverflowError("of one row")
        return real(logits, rows)

    monkeypatch.setattr(runner_module, "sample", breaks)
    bad = [make_job([7, 7], 9, rid=f"bad-{i}", min_p=0.25) for i in range(hostile)]
    mixed = [*jobs[:place], *bad, *jobs[place:]]
    runner.submit(mixed)
    found = {id(job): output for job, output in runner.step()}
    runner.submit([late])
    while runner.busy:
        found.update({id(job): output for job, output in runner.step()})
    assert [found[id(job)].error for job in bad] == ["OverflowError: of one row"] * hostile
    assert all(same(found[id(job)], want) for job, want in zip([*jobs, late], [*alone, late_alone], strict=True))
    assert len(found) == len(mixed) + 1
    assert runner.counts == (0, 0)


def test_parts_that_are_tried_apart_can_be_aborted(
    make_runner: RunnerFactory, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner()
    real = runner.kv.forward
    calls = []

    def breaks_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OverflowError("once")
        return real(*args)

    monkeypatch.setattr(runner.kv, "forward", breaks_once)
    jobs = [make_job([5, i + 2], 3, rid=str(i)) for i in range(4)]
    runner.submit(jobs)
    assert runner.step() == []
    assert (runner.busy, runner.counts) == (True, (0, 4))
    [(gone, output)] = runner.abort(lambda job: job.rid == "3", "not wanted")
    assert (gone.rid, output.finish, output.message) == ("3", "abort", "not wanted")
    found = {}
    while runner.busy:
        found.update({job.rid: output for job, output in runner.step()})
    assert {rid: out.finish for rid, out in found.items()} == dict.fromkeys("012", "length")


def test_patterns_that_take_too_long_end_their_request_alone(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is counted in seconds of the thread; here each look at it is a fifth of one later."""
    runner = make_runner()
    ticks = itertools.count()
    monkeypatch.setattr(runner_module.time, "thread_time", lambda: next(ticks) / 5)
    jobs = [make_job([9, 9], 20, stop_regex=(compile_pattern("absent"),)), make_job([9, 8], 20)]
    slow, other = run_jobs(runner, jobs)
    assert (slow.finish, len(slow.output_ids), runner.patterns_stopped) == ("abort", 3, 1)
    assert slow.message is not None
    assert slow.message.startswith("sampling_params.stop_regex: ")
    assert (other.finish, len(other.output_ids)) == ("length", 20)


def test_a_stop_string_is_found_across_tokens_and_only_looked_for_in_what_is_new(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run
) -> None:
    [free] = run_jobs(make_runner(), [make_job([9, 9], 30)])
    text = "".join(chr(0x4E00 + i) for i in free.output_ids)
    stops = [text[at : at + width] for at in range(0, 25, 3) for width in (1, 2, 5)]
    outs = run_jobs(make_runner(max_batch=64), [make_job([9, 9], 30, stop=(stop,)) for stop in stops])
    for stop, out in zip(stops, outs, strict=True):
        assert out.output_ids == free.output_ids[: text.index(stop) + len(stop)]


def test_new_weights_give_new_log_probs_and_forget_old_keys(
    make_runner: RunnerFactory,
    make_job: JobFactory,
    run_jobs: Run,
    references: dict[str, Any],
    folders: dict[str, Path],
) -> None:
    runner, job = make_runner("llama"), make_job([7, 8, 9, 10], 6, logprob_start=0)
    [old] = run_jobs(runner, [job])
    runner.swap_weights(load_model(folders["other"]), "v1")
    [new] = run_jobs(runner, [job])
    check_output(job, new, references["other"])
    assert (old.weight_version, new.weight_version, new.cached_tokens) == ("v0", "v1", 0)
    assert not np.allclose(old.log_probs, new.log_probs, atol=1e-2)


@pytest.mark.parametrize("fault", ["other architecture", "nan"])
def test_weights_that_do_not_fit_leave_the_old_ones(
    fault: str, make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, folders: dict[str, Path]
) -> None:
    runner, job = make_runner("llama"), make_job([7, 8, 9], 6)
    [want] = run_jobs(runner, [job])
    bad = load_model(folders["qwen3" if fault == "other architecture" else "other"])
    if fault == "nan":
        with torch.no_grad():
            bad.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="model_path"):
        runner.swap_weights(bad, "v1")
    [kept] = run_jobs(runner, [job])
    assert same(kept, want)
    assert kept.weight_version == "v0"


def test_bfloat16_follows_its_own_forward(
    make_runner: RunnerFactory, make_job: JobFactory, run_jobs: Run, folders: dict[str, Path]
) -> None:
    job = make_job(list(range(2, 20)), 8, logprob_start=0)
    [out] = run_jobs(make_runner(dtype="bfloat16"), [job])
    model = load_model(folders["llama"], "bfloat16")
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([[*range(2, 20), *out.output_ids]])).logits[0].float(), -1)
    want = [log_probs[17 + i, token].item() for i, token in enumerate(out.output_ids)]
    # bfloat16 keeps 8 bits of each number; logits here reach about 10.
    np.testing.assert_allclose(out.log_probs, want, atol=0.15)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_qwen2_is_served_without_its_sliding_window_switched_on() -> None:
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SMALL, use_sliding_window=False)).eval()
    KVModel(model, max_rows=2, cache_tokens=128)


@pytest.mark.parametrize(
    "config",
    [MistralConfig(**SMALL, sliding_window=16), Qwen2Config(**SMALL, use_sliding_window=True, max_window_layers=0)],
    ids=["mistral", "qwen2"],
)
def test_sliding_windows_are_refused(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match="sliding window"):
        KVModel(model, max_rows=2, cache_tokens=128)

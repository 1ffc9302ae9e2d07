"""Truncated sampling from the server to the loss: with the same weights the ratio is 1, without replay it is not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_tandem.config import RunConfig, SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.errors import DataError
from slime_tandem.local.run import train
from slime_tandem.megatron.policy import MegatronPolicy
from slime_tandem.objective.logprobs import token_log_probs
from slime_tandem.objective.truncation import Replay, Truncation
from slime_tandem.protocol import GenerateRequest, GenerateResult
from slime_tandem.rollout import rollout_ids
from slime_tandem.team.team import Team
from slime_tandem.training.replay import replay_of
from slime_tandem.training.rows import TrainRow
from slime_tandem.training.trainer import Trainer

from ..in_process import ThreadServer

SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.1},
    "both": {"top_p": 0.8, "top_k": 20},
    "all, cooler": {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "temperature": 0.7},
}
PROMPTS = [[5, 9, 30 + i, 60, 100 + i] for i in range(6)]


@pytest.fixture(scope="module")
def server(trio: Any) -> Iterator[ThreadServer]:
    with ThreadServer(trio.senior) as running:
        yield running


@pytest.fixture(scope="module")
def policy(trio: Any) -> MegatronPolicy:
    return MegatronPolicy.from_hf(trio.senior, None, threads=1)


def ask(server: ThreadServer, **changes: Any) -> list[GenerateResult]:
    async def main() -> list[GenerateResult]:
        requests = [
            GenerateRequest(f"r{i}", tuple(ids), 16, sampling_seed=i, **changes) for i, ids in enumerate(PROMPTS)
        ]
        async with EngineClient(server.url, max_retries=0) as client:
            return await client.generate(requests)

    return asyncio.run(main())


def rows_of(results: list[GenerateResult]) -> list[TrainRow]:
    rows = []
    for i, (ids, r) in enumerate(zip(PROMPTS, results, strict=True)):
        R = len(r.output_ids)
        rows.append(
            TrainRow(
                (*ids, *r.output_ids), i // 2, (-1.0) ** i, np.array(r.output_log_probs), np.ones(R), np.zeros(R),
                np.zeros(R), replayed=np.ones(R, np.bool_), kept_ids=r.kept_ids,
            )
        )  # fmt: skip
    return rows


def log_ratios(policy: MegatronPolicy, rows: list[TrainRow], temperature: float, replay: Replay | None) -> torch.Tensor:
    logits = policy.response_logits([r.tokens for r in rows], [r.response_length for r in rows])
    labels = torch.tensor([t for r in rows for t in r.tokens[-r.response_length :]])
    log_probs, _ = token_log_probs(logits, labels, temperature, replay=replay)
    return log_probs - torch.from_numpy(np.concatenate([r.old_log_probs for r in rows]))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_ratio_is_one_with_replay_and_biased_without(
    name: str, server: ThreadServer, policy: MegatronPolicy
) -> None:
    cut = {**SETTINGS[name]}
    temperature = cut.pop("temperature", 1.0)
    results = ask(server, **SETTINGS[name], truncated_logprobs=True)
    # The same tokens are drawn whether or not it is reported from what; the log-probs are then the full distribution's.
    plain = ask(server, **SETTINGS[name])
    assert [r.output_ids for r in plain] == [r.output_ids for r in results]
    rows, full_rows = rows_of(results), rows_of(plain)
    sampling = SamplingConfig(**SETTINGS[name])
    kept = replay_of(sampling, rows, policy.device)
    assert (kept is None) == (name == "nothing")
    assert log_ratios(policy, rows, temperature, kept).abs().max() < 1e-5
    assert log_ratios(policy, full_rows, temperature, None).abs().max() < 1e-5
    if name == "nothing":
        assert all(ids == () for r in results for ids in r.kept_ids)
        return
    # From the logits: a token at the very edge may fall on the other side of it, by rounding; here none does.
    assert log_ratios(policy, rows, temperature, Replay(Truncation(**cut))).abs().max() < 1e-5
    biased = log_ratios(policy, rows, temperature, None).exp()
    assert (biased < 1 + 1e-5).all()
    assert biased.mean() < 0.97


def test_kept_lists_are_what_was_drawn_from(server: ThreadServer) -> None:
    [first, *_] = ask(server, top_k=7, truncated_logprobs=True, top_logprobs_num=7)
    assert [set(ids) for ids in first.kept_ids] == [{i for _, i in top} for top in first.output_top_logprobs]
    for value, ids, token, top in zip(
        first.output_log_probs, first.kept_ids, first.output_ids, first.output_top_logprobs, strict=True
    ):
        assert token in ids
        full = {i: lp for lp, i in top}
        assert value == pytest.approx(full[token] - np.logaddexp.reduce(list(full.values())), abs=1e-5)


@pytest.mark.parametrize("mode", ["kept_ids", "recompute"])
def test_the_trainer_replays(mode: str, server: ThreadServer, trio: Any) -> None:
    config = RunConfig.load(
        overrides=[
            "sampling.top_p=0.8", "sampling.top_k=20", f"sampling.truncation_replay={mode}", "opd.enabled=false",
            "train.threads=1", "objective.kl_coef=0.1", "objective.kl_estimator=k1", "optimizer.lr=1e-9",
        ]
    )  # fmt: skip
    results = ask(server, top_p=0.8, top_k=20, truncated_logprobs=mode == "kept_ids")
    trainable = MegatronPolicy.from_hf(trio.senior, config.optimizer, threads=1)
    reference = MegatronPolicy.from_hf(trio.senior, None, threads=1)
    rows = rows_of(results)
    trainer = Trainer(config, trainable, reference)
    full = np.split(
        log_ratios(reference, rows, 1.0, None).numpy() + np.concatenate([r.old_log_probs for r in rows]),
        np.cumsum([r.response_length for r in rows])[:-1],
    )
    rows = [dataclasses.replace(r, ref_log_probs=f) for r, f in zip(rows, full, strict=True)]
    metrics = trainer.update(rows)
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/logprob_diff"] < 1e-5
    assert metrics["train/clip_fraction"] == 0.0
    # The reference is the full distribution: what was cut off is part of the divergence, which is above 0 from the start.
    assert metrics["train/kl_loss"] is not None
    assert metrics["train/kl_loss"] > 0.005
    # A junior's token keeps its full distribution.
    junior = [dataclasses.replace(r, replayed=r.replayed & False, kept_ids=((),) * r.response_length) for r in rows]  # type: ignore[operator]
    plain = rows_of(ask(server, top_p=0.8, top_k=20))
    junior = [dataclasses.replace(r, old_log_probs=p.old_log_probs) for r, p in zip(junior, plain, strict=True)]
    replay = replay_of(config.sampling, junior, trainable.device)
    assert log_ratios(reference, junior, 1.0, replay).abs().max() < 1e-5


def test_rows_without_lists_are_refused(server: ThreadServer) -> None:
    rows = rows_of(ask(server, top_k=5))
    with pytest.raises(DataError, match=r"kept_ids of .* 16, one per response token.*recompute"):
        replay_of(SamplingConfig(top_k=5), rows, torch.device("cpu"))


def test_a_co_written_run_trains_on_truncated_samples(
    trio: Any, side_url: Callable[[str], str], running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Junior tokens carry weight: their ratios are of the full distribution, the senior's of the truncated one."""
    senior = running(ThreadServer(trio.senior))
    config = RunConfig.from_mapping(
        {
            "name": "r",
            "runs_dir": str(tmp_path),
            "models": {role: str(getattr(trio, role)) for role in ("senior", "junior", "teacher")},
            "tasks": [{"family": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}}],
            "sampling": {"max_new_tokens": 12, "top_p": 0.8, "top_k": 20},
            "tandem": {"junior_token_loss_weight": 0.5},
            "opd": {"enabled": False},
            "train": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 3, "threads": 1},
            "eval": {"prompts": 1},
            "engine": {"cache_tokens": 4096, "junior_url": side_url("junior"), "senior_url": senior.url},
        }
    )
    asked: dict[int, bool] = {}
    write = Team.write

    def watched(team: Team, prompts: Any, rollout_id: int, *args: Any, **options: Any) -> Any:
        asked[rollout_id] = options["sampling"].asks_kept_ids
        return write(team, prompts, rollout_id, *args, **options)

    monkeypatch.setattr(Team, "write", watched)
    train(config)
    assert asked == {0: True, rollout_ids.EVALUATION: False}, "an evaluation is not asked what it drew from"
    [row] = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert row["tandem/junior_token_fraction"] > 0
    assert row["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert row["train/logprob_diff"] < 1e-5

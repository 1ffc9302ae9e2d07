"""The boundary tables of real tokenizers on the engine: tiny models with the vocabularies of Qwen and SmolLM2."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocabularies import load

from slime_tandem.config import SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.fused.launch import FusedServer, Sglang
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.drive import write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.types import JUNIOR, SENIOR, Prompt, SampleKey, TandemSample

STRATEGIES = ("word", "sentence", "bernoulli")


@pytest.mark.parametrize(("name", "size"), [("qwen", 151936), ("smollm2", 49152)])
def test_tables_of_a_real_tokenizer(
    name: str, size: int, tmp_path: Path, preloaded_python: str, pair_of: Callable[[int], Any]
) -> None:
    """Token by token: the rule's author, its log-prob within 1e-4 of transformers; both write, runs end at the table's ids."""
    known = load(name).tokens
    # What models have beyond their tokenizer's ids (padding to a round number) has no bytes.
    table = (*known.table, *[None] * (size - len(known.table)))[:size]
    tokens = dataclasses.replace(known, table=table, eos_ids=frozenset())
    reference = pair_of(size)
    tables = {s: boundary_ids(s, table, tokens.special) for s in ("word", "sentence")}
    rules = [HandoffRule.of(s, 0.5, 9, 3, tables.get(s, frozenset())) for s in STRATEGIES for _ in range(3)]
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, len(known.table), 12).tolist()) for _ in rules]
    sampling = SamplingConfig(max_new_tokens=40)
    writers = [
        TandemWriter(
            SampleKey(4, 0, i), 0, Prompt("p", (), None, "t"), p, WriterOptions(rule, sampling, tokens, fused=True)
        )
        for i, (p, rule) in enumerate(zip(prompts, rules, strict=True))
    ]

    async def write(url: str) -> list[TandemSample]:
        async with EngineClient(url, role="fused") as client:
            both: dict[int, Any] = {SENIOR: client, JUNIOR: client}
            return list(await asyncio.gather(*(write_one(w, both) for w in writers)))

    server = FusedServer(
        tmp_path / "senior",
        tmp_path / "junior",
        tables=list(tables.values()),
        sglang=Sglang(preloaded_python, args=("--skip-tokenizer-init", "--max-total-tokens", "4096")),
        log_file=tmp_path / "log",
    )
    server.start()
    try:
        samples = asyncio.run(write(server.url))
    finally:
        server.stop(timeout_s=1.0)
    ended = 0
    for sample, rule in zip(samples, rules, strict=True):
        assert len(sample.response_ids) == 40
        assert sample.authorship_mask == rule.authorship(sample.key, sample.response_ids)
        reference.check(sample)
        if rule.strategy == "word":
            ended += sum(token in tables["word"] for token in sample.response_ids)
    assert ended > 10, "random ids of these vocabularies end a word in a third of all cases"
    assert any(0 < s.senior_tokens < 40 for s in samples)

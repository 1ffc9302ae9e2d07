"""What truncated sampling does to the importance ratio, with and without replay, on the small models; the weights are the same.

    python scripts/benchmarks/truncation_replay.py                    # about a minute on one core

An embedded server writes answers of `builtin:senior` to held-out sums under each truncation and reports log-probs of the
distribution that it drew from. The trainer (Megatron-core, float32) computes its own log-probs of the same tokens: of the full
distribution (no replay), over the kept ids that the server told, and over what its own logits keep. The ratio is exp(trainer
- server); no update has happened, so that it should be 1. The server runs in float32, as in training here, and in bfloat16,
where server and trainer disagree by rounding, as on GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import numpy as np
import torch

from slime_tandem.config import RunConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.processes import ServerProcess
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.megatron.policy import MegatronPolicy
from slime_tandem.models.builtin import resolve_model
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.objective.logprobs import token_log_probs
from slime_tandem.objective.truncation import KeptIds, Replay, Truncation
from slime_tandem.protocol import GenerateRequest, GenerateResult
from slime_tandem.tasks.families import TaskSet

CUTS = {
    "none": Truncation(),
    "top_p=0.8": Truncation(top_p=0.8),
    "top_k=20": Truncation(top_k=20),
    "top_k=20, top_p=0.8": Truncation(20, 0.8),
    "min_p=0.1": Truncation(min_p=0.1),
    "top_k=5, top_p=0.95": Truncation(5, 0.95),
}


def write(
    url: str, prompts: list[list[int]], cut: Truncation, eos: list[int], temperature: float
) -> list[GenerateResult]:
    async def main() -> list[GenerateResult]:
        requests = [
            GenerateRequest(
                f"r{i}", tuple(ids), 48, temperature=temperature, top_k=cut.top_k, top_p=cut.top_p, min_p=cut.min_p,
                stop_token_ids=tuple(eos), sampling_seed=i, truncated_logprobs=True,
            )
            for i, ids in enumerate(prompts)
        ]  # fmt: skip
        async with EngineClient(url) as client:
            return [r for a in range(0, len(requests), 64) for r in await client.generate(requests[a : a + 64])]

    return asyncio.run(main())


def ratios(
    policy: MegatronPolicy,
    prompts: list[list[int]],
    results: list[GenerateResult],
    temperature: float,
    cut: Truncation | None,
    kept: bool,
) -> np.ndarray:
    out = []
    with torch.no_grad():
        for a in range(0, len(results), 32):
            part = results[a : a + 32]
            rows = [(*ids, *r.output_ids) for ids, r in zip(prompts[a : a + 32], part, strict=True)]
            logits = policy.response_logits(rows, [len(r.output_ids) for r in part])
            labels = torch.tensor([t for r in part for t in r.output_ids])
            lists = KeptIds.of([ids for r in part for ids in r.kept_ids]) if kept else None
            replay = None if cut is None else Replay(cut, kept=lists)
            log_probs, _ = token_log_probs(logits, labels, temperature, replay=replay)
            out.append(log_probs.numpy() - np.array([v for r in part for v in r.output_log_probs]))
    return np.exp(np.concatenate(out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", default=None, help="where builtin models are kept (default: the run's)")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    config = RunConfig.load(overrides=[] if args.cache_dir is None else [f"models.cache_dir={args.cache_dir}"])
    folder = resolve_model(config.models.senior, config.models.cache_dir)
    tokenizer = ModelTokenizer.load(folder)
    prompts = [tokenizer.render(p.messages) for p in TaskSet(config.tasks, config.seed).heldout_prompts(args.prompts)]
    policy = MegatronPolicy.from_hf(folder, None, threads=1)
    lines = [
        "| server | truncation | tokens | kept, median and 95% | no replay: mean ratio | outside [0.9, 1.1] | "
        "kept ids: mean ratio | outside | from logits: mean ratio | outside |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for dtype in ("float32", "bfloat16"):
        with (
            tempfile.TemporaryDirectory() as logs,
            ServerProcess(folder, ServeOptions(dtype=dtype), log_file=Path(logs) / "log") as server,
        ):
            for name, cut in CUTS.items():
                results = write(server.url, prompts, cut, sorted(tokenizer.tokens.eos_ids), args.temperature)
                sizes = [len(ids) or policy.architecture.vocab_size for r in results for ids in r.kept_ids]
                cells = []
                for how, kept in ((None, False), (cut, True), (cut, False)):
                    ratio = ratios(policy, prompts, results, args.temperature, how, kept)
                    cells += [f"{ratio.mean():.4f}", f"{((ratio < 0.9) | (ratio > 1.1)).mean():.1%}"]
                quantiles = np.quantile(sizes, (0.5, 0.95))
                lines.append(
                    f"| {dtype} | {name} | {len(sizes)} | {quantiles[0]:.0f}, {quantiles[1]:.0f} | {' | '.join(cells)} |"
                )
    print("\n".join(lines))


if __name__ == "__main__":
    main()

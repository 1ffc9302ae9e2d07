r"""Is a fused engine right on this machine's device? Authors and log-probs under captured graphs; release and resume.

    python scripts/benchmarks/fused_check.py SENIOR JUNIOR [--release] [--fused-attention catch_up] \
        [--fused-prefill flashinfer] [--sglang-python PYTHON]

Tandem responses at several batch sizes, twice (the second time their prompts are cached), against transformers in
float32; the tests of `tests/engines/fused` do the same on a CPU in more cases, without graphs. SGLang's kernels for GPUs
take bfloat16 only (`--dtype`): there the yardstick is what bfloat16 costs in transformers on the same responses (`rounding`).
With --release the server's
weights and pool are released and resumed as slime's colocation does, then the senior's weights are sent; both models must
write the same greedy tokens as before. FlashInfer's prefill takes heads of 64, 128 or 256 and no float32. Prints one JSON
line; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import torch

from slime_tandem.config import SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.fused.launch import FusedServer, Sglang, catch_up_of
from slime_tandem.engines.processes import DIRECT
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.models.hf import load_model
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.protocol import GenerateRequest
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.drive import write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter, WriterOptions, handoff_of
from slime_tandem.types import JUNIOR, SENIOR, Prompt, SampleKey, TandemSample

BATCHES = (1, 3, 8, 32)
CAPTURED = "Capture target prefill CUDA graph end"
FLASHINFER = "prefill attention of the fused engine: FlashInfer"


class Check:
    """One server and the two models that it holds."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self.args, self.url = args, url
        tokenizer = ModelTokenizer.load(args.senior)
        self.tokens = tokenizer.tokens
        self.ids = [i for i, b in enumerate(self.tokens.table) if b is not None and i not in self.tokens.special]
        self.rule = HandoffRule.of("word", 0.5, 16, 8, boundary_ids("word", self.tokens.table, self.tokens.special))
        folders = {SENIOR: args.senior, JUNIOR: args.junior}
        self.models = {author: load_model(folder).to(args.reference) for author, folder in folders.items()}
        self.rounded = {
            author: load_model(folder).to(args.reference, torch.bfloat16) for author, folder in folders.items()
        }

    def writer(self, i: int, prompt: list[int]) -> TandemWriter:
        sampling = SamplingConfig(max_new_tokens=self.args.new)
        options = WriterOptions(self.rule, sampling, self.tokens, score_junior=True, fused=True)
        return TandemWriter(SampleKey(7, 0, i), 0, Prompt("p", (), None, "t"), prompt, options)

    async def tandem(self) -> dict[str, Any]:
        """Tokens, mismatched authors; largest and mean difference of a log-prob, nats: the engine's, of `rounding`."""
        rng, wrong, i = random.Random(0), 0, 0
        engine, rounding = [], []
        async with EngineClient(self.url, timeout_s=600, max_connections=64) as client:
            for size in BATCHES * self.args.rounds:
                prompts = [rng.choices(self.ids, k=rng.randint(1, self.args.prompt)) for _ in range(size)]
                for _ in range(2):
                    writers = [self.writer(i + n, p) for n, p in enumerate(prompts)]
                    i += size
                    engines = {SENIOR: client, JUNIOR: client}
                    for sample in await asyncio.gather(*(write_one(w, engines) for w in writers)):
                        assert isinstance(sample, TandemSample)
                        wrong += sample.authorship_mask != self.rule.authorship(sample.key, sample.response_ids)
                        exact = self.log_probs(self.models, sample)
                        reported = torch.tensor([sample.log_probs, sample.senior_log_probs])
                        engine.append((reported - exact).abs().flatten())
                        rounding.append((self.log_probs(self.rounded, sample) - exact).abs().flatten())
        ours, theirs = torch.cat(engine), torch.cat(rounding)
        return {
            "tokens": len(ours) // 2, "mismatched": wrong,
            "largest": float(ours.max()), "mean": float(ours.mean()),
            "rounding_largest": float(theirs.max()), "rounding_mean": float(theirs.mean()),
        }  # fmt: skip

    def log_probs(self, models: dict[int, Any], sample: TandemSample) -> torch.Tensor:
        """[2, n]: the author's and the senior's log-prob of every token."""
        ids = torch.tensor([sample.prompt_ids + sample.response_ids], device=self.args.reference)
        start = len(sample.prompt_ids) - 1
        token = ids[0, start + 1 :].unsqueeze(1)
        with torch.no_grad():
            rows = {a: m(ids).logits[0, start:-1].float().log_softmax(-1) for a, m in models.items()}
        both = {a: row.gather(1, token)[:, 0].cpu() for a, row in rows.items()}
        author = torch.tensor(sample.authorship_mask) == SENIOR
        return torch.stack([torch.where(author, both[SENIOR], both[JUNIOR]), both[SENIOR]])

    async def greedy(self) -> list[tuple[int, ...]]:
        """Twelve greedy responses of each model."""
        rng = random.Random(1)
        requests = [
            GenerateRequest(
                f"greedy-{author}-{i}", tuple(rng.choices(self.ids, k=12)), 24, temperature=0.0,
                handoff=None if author == SENIOR else handoff_of(HandoffRule.of("word", 0.0, 16, 8, self.rule.boundary), 5),
            )
            for author in (SENIOR, JUNIOR) for i in range(12)
        ]  # fmt: skip
        async with EngineClient(self.url, timeout_s=600) as client:
            await client.flush_cache()
            return [r.output_ids for r in await client.generate(requests)]

    def release(self) -> dict[str, Any]:
        """Whether both models write as before after release, resume and the senior's weights; MiB used at each stage."""
        before, used = asyncio.run(self.greedy()), [memory()]
        self.post("release_memory_occupation")
        used.append(memory())
        self.post("resume_memory_occupation", tags=["weights"])
        self.post("update_weights_from_disk", model_path=str(self.args.senior), flush_cache=False)
        self.post("resume_memory_occupation", tags=["kv_cache"])
        used.append(memory())
        after = asyncio.run(self.greedy())
        same = [a == b for a, b in zip(before, after, strict=True)]
        return {
            "senior_same": all(same[:12]),
            "junior_same": all(same[12:]),
            "MiB": used,
            "differ": before[:12] != before[12:],
        }

    def post(self, path: str, **body: Any) -> None:
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        DIRECT.open(request, timeout=120).read()


def memory() -> int | None:
    """MiB used on the first GPU, if there is one."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("senior", type=Path)
    parser.add_argument("junior", type=Path)
    parser.add_argument("--sglang-python")
    parser.add_argument("--release", action="store_true", help="also release and resume (needs torch-memory-saver)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the server")
    parser.add_argument("--fused-attention", choices=("every_step", "catch_up"), default="every_step")
    parser.add_argument("--fused-prefill", choices=("auto", "triton", "flashinfer"), default="auto")
    parser.add_argument("--rounds", type=int, default=1, help="how often the batch sizes are gone through")
    parser.add_argument("--prompt", type=int, default=90, help="longest prompt, tokens")
    parser.add_argument("--new", type=int, default=32, help="tokens per response")
    parser.add_argument("--reference", default="cpu", help="device of transformers")
    parser.add_argument("--server", default="", help="more flags of sglang.launch_server")
    parser.add_argument("--log", type=Path, default=Path("fused_check_server.log"))
    args = parser.parse_args()
    flags = ["--log-level", "info", "--max-total-tokens", "32768", "--mem-fraction-static", "0.3", *args.server.split()]
    if args.release:
        flags += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    tokens = ModelTokenizer.load(args.senior).tokens
    tables = [boundary_ids("word", tokens.table, tokens.special)]
    with FusedServer(
        args.senior,
        args.junior,
        ServeOptions(dtype=args.dtype),
        tables=tables,
        sglang=Sglang(
            args.sglang_python,
            args=flags,
            catch_up=catch_up_of(args.fused_attention, args.senior),
            prefill=args.fused_prefill,
        ),
        log_file=args.log,
    ) as server:
        check = Check(args, server.url)
        result = asyncio.run(check.tandem())
        if args.release:
            result |= check.release() | {f"again_{k}": v for k, v in asyncio.run(check.tandem()).items()}
    log = args.log.read_text(errors="replace")
    result |= {"prefill_graphs": CAPTURED in log, "flashinfer": FLASHINFER in log}
    print(json.dumps(result))
    return int(not all(right(result, again, args.dtype) for again in ("", "again_")[: 1 + args.release]))


def right(result: dict[str, Any], prefix: str, dtype: str) -> bool:
    """No mismatch, values as near as `dtype` allows, and after a release the same tokens."""
    largest, mean = result[f"{prefix}largest"], result[f"{prefix}mean"]
    rounding = result[f"{prefix}rounding_largest"], result[f"{prefix}rounding_mean"]
    near = largest < 1e-4 if dtype == "float32" else largest < 2 * rounding[0] and mean < 1.5 * rounding[1]
    same = result.get("senior_same", True) and result.get("junior_same", True)
    return near and same and not result[f"{prefix}mismatched"]


if __name__ == "__main__":
    sys.exit(main())

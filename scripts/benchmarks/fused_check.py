"""Is a fused engine right on this machine's device? Authors and log-probs under captured graphs; release and resume.

    python scripts/benchmarks/fused_check.py SENIOR JUNIOR [--release] [--sglang-python PYTHON] [--server "--tp-size 2"]

Tandem responses at several batch sizes, twice (the second time their prompts are cached), against transformers on the CPU in
float32; the tests of `tests/engines/fused` do the same on a CPU in more cases, without graphs. With --release the server's
weights and pool are released and resumed as slime's colocation does, then the senior's weights are sent; both models must
write the same greedy tokens as before. Prints one JSON line; the exit code is 1 if anything is wrong.
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
from slime_tandem.engines.fused.launch import FusedServer
from slime_tandem.engines.hf import load_model
from slime_tandem.engines.protocol import GenerateRequest
from slime_tandem.local.tokenizer import ModelTokenizer
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.drive import write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.tandem import TandemWriter, handoff_of
from slime_tandem.types import JUNIOR, SENIOR, Prompt, SampleKey, TandemSample

BATCHES = (1, 3, 8, 32)
CAPTURED = "Capture target prefill CUDA graph end"


class Check:
    """One server and the two models that it holds."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self.args, self.url = args, url
        tokenizer = ModelTokenizer.load(args.senior)
        self.tokens = tokenizer.tokens
        self.ids = [i for i, b in enumerate(self.tokens.table) if b is not None and i not in self.tokens.special]
        self.rule = HandoffRule("word", 0.5, 16, 8, boundary_ids("word", self.tokens.table, self.tokens.special))
        self.models = {SENIOR: load_model(args.senior), JUNIOR: load_model(args.junior)}

    def writer(self, i: int, prompt: list[int]) -> TandemWriter:
        sampling = SamplingConfig(max_new_tokens=32)
        return TandemWriter(
            SampleKey(7, 0, i), 0, Prompt("p", (), None, "t"), prompt, self.rule, sampling, self.tokens, fused=True
        )

    async def tandem(self) -> dict[str, Any]:
        """Tokens, mismatched authors, the largest difference of a log-prob in nats."""
        rng, wrong, worst, written, i = random.Random(0), 0, 0.0, 0, 0
        async with EngineClient(self.url, timeout_s=600, max_connections=64) as client:
            for size in BATCHES:
                prompts = [rng.choices(self.ids, k=rng.randint(1, 90)) for _ in range(size)]
                for _ in range(2):
                    writers = [self.writer(i + n, p) for n, p in enumerate(prompts)]
                    i += size
                    engines = {SENIOR: client, JUNIOR: client}
                    for sample in await asyncio.gather(*(write_one(w, engines) for w in writers)):
                        assert isinstance(sample, TandemSample)
                        wrong += sample.authorship_mask != self.rule.authorship(sample.key, sample.response_ids)
                        worst = max(worst, self.difference(sample))
                        written += len(sample.response_ids)
        return {"tokens": written, "mismatched": wrong, "largest_difference_nats": worst}

    def difference(self, sample: TandemSample) -> float:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        start = len(sample.prompt_ids) - 1
        token = torch.tensor(sample.response_ids).unsqueeze(1)
        with torch.no_grad():
            both = {
                a: m(ids).logits[0, start:-1].log_softmax(-1).gather(1, token)[:, 0] for a, m in self.models.items()
            }
        author = torch.tensor(sample.authorship_mask) == SENIOR
        own = torch.where(author, both[SENIOR], both[JUNIOR])
        return max(
            float((own - torch.tensor(sample.log_probs)).abs().max()),
            float((both[SENIOR] - torch.tensor(sample.senior_log_probs)).abs().max()),
        )

    async def greedy(self) -> list[tuple[int, ...]]:
        """Twelve greedy responses of each model."""
        rng = random.Random(1)
        requests = [
            GenerateRequest(
                f"greedy-{author}-{i}", tuple(rng.choices(self.ids, k=12)), 24, temperature=0.0,
                handoff=None if author == SENIOR else handoff_of(HandoffRule("word", 0.0, 16, 8, self.rule.boundary), 5),
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
        urllib.request.urlopen(request, timeout=120).read()


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
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="nats; Triton's float32 products are of TF32 parts"
    )
    parser.add_argument("--server", default="", help="more flags of sglang.launch_server")
    parser.add_argument("--log", type=Path, default=Path("fused_check_server.log"))
    args = parser.parse_args()
    flags = ["--log-level", "info", "--max-total-tokens", "32768", "--mem-fraction-static", "0.3", *args.server.split()]
    if args.release:
        flags += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    tokens = ModelTokenizer.load(args.senior).tokens
    tables = [boundary_ids("word", tokens.table, tokens.special)]
    with FusedServer(
        args.senior, args.junior, log_file=args.log, tables=tables, python=args.sglang_python, args=flags
    ) as server:
        check = Check(args, server.url)
        result = asyncio.run(check.tandem())
        if args.release:
            result |= check.release() | {f"again_{k}": v for k, v in asyncio.run(check.tandem()).items()}
    result["prefill_graphs"] = CAPTURED in args.log.read_text(errors="replace")
    print(json.dumps(result))
    differences = [v for k, v in result.items() if k.endswith("largest_difference_nats")]
    right = max(differences) < args.tolerance and not result["mismatched"] and not result.get("again_mismatched")
    return int(not (right and result.get("senior_same", True) and result.get("junior_same", True)))


if __name__ == "__main__":
    sys.exit(main())

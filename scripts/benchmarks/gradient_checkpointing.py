"""What `train.gradient_checkpointing` costs and saves on this machine: memory and time of a forward and a backward pass.

    python scripts/benchmarks/gradient_checkpointing.py --layers 12 --hidden 256 --rows 8 --length 512

A random Qwen3 of these sizes. `kept`: bytes that autograd keeps for the backward pass; `peak`: the process's greatest resident
memory above what it had with the model loaded, each way in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 2**20


def make(folder: Path, layers: int, hidden: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "vocab_size": 512,
    }
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        **sizes,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def measure(folder: Path, rows: int, length: int, checkpointed: bool, out: Any) -> None:
    import torch

    from slime_tandem.config import OptimizerConfig
    from slime_tandem.megatron.policy import MegatronPolicy

    policy = MegatronPolicy.from_hf(folder, OptimizerConfig(), threads=1, checkpointed=checkpointed)
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    sequences = [list(range(length % 500, length % 500 + 1)) * length for _ in range(rows)]
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = policy.response_logits(sequences, [length // 2] * rows)
    logits.square().mean().backward()
    seconds = time.process_time() - start
    out.put((kept, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 12), ("hidden", 256), ("rows", 8), ("length", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print("| gradient checkpointing | kept, MiB | peak, MiB | seconds of CPU |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.layers, args.hidden)
        for checkpointed in (False, True):
            out = context.Queue()
            process = context.Process(target=measure, args=(Path(folder), args.rows, args.length, checkpointed, out))
            process.start()
            kept, peak, seconds = out.get()
            process.join()
            print(
                f"| {'on' if checkpointed else 'off'} | {kept / MIB:.0f} | {peak / MIB:.0f} | {seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

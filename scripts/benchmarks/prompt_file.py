"""What a prompt file of many lines costs: seconds to read and check it, memory at its peak, seconds to draw a step's prompts.

python scripts/benchmarks/prompt_file.py --lines 1000000
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from slime_tandem.config import TaskSpec
from slime_tandem.tasks.families import TaskSet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    lines = parser.parse_args().lines
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for i in range(lines):
                question = f"What is {i} plus {i % 97}? Think step by step, then give the number."
                file.write(json.dumps({"question": question, "answer": f"We add.\n#### {i + i % 97}"}) + "\n")
        print(f"{lines} lines, {path.stat().st_size / 1e6:.0f} MB")
        began = time.perf_counter()
        tasks = TaskSet([TaskSpec(family="jsonl", path=str(path))], seed=0)
        read = time.perf_counter()
        tasks.train_prompts(step=0, n=32)
        print(f"read in {read - began:.1f} s, 32 prompts drawn in {time.perf_counter() - read:.2f} s")
        print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()

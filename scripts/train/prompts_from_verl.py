#!/usr/bin/env python3
"""verl's rows (parquet, or JSON lines) as a prompt file: `python scripts/train/prompts_from_verl.py test.parquet OUT.jsonl`.

Of each row are taken `prompt` (chat messages), `reward_model.ground_truth` (the label) and `data_source` (the task, by which
figures are reported); everything else stays in `metadata`, as far as JSON holds it. Parquet needs pyarrow, no dependency.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix != ".parquet":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        from pyarrow import parquet  # type: ignore[import-not-found]
    except ImportError:
        sys.exit(f"{path}: expected pyarrow, to read parquet. Remedy: pip install pyarrow, or give JSON lines.")
    return list(parquet.read_table(path).to_pylist())


def prompt_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    label = (row.get("reward_model") or {}).get("ground_truth")
    if label is None or not row.get("prompt"):
        sys.exit(f"{where}: expected prompt and reward_model.ground_truth. Remedy: see the columns of the file.")
    rest = {k: v for k, v in row.items() if k not in ("prompt", "reward_model", "data_source")}
    return {"prompt": row["prompt"], "label": str(label), "task": str(row.get("data_source", "verl")), "metadata": rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    rows = [prompt_row(row, f"{args.source} row {i}") for i, row in enumerate(rows_of(args.source))]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(
        "".join(json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in rows), encoding="utf-8"
    )
    print(f"{len(rows)} prompts in {args.output}")


if __name__ == "__main__":
    main()

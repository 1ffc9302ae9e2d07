"""What a prompt file of many rows costs: seconds to the first drawn prompt, memory at its peak, seconds of a draw.

The same file is read by its peers in the same run: `datasets` without and with its cache, and Python counting the lines. Each
measurement is a process of its own. For each format: seconds from the start of the work (imports are not counted) until one
prompt is drawn, seconds of a further draw of 32 (the median of 20), the process's highest memory (VmHWM; what it had after its
imports stands beside it), and its own at the end (RssAnon): what the highest has beyond that are mostly pages of files in a
memory map, which the system takes back when it needs them.

python scripts/benchmarks/dataset_start.py --lines 10000000 --formats jsonl jsonl.gz csv parquet folder
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DRAWS, N = 20, 32


def row_of(i: int) -> dict[str, str]:
    question = f"What is {i} plus {i % 97}? Think step by step, then give the number."
    return {"question": question, "answer": f"We add.\n#### {i + i % 97}"}


def write(folder: Path, kind: str, lines: int) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row_of(i)) + "\n" for i in range(lines))
    elif kind == "jsonl.gz":
        with (folder / "rows.jsonl").open("rb") as plain, gzip.open(path, "wb", compresslevel=1) as file:
            shutil.copyfileobj(plain, file, 2**24)
    elif kind == "csv":
        import csv

        with path.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file)
            out.writerow(row_of(0))
            out.writerows(row_of(i).values() for i in range(lines))
    elif kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema({"question": pa.string(), "answer": pa.string()})
        with pq.ParquetWriter(path, schema) as out:
            for start in range(0, lines, 100_000):
                rows = [row_of(i) for i in range(start, min(start + 100_000, lines))]
                out.write_table(pa.Table.from_pylist(rows, schema))
    else:
        import datasets

        def rows() -> Iterator[dict[str, str]]:
            yield from map(row_of, range(lines))

        datasets.disable_progress_bars()
        datasets.Dataset.from_generator(rows, cache_dir=str(folder / "made")).save_to_disk(str(path))
    return path


def memory(kind: str = "VmHWM") -> float:
    """This process's memory, in MiB: its highest so far (VmHWM), or what is its own (RssAnon)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{kind}:")[1].split()[0]) / 1024


def ours(path: Path) -> dict[str, Any]:
    from slime_tandem.config import TaskSpec
    from slime_tandem.tasks.families import TaskSet

    if path.suffix == ".parquet":
        import pyarrow.parquet  # noqa: F401
    if path.suffix == ".folder":
        import datasets  # noqa: F401
    imports, began = memory(), time.perf_counter()
    tasks = TaskSet([TaskSpec(family="jsonl", path=str(path))], seed=0)
    tasks.train_prompts(step=0, n=1)
    first = time.perf_counter() - began
    draws = []
    for step in range(DRAWS):
        began = time.perf_counter()
        tasks.train_prompts(step=step, n=N)
        draws.append(time.perf_counter() - began)
    began = time.perf_counter()
    tasks.heldout_prompts(256)
    held = time.perf_counter() - began
    return {
        "first": first,
        "draw": statistics.median(draws),
        "heldout": held,
        "imports": imports,
        "peak": memory(),
        "own": memory("RssAnon"),
    }


def peer(path: Path, cache: str) -> dict[str, Any]:
    """`datasets` on the same file: loaded, shuffled, one row drawn."""
    import datasets

    datasets.disable_progress_bars()
    imports, began = memory(), time.perf_counter()
    if path.suffix == ".folder":
        found = datasets.load_from_disk(str(path))
    else:
        kind = path.suffixes[0].removeprefix(".").replace("jsonl", "json")
        found = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=cache)
    shuffled = found.shuffle(seed=0)
    _ = shuffled[0]
    first = time.perf_counter() - began
    draws = []
    for step in range(DRAWS):
        began = time.perf_counter()
        _ = shuffled[step * N : step * N + N]
        draws.append(time.perf_counter() - began)
    return {
        "first": first,
        "draw": statistics.median(draws),
        "imports": imports,
        "peak": memory(),
        "own": memory("RssAnon"),
    }


def counted(path: Path) -> dict[str, Any]:
    imports, began = memory(), time.perf_counter()
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        sum(1 for _ in file)
    return {"first": time.perf_counter() - began, "imports": imports, "peak": memory(), "own": memory("RssAnon")}


def measured(what: str, path: Path, *more: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", what, str(path), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--formats", nargs="+", default=["jsonl"])
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        what, path, *more = args.measure
        print(json.dumps({"ours": ours, "peer": peer, "lines": counted}[what](Path(path), *more)))
        return
    print(f"{args.lines} rows; Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}")
    print(
        f"{'file':<10}{'MB':>7}  {'read by':<22}{'first, s':>9}{'draw 32, ms':>13}{'peak, MiB':>11}{'own':>7}{'imports':>9}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "jsonl.gz" in args.formats and "jsonl" not in args.formats:
            write(folder, "jsonl", args.lines)
        for kind in args.formats:
            path = write(folder, kind, args.lines)
            size = sum(p.stat().st_size for p in ([path] if path.is_file() else path.iterdir())) / 1e6
            cache = str(folder / f"cache-{kind}")
            runs = [("slime_tandem", ("ours", path)), ("datasets", ("peer", path, cache))]
            runs += [("datasets, cached", ("peer", path, cache))] if path.is_file() else []
            runs += [("lines counted", ("lines", path))] if kind in ("jsonl", "jsonl.gz", "csv") else []
            for label, run in runs:
                r = measured(*run)
                draw = f"{r['draw'] * 1e3:.1f}" if "draw" in r else "-"
                print(
                    f"{kind:<10}{size:>7.0f}  {label:<22}{r['first']:>9.2f}{draw:>13}{r['peak']:>11.0f}"
                    f"{r['own']:>7.0f}{r['imports']:>9.0f}",
                    flush=True,
                )
            shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()

"""What a profile says: GPU kernels of a PyTorch trace by kind, and samples of a Python process by where they were taken.

Pure functions of what torch's profiler (SGLang's and slime's, too) and `py-spy record --format raw` write. Starts nothing.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KINDS = (
    ("attention", ("attention", "_fwd_", "decode_stage", "flash", "_read", "_merge")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "splitk", "cublas", "matmul")),
    ("softmax and sampling", ("softmax", "multinomial", "exponential", "sort", "argmax", "cumsum")),
    ("communication", ("nccl",)),
    ("optimizer", ("adam", "multi_tensor")),
    ("copies", ("memcpy", "memset", "copy")),
)
"""Kinds of kernels by parts of their lower-case names; the first that fits counts."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def gpu_time(events: Sequence[Mapping[str, Any]], steps: float) -> dict[str, Any]:
    """Milliseconds per step of `steps`: `step_ms` of the clock, `busy_ms` of the GPU, by kind of kernel, the slowest kernels.

    `events`: `traceEvents` of a trace, times in microseconds. Of kernels that run side by side `busy_ms` counts the time once.

    >>> gpu_time([{"ts": 0, "dur": 500, "name": "nvjet", "cat": "kernel"},
    ...           {"ts": 1500, "dur": 500, "name": "_read", "cat": "kernel"}], 2)["by_kind"]
    {'matrix products': 0.25, 'attention': 0.25}
    """
    used = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in ON_GPU)
    if not used:
        return {"error": "the trace holds no GPU events"}
    busy, end = 0.0, 0.0
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for start, took, name in used:
        busy += max(0.0, start + took - max(start, end))
        end = max(end, start + took)
        kinds[next((kind for kind, words in KINDS if any(w in name.lower() for w in words)), "other")] += took
        names[name[:60]] += took
    per_step = 1e3 * steps
    return {
        "step_ms": round((end - used[0][0]) / per_step, 3),
        "busy_ms": round(busy / per_step, 3),
        "kernels": len(used) / steps,
        "by_kind": {kind: round(us / per_step, 3) for kind, us in kinds.most_common()},
        "slowest": {name: round(us / per_step, 3) for name, us in names.most_common(20)},
    }


_FRAME = re.compile(r"(.*) \((.*?)(?::\d+)?\)$")
OURS = "slime_tandem/"


def python_time(raw: Iterable[str]) -> dict[str, Any]:
    """Shares of the samples: `by_library`, of the innermost frame, and `under_ours`, of the innermost function of this package.

    `raw`: lines of py-spy, frames from the outermost to the innermost, then the count. A frame's library is the first part of
    its file's path, and one for all of Python's own; samples in which no function of this package was running are `none`.

    >>> found = python_time(["run (asyncio/base.py:9);score (slime_tandem/distill/panel.py:7);add (numpy/core.py:1) 3",
    ...                      "run (asyncio/base.py:9);wait (threading.py:3) 1"])
    >>> found["by_library"], found["under_ours"]
    ({'numpy': 0.75, 'Python': 0.25}, {'distill/panel.py score': 0.75, 'none': 0.25})
    """
    libraries: Counter[str] = Counter()
    under: Counter[str] = Counter()
    for line in raw:
        stack, _, count = line.strip().rpartition(" ")
        if not count.isdigit():
            continue
        frames = [(found[1], found[2]) if (found := _FRAME.match(frame)) else (frame, "") for frame in stack.split(";")]
        library = frames[-1][1].partition("/")[0].removesuffix(".py")
        libraries["Python" if library in {"", *sys.stdlib_module_names} else library] += int(count)
        ours = next(((function, file) for function, file in reversed(frames) if OURS in file), None)
        under[f"{ours[1].rpartition(OURS)[2]} {ours[0]}" if ours else "none"] += int(count)
    total = sum(libraries.values())
    shares = [{name: round(n / total, 4) for name, n in counts.most_common(20)} for counts in (libraries, under)]
    return {"samples": total, "by_library": shares[0], "under_ours": shares[1]}

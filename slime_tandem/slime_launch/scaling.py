"""What a number of rollout GPUs needs of the network and of the rollout manager, from rates that were measured on one or two.

`python -m slime_tandem.slime_launch.scaling` prints the table of docs/scaling.md. Rates are those of docs/results/fused.md (one
H100, Qwen3-4B and 0.6B) and docs/results/tandem-rollout.md (2 x H200, two of 4B), at 64 responses at once. That engines do not
slow each other down is an assumption; it has not been run above two GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FUSED_TOKENS_PER_S = 5788.0
"""Of a GPU with 4B + 0.6B inside (fused.md, 64 at once)."""
PAIR_TOKENS_PER_S = 9507.0 / 4.00
"""Of two GPUs, one model each (tandem-rollout.md, free-running, 64 at once: solo rate, and what co-writing makes of it)."""
REQUESTS_PER_TOKEN = 0.18
"""Two servers, free-running, as slime's rollout manager drives them (tandem-rollout.md)."""
SHOWN_REQUESTS_PER_S = REQUESTS_PER_TOKEN * 16697.0 / 4.31
"""What one client process has done: free-running, 256 at once (tandem-rollout.md). slime's rollout manager is one process."""
BYTES_PER_TOKEN = {1024: 208.0, 4096: 593.0, 16384: 2048.0}
"""Sent to two servers per token of a response of so many tokens, whole contexts (tandem-rollout.md, Traffic)."""
CHANNEL_BYTES = 4 * 8
"""Of the channels of a token on their way to the trainer: eight float32 (slime_hooks/wire.py), without candidates."""

MANAGER = {
    "fused": (3.2, 0.83, 1.53),
    "fused, sampled signal": (3.8, 1.14, 3.20),
    "fused, exact lists": (67.6, 3.93, 60.0),
}
"""CPU seconds per million tokens: all in the rollout manager's loop; with client processes that loop's, and theirs
(docs/results/manager-cost.md; of exact lists the processes have the parts that the loop has not)."""
TEACHER_BYTES = 41
"""Of a token that a teacher scores: its id as text, and log-prob and id in the answer."""
HALF = 0.5
"""How busy a loop or a process is planned to be: what waits for it waits little."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Of `gpus` that write responses of `response` tokens; rates per second over the whole job."""

    engine: str
    gpus: int
    response: int
    tokens_per_s: float
    requests_per_s: float
    teacher_requests_per_s: float
    sent_bytes_per_s: float | None
    channel_bytes_per_s: float

    @property
    def shown(self) -> bool:
        """Whether one client process has sent requests that fast."""
        return self.requests_per_s <= SHOWN_REQUESTS_PER_S


def demand(engine: str, gpus: int, response: int) -> Demand:
    """`engine`: fused, or two_servers, of which a pair takes two GPUs. A teacher is asked once a response (opd.signal=sampled).

    >>> d = demand("fused", 8, 1024)
    >>> round(d.tokens_per_s), round(d.requests_per_s, 1)
    (46304, 45.2)
    """
    fused = engine == "fused"
    tokens = gpus * FUSED_TOKENS_PER_S if fused else gpus // 2 * PAIR_TOKENS_PER_S
    responses = tokens / response
    return Demand(
        engine=engine,
        gpus=gpus,
        response=response,
        tokens_per_s=tokens,
        requests_per_s=responses if fused else tokens * REQUESTS_PER_TOKEN,
        teacher_requests_per_s=responses,
        sent_bytes_per_s=None if fused else tokens * BYTES_PER_TOKEN[response],
        channel_bytes_per_s=tokens * CHANNEL_BYTES,
    )


def table(response: int = 1024) -> str:
    """Markdown, one line per engine and number of GPUs."""
    columns: tuple[str, ...] = ("engine", "rollout GPUs", "tokens/s", "requests/s of the client", "teacher requests/s")
    columns += ("sent to engines, MB/s", "channels, MB/s")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for engine in ("fused", "two_servers"):
        for gpus in (2, 8, 64, 256, 1000):
            d = demand(engine, gpus, response)
            mark = "" if d.shown else " (not shown)"
            sent = "not measured" if d.sent_bytes_per_s is None else f"{d.sent_bytes_per_s / 1e6:,.1f}"
            cells = [engine, f"{gpus:,}", f"{d.tokens_per_s:,.0f}", f"{d.requests_per_s:,.0f}{mark}"]
            cells += [f"{d.teacher_requests_per_s:,.1f}", sent, f"{d.channel_bytes_per_s / 1e6:,.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ManagerDemand:
    """Of `gpus` fused engines: cores that a loop would be busy with alone and beside client processes, how many of these at
    half load, and how many rollout managers, whose loops then are at half load, too. slime has one."""

    alone: float
    loop: float
    processes: int
    managers: int


def manager(what: str, gpus: int) -> ManagerDemand:
    """`what`: a key of MANAGER.

    >>> demand = manager("fused, sampled signal", 64)
    >>> round(demand.alone, 2), round(demand.loop, 2), demand.processes, demand.managers
    (1.41, 0.42, 3, 1)
    """
    millions = gpus * FUSED_TOKENS_PER_S / 1e6
    alone, loop, theirs = (seconds * millions for seconds in MANAGER[what])
    return ManagerDemand(alone, loop, math.ceil(theirs / HALF), math.ceil(loop / HALF))


def manager_table() -> str:
    """Markdown, one line per kind of job and number of GPUs."""
    heads = ("job", "rollout GPUs", "tokens/s", "loop alone, cores", "loop, cores", "client processes", "managers")
    lines = [f"| {' | '.join((*heads, 'teacher, MB/s'))} |", "|---" * (len(heads) + 1) + "|"]
    for what in MANAGER:
        for gpus in (8, 64, 256, 1000):
            d, tokens = manager(what, gpus), gpus * FUSED_TOKENS_PER_S
            teacher = (
                f"{tokens * TEACHER_BYTES / 1e6:,.1f}"
                if "signal" in what
                else "-"
                if what == "fused"
                else "not measured"
            )
            cells = [
                what,
                f"{gpus:,}",
                f"{tokens:,.0f}",
                f"{d.alone:.2f}",
                f"{d.loop:.2f}",
                str(d.processes),
                str(d.managers),
            ]
            lines.append(f"| {' | '.join((*cells, teacher))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    print()
    print(manager_table())

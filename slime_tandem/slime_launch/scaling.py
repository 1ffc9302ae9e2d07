"""What a number of rollout GPUs needs of network, teachers and rollout manager, from rates that were measured on one or two.

`python -m slime_tandem.slime_launch.scaling` prints the tables of docs/scaling.md. Rates of engines are those of
docs/results/fused.md (one H100, Qwen3-4B and 0.6B) and docs/results/tandem-rollout.md (2 x H200, two of 4B), at 64 responses
at once; what following them costs is `slime_hooks/loop_cost.py`'s. That engines do not slow each other down, and that a token
costs the same at any rate, are assumptions; nothing has been run above two GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_tandem.slime_hooks.loop_cost import (
    FUSED,
    FUSED_TOKENS_PER_S,
    GATHERED,
    HALF,
    LISTS,
    PAIR_TOKENS_PER_S,
    PAIRS,
    SAMPLED,
)

REQUESTS_PER_TOKEN = 0.18
"""Two servers, free-running, as slime's rollout manager drives them (tandem-rollout.md)."""
SHOWN_REQUESTS_PER_S = REQUESTS_PER_TOKEN * 16697.0 / 4.31
"""What one client process has done: free-running, 256 at once (tandem-rollout.md). slime's rollout manager is one process."""
BYTES_PER_TOKEN = {1024: 208.0, 4096: 593.0, 16384: 2048.0}
"""Sent to two servers per token of a response of so many tokens, whole contexts (tandem-rollout.md, Traffic)."""
CHANNEL_BYTES = 4 * 8
"""Of the channels of a token on their way to the trainer: eight float32 (slime_hooks/wire.py), without candidates."""

MANAGER: dict[str, tuple[float, tuple[float, float] | None]] = {
    "fused": (FUSED, (0.83, 1.53)),
    "fused, sampled signal": (FUSED + SAMPLED, (1.14, 3.20)),
    "fused, exact lists": (FUSED + LISTS, (3.93, FUSED + LISTS - 3.93)),
    "two servers": (PAIRS, None),
    "two servers, gathered": (GATHERED, None),
}
"""CPU seconds per million tokens: all in the rollout manager's loop; with client processes that loop's, and theirs
(docs/results/manager-cost.md; of exact lists the processes have the parts that the loop has not; of two servers the figures
with processes are of an earlier client)."""
WINDOW = 32
"""Positions of a request for exact candidates (distill/candidates.py)."""
ID_BYTES = 7
"""Of an id as text in a request, with its comma: vocabularies of six digits."""
TEACHER_TOKENS_PER_S = 32768 / (7.54 - 4.37)
"""Response tokens that a 3B teacher scores a second on a card that it shares with idle engines: 64 responses of 512 tokens at
once took the rollout from 4.37 to 7.54 s (docs/results/slime-scale.md, prefills of 2,048 tokens, one H200)."""


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
class TeacherDemand:
    """Of teachers, per second over the whole job: HTTP requests to them and to the senior, bytes of ids in these requests, and
    how many GPUs of teachers (None: what candidates cost a teacher was not measured)."""

    requests_per_s: float
    senior_requests_per_s: float
    id_bytes_per_s: float
    gpus: int | None


def teacher(signal: str, gpus: int, response: int) -> TeacherDemand:
    """`signal`: sampled, lists (each side's log-probs of its own likely tokens and, by `opd.selection.depth`, of the other's),
    or exact (in windows that each send the prefix). `gpus` fused ones write responses of `response` tokens.

    >>> d = teacher("exact", 8, 1024)
    >>> round(d.requests_per_s), round(d.senior_requests_per_s), round(d.id_bytes_per_s / 1e6, 1)
    (1492, 1492, 11.3)
    """
    tokens = gpus * FUSED_TOKENS_PER_S
    responses, windows = tokens / response, math.ceil(response / WINDOW)
    if signal == "sampled":
        return TeacherDemand(responses, 0.0, tokens * ID_BYTES, math.ceil(tokens / TEACHER_TOKENS_PER_S))
    if signal == "lists":
        return TeacherDemand(responses, responses, 2 * tokens * ID_BYTES, None)
    # Window i sends what stands before its end: WINDOW, 2 WINDOW, ... ids, on each side; before them the lists are asked for.
    ids = 2 * (response + WINDOW * windows * (windows + 1) / 2)
    both = responses * (windows + 1)
    return TeacherDemand(both, both, responses * ids * ID_BYTES, None)


def teacher_table(responses: tuple[int, ...] = (1024, 8192)) -> str:
    """Markdown, one line per signal, length and number of GPUs."""
    heads = (
        "signal",
        "response",
        "rollout GPUs",
        "teacher requests/s",
        "senior's",
        "ids sent, MB/s",
        "teacher GPUs (3B)",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for signal in ("sampled", "lists", "exact"):
        for response in responses:
            for gpus in (8, 64, 256, 1000):
                d = teacher(signal, gpus, response)
                cells = [
                    signal,
                    f"{response:,}",
                    f"{gpus:,}",
                    f"{d.requests_per_s:,.0f}",
                    f"{d.senior_requests_per_s:,.0f}",
                ]
                cells += [f"{d.id_bytes_per_s / 1e6:,.1f}", "not measured" if d.gpus is None else f"{d.gpus:,}"]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ManagerDemand:
    """Of `gpus` rollout GPUs: cores that a loop would be busy with `alone`, and how many rollout managers without client
    processes; with them the cores of the `loop`, how many `processes` and how many `managers` (None: not measured). Loops and
    processes are at half load. slime has one manager."""

    tokens_per_s: float
    alone: float
    managers_alone: int
    loop: float | None
    processes: int | None
    managers: int | None


def manager(what: str, gpus: int) -> ManagerDemand:
    """`what`: a key of MANAGER.

    >>> demand = manager("fused, sampled signal", 64)
    >>> round(demand.alone, 2), demand.managers_alone, round(demand.loop, 2), demand.processes, demand.managers
    (1.41, 3, 0.42, 3, 1)
    """
    tokens = gpus * FUSED_TOKENS_PER_S if what.startswith("fused") else gpus // 2 * PAIR_TOKENS_PER_S
    alone, beside = MANAGER[what]
    cores = alone * tokens / 1e6
    if beside is None:
        return ManagerDemand(tokens, cores, _half(cores), None, None, None)
    loop, theirs = (seconds * tokens / 1e6 for seconds in beside)
    return ManagerDemand(tokens, cores, _half(cores), loop, _half(theirs), _half(loop))


def _half(cores: float) -> int:
    return math.ceil(cores / HALF)


def manager_table() -> str:
    """Markdown, one line per kind of job and number of GPUs."""
    heads = ["job", "rollout GPUs", "tokens/s", "loop alone, cores", "managers", "loop beside processes, cores"]
    heads += ["client processes", "managers with them"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for what in MANAGER:
        for gpus in (8, 64, 256, 1000):
            d = manager(what, gpus)
            beside = ["not measured"] * 3
            if d.loop is not None:
                beside = [f"{d.loop:.2f}", str(d.processes), str(d.managers)]
            cells = [what, f"{gpus:,}", f"{d.tokens_per_s:,.0f}", f"{d.alone:.2f}", str(d.managers_alone), *beside]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), teacher_table(), manager_table(), sep="\n\n")

"""Memory of a run of slime_step.py: what each process took of each card, beside what the planner thinks of it.

Processes are known by their command lines (`process_name`), cards by nvidia-smi. The estimate is slime_launch/memory.py's, for
what `real_run.py` is told by its flags; this file has no formula of its own. It starts nothing but nvidia-smi.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from slime_tandem.config import ClusterConfig, ServedModel
from slime_tandem.slime_launch.memory import GIB, RESERVED, engine_memory, trainer_memory
from slime_tandem.slime_launch.served import served
from slime_tandem.slime_launch.sizes import architecture

MIB = 2**20


class Sampler:
    """Peak memory of each process on each card in MiB, and CPU seconds of the rollout manager's process, read every second.

    `peaks`: {(index of the card, whose process): the largest}; `totals`: {index: all that was used of it at once}; `sizes`:
    {index: memory of the card}.
    """

    def __init__(self) -> None:
        self.peaks: dict[tuple[int, str], int] = {}
        self.totals: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.manager_cpu = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def by_name(self) -> dict[str, int]:
        """The largest process of a name on any card."""
        out: dict[str, int] = {}
        for (_, name), mib in self.peaks.items():
            out[name] = max(out.get(name, 0), mib)
        return out

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            self._memory()
            self._cpu()

    def _memory(self) -> None:
        index: dict[str, int] = {}
        for fields in _smi("--query-gpu=uuid,index,memory.used,memory.total"):
            card = index[fields[0]] = int(fields[1])
            self.totals[card] = max(self.totals.get(card, 0), int(fields[2]))
            self.sizes[card] = int(fields[3])
        for uuid, pid, mib in _smi("--query-compute-apps=gpu_uuid,pid,used_memory"):
            if mib.isdigit() and uuid in index and (name := process_name(pid)):
                at = (index[uuid], name)
                self.peaks[at] = max(self.peaks.get(at, 0), int(mib))

    def _cpu(self) -> None:
        for pid in self.processes(b"ray::RolloutManager"):
            with contextlib.suppress(OSError):  # it has ended
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                self.manager_cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def processes(self, name: bytes) -> list[int]:
        """Ids of the processes that this program started, through others, whose command begins with `name`."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if path.read_bytes().startswith(name) and _is_ours(path.parent.name):
                    found.append(int(path.parent.name))
        return found


def _smi(query: str) -> list[list[str]]:
    """Fields of each line of an answer; none without nvidia-smi. Of our cards alone: another run may have the others."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    asked = ["nvidia-smi", "--format=csv,noheader,nounits", *(("-i", cards) if cards else ()), query]
    try:
        out = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in out.splitlines() if line.strip()]


def _is_ours(pid: str) -> bool:
    """Whether this program started it, through others."""
    while pid not in ("0", "1", str(os.getpid())):
        pid = _parent(pid)
    return pid == str(os.getpid())


def _parent(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


def process_name(pid: str) -> str | None:
    """Whose process it is, None of one that has ended.

    SGLang renames its own, so that the command of one of its parents says whose model it serves.
    """
    at, commands = pid, []
    while at not in ("0", "1") and len(commands) < 6:
        try:
            commands.append(Path(f"/proc/{at}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            at = _parent(at)
        except OSError:
            break
    for command in commands:
        for role in ("teacher", "junior"):
            if f"/{role} " in command and "real_run" not in command:
                return f"{role}'s server"
    for part, name in (
        ("MegatronTrain", "trainer"),
        ("sglang", "senior's server"),
        ("SGLangEngine", "senior's server"),
    ):
        if any(part in command for command in commands[:2]):
            return name
    return "other" if commands else None


def estimates(run: argparse.Namespace, card_gib: float) -> dict[str, int]:
    """Bytes of a card that each process is planned to take, by its name; `run`: flags of real_run.py.

    `trainer` has the planner's reserve (contexts, fragments); `trainer, allocated` has none: it is compared with what torch's
    allocator says.
    """
    cluster = ClusterConfig(
        gpus_per_node=max(1, min(16, run.gpus)), gpu_memory_gib=card_gib, tensor_parallel=run.tp, pipeline_parallel=run.pp,
        context_parallel=run.cp, max_tokens_per_gpu=run.tokens_per_gpu, recompute="--recompute-granularity" in run.extra,
        layer_spec="transformer_engine" if run.standard_spec else "own",
    )  # fmt: skip
    of = {role: run.models / role for role in ("senior", "junior", "teacher")}

    def engine(roles: tuple[str, ...], tp: int, fraction: float) -> int:
        models = [served(str(of[role]), ServedModel(), field=f"serving.{role}") for role in roles]
        return engine_memory(models, tp, cluster, fraction).process(run.pool_tokens)

    trainer = trainer_memory(architecture(str(of["senior"])), cluster, run.gpus)
    fused = run.fused and not run.plain
    out = {
        "trainer": trainer.total + RESERVED,
        "trainer, allocated": trainer.total,
        "senior's server": engine(("senior", "junior") if fused else ("senior",), run.engine_gpus, run.fraction),
    }
    if not (run.plain or run.fused or run.no_junior):
        out["junior's server"] = engine(("junior",), 1, run.side_fraction)
    if not (run.plain or run.no_teacher):
        out["teacher's server"] = engine(("teacher",), 1, run.side_fraction)
    return out


def compared(run: argparse.Namespace, sampler: Sampler, allocated: int) -> list[dict[str, Any]]:
    """One entry per card and process: MiB measured and planned. `allocated`: bytes of torch's allocator in the fullest trainer
    rank, of whatever card; 0 where none was logged."""
    card_gib = min(sampler.sizes.values(), default=143771) * MIB / GIB
    planned = estimates(run, card_gib)
    measured = [(card, name, mib) for (card, name), mib in sorted(sampler.peaks.items())]
    if allocated:
        measured.append((-1, "trainer, allocated", allocated // MIB))
    return [
        {
            "card": None if card < 0 else card,
            "process": name,
            "mib": mib,
            "planned_mib": planned[name] // MIB if name in planned else None,
        }
        for card, name, mib in measured
    ]


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line per run, card and process. Planned over measured: above 1, the plan is on the safe side."""
    lines = ["| run | card | process | measured GiB | planned GiB | planned / measured |", "|---|---|---|---|---|---|"]
    for row in rows:
        for entry in row.get("memory", ()):
            mib, planned = entry["mib"], entry["planned_mib"]
            said = ("", "") if planned is None else (f"{planned / 1024:.1f}", f"{planned / mib:.2f}" if mib else "")
            card = "fullest rank" if entry["card"] is None else entry["card"]
            lines.append(f"| {row['run']} | {card} | {entry['process']} | {mib / 1024:.1f} | {said[0]} | {said[1]} |")
        for card, mib in sorted(row.get("card_mib", {}).items()):
            lines.append(f"| {row['run']} | {card} | all | {mib / 1024:.1f} | | |")
    return "\n".join(lines)

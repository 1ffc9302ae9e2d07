"""slime's Sample, as far as our hooks know it, and a scripted engine; pytest in slime's own Python."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.protocol import GenerateRequest, GenerateResult
from slime_tandem.slime_hooks.state import STATE

from ..slime_sources import SlimeHere
from ..waiting import PATIENCE_S


@dataclass
class Sample:
    """The fields of slime's class (utils/types.py) that hooks read or write."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    index: int = 0
    group_index: int | None = 0
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    teacher_log_probs: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Scripted:
    """An engine that writes `token` until the budget is used up, ends with `eos` if the budget allows, and counts its requests.

    `abort_after`: the answer to this request and later ones is an abort."""

    token: int
    eos: int
    log_prob: float = -0.5
    stop_after: int = 3
    abort_after: int | None = None
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        out = []
        for r in requests:
            self.requests.append(r)
            if self.abort_after is not None and len(self.requests) > self.abort_after:
                out.append(GenerateResult(r.rid, (), (), "abort", "7"))
                continue
            n = min(self.stop_after, r.max_new_tokens)
            ids = (self.token,) * (n - 1) + ((self.eos,) if n == self.stop_after else (self.token,))
            out.append(
                GenerateResult(r.rid, ids, (self.log_prob,) * n, "stop" if ids[-1] == self.eos else "length", "7")
            )
        return out


@pytest.fixture(scope="session")
def sample_class() -> type[Sample]:
    return Sample


@pytest.fixture(scope="session")
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What a test installed is not the next one's."""
    yield
    STATE.reset()


@pytest.fixture(scope="session")
def run_there(slime_here: SlimeHere) -> Callable[..., str]:
    """Run pytest in slime's Python; its output, or a failure with it."""

    def run(*arguments: str, cwd: Path, **variables: str) -> str:
        command = [slime_here.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**slime_here.environment(), **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    return run

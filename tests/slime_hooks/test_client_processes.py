"""Processes that write and score beside the rollout manager: what the manager's own loop would have written, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError, DataError, EngineUnavailableError
from slime_tandem.slime_hooks import runtime, settings, wire
from slime_tandem.slime_hooks.client_process import _that_travels
from slime_tandem.slime_hooks.client_processes import ClientProcesses
from slime_tandem.slime_hooks.runtime import Stop, client_processes

from ..in_process import ThreadServer

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def configured(trio: Any, side_url: Callable[[str], str]) -> Any:
    """A configuration with servers of senior, junior and teacher; exact lists of both sides."""
    with ThreadServer(trio.senior) as senior:
        yield RunConfig.load(
            overrides=[
                f"models.senior={trio.senior}", f"models.junior={trio.junior}", f"models.teacher={trio.teacher}",
                f"engine.senior_url={senior.url}", f"engine.junior_url={side_url('junior')}",
                f"engine.teacher_url={side_url('teacher')}", "engine.max_retries=0", "opd.selection.selector=tip",
                "opd.selection.ratio=0.5", "opd.selection.top_k=4", "engine.client_processes=2",
            ]
        )  # fmt: skip


def args_of(aborted: Callable[[], bool] = lambda: False) -> SimpleNamespace:
    return SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=1, aborted=aborted)


def samples(sample_class: Any, n: int = 6) -> list[Any]:
    return [
        sample_class(
            index=i, group_index=i // 2, label="2", metadata={"messages": [{"role": "user", "content": f"say {i} words"}]}
        )
        for i in range(n)
    ]  # fmt: skip


async def fill(made: Any, some: list[Any]) -> None:
    async def one(sample: Any) -> None:
        await made.write(sample, PARAMS, tandem=True)
        await made.score(sample)

    await asyncio.gather(*map(one, some))


def with_processes(config: RunConfig, work: Callable[[ClientProcesses], Awaitable[Any]], **changes: Any) -> Any:
    async def run() -> Any:
        settings.use(settings.ANY, config)
        made = await runtime.connect(args_of())
        assert isinstance(made, ClientProcesses)
        made._aborted = changes.get("aborted", lambda: False)
        try:
            return await work(made)
        finally:
            await made.close()

    return asyncio.run(run())


def same(a: Any, b: Any) -> None:
    """Two samples are equal; log-probs to rounding, as which responses an engine computes together depends on the clock."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list) and any(isinstance(x, np.ndarray) for x in a):
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, np.ndarray) and a.dtype.kind != "f":
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, np.ndarray) or (isinstance(a, list) and any(isinstance(x, float) for x in a)):
        np.testing.assert_allclose(a, b, atol=1e-4)
    else:
        assert a == b


@pytest.fixture(scope="module")
def here(configured: RunConfig, sample_class: Any) -> list[Any]:
    """What the loop itself writes."""

    async def run() -> list[Any]:
        settings.use(settings.ANY, configured)
        made = await runtime.connect_here(args_of(), lambda: False)
        some = samples(sample_class)
        await fill(made, some)
        assert made.panel is not None
        for engine in (*made.engines.values(), *(t.engine.engine for t in made.panel.teachers)):  # type: ignore[attr-defined]
            await engine.__aexit__()
        return some

    return asyncio.run(run())


def test_processes_write_and_score_what_the_loop_does_also_when_one_is_killed(
    configured: RunConfig, here: list[Any], sample_class: Any
) -> None:
    async def work(made: ClientProcesses) -> list[Any]:
        some = samples(sample_class)
        await fill(made, some)
        assert len(made.pids) == 2
        again = samples(sample_class)
        task = asyncio.create_task(fill(made, again))
        await asyncio.sleep(0.05)
        os.kill(made.pids[0], signal.SIGKILL)
        await task
        assert made.died > 0
        return [*some, *again]

    found = with_processes(configured, work)
    for sample, other in zip([*here, *here], found, strict=True):
        for name in vars(sample):
            same(getattr(sample, name), getattr(other, name))
        assert sample.metadata[wire.SCORES]["scores"]["lists"][0].shape[1] == 4


def test_an_abort_reaches_the_processes_and_what_was_aborted_is_resumed(
    configured: RunConfig, here: list[Any], sample_class: Any
) -> None:
    wants = [True]

    async def work(made: ClientProcesses) -> list[Any]:
        some = samples(sample_class, 2)
        await asyncio.gather(*(made.write(s, PARAMS, tandem=True) for s in some))
        assert {s.status.value for s in some} == {"aborted"}
        wants[0] = False
        await fill(made, some)
        return some

    found = with_processes(configured, work, aborted=lambda: wants[0])
    for sample, other in zip(here, found, strict=False):
        assert sample.tokens == other.tokens
        same(sample.metadata[wire.SCORES], other.metadata[wire.SCORES])


def test_what_a_process_raises_is_raised_here(configured: RunConfig, sample_class: Any) -> None:
    async def score_without_messages(made: ClientProcesses) -> None:
        await made.score(sample_class(index=1, tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0]))

    with pytest.raises(DataError, match="messages of sample 1"):
        with_processes(configured, score_without_messages)
    nowhere = configured.model_copy(
        update={"engine": configured.engine.model_copy(update={"junior_url": None, "max_retries": 0})}
    )

    async def write(made: ClientProcesses) -> None:
        await made.write(samples(sample_class)[0], PARAMS, tandem=True)

    with pytest.raises(ConfigError, match="server of the junior"):
        with_processes(nowhere, write)


class Slow:
    """An engine whose answer waits for its abort."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    async def generate(self, requests: Any) -> Any:
        while not self.stopped:
            await asyncio.sleep(0.001)
        return [SimpleNamespace(finish_reason="abort") for _ in requests]

    async def abort(self, rid: str) -> None:
        self.stopped.append(rid)


def test_a_request_that_was_sent_as_the_word_came_is_aborted_by_name() -> None:
    async def run() -> list[str]:
        stop, engine = Stop(), Slow()
        asked = runtime.Interruptible(runtime.Sharing(engine), stop)  # type: ignore[arg-type]
        from slime_tandem.protocol import GenerateRequest

        task = asyncio.create_task(asked.generate([GenerateRequest("r1", (1,), 5)]))
        await asyncio.sleep(0.01)
        await stop.set(True)
        (result,) = await task
        assert result.finish_reason == "abort"
        (refused,) = await asked.generate([GenerateRequest("r2", (1,), 5)])
        assert (refused.rid, refused.finish_reason) == ("r2", "abort")
        return engine.stopped

    assert asyncio.run(run()) == ["r1"]


def test_how_many_processes_follow_from_the_gpus_and_what_is_asked() -> None:
    lists = ["opd.selection.selector=tip", "opd.selection.ratio=0.5"]
    fused = RunConfig.load(overrides=["engine.mode=fused", "opd.enabled=false"])
    assert [client_processes(fused, n) for n in (None, 1, 8, 64)] == [0, 0, 0, 3]
    with_lists = RunConfig.load(overrides=["engine.mode=fused", *lists])
    assert [client_processes(with_lists, n) for n in (1, 2, 8)] == [0, 2, 7]
    # A pair of GPUs writes 2,377 tokens/s: at 63 s a million, 0.075 cores a GPU, gathered 0.032.
    pairs = RunConfig.load(overrides=["opd.enabled=false"])
    assert [client_processes(pairs, n) for n in (2, 6, 8, 64)] == [0, 0, 2, 10]
    gathered = RunConfig.load(overrides=["opd.enabled=false", "engine.gather_requests=true"])
    assert [client_processes(gathered, n) for n in (8, 15, 16, 64)] == [0, 0, 2, 5]
    assert client_processes(RunConfig.load(overrides=["engine.client_processes=3"]), None) == 3


def test_a_process_that_never_comes_up_is_an_error(
    configured: RunConfig, sample_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")

    async def write(made: ClientProcesses) -> None:
        await made.write(samples(sample_class)[0], PARAMS, tandem=True)

    with pytest.raises(EngineUnavailableError, match="ended 3 times"):
        with_processes(configured, write)


class _NeedsTwo(Exception):
    """An error as a library may have it: what it is made of is not what it keeps."""

    def __init__(self, what: str, where: int) -> None:
        super().__init__(f"{what} at {where}")


def test_an_error_that_cannot_be_made_again_comes_as_its_words() -> None:
    kept = DataError("field", 1, "expected", "remedy")
    assert str(_that_travels(kept)) == str(kept)
    assert type(_that_travels(kept)) is DataError
    assert str(_that_travels(_NeedsTwo("broken", 7))) == "_NeedsTwo: broken at 7"
    assert str(_that_travels(ValueError(lambda: None))).startswith("ValueError: <function")

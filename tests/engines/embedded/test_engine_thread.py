"""The engine's thread and the handlers above it, in-process: order of updates, aborts behind them, faults, death."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from slime_tandem.engines.embedded.doorway import Doorway
from slime_tandem.engines.embedded.engine_thread import EngineThread
from slime_tandem.engines.embedded.runner import Job, Runner
from slime_tandem.engines.embedded.server import Server, served_model
from slime_tandem.errors import EngineUnavailableError, ModelError
from slime_tandem.models.hf import load_model, load_tokenizer

from ...waiting import PATIENCE_S

JobFactory = Callable[..., Job]
RunnerFactory = Callable[..., Runner]


def test_an_update_waits_for_what_came_before_and_holds_up_what_comes_after(
    make_runner: RunnerFactory, make_job: JobFactory, folders: dict[str, Path]
) -> None:
    let_go = threading.Event()

    def slow_load(folder: str) -> Any:
        assert let_go.wait(60)
        return load_model(folder)

    async def main() -> None:
        engine = EngineThread(make_runner(), slow_load, lambda: None)
        try:
            before = asyncio.create_task(engine.generate([make_job([5, 6], 30, rid="before")]))
            await asyncio.sleep(0)
            update = asyncio.create_task(engine.update(str(folders["other"]), "v1"))
            await asyncio.sleep(0)
            after = asyncio.create_task(engine.generate([make_job([5, 6], 3, rid=rid) for rid in ("kept", "dropped")]))
            await asyncio.sleep(0)
            engine.abort(lambda job: job.rid == "dropped", "not wanted")
            [out] = await before
            assert (out.weight_version, len(out.output_ids)) == ("v0", 30)
            assert not update.done()
            assert not after.done()
            let_go.set()
            await update
            kept, dropped = await after
            assert (kept.weight_version, kept.finish) == ("v1", "length")
            assert (dropped.message, dropped.output_ids) == ("not wanted", [])
            with pytest.raises(ModelError, match="nowhere"):
                await engine.update("/nowhere", "v2")
            [out] = await engine.generate([make_job([5, 6], 3)])
            assert out.output_ids == kept.output_ids
        finally:
            await engine.stop(10.0)
        for call in (engine.generate([make_job([5], 1)]), engine.update("x", None)):
            with pytest.raises(EngineUnavailableError, match="stopping"):
                await call

    asyncio.run(main())


def over_http(
    runner: Runner, folder: Path, use: Callable[[TestClient[Any, Any], EngineThread, asyncio.Event], Any]
) -> None:
    async def main() -> None:
        died = asyncio.Event()
        engine = EngineThread(runner, load_model, died.set)
        try:
            facts = served_model(load_model(folder), load_tokenizer(folder), 256, runner.kv.vocab_size)
            app = Server(engine, facts, {"model_path": "here"}, Doorway("127.0.0.1")).application()
            async with TestClient(TestServer(app)) as client:
                await use(client, engine, died)
        finally:
            await engine.stop(10.0)

    asyncio.run(main())


def test_a_fault_in_a_step_answers_500_and_the_engine_goes_on(
    make_runner: RunnerFactory, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner()
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}

    def broken(*_: Any) -> Any:
        raise ArithmeticError("the model broke")

    async def use(client: TestClient[Any, Any], _: EngineThread, __: asyncio.Event) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(runner.kv, "forward", broken)
            response = await client.post("/generate", json=body)
            assert response.status == 500
            assert "the model broke" in (await response.json())["error"]["message"]
            assert (await client.get("/health_generate")).status == 503
        assert (await client.post("/generate", json=body)).status == 200
        assert (await client.get("/health_generate")).status == 200

    over_http(runner, folders["llama"], use)


@pytest.mark.filterwarnings(
    # The test breaks the thread on purpose; the traceback that pytest reports is the one meant for the server's log.
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
def test_a_broken_engine_thread_is_reported_to_everyone(
    make_runner: RunnerFactory, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner()

    def broken() -> Any:
        raise LookupError("a bug of ours")

    monkeypatch.setattr(runner, "step", broken)

    async def use(client: TestClient[Any, Any], engine: EngineThread, died: asyncio.Event) -> None:
        response = await client.post("/generate", json={"input_ids": [5]})
        assert response.status == 500
        assert "a bug of ours" in (await response.json())["error"]["message"]
        await asyncio.wait_for(died.wait(), PATIENCE_S)
        assert (await client.get("/health")).status == 503
        assert (await client.post("/generate", json={"input_ids": [5]})).status == 503

    over_http(runner, folders["llama"], use)

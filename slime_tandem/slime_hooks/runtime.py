"""What the rollout manager keeps between hooks: tokenizers, the handoff rule, connections to senior, junior and teachers.

One per event loop, made when the first sample comes. Servers are slime's (`--sglang-config`, found by the name of their model:
the senior is slime's own, then `junior`, `teacher` or a teacher's name), or any that the settings give a URL of.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from slime_tandem.config import RunConfig, SamplingConfig
from slime_tandem.distill.panel import TeacherPanel
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.gathering import GatheringClient
from slime_tandem.errors import ConfigError, DataError, EngineError, EngineUnavailableError
from slime_tandem.models.chat import Chat
from slime_tandem.protocol import Engine, GenerateRequest, GenerateResult
from slime_tandem.rollout import rollout_ids
from slime_tandem.rollout.drive import write_one
from slime_tandem.rollout.writer import TandemWriter
from slime_tandem.slime_hooks import loop_cost, wire
from slime_tandem.slime_hooks.client_processes import ClientProcesses, Setup
from slime_tandem.slime_hooks.heartbeat import Heartbeat
from slime_tandem.slime_hooks.pool import WorkerPool
from slime_tandem.slime_hooks.refused import scores_by_id
from slime_tandem.slime_hooks.settings import settings
from slime_tandem.slime_hooks.state import STATE
from slime_tandem.team.roster import Roster
from slime_tandem.types import JUNIOR, SENIOR, Prompt, SampleKey, TandemSample

_EXTRA = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "sampling_seed"}
"""Sampling parameters of slime's that our requests set themselves."""


@dataclass(frozen=True)
class Interruptible:
    """An engine that answers `abort` as soon as slime aborts a rollout: slime stops its own engines only, not a junior's."""

    engine: Engine
    aborted: Callable[[], bool]

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """As the engine's."""
        if self.aborted():
            return [GenerateResult(r.rid, (), (), "abort", "") for r in requests]
        if not isinstance(self.aborted, Stop):
            return await self.engine.generate(requests)
        async with self.aborted.watching(self.engine, requests):
            results = await self.engine.generate(requests)
        if any(r.finish_reason == "abort" for r in results):
            await self.aborted.wait()
        return results


class Stop:
    """Whether the rollout is to end, in a process that is told so a little later than slime's engines are.

    A request sent meanwhile would go on to its end: it is aborted by name. An engine's abort that comes before the word does is
    taken for slime's if the word follows at once.
    """

    _PATIENCE_S = 0.2

    def __init__(self) -> None:
        self._set = asyncio.Event()
        self._watched: dict[str, Engine] = {}

    def __call__(self) -> bool:
        """Whether it is to end."""
        return self._set.is_set()

    async def set(self, now: bool) -> None:
        """What slime wants."""
        if not now:
            self._set.clear()
        elif not self._set.is_set():
            self._set.set()
            abort = [engine.abort(rid) for rid, engine in self._watched.items() if isinstance(engine, _Abortable)]
            await asyncio.gather(*abort, return_exceptions=True)

    async def wait(self) -> None:
        """Until it is to end, or for as long as the word may take."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._set.wait(), self._PATIENCE_S)

    @contextlib.asynccontextmanager
    async def watching(self, engine: Engine, requests: Sequence[GenerateRequest]) -> AsyncIterator[None]:
        """Abort these requests, under way within the block, when the word comes."""
        inner = engine.engine if isinstance(engine, Sharing) else engine
        self._watched.update({r.rid: inner for r in requests})
        try:
            yield
        finally:
            for r in requests:
                self._watched.pop(r.rid, None)


@runtime_checkable
class _Abortable(Protocol):
    async def abort(self, rid: str) -> None: ...


@dataclass(frozen=True)
class Sharing:
    """An engine whose every request names a list of ids to score, if only an empty one.

    SGLang 0.5.15 ends itself over a prefill batch in which some requests name such a list and others do not
    (layers/utils/logprob.py:117). Samples are written and scored side by side here, so all name one.
    """

    engine: Engine

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """As the engine's."""
        return await self.engine.generate([replace(r, token_ids_logprob=r.token_ids_logprob or ()) for r in requests])


@dataclass(eq=False)
class Runtime:
    """Roster and connections of a process. `aborted`: whether slime wants the rollout to end now."""

    roster: Roster
    engines: Mapping[int, Engine]
    panel: TeacherPanel | None
    aborted: Callable[[], bool]

    async def write(
        self, sample: Any, sampling_params: Mapping[str, Any], *, tandem: bool, evaluation: bool = False
    ) -> None:
        """Write the response of a slime sample, or go on with an aborted one, into the sample.

        Raises DataError for a sample that holds a response by somebody else, EngineError where the response cannot be written
        and `sampling.on_failed_sample` is stop.
        """
        sampling = sampling_of(sampling_params, self.roster.config, evaluation=evaluation)
        rule = self.roster.tandem_rule if tandem else self.roster.solo_rule
        prompt = wire.prompt_of(sample)
        if self.roster.spellers is not None and tandem and not prompt.messages:
            raise DataError(
                f"messages of sample {sample.index}",
                None,
                "the raw chat, a junior with another tokenizer has a template of its own",
                "set --data-source-path slime_tandem.slime_hooks.data_source.MessagesDataSource",
            )
        along = None if evaluation or self.panel is None else self.roster.config.opd.read_along
        options = self.roster.writer_options(prompt, rule, sampling)
        if along is not None:
            options = replace(options, tokens_per_request=min(along, options.tokens_per_request or along))
        if sample.response_length:
            writer = TandemWriter.resume(wire.response_of(sample), options)
        else:
            # slime numbers evaluation samples from 0, as it does training samples.
            key = SampleKey(self.roster.config.seed, rollout_ids.EVALUATION if evaluation else 0, sample.index)
            group = -1 if sample.group_index is None else sample.group_index
            writer = TandemWriter(key, group, prompt, self.prompt_ids(sample, prompt), options)
        engines = {
            author: Interruptible(engine if evaluation else self._shared(engine), self.aborted)
            for author, engine in self.engines.items()
        }
        try:
            response = await write_one(
                writer,
                engines,
                environment=self.roster.environments,
                aborted=self.aborted,
                on_part=self._reader(along) if along else lambda _: None,
            )
        except EngineUnavailableError:
            raise
        except EngineError as error:
            if self.roster.config.sampling.on_failed_sample == "stop":
                raise
            wire.put_failure(sample, str(error), writer.prompt_ids, self.roster.student.end_of_turn)
            return
        wire.put_response(sample, response, junior_weight=self.roster.config.tandem.junior_token_loss_weight)
        student = self.roster.student
        wire.put_ends(sample, student.tokens.eos_ids, self._chat.markers_in(response))

    def _reader(self, every: int) -> Callable[[TandemWriter], None]:
        """Has the teachers read each `every` tokens of one response, in a task beside it; none while they read those before."""
        panel, read = self.panel, 0
        task: asyncio.Task[None] | None = None
        assert panel is not None, "opd.read_along"

        async def read_part(writer: TandemWriter, part: TandemSample) -> None:
            async with self._places:
                if not writer.done:  # else it is scored whole, or was meanwhile
                    await panel.read_along(part)

        def on_part(writer: TandemWriter) -> None:
            nonlocal read, task
            if (task is None or task.done()) and len(writer.response_ids) >= read + every and writer.prompt.messages:
                read = len(writer.response_ids)
                task = asyncio.get_running_loop().create_task(read_part(writer, writer.part()))

        return on_part

    def _shared(self, engine: Engine) -> Engine:
        # Not in evaluations: slime's own generate names no ids, and nothing is scored meanwhile.
        return Sharing(engine) if scores_by_id(self.roster.config) else engine

    def prompt_ids(self, sample: Any, prompt: Prompt) -> Sequence[int]:
        """The ids that slime itself would send: those that it has, else of the rendered text, else of the messages."""
        if sample.tokens:
            return list(sample.tokens)
        if isinstance(sample.prompt, str) and sample.prompt:
            text = sample.prompt
            if self._chat.text_markers != "allow" and self._chat.count_markers(prompt.messages):
                ids = self._chat.render_again(text, prompt.messages, prompt.tools)
                if ids is None:
                    raise DataError(
                        f"prompt of sample {sample.index}",
                        text[:200],
                        "its messages by the senior's template, as control tokens stand in them",
                        "let slime render the prompts, or set models.text_markers=allow",
                    )
                return ids
            return list(self.roster.student.hf.encode(text, add_special_tokens=False))
        return self._chat.render(prompt.messages, prompt.tools)

    @property
    def _chat(self) -> Chat:
        """The senior's template, with the variables that slime renders prompts with (`models.template_kwargs`)."""
        return self.roster.student.chat()

    @cached_property
    def _places(self) -> asyncio.Semaphore:
        """For samples or parts of them that are scored at once: slime scores each in a call of its own, and a `Teacher` counts
        within a call."""
        return asyncio.Semaphore(self.roster.config.opd.concurrency * self.roster.config.engine.max_batch)

    async def score(self, sample: Any) -> None:
        """Ask the teachers about a finished sample, and keep what they say in it."""
        assert self.panel is not None, "opd.enabled"
        response = wire.response_of(sample, self.roster.config.seed)
        if not response.prompt.messages:
            raise DataError(
                f"messages of sample {sample.index}",
                None,
                "the raw chat, a teacher renders it with its own template",
                "set --data-source-path slime_tandem.slime_hooks.data_source.MessagesDataSource",
            )
        async with self._places:
            (scores,) = await self.panel.score([response], self._shared(self.engines[SENIOR]))
        wire.put_scores(sample, scores)


def sampling_of(params: Mapping[str, Any], config: RunConfig, *, evaluation: bool = False) -> SamplingConfig:
    """Our form of slime's sampling parameters; raises ConfigError for one that our requests cannot carry.

    Training truncates by our `sampling.top_p`, slime's flag is 1 then; evaluations by what slime says of their set.
    """
    names = ("temperature", "top_p", "top_k", "max_new_tokens")
    known = {name: params[name] for name in names if name in params}
    if not evaluation:
        known["top_p"] = config.sampling.top_p
    stop = params.get("stop")
    for name in params.keys() - set(names) - _EXTRA - {"stop"}:
        if params[name]:
            expected = "not to be set with slime_tandem's generate"
            raise ConfigError(f"sampling parameter {name}", params[name], expected, "remove its flag")
    stops = () if not stop else (stop,) if isinstance(stop, str) else tuple(stop)
    return config.sampling.model_copy(update={**known, "stop": stops})


# ---- one per process and event loop ----


def use(runtime: Runtime | None) -> None:
    """Let the hooks of this process use this one (None: make one when it is needed)."""
    STATE.manager.installed = runtime


async def current(args: Any) -> Runtime | ClientProcesses:
    """The runtime of this event loop; made from slime's arguments when there is none."""
    manager, loop = STATE.manager, asyncio.get_running_loop()
    installed: Runtime | None = manager.installed
    if loop not in manager.heartbeats:
        manager.heartbeats[loop] = Heartbeat()
    if installed is not None:
        return installed
    if loop not in manager.running:
        manager.running[loop] = loop.create_task(connect(args))
    return await asyncio.shield(manager.running[loop])


def take_heartbeats() -> dict[str, float]:
    """What the event loops' heartbeats say since the last call: the worst of them, the sum of the processor times; {}
    where none runs (a program that gives its own samples)."""
    found = [beat.take() for beat in STATE.manager.heartbeats.values()]
    if not found:
        return {}
    worst = {name: max(one[name] for one in found) for name in ("rollout/loop_blocked_s", "rollout/loop_busy_s")}
    return {**worst, "rollout/loop_cpu_s": sum(one["rollout/loop_cpu_s"] for one in found)}


async def connect(args: Any) -> Runtime | ClientProcesses:
    """A runtime of this process, or of `engine.client_processes` others; raises as `connect_here`."""
    config = settings(args)
    count = client_processes(config, getattr(args, "rollout_num_gpus", None))
    if not count:
        return await connect_here(args, lambda: _aborted(args))
    routers = getattr(args, "sglang_model_routers", None) or {}
    senior = (args.sglang_router_ip, args.sglang_router_port)
    setup = Setup(config, {name: tuple(at) for name, at in routers.items()}, senior)
    settle_collector()
    places = config.opd.concurrency * config.engine.max_batch
    return ClientProcesses(setup, count, lambda: _aborted(args), places)


def client_processes(config: RunConfig, gpus: int | None) -> int:
    """How many processes write and score beside the rollout manager: what the settings say, else what the GPUs write.

    A loop is planned to be busy half of its time, by what was measured (loop_cost.py). A scorer or an environment of one's own
    stays in one process: nobody knows what it holds.
    """
    given = config.engine.client_processes
    if given is not None:
        return given
    if any(teacher.scorer is not None for teacher in config.opd.teachers) or any(t.environment for t in config.tasks):
        return 0
    return loop_cost.processes(config, gpus or 0)


def prepare(args: Any) -> None:
    """Begin to read tokenizers and tables in a thread, while slime still starts its engines, and collect the garbage then.

    With the first sample the event loop would stand still for it, for seconds. What goes wrong is raised by `connect_here`.
    """
    _roster(settings(args))


def _roster(config: RunConfig) -> Future[Roster]:
    kept = STATE.manager.roster
    if kept is None or kept[0] is not config:
        STATE.manager.roster = kept = (config, Future[Roster]())
        kept[1].set_running_or_notify_cancel()  # an event loop that ends while it waits does not cancel it
        threading.Thread(target=_make, args=(kept[1], config), name="slime_tandem roster", daemon=True).start()
    return kept[1]


def _make(found: Future[Roster], config: RunConfig) -> None:
    try:
        roster = Roster(config)
        gc.collect()  # a third of a second, which nobody waits for yet; then what is here is left alone (`settle_collector`)
        found.set_result(roster)
    except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
        found.set_exception(error)


async def connect_here(args: Any, aborted: Callable[[], bool]) -> Runtime:
    """Tokenizers and connections of this process, for slime's arguments. `aborted`: whether slime wants the rollout to end.

    Raises ConfigError for a role without a server, ModelError and TokenizerMismatchError for models that do not go together,
    EngineUnavailableError for a server that does not answer.
    """
    config = settings(args)
    routers = {
        name: f"http://{ip}:{port}" for name, (ip, port) in (getattr(args, "sglang_model_routers", None) or {}).items()
    }
    try:
        roster = await asyncio.wrap_future(_roster(config))
    finally:
        STATE.manager.roster = None  # another event loop's is another one; what failed is tried again
    stack = contextlib.AsyncExitStack()  # until the process ends

    async def client(role: str) -> WorkerPool | EngineClient:
        e = config.engine
        # Teachers are asked once a response: nothing to gather, and much to wait for.
        kind = GatheringClient if e.gather_requests and role in ("senior", "junior") else EngineClient

        def make(url: str) -> EngineClient:
            return kind(
                url, role=role, timeout_s=e.request_timeout_s, max_retries=e.max_retries, backoff_s=e.backoff_s,
                api_key=roster.api_key(), max_connections=0,
            )  # fmt: skip

        name = role.removeprefix("teacher ")
        given = roster.members[role].url
        if given is not None:
            return await stack.enter_async_context(make(given))
        if name == "senior":
            router: str | None = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        else:
            router = routers.get(name)
        if router is None:
            raise ConfigError(
                f"server of the {role}",
                sorted(routers),
                f"a model `{name}` in --sglang-config, or a URL in the settings",
                f"add the model (update_weights: false), or set engine.{name}_url or the teacher's url",
            )
        return await stack.enter_async_context(WorkerPool(router, make, role=role))

    senior = await client("senior")
    engines: dict[int, Engine] = {SENIOR: senior}
    if "junior" in roster.members and not roster.fused:  # a fused junior writes within the senior's requests
        engines[JUNIOR] = await client("junior")
    panel = None
    if roster.teacher_specs:
        teachers = []
        for role in roster.teacher_specs:
            if role in roster.own_teachers:
                teachers.append(roster.own_teachers[role])
                continue
            engine = await client(role)
            asked = Sharing(engine) if scores_by_id(config) else engine
            info = await engine.model_info()
            # In a thread: it reads both vocabularies through, once.
            teachers.append(await asyncio.to_thread(roster.teacher, role, asked, info))
        panel = TeacherPanel(teachers, roster.scoring)
    settle_collector()
    return Runtime(roster, engines, panel, aborted)


def settle_collector() -> None:
    """Let the cyclic collector leave alone what is here by now: libraries, tokenizers, tables.

    Answers with lists make it run often, and each full search of everything would stop the event loop
    (docs/results/manager-cost.md), this one too: nothing is searched here. For good: the process ends with the job. What of it
    is garbage in cycles, or becomes that, is kept; most was collected with the roster. New containers are searched by 50,000
    instead of 700: an answer brings 100,000 that live as long as it does.
    """
    gc.freeze()
    gc.set_threshold(50_000, 5, 10)


def _aborted(args: Any) -> bool:
    from slime.rollout import sglang_rollout  # looked up when it is asked: slime's tests put another one there

    return bool(sglang_rollout.GenerateState(args).aborted)

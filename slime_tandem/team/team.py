"""The models of a run at work: their servers, clients and tokenizers; started, restarted after a crash, and stopped.

A role whose `engine.<role>_url` is set uses that running server (SGLang or `slime-tandem serve`); the others get an
embedded server of their own as a child process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from slime_tandem.config import RunConfig, SamplingConfig, Strategy, TeacherSpec
from slime_tandem.distill.alignment import Aligner
from slime_tandem.distill.panel import TeacherPanel
from slime_tandem.distill.teacher import Scoring, Teacher, check_teacher
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.fused.junior import FusedJunior
from slime_tandem.engines.fused.launch import FusedServer
from slime_tandem.engines.processes import ServerProcess
from slime_tandem.engines.sessions import SessionEngine
from slime_tandem.errors import ConfigError, ModelError, TeacherScoreError
from slime_tandem.models.builtin import resolve_model
from slime_tandem.models.hf import check_model_folder, check_served_model, read_model_config
from slime_tandem.models.tokenizer import ModelTokenizer, require_rows, require_same_tokenizer
from slime_tandem.protocol import Engine
from slime_tandem.rollout.boundaries import BoundaryRecord, boundary_ids
from slime_tandem.rollout.drive import write_lockstep
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.junior_text import JuniorText
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.team.environments import Environments
from slime_tandem.types import JUNIOR, SENIOR, AlignedScores, FailedSample, Message, Prompt, SampleKey, TandemSample

Role = str
"""senior, junior, teacher; each of several teachers is `teacher <name>`."""
_SGLANG_START_S = 300.0
"""SGLang imports and compiles for longer than an embedded server takes to start."""
_DYING_S = 5.0
_AUTO_TOKENS, _AUTO_RESPONSES = 6, 128  # docs/results/tandem-rollout.md


def _teacher_specs(config: RunConfig) -> dict[Role, TeacherSpec]:
    """Teachers by role; ConfigError for a task that none of them is for (the tasks of a prompt file are told later)."""
    opd = config.opd
    if not opd.enabled:
        return {}
    if opd.teachers:
        if all(spec.tasks is not None for spec in opd.teachers):
            named = {task for spec in opd.teachers for task in spec.tasks or ()}
            for task in config.tasks:
                if task.family != "jsonl" and task.family not in named:
                    raise ConfigError(
                        "opd.teachers",
                        [spec.name for spec in opd.teachers],
                        f"one for task {task.family!r}",
                        "name the task in a teacher's `tasks`, or leave the `tasks` of one teacher out",
                    )
        families = {task.family for task in config.tasks}
        for spec in opd.teachers:
            strangers = sorted(set(spec.tasks or ()) - families)
            if strangers and "jsonl" not in families:  # the tags of a prompt file are its own
                raise ConfigError(
                    f"opd.teachers, {spec.name}: tasks",
                    strangers,
                    f"families of this run's tasks ({', '.join(sorted(families))})",
                    "correct the name, or leave it out",
                )
        for family in sorted(families - {"jsonl"}):
            mine = [s.name for s in opd.teachers if s.tasks and family in s.tasks]
            mine = mine or [s.name for s in opd.teachers if s.tasks is None]
            for setting, value, usual in (
                ("opd.signal", opd.signal, "sampled"),
                ("opd.selection.selector", opd.selection.selector, "pure_opd"),
            ):
                if len(mine) > 1 and value not in (usual, "full"):
                    raise ConfigError(
                        setting,
                        value,
                        f"{usual} where several teachers score one task ({family}: {', '.join(mine)})",
                        f"name each task in the `tasks` of one teacher only, or set {setting}={usual}",
                    )
        return {f"teacher {spec.name}": spec for spec in opd.teachers}
    alone = TeacherSpec(
        name="teacher",
        model=config.models.teacher,
        url=config.engine.teacher_url,
        thinking=opd.thinking,
        template_kwargs=opd.template_kwargs,
    )
    return {"teacher": alone}


@contextlib.contextmanager
def _of_role(role: Role) -> Iterator[None]:
    """Say in a ModelError whose model it is: two roles may have folders of the same name, or the same folder."""
    try:
        yield
    except ModelError as error:
        raise error.within(f"{'models.' if ' ' not in role else 'opd.teachers, '}{role}") from error


def most_tokens(setting: int | Literal["auto"] | None, responses: int) -> int | None:
    """Most tokens of a co-writing request (`engine.tokens_per_request`) with so many responses at once; None: no limit.

    >>> most_tokens("auto", 64), most_tokens("auto", 256), most_tokens(4, 256), most_tokens(None, 8)
    (6, None, 4, None)
    """
    if setting == "auto":
        return _AUTO_TOKENS if responses <= _AUTO_RESPONSES else None
    return setting


class Team:
    """Servers, clients and tokenizers of one run; a context manager that leaves no process behind.

    Raises ModelError, TokenizerMismatchError and ConfigError before any server is started, EngineError kinds after.
    """

    def __init__(self, config: RunConfig, log_dir: Path) -> None:
        self.config, self.log_dir = config, log_dir
        self.roles: list[Role] = ["senior"]
        tandem = config.tandem.model_copy(update={"enabled": config.tandem.enabled or config.eval.tandem})
        self.roles += ["junior"] if tandem.enabled else []
        self.teacher_specs: dict[Role, TeacherSpec] = _teacher_specs(config)
        self.roles += self.teacher_specs
        models: dict[Role, str] = {"senior": config.models.senior, "junior": config.models.junior}
        models |= {role: spec.model for role, spec in self.teacher_specs.items()}
        self.given_urls: dict[Role, str | None] = {
            "senior": config.engine.senior_url,
            "junior": config.engine.junior_url,
        }
        self.given_urls |= {role: spec.url for role, spec in self.teacher_specs.items()}
        cache = Path(config.models.cache_dir)
        self.folders: dict[Role, Path] = {}
        self.tokenizers: dict[Role, ModelTokenizer] = {}
        trust = config.models.trust_remote_code
        for role in self.roles:
            with _of_role(role):
                folder = self.folders[role] = resolve_model(models[role], cache)
                if self.given_urls[role] is None or role == "senior":
                    check_model_folder(folder)
                self.tokenizers[role] = ModelTokenizer.load(folder, trust_remote_code=trust)
                same = role == "senior" or (role == "junior" and tandem.junior_tokenizer == "same")
                require_rows(self.tokenizers[role], special=same)
        self.student = self.tokenizers["senior"]
        self.environments = Environments(config.tasks, self.student, timeout_s=config.engine.environment_timeout_s)
        if self.teacher_specs:
            most = min(len(self.tokenizers[role].tokens.table) for role in ("senior", *self.teacher_specs))
            for setting, k in (("top_k", config.opd.top_k), ("selection.top_k", config.opd.selection.top_k)):
                if k > most:  # the defaults are within any vocabulary
                    raise ConfigError(
                        f"opd.{setting}", k, f"at most {most}, all tokens of the smallest vocabulary", "lower it"
                    )
        self.spellers = None
        if tandem.enabled and tandem.junior_tokenizer == "same":
            require_same_tokenizer(self.student, self.tokenizers["junior"])
        elif tandem.enabled:
            self.spellers = (self.tokenizers["junior"].speller(), self.student.speller())
        self.boundaries = BoundaryRecord.resolve(tandem, self.student.tokens)
        boundary = self.boundaries.ids
        self.tandem_rule = HandoffRule.from_config(tandem, boundary)
        self.solo_rule = HandoffRule.from_config(tandem.model_copy(update={"enabled": False}), boundary)
        self.fused = config.engine.mode == "fused"
        self.servers: dict[Role, ServerProcess | FusedServer] = {}
        self.clients: dict[Role, EngineClient] = {}
        self.runner = asyncio.Runner()
        self._connections = contextlib.AsyncExitStack()
        self._panel: TeacherPanel | None = None
        self.senior_version: str | None = None
        self._senior_weights: Path | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        gc.freeze()  # until `close`: libraries and tokenizers stay; long lists must not have them searched again and again
        e = self.config.engine
        key = self.api_key()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        urls: dict[Role, str] = {}
        for role in self.roles:
            if self.fused and role == "junior":
                continue  # inside the senior's server
            url = self.given_urls[role]
            if url is None and self.fused and role == "senior":
                self.servers[role] = FusedServer(
                    self.folders["senior"],
                    self.folders["junior"],
                    log_file=self.log_dir / "fused.log",
                    tables=self.fused_tables(),
                    python=e.sglang_python,
                    host=e.host,
                    dtype=self.config.models.dtype,
                    api_key=key,
                    trust_remote_code=self.config.models.trust_remote_code,
                    start_timeout_s=max(e.start_timeout_s, _SGLANG_START_S),
                    args=e.sglang_args,
                )
                self.servers[role].launch()
            elif url is None:
                self.servers[role] = ServerProcess(
                    str(self.folders[role]),
                    log_file=self.log_dir / f"{role.replace(' ', '-')}.log",
                    host=e.host,
                    dtype=self.config.models.dtype,
                    max_batch=e.max_batch,
                    cache_tokens=e.cache_tokens,
                    threads=e.threads,
                    api_key=key,
                    trust_remote_code=self.config.models.trust_remote_code,
                    start_timeout_s=e.start_timeout_s,
                )
                self.servers[role].launch()
            else:
                urls[role] = url
        for role, server in self.servers.items():
            server.wait_ready()
            urls[role] = server.url
        if self.fused:
            urls["junior"] = urls["senior"]
        for role in self.roles:
            client = self.runner.run(self._connections.enter_async_context(self._client(role, urls[role])))
            self.clients[role] = client
            self.runner.run(client.wait_ready(e.start_timeout_s))
        if self.teacher_specs:
            clients = {role: self.clients[role] for role in self.teacher_specs}
            teachers = [self.teacher(role, c, self.runner.run(c.model_info())) for role, c in clients.items()]
            self._panel = TeacherPanel(teachers, self.scoring)

    @property
    def scoring(self) -> Scoring:
        """What the run asks of its teachers."""
        opd, chosen = self.config.opd, self.config.opd.selection
        return Scoring(
            opd.alignment,
            0 if opd.signal == "sampled" else opd.top_k,
            opd.support,
            0 if chosen.mask == "full" else chosen.top_k,
            chosen.missing_mass == "exact",
        )

    def _max_tokens(self, role: Role, info: Mapping[str, Any]) -> int | None:
        """Input tokens that a role's server takes: what it tells, else what the model's config says, else None."""
        told = info.get("max_total_tokens")
        if isinstance(told, int):
            return told
        # SGLang's /model_info does not tell it; it takes inputs that are shorter than the context (tokenizer_manager.py,
        # _validate_one_request).
        context = read_model_config(self.folders[role]).get("max_position_embeddings")
        return context - 1 if isinstance(context, int) else None

    def fused_tables(self) -> list[frozenset[int]]:
        """The run's own boundary ids, and those of the strategies: evaluation hands over by another one than training."""
        tokens, classes = self.student.tokens, self.config.tandem.boundary_classes
        named: tuple[Strategy, ...] = ("word", "sentence")
        sets = {boundary_ids(s, tokens.table, tokens.special, classes=classes) for s in named}
        return [ids for ids in {self.tandem_rule.boundary, *sets} if ids]

    def _client(self, role: Role, url: str) -> EngineClient:
        e = self.config.engine
        kind = FusedJunior if self.fused and role == "junior" else EngineClient
        return kind(
            url,
            role=role,
            api_key=self.api_key(),
            timeout_s=e.request_timeout_s,
            max_retries=e.max_retries,
            backoff_s=e.backoff_s,
        )

    def api_key(self) -> str | None:
        """The servers' key, None: they take none; raises ConfigError for a variable that is not set or holds no key."""
        name = self.config.engine.api_key_env
        if name is None:
            return None
        value = os.environ.get(name)
        if not value:
            raise ConfigError("engine.api_key_env", name, "an environment variable that is set", f"export {name}")
        if not (value.isascii() and value.isprintable()) or " " in value:
            raise ConfigError(
                f"the variable {name} of engine.api_key_env",
                "(not shown)",
                "a key of printable ASCII without blanks",
                "export it without a line end",
            )
        return value

    @property
    def retries(self) -> int:
        """HTTP requests repeated so far."""
        return sum(client.retries for client in self.clients.values())

    def close(self) -> None:
        """Close the clients and stop the servers that this team started."""
        try:
            self.runner.run(self._connections.aclose())
        finally:
            self.clients.clear()
            self.runner.close()
            for server in self.servers.values():
                server.stop()
            self.servers.clear()
            gc.unfreeze()

    def send_weights(self, folder: Path, version: str) -> None:
        """Load a Hugging Face folder into the senior's server; WeightVersionError if it then serves another version."""
        self.runner.run(self.clients["senior"].update_weights_from_disk(str(folder.resolve()), version))
        self.senior_version, self._senior_weights = version, folder

    def revive(self) -> list[Role]:
        """Restart own servers that have died, give the senior its current weights; returns the roles restarted.

        To be called when a server did not answer. One that is dying closes its connections before it counts as dead, so a
        few seconds are given to it.
        """
        end = time.monotonic() + _DYING_S
        while True:
            dead = [role for role, server in self.servers.items() if not server.is_alive()]
            if dead or not self.servers or time.monotonic() > end:
                break
            time.sleep(0.05)
        for role in dead:
            self.servers[role].restart()
        if "senior" in dead and self._senior_weights is not None and self.senior_version is not None:
            self.send_weights(self._senior_weights, self.senior_version)
        return dead

    def write(
        self,
        prompts: Sequence[Prompt],
        rollout_id: int,
        per_prompt: int,
        *,
        tandem: bool,
        rule: HandoffRule | None = None,
        sampling: SamplingConfig | None = None,
    ) -> list[TandemSample | FailedSample]:
        """Write `per_prompt` responses for every prompt, in order; a pure function of the weights, prompts and rollout id.

        Every server forgets its cache first: a cached prefix would change the last bits of the log-probs, and a resumed run
        could not repeat an uninterrupted one. `rule` and `sampling` stand in for the run's own (evaluation has others).
        """
        rule = rule or (self.tandem_rule if tandem else self.solo_rule)
        return self.runner.run(
            self._write(self._writers(prompts, rollout_id, per_prompt, rule, sampling or self.config.sampling))
        )

    def write_and_score(
        self, prompts: Sequence[Prompt], rollout_id: int, per_prompt: int, *, tandem: bool, at_once: int
    ) -> list[tuple[TandemSample | FailedSample, AlignedScores | TeacherScoreError | None]]:
        """As `write`, with each sample's scores; teachers read `at_once` finished responses while others are written."""
        rule = self.tandem_rule if tandem else self.solo_rule
        writers = self._writers(prompts, rollout_id, per_prompt, rule, self.config.sampling)
        return self.runner.run(self._write_and_score(writers, at_once))

    def _writers(
        self, prompts: Sequence[Prompt], rollout_id: int, per_prompt: int, rule: HandoffRule, sampling: SamplingConfig
    ) -> list[TandemWriter]:
        most = None
        # Alone or fused, nobody waits for another author: one request writes it all.
        if not self.fused and rule is not self.solo_rule:
            most = most_tokens(self.config.engine.tokens_per_request, len(prompts) * per_prompt)
        return [
            self._writer(
                SampleKey(self.config.seed, rollout_id, group * per_prompt + i), group, prompt, rule, sampling, most
            )
            for group, prompt in enumerate(prompts)
            for i in range(per_prompt)
        ]

    def _writer(
        self,
        key: SampleKey,
        group: int,
        prompt: Prompt,
        rule: HandoffRule,
        sampling: SamplingConfig,
        tokens_per_request: int | None,
    ) -> TandemWriter:
        options = self.writer_options(prompt, rule, tokens_per_request)
        return TandemWriter(
            key, group, prompt, self.student.render(prompt.messages), rule, sampling, self.student.tokens, **options
        )

    def writer_options(self, prompt: Prompt, rule: HandoffRule, tokens_per_request: int | None) -> WriterOptions:
        """How a response to this prompt is written, beside the rule and the sampling."""
        t = self.config.tandem
        junior_text = None
        if self.spellers is not None and rule is not self.solo_rule:
            junior_text = JuniorText(*self.spellers, self.tokenizers["junior"].render(prompt.messages))
        return WriterOptions(
            custom_boundary=t.boundary_token_ids is not None and rule.boundary == frozenset(t.boundary_token_ids),
            boundary_classes=t.boundary_classes,
            score_junior=t.junior_token_loss_weight > 0 and rule is self.tandem_rule,
            junior_text=junior_text,
            refuse_fallback=t.on_unexpressible == "error",
            tokens_per_request=tokens_per_request,
            fused=self.fused and rule is not self.solo_rule,
        )

    async def _write(
        self, writers: Sequence[TandemWriter], on_finished: Callable[[int, TandemSample], None] | None = None
    ) -> list[TandemSample | FailedSample]:
        for client in self.clients.values():
            await client.flush_cache()
        clients = {SENIOR: self.clients["senior"]}
        if "junior" in self.clients:
            clients[JUNIOR] = self.clients["junior"]
        async with contextlib.AsyncExitStack() as stack:
            engines: dict[int, Engine] = dict(clients)
            if self.config.engine.sessions:
                for author, client in clients.items():
                    engines[author] = await stack.enter_async_context(SessionEngine(client))
            return await write_lockstep(
                writers,
                engines,
                senior_version=self.senior_version,
                environment=self.environments,
                on_finished=on_finished,
            )

    @property
    def panel(self) -> TeacherPanel:
        """The teachers; only where `opd.enabled`."""
        assert self._panel is not None, "no teacher in this run"
        return self._panel

    def score(self, samples: Sequence[TandemSample], *, plain: bool = False) -> list[AlignedScores | TeacherScoreError]:
        """The teachers' view of each sample, in order (`plain`: without candidates and lists).

        Raises EngineError kinds if a server fails as a whole.
        """
        return self.runner.run(self.panel.score(samples, self.clients["senior"], plain=plain))

    async def _write_and_score(
        self, writers: Sequence[TandemWriter], at_once: int
    ) -> list[tuple[TandemSample | FailedSample, AlignedScores | TeacherScoreError | None]]:
        """Write, and score whatever is finished as soon as it is `at_once` samples."""
        scores: dict[int, AlignedScores | TeacherScoreError] = {}
        waiting: list[tuple[int, TandemSample]] = []

        async def score(part: Sequence[tuple[int, TandemSample]]) -> None:
            results = await self.panel.score([s for _, s in part], self.clients["senior"])
            scores.update((i, r) for (i, _), r in zip(part, results, strict=True))

        try:
            async with asyncio.TaskGroup() as group:

                def finished(i: int, sample: TandemSample) -> None:
                    waiting.append((i, sample))
                    if len(waiting) >= at_once:
                        group.create_task(score(tuple(waiting)))
                        waiting.clear()

                written = await self._write(writers, finished)
                if waiting:
                    group.create_task(score(tuple(waiting)))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [(sample, scores.get(i)) for i, sample in enumerate(written)]

    def teacher(self, role: Role, engine: Engine, info: Mapping[str, Any]) -> Teacher:
        """The scorer of a role whose server, asked through `engine`, says `info` of itself.

        Raises ModelError for a server of another model, or a tokenizer that cannot be aligned.
        """
        spec, t, opd = self.teacher_specs[role], self.tokenizers[role], self.config.opd
        kwargs = spec.template_kwargs
        aligner = Aligner(self.student.tokens, t.tokens, end_of_turn=t.end_of_turn, thinking=spec.thinking)
        teacher = Teacher(
            engine,
            aligner,
            lambda messages: t.render(messages, kwargs),
            t.encode,
            lambda messages: t.bridge(messages, kwargs),
            name=spec.name,
            tasks=None if spec.tasks is None else frozenset(spec.tasks),
            weight=spec.weight,
            max_batch=self.config.engine.max_batch,
            concurrency=opd.concurrency,
            max_tokens=self._max_tokens(role, info),
        )
        with _of_role(role):
            if url := self.given_urls[role]:
                check_served_model(info, self.folders[role], url)
            teacher.render([Message("user", "probe")])  # template_kwargs that its template refuses are told now
            check_teacher(teacher)
        return teacher

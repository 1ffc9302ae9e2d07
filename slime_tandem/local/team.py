"""The models of a run at work: their servers, clients and tokenizers; started, restarted after a crash, and stopped.

A role whose `engine.<role>_url` is set uses that running server (SGLang or `slime-tandem serve`); the others get an
embedded server of their own as a child process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from slime_tandem.config import RunConfig, SamplingConfig, Strategy
from slime_tandem.distill.scoring import Teacher
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.fused.junior import FusedJunior
from slime_tandem.engines.fused.launch import FusedServer
from slime_tandem.engines.hf import check_model_folder, read_model_config
from slime_tandem.engines.launch import ServerProcess
from slime_tandem.engines.protocol import Engine
from slime_tandem.engines.sessions import SessionEngine
from slime_tandem.errors import ConfigError, ModelError, explain
from slime_tandem.local.pretrain import resolve_model
from slime_tandem.local.tokenizer import ModelTokenizer, require_same_tokenizer
from slime_tandem.rollout.boundaries import BoundaryRecord, boundary_ids
from slime_tandem.rollout.drive import write_lockstep
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.spelling import JuniorText
from slime_tandem.rollout.tandem import TandemWriter
from slime_tandem.types import JUNIOR, SENIOR, FailedSample, Prompt, SampleKey, TandemSample

Role = Literal["senior", "junior", "teacher"]
_SGLANG_START_S = 300.0
"""SGLang imports and compiles for longer than an embedded server takes to start."""
_DYING_S = 5.0


@contextlib.contextmanager
def _of_role(role: Role) -> Iterator[None]:
    """Say in a ModelError whose model it is: two roles may have folders of the same name, or the same folder."""
    try:
        yield
    except ModelError as error:
        raise type(error)(f"models.{role}: {error}") from error


class Team:
    """Servers, clients and tokenizers of one run; a context manager that leaves no process behind.

    Raises ModelError, TokenizerMismatchError and ConfigError before any server is started, EngineError kinds after.
    """

    def __init__(self, config: RunConfig, log_dir: Path) -> None:
        self.config, self.log_dir = config, log_dir
        self.roles: list[Role] = ["senior"]
        self.roles += ["junior"] if config.tandem.enabled else []
        self.roles += ["teacher"] if config.opd.enabled else []
        cache = Path(config.models.cache_dir)
        self.folders: dict[Role, Path] = {}
        self.tokenizers: dict[Role, ModelTokenizer] = {}
        trust = config.models.trust_remote_code
        for role in self.roles:
            with _of_role(role):
                folder = self.folders[role] = resolve_model(getattr(config.models, role), cache)
                if getattr(config.engine, f"{role}_url") is None or role == "senior":
                    check_model_folder(folder)
                self.tokenizers[role] = ModelTokenizer.load(folder, trust_remote_code=trust)
        self.student = self.tokenizers["senior"]
        self.spellers = None
        if config.tandem.enabled and config.tandem.junior_tokenizer == "same":
            require_same_tokenizer(self.student, self.tokenizers["junior"])
        elif config.tandem.enabled:
            self.spellers = (self.tokenizers["junior"].speller(), self.student.speller())
        self.boundaries = BoundaryRecord.resolve(config.tandem, self.student.tokens)
        boundary = self.boundaries.ids
        self.tandem_rule = HandoffRule.from_config(config.tandem, boundary)
        self.solo_rule = HandoffRule.from_config(config.tandem.model_copy(update={"enabled": False}), boundary)
        self.fused = config.engine.mode == "fused"
        self.servers: dict[Role, ServerProcess | FusedServer] = {}
        self.clients: dict[Role, EngineClient] = {}
        self.runner = asyncio.Runner()
        self._connections = contextlib.AsyncExitStack()
        self._teacher_max_tokens: int | None = None
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
        e = self.config.engine
        key = self._api_key()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        urls: dict[Role, str] = {}
        for role in self.roles:
            if self.fused and role == "junior":
                continue  # inside the senior's server
            url = getattr(e, f"{role}_url")
            if url is None and self.fused and role == "senior":
                self.servers[role] = FusedServer(
                    self.folders["senior"],
                    self.folders["junior"],
                    log_file=self.log_dir / "fused.log",
                    tables=self._fused_tables(),
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
                    log_file=self.log_dir / f"{role}.log",
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
        if "teacher" in self.clients:
            self._teacher_max_tokens = self._max_tokens("teacher")

    def _max_tokens(self, role: Role) -> int | None:
        """Input tokens that a role's server takes: what it tells, else what the model's config says, else None."""
        told = self.runner.run(self.clients[role].model_info()).get("max_total_tokens")
        if isinstance(told, int):
            return told
        # SGLang's /model_info does not tell it; it takes inputs that are shorter than the context (tokenizer_manager.py,
        # _validate_one_request).
        context = read_model_config(self.folders[role]).get("max_position_embeddings")
        return context - 1 if isinstance(context, int) else None

    def _fused_tables(self) -> list[frozenset[int]]:
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
            api_key=self._api_key(),
            timeout_s=e.request_timeout_s,
            max_retries=e.max_retries,
            backoff_s=e.backoff_s,
        )

    def _api_key(self) -> str | None:
        name = self.config.engine.api_key_env
        if name is None:
            return None
        value = os.environ.get(name)
        if not value:
            raise ConfigError(
                explain("engine.api_key_env", name, "an environment variable that is set", f"export {name}")
            )
        if not (value.isascii() and value.isprintable()) or " " in value:
            raise ConfigError(
                explain(
                    f"the variable {name} of engine.api_key_env",
                    "(not shown)",
                    "a key of printable ASCII without blanks",
                    "export it without a line end",
                )
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
        sampling = sampling or self.config.sampling
        writers = [
            self._writer(SampleKey(self.config.seed, rollout_id, group * per_prompt + i), group, prompt, rule, sampling)
            for group, prompt in enumerate(prompts)
            for i in range(per_prompt)
        ]
        return self.runner.run(self._write(writers))

    def _writer(
        self, key: SampleKey, group: int, prompt: Prompt, rule: HandoffRule, sampling: SamplingConfig
    ) -> TandemWriter:
        t = self.config.tandem
        junior_text = None
        if self.spellers is not None and rule is not self.solo_rule:
            junior_text = JuniorText(*self.spellers, self.tokenizers["junior"].render(prompt.messages))
        return TandemWriter(
            key,
            group,
            prompt,
            self.student.render(prompt.messages),
            rule,
            sampling,
            self.student.tokens,
            custom_boundary=t.boundary_token_ids is not None and rule.boundary == frozenset(t.boundary_token_ids),
            boundary_classes=t.boundary_classes,
            score_junior=t.junior_token_loss_weight > 0 and rule is self.tandem_rule,
            junior_text=junior_text,
            refuse_fallback=t.on_unexpressible == "error",
            tokens_per_request=self.config.engine.tokens_per_request,
            fused=self.fused and rule is not self.solo_rule,
        )

    async def _write(self, writers: Sequence[TandemWriter]) -> list[TandemSample | FailedSample]:
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
            return await write_lockstep(writers, engines, senior_version=self.senior_version)

    def teacher(self) -> Teacher:
        """The scorer; only where `opd.enabled`."""
        t = self.tokenizers["teacher"]
        return Teacher(
            self.clients["teacher"],
            t.tokens,
            t.render,
            t.encode,
            t.end_of_turn,
            self.config.engine.max_batch,
            self._teacher_max_tokens,
        )

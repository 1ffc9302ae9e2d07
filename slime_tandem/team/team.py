"""A rollout's asking: the models of a roster write responses together, teachers score them, the senior gets new weights.

It does not know which models take part (`team.roster` says), nor how their servers start and end (`team.servers`). Prompts,
rewards and training are the caller's: `team.rollouts` joins writing, rewarding and scoring to one rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from slime_tandem.config import RunConfig, SamplingConfig
from slime_tandem.distill.panel import TeacherPanel
from slime_tandem.engines.sessions import SessionEngine
from slime_tandem.errors import TeacherScoreError
from slime_tandem.protocol import Engine
from slime_tandem.rollout.drive import write_lockstep
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter
from slime_tandem.team.roster import Role, Roster
from slime_tandem.team.servers import Servers
from slime_tandem.types import JUNIOR, SENIOR, AlignedScores, FailedSample, Prompt, SampleKey, TandemSample

_AUTO_TOKENS, _AUTO_RESPONSES = 6, 128  # docs/results/tandem-rollout.md


def most_tokens(setting: int | Literal["auto"] | None, responses: int) -> int | None:
    """Most tokens of a co-writing request (`engine.tokens_per_request`) with so many responses at once; None: no limit.

    >>> most_tokens("auto", 64), most_tokens("auto", 256), most_tokens(4, 256), most_tokens(None, 8)
    (6, None, 4, None)
    """
    if setting == "auto":
        return _AUTO_TOKENS if responses <= _AUTO_RESPONSES else None
    return setting


class Team:
    """The models of a roster at work; a context manager that leaves no process behind. Logs of its servers go to `log_dir`.

    `servers` has the clients, for questions that are no rollout's; `ready` hears of each role that answers. Raises ConfigError
    before any server is started, EngineError kinds and ModelError (a running server of another model) after.
    """

    def __init__(self, roster: Roster, log_dir: Path, *, ready: Callable[[Role], None] = lambda role: None) -> None:
        self.roster = roster
        self._ready = ready
        self.servers = Servers(roster, log_dir)
        self._panel: TeacherPanel | None = None
        self.senior_version: str | None = None
        self._senior_weights: Path | None = None

    def __enter__(self) -> Self:
        gc.freeze()  # until `close`: libraries and tokenizers stay; long lists must not have them searched again and again
        try:
            self.servers.start(self._ready)
            if self.roster.teacher_specs:
                self._panel = self._ask_teachers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the clients and stop the servers that this team started."""
        try:
            self.servers.stop()
        finally:
            gc.unfreeze()

    def _ask_teachers(self) -> TeacherPanel:
        teachers = []
        for role in self.roster.teacher_specs:
            teacher = self.roster.own_teachers.get(role)
            if teacher is None:
                client = self.servers.clients[role]
                teacher = self.roster.teacher(role, client, self.servers.run(client.model_info()))
            teachers.append(teacher)
        return TeacherPanel(teachers, self.roster.scoring)

    @property
    def config(self) -> RunConfig:
        """The settings of the run."""
        return self.roster.config

    @property
    def panel(self) -> TeacherPanel:
        """The teachers; only where `opd.enabled`."""
        assert self._panel is not None, "no teacher in this run"
        return self._panel

    def send_weights(self, folder: Path, version: str) -> None:
        """Load a Hugging Face folder into the senior's server; WeightVersionError if it then serves another version."""
        self.servers.run(self.servers.clients["senior"].update_weights_from_disk(str(folder.resolve()), version))
        self.senior_version, self._senior_weights = version, folder

    def revive(self) -> list[Role]:
        """Restart own servers that have died, give the senior its current weights; returns the roles restarted."""
        dead = self.servers.restart_dead()
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
        rule = rule or (self.roster.tandem_rule if tandem else self.roster.solo_rule)
        return self.servers.run(
            self._write(self._writers(prompts, rollout_id, per_prompt, rule, sampling or self.config.sampling))
        )

    def write_and_score(
        self, prompts: Sequence[Prompt], rollout_id: int, per_prompt: int, *, tandem: bool, at_once: int
    ) -> list[tuple[TandemSample | FailedSample, AlignedScores | TeacherScoreError | None]]:
        """As `write`, with each sample's scores; teachers read `at_once` finished responses while others are written."""
        rule = self.roster.tandem_rule if tandem else self.roster.solo_rule
        writers = self._writers(prompts, rollout_id, per_prompt, rule, self.config.sampling)
        return self.servers.run(self._write_and_score(writers, at_once))

    def _writers(
        self, prompts: Sequence[Prompt], rollout_id: int, per_prompt: int, rule: HandoffRule, sampling: SamplingConfig
    ) -> list[TandemWriter]:
        most = None
        # Alone or fused, nobody waits for another author: one request writes it all.
        if not self.roster.fused and rule is not self.roster.solo_rule:
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
        options = self.roster.writer_options(prompt, rule, sampling, tokens_per_request)
        return TandemWriter(
            key, group, prompt, self.roster.student.render(prompt.messages, tools=prompt.tools), options
        )

    async def _write(
        self, writers: Sequence[TandemWriter], on_finished: Callable[[int, TandemSample], None] | None = None
    ) -> list[TandemSample | FailedSample]:
        for client in self.servers.clients.values():
            await client.flush_cache()
        clients = {SENIOR: self.servers.clients["senior"]}
        if "junior" in self.servers.clients:
            clients[JUNIOR] = self.servers.clients["junior"]
        async with contextlib.AsyncExitStack() as stack:
            engines: dict[int, Engine] = dict(clients)
            if self.config.engine.sessions:
                for author, client in clients.items():
                    engines[author] = await stack.enter_async_context(SessionEngine(client))
            return await write_lockstep(
                writers,
                engines,
                senior_version=self.senior_version,
                environment=self.roster.environments,
                on_finished=on_finished,
            )

    def score(self, samples: Sequence[TandemSample], *, plain: bool = False) -> list[AlignedScores | TeacherScoreError]:
        """The teachers' view of each sample, in order (`plain`: without candidates and lists).

        Raises EngineError kinds if a server fails as a whole.
        """
        return self.servers.run(self.panel.score(samples, self.servers.clients["senior"], plain=plain))

    async def _write_and_score(
        self, writers: Sequence[TandemWriter], at_once: int
    ) -> list[tuple[TandemSample | FailedSample, AlignedScores | TeacherScoreError | None]]:
        """Write, and score whatever is finished as soon as it is `at_once` samples."""
        scores: dict[int, AlignedScores | TeacherScoreError] = {}
        waiting: list[tuple[int, TandemSample]] = []

        async def score(part: Sequence[tuple[int, TandemSample]]) -> None:
            results = await self.panel.score([s for _, s in part], self.servers.clients["senior"])
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

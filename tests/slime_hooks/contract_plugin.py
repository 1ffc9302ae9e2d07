"""A pytest plugin (`-p contract_plugin`) that gives our hooks what slime's contract tests lack: settings, an engine, groups.

slime's tests call hooks with bare arguments. The paths under test are the real ones; only the engine answers from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from slime_tandem.config import RunConfig
from slime_tandem.protocol import GenerateRequest, GenerateResult
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import WriterOptions
from slime_tandem.slime_hooks import runtime, settings, wire
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR


class FromMemory:
    """Writes one token and the end of the turn."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        return [
            GenerateResult(r.rid, (1, 0)[: r.max_new_tokens], (-0.5, -0.1)[: r.max_new_tokens], "stop", "1")
            for r in requests
        ]


config = RunConfig.load(overrides=["opd.enabled=false", "sampling.on_failed_sample=drop_sample"])  # theirs are empty
tokens = TokenBytes((None, b"a"), frozenset({0}), frozenset({0}))
rule = HandoffRule.from_config(config.tandem, frozenset())
chat = SimpleNamespace(text_markers="escape", count_markers=lambda _: 0, markers_in=lambda _: 0)
hf = SimpleNamespace(encode=lambda text, add_special_tokens: [1])
student = SimpleNamespace(tokens=tokens, hf=hf, end_of_turn=0, chat=lambda *_: chat)
roster = SimpleNamespace(
    config=config, tandem_rule=rule, solo_rule=rule, spellers=None, student=student, environments=None,
    writer_options=lambda prompt, rule, sampling: WriterOptions(rule, sampling, tokens),
)  # fmt: skip
settings.use(settings.ANY, config)
wire.groups_of = lambda samples: [s.index for s in samples]  # theirs have neither group nor prompt, which we refuse
runtime.use(runtime.Runtime(roster, {SENIOR: FromMemory(), JUNIOR: FromMemory()}, None, lambda: False))  # type: ignore[arg-type]

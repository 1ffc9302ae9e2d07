"""Who writes which token, and how tokens are sampled."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from slime_tandem.config.section import Ignored, Named, Probability, Section
from slime_tandem.errors import ConfigError
from slime_tandem.extensions import is_own
from slime_tandem.strategies import STRATEGIES

StrategyName = Annotated[str, Named(tuple(STRATEGIES))]
BoundaryClass = Literal["space", "newline", "punctuation"]
AuthorSchedule = Literal["draw", "alternate"]


def _read_by_some(name: str) -> Ignored:
    """A setting that some strategies read. What a user's own reads is known when it is imported, and `unread` says it then."""
    readers = [strategy for strategy, record in STRATEGIES.items() if name in record.reads]

    def when(section: TandemConfig) -> bool:
        return not is_own(section.selection_strategy) and section.selection_strategy not in readers

    return Ignored(name, when, "selection_strategy", f"choose {' or '.join(readers)}")


_READ_BY_SOME = tuple(
    _read_by_some(name)
    for name in ("prob_senior", "max_gap_tokens", "chunk_size", "boundary_classes", "boundary_token_ids")
)


class TandemConfig(Section):
    """Tandem RL (arXiv 2606.28166): who writes which token."""

    enabled: bool = Field(True, description="False: the senior writes alone (plain GRPO)")
    selection_strategy: StrategyName = Field(
        "word",
        description="where a handoff may fall: a strategy, or one of your own as module:attribute (docs/extending.md)",
    )
    prob_senior: Probability = Field(0.5, description="probability that a new run is the senior's")
    author_schedule: AuthorSchedule = Field(
        "draw",
        description="draw: every run's author by prob_senior; alternate: senior, junior, senior, ... "
        "(chunk and alternating always alternate)",
    )
    max_gap_tokens: int = Field(
        32, ge=1, le=2**31 - 1, description="a run ends after so many tokens without a boundary"
    )
    chunk_size: int = Field(16, ge=1, description="tokens per turn, strategy chunk only")
    boundary_classes: tuple[BoundaryClass, ...] = Field(
        ("space",),
        min_length=1,
        description="tokens that end a run, strategy word only: space (bytes begin with one; the paper's rule), newline (bytes "
        "hold one), punctuation (bytes end in a full stop, comma, colon, semicolon, exclamation or question mark)",
    )
    boundary_token_ids: tuple[int, ...] | None = Field(
        None, description="ids after which a run ends, instead of the classes; null: the classes' ids of this tokenizer"
    )
    junior_tokenizer: Literal["same", "any"] = Field(
        "same",
        description="any: the junior may have another tokenizer; handoffs then pass bytes (rollout/junior_text.py)",
    )
    on_unexpressible: Literal["senior", "error"] = Field(
        "senior",
        description="a junior run whose bytes the senior's vocabulary cannot spell: the senior writes it, or the sample fails",
    )
    junior_token_loss_weight: float = Field(
        0.0, ge=0.0, description="policy-gradient weight of junior tokens (not the paper's lambda_jun); paper: 0"
    )

    ignored: ClassVar = (
        *_READ_BY_SOME,
        Ignored("prob_senior", lambda s: s.author_schedule == "alternate", "author_schedule", "choose draw"),
        Ignored(
            "boundary_classes", lambda s: s.boundary_token_ids is not None, "boundary_token_ids", "remove these ids"
        ),
    )

    def unread(self, reads: Collection[str]) -> Iterator[ConfigError]:
        """An error for each setting that is set though a strategy of the user's own, which reads `reads`, does not read it."""
        for rule in _READ_BY_SOME:
            if rule.name not in reads and (problem := self.misuse(rule, "tandem")):
                yield problem

    @field_validator("boundary_classes")
    @classmethod
    def _each_class_once(cls, value: tuple[BoundaryClass, ...]) -> tuple[BoundaryClass, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each class once; remove the repetition")
        return value


class SamplingConfig(Section):
    """How responses are sampled; the same for every sample of a group."""

    temperature: float = Field(1.0, ge=0.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus mass")
    top_k: int = Field(-1, ge=-1, description="-1: whole vocabulary")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="least probability, as a share of the greatest; 0: none")
    truncation_replay: Literal["kept_ids", "recompute"] = Field(
        "kept_ids",
        description="training with top_p, top_k or min_p: over which tokens the trainer renormalises. kept_ids: those that "
        "the senior's embedded server reports; recompute: found again in the trainer's logits, old log-probs too (any server)",
    )
    max_new_tokens: int = Field(64, ge=1, description="response cap in tokens, both authors together")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="strings that end the response, whoever writes them; left out of its text"
    )
    on_failed_sample: Literal["stop", "drop_sample"] = Field(
        "stop", description="what happens when an engine refuses a response or answers it unusably after all repeats"
    )

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def asks_kept_ids(self) -> bool:
        """Whether the senior's server is asked what it drew from (greedy tokens are not drawn)."""
        return self.truncates and self.temperature > 0.0 and self.truncation_replay == "kept_ids"

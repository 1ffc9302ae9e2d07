"""After which tokens a run ends: a strategy's table for one tokenizer, the rule with it, and the record that a run keeps.

What is a boundary is stated on decoded bytes (`slime_tandem.strategies`), or by the user's own list of ids. Special tokens are
never boundaries by their bytes. Pure.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from slime_tandem.config import BoundaryClass, TandemConfig
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.extensions import is_own
from slime_tandem.files import parse_json, record_of
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.strategies import STRATEGIES, Mark, find_strategy
from slime_tandem.tokens.token_bytes import TokenBytes

_PAPER: tuple[BoundaryClass, ...] = ("space",)
_MAX_MARKS = 64
"""Characters in a pattern that is found from token ids; a table that needs more is followed without one."""


def boundary_ids(
    strategy: str,
    token_bytes: Sequence[bytes | None],
    special: Collection[int],
    *,
    classes: Iterable[BoundaryClass] = _PAPER,
    field: str = "tandem.selection_strategy",
) -> frozenset[int]:
    """Ids after which a run may end; empty for strategies that count tokens. `classes` matter to `word` alone.

    `token_bytes` [V]: the bytes of each id, None where an id has none. Raises ConfigError, which names the setting `field`,
    for a name that stands for no strategy, and for a user's own that fails.

    >>> table = [b"a", b" b", b"\\n", b" ", None, b"\\n\\n"]
    >>> sorted(boundary_ids("word", table, special=()))
    [1, 3]
    >>> sorted(boundary_ids("word", table, special=(), classes=("newline",))), sorted(boundary_ids("sentence", table, ()))
    ([2, 5], [5])
    """
    test = find_strategy(strategy, field).test(classes)
    if test is None:
        return frozenset()
    ids = set()
    for i, data in enumerate(token_bytes):
        if data and i not in special:
            try:
                if test(data):
                    ids.add(i)
            except Exception as error:  # a user's own code
                why = " ".join(f"{type(error).__name__}: {error}".split())
                expected = f"an `ends_after` that answers for the bytes of every token ({why} at token {i}, {data!r})"
                raise ConfigError(field, strategy, expected, "correct the function") from error
    return frozenset(ids)


def resolve_boundaries(
    config: TandemConfig, token_bytes: Sequence[bytes | None], special: Collection[int]
) -> frozenset[int]:
    """The configured ids, checked against the vocabulary, or the strategy's own table.

    Raises ConfigError for ids outside the vocabulary, where no token at all could end a word or sentence, and for a setting
    that a strategy of the user's own does not read.
    """
    strategy = config.selection_strategy
    record = find_strategy(strategy)
    if is_own(strategy):  # of the built-in ones, the configuration knows
        for problem in config.unread(record.reads):
            raise problem
    if config.boundary_token_ids is not None:
        wrong = [i for i in config.boundary_token_ids if not 0 <= i < len(token_bytes)]
        if wrong:
            raise ConfigError(
                "tandem.boundary_token_ids", wrong[:5], f"ids in [0, {len(token_bytes)})", "correct the list"
            )
        return frozenset(config.boundary_token_ids)
    if not config.enabled or not record.by_text:
        return boundary_ids(strategy, token_bytes, special, classes=config.boundary_classes)
    # A class without a token is as wrong as a strategy without one: what was asked for would not happen.
    tables = {
        name: boundary_ids(strategy, token_bytes, special, classes=(name,))
        for name in (config.boundary_classes if record.classes else _PAPER)
    }
    empty = [name for name, ids in tables.items() if not ids]
    if empty:
        by_class = config.boundary_classes != _PAPER
        raise ConfigError(
            "tandem.boundary_classes" if by_class else "tandem.selection_strategy",
            empty if by_class else strategy,
            "classes of which this tokenizer has tokens"
            if by_class
            else "a strategy for which this tokenizer has a boundary token",
            "set tandem.boundary_token_ids, or choose bernoulli, chunk or alternating",
        )
    return frozenset().union(*tables.values())


def stop_regex(strategy: str, runs: int, *, classes: Iterable[BoundaryClass] = _PAPER) -> str | None:
    """A pattern that is found in the text as soon as `runs` runs have ended in it; None where no text ends a run.

    It never lets a server write past the last boundary of `boundary_ids`: every boundary token brings a mark of its own
    into the text. (Runs that end by their cap are bounded by the request's token budget.) It may be found earlier,
    where one token holds several marks or several tokens write one; the writer then asks again. The text must be
    that of the whole answer (`strategies.Mark.regex`).

    >>> stop_regex("word", 1, classes=("space", "newline"))
    '[ \\\\n]'
    """
    mark = find_strategy(strategy).marks(classes)
    return mark.regex(runs) if mark else None


def mark_of(ids: Collection[int], token_bytes: Sequence[bytes | None]) -> Mark | None:
    """Characters of which every token of `ids` brings one into the text, and few other tokens do; None where there are none.

    A character counts where a token holds it whole, so that it shows whatever stands before. Chosen one after the other: that
    which most of the boundaries left over hold, less the other tokens that do.

    >>> mark_of({1, 3}, [b"a", b" 1", b"b", b"x2", b"x"])
    Mark(one='[12]', between='[^12]*')
    """
    holders: dict[str, set[int]] = defaultdict(set)
    others: Counter[str] = Counter()
    for i, data in enumerate(token_bytes):
        held = set((data or b"").decode("utf-8", "ignore")) - {"\ufffd"}
        if i in ids:
            for character in held:
                holders[character].add(i)
        else:
            others.update(held)
    left = set(ids)
    chosen: list[str] = []
    while left:
        best = max(holders, key=lambda c: (len(holders[c]) - others[c], ord(c)), default=None)
        if best is None or not holders[best] or len(chosen) == _MAX_MARKS:
            return None
        chosen.append(best)
        covered = holders.pop(best)
        left -= covered
        for i in covered:
            for character in set((token_bytes[i] or b"").decode("utf-8", "ignore")) & holders.keys():
                holders[character].discard(i)
        holders = defaultdict(set, {c: found for c, found in holders.items() if found})
    return Mark.of(sorted(chosen)) if chosen else None


def rule_of(config: TandemConfig, ids: Iterable[int], tokens: TokenBytes) -> HandoffRule:
    """The rule with these boundary `ids`; where the strategy does not say how they show in the text, that is found."""
    rule = HandoffRule.from_config(config, ids)
    if rule.mark is None and rule.boundary and config.boundary_token_ids is None:
        return replace(rule, mark=mark_of(rule.boundary, tokens.table))
    return rule


@dataclass(frozen=True)
class BoundaryRecord:
    """Who wrote and where runs ended in a run of training, kept with it: enough to recompute every authorship mask.

    `source`: "bytes" (the classes or the strategy's rule on decoded bytes), "config" (`tandem.boundary_token_ids`) or
    "none" (the strategy counts tokens). `classes` are empty where none were used. `vocab_size` and `fingerprint`
    name the tokenizer (`TokenBytes.fingerprint`). `ids`, `prob_senior`, `cap` and `alternates` are those of the rule: the
    authors follow from them without the code of a strategy.

    >>> tokens = TokenBytes((b"a", b" b", b" c", b"d", b" e"), frozenset(), frozenset())
    >>> record = BoundaryRecord.resolve(TandemConfig(), tokens)
    >>> record.source, sorted(record.ids), BoundaryRecord.from_json(record.to_json()) == record
    ('bytes', [1, 2, 4], True)
    >>> record.rule == HandoffRule.from_config(TandemConfig(), record.ids)
    True
    """

    strategy: str
    classes: tuple[BoundaryClass, ...]
    source: Literal["bytes", "config", "none"]
    vocab_size: int
    fingerprint: str
    ids: frozenset[int]
    prob_senior: float
    cap: int | None
    alternates: bool

    @classmethod
    def resolve(cls, config: TandemConfig, tokens: TokenBytes) -> BoundaryRecord:
        """`resolve_boundaries` with where its ids came from; raises like it."""
        ids = resolve_boundaries(config, tokens.table, tokens.special)
        record = find_strategy(config.selection_strategy)
        source: Literal["bytes", "config", "none"] = "bytes"
        if not record.by_text:
            source = "none"
        elif config.boundary_token_ids is not None:
            source = "config"
        rule = HandoffRule.from_config(config, ids)
        return cls(
            strategy=config.selection_strategy,
            classes=config.boundary_classes if source == "bytes" and record.classes else (),
            source=source,
            vocab_size=len(tokens.table),
            fingerprint=tokens.fingerprint,
            ids=ids,
            prob_senior=rule.prob_senior,
            cap=rule.cap,
            alternates=rule.alternates,
        )

    @property
    def rule(self) -> HandoffRule:
        """The rule that decided the authors."""
        return HandoffRule(self.strategy, self.prob_senior, self.ids, self.cap, self.alternates)

    def to_json(self) -> str:
        """One JSON object; `ids` ascending, a stretch of three or more as [first, last]."""
        tree = {
            "strategy": self.strategy,
            "classes": list(self.classes),
            "source": self.source,
            "vocab_size": self.vocab_size,
            "fingerprint": self.fingerprint,
            "prob_senior": self.prob_senior,
            "cap": self.cap,
            "alternates": self.alternates,
            "count": len(self.ids),
            "ids": _stretches(self.ids),
        }
        return json.dumps(tree) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "boundaries.json") -> BoundaryRecord:
        """Read `to_json` back. Raises DataError, with `name`, for anything else, an altered list of ids included."""
        try:
            tree = record_of(_Written, parse_json(text))
        except ValueError as error:
            older = str(error) in (f"{field} is missing" for field in ("prob_senior", "cap", "alternates"))
            remedy = "go on with the version that wrote it, or start a new run" if older else "restore the file"
            raise DataError(name, text[:40], f"a boundary record ({error})", remedy) from None
        return cls(
            strategy=tree.strategy,
            classes=tuple(tree.classes),
            source=tree.source,
            vocab_size=tree.vocab_size,
            fingerprint=tree.fingerprint,
            ids=frozenset(tree.all_ids()),
            prob_senior=tree.prob_senior,
            cap=tree.cap,
            alternates=tree.alternates,
        )


class _Written(BaseModel):
    """`boundaries.json`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    strategy: str
    classes: list[BoundaryClass]
    source: Literal["bytes", "config", "none"]
    vocab_size: int = Field(ge=0, le=2**24)
    fingerprint: str = Field(pattern="^[0-9a-f]{64}$")
    prob_senior: float = Field(ge=0.0, le=1.0)
    cap: int | None = Field(ge=1)
    alternates: bool
    count: int
    ids: list[int | Annotated[list[int], Field(min_length=2, max_length=2)]]

    @field_validator("strategy")
    @classmethod
    def _is_known(cls, strategy: str) -> str:
        if strategy not in STRATEGIES and not is_own(strategy):
            raise ValueError("a strategy")
        return strategy

    @model_validator(mode="after")
    def _has_the_ids_that_were_written(self) -> Self:
        if any(not 0 <= end < self.vocab_size for part in self.ids for end in _ends(part)):
            raise ValueError(f"ids of a vocabulary of {self.vocab_size}")
        ids = self.all_ids()
        if len(ids) != self.count or _stretches(ids) != self.ids:
            raise ValueError(f"count={self.count} ids, ascending, as they were written")
        return self

    def all_ids(self) -> list[int]:
        """Every id of every stretch."""
        return [i for part in self.ids for i in range(_ends(part)[0], _ends(part)[1] + 1)]


def _ends(part: int | list[int]) -> tuple[int, int]:
    return (part[0], part[1]) if isinstance(part, list) else (part, part)


def _stretches(ids: Iterable[int]) -> list[int | list[int]]:
    parts: list[list[int]] = []
    for i in sorted(ids):
        if parts and parts[-1][-1] == i - 1:
            parts[-1].append(i)
        else:
            parts.append([i])
    out: list[int | list[int]] = []
    for part in parts:
        out.extend([[part[0], part[-1]]] if len(part) > 2 else part)
    return out

"""After which tokens a run ends: tables per tokenizer, stated on decoded bytes; and the record of them that a run keeps.

`word`: a token of one of the chosen classes; the paper's rule, and the default, is `space` alone.
  space        its bytes begin with a space
  newline      its bytes hold a line feed, anywhere: the token that breaks the line ends the run, indentation and all
  punctuation  its bytes end in one of PUNCTUATION (ASCII and full-width)
`sentence`: a token whose bytes end in a blank line, that is in two line feeds.
`bernoulli`, `chunk`, `alternating` count tokens and have no table.
Special tokens are never boundaries. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from slime_tandem.config import BoundaryClass, Strategy, TandemConfig
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.tokens.token_bytes import TokenBytes

PUNCTUATION = ".,;:!?。，；：！？、…"
_ENDS = tuple(mark.encode() for mark in PUNCTUATION)
# One character that every token of the class has of its own: as many of them as boundaries stand in any text.
_MARKS: dict[BoundaryClass, str] = {"space": " ", "newline": "\n", "punctuation": re.escape(PUNCTUATION)}
_PAPER: tuple[BoundaryClass, ...] = ("space",)


# Whether a token with these bytes belongs to a class.
IN_CLASS: dict[BoundaryClass, Callable[[bytes], bool]] = {
    "space": lambda data: data.startswith(b" "),
    "newline": lambda data: b"\n" in data,
    "punctuation": lambda data: data.endswith(_ENDS),
}


def boundary_ids(
    strategy: Strategy,
    token_bytes: Sequence[bytes | None],
    special: Collection[int],
    *,
    classes: Iterable[BoundaryClass] = _PAPER,
) -> frozenset[int]:
    """Ids after which a run may end; empty for strategies that count tokens. `classes` matter to `word` alone.

    `token_bytes` [V]: the bytes of each id, None where an id has none.

    >>> table = [b"a", b" b", b"\\n", b" ", None, b"\\n\\n"]
    >>> sorted(boundary_ids("word", table, special=()))
    [1, 3]
    >>> sorted(boundary_ids("word", table, special=(), classes=("newline",))), sorted(boundary_ids("sentence", table, ()))
    ([2, 5], [5])
    """
    match strategy:
        case "word":
            tests = [IN_CLASS[name] for name in classes]
            ids = {i for test in tests for i, b in enumerate(token_bytes) if b and test(b)}
        case "sentence":
            ids = {i for i, b in enumerate(token_bytes) if b and b.endswith(b"\n\n")}
        case "bernoulli" | "chunk" | "alternating":
            return frozenset()
    return frozenset(ids.difference(special))


def resolve_boundaries(
    config: TandemConfig, token_bytes: Sequence[bytes | None], special: Collection[int]
) -> frozenset[int]:
    """The configured ids, checked against the vocabulary, or the strategy's own table.

    Raises ConfigError for ids outside the vocabulary, and where no token at all could end a word or sentence.
    """
    if config.boundary_token_ids is not None:
        wrong = [i for i in config.boundary_token_ids if not 0 <= i < len(token_bytes)]
        if wrong:
            raise ConfigError(
                "tandem.boundary_token_ids", wrong[:5], f"ids in [0, {len(token_bytes)})", "correct the list"
            )
        return frozenset(config.boundary_token_ids)
    strategy = config.selection_strategy
    if not config.enabled or strategy not in ("word", "sentence"):
        return boundary_ids(strategy, token_bytes, special, classes=config.boundary_classes)
    # A class without a token is as wrong as a strategy without one: what was asked for would not happen.
    tables = {
        name: boundary_ids(strategy, token_bytes, special, classes=(name,))
        for name in (config.boundary_classes if strategy == "word" else _PAPER)
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


def stop_regex(strategy: Strategy, runs: int, *, classes: Iterable[BoundaryClass] = _PAPER) -> str | None:
    """A pattern that is found in the text as soon as `runs` runs have ended in it; None where no text ends a run.

    It never lets a server write past the last boundary of `boundary_ids`: every boundary token brings a mark of its own
    into the text. (Runs that end by `max_gap_tokens` are bounded by the request's token budget.) It may be found earlier,
    where one token holds several marks or several tokens write one; the writer then asks again. The text must be
    that of the whole answer. Matched in linear time: it is tried at the start alone, and there is one way to match.

    >>> import re
    >>> [bool(re.search(stop_regex("word", 2), t)) for t in ("one", "one two", "one two ")]
    [False, False, True]
    >>> stop_regex("word", 1, classes=("space", "newline"))
    '[ \\\\n]'
    """
    match strategy:
        case "word":
            marks = "".join(_MARKS[name] for name in classes).replace("\n", "\\n")
            mark, rest = f"[{marks}]", f"[^{marks}]*"
        case "sentence":
            # No look-ahead: SGLang warns of it at every request (sampling_params.py, get_max_seq_length).
            mark, rest = r"\n\n", r"(?:[^\n]|\n[^\n])*"
        case "bernoulli" | "chunk" | "alternating":
            return None
    return rf"\A(?:{rest}{mark}){{{runs}}}" if runs > 1 else mark


@dataclass(frozen=True)
class BoundaryRecord:
    """Where runs ended in a run of training, kept with it: enough to recompute every authorship mask, and to check.

    `source`: "bytes" (the classes or the strategy's rule on decoded bytes), "config" (`tandem.boundary_token_ids`) or
    "none" (the strategy counts tokens). `classes` are empty where none were used. `vocab_size` and `fingerprint`
    name the tokenizer (`TokenBytes.fingerprint`).

    >>> tokens = TokenBytes((b"a", b" b", b" c", b"d", b" e"), frozenset(), frozenset())
    >>> record = BoundaryRecord.resolve(TandemConfig(), tokens)
    >>> record.source, sorted(record.ids), BoundaryRecord.from_json(record.to_json()) == record
    ('bytes', [1, 2, 4], True)
    """

    strategy: Strategy
    classes: tuple[BoundaryClass, ...]
    source: Literal["bytes", "config", "none"]
    vocab_size: int
    fingerprint: str
    ids: frozenset[int]

    @classmethod
    def resolve(cls, config: TandemConfig, tokens: TokenBytes) -> BoundaryRecord:
        """`resolve_boundaries` with where its ids came from; raises like it."""
        ids = resolve_boundaries(config, tokens.table, tokens.special)
        source: Literal["bytes", "config", "none"] = "bytes"
        if config.selection_strategy not in ("word", "sentence"):
            source = "none"
        elif config.boundary_token_ids is not None:
            source = "config"
        by_class = source == "bytes" and config.selection_strategy == "word"
        classes = config.boundary_classes if by_class else ()
        return cls(config.selection_strategy, classes, source, len(tokens.table), tokens.fingerprint, ids)

    def to_json(self) -> str:
        """One JSON object; `ids` ascending, a stretch of three or more as [first, last]."""
        tree = {
            "strategy": self.strategy,
            "classes": list(self.classes),
            "source": self.source,
            "vocab_size": self.vocab_size,
            "fingerprint": self.fingerprint,
            "count": len(self.ids),
            "ids": _stretches(self.ids),
        }
        return json.dumps(tree) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "boundaries.json") -> BoundaryRecord:
        """Read `to_json` back. Raises DataError, with `name`, for anything else, an altered list of ids included."""
        try:
            tree = json.loads(text)
            ids = [
                i for part in tree["ids"] for i in (range(part[0], part[1] + 1) if isinstance(part, list) else (part,))
            ]
            record = cls(
                strategy=tree["strategy"],
                classes=tuple(tree["classes"]),
                source=tree["source"],
                vocab_size=tree["vocab_size"],
                fingerprint=tree["fingerprint"],
                ids=frozenset(ids),
            )
            sound = (
                record.strategy in get_args(Strategy)
                and set(record.classes) <= set(get_args(BoundaryClass))
                and record.source in ("bytes", "config", "none")
                and len(record.fingerprint) == 64
                and ids == sorted(record.ids)
                and all(0 <= i < record.vocab_size for i in ids)
                and tree["count"] == len(ids)
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                name, text[:40], f"a boundary record ({type(error).__name__}: {error})", "restore the file"
            ) from None
        if not sound:
            raise DataError(name, text[:40], "a boundary record as it was written", "restore the file")
        return record


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

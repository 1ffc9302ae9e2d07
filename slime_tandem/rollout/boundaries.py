"""After which tokens a run ends: tables per tokenizer, stated on decoded bytes. Pure.

`word` (the paper's rule): every token whose bytes begin with a space; newlines and punctuation are no boundaries.
`sentence`: every token whose bytes end in a blank line. Special tokens are never boundaries.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slime_tandem.config import Strategy, TandemConfig
from slime_tandem.errors import ConfigError, explain


def boundary_ids(strategy: Strategy, token_bytes: Sequence[bytes | None], special: Collection[int]) -> frozenset[int]:
    """Ids after which a run may end; empty for strategies that count tokens.

    `token_bytes` [V]: the bytes of each id, None where an id has none.

    >>> sorted(boundary_ids("word", [b"a", b" b", b"\\n", b" ", None], special=()))
    [1, 3]
    """
    match strategy:
        case "word":
            return frozenset(i for i, b in enumerate(token_bytes) if b and b[0] == 0x20 and i not in special)
        case "sentence":
            return frozenset(i for i, b in enumerate(token_bytes) if b and b.endswith(b"\n\n") and i not in special)
        case "bernoulli" | "chunk" | "alternating":
            return frozenset()


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
                explain("tandem.boundary_token_ids", wrong[:5], f"ids in [0, {len(token_bytes)})", "correct the list")
            )
        return frozenset(config.boundary_token_ids)
    ids = boundary_ids(config.selection_strategy, token_bytes, special)
    if not ids and config.enabled and config.selection_strategy in ("word", "sentence"):
        raise ConfigError(
            explain(
                "tandem.selection_strategy",
                config.selection_strategy,
                "a strategy for which this tokenizer has a boundary token",
                "set tandem.boundary_token_ids, or choose bernoulli, chunk or alternating",
            )
        )
    return ids


def stop_regex(strategy: Strategy, runs: int) -> str | None:
    """A pattern that is found in the text as soon as `runs` runs have ended in it; None where no text ends a run.

    It never lets a server write past the last boundary unless a run ends by its cap or a boundary is written in part; the
    writer cuts there. There is one way to match, so a text with too few boundaries is refused in linear time.

    >>> import re
    >>> [bool(re.search(stop_regex("word", 2), t)) for t in ("one", "one two", "one two ")]
    [False, False, True]
    """
    match strategy:
        case "word":
            mark, rest = " ", "[^ ]*"
        case "sentence":
            mark, rest = "\n\n", r"(?:(?!\n\n)[\s\S])*"
        case "bernoulli" | "chunk" | "alternating":
            return None
    return f"(?:{mark}{rest}){{{runs - 1}}}{mark}" if runs > 1 else mark

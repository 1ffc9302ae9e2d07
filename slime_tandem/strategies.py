"""Handoff strategies: where a run of one author may end. One record each, a user's own as the built-in ones. Pure.

A strategy looks at the bytes of single tokens, or counts tokens, or both. So for one tokenizer it is a table of token ids and
a cap (`rollout.boundaries`), which every engine can follow, also one that decodes both models itself. This module knows no
tokenizer, no engine and no settings, but for the names of those that a strategy reads.

  word         a run ends after a token of one of the chosen classes (the paper's, and the default, is `space` alone), or
               after `max_gap_tokens`
                 space        its bytes begin with a space
                 newline      its bytes hold a line feed, anywhere: the token that breaks the line ends the run, with all
                              indentation in it
                 punctuation  its bytes end in one of PUNCTUATION (ASCII and full-width)
  bernoulli    every token is a run
  sentence     a run ends after a token whose bytes end in a blank line, that is in two line feeds
  chunk        `chunk_size` tokens each, authors alternate, senior first
  alternating  one token each, authors alternate, senior first

The literal values are those of Tandem RL (arXiv 2606.28166).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from slime_tandem.errors import ConfigError
from slime_tandem.extensions import find

PUNCTUATION = ".,;:!?。，；：！？、…"
_ENDS = tuple(mark.encode() for mark in PUNCTUATION)

CapSetting = Literal["max_gap_tokens", "chunk_size"]


class TokenClass(NamedTuple):
    """Tokens that a setting can choose: a test on their bytes, and characters of which each brings one into the text."""

    test: Callable[[bytes], bool]
    characters: str


@dataclass(frozen=True, slots=True)
class Mark:
    """How boundaries show in the text, as regular expressions: `one` matches a mark, `between` any text without one.

    Every boundary token brings a mark of its own, so that there are as many marks as boundaries in any text, or more.
    """

    one: str
    between: str

    @classmethod
    def of(cls, characters: Iterable[str]) -> Mark:
        """Each of these characters is a mark.

        >>> Mark.of(" .")
        Mark(one='[ \\\\.]', between='[^ \\\\.]*')
        """
        inside = "".join({" ": " ", "\n": "\\n"}.get(c) or re.escape(c) for c in characters)
        return cls(f"[{inside}]", f"[^{inside}]*")

    def regex(self, runs: int) -> str:
        """A pattern that is found as soon as `runs` marks are in a text, which must be that of the whole answer.

        Matched in linear time: it is tried at the start alone, and there is one way to match.

        >>> [bool(re.search(Mark.of(" ").regex(2), text)) for text in ("one", "one two", "one two ")]
        [False, False, True]
        """
        return rf"\A(?:{self.between}{self.one}){{{runs}}}" if runs > 1 else self.one


@dataclass(frozen=True, slots=True)
class Strategy:
    """Where a run may end. `tandem.selection_strategy` names a built-in one, or one of your own as `module:attribute`.

    `ends_after(data)`: whether a run may end after a token that stands for these bytes (never empty, perhaps a part of a
    character); it is asked once for each token id, and must always answer the same. Special tokens are not asked about: no
    run ends with one. None: no text ends a run. `cap`: the most tokens of a run, or the setting that says it; None: no cap.
    `alternates`: the authors take turns, senior first, instead of being drawn with `tandem.prob_senior`. `mark`: how
    boundaries show in the text, so that a server can stop there; None: found from the token ids. `classes`: tests by name, of
    which `tandem.boundary_classes` chooses; they stand in the place of `ends_after` and `mark`.

    Raises ConfigError where nothing could ever end a run, and for a cap below 1.

    >>> digits = Strategy(ends_after=lambda data: data[-1:].isdigit(), cap="max_gap_tokens")
    >>> sorted(digits.reads), digits.test()(b"4"), digits.test()(b"4 ")
    (['boundary_token_ids', 'max_gap_tokens', 'prob_senior'], True, False)
    """

    ends_after: Callable[[bytes], bool] | None = None
    cap: int | CapSetting | None = None
    alternates: bool = False
    mark: Mark | None = None
    classes: Mapping[str, TokenClass] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ends_after is None and not self.classes and self.cap is None:
            raise ConfigError(
                "Strategy", "no ends_after, no cap", "something that ends a run", "give ends_after, cap or both"
            )
        number = isinstance(self.cap, int) and not isinstance(self.cap, bool)
        if self.cap not in (None, "max_gap_tokens", "chunk_size") and not (number and 1 <= int(self.cap) < 2**31):
            raise ConfigError("Strategy.cap", self.cap, "a whole number from 1, or max_gap_tokens", "correct it")

    @property
    def by_text(self) -> bool:
        """Whether the text can end a run; otherwise tokens are counted alone."""
        return self.ends_after is not None or bool(self.classes)

    @property
    def reads(self) -> frozenset[str]:
        """The settings of `tandem` that it reads, of those that not all strategies do."""
        names = {"prob_senior"} if not self.alternates else set()
        if isinstance(self.cap, str):
            names.add(self.cap)
        if self.by_text:
            names.add("boundary_token_ids")
        if self.classes:
            names.add("boundary_classes")
        return frozenset(names)

    def test(self, classes: Iterable[str] = ("space",)) -> Callable[[bytes], bool] | None:
        """Whether a run may end after a token with these bytes; None where no text ends a run."""
        if self.classes:
            tests = [self.classes[name].test for name in classes]
            return lambda data: any(test(data) for test in tests)
        return self.ends_after

    def marks(self, classes: Iterable[str] = ("space",)) -> Mark | None:
        """How its boundaries show in the text; None where it does not say."""
        return Mark.of("".join(self.classes[name].characters for name in classes)) if self.classes else self.mark


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "word": Strategy(
            cap="max_gap_tokens",
            classes=MappingProxyType(
                {
                    "space": TokenClass(lambda data: data.startswith(b" "), " "),
                    "newline": TokenClass(lambda data: b"\n" in data, "\n"),
                    "punctuation": TokenClass(lambda data: data.endswith(_ENDS), PUNCTUATION),
                }
            ),
        ),
        "bernoulli": Strategy(cap=1),
        # No look-ahead in the mark: SGLang warns of it at every request (sampling_params.py, get_max_seq_length).
        "sentence": Strategy(ends_after=lambda data: data.endswith(b"\n\n"), mark=Mark(r"\n\n", r"(?:[^\n]|\n[^\n])*")),
        "chunk": Strategy(cap="chunk_size", alternates=True),
        "alternating": Strategy(cap=1, alternates=True),
    }
)
"""The built-in strategies by name."""


def find_strategy(name: str, field: str = "tandem.selection_strategy") -> Strategy:
    """The built-in strategy of this name, or a user's own (`module:attribute`, imported).

    Raises ConfigError, which names the setting `field`, for a name that stands for no `Strategy`.

    >>> find_strategy("chunk").cap
    'chunk_size'
    """
    return find(name, STRATEGIES, field, Strategy)

"""A junior with another tokenizer: handoffs pass bytes, and the response stays in the senior's own ids. Pure.

`JuniorText` keeps the junior's view of one response: its
own ids for what it wrote, its spelling of what the senior wrote. What the junior answers is spelt in the senior's
vocabulary; a span without an exact form there is never approximated: the writer lets the senior write that run instead,
and counts it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slime_tandem.errors import ModelError
from slime_tandem.tokens.speller import Speller
from slime_tandem.types import Message

Between = Callable[[Sequence[Message], int], list[int]]
"""(messages, the last id of the turn before) -> ids of a template from there to the next turn; ModelError: it has none."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A junior's answer in the senior's ids, as far as it can be expressed.

    `log_probs` [n] nats: the log-prob of each junior token stands at the senior token that holds its last byte, 0.0
    elsewhere; the sum over a whole answer is exact, single values are the junior's only where both cut the same bytes.
    `complete` is False where the rest has no exact form.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    complete: bool


class JuniorText:
    """The junior's view of one response. `prompt_ids` are of the junior's own chat template, and so is what stands between two
    turns (`between`, None: the senior's markup is spelt as far as it goes).

    >>> from slime_tandem.tokens.token_bytes import TokenBytes
    >>> table = TokenBytes((b"a", b"b", None), frozenset({2}), frozenset({2}))
    >>> senior = Speller(table, lambda t: ["ab".index(c) for c in t], 2)
    >>> junior = Speller(TokenBytes((None, b"ab", b"a", b"b"), frozenset({0}), frozenset({0})),
    ...                  lambda t: [1] if t == "ab" else [" ab".index(c) + 1 for c in t], 0)
    >>> text = JuniorText(junior, senior, (7,))
    >>> text.context([0])                       # the senior wrote "a"
    (7, 2)
    >>> text.translate([1, 0], [-0.5, -0.25])   # the junior answers "ab" and ends the turn
    Translation(ids=(0, 1, 2), log_probs=(0.0, -0.5, -0.25), complete=True)
    """

    def __init__(
        self, junior: Speller, senior: Speller, prompt_ids: Sequence[int], between: Between | None = None
    ) -> None:
        self.junior, self.senior, self._between = junior, senior, between
        self._ids = list(prompt_ids)
        self._seen = 0  # response tokens, in senior ids, that `_ids` covers

    def context(
        self,
        response_ids: Sequence[int],
        inserted: Sequence[tuple[int, int]] = (),
        messages: Sequence[Sequence[Message]] = (),
    ) -> tuple[int, ...] | None:
        """The junior's prompt and the response so far in its own ids; None if the response has no exact form in them.

        `inserted` spans of it show the `messages` of each.
        """
        ids, at = list(self._ids), self._seen
        for start, stop, shown in [
            *self._turns_to_come(inserted, messages),
            (len(response_ids), len(response_ids), ()),
        ]:
            spelt = self._respell(response_ids[at:start])
            if spelt is None:
                return None
            ids, at = ids + spelt, stop
            if shown and self._between is not None:
                try:
                    ids += self._between(shown, ids[-1])
                except ModelError:  # its template has no such messages
                    return None
        self._ids, self._seen = ids, len(response_ids)
        return tuple(ids)

    def _turns_to_come(
        self, inserted: Sequence[tuple[int, int]], messages: Sequence[Sequence[Message]]
    ) -> Iterator[tuple[int, int, Sequence[Message]]]:
        """(start, stop, messages) of the spans that are not read yet, and that the junior reads in its own markup."""
        for (start, stop), shown in zip(inserted, messages, strict=True):
            if start >= self._seen and shown and self._between is not None:
                yield start, stop, shown

    def translate(self, ids: Sequence[int], log_probs: Sequence[float]) -> Translation:
        """The junior's ids and log-probs [n] in the senior's vocabulary."""
        out_ids: list[int] = []
        out_log_probs: list[float] = []
        text: list[tuple[bytes, float]] = []

        def spell_text() -> bool:
            spelt = self.senior.spell(b"".join(b for b, _ in text))
            if spelt is not None:
                out_ids.extend(spelt)
                out_log_probs.extend(_place([len(self.senior.tokens.of(i) or b"") for i in spelt], text))
            text.clear()
            return spelt is not None

        for token, log_prob in zip(ids, log_probs, strict=True):
            data = self.junior.tokens.of(token)
            if data is not None:
                text.append((data, log_prob))
                continue
            same = self._same_token(token, self.junior, self.senior)
            if not spell_text() or same is None:
                return Translation(tuple(out_ids), tuple(out_log_probs), complete=False)
            out_ids.append(same)
            out_log_probs.append(log_prob)
        complete = spell_text()
        return Translation(tuple(out_ids), tuple(out_log_probs), complete)

    def commit(self, accepted: Sequence[int], answer: Sequence[int]) -> None:
        """Keep the junior's own ids for what was accepted (senior ids) of its `answer` (junior ids).

        A junior token that was cut by the handoff is left to the next `context`, which spells what was kept of it.
        """
        left = len(self.senior.tokens.join(accepted))
        specials = sum(self.senior.tokens.of(i) is None for i in accepted)
        kept = 0
        for token in answer:
            size = len(self.junior.tokens.of(token) or b"")
            special = self.junior.tokens.of(token) is None
            if size > left or special > specials or not (left or specials):
                break
            left, specials, kept = left - size, specials - special, kept + 1
        if left or specials:
            rest = self.senior.tokens.join(accepted)[len(self.junior.tokens.join(answer[:kept])) :]
            spelt = self.junior.spell(rest)
            if spelt is None or specials:
                return  # `context` spells the whole stretch anew, or finds that it cannot
            self._ids += [*answer[:kept], *spelt]
        else:
            self._ids += answer[:kept]
        self._seen += len(accepted)

    def _respell(self, ids: Sequence[int]) -> list[int] | None:
        out: list[int] = []
        for plain, group in itertools.groupby(ids, key=lambda i: self.senior.tokens.of(i) is not None):
            part = list(group)
            spelt = (
                self.junior.spell(self.senior.tokens.join(part))
                if plain
                else [self._same_token(i, self.senior, self.junior) for i in part]
            )
            if spelt is None or None in spelt:
                return None
            out += [i for i in spelt if i is not None]
        return out

    @staticmethod
    def _same_token(token: int, source: Speller, target: Speller) -> int | None:
        if token in source.tokens.eos_ids:
            return target.end_of_turn
        return target.special_ids.get(source.special_names.get(token, ""))


def _place(sizes: Sequence[int], text: Sequence[tuple[bytes, float]]) -> list[float]:
    """Log-probs at the senior tokens of `sizes` bytes: each junior token's at the one that holds its last byte."""
    ends = list(itertools.accumulate(sizes))
    out = [0.0] * len(sizes)
    position = at = 0
    for data, log_prob in text:
        position += len(data)
        while at < len(ends) - 1 and ends[at] < position:
            at += 1
        if out:
            out[at] += log_prob
    return out

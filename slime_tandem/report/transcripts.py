"""Responses as a page shows them: first and last ones of a run, token by token, as safe and bounded HTML.

Prompts, labels, task names and tokens are other people's texts: each is escaped, cut where it is too long for a page, and what
would reorder or hide the text around it is shown by number. It knows no page.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from slime_tandem.errors import RunDirError, TandemError
from slime_tandem.report.run_folder import read_rows
from slime_tandem.report.summary import DASH
from slime_tandem.types import SENIOR, is_right

MAX_TRANSCRIPTS = 40
"""Transcripts in one report; with the other bounds here it bounds the file's size."""
MAX_TOKENS = 400
MAX_PROMPT_CHARS = 2000
MAX_TOKEN_CHARS = 500
TRANSCRIPTS = "transcripts.jsonl"
"""The file of a run's folder."""
PHASES = (("eval", "held-out"), ("train", "training"))

_FINISH = {"stop": "", "length": "cut at the length cap", "abort": "aborted"}

# Half-open upper edges, in nats, of the shades of |log pi_student - log pi_teacher|.
SHADE_EDGES = (0.1, 0.5, 2.0)

# These reorder the text around them, so they are shown by number.
_BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token of the page: CSS classes, visible text, log-probs as written into the data attributes (nats)."""

    css: str
    text: Markup
    log_prob: str
    teacher: str | None


@dataclass(frozen=True, slots=True)
class TranscriptView:
    """One transcript of the page; `why` says why tokens without a teacher value have none."""

    step: int
    column: int
    prompt: Markup
    label: Markup | None
    task: Markup
    reward: str | None
    right: bool
    finish: Markup
    n_tokens: int
    senior_share: str
    why: str
    tokens: tuple[TokenView, ...]
    skipped: int
    tail: tuple[TokenView, ...]


@dataclass(frozen=True, slots=True)
class TranscriptGroup:
    """Transcripts of one run and phase at its first and last step."""

    key: str
    title: str
    steps: tuple[int, ...]
    transcripts: tuple[TranscriptView, ...]


@dataclass(slots=True)
class Ends:
    """The transcripts of the first and of the last step of a phase; those of a single step are `first`."""

    first: list[Mapping[str, Any]] = field(default_factory=list)
    last: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        """One row more, in the order of the file."""
        if not self.first or row["step"] == self.first[0]["step"]:
            self.first.append(row)
        else:
            if self.last and row["step"] != self.last[0]["step"]:
                self.last = []
            self.last.append(row)


def ends_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Ends]:
    """The ends of each phase, of the rows of transcripts.jsonl. Raises ValueError for a row of no phase."""
    ends = {phase: Ends() for phase, _ in PHASES}
    for row in rows:
        if row.get("phase") not in ends:
            raise ValueError(f"phase {str(row.get('phase'))[:100]!r}, where {' or '.join(ends)} belongs")
        ends[row["phase"]].add(row)
    return ends


def read_ends(path: Path) -> dict[str, Ends]:
    """The ends of a transcripts.jsonl, nothing for none. Raises RunDirError, naming it, for rows that no page can show."""
    try:
        ends = ends_of(read_rows(path))
        for row in [row for end in ends.values() for row in (*end.first, *end.last)]:
            _view(row, 1)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, TandemError):
            raise
        raise not_transcripts(str(path), error) from error
    return ends


def not_transcripts(where: str, error: Exception) -> RunDirError:
    """What is said of rows that are none of ours; `where` names their file."""
    return RunDirError(
        where,
        f"{type(error).__name__}: {error}",
        "rows as `slime-tandem train` writes them",
        "restore the file, or move it away: the report then has no transcripts",
    )


def transcript_groups(parts: Sequence[tuple[str, str, Mapping[str, Ends]]]) -> list[TranscriptGroup]:
    """First-step and last-step transcripts by run and phase, held-out ones first; at most MAX_TRANSCRIPTS in all.

    `parts` are (key, label, `ends_of` its rows). Where both steps hold answers to the same prompts, these come first, in pairs.
    """
    found: list[tuple[str, str, list[int], list[Mapping[str, Any]], list[Mapping[str, Any]]]] = []
    for key, label, phases in parts:
        for phase, words in PHASES:
            ends = phases[phase]
            if ends.first:
                steps = [rows[0]["step"] for rows in (ends.first, ends.last) if rows]
                found.append((f"{key}-{phase}", f"{label}, {words}", steps, ends.first, ends.last))
    each = MAX_TRANSCRIPTS // max(1, 2 * len(found))
    groups = []
    for key, title, steps, first, last in found:
        shared = {row["prompt"] for row in first} & {row["prompt"] for row in last}
        columns = [sorted(rows, key=lambda row: row["prompt"] not in shared)[:each] for rows in (first, last)]
        if shared:
            order = {row["prompt"]: i for i, row in reversed(list(enumerate(columns[0])))}
            columns[1].sort(key=lambda row: order.get(row["prompt"], len(order)))
        views = []
        for i in range(max(len(column) for column in columns)):
            for number, column in enumerate(columns, 1):
                if i < len(column):
                    views.append(_view(column[i], number))
        groups.append(TranscriptGroup(key, title, tuple(steps), tuple(views)))
    return groups


def _view(row: Mapping[str, Any], column: int) -> TranscriptView:
    raw = row["tokens"]
    has_teacher = any(token["teacher_log_prob"] is not None for token in raw)
    why = (
        "not aligned: no teacher token covers exactly these bytes"
        if has_teacher
        else "no teacher value for this response: no teacher in this run, its answer was unusable, or nothing aligned"
    )
    head, tail = raw, []
    if len(raw) > MAX_TOKENS:
        head, tail = raw[: MAX_TOKENS * 4 // 5], raw[-(MAX_TOKENS // 5) :]
    senior = sum(token["author"] == SENIOR for token in raw)
    parts: Mapping[str, float] = row.get("parts", {})
    return TranscriptView(
        step=row["step"],
        column=column,
        prompt=passage(str(row["prompt"])),
        label=None if row["label"] is None else passage(str(row["label"])),
        task=passage(str(row["task"]), 200),
        reward=None if row.get("unasked") is True else _said_reward(row["reward"], parts),
        right=is_right(row["reward"], parts),
        finish=passage(_FINISH.get(row["finish_reason"], str(row["finish_reason"])), 200),
        n_tokens=len(raw),
        senior_share=f"{100 * senior / len(raw):.0f}%" if raw else DASH,
        why=why,
        tokens=tuple(_token(token) for token in head),
        skipped=len(raw) - len(head) - len(tail),
        tail=tuple(_token(token) for token in tail),
    )


def _said_reward(reward: float | None, parts: Mapping[str, float]) -> str:
    if reward is None:
        return "none: it failed"
    of = ", ".join(f"{name} {value:.2f}" for name, value in list(parts.items())[:64])
    return f"{reward:.2f}" + (f" ({of})" if of else "")


def _token(token: Mapping[str, Any]) -> TokenView:
    senior = token["author"] == SENIOR
    own, teacher = token["log_prob"], token["teacher_log_prob"]
    css = ["k", "s" if senior else "i" if token["author"] is None else "j"]
    if senior:
        css.append("na" if teacher is None else shade(own - teacher))
    return TokenView(" ".join(css), visible(token["text"]), f"{own:.3f}", None if teacher is None else f"{teacher:.3f}")


def shade(difference: float) -> str:
    """The CSS class of log pi_student - log pi_teacher (nats): d0 near zero, p1..p3 and n1..n3 outwards.

    >>> [shade(d) for d in (0.05, 0.3, 7.0, -1.0)]
    ['d0', 'p1', 'p3', 'n2']
    """
    level = sum(abs(difference) >= edge for edge in SHADE_EDGES)
    return "d0" if level == 0 else f"{'p' if difference > 0 else 'n'}{level}"


def passage(text: str, most: int = MAX_PROMPT_CHARS) -> Markup:
    """A text as safe HTML, cut at `most` characters; line breaks and tabs stay, other controls are shown.

    >>> str(passage("a\\n<b>", 4))
    'a\\n&lt;b… (1 more characters)'
    """
    shown = Markup("").join(char if char in "\n\t" else _visible(char) for char in text[:most])
    return shown + (f"… ({len(text) - most} more characters)" if len(text) > most else "")


def visible(text: str) -> Markup:
    """A token's text as safe HTML: marks for newline, tab, nothing and control characters; cut at MAX_TOKEN_CHARS.

    >>> str(visible("<b>\\n"))
    '&lt;b&gt;<i class="c">↵</i>\\n'
    """
    if not text:
        return Markup('<i class="c">∅</i>')
    shown = Markup("").join(_visible(char) for char in text[:MAX_TOKEN_CHARS])
    if len(text) > MAX_TOKEN_CHARS:
        shown += Markup('<i class="c">… ({} more characters)</i>').format(len(text) - MAX_TOKEN_CHARS)
    return shown


def _visible(char: str) -> Markup:
    if char == "\n":
        return Markup('<i class="c">↵</i>\n')
    if char == "\t":
        return Markup('<i class="c">⇥</i>\t')
    if ord(char) < 0x20:
        return Markup('<i class="c">{}</i>').format(chr(0x2400 + ord(char)))
    if char in _BIDI_CONTROLS or unicodedata.category(char) in ("Cc", "Cs", "Co", "Zl", "Zp"):
        return Markup('<i class="c">U+{}</i>').format(f"{ord(char):04X}")
    return escape(char)

"""How an alignment is shown: what maps to what, coverage by class, and the text with its unaligned spans in colour.

It aligns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from slime_tandem.distill.alignment import UNALIGNED_REASONS, Alignment
from slime_tandem.errors import printable
from slime_tandem.tokens.token_bytes import TEXT_CLASSES

_STYLES = {
    "special": "bold white on magenta",
    "boundary": "black on yellow",
    "invalid_utf8": "white on red",
    "normalised": "black on bright_cyan",
    "unproven": "white on red3",
    "thinking": "white on blue",
    "inserted": "white on grey37",
}


def coverage_table(aligned: Alignment, title: str) -> Table:
    """Tokens, paired tokens and coverage per class, and what the policies for spans would add."""
    out = Table(title=Text(printable(title)), title_justify="left")
    out.add_column("")
    for name in ("tokens", "one to one", "coverage", "in spans"):
        out.add_column(name, justify="right")
    paired, spans = aligned.teacher_index >= 0, aligned.span >= 0
    for k, name in enumerate((*TEXT_CLASSES, "all")):
        here = aligned.classes == k if k < len(TEXT_CLASSES) else np.ones(len(paired), dtype=np.bool_)
        n = int(here.sum())
        if not n and name != "all":
            continue
        one = int((paired & here).sum())
        share = f"{one / n:.3f}" if n else "-"
        out.add_row(name, f"{n:,}", f"{one:,}", share, f"{int((spans & here & ~paired).sum()):,}")
    return out


def reasons_line(aligned: Alignment) -> Text:
    """Why tokens have no partner, each in the colour that the text uses; the pairs, if all have one."""
    counts = np.bincount(aligned.reason[aligned.reason >= 0], minlength=len(UNALIGNED_REASONS))
    line = Text()
    for name, n in zip(UNALIGNED_REASONS, counts.tolist(), strict=True):
        if n:
            line.append(f" {name} ", style=_STYLES[name]).append(f" {n:,}  ")
    return line if line.plain else Text("every token has a partner of the same bytes")


def coloured(student_ids: Sequence[int], aligned: Alignment, show: Callable[[int], str], limit: int) -> Text:
    """The response with unaligned tokens in the colour of their reason, one bracket pair per token; cut after `limit`
    tokens."""
    out = Text()
    for token, reason in zip(student_ids[:limit], aligned.reason.tolist()[:limit], strict=True):
        piece = printable(show(token))
        if reason < 0:
            out.append(piece)
        else:
            out.append(f"[{piece}]", style=_STYLES[UNALIGNED_REASONS[reason]])
    if len(student_ids) > limit:
        out.append(f"\n... {len(student_ids) - limit:,} more tokens")
    return out

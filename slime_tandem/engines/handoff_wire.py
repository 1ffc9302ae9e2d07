"""How a request carries its authorship rule to the fused engine: a marked suffix of its id. Standard library only.

SGLang gives a model the ids of the requests in a batch and nothing else of the user's (`ForwardBatch.rids`; `custom_params`
arrive only with a logit processor). The suffix comes last, so that aborting by prefix, as SGLang does, still works:
`<any id>~tandem1:<akey, 16 hex digits>:<threshold, hex>:<flags: 1 alternate, 2 junior scores>:<cap, 0: none>:` and then
`<table or ->:<run>:<run length>:<input length>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from slime_tandem.protocol import Handoff

MARK = "~tandem"
REPORT = "tandem"
"""Key of `meta_info` under which the engine reports every output token: [author, author's log-prob, senior's log-prob].

An engine that catches up sends a fourth part with what it decoded: the senior's log-probs of the tokens right before, which
it has just caught up on; the third is null where it has not read the sequence (`senior_log_probs`).
"""
REFUSED = -1
"""Author code of a request whose suffix the engine cannot follow: damaged, of another version, or an unknown table."""

_FORM = re.compile(
    r"1:([0-9a-f]{16}):([0-9a-f]{1,9}):([0-3]):([0-9]{1,10}):(-|[0-9a-f]{16}):([0-9]{1,10}):([0-9]{1,10}):([0-9]{1,10})"
)


def suffix(handoff: Handoff, input_length: int) -> str:
    """What to put behind the id of a request whose input has `input_length` tokens.

    >>> suffix(Handoff(akey=255, threshold=2**31, alternate=False, cap=32, table="", run=2, run_length=1), 7)
    '~tandem1:00000000000000ff:80000000:0:32:-:2:1:7'
    """
    h = handoff
    flags = h.alternate + 2 * h.junior_scores
    rule = f"{h.akey:016x}:{h.threshold:x}:{flags}:{h.cap or 0}:{h.table or '-'}"
    return f"{MARK}1:{rule}:{h.run}:{h.run_length}:{input_length}"


@lru_cache(maxsize=65536)
def parse(rid: str) -> tuple[Handoff, int] | None:
    """(rule, input length) of a request id; None for one without the mark, a plain request of the senior's.

    Raises ValueError for a suffix of another version or form.

    >>> parse("a-1.0.0~tandem1:00000000000000ff:80000000:0:32:-:2:1:7")[0].run, parse("a-1.0.0")
    (2, None)
    """
    _, mark, rest = rid.rpartition(MARK)
    if not mark:
        return None
    match = _FORM.fullmatch(rest)
    if match is None:
        raise ValueError(f"{mark}{rest}: not the form of version 1")
    akey, threshold, flags, cap, table, run, run_length, input_length = match.groups()
    handoff = Handoff(
        akey=int(akey, 16),
        threshold=int(threshold, 16),
        alternate=bool(int(flags) & 1),
        cap=int(cap) or None,
        table="" if table == "-" else table,
        run=int(run),
        run_length=int(run_length),
        junior_scores=bool(int(flags) & 2),
    )
    if handoff.threshold > 2**32 or handoff.run_length > int(input_length):
        raise ValueError(f"{mark}{rest}: a threshold above 2^32, or a run longer than its input")
    return handoff, int(input_length)


def senior_log_probs(entries: Sequence[Sequence[Any]]) -> list[Any]:
    """The senior's log-prob of every reported token, late ones put into their places; None where none has come.

    Raises ValueError for late ones of tokens before the first.

    >>> senior_log_probs([[1, -0.5, -0.5], [0, -1.0, None, []], [0, -2.0, None, []], [1, -0.25, -0.25, [-3.0, -4.0]]])
    [-0.5, -3.0, -4.0, -0.25]
    >>> senior_log_probs([[0, -1.0, -2.0], [0, -1.0, None, []]])
    [-2.0, None]
    """
    values = [entry[2] for entry in entries]
    if max(map(len, entries), default=0) <= 3:  # none came late, as from an engine without catch-up
        return values
    for i, entry in enumerate(entries):
        late = entry[3] if len(entry) > 3 else ()
        if len(late) > i:
            raise ValueError(f"{len(late)} late log-probs at token {i}")
        values[i - len(late) : i] = late
    return values

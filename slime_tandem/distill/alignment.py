"""Byte-exact alignment of teacher tokens to student tokens. Pure.

Strict one-to-one: a student position carries a teacher log-prob only where a teacher token starts and ends at the same
bytes and holds the same bytes. This is the rule that did best in the published comparison (arXiv 2610.08448); everything
else is masked out and counted by reason:
  special       a special token inside the response, or an end of turn that the teacher does not have
  boundary      the two tokenizers cut the text differently here, or the teacher's ids do not spell the text up to here
  invalid_utf8  bytes that are no UTF-8 (a lone fragment, a response cut in mid-character): no tokenizer of text can
                have them; the teacher reads U+FFFD in their place and later tokens still pair up
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slime_tandem.distill.token_bytes import TokenBytes
from slime_tandem.types import AlignedScores, BoolArray, IntArray

UNALIGNED_REASONS = ("special", "boundary", "invalid_utf8")
_REPLACEMENT = "\ufffd"


def readable_text(data: bytes) -> tuple[str, IntArray, BoolArray]:
    """(text, offsets, broken): what a tokenizer of text can be given for `data`, and where each byte went.

    `offsets` [len(data)+1] maps a byte offset of `data` to one of `text.encode()`, -1 inside a broken sequence;
    `broken` [len(data)] marks bytes that are no UTF-8.

    >>> text, offsets, broken = readable_text(b"a\\xe4b")
    >>> text, offsets.tolist(), broken.tolist()
    ('a\ufffdb', [0, 1, 4, 5], [False, True, False])
    """
    offsets = np.full(len(data) + 1, -1, dtype=np.int64)
    broken = np.zeros(len(data), dtype=np.bool_)
    parts: list[str] = []
    i = out = 0
    while True:
        try:
            part, end, stop = data[i:].decode(), len(data), len(data)
        except UnicodeDecodeError as error:
            end, stop = i + error.start, i + error.end
            part = data[i:end].decode()
        offsets[i : end + 1] = np.arange(out, out + end - i + 1)
        parts.append(part)
        out += end - i
        if stop == end:
            return "".join(parts), offsets, broken
        broken[end:stop] = True
        parts.append(_REPLACEMENT)
        out += len(_REPLACEMENT.encode())
        i = stop


def align_strict(
    student_ids: Sequence[int],
    student: TokenBytes,
    teacher_ids: Sequence[int],
    teacher: TokenBytes,
    teacher_log_probs: Sequence[float],
) -> AlignedScores:
    """Teacher log-probs at the student's positions [R].

    `teacher_ids` [Rt] is the teacher's tokenisation of `readable_text(student.join(student_ids))`, plus one of its
    end-of-turn ids if the student ended its turn; `teacher_log_probs` [Rt] belong to it.

    >>> s = TokenBytes((b"a", b"b", b"ab", None), frozenset({3}), frozenset({3}))
    >>> t = TokenBytes((None, b"b", b"a", b"bb"), frozenset({0}), frozenset({0}))
    >>> scores = align_strict([0, 1, 1, 3], s, [2, 3, 0], t, [-0.1, -0.2, -0.3])
    >>> scores.log_probs.tolist(), dict(scores.unaligned)
    ([-0.1, 0.0, 0.0, -0.3], {'special': 0, 'boundary': 2, 'invalid_utf8': 0})
    """
    R = len(student_ids)
    log_probs = np.zeros(R)
    mask = np.zeros(R, dtype=np.bool_)
    scores = np.asarray(teacher_log_probs, dtype=np.float64)
    assert len(scores) == len(teacher_ids)

    s_bytes = [student.of(t) or b"" for t in student_ids]
    s_end = np.cumsum([len(b) for b in s_bytes], dtype=np.int64)
    s_start = s_end - np.array([len(b) for b in s_bytes], dtype=np.int64)
    text, offsets, broken = readable_text(b"".join(s_bytes))

    t_bytes = _spelling(teacher_ids, teacher, text.encode())
    t_end = np.cumsum([len(b) for b in t_bytes], dtype=np.int64)
    t_start = t_end - np.array([len(b) for b in t_bytes], dtype=np.int64)

    has_text = s_end > s_start
    if t_bytes:
        candidate = np.minimum(np.searchsorted(t_start, offsets[s_start]), len(t_bytes) - 1)
        same_span = (t_start[candidate] == offsets[s_start]) & (t_end[candidate] == offsets[s_end]) & has_text
        for i in np.flatnonzero(same_span):
            j = candidate[i]
            if s_bytes[i] == t_bytes[j]:
                mask[i], log_probs[i] = True, scores[j]

    # The end of a turn has a role, not bytes: it pairs with the teacher's own end of turn at the end of the sequence.
    if R and student_ids[-1] in student.eos_ids and teacher_ids and teacher_ids[-1] in teacher.eos_ids:
        mask[-1], log_probs[-1] = True, scores[-1]

    touches_broken = np.array([bool(broken[a:b].any()) for a, b in zip(s_start, s_end, strict=True)], dtype=np.bool_)
    unaligned = {
        "special": int((~mask & ~has_text).sum()),
        "boundary": int((~mask & has_text & ~touches_broken).sum()),
        "invalid_utf8": int((~mask & has_text & touches_broken).sum()),
    }
    return AlignedScores(log_probs, mask, unaligned)


def _spelling(ids: Sequence[int], tokens: TokenBytes, text: bytes) -> list[bytes]:
    """Bytes of the leading ids for as long as they spell `text`: beyond, no position is proven.

    A tokenizer may read "<|im_end|>" in the text as its special token, or change what it is given; later offsets are lost.
    """
    spelt: list[bytes] = []
    at = 0
    for token in ids:
        piece = tokens.of(token)
        if not piece or not text.startswith(piece, at):
            break
        spelt.append(piece)
        at += len(piece)
    return spelt

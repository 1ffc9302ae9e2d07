"""Byte-exact alignment of a teacher's tokens to a student's. Pure, vectorised, linear in the length.

Both token sequences are read as one stream of symbols: a byte of text, or a special token by its role. Tokens pair where both
sides cut the stream at the same two places and nothing in between was changed on the way. What has no partner is masked and
counted by reason:
  special       a special token, or an id without bytes, that nothing of the teacher's stands for
  boundary      the two tokenizers cut the text at other places here
  invalid_utf8  bytes that are no UTF-8 (a lone fragment, a response cut in mid-character): no tokenizer of text can have them;
                the teacher reads U+FFFD in their place and later tokens still pair up
  normalised    characters that the teacher's tokenizer rewrites (NFC) or has no token for
  unproven      the teacher's ids do not spell what they should, so places are unknown here
  thinking      thinking that is kept from this teacher
  inserted      text between turns that nobody sampled

`strict` (one token for one token) is the default: it did best in the published comparison (arXiv 2610.08448). The other
policies also use spans, the shortest stretches that both sides cut out alike with more than one token on a side; each
gives a span's student tokens values from the teacher's log-prob of the whole span, the sum over its tokens:
  even          an equal share each
  proportional  shares in proportion to the student's own log-probs
  chain_rule    the span counts as one action: each of its tokens carries the difference of the whole span
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime_tandem.config import AlignmentPolicy, Thinking
from slime_tandem.distill.reading import INVALID_UTF8, NORMALISED, ReadText, read_text, readable_text
from slime_tandem.distill.special_tokens import SpecialMap, map_special_tokens
from slime_tandem.distill.token_bytes import TokenBytes
from slime_tandem.errors import DataError, explain
from slime_tandem.types import AlignedScores, BoolArray, FloatArray, IntArray

__all__ = ["Aligner", "Alignment", "AlignmentPolicy", "Bridge", "TeacherText", "readable_text"]

UNALIGNED_REASONS = ("special", "boundary", "invalid_utf8", "normalised", "unproven", "thinking", "inserted")
_SPECIAL, _BOUNDARY, _INVALID, _NORMALISED, _UNPROVEN, _THINKING, _INSERTED = range(len(UNALIGNED_REASONS))
_PAIRED = -1

Symbols = npt.NDArray[np.uint16]
Encode = Callable[[str], Sequence[int] | IntArray]


@dataclass(frozen=True)
class Bridge:
    """Teacher ids that stand at student position `at` [0, R] and for no token of the student's: its template between turns.

    `skip` student tokens from `at` on, the student's own text there, are kept from the teacher.
    """

    at: int
    skip: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TeacherText:
    """A response in the teacher's ids.

    `ids` [Rt] to send; `symbols_of` [Rt] the same for the alignment, where a special token that stands for the student's has a
    number of its own; what they should spell (`spelt`), where the student's symbols went in it (`offsets`, None: stayed), which
    changed (`changed`), and why a student token without symbols has none (`silent` [R], else -1).
    """

    ids: tuple[int, ...]
    symbols_of: IntArray
    student_ids: IntArray
    lengths: npt.NDArray[np.int32]
    spelt: Symbols
    offsets: IntArray | None
    changed: IntArray | None
    silent: IntArray


@dataclass(frozen=True)
class Alignment:
    """Which teacher tokens stand for which student tokens.

    `teacher_index` [R]: the one-to-one partner, -1 for none. `span` [R], `teacher_span` [Rt]: number of the proven
    stretch that a token lies in, -1 for none; a pair is a stretch of one token each. `reason` [R]: index into
    UNALIGNED_REASONS of a token without a partner, -1 for one with. `classes` [R]: index into `TEXT_CLASSES` of the
    student's table.
    """

    teacher_index: IntArray
    span: IntArray
    teacher_span: IntArray
    reason: IntArray
    classes: IntArray

    def scores(
        self,
        teacher_log_probs: Sequence[float] | FloatArray,
        policy: AlignmentPolicy = "strict",
        student_log_probs: Sequence[float] | FloatArray | None = None,
    ) -> AlignedScores:
        """Teacher log-probs at the student's positions, from those at its own [Rt], nats.

        `student_log_probs` [R] nats are needed by `proportional` and `chain_rule`. A policy for spans gives every token of a
        proven stretch a value; the sums over a stretch are the teacher's with `even` and `proportional`. Raises DataError
        for another number of log-probs than tokens.
        """
        lt = _floats(teacher_log_probs)
        _check_length("teacher_log_probs", lt, self.teacher_span)
        mask = self.teacher_index >= 0
        values = np.zeros(len(mask))
        values[mask] = lt[self.teacher_index[mask]]
        if policy != "strict":
            inside = (self.span >= 0) & ~mask
            n = int(max(self.span.max(initial=-1), self.teacher_span.max(initial=-1))) + 1
            total = _sums(self.teacher_span, lt, n)
            spans = self.span[inside]
            if policy == "even":
                values[inside] = total[spans] / np.bincount(spans, minlength=n)[spans]
            else:
                if student_log_probs is None:
                    raise DataError(explain("student_log_probs", None, f"one per token for {policy}", "pass them"))
                ls = _floats(student_log_probs)
                _check_length("student_log_probs", ls, self.span)
                own = _sums(self.span, ls, n)
                if policy == "chain_rule":
                    values[inside] = ls[inside] - (own[spans] - total[spans])
                else:
                    count = np.bincount(spans, minlength=n)[spans]
                    # A student that was certain of all its tokens gives no proportions.
                    certain = own[spans] == 0.0
                    share = np.where(certain, 1.0 / count, ls[inside] / np.where(certain, 1.0, own[spans]))
                    values[inside] = total[spans] * share
            mask = mask | inside
        reason = np.where(mask, _PAIRED, self.reason)
        return AlignedScores(
            values,
            mask,
            count_reasons(reason),
            span=self.span,
            classes=self.classes,
            reason=reason,
        )


def _floats(values: Sequence[float] | FloatArray) -> FloatArray:
    """As float64; `array` takes a list in half the time that numpy does."""
    if isinstance(values, np.ndarray):
        return values.astype(np.float64)
    return np.frombuffer(array("d", values), dtype=np.float64)


def count_reasons(reason: IntArray) -> dict[str, int]:
    """How many tokens have no value, by reason; every name of UNALIGNED_REASONS is there.

    >>> {k: n for k, n in count_reasons(np.array([-1, 1, 1, 0])).items() if n}
    {'special': 1, 'boundary': 2}
    """
    counts = np.bincount(reason + 1, minlength=len(UNALIGNED_REASONS) + 1)[1:]
    return dict(zip(UNALIGNED_REASONS, counts.tolist(), strict=True))


def _check_length(name: str, values: FloatArray, like: IntArray) -> None:
    if len(values) != len(like):
        raise DataError(
            explain(name, f"{len(values)} values", f"one for each of the {len(like)} tokens", "pass them all")
        )


def _sums(groups: IntArray, values: FloatArray, n: int) -> FloatArray:
    used = groups >= 0
    return np.bincount(groups[used], values[used], minlength=n).astype(np.float64)


class _Streams:
    """One vocabulary's ids as symbols: `codes` maps an id to the one symbol it is, `texts` to the text it is read as.

    Ids past the table: `unknown` has no symbols, `unknown + 1 + k` is the symbol 256 + k (a special token set by the plan).
    """

    def __init__(self, tokens: TokenBytes, codes: Mapping[int, int], texts: Mapping[int, str], n_codes: int) -> None:
        size = len(tokens.table)
        blob, start, length = tokens.packed
        self.unknown = size
        assert len(blob) < 2**30, "32-bit places"
        data = [blob.astype(np.uint16), np.arange(256, 256 + n_codes, dtype=np.uint16)]
        self.start = np.zeros(size + 1 + n_codes, dtype=np.int32)
        self.length = np.zeros(size + 1 + n_codes, dtype=np.int32)
        self.start[:size], self.length[:size] = start, length
        self.start[size + 1 :] = len(blob) + np.arange(n_codes)
        self.length[size + 1 :] = 1
        for i, code in codes.items():
            if i < size:
                self.start[i], self.length[i] = len(blob) + code - 256, 1
        at = len(blob) + n_codes
        for i, text in texts.items():
            piece = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
            if i < size:
                self.start[i], self.length[i] = at, len(piece)
                data.append(piece)
                at += len(piece)
        self.blob = np.concatenate(data)

    def clip(self, ids: Sequence[int] | IntArray) -> IntArray:
        """Ids as an array; negative ones and those past the table become `unknown`."""
        try:
            out = np.array(ids, dtype=np.int64).reshape(-1)
        except OverflowError:  # ids that no 64 bits hold belong to no vocabulary either
            out = np.array([i if 0 <= i < self.unknown else self.unknown for i in ids], dtype=np.int64)
        if len(out) and (out.min() < 0 or out.max() >= self.unknown):
            out[(out < 0) | (out >= self.unknown)] = self.unknown
        return out

    def read(self, ids: IntArray, length: npt.NDArray[np.int32]) -> Symbols:
        """The stream of `ids`; `length` [n] is theirs, or 0 for those to leave out."""
        ends = np.cumsum(length, dtype=np.int32)
        total = int(ends[-1]) if len(ends) else 0
        index = np.repeat(self.start[ids] - (ends - length), length)
        index += np.arange(total, dtype=np.int32)
        return self.blob.take(index, mode="clip")


class Aligner:
    """Puts responses of one student into the ids of one teacher, and aligns them.

    `end_of_turn` is the teacher's id that closes a turn. `special` shows what becomes of each special token. `same_vocabulary`:
    the two share every id, so that the student's ids are sent as they are (not with `reuse_ids=False`). Make one per pair
    of vocabularies and keep it: it holds their tables (a few megabytes).

    >>> s = TokenBytes((b"a", b"b", b"ab", None), frozenset({3}), frozenset({3}))
    >>> t = TokenBytes((None, b"b", b"a", b"bb"), frozenset({0}), frozenset({0}))
    >>> aligner = Aligner(s, t, end_of_turn=0)
    >>> text = aligner.write([0, 1, 1, 3], lambda text: {"abb": [2, 3]}[text])
    >>> text.ids
    (2, 3, 0)
    >>> aligned = aligner.align(text)
    >>> aligned.teacher_index.tolist(), aligned.span.tolist()
    ([0, -1, -1, 2], [0, 1, 1, 2])
    >>> aligned.scores([-0.1, -0.2, -0.3], "even").log_probs.tolist()
    [-0.1, -0.1, -0.1, -0.3]
    """

    def __init__(
        self,
        student: TokenBytes,
        teacher: TokenBytes,
        *,
        end_of_turn: int,
        thinking: Thinking = "keep",
        reuse_ids: bool = True,
    ) -> None:
        self.student, self.teacher, self.thinking, self.end_of_turn = student, teacher, thinking, end_of_turn
        self.special: SpecialMap = map_special_tokens(student, teacher, end_of_turn, thinking)
        targets = sorted(set(self.special.ids.values()))
        self._targets = targets
        code_of = {target: 256 + k for k, target in enumerate(targets)}
        codes = {i: code_of[target] for i, target in self.special.ids.items()}
        self._from = _Streams(student, codes, self.special.texts, len(targets))
        self._to = _Streams(teacher, {}, {}, len(targets))
        self._think = (set(student.roles.get("think_start", ())), set(student.roles.get("think_end", ())))
        self.same_vocabulary = (
            reuse_ids
            and thinking == "keep"
            and student.fingerprint == teacher.fingerprint
            and student.special == teacher.special
            and student.names == teacher.names
        )

    def write(
        self,
        student_ids: Sequence[int] | IntArray,
        encode: Encode,
        *,
        bridges: Sequence[Bridge] = (),
        inserted: Sequence[tuple[int, int]] = (),
    ) -> TeacherText:
        """The response in the teacher's ids: `encode` plain text (no special tokens), special tokens by the map.

        `bridges`, in order, stand between turns; `inserted` spans `[start, stop)` were not sampled and never pair.
        """
        s = self._from.clip(student_ids)
        length = self._from.length[s]
        silent = np.full(len(s), _PAIRED, dtype=np.int64)
        self._hide_thinking(s, silent)
        for start, stop in inserted:
            silent[start:stop] = _INSERTED
        if self.thinking == "drop" or bridges:
            hidden = silent == _THINKING
            for bridge in bridges:
                hidden[bridge.at : bridge.at + bridge.skip] = True
            length = np.where(hidden, np.int32(0), length)
        silent[(length == 0) & (silent < 0)] = _SPECIAL
        stream = self._from.read(s, length)
        ends = np.cumsum(length)
        # Places of the stream where text is interrupted: special symbols, and bridges (which take no symbol).
        cuts: list[tuple[int, int, tuple[int, ...] | int]] = [
            (int(at), int(at) + 1, int(stream[at]) - 256) for at in np.flatnonzero(stream >= 256)
        ]
        cuts += [(at, at, b.ids) for b in bridges for at in [int(ends[b.at - 1]) if b.at else 0]]
        cuts.sort(key=lambda cut: cut[:2])
        token_at = np.concatenate(([0], ends)) if self.same_vocabulary else None

        ids: list[int] = []
        marks: list[IntArray] = []
        spelt: list[Symbols] = []
        reads: list[tuple[int, int, ReadText]] = []
        at = out = 0
        for start, stop, what in [*cuts, (len(stream), len(stream), ())]:
            if start > at:
                piece: Sequence[int] | IntArray
                if token_at is not None:
                    a, b = np.searchsorted(token_at, (at, start), side="left")
                    piece = [int(i) for i, n in zip(s[a:b], length[a:b], strict=True) if n]
                    read = ReadText("", stream[at:start].astype(np.uint8).tobytes())
                else:
                    read = read_text(stream[at:start].astype(np.uint8).tobytes(), self.teacher)
                    piece = encode(read.text)
                marks.append(self._to.clip(piece))
                ids += piece.tolist() if isinstance(piece, np.ndarray) else piece
                reads.append((at, out, read))
                spelt.append(np.frombuffer(read.spelt, dtype=np.uint8).astype(np.uint16))
                out += len(read.spelt)
            if isinstance(what, int):
                ids.append(self._targets[what])
                marks.append(np.array([self._to.unknown + 1 + what]))
                spelt.append(stream[start:stop])
                out += 1
            else:
                ids += what
                marks.append(np.full(len(what), self._to.unknown))
            at = stop
        offsets, changed = _joint_map(reads, stream, len(stream))
        return TeacherText(
            tuple(ids),
            np.concatenate(marks) if marks else np.zeros(0, dtype=np.int64),
            s,
            length,
            np.concatenate(spelt) if spelt else np.zeros(0, dtype=np.uint16),
            offsets,
            changed,
            silent,
        )

    def _hide_thinking(self, s: IntArray, silent: IntArray) -> None:
        if self.thinking != "drop" or not (self._think[0] or self._think[1]):
            return
        starts = np.flatnonzero(np.isin(s, list(self._think[0])))
        ends = np.flatnonzero(np.isin(s, list(self._think[1])))
        # A prompt can open the thinking already: then the first marker of the response is the one that ends it.
        if len(ends) and (not len(starts) or ends[0] < starts[0]):
            starts = np.concatenate(([0], starts))
        after = np.concatenate((ends + 1, [len(s)]))[np.searchsorted(ends, starts)]
        depth = np.bincount(starts, minlength=len(s) + 1) - np.bincount(after, minlength=len(s) + 1)
        silent[np.cumsum(depth[:-1]) > 0] = _THINKING

    def align(self, text: TeacherText) -> Alignment:
        """Who stands for whom; `text` comes from `write`."""
        t = text.symbols_of
        return _align(
            text.lengths,
            text.spelt,
            text.offsets,
            text.changed,
            text.silent,
            self._to.length[t],
            self._to.read(t, self._to.length[t]),
            self.student.text_classes[text.student_ids],
        )


def _joint_map(
    reads: Sequence[tuple[int, int, ReadText]], stream: Symbols, n: int
) -> tuple[IntArray | None, IntArray | None]:
    """The maps of all pieces of text as one over the whole stream; None where nothing changed anywhere."""
    if all(read.offsets is None for _, _, read in reads):
        return None, None
    width = np.ones(n, dtype=np.int64)
    offsets = np.zeros(n + 1, dtype=np.int64)
    changed = np.zeros(n, dtype=np.int64)
    for start, _, read in reads:
        if read.offsets is not None and read.changed is not None:
            m = len(read.changed)
            width[start : start + m] = 0
            width[start + m - 1] = len(read.spelt)
            changed[start : start + m] = read.changed
    offsets[1:] = np.cumsum(width)
    for start, out, read in reads:
        if read.offsets is not None:
            inner = read.offsets
            offsets[start : start + len(inner)] = np.where(inner >= 0, inner + out, -1)
    return offsets, changed


def _align(
    s_length: npt.NDArray[np.int32],
    spelt: Symbols,
    offsets: IntArray | None,
    changed: IntArray | None,
    silent: IntArray,
    t_length: npt.NDArray[np.int32],
    t_stream: Symbols,
    classes: IntArray,
) -> Alignment:
    """The heart: cut both streams at their common places. `spelt` is what the teacher should spell, `t_stream` what it does."""
    R, n = len(s_length), len(t_stream)
    s_end, t_end = np.cumsum(s_length, dtype=np.int64), np.cumsum(t_length, dtype=np.int64)
    s_seen, t_seen = s_length > 0, t_length > 0
    as_written = len(spelt) == n and np.array_equal(spelt, t_stream)
    if as_written and offsets is None:
        return _align_plain(s_length, s_end, s_seen, silent, t_length, t_end, t_seen, classes)
    touched = np.full(R, _PAIRED, dtype=np.int64)
    end = s_end
    if changed is not None and offsets is not None:
        kinds = np.array([_PAIRED, _INVALID, _NORMALISED])
        assert (INVALID_UTF8, NORMALISED) == (1, 2)
        for kind in (NORMALISED, INVALID_UTF8):
            hits = np.concatenate(([0], np.cumsum(changed == kind)))
            touched[hits[s_end] > hits[s_end - s_length]] = kinds[kind]
        end = offsets[s_end]
    if not as_written:
        end, unproven = _proven(end, s_length, spelt, t_stream, t_end, t_seen)
        touched[unproven & s_seen & (touched < 0)] = _UNPROVEN
    # A touched token has no span; what shares one with it is found out by the widths below, unless it was dropped whole.
    s_in, t_in = s_seen & (touched < 0), t_seen
    assert not (s_in & (end < 0)).any(), "what is neither changed nor unproven has its place"
    # Common cuts: places where tokens of both sides end. A token's last symbol says between which of them it lies.
    t_cut = np.zeros(n + 1, dtype=np.bool_)
    t_cut[t_end[t_in]] = True
    s_cut = np.zeros(n + 1, dtype=np.bool_)
    s_cut[end[s_seen & (end >= 0)]] = True
    rank: IntArray = np.cumsum(s_cut & t_cut, dtype=np.int64)
    spans = int(rank[-1]) + 1
    s_span: IntArray = rank[end[s_in] - 1]
    t_span: IntArray = rank[t_end[t_in] - 1]
    good = np.bincount(s_span, s_length[s_in], minlength=spans) == np.bincount(t_span, t_length[t_in], minlength=spans)
    span, teacher_span = np.full(R, -1, dtype=np.int64), np.full(len(t_length), -1, dtype=np.int64)
    span[s_in] = np.where(good[s_span], s_span, -1)
    teacher_span[t_in] = np.where(good[t_span], t_span, -1)
    return _pair_up(span, teacher_span, spans, silent, touched, classes)


def _align_plain(
    s_length: npt.NDArray[np.int32],
    s_end: IntArray,
    s_seen: BoolArray,
    silent: IntArray,
    t_length: npt.NDArray[np.int32],
    t_end: IntArray,
    t_seen: BoolArray,
    classes: IntArray,
) -> Alignment:
    """The same where both spell the same stream: each common cut ends one token of either side, and counting them is enough."""
    n = int(s_end[-1]) if len(s_end) else 0
    t_cut, s_cut = np.zeros(n + 1, dtype=np.bool_), np.zeros(n + 1, dtype=np.bool_)
    t_cut[t_end], s_cut[s_end] = True, True
    s_common, t_common = t_cut[s_end] & s_seen, s_cut[t_end] & t_seen
    spans = int(np.count_nonzero(s_common))
    span: IntArray = np.where(s_seen, np.cumsum(s_common, dtype=np.int64) - s_common, -1)
    teacher_span: IntArray = np.where(t_seen, np.cumsum(t_common, dtype=np.int64) - t_common, -1)
    return _pair_up(span, teacher_span, spans, silent, None, classes)


def _pair_up(
    span: IntArray, teacher_span: IntArray, spans: int, silent: IntArray, touched: IntArray | None, classes: IntArray
) -> Alignment:
    """Partners where a span has one token on each side; reasons for the others."""
    out_of_it = silent >= 0
    if out_of_it.any():
        # Inserted text has its place in the stream, but nobody sampled it: what shares a stretch with it has no value of
        # its own.
        spoilt = np.zeros(spans + 1, dtype=np.bool_)
        spoilt[span[out_of_it] + 1] = True
        spoilt[0] = False
        span = np.where(spoilt[span + 1], -1, span)
        teacher_span = np.where(spoilt[teacher_span + 1], -1, teacher_span)
    # Entry 0 counts and answers for tokens without a span.
    s_count = np.bincount(span + 1, minlength=spans + 1)
    t_count = np.bincount(teacher_span + 1, minlength=spans + 1)
    partner = np.zeros(spans + 1, dtype=np.int64)
    partner[teacher_span + 1] = np.arange(len(teacher_span))
    partner[(s_count != 1) | (t_count != 1)] = -1
    partner[0] = -1
    teacher_index = partner[span + 1]
    reason = np.where(out_of_it, silent, _BOUNDARY if touched is None else np.where(touched >= 0, touched, _BOUNDARY))
    reason[teacher_index >= 0] = _PAIRED
    return Alignment(teacher_index, span, teacher_span, reason, classes)


def _proven(
    end: IntArray,
    s_length: npt.NDArray[np.int32],
    spelt: Symbols,
    t_stream: Symbols,
    t_end: IntArray,
    t_seen: BoolArray,
) -> tuple[IntArray, BoolArray]:
    """(ends in the teacher's stream, unproven [R]) where the teacher spells something else than it should.

    What both streams share at their beginning is proven, and what they share at their end; an id without bytes (the tokenizer
    read text as its special token) hides an unknown stretch, so nothing counts behind the first and before the last of them.
    Where the two could overlap, the place of a byte is not certain, and neither counts.
    """
    m, n = len(spelt), len(t_stream)
    short = min(m, n)
    differs = np.flatnonzero(spelt[:short] != t_stream[:short])
    head = int(differs[0]) if len(differs) else short
    differs = np.flatnonzero(spelt[m - short :][::-1] != t_stream[n - short :][::-1])
    tail = int(differs[0]) if len(differs) else short
    blind = np.flatnonzero(~t_seen)
    if len(blind):
        head = min(head, int(t_end[blind[0]]))
        tail = min(tail, n - int(t_end[blind[-1]]))
    if head + tail > short:
        head, tail = max(short - tail, 0), max(short - head, 0)
    in_head, in_tail = (end >= 0) & (end <= head), (end >= 0) & (end >= m - tail)
    mapped = np.where(in_head, end, np.where(in_tail, end - m + n, -1))
    # A token is proven if it lies in one of the two as a whole: in the tail, from m - tail on.
    return mapped, ~(in_head | (in_tail & (end - s_length >= m - tail)))

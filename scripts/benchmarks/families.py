"""Model families as students and teachers of each other: what is found out of each, and what a teacher is sent.

    python scripts/fetch_vocabularies.py
    python scripts/benchmarks/families.py facts | pairs | native [--small]

Vocabularies are the published ones where PyPI packages ship them (scripts/vocabularies.py), else small ones made on the spot
(`--small`: all of them); templates are our own wording of each family's published behaviour (scripts/families.py). No model.

`pairs`: over five conversations (one turn, cut, two turns of a user, a tool between turns, thinking), as far as both templates
have their roles: the share of sampled tokens with a value, and of sampled ends of turn. "before" takes the end of turn from
`eos_token` and the prompt from the generation prompt, as up to commit 6555b00. `native`: of how many students the teacher is
sent, byte for byte, what its own template writes of the same messages.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import families
from families import FAMILIES, Conversation, Said, native, sample_of, spelt

from slime_tandem.distill.alignment import Aligner, Alignment, Bridge, TeacherText
from slime_tandem.distill.teacher import Teacher
from slime_tandem.errors import TandemError
from slime_tandem.models.chat import Chat
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.types import Message, TandemSample

ASK = (Message("user", "What is 12 + 345? Think of the tens first, then say it in a sentence."),)
ANSWER = "The answer is 357, since 12 + 345 = 357.\n\nChecked: 357 - 345 = 12."
CONVERSATIONS = {
    "one turn": Conversation(ASK, (Said(ANSWER),)),
    "cut": Conversation(ASK, (Said(ANSWER[:40]),), ended=False),
    "asked again": Conversation(ASK, (Said("Let me see."), Said(ANSWER)), ((Message("user", "And then?"),),)),
    "tool": Conversation(ASK, (Said("Let me see: 12 + 345 ="), Said(ANSWER)), ((Message("tool", "12 + 345 = 357"),),)),
    "thinking": Conversation(ASK, (Said(ANSWER, "12 + 345 is 300 + 57, so 357."),)),
}

Loaded = dict[str, tuple[ModelTokenizer, Chat]]


def load_all(root: Path, *, small: bool) -> Loaded:
    out = {}
    for name, family in FAMILIES.items():
        backend = None if small or (root / name / "tokenizer.json").exists() else families.real_backend(family)
        out[name] = families.load(name, root, backend)
        print(f"{name}: {len(out[name][0].tokens.table):,} ids", file=sys.stderr, flush=True)
    return out


def facts(loaded: Loaded, *, small: bool) -> None:
    columns = (
        "family",
        "vocabulary",
        "ids",
        "added as text",
        "masked",
        "begin of a turn",
        "closed by",
        "ids that may end it",
        "thinking from",
        "to",
        "shows",
    )
    print("| " + " | ".join((*columns, "text, lead")) + " |")
    print("|" + "---|" * (len(columns) + 1))
    for name, (tokenizer, chat) in loaded.items():
        t = chat.turns
        source = FAMILIES[name].real if not small and FAMILIES[name].real else "made here"
        opening = closing_mark = "-"
        if t.marks:
            kept = "kept" if t.keeps_earlier else "last turn's kept" if t.keeps_thinking else "dropped"
            opening = code(t.marks[0]) + (", by the prompt" if t.opens_thinking else "")
            closing_mark = f"{code(t.marks[1])}, {kept}"
        elif chat.marks:
            opening = closing_mark = "tokens, unknown to it"
        ends = ", ".join(code(tokenizer.hf.convert_ids_to_tokens(i)) for i in sorted(chat.ends))
        more = [*(("tools",) if t.tools else ()), *(("calls",) if t.tool_calls else ())]
        roles = ", ".join([r for r in t.roles if r not in ("user", "assistant")] + more) or "-"
        text = {"no": "as it is", "both": "trimmed"}.get(t.trims, f"trimmed at its {t.trims}")
        lead = f", {code(chat.lead)}" if chat.lead else ""
        closing = code(t.closing) if t.closing else t.closed_by
        begin = code(t.header + t.answer) if t.header + t.answer else "-"
        tokens, added = tokenizer.tokens, tokenizer.hf.added_tokens_decoder.values()
        row = [name, source, f"{len(tokens.table):,}", f"{sum(not token.special for token in added)}"]
        row += [f"{len(tokens.disproved)}", begin, closing, ends, opening, closing_mark, roles, text + lead]
        print(f"| {' | '.join(row)} |")


def code(text: str) -> str:
    return "`" + text.replace("\n", "\\n").replace("|", "\\|") + "`"


def teacher_of(loaded: Loaded, student: str, teacher: str) -> Teacher:
    return Teacher.by_template(None, loaded[student][1], loaded[teacher][1], name=teacher)  # type: ignore[arg-type]


class Before:
    """The way before: the end of turn from `eos_token`, the prompt of generation, a made-up turn in front of a bridge."""

    def __init__(self, loaded: Loaded, student: str, teacher: str) -> None:
        (s, _), (t, self.chat) = loaded[student], loaded[teacher]
        eos = t.hf.eos_token_id
        self.end = eos if eos in t.tokens.eos_ids else min(t.tokens.eos_ids)
        self.ends = self.chat.ends
        self.aligner, self.student = Aligner(s.tokens, t.tokens, end_of_turn=self.end), s

    def conversation(self, sample: TandemSample) -> tuple[tuple[int, ...], TeacherText]:
        bridges = []
        for (start, stop), messages in zip(sample.inserted, sample.inserted_messages, strict=True):
            ids = tuple(self.chat.bridge(messages))
            ended = start > 0 and sample.response_ids[start - 1] in self.student.tokens.eos_ids
            if ended and ids[:1] == (self.end,):
                ids = ids[1:]
            bridges.append(Bridge(start, stop - start, ids))
        text = self.aligner.write(sample.response_ids, self.chat.encode, bridges=bridges, inserted=sample.inserted)
        return tuple(self.chat.render(sample.prompt.messages)), text

    def align(self, text: TeacherText) -> Alignment:
        return self.aligner.align(text)


def scored(loaded: Loaded, student: str, told: Conversation, one: Any) -> tuple[int, int, int, int, bytes] | None:
    """(tokens with a value, sampled tokens, ends with the value of a right one, sampled ends, text sent).

    None: one of the two templates has no such roles.
    """
    try:
        sample = sample_of(*loaded[student], told)
        prompt, text = one.conversation(sample)
    except TandemError:
        return None
    aligned = one.aligner.align(text)
    paired, sampled = aligned.teacher_index >= 0, [m == 1 for m in sample.loss_mask]
    eos = loaded[student][0].tokens.eos_ids
    ends = [i for i, token in enumerate(sample.response_ids) if sampled[i] and token in eos]
    sent = spelt(one.aligner.teacher, [*prompt, *text.ids])
    known = one.ends if isinstance(one, Before) else one.template.markup.ends
    right = sum(bool(paired[i]) and text.ids[int(aligned.teacher_index[i])] in known for i in ends)
    return int(paired[sampled].sum()), sum(sampled), right, len(ends), sent


def cells(loaded: Loaded, student: str, teacher: str) -> Iterator[tuple[float, float]]:
    """(coverage, coverage of ends), before and after."""
    for one in (Before(loaded, student, teacher), teacher_of(loaded, student, teacher)):
        found = [r for told in CONVERSATIONS.values() if (r := scored(loaded, student, told, one)) is not None]
        values, tokens, ended, ends = (sum(r[k] for r in found) for k in range(4))
        yield values / tokens, ended / ends


def pairs(loaded: Loaded) -> None:
    names = list(loaded)
    numbered = {(s, t): list(cells(loaded, s, t)) for s in names for t in names}
    for k, what in ((0, "coverage"), (1, "ends of turn with the value of a token that the template writes there")):
        print(f"\n{what}, after (before where it was another); columns are teachers\n")
        print("| student | " + " | ".join(names) + " |")
        print("|---|" + "---|" * len(names))
        for s in names:
            row = []
            for t in names:
                before, after = (f"{values[k]:.2f}" for values in numbered[s, t])
                row.append(after if before == after else f"{after} ({before})")
            print(f"| {s} | " + " | ".join(row) + " |")


def natives(loaded: Loaded) -> None:
    print("| teacher | " + " | ".join(CONVERSATIONS) + " | doubled ends |")
    print("|---|" + "---|" * (len(CONVERSATIONS) + 1))
    for t, (tokenizer, chat) in loaded.items():
        counts = {name: [0, 0, 0] for name in CONVERSATIONS}
        doubled, end = [0, 0], spelt(tokenizer.tokens, [chat.end_of_turn])
        ends = [tokenizer.tokens.names[i].encode() for i in sorted(tokenizer.tokens.eos_ids)]
        for s in loaded:
            if s == t:
                continue
            for k, one in enumerate((teacher_of(loaded, s, t), Before(loaded, s, t))):
                for name, told in CONVERSATIONS.items():
                    found = scored(loaded, s, told, one)
                    if found is None:
                        continue
                    sent = found[4]
                    doubled[k] += sum(sent.count(a + b) for a in ends for b in ends)
                    if chat.turns.closed_by == "the next role" and told.ended:
                        sent = sent.removesuffix(end)
                    counts[name][k] += native(chat, told).startswith(sent)
                    counts[name][2] += k == 0
        row = [f"{after} of {n} ({before})" if n else "not shown" for after, before, n in counts.values()]
        print(f"| {t} | " + " | ".join(row) + f" | {doubled[0]} ({doubled[1]}) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["facts", "pairs", "native"])
    parser.add_argument("--small", action="store_true", help="small vocabularies for all families")
    parser.add_argument("--root", type=Path, help="folder to keep the tokenizers in (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.root or Path(temporary)
        loaded = load_all(root, small=args.small)
        if args.command == "facts":
            facts(loaded, small=args.small)
        elif args.command == "pairs":
            pairs(loaded)
        else:
            natives(loaded)


if __name__ == "__main__":
    main()

"""Model families as students and teachers of each other: what is found out of each, and what a teacher is sent.

    python scripts/fetch_vocabularies.py
    python scripts/benchmarks/families.py facts | pairs | native | tables [--before] [--small]
    python scripts/benchmarks/families.py run

Vocabularies are the published ones where PyPI packages ship them (scripts/vocabularies.py), else small ones made on the spot
(`--small`: all of them); templates are our own wording of each family's published behaviour (scripts/families.py). No model.

`facts`: also how many ids stand as text among the added tokens, and how many are masked since the decoder writes otherwise.
`pairs`: over five conversations (one turn, cut, two turns of a user, a tool between turns, thinking), as far as both templates
have their roles: the share of sampled tokens with a value, and of sampled ends of turn. `--before` takes the end of turn from
`eos_token` and the prompt from the generation prompt, as up to commit 6555b00. `native`: of how many students the teacher is
sent, byte for byte, what its own template writes of the same messages; also with a system message, and with tools in it.
`tables`: all three.

`run`: a job end to end with real servers: a GLM-like student, whose turns the next role ends, and a Gemma-like teacher, whose
eos_token its template never writes (tiny random models that like to end their turns, two turns a response). It prints what the
job measured, and counts in all texts that were sent to the teacher.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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
_CALL = {"type": "function", "id": "call00001", "function": {"name": "sum", "arguments": {"x": "12"}}}
_TOOL = {"name": "sum", "description": "adds", "parameters": {"type": "object", "properties": {}}}
_CALLED = (
    *ASK,
    Message("assistant", "", {"tool_calls": [_CALL]}),
    Message("tool", "357", {"tool_call_id": "call00001", "name": "sum"}),
)
PROMPTS = {
    "system": Conversation((Message("system", "Be brief."), *ASK), (Said(ANSWER),)),
    "tools": Conversation(_CALLED, (Said(ANSWER),), tools=({"type": "function", "function": _TOOL},)),
}
"""What `native` asks beside: a system message, and a prompt with tools, a call and its result."""

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
        shown = [r for r in t.roles if r not in ("user", "assistant")]
        shown = ["tool behind a call" if r == "tool" and t.tool_after_call else r for r in shown]
        roles = ", ".join(shown + more) or "-"
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


@dataclass(frozen=True)
class Found:
    """Of a conversation: tokens with a value, sampled ones; ends with the value of a right one, sampled ones; the text sent."""

    values: int
    tokens: int
    right: int
    ends: int
    sent: bytes


Measured = dict[tuple[str, str], list[dict[str, Found]]]
"""(student, teacher) -> after, and before if that was asked for: by conversation that both templates have."""


def measure(loaded: Loaded, *, before: bool) -> Measured:
    """All pairs over all conversations; each pair's tables are made once."""
    told = {**CONVERSATIONS, **PROMPTS}
    samples: dict[str, dict[str, TandemSample]] = {name: {} for name in loaded}
    for name, (tokenizer, chat) in loaded.items():
        for kind, conversation in told.items():
            with contextlib.suppress(TandemError):  # its template has no such messages
                samples[name][kind] = sample_of(tokenizer, chat, conversation)
    out: Measured = {}
    for t in loaded:
        for s in loaded:
            ways = [teacher_of(loaded, s, t), *([Before(loaded, s, t)] if before else [])]
            out[s, t] = [
                {kind: f for kind, sample in samples[s].items() if (f := found(loaded, s, sample, way))} for way in ways
            ]
        print(f"{t} as teacher", file=sys.stderr, flush=True)
    return out


def found(loaded: Loaded, student: str, sample: TandemSample, one: Any) -> Found | None:
    """None: the teacher's template has no such messages."""
    try:
        prompt, text = one.conversation(sample)
    except TandemError:
        return None
    aligned = one.aligner.align(text)
    paired, sampled = aligned.teacher_index >= 0, [m == 1 for m in sample.loss_mask]
    eos = loaded[student][0].tokens.eos_ids
    ends = [i for i, token in enumerate(sample.response_ids) if sampled[i] and token in eos]
    known = one.ends if isinstance(one, Before) else one.template.markup.ends
    right = sum(bool(paired[i]) and text.ids[int(aligned.teacher_index[i])] in known for i in ends)
    sent = spelt(one.aligner.teacher, [*prompt, *text.ids])
    return Found(int(paired[sampled].sum()), sum(sampled), right, len(ends), sent)


def shares(results: dict[str, Found]) -> tuple[str, str]:
    """Coverage, and coverage of ends, over the conversations."""
    some = [f for kind, f in results.items() if kind in CONVERSATIONS]
    values, tokens, right, ends = (sum(getattr(f, n) for f in some) for n in ("values", "tokens", "right", "ends"))
    return f"{values / tokens:.2f}", f"{right / ends:.2f}"


def pairs(loaded: Loaded, measured: Measured) -> None:
    names = list(loaded)
    for k, what in ((0, "coverage"), (1, "ends of turn with the value of a token that the template writes there")):
        print(f"\n{what}; columns are teachers (in brackets: before, where it was another)\n")
        print("| student | " + " | ".join(names) + " |")
        print("|---|" + "---|" * len(names))
        for s in names:
            row = []
            for t in names:
                after, *before = (shares(results)[k] for results in measured[s, t])
                row.append(f"{after} ({before[0]})" if before and before[0] != after else after)
            print(f"| {s} | " + " | ".join(row) + " |")


def natives(loaded: Loaded, measured: Measured) -> None:
    conversations = {**CONVERSATIONS, **PROMPTS}
    print("\n| teacher | " + " | ".join(conversations) + " | doubled ends |")
    print("|---|" + "---|" * (len(conversations) + 1))
    for t, (tokenizer, chat) in loaded.items():
        end = spelt(tokenizer.tokens, [chat.end_of_turn])
        ends = [tokenizer.tokens.names[i].encode() for i in sorted(tokenizer.tokens.eos_ids)]
        ways = [
            [results[k] for (s, other), results in measured.items() if other == t != s]
            for k in range(len(measured[t, t]))
        ]
        row = []
        for kind, told in conversations.items():
            counts = [_written(chat, told, end, [r[kind].sent for r in way if kind in r]) for way in ways]
            n = sum(kind in results for results in ways[0])
            row.append(f"{counts[0]} of {n}{''.join(f' ({c})' for c in counts[1:])}" if n else "not shown")
        doubled = [
            sum(f.sent.count(a + b) for r in way for f in r.values() for a in ends for b in ends) for way in ways
        ]
        print(f"| {t} | {' | '.join(row)} | {doubled[0]}{''.join(f' ({d})' for d in doubled[1:])} |", flush=True)


def _written(chat: Chat, told: Conversation, end: bytes, sent: Sequence[bytes]) -> int:
    """How many of these texts are what the template writes, up to the end of the last turn."""
    if not sent:
        return 0
    closed = chat.turns.closed_by == "the next role" and told.ended
    whole = native(chat, told)
    return sum(whole.startswith(text.removesuffix(end) if closed else text) for text in sent)


ENVIRONMENT = """from slime_tandem.types import Message


def asks_again(prompt, chat):
    return [Message("user", "And then? <end_of_turn>")]
"""


def run(root: Path) -> None:
    """One job, and its teacher's requests looked at."""
    from slime_tandem.config import RunConfig
    from slime_tandem.distill.panel import TeacherPanel
    from slime_tandem.local.run import train

    student = families.make_model("glm4", root, seed=1, kind="qwen3")
    teacher = families.make_model("gemma3", root, seed=2, kind="llama")
    (root / "asks_again.py").write_text(ENVIRONMENT, encoding="utf-8")
    sys.path.insert(0, str(root))
    sent: list[list[int]] = []
    score = TeacherPanel.score

    async def watched(self: TeacherPanel, samples: Any, *args: Any, **more: Any) -> Any:
        sent.extend(list(one._plan(s, self.scoring).request.input_ids) for one in self.teachers for s in samples)
        return await score(self, samples, *args, **more)

    TeacherPanel.score = watched  # type: ignore[method-assign]
    tree = {
        "name": "gemma-teaches-glm",
        "runs_dir": str(root / "runs"),
        "models": {"senior": str(student), "teacher": str(teacher)},
        "engine": {"cache_tokens": 8192},
        "tandem": {"enabled": False},
        "opd": {"enabled": True},
        "control": False,
        "eval": {"prompts": 1, "tandem": False},
        "sampling": {"max_new_tokens": 60},
        "train": {"steps": 5, "prompts_per_step": 4, "samples_per_prompt": 4, "threads": 1},
        "tasks": [{"family": "chain_sum", "environment": "asks_again:asks_again"}],
    }
    train(RunConfig.from_mapping(tree))
    tokens = ModelTokenizer.load(teacher)
    end, eos, begin = (tokens.hf.convert_tokens_to_ids(t) for t in ("<end_of_turn>", "<eos>", "<start_of_turn>"))
    rows = (root / "runs" / "gemma-teaches-glm" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    names = ("opd/eos_coverage", "opd/coverage", "opd/failed_samples", "opd/unread_roles")
    print(f"\n| step | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for row in map(json.loads, rows):
        print(f"| {row['step']} | {' | '.join(f'{row[name]:.3f}' for name in names)} |")
    doubled = sum(pair == (end, end) for ids in sent for pair in itertools.pairwise(ids))
    unlike = sum(ids.count(end) not in (ids.count(begin) - 1, ids.count(begin)) for ids in sent)
    turns, ends, foreign = (sum(ids.count(token) for ids in sent) for token in (begin, end, eos))
    print(f"\n{len(sent)} texts sent, {turns} turns in them, {ends} ends of turn, {doubled} of them doubled; {foreign} <eos>; "
          f"{unlike} texts with another number of ends than of closed turns")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["facts", "pairs", "native", "tables", "run"])
    parser.add_argument("--small", action="store_true", help="small vocabularies for all families")
    parser.add_argument("--before", action="store_true", help="also the way before, in brackets")
    parser.add_argument("--root", type=Path, help="folder to keep the tokenizers in (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.root or Path(temporary)
        if args.command == "run":
            run(root)
            return
        loaded = load_all(root, small=args.small)
        if args.command in ("facts", "tables"):
            facts(loaded, small=args.small)
        if args.command != "facts":
            measured = measure(loaded, before=args.before)
            if args.command != "native":
                pairs(loaded, measured)
            if args.command != "pairs":
                natives(loaded, measured)


if __name__ == "__main__":
    main()

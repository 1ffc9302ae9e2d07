"""One teacher scores what the policy sampled: render, ask the engine, align to the student's positions.

The teacher reads the raw messages through its own chat template and the response in its own ids (`alignment.Aligner.write`);
its log-probs are those of its full distribution at `temperature`, 1 (SGLang scores inputs that way, slime #2085, #2319) or the
rollout's. An answer
that is short, missing a value or not finite fails that sample with a reason; the caller decides what a failed sample means.
It does not know other teachers (`panel.py`), nor which tokens are trained on (`opd_mask.py`).
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from slime_tandem.config import AlignmentPolicy, Support, Thinking
from slime_tandem.distill.alignment import Aligner, Alignment, TeacherText, as_floats
from slime_tandem.distill.candidates import (
    ExactQuery,
    SameTokens,
    ask_each,
    exact_log_probs,
    gather_candidates,
    gather_deep,
    gather_lists,
    missing_on,
    require_whole,
    top_of,
)
from slime_tandem.distill.conversation import aligner_of, header_only, markup_of, plan, turns_of
from slime_tandem.errors import (
    DataError,
    EngineError,
    ModelError,
    TeacherScoreError,
    UnreadRolesError,
    UnreadTemplateError,
    UnreadToolsError,
)
from slime_tandem.protocol import CandidateLists, Engine, GenerateRequest, GenerateResult, same_ids
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.turns import Frame, Markup, Turns
from slime_tandem.types import AlignedScores, FloatArray, IntArray, Message, Prompt, SampleKey, TandemSample

StudentTop = CandidateLists | Sequence[Mapping[int, float]]
"""A student's top-K at each response position [R], nats: as arrays, or as {id: log-prob}."""
_NONE = CandidateLists.of(())
_READING = ThreadPoolExecutor(1, "teacher-reads")
"""One thread for all teachers: a tokenizer is used by one at a time."""


@dataclass(frozen=True)
class Scoring:
    """What is asked of teachers.

    `policy`: values for tokens without a one-to-one partner. `top_k`: candidates per position (0: none), from the lists of
    `support`. `lists`: length of both sides' lists, by which tokens are selected (0: none); `cross`: with each side's
    values of the other's entries: exact ones, or with `depth` those of lists of so many entries, and bounds beyond them.
    """

    policy: AlignmentPolicy = "strict"
    top_k: int = 0
    support: Support = "teacher"
    lists: int = 0
    cross: bool = True
    depth: int = 0

    @property
    def of_student(self) -> int:
        """Length of the student's lists, 0 where it need not be asked."""
        return max(self._asked, 0 if self.support == "teacher" else self.top_k)

    @property
    def widest(self) -> int:
        """Length of the teacher's lists that serves both purposes."""
        return max(self._asked, self.top_k)

    @property
    def deep(self) -> bool:
        """Whether cross-scores come from longer lists, and are bounds beyond them."""
        return bool(self.lists and self.cross and self.depth)

    @property
    def _asked(self) -> int:
        return max(self.lists, self.depth) if self.deep else self.lists


class ChatTemplate(Protocol):
    """A model's own chat template in its ids; `models.chat.Chat` is one."""

    @property
    def tokens(self) -> TokenBytes:
        """The bytes of every id."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special token among them."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """The same, with markers of thinking and tools that are tokens like any other as text, too."""
        ...

    @property
    def turns(self) -> Turns:
        """What it writes and shows."""
        ...

    @property
    def markup(self) -> Markup:
        """The same in ids."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Prompt ids; raises ModelError where it refuses the messages."""
        ...

    def bridge(self, messages: Sequence[Message]) -> list[int]:
        """Ids from the end of one assistant turn over these messages to the begin of the next."""
        ...

    def frame(
        self,
        messages: Sequence[Message],
        between: Sequence[Sequence[Message]],
        thinks: Sequence[bool],
        tools: Sequence[Any] | None,
    ) -> Frame:
        """What stands around a response of `len(thinks)` turns; raises ModelError where it refuses the messages."""
        ...


@dataclass(frozen=True, eq=False)
class Teacher:
    """A scorer with a tokenizer of its own.

    `aligner` knows the student's vocabulary and this one's. `render(messages)` gives the prompt ids of its chat template
    with the generation prompt; `encode(text)` the ids of plain text without special tokens; `bridge(messages)` the ids
    that its template puts from the end of one assistant turn over these messages to the begin of the next (None: messages
    between turns are read as the student's text). `template` is asked in the place of both where it is known; `student`
    says what the student's own template writes around its turns. `max_batch` sequences travel per HTTP request,
    `concurrency` requests at once; `max_tokens` prompt and response tokens that the engine takes together, None if that is
    not known; `temperature` of its distribution. `tasks`: the task tags that it is for, None for all that no other teacher
    names; `weight` among several teachers of one sample.
    """

    engine: Engine
    aligner: Aligner
    render: Callable[[Sequence[Message]], list[int]]
    encode: Callable[[str], list[int]]
    bridge: Callable[[Sequence[Message]], list[int]] | None = None
    template: ChatTemplate | None = None
    student: Markup | None = None
    name: str = "teacher"
    tasks: frozenset[str] | None = None
    weight: float = 1.0
    max_batch: int = 128
    concurrency: int = 4
    max_tokens: int | None = None
    temperature: float = 1.0

    @classmethod
    def by_template(
        cls, engine: Engine, student: ChatTemplate, template: ChatTemplate, thinking: Thinking = "keep", **options: Any
    ) -> Teacher:
        """A teacher that reads conversations as its own template writes them; `options` are further fields."""
        return cls(
            engine,
            aligner_of(student.tokens, template.tokens, template.markup, thinking),
            template.render,
            template.encode_plain if thinking == "text" else template.encode,
            template.bridge,
            template,
            student.markup,
            **options,
        )

    @cached_property
    def same_tokens(self) -> SameTokens:
        """Same tokens of the two vocabularies."""
        return SameTokens(self.aligner)

    async def score(
        self,
        samples: Sequence[TandemSample],
        scoring: Scoring = Scoring(),
        student_top: Sequence[StudentTop] | None = None,
        senior: Engine | None = None,
    ) -> list[AlignedScores | TeacherScoreError]:
        """One entry per sample, in order: aligned scores, or why there are none.

        `student_top` per sample is needed where `scoring.of_student` is not 0, the `senior` for cross-scores. A sample longer
        than `max_tokens` is not sent: the engine would refuse the whole batch for it. Raises EngineError kinds only when the
        engine itself cannot be reached or refuses the request.
        """
        if scoring.of_student and student_top is None:
            expected = f"lists for support {scoring.support!r} or a selection"
            raise DataError("student_top", None, expected, "ask the student")
        # Tokenizers release the interpreter's lock: meanwhile the loop follows other responses.
        plans, out = await asyncio.get_running_loop().run_in_executor(_READING, self._plans, samples, scoring)
        if self._along and not scoring.widest:
            for i, plan in plans.items():
                if (before := self._along.pop(samples[i].key, None)) is not None:
                    async with before.lock:  # a part under way
                        plans[i] = before.rest_of(plan)
        sent = [i for i in plans if i not in out]
        gate = asyncio.Semaphore(self.concurrency)

        async def ask(part: Sequence[int]) -> list[GenerateResult | TeacherScoreError]:
            async with gate:
                return await ask_each(self.engine, [plans[i].request for i in part])

        parts = [sent[at : at + self.max_batch] for at in range(0, len(sent), self.max_batch)]
        answers = await asyncio.gather(*(ask(part) for part in parts))
        views: dict[int, _View] = {}
        for i, result in zip(sent, (r for rs in answers for r in rs), strict=True):
            try:
                if isinstance(result, TeacherScoreError):
                    raise result
                top = student_top[i] if student_top is not None else None
                views[i] = self._read(samples[i], plans[i], result, scoring, top)
            except TeacherScoreError as error:
                out[i] = error
        asked = sorted(views)
        for i, scores in zip(asked, await self._compare([views[i] for i in asked], scoring, senior), strict=True):
            out[i] = scores
        return [out[i] for i in range(len(samples))]

    @cached_property
    def _along(self) -> dict[SampleKey, _Read]:
        """What was scored of responses that are still written."""
        return {}

    async def read_along(self, part: TandemSample) -> None:
        """Score what is there of a response that is still written, so that `score` asks for the rest alone.

        The ids of its last words may change with what follows; what was scored counts as far as they are the same. Any failure
        is left to `score`, which then asks for all.
        """
        before = self._along.setdefault(part.key, _Read())
        while len(self._along) > _MOST_READ:  # responses that were given up
            self._along.pop(next(iter(self._along)))
        async with before.lock:
            plans, failed = await asyncio.get_running_loop().run_in_executor(_READING, self._plans, [part], Scoring())
            if failed:
                return
            before.parts += 1
            plan = before.rest_of(plans[0])
            request = replace(plan.request, rid=f"{plan.request.rid}-{before.parts}")
            try:
                (result,) = await ask_each(self.engine, [request])
                if isinstance(result, TeacherScoreError):
                    return
                values = response_log_probs(result, plan.text.ids[len(plan.known) :], self.name)
            except (EngineError, TeacherScoreError):
                return
            before.ids, before.log_probs = plan.request.input_ids, np.concatenate((plan.known, values))

    def _plans(
        self, samples: Sequence[TandemSample], scoring: Scoring
    ) -> tuple[dict[int, _Plan], dict[int, AlignedScores | TeacherScoreError]]:
        plans: dict[int, _Plan] = {}
        out: dict[int, AlignedScores | TeacherScoreError] = {}
        for i, sample in enumerate(samples):
            try:
                plans[i] = self._plan(sample, scoring)
            except TeacherScoreError as error:
                out[i] = error
                continue
            if (too_long := self._too_long(plans[i].request)) is not None:
                out[i] = too_long
        return plans, out

    def _read(
        self,
        sample: TandemSample,
        plan: _Plan,
        result: GenerateResult,
        scoring: Scoring,
        student_top: StudentTop | None,
    ) -> _View:
        rest = response_log_probs(result, plan.text.ids[len(plan.known) :], self.name)
        log_probs = np.concatenate((plan.known, rest))
        aligned = self.aligner.align(plan.text)
        scores = aligned.scores(log_probs, scoring.policy, sample.log_probs)
        known = top_of(result, len(plan.text.ids), self.name) if scoring.widest else _NONE
        student = CandidateLists.of(student_top or ())
        if scoring.lists:
            require_whole(known, scoring.lists, self.name)
            require_whole(student, scoring.lists, "senior")
        return _View(sample, plan, aligned, scores, known, student)

    async def _compare(
        self, views: Sequence[_View], scoring: Scoring, senior: Engine | None
    ) -> list[AlignedScores | TeacherScoreError]:
        """Candidates and lists for what was read, with exact values where a list does not hold them."""
        if not scoring.widest:
            return [view.scores for view in views]
        cross = bool(scoring.lists and scoring.cross)
        of_teacher: Sequence[CandidateLists | TeacherScoreError] = [
            CandidateLists.of([None] * len(v.known)) for v in views
        ]
        of_student: Sequence[CandidateLists | TeacherScoreError] = [_NONE for v in views]
        if (scoring.top_k and scoring.support != "teacher") or (cross and not scoring.deep):
            queries = [v.of_teacher(self.same_tokens) for v in views]
            of_teacher = await exact_log_probs(
                self.engine, queries, role=self.name, max_batch=self.max_batch, temperature=self.temperature
            )
        if cross and not scoring.deep:
            assert senior is not None, "cross-scores are the senior's, too"
            queries = [v.of_student(self.same_tokens) for v in views]
            of_student = await exact_log_probs(senior, queries, role="senior", max_batch=self.max_batch)
        out: list[AlignedScores | TeacherScoreError] = []
        for view, exact_t, exact_s in zip(views, of_teacher, of_student, strict=True):
            if isinstance(exact_t, TeacherScoreError) or isinstance(exact_s, TeacherScoreError):
                out.append(exact_t if isinstance(exact_t, TeacherScoreError) else exact_s)  # type: ignore[arg-type]
                continue
            candidates, lists, bounded = None, None, None
            if scoring.top_k:
                known = view.known.merged(exact_t)
                student = view.student if scoring.support != "teacher" else None
                candidates = gather_candidates(
                    view.aligned, self.same_tokens, scoring.support, scoring.top_k, known, student
                )
            if scoring.lists:
                exact = (exact_t, exact_s) if cross else None
                if scoring.deep:
                    lists, bounded = gather_deep(
                        view.aligned, self.same_tokens, scoring.lists, view.known, view.student
                    )
                else:
                    lists = gather_lists(view.aligned, self.same_tokens, scoring.lists, view.known, view.student, exact)
            out.append(replace(view.scores, candidates=candidates, lists=lists, bounded=bounded))
        return out

    def _too_long(self, request: GenerateRequest) -> TeacherScoreError | None:
        n = len(request.input_ids)
        if self.max_tokens is None or n <= self.max_tokens:
            return None
        return TeacherScoreError(
            f"{self.name} request {request.rid}",
            f"{n} tokens",
            f"at most {self.max_tokens}, the teacher's context or its server's cache",
            "lower sampling.max_new_tokens, shorten the prompts, raise engine.cache_tokens, or take a teacher with a "
            "longer context",
        )

    @cached_property
    def _markups(self) -> tuple[Markup, Markup, bool]:
        """(the student's, the teacher's, whether the teacher reads the student's own markup)."""
        student = self.student or markup_of(self.aligner.student)
        teacher = self.template.markup if self.template else markup_of(self.aligner.teacher)
        return student, teacher, self.aligner.same_vocabulary and (self.template is None or student == teacher)

    def conversation(self, sample: TandemSample) -> tuple[tuple[int, ...], TeacherText]:
        """(prompt ids, response) as the teacher reads them.

        Raises TeacherScoreError kinds for a sample that its template does not show: a role, tools, the turns themselves.
        """
        if self.template is None and self.bridge is None:
            sample = replace(sample, inserted_messages=())
        student, teacher, same = self._markups
        if same:
            self._require_shown(sample)
            prompt = tuple(self._rendered(sample))
            return prompt, self.aligner.write(sample.response_ids, self.encode, inserted=sample.inserted)
        turns = turns_of(sample, self.aligner.student, student)
        frame = self._frame(sample, header_only(turns, self.aligner.thinking, teacher))
        told = plan(sample, turns, frame, self.aligner, student, teacher)
        text = self.aligner.write(
            sample.response_ids,
            self.encode,
            bridges=told.bridges,
            inserted=sample.inserted,
            thinking=told.thinking,
            stands=told.stands,
            leads=told.leads,
        )
        return frame.prompt, text

    def _rendered(self, sample: TandemSample) -> list[int]:
        if self.template is None:
            return self.render(sample.prompt.messages)
        try:
            return self.template.render(sample.prompt.messages, sample.prompt.tools)
        except ModelError as error:
            raise self._unread(error, sample) from error

    def _frame(self, sample: TandemSample, thinks: Sequence[bool]) -> Frame:
        messages, between = sample.prompt.messages, sample.inserted_messages
        if self.template is None:
            bridges = tuple(tuple(self.bridge(part)) for part in between) if self.bridge else ()
            end = self.aligner.end_of_turn
            return Frame(tuple(self.render(messages)), bridges, (end,) if end >= 0 else ())
        self._require_shown(sample)
        try:
            return self.template.frame(messages, between, thinks, sample.prompt.tools)
        except ModelError as error:
            raise self._unread(error, sample) from error

    def _unread(self, error: ModelError, sample: TandemSample) -> UnreadTemplateError:
        where = f"{self.name} template, prompt {sample.prompt.prompt_id}"
        return UnreadTemplateError(where, error.value, error.expected, error.remedy)

    def _require_shown(self, sample: TandemSample) -> None:
        if self.template is None:
            return
        turns, where = self.template.turns, f"{self.name} template, prompt {sample.prompt.prompt_id}"
        shown = [*sample.prompt.messages, *(m for part in sample.inserted_messages for m in part)]
        strange = sorted({m.role for m in shown} - set(turns.roles))
        if strange:
            expected, remedy = f"messages of the roles {', '.join(turns.roles)}", "take a teacher whose template has it"
            raise UnreadRolesError(where, ", ".join(strange), expected, remedy)
        calls = any("tool_calls" in m.extra for m in shown)
        if (sample.prompt.tools and not turns.tools) or (calls and not turns.tool_calls):
            missing = "tools" if sample.prompt.tools and not turns.tools else "tool_calls"
            raise UnreadToolsError(where, missing, "a template that shows them", "take a teacher whose template does")
        if turns.tool_after_call and any(part and part[0].role == "tool" for part in sample.inserted_messages):
            expected = (
                "a call of that tool before it, which this teacher's template demands and the sampled turn is not"
            )
            raise UnreadToolsError(where, "a tool's message behind plain text", expected, "take another teacher")

    def _plan(self, sample: TandemSample, scoring: Scoring) -> _Plan:
        prompt, text = self.conversation(sample)
        request = GenerateRequest(
            rid=f"score-{sample.key.name}",
            input_ids=(*prompt, *text.ids),
            max_new_tokens=0,
            logprob_start_len=len(prompt) - 1,
            top_logprobs_num=scoring.widest,
            input_temperature=self.temperature,
            conversation=sample.key.name,
        )
        return _Plan(request, list(prompt), text)


@dataclass(frozen=True)
class _Plan:
    request: GenerateRequest
    prompt: list[int]
    text: TeacherText
    known: FloatArray = field(default_factory=lambda: np.zeros(0))
    """Log-probs of the text's first ids, scored while the rest was written."""


_MOST_READ = 4096


@dataclass(eq=False)
class _Read:
    """Of one response that is still written: `ids` (prompt and text) of the last part, and log-probs of its text's ids."""

    ids: Sequence[int] = ()
    log_probs: FloatArray = field(default_factory=lambda: np.zeros(0))
    parts: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def rest_of(self, plan: _Plan) -> _Plan:
        """The same, asking for what is not known: the request's ids from the first on that differ, and at least the last."""
        before, now = np.asarray(self.ids, np.int64), np.asarray(plan.request.input_ids, np.int64)
        both = min(len(before), len(now))
        differ = np.flatnonzero(before[:both] != now[:both])
        same = int(differ[0]) if len(differ) else both
        n = min(same - len(plan.prompt), len(self.log_probs), len(plan.text.ids) - 1)
        if n <= 0:
            return plan
        request = replace(plan.request, logprob_start_len=plan.request.logprob_start_len + n)
        return replace(plan, request=request, known=self.log_probs[:n])


@dataclass(frozen=True)
class _View:
    """What a teacher's first answer says about a sample: `known` [Rt] its lists, `student` [R] the student's."""

    sample: TandemSample
    plan: _Plan
    aligned: Alignment
    scores: AlignedScores
    known: CandidateLists
    student: CandidateLists

    @property
    def pairs(self) -> tuple[IntArray, IntArray]:
        """(student positions, their teacher positions)."""
        at = np.flatnonzero(self.aligned.teacher_index >= 0)
        return at, self.aligned.teacher_index[at]

    def of_teacher(self, same: SameTokens) -> ExactQuery:
        """The student's entries that the teacher's lists do not hold."""
        at, partner = self.pairs
        wanted = missing_on(self.known, self.student, same.teacher_of, partner, at)
        return ExactQuery(self.plan.request.rid, self.plan.prompt, self.plan.text.ids, wanted, self.sample.key.name)

    def of_student(self, same: SameTokens) -> ExactQuery:
        """The reverse."""
        at, partner = self.pairs
        wanted = missing_on(self.student, self.known, same.student_of, at, partner)
        rid = self.plan.request.rid.replace("score", "top", 1)
        return ExactQuery(rid, self.sample.prompt_ids, self.sample.response_ids, wanted, self.sample.key.name)


def read_turn(
    student: ChatTemplate, teacher: ChatTemplate, ids: Sequence[int], thinking: Thinking = "keep"
) -> tuple[Aligner, TeacherText]:
    """A response to some question [R], as a teacher reads it behind its own prompt: what `Teacher.score` would send."""
    one = Teacher.by_template(cast("Engine", None), student, teacher, thinking)  # nothing is asked
    n, prompt = len(ids), Prompt("turn", (Message("user", "x"),), None, "turn")
    sample = TandemSample(SampleKey(0, 0, 0), 0, prompt, (), tuple(ids), (1,) * n, (0.0,) * n, "stop", "", ())
    return one.aligner, one.conversation(sample)[1]


def response_log_probs(result: GenerateResult, response: Sequence[int], role: str = "teacher") -> FloatArray:
    """The last `len(response)` input log-probs of an answer [Rt], nats.

    Taken from the end, because engines differ in whether the entry at `logprob_start_len` itself is returned. Raises
    TeacherScoreError for a short answer, other ids than sent, or a value that is no log-prob (None, NaN, inf, positive);
    `role` names the scorer in it.
    """
    n = len(response)
    if n == 0:
        return np.zeros(0)
    values, ids = result.input_log_probs[-n:], result.input_ids[-n:]
    if len(values) < n or not same_ids(ids, response):
        raise TeacherScoreError(
            f"{role} answer {result.rid}",
            f"{len(result.input_log_probs)} input log-probs",
            f"one for each of the {n} response tokens, with the ids that were sent",
            f"check the {role}'s server or router (some drop log-prob fields: sglang #10764, #10766)",
        )
    try:
        out = as_floats(values)  # type: ignore[arg-type]  # a None is refused below
    except struct.error:
        out = np.array([math.nan if value is None else value for value in values])
    bad = np.flatnonzero(~(np.isfinite(out) & (out <= 1e-4)))
    if len(bad):
        raise TeacherScoreError(
            f"{role} answer {result.rid}, response position {bad[0]}",
            values[bad[0]],
            "a finite log-probability of at most 0",
            f"the {role}'s server is faulty or gives the token no probability at all",
        )
    return np.minimum(out, 0.0)


_PROBE = "Self-test: 12345 + 678, caf\u00e9, \u4f60\u597d, \U0001f680\n\ndef f(x):\n    return x\n"


def check_teacher(teacher: Teacher) -> None:
    """Ask nothing of the engine, but put every special token and a probe text through the alignment.

    Raises ModelError if the teacher's tokenizer does not spell the probe as it should, or an end of turn of the student has no
    counterpart: both would only show as a low coverage later.
    """
    a = teacher.aligner
    probe = teacher.encode(_PROBE)
    spelt = a.teacher.join(probe)
    if spelt != _PROBE.encode():
        raise ModelError(
            f"tokenizer of {teacher.name}",
            repr(spelt.decode("utf-8", "replace")),
            f"ids that spell {_PROBE!r}",
            "this tokenizer changes text; take a teacher with another one",
        )
    if a.thinking == "drop" and not (a.student.roles.keys() & {"think_start", "think_end"}):
        raise ModelError(
            f"thinking of {teacher.name}",
            "drop",
            "a student that writes its thinking between tokens of their own (<think>, [THINK])",
            "set keep: what this student thinks cannot be told from its answer",
        )
    for row in a.special.rows:
        kept_from = a.thinking == "drop" and any(role.startswith("think") for role in row.roles)
        if row.teacher_id is None or kept_from:
            continue
        text = a.write([row.student_id], teacher.encode)
        if text.ids != (row.teacher_id,) or a.align(text).teacher_index.tolist() != [0]:
            raise ModelError(f"special token of {teacher.name}", str(row), "a pair", "see docs/distillation.md")
    lost = sorted(i for i in a.student.eos_ids if i not in a.special.ids and a.student.of(i) is None)
    closes = teacher.template is not None and teacher.template.turns.closed_by != "nothing"
    if lost and not a.same_vocabulary and not closes:
        raise ModelError(
            f"ends of turn for {teacher.name}",
            lost,
            "a counterpart for each",
            "set eos_token_id in generation_config.json",
        )


def describe_special(aligner: Aligner, name: str = "teacher") -> str:
    """What stands for each special token that has a role, a line each; how many others are masked.

    >>> from slime_tandem.tokens.token_bytes import TokenBytes
    >>> s = TokenBytes((b"a", None, None), frozenset({1, 2}), frozenset({1}), {1: "<|im_end|>", 2: "<|extra|>"})
    >>> t = TokenBytes((None, b"a"), frozenset({0}), frozenset({0}), {0: "<|eot_id|>"})
    >>> print(describe_special(Aligner(s, t, end_of_turn=0)))
    special tokens, student -> teacher:
      1 <|im_end|> (eos, turn_end) -> 0 <|eot_id|>
      1 more without a role or a counterpart: masked where they are sampled
    """
    if aligner.same_vocabulary:
        return f"special tokens, student -> {name}: the same vocabulary"
    rows = aligner.special.rows
    lines = [f"special tokens, student -> {name}:", *(f"  {row}" for row in rows if row.roles)]
    others = sum(not row.roles and row.teacher_id is None for row in rows)
    if others:
        lines.append(f"  {others} more without a role or a counterpart: masked where they are sampled")
    return "\n".join(lines)

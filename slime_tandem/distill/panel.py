"""Several teachers: which of them score a sample, and how their log-probs become one teacher's.

It asks the senior for its own top lists where a support or a selection starts from these. How one teacher reads and scores
is `teacher.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slime_tandem.distill.alignment import count_reasons
from slime_tandem.distill.candidates import ask_each, top_of
from slime_tandem.distill.teacher import Scoring, Teacher
from slime_tandem.errors import DataError, TeacherScoreError
from slime_tandem.protocol import CandidateLists, Engine, GenerateRequest
from slime_tandem.types import AlignedScores, Prompt, TandemSample

TEACHER_KEY = "teacher"
"""Key of `Prompt.metadata` that chooses a sample's teachers by name: a string or a list of them."""
SAMPLED = Scoring()
"""Log-probs of the sampled tokens alone."""


async def student_candidates(
    engine: Engine, samples: Sequence[TandemSample], k: int, *, max_batch: int = 128
) -> list[CandidateLists | TeacherScoreError]:
    """The student's own top-K at each response position, per sample: what `support` student and union start from.

    Scored afresh at temperature 1 over the full distribution, because junior tokens were sampled by somebody else.
    """
    out: list[CandidateLists | TeacherScoreError] = []
    for at in range(0, len(samples), max_batch):
        part = samples[at : at + max_batch]
        requests = [
            GenerateRequest(
                rid=f"top-{s.key.name}",
                conversation=s.key.name,  # its worker holds the prefix
                input_ids=s.prompt_ids + s.response_ids,
                max_new_tokens=0,
                logprob_start_len=len(s.prompt_ids) - 1,
                top_logprobs_num=k,
            )
            for s in part
        ]
        for sample, result in zip(part, await ask_each(engine, requests), strict=True):
            try:
                if isinstance(result, TeacherScoreError):
                    raise result
                out.append(top_of(result, len(sample.response_ids), "senior"))
            except TeacherScoreError as error:
                out.append(error)
    return out


class TeacherPanel:
    """The teachers of a run: each sample goes to those that its metadata names, else to those of its task, else to the rest.

    Several teachers of one sample count by their weights: the student is pulled towards the weighted mean of their
    log-probs, at each position over those that have a value there.
    """

    def __init__(self, teachers: Sequence[Teacher], scoring: Scoring = SAMPLED) -> None:
        names = [t.name for t in teachers]
        if not teachers or len(set(names)) < len(names):
            raise DataError("teachers", names, "at least one, each with a name of its own", "rename them")
        self.teachers, self.scoring = tuple(teachers), scoring

    def route(self, prompt: Prompt) -> list[Teacher]:
        """The teachers of a prompt's samples, in the panel's order; raises DataError if there is none."""
        chosen = prompt.metadata.get(TEACHER_KEY)
        if chosen is not None:
            wanted = [chosen] if isinstance(chosen, str) else chosen if isinstance(chosen, (list, tuple)) else []
            names = [t.name for t in self.teachers]
            if not wanted or any(name not in names for name in wanted):
                raise DataError(
                    f"metadata.{TEACHER_KEY} of prompt {prompt.prompt_id}",
                    chosen,
                    f"names among {', '.join(names)}",
                    "correct the prompt's metadata, or add the teacher to opd.teachers",
                )
            return [t for t in self.teachers if t.name in wanted]
        task = prompt.task
        for_task = [t for t in self.teachers if t.tasks is not None and task in t.tasks]
        found = for_task or [t for t in self.teachers if t.tasks is None]
        if not found:
            raise DataError(
                "opd.teachers",
                [t.name for t in self.teachers],
                f"one for task {task!r}",
                "name the task in a teacher's `tasks`, or leave the `tasks` of one teacher out",
            )
        return found

    async def read_along(self, part: TandemSample) -> None:
        """Let the teachers of a response that is still written score what is there of it: `score` then asks for the rest alone.

        For log-probs of the sampled tokens: lists come of whole responses. What goes wrong is `score`'s to meet.
        """
        await asyncio.gather(*(teacher.read_along(part) for teacher in self.route(part.prompt)))

    async def score(
        self, samples: Sequence[TandemSample], senior: Engine | None = None, *, plain: bool = False
    ) -> list[AlignedScores | TeacherScoreError]:
        """One entry per sample, in order; `senior` is asked for its candidates where the support or a selection needs them.

        `plain`: log-probs of the sampled tokens alone. A sample of several teachers fails if one of them does.
        """
        scoring = replace(self.scoring, top_k=0, lists=0) if plain else self.scoring
        tops: list[CandidateLists | TeacherScoreError] | None = None
        if scoring.of_student:
            if senior is None:
                raise DataError("senior", None, "its engine, for its candidates", "pass it")
            tops = await student_candidates(senior, samples, scoring.of_student)
        out: dict[int, AlignedScores | TeacherScoreError] = {
            i: top for i, top in enumerate(tops or ()) if isinstance(top, TeacherScoreError)
        }
        routed = {i: self.route(s.prompt) for i, s in enumerate(samples) if i not in out}
        views: dict[int, list[tuple[Teacher, AlignedScores]]] = {i: [] for i in routed}

        async def ask(teacher: Teacher) -> tuple[Teacher, list[int], list[AlignedScores | TeacherScoreError]]:
            mine = [i for i, teachers in routed.items() if teacher in teachers]
            top = None if tops is None else [t for i in mine if not isinstance(t := tops[i], TeacherScoreError)]
            return teacher, mine, await teacher.score([samples[i] for i in mine], scoring, top, senior)

        busy = [t for t in self.teachers if any(t in teachers for teachers in routed.values())]
        for teacher, mine, scores in await asyncio.gather(*(ask(t) for t in busy)):
            for i, score in zip(mine, scores, strict=True):
                if isinstance(score, TeacherScoreError):
                    out.setdefault(i, score)
                else:
                    views[i].append((teacher, score))
        for i, view in views.items():
            if i not in out:
                of_each = {teacher.name: (score.log_probs, score.mask) for teacher, score in view}
                out[i] = replace(combine([(teacher.weight, score) for teacher, score in view]), by_teacher=of_each)
        return [out[i] for i in range(len(samples))]


def combine(views: Sequence[tuple[float, AlignedScores]]) -> AlignedScores:
    """One teacher out of several (weight, scores): the weighted mean of log-probs over those that have a value at a position.

    A position without any value keeps the first teacher's reason. Raises DataError for
    candidates of several teachers, whose distributions cannot be merged from lists.

    >>> from slime_tandem.distill.alignment import Aligner
    >>> from slime_tandem.tokens.token_bytes import TokenBytes
    >>> s = TokenBytes((b"a", b"b"), frozenset(), frozenset())
    >>> whole, split = (TokenBytes(t, frozenset(), frozenset()) for t in ((b"a", b"b"), (b"a", b"b", b"bb")))
    >>> a = Aligner(s, whole, end_of_turn=-1)
    >>> b = Aligner(s, split, end_of_turn=-1)
    >>> one = a.align(a.write([0, 1, 1], lambda text: [0, 1, 1])).scores([-1.0, -2.0, -3.0])
    >>> two = b.align(b.write([0, 1, 1], lambda text: [0, 2])).scores([-4.0, -5.0])
    >>> combine([(2.0, one), (1.0, two)]).log_probs.tolist()
    [-2.0, -2.0, -3.0]
    """
    if len(views) == 1:
        return views[0][1]
    if any(score.candidates is not None or score.lists is not None for _, score in views):
        raise DataError(
            "opd.signal or opd.selection",
            "lists of likely tokens",
            "one teacher per sample",
            "route each task to one teacher, or set opd.signal=sampled and opd.selection.selector=pure_opd",
        )
    weights = np.array([w for w, _ in views])[:, None]
    weights = weights / weights.max()
    masks = np.stack([score.mask for _, score in views])
    values = np.stack([score.log_probs for _, score in views])
    total = (weights * masks).sum(0)
    mask = total > 0
    mean = np.where(mask, (weights * masks * values).sum(0) / np.where(mask, total, 1.0), 0.0)
    origin = views[0][1].origin
    assert origin is not None, "scores of an alignment say why"
    return AlignedScores(mean, mask, count_reasons(origin.reason[~mask]), origin=origin)

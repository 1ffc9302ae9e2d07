"""Frozen records that cross module borders. No torch, no I/O.

Shapes: [R] response tokens of one sample, in the student's own sampled ids (never re-tokenised).
Units: log-probs in nats; positions and lengths in tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from slime_tandem.errors import DataError, TeacherScoreError

SENIOR = 1
JUNIOR = 0

RIGHT_REWARD = 1.0
"""A response counts as right when its task reward reaches this; partial credit does not."""

FinishReason = Literal["stop", "length", "abort"]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn, as chat templates take it; `extra` holds its further keys (`tool_calls`, `tool_call_id`, `name`).

    >>> Message.of({"role": "tool", "content": "4", "name": "sum"}).as_dict()
    {'role': 'tool', 'content': '4', 'name': 'sum'}
    """

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The dict form that `apply_chat_template` takes."""
        return {"role": self.role, "content": self.content, **self.extra}

    @classmethod
    def of(cls, turn: Mapping[str, Any]) -> Message:
        """The message of a dict."""
        return cls(turn["role"], turn["content"], {k: v for k, v in turn.items() if k not in ("role", "content")})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task instance: raw chat messages (each model renders them itself), the label, and where it came from.

    >>> Prompt("chain_sum/17", (Message("user", "4 + 3 ="),), label="7", task="chain_sum").messages[0].content
    '4 + 3 ='
    """

    prompt_id: str
    messages: tuple[Message, ...]
    label: str | None
    task: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tools(self) -> Sequence[Any] | None:
        """What the prompt offers the model to call (`metadata.tools`, as `apply_chat_template` takes it)."""
        return self.metadata.get("tools") or None


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Names one sample of a run for good: all its random draws derive from it (`rollout.handoff`)."""

    seed: int
    rollout_id: int
    sample_index: int

    @property
    def name(self) -> str:
        """The same in one word: what engines know the response by."""
        return f"{self.seed}-{self.rollout_id}-{self.sample_index}"


@dataclass(frozen=True, slots=True)
class AuthorRun:
    """Consecutive response tokens `[start, stop)` by one author, written under one weight version."""

    author: int
    start: int
    stop: int
    weight_version: str


@dataclass(frozen=True, slots=True)
class TandemSample:
    """One co-written response. All per-token tuples have length R.

    `log_probs` are the behaviour log-probs (nats) of the authoring model at the sampling temperature; 0.0 in inserted text.
    `text` is what the models wrote, without inserted text. `authorship_mask` is 1 where the senior wrote the token, else 0.
    `inserted` lists the spans `[start, stop)` that nobody
    sampled (tool output between turns): neither senior's nor junior's, `loss_mask` is 0 there; `inserted_messages`, one
    tuple per span or none at all, are the chat turns that a span shows, for a teacher with another template.
    `kept_ids` [R]: the ids that truncated sampling drew a senior's token from, empty where that was the whole
    vocabulary and on all other
    tokens; () if not asked for. Its log-prob is then that of the truncated, renormalised distribution.
    `senior_log_probs` [R]: the senior's own log-prob of every sampled token (nats, temperature 1), 0.0 in inserted text;
    empty if not asked for. `fallback_starts`: where the senior took over a run that was the junior's by the rule, to that
    run's end, because text of one has no exact form in the other's vocabulary. `discarded_tokens` were generated past a
    handoff and dropped; `requests` is the number of engine requests.

    >>> s = TandemSample(SampleKey(0, 0, 0), 0, Prompt("p", (), None, "t"), (1, 2), (5, 6, 7), (1, 1, 0),
    ...                  (-0.1, -0.2, -0.3), "stop", " 4 2", (AuthorRun(1, 0, 2, "0"), AuthorRun(0, 2, 3, "0")))
    >>> s.senior_tokens, s.switches
    (2, 1)
    """

    key: SampleKey
    group_id: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    authorship_mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    text: str
    runs: tuple[AuthorRun, ...]
    discarded_tokens: int = 0
    requests: int = 0
    inserted: tuple[tuple[int, int], ...] = ()
    senior_log_probs: tuple[float, ...] = ()
    fallback_starts: tuple[int, ...] = ()
    inserted_messages: tuple[tuple[Message, ...], ...] = ()
    kept_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.inserted_messages and len(self.inserted_messages) != len(self.inserted):
            raise DataError(
                "TandemSample.inserted_messages",
                f"{len(self.inserted_messages)} entries",
                f"one per inserted span ({len(self.inserted)}), or none at all",
                "give the messages of every inserted text",
            )
        R = len(self.response_ids)
        for name in ("authorship_mask", "log_probs", "senior_log_probs", "kept_ids"):
            n = len(getattr(self, name))
            if n != R and not (name in ("senior_log_probs", "kept_ids") and n == 0):
                raise DataError(
                    f"TandemSample.{name}", f"length {n}", f"length {R}, one per response token", "see the engine"
                )

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """[R]: 1 where a model sampled the token, 0 in inserted text."""
        mask = [1] * len(self.response_ids)
        for start, stop in self.inserted:
            mask[start:stop] = [0] * (stop - start)
        return tuple(mask)

    @property
    def senior_tokens(self) -> int:
        """Response tokens written by the senior."""
        return sum(self.authorship_mask)

    @property
    def junior_tokens(self) -> int:
        """Response tokens written by the junior."""
        return sum(self.loss_mask) - self.senior_tokens

    @property
    def switches(self) -> int:
        """How often the author changes between neighbouring sampled tokens."""
        authors = [a for a, sampled in zip(self.authorship_mask, self.loss_mask, strict=True) if sampled]
        return sum(a != b for a, b in itertools.pairwise(authors))


@dataclass(frozen=True, slots=True)
class FailedSample:
    """A response that could not be written, and why; it takes the place of its sample, so that none is lost."""

    key: SampleKey
    group_id: int
    prompt: Prompt
    reason: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that student or teacher might have written, at each position of a response.

    `ids` [R, K] in the student's vocabulary, -1 where a position has fewer; `teacher_log_probs` [R, K] nats of the
    teacher's full distribution, `student_log_probs` [R, K] those of the student when it sampled (NaN: not asked for); 0.0
    where `ids` is -1.

    >>> c = Candidates(np.array([[5, -1]]), np.array([[-0.1, 0.0]]), np.array([[-0.2, 0.0]]))
    >>> c.ids.shape
    (1, 2)
    """

    ids: IntArray
    teacher_log_probs: FloatArray
    student_log_probs: FloatArray

    def __post_init__(self) -> None:
        assert self.ids.ndim == 2
        assert self.ids.shape == self.teacher_log_probs.shape == self.student_log_probs.shape


class Origin(Protocol):
    """What an alignment knows of each response token [R] beside its value; worked out when asked for."""

    @property
    def span(self) -> IntArray:
        """Number of the stretch that both tokenizers cut out alike, -1: none."""
        ...

    @property
    def classes(self) -> IntArray:
        """What the token writes (index into `token_bytes.TEXT_CLASSES`)."""
        ...

    @property
    def reason(self) -> IntArray:
        """Why it has no partner (index into `alignment.UNALIGNED_REASONS`), -1: it has one."""
        ...


@dataclass(frozen=True, slots=True)
class TopLists:
    """Lists of student and teacher at N positions, all in the student's ids, -1 for an entry that does not exist.

    `*_ids`, `*_log_probs` [N, K], nats of the full distributions. `teacher_on_student` [N, K]: the teacher's log-probs of the
    student's candidates, `student_on_teacher` the reverse; both or none. Raises DataError for other shapes and for values that
    are no log-probs.

    >>> len(TopLists(np.array([[1, 2]]), np.log([[0.6, 0.2]]), np.array([[2, 3]]), np.log([[0.5, 0.3]])))
    1
    """

    student_ids: npt.NDArray[np.integer]
    student_log_probs: npt.NDArray[np.floating]
    teacher_ids: npt.NDArray[np.integer]
    teacher_log_probs: npt.NDArray[np.floating]
    teacher_on_student: npt.NDArray[np.floating] | None = None
    student_on_teacher: npt.NDArray[np.floating] | None = None

    def __post_init__(self) -> None:
        if self.student_ids.ndim != 2 or self.teacher_ids.ndim != 2 or len(self.student_ids) != len(self.teacher_ids):
            shapes = f"{self.student_ids.shape} and {self.teacher_ids.shape}"
            raise DataError("TopLists ids", shapes, "[N, K] for both, with the same N", "pass whole batches")
        pairs = (
            ("student_log_probs", self.student_log_probs, self.student_ids),
            ("teacher_log_probs", self.teacher_log_probs, self.teacher_ids),
            ("teacher_on_student", self.teacher_on_student, self.student_ids),
            ("student_on_teacher", self.student_on_teacher, self.teacher_ids),
        )
        for name, values, ids in pairs:
            if values is None:
                continue
            if values.shape != ids.shape:
                expected = f"the shape of its ids {ids.shape}"
                raise DataError(f"TopLists.{name}", values.shape, expected, "pass both")
            if not values.size or np.max(values) <= _MOST_LOG_PROB:  # the maximum of anything and NaN is NaN
                continue
            bad = (ids >= 0) & ~(values <= _MOST_LOG_PROB)  # NaN and +inf as well
            if bad.any():
                n, k = np.argwhere(bad)[0]
                where, expected = f"TopLists.{name}[{n}, {k}]", "a log-probability of at most 0"
                raise DataError(where, float(values[n, k]), expected, "see the engine")
        if (self.teacher_on_student is None) != (self.student_on_teacher is None):
            expected = "both or none"
            raise DataError("TopLists", "one cross-score", expected, "ask both sides for the other's ids")

    def __len__(self) -> int:
        return len(self.student_ids)

    @property
    def columns(self) -> list[npt.NDArray[Any]]:
        """The arrays that are there, in the order of the fields."""
        all_ = (getattr(self, field.name) for field in fields(self))
        return [column for column in all_ if column is not None]

    @property
    def shared(self) -> BoolArray:
        """[N]: both lists have an entry (in another vocabulary a list can lose all of them)."""
        return np.asarray((self.student_ids >= 0).any(1) & (self.teacher_ids >= 0).any(1))

    def at(self, index: npt.NDArray[np.integer]) -> TopLists:
        """The lists of some positions [n]."""
        return TopLists(*(column[index] for column in self.columns))

    @staticmethod
    def concatenate(parts: Sequence[TopLists]) -> TopLists:
        """One below the other; all with cross-scores or none. At least one part."""
        return TopLists(*(np.concatenate(columns) for columns in zip(*(p.columns for p in parts), strict=True)))


_MOST_LOG_PROB = 1e-3
"""Half precision lets a log-probability be a little above 0."""


@dataclass(frozen=True, slots=True)
class AlignedScores:
    """Teacher log-probs at student positions.

    `log_probs` [R] nats, 0.0 where `mask` is False; `mask` [R] True where a teacher token with exactly the same bytes
    at the same place was proven; `unaligned` counts the masked positions by reason, so that nothing is dropped silently.
    `origin`: the alignment that they come from, the first one where teachers were combined; None if unknown. `candidates`: the
    most likely tokens at each position, if asked for; `lists` [R, K]: student's and teacher's lists, empty (-1) at unpaired
    positions, if tokens are to be selected by them. `bounded` [R]: how much too large a mass by these lists may be
    (`candidates.gather_deep`), None where their values are exact. `by_teacher`: where several teachers may score a rollout, the
    log-probs and mask of each that scored this response, by name.
    """

    log_probs: FloatArray
    mask: BoolArray
    unaligned: Mapping[str, int]
    origin: Origin | None = None
    candidates: Candidates | None = None
    lists: TopLists | None = None
    bounded: FloatArray | None = None
    by_teacher: Mapping[str, tuple[FloatArray, BoolArray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.log_probs.shape == self.mask.shape
        assert self.log_probs.ndim == 1
        assert sum(self.unaligned.values()) == self.mask.size - np.count_nonzero(self.mask), (
            "every unaligned position is counted once"
        )
        assert np.isfinite(self.log_probs).all()

    @property
    def coverage(self) -> float:
        """Share of the response positions that carry a teacher log-prob; 1.0 for an empty response."""
        return float(self.mask.mean()) if self.mask.size else 1.0

    @property
    def reason(self) -> IntArray:
        """[R]: why a token has no value (index into `alignment.UNALIGNED_REASONS`), -1: it has one."""
        assert self.origin is not None, "whoever aligned did not say why"
        return np.where(self.mask, -1, self.origin.reason)

    def coverage_by_class(self, names: Sequence[str]) -> dict[str, float | None]:
        """Coverage of the tokens of each class, None where there are none; `names` are those that the classes count."""
        assert self.origin is not None, "whoever aligned did not say what the tokens write"
        classes = self.origin.classes
        return {
            name: float(self.mask[classes == k].mean()) if (classes == k).any() else None
            for k, name in enumerate(names)
        }


CORRECT = "correct"
"""The part of a reward that says whether a response is right."""


def is_right(reward: float | None, parts: Mapping[str, float]) -> bool:
    """What accuracies count: a part called `correct` if there is one, else the reward, of `RIGHT_REWARD` or more.

    >>> is_right(1.0, {}), is_right(1.2, {"correct": 0.0, "brief": 1.2}), is_right(None, {})
    (True, False, False)
    """
    value = parts.get(CORRECT, reward)
    return value is not None and value >= RIGHT_REWARD


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A response with its task reward and, if a teacher answered, the teacher's view of it.

    `reward` is None where a function of the user's gave none: the task reward does not train on it. `parts` are what it was
    made of, by name. `unasked`: it has none because none was to be found (a prompt without a label, where nothing is learnt
    from rewards), so that nothing failed.
    """

    sample: TandemSample
    reward: float | None
    teacher: AlignedScores | None
    teacher_error: TeacherScoreError | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    unasked: bool = False

    @property
    def right(self) -> bool:
        """What accuracies count."""
        return is_right(self.reward, self.parts)

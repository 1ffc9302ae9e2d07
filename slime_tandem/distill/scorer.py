"""A teacher of one's own: an object that scores ids in this process, in the place of a served model (docs/extending.md).

Its tokens may be any: what it says passes through the same alignment, proof and checks as a server's answers (`Teacher`). It
gives log-probs of given ids and no lists of likely tokens, so that signals and selectors that need lists are refused beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from slime_tandem.config import TeacherSpec
from slime_tandem.errors import EngineRejectedError
from slime_tandem.protocol import GenerateRequest, GenerateResult
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import Message


@runtime_checkable
class TokenizerOfScorer(Protocol):
    """What the alignment needs of a scorer's tokenizer; `models.tokenizer.ModelTokenizer` is one, the student's own, too.

    One with `bridge(messages) -> ids` also renders the messages between turns (`ModelTokenizer.bridge`).
    """

    @property
    def tokens(self) -> TokenBytes:
        """The bytes of every id, special ids and ends of turn."""
        ...

    @property
    def end_of_turn(self) -> int:
        """The id that closes a turn."""
        ...

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a prompt, up to where the response begins."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special token among them."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """What `opd.teachers[].scorer` makes."""

    @property
    def tokenizer(self) -> TokenizerOfScorer:
        """Whose ids `log_probs` is asked about."""
        ...

    async def log_probs(self, ids: Sequence[int], start: int) -> Sequence[float]:
        """Log-prob of each of `ids[start:]` given all ids before it, nats, at most 0; [len(ids) - start].

        Equal ids get equal values, or a run cannot be repeated. Several calls may be under way (`opd.concurrency` times
        `engine.max_batch`); what computes for long belongs into `asyncio.to_thread`.
        """
        ...


MakeScorer = Callable[[TeacherSpec, TokenizerOfScorer], Scorer]
"""(entry of `opd.teachers`, the student's tokenizer) -> the scorer; a class will do."""


class ScorerEngine:
    """A `Scorer` as the engine of a `Teacher`; `name` is the teacher's.

    Raises EngineRejectedError for a scorer that raises, or answers anything but numbers; a short answer, or a number that is no
    log-prob, fails its sample (`response_log_probs`).
    """

    def __init__(self, scorer: Scorer, name: str) -> None:
        self._scorer, self._name = scorer, name

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Answers to requests that only score (`max_new_tokens=0`, no lists), in order."""
        return [await self._answer(request) for request in requests]

    async def _answer(self, request: GenerateRequest) -> GenerateResult:
        if request.max_new_tokens or request.top_logprobs_num:
            expected = "requests for the log-probs of given ids alone"
            remedy = "set opd.signal=sampled and opd.selection.selector=pure_opd, or give this teacher a model"
            raise EngineRejectedError(f"scorer of {self._name}", "lists of likely tokens", expected, remedy)
        start = request.logprob_start_len + 1
        try:
            values = [float(value) for value in await self._scorer.log_probs(request.input_ids, start)]
        except (Exception, SystemExit) as error:  # the user's code
            why = " ".join(f"{type(error).__name__}: {error}".split())
            field = f"scorer of {self._name} at {request.rid}"
            raise EngineRejectedError(field, why, "log-probs of the ids that it is given", "mend the scorer") from error
        return GenerateResult(
            request.rid, (), (), "length", "", input_log_probs=tuple(values), input_ids=request.input_ids[start:]
        )

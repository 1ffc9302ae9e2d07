"""The JSON of SGLang's native API, server side: checks a /generate body and turns it into jobs, and outputs into answers.

Field names, defaults and answer layout follow SGLang 0.5.15.post1 (`managers/io_struct.py` GenerateReqInput,
`sampling/sampling_params.py`, `managers/session_controller.py`). Stricter than SGLang in one way: a field or a sampling
parameter that is not served is refused with its name, never ignored. Every number, list and text has a bound (`Bounds`), so
that no request can make the work of one step, the memory or an answer endless. It runs no model and opens no socket.
"""

from __future__ import annotations

import reprlib
import secrets
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from slime_tandem.engines.embedded.patterns import Pattern, PatternError, compile_pattern
from slime_tandem.engines.embedded.runner import Candidates, Job, Output
from slime_tandem.errors import DataError
from slime_tandem.types import BoolArray, IntArray

_FIELDS = {
    "rid", "text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "token_ids_logprob", "session_params", "stream",
}  # fmt: skip
_NEUTRAL = {
    "n": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "min_new_tokens": (0,), "json_schema": (), "regex": (), "ebnf": (), "structural_tag": (),
    "stream_interval": (), "logit_bias": (),
}  # fmt: skip
"""Sampling parameters of SGLang that are not served, with the values that mean "off" (null always does)."""
_PARAMS = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "stop_regex", "sampling_seed",
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "custom_params",
}  # fmt: skip
_DEFAULT_MAX_NEW_TOKENS = 128
_GREEDY_BELOW = 1e-6


class Bounds:
    """The most that one request may ask for, beside what the model bounds (vocabulary, context)."""

    PROMPTS: Final = 4096
    NAME: Final = 1024  # characters of rid, session id and the like
    STOPS: Final = 256  # stop strings, and stop patterns
    STOP_LENGTH: Final = 4096  # characters
    DIFFERENT: Final = 1024  # lists of stop ids, and patterns, in one request
    TEMPERATURE: Final = 1e6
    TOP_K: Final = 2**31 - 1
    TOKEN_LENGTH: Final = 128  # characters of a text, for each token that it may have
    REPORTED: Final = 2**23  # (log-prob, id) pairs in one answer
    SESSIONS: Final = 2**16
    SESSION_TOKENS: Final = 2**25


_shown = reprlib.Repr()  # bounded work: `repr` of what a stranger sent may be long, or deep
_shown.maxlevel, _shown.maxlist, _shown.maxdict, _shown.maxstring, _shown.maxlong, _shown.maxother = 2, 6, 6, 80, 40, 80


def refuse(name: str, value: object, expected: str, remedy: str = "correct the request") -> DataError:
    """The error for a bad field; long values are cut."""
    name = name if len(name) <= 100 else name[:97] + "..."
    plain = value is None or isinstance(value, (bool, float)) or (isinstance(value, str) and len(value) <= 80)
    if not plain and not (isinstance(value, int) and abs(value) < 10**40):
        shown = _shown.repr(value)
        value = shown if len(shown) <= 80 else shown[:77] + "..."
    return DataError(name, value, expected, remedy)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the request checks need to know. `eos_ids` end every output unless `ignore_eos`.

    `decode(ids, skip_special_tokens)` and `encode(text)` are the tokenizer's; `max_tokens` bounds input plus output.
    """

    vocab_size: int
    max_tokens: int
    eos_ids: frozenset[int]
    bos_id: int | None
    encode: Callable[[str], list[int]]
    decode: Callable[[list[list[int]], bool], list[str]]


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a /generate call: the job, how its text is shown, and the session turn it completes."""

    job: Job
    skip_special_tokens: bool
    no_stop_trim: bool
    turn: Turn | None


@dataclass(slots=True)
class Turn:
    """A request within a session. `context` is its input and output ids once it has ended."""

    session: str
    rid: str
    parent: Turn | None
    input_ids: list[int]
    context: list[int] | None = None
    children: list[Turn] = field(default_factory=list)


class Sessions:
    """Server-side contexts: a tree of turns per session, as in SGLang's session controller.

    Beyond `Bounds.SESSIONS` sessions, or `SESSION_TOKENS` tokens in them, those that were used longest ago are forgotten; their
    clients are told so, and send the whole context again. May be used by several threads.
    """

    def __init__(self) -> None:
        self._turns: dict[str, dict[str, Turn]] = {}  # the least recently used first
        self._tokens = 0
        self._lock = threading.Lock()

    def open(self, session_id: str | None) -> str:
        """Start a session; returns its id. Raises DataError if it exists."""
        name = session_id or uuid.uuid4().hex
        with self._lock:
            if name in self._turns:
                raise refuse("session_id", name, "the id of no open session", "close it first or choose another id")
            self._turns[name] = {}
            self._forget_old()
        return name

    def close(self, session_id: str) -> None:
        """Forget a session; nothing happens if there is none, as in SGLang, so that a clean-up may come twice."""
        with self._lock:
            self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        for turn in self._turns.pop(session_id, {}).values():
            self._tokens -= len(turn.context or ())

    def _forget_old(self) -> None:
        while len(self._turns) > 1 and (len(self._turns) > Bounds.SESSIONS or self._tokens > Bounds.SESSION_TOKENS):
            self._drop(next(iter(self._turns)))

    def begin(self, params: Any, rid: str, new_ids: list[int], bos_id: int | None) -> Turn:
        """The turn that `session_params` asks for, its whole input assembled; nothing is stored before `store`.

        Without `rid` the turn starts a context of its own. With `rid` it continues that turn's context: cut to `offset`
        tokens if that is given and not 0, without that turn's output if `drop_previous_output`; a leading BOS of `new_ids` is
        dropped. `replace` forgets the turns that followed `rid` (all turns without one).
        """
        known = {"id", "rid", "offset", "replace", "drop_previous_output"}
        if not isinstance(params, dict) or not set(params) <= known:
            raise refuse("session_params", params, f"an object with only {sorted(known)}")
        name = _string("session_params.id", params.get("id"))
        replace = _boolean("session_params.replace", params.get("replace"), False)
        drop_output = _boolean("session_params.drop_previous_output", params.get("drop_previous_output"), False)
        offset = _integer("session_params.offset", params.get("offset"), 0, 0)
        earlier = None if params.get("rid") is None else _string("session_params.rid", params["rid"])
        with self._lock:
            if name not in self._turns:
                raise refuse("session_params.id", name, "the id of an open session", "open it with /open_session")
            turns = self._turns[name] = self._turns.pop(name)
            if earlier is None:
                if replace:
                    self._drop(name)
                    self._turns[name] = {}
                return Turn(name, rid, None, new_ids)
            return self._continued(turns, earlier, Turn(name, rid, None, new_ids), replace, drop_output, offset, bos_id)

    def _continued(
        self,
        turns: dict[str, Turn],
        earlier: str,
        turn: Turn,
        replace: bool,
        drop_output: bool,
        offset: int,
        bos_id: int | None,
    ) -> Turn:
        parent = turns.get(earlier)
        if parent is None or parent.context is None:
            raise refuse("session_params.rid", earlier, "the rid of a finished request of this session")
        if replace:
            self._forget_children(turns, parent)
        context = parent.input_ids if drop_output else parent.context
        if offset > len(context):
            raise refuse("session_params.offset", offset, f"at most the {len(context)} stored tokens")
        new_ids = turn.input_ids
        added = new_ids[1:] if bos_id is not None and new_ids[0] == bos_id else new_ids
        return Turn(turn.session, turn.rid, parent, (context[:offset] if offset else context) + added)

    def store(self, turn: Turn, output_ids: list[int]) -> None:
        """Keep an ended turn, so that it can be continued; nothing happens if its session was closed meanwhile."""
        with self._lock:
            turns = self._turns.get(turn.session)
            if turns is None:
                return
            turn.context = turn.input_ids + output_ids
            if turn.parent is not None:
                turn.parent.children.append(turn)
            replaced = turns.get(turn.rid)
            self._tokens += len(turn.context) - (0 if replaced is None else len(replaced.context or ()))
            turns[turn.rid] = turn
            self._forget_old()

    def _forget_children(self, turns: dict[str, Turn], parent: Turn) -> None:
        # A loop, not a recursion: a conversation may have thousands of turns, each the child of the one before.
        left = parent.children
        parent.children = []
        while left:
            child = left.pop()
            left += child.children
            child.children = []
            if turns.get(child.rid) is child:
                self._tokens -= len(child.context or ())
                del turns[child.rid]


def _string(name: str, value: Any, most: int = Bounds.NAME) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise refuse(name, value, f"a non-empty string of at most {most} characters")
    return value


def _boolean(name: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def _integer(name: str, value: Any, default: int, low: int, high: int | None = None) -> int:
    if value is None:
        return default
    if type(value) is not int or value < low or (high is not None and value > high):
        raise refuse(
            name, value, f"an integer of at least {low}" + (f" and at most {high}" if high is not None else "")
        )
    return value


def _number(name: str, value: Any, default: float, low: float, high: float, *, low_too: bool = True) -> float:
    """A number from `low` to `high`. An int is compared as such: one of 400 digits is no float."""
    if value is None:
        return default
    # NaN is in no range.
    if type(value) not in (int, float) or not low <= value <= high or (value == low and not low_too):
        raise refuse(name, value, f"a number in {'[' if low_too else '('}{low:g}, {high:g}]")
    return float(value)


def _custom(value: Any, possible: bool) -> tuple[bool, float]:
    """The custom parameters: `truncated_logprobs` (output log-probs of the distribution that was drawn from, and its ids) and
    `input_temperature` (that of the input log-probs)."""
    if value is None:
        return False, 1.0
    if not isinstance(value, dict) or not set(value) <= {"truncated_logprobs", "input_temperature"}:
        expected = "an object with truncated_logprobs and input_temperature alone"
        raise refuse("sampling_params.custom_params", value, expected, "remove it")
    heat = _number(
        "sampling_params.custom_params.input_temperature", value.get("input_temperature"), 1.0, low=0.01, high=100
    )
    asked = value.get("truncated_logprobs", False)
    if not isinstance(asked, bool) or (asked and not possible):
        expected = "truncated_logprobs true or false; true with return_logprob=true and a temperature above 0"
        raise refuse("sampling_params.custom_params", value, expected)
    return asked, heat


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(values, list) or len(values) > Bounds.STOPS:
        raise refuse(name, value, f"a non-empty string or a list of at most {Bounds.STOPS} of them")
    return tuple(_string(name, one, Bounds.STOP_LENGTH) for one in values)


def _token_ids(name: str, value: Any, vocab_size: int, most: int | None = None) -> IntArray:
    if most is not None and isinstance(value, list) and len(value) > most:
        raise refuse(name, f"{len(value)} ids", f"at most {most}", "send fewer")
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        raise refuse(name, value, "a non-empty list of token ids (integers)")
    low, high = min(value), max(value)
    if low < 0 or high >= vocab_size:
        raise refuse(
            name, low if low < 0 else high, f"token ids from 0 to {vocab_size - 1}", "use the model's tokenizer"
        )
    return np.array(value, dtype=np.int64)


def _patterns(name: str, value: Any) -> tuple[Pattern, ...]:
    patterns = []
    for pattern in _strings(name, value):
        try:
            patterns.append(compile_pattern(pattern))
        except PatternError as error:
            raise refuse(name, pattern, f"a regular expression that is matched in linear time ({error})") from None
    return tuple(patterns)


def _sampling_params(value: Any) -> dict[str, Any]:
    """The object, with no parameter in it that is not served (but for values that mean "off")."""
    params = {} if value is None else value
    if not isinstance(params, dict):
        raise refuse("sampling_params", params, "an object")
    for name, given in params.items():
        if name in _NEUTRAL:
            if given is not None and (isinstance(given, (bool, str)) or given not in _NEUTRAL[name]):
                raise refuse(f"sampling_params.{name}", given, "a parameter that this server serves", "remove it")
        elif name not in _PARAMS:
            raise refuse(f"sampling_params.{name}", given, f"one of {sorted(_PARAMS)}", "remove it")
    return params


@dataclass(frozen=True, slots=True)
class _Draw:
    """How the tokens of one request are drawn, as asked for."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> _Draw:
        temperature = _number("sampling_params.temperature", params.get("temperature"), 1.0, 0.0, Bounds.TEMPERATURE)
        top_p = _number("sampling_params.top_p", params.get("top_p"), 1.0, 0.0, 1.0, low_too=False)
        top_k = _integer("sampling_params.top_k", params.get("top_k"), -1, -1, Bounds.TOP_K)
        if top_k == 0:
            raise refuse("sampling_params.top_k", 0, "-1 (whole vocabulary) or at least 1")
        min_p = _number("sampling_params.min_p", params.get("min_p"), 0.0, 0.0, 1.0)
        seed = params.get("sampling_seed")
        if seed is None:
            seed = secrets.randbits(64)
        else:
            seed = _integer("sampling_params.sampling_seed", seed, 0, -(2**63), 2**64 - 1) % 2**64
        return cls(temperature, top_p, top_k, min_p, seed)


class RequestParser:
    """Checks /generate bodies against one served model. Every fault raises DataError that names the field.

    May be used by several threads.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._last_mask: tuple[tuple[bytes, bool], BoolArray] | None = None

    def parse(self, body: Any, sessions: Sessions) -> tuple[list[Item], bool]:
        """The items of a body and whether it is a batch (then the answer is a list, else one object)."""
        try:
            return self._parse(body, sessions)
        except RecursionError:
            raise refuse("body", "(not shown)", "JSON that is not so deep") from None

    def _parse(self, body: Any, sessions: Sessions) -> tuple[list[Item], bool]:
        if not isinstance(body, dict):
            raise refuse("body", body, "a JSON object")
        unknown = next((k for k, v in body.items() if k not in _FIELDS and v is not None and v is not False), None)
        if unknown is not None:
            raise refuse(unknown, body[unknown], f"only the served fields {sorted(_FIELDS)}", "remove it")
        if _boolean("stream", body.get("stream"), False):
            raise refuse("stream", True, "false, answers are not streamed", "set stream to false")
        prompts, batched = self._prompts(body)
        count = len(prompts)
        rids = self._rids(body.get("rid"), count, batched)

        def spread(name: str, value: Any, shared: bool) -> list[Any]:
            if shared:
                return [value] * count
            if not batched or len(value) != count:
                raise refuse(name, value, f"one value, or a list of {count} for the {count} prompts")
            return list(value)

        columns = {
            name: spread(name, body.get(name), not isinstance(body.get(name), list))
            for name in ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "session_params")
        }
        chosen = body.get("token_ids_logprob")
        nested = isinstance(chosen, list) and any(entry is None or isinstance(entry, list) for entry in chosen)
        columns["token_ids_logprob"] = spread("token_ids_logprob", chosen, not nested)
        masks: dict[tuple[bytes, bool], BoolArray] = {}
        items, patterns, reported = list[Item](), set[str](), 0
        for i, (ids, rid) in enumerate(zip(prompts, rids, strict=True)):
            item = self._item(ids, rid, {name: column[i] for name, column in columns.items()}, sessions, masks)
            items.append(item)
            patterns.update(pattern.pattern for pattern in item.job.stop_regex)
            reported += _reported(item.job)
            for what, count in (("stop_token_ids", len(masks)), ("stop_regex", len(patterns))):
                if count > Bounds.DIFFERENT:
                    expected = f"at most {Bounds.DIFFERENT} different ones in a request"
                    raise refuse(
                        f"sampling_params.{what}", f"{count} different ones", expected, "send several requests"
                    )
            if reported > Bounds.REPORTED:
                expected = f"at most {Bounds.REPORTED} log-probs of other ids in an answer"
                remedy = "lower top_logprobs_num, ask for fewer ids, or send several requests"
                raise refuse("top_logprobs_num", f"{reported} log-probs", expected, remedy)
        return items, batched

    def _prompts(self, body: Mapping[str, Any]) -> tuple[list[list[int]], bool]:
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise refuse("input_ids", ids, "exactly one of input_ids and text")
        if text is not None:
            batched = isinstance(text, list)
            texts = text if batched else [text]
            if not texts or not all(isinstance(t, str) and t for t in texts):
                raise refuse("text", text, "a non-empty string or a non-empty list of them")
            self._require_count("text", len(texts))
            return [self._encode(t) for t in texts], batched
        if not isinstance(ids, list) or not ids:
            raise refuse("input_ids", ids, "a non-empty list of token ids, or a list of such lists")
        batched = any(isinstance(entry, list) for entry in ids)
        lists = ids if batched else [ids]
        self._require_count("input_ids", len(lists))
        for i, entry in enumerate(lists):
            name = f"input_ids[{i}]" if batched else "input_ids"
            _token_ids(name, entry, self.model.vocab_size, self.model.max_tokens)
        return lists, batched

    @staticmethod
    def _require_count(name: str, prompts: int) -> None:
        if prompts > Bounds.PROMPTS:
            raise refuse(name, f"{prompts} prompts", f"at most {Bounds.PROMPTS} in a request", "send several requests")

    def _encode(self, text: str) -> list[int]:
        """The ids of a text, which the model has rows for."""
        most = self.model.max_tokens * Bounds.TOKEN_LENGTH
        if len(text) > most:
            expected = f"at most {most} characters, {Bounds.TOKEN_LENGTH} for each of {self.model.max_tokens} tokens"
            raise refuse("text", f"{len(text)} characters", expected, "shorten it")
        try:
            ids = self.model.encode(text)
        except (UnicodeError, TypeError):  # half of a surrogate pair: the tokenizer's own word for it is a TypeError
            raise refuse("text", text, "text of whole characters") from None
        _token_ids("ids of text", ids, self.model.vocab_size, self.model.max_tokens)
        return ids

    @staticmethod
    def _rids(rid: Any, count: int, batched: bool) -> list[str]:
        if rid is None:
            return [uuid.uuid4().hex for _ in range(count)]
        if isinstance(rid, list):
            if not batched or len(rid) != count:
                raise refuse("rid", rid, f"{count} non-empty strings, one per prompt")
            for one in rid:
                _string("rid", one)
            if len(set(rid)) != count:
                raise refuse("rid", rid, "different ids within a batch")
            return list(rid)
        name = _string("rid", rid)
        return [f"{name}_{i}" for i in range(count)] if batched else [name]

    def _item(
        self,
        ids: list[int],
        rid: str,
        options: dict[str, Any],
        sessions: Sessions,
        masks: dict[tuple[bytes, bool], BoolArray],
    ) -> Item:
        turn = None
        if options["session_params"] is not None:
            turn = sessions.begin(options["session_params"], rid, ids, self.model.bos_id)
            ids = turn.input_ids
        n, V = len(ids), self.model.vocab_size
        params = _sampling_params(options["sampling_params"])
        max_new = _integer("sampling_params.max_new_tokens", params.get("max_new_tokens"), _DEFAULT_MAX_NEW_TOKENS, 0)
        self._require_room(n, max_new)
        draw = _Draw.of(params)
        patterns = _patterns("sampling_params.stop_regex", params.get("stop_regex"))
        _boolean("sampling_params.spaces_between_special_tokens", params.get("spaces_between_special_tokens"), True)
        return_logprob = _boolean("return_logprob", options["return_logprob"], False)
        start = _integer("logprob_start_len", options["logprob_start_len"], -1, -1, n)
        top_num = _integer("top_logprobs_num", options["top_logprobs_num"], 0, 0, V)
        chosen = options["token_ids_logprob"]
        truncated, heat = _custom(params.get("custom_params"), return_logprob and not draw.greedy)
        job = Job(
            rid=rid,
            input_ids=np.array(ids, dtype=np.int64),
            max_new_tokens=max_new,
            temperature=0.0 if draw.greedy else draw.temperature,
            top_k=draw.top_k,
            top_p=draw.top_p,
            min_p=draw.min_p,
            seed=draw.seed,
            stop_mask=self._stop_mask(
                params.get("stop_token_ids"),
                _boolean("sampling_params.ignore_eos", params.get("ignore_eos"), False),
                masks,
            ),
            stop=_strings("sampling_params.stop", params.get("stop")),
            stop_regex=patterns,
            return_logprob=return_logprob,
            logprob_start=start if return_logprob and start >= 0 else n,
            top_logprobs_num=top_num if return_logprob else 0,
            token_ids_logprob=None
            if chosen in (None, []) or not return_logprob
            else tuple(_token_ids("token_ids_logprob", chosen, V, V).tolist()),
            truncated_logprobs=truncated,
            input_temperature=heat,
        )
        return Item(
            job,
            _boolean("sampling_params.skip_special_tokens", params.get("skip_special_tokens"), True),
            _boolean("sampling_params.no_stop_trim", params.get("no_stop_trim"), False),
            turn,
        )

    def _require_room(self, n: int, max_new: int) -> None:
        if n + max_new > self.model.max_tokens:
            raise refuse(
                "input_ids",
                f"{n} tokens + max_new_tokens={max_new if max_new < 2**63 else 'a huge number'}",
                f"at most {self.model.max_tokens} tokens together (context length and cache_tokens)",
                "shorten the input, lower max_new_tokens, or raise cache_tokens",
            )

    def _stop_mask(self, ids: Any, ignore_eos: bool, masks: dict[tuple[bytes, bool], BoolArray]) -> BoolArray:
        """True at the ids that end an output. `masks` of this request, and the last one, are kept: nearly all share one."""
        name, V = "sampling_params.stop_token_ids", self.model.vocab_size
        if ids is not None and ids != [] and not isinstance(ids, list):
            raise refuse(name, ids, "a list of token ids")
        stops = _token_ids(name, ids, V, V) if ids else np.zeros(0, np.int64)
        key = stops.tobytes(), ignore_eos
        last = self._last_mask
        mask = masks.get(key) if last is None or last[0] != key else last[1]
        if mask is None:
            mask = np.zeros(V, np.bool_)
            mask[stops] = True
            if not ignore_eos:
                mask[[i for i in self.model.eos_ids if i < V]] = True
            self._last_mask = key, mask
        masks[key] = mask
        return mask


def _reported(job: Job) -> int:
    """The (log-prob, id) pairs that the answer to a job may hold."""
    n, new = len(job.input_ids), job.max_new_tokens
    ids = len(job.token_ids_logprob or ())
    return (job.top_logprobs_num + ids) * (n - job.logprob_start + new)


def _triples(candidates: Candidates | None) -> list[tuple[float, int, None]] | None:
    return None if candidates is None else [(value, token, None) for value, token in candidates]


def answers(items: list[Item], outputs: list[Output], model: ServedModel) -> list[dict[str, Any]]:
    """The answer objects, in order. `text` leaves out what matched a stop unless `no_stop_trim`; `output_ids` never do."""
    texts: dict[int, str] = {}
    for skip in (True, False):
        group = [i for i, item in enumerate(items) if item.skip_special_tokens is skip]
        shown = [
            outputs[i].output_ids[:-1]
            if isinstance(outputs[i].matched, int) and not items[i].no_stop_trim
            else outputs[i].output_ids
            for i in group
        ]
        texts.update(zip(group, model.decode(shown, skip), strict=True))
    result = []
    for i, (item, out) in enumerate(zip(items, outputs, strict=True)):
        job, text, reason = item.job, texts[i], dict[str, Any]()
        if out.finish == "stop":
            reason = {"type": "stop", "matched": out.matched}
            if isinstance(out.matched, str) and not item.no_stop_trim:
                text = _trim(text, out.matched, job)
        elif out.finish == "length":
            reason = {"type": "length", "length": job.max_new_tokens}
        else:
            reason = {"type": "abort", "message": out.message}
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": reason,
            "prompt_tokens": len(job.input_ids),
            "completion_tokens": len(out.output_ids),
            "cached_tokens": out.cached_tokens,
            "weight_version": out.weight_version,
        }
        if job.return_logprob:
            reported = job.input_ids[job.logprob_start :].tolist() if out.input_log_probs else []
            # An aborted prefill has reported only part of its input.
            reported = reported[: len(out.input_log_probs)]
            meta["input_token_logprobs"] = [
                (value, token, None) for value, token in zip(out.input_log_probs, reported, strict=True)
            ]
            meta["output_token_logprobs"] = [
                (value, token, None) for value, token in zip(out.log_probs, out.output_ids, strict=True)
            ]
            if job.input_temperature != 1.0:
                meta["input_temperature"] = job.input_temperature
            if job.truncated_logprobs:
                meta["output_kept_ids"] = out.kept_ids
            if job.top_logprobs_num:
                meta["input_top_logprobs"] = list(map(_triples, out.input_top))
                meta["output_top_logprobs"] = list(map(_triples, out.output_top))
            if job.token_ids_logprob is not None:
                meta["input_token_ids_logprobs"] = list(map(_triples, out.input_chosen))
                meta["output_token_ids_logprobs"] = list(map(_triples, out.output_chosen))
        result.append({"text": text, "output_ids": out.output_ids, "meta_info": meta})
    return result


def _trim(text: str, matched: str, job: Job) -> str:
    """`text` up to where the stop string or regex begins."""
    pattern = next((p for p in job.stop_regex if p.pattern == matched), None)
    found = text.find(matched) if pattern is None or matched in job.stop else pattern.find(text)
    return text if found < 0 else text[:found]

"""The JSON of SGLang's native API, server side: checks a /generate body and turns it into jobs, and outputs into answers.

Field names, defaults and answer layout follow SGLang 0.5.15.post1 (`managers/io_struct.py` GenerateReqInput,
`sampling/sampling_params.py`, `managers/session_controller.py`). Stricter than SGLang in one way: a field or a sampling
parameter that is not served is refused with its name, never ignored. It runs no model and opens no socket.
"""

from __future__ import annotations

import math
import re
import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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


def refuse(name: str, value: object, expected: str, remedy: str = "correct the request") -> DataError:
    """The error for a bad field; long values are cut."""
    shown = repr(value)
    return DataError(name, value if len(shown) <= 80 else shown[:77] + "...", expected, remedy)


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
    """Server-side contexts: a tree of turns per session, as in SGLang's session controller."""

    def __init__(self) -> None:
        self._turns: dict[str, dict[str, Turn]] = {}

    def open(self, session_id: str | None) -> str:
        """Start a session; returns its id. Raises DataError if it exists."""
        name = session_id or uuid.uuid4().hex
        if name in self._turns:
            raise refuse("session_id", name, "the id of no open session", "close it first or choose another id")
        self._turns[name] = {}
        return name

    def close(self, session_id: str) -> None:
        """Forget a session; nothing happens if there is none, as in SGLang, so that a clean-up may come twice."""
        self._turns.pop(session_id, None)

    def begin(self, params: Any, rid: str, new_ids: list[int], bos_id: int | None) -> Turn:
        """The turn that `session_params` asks for, its whole input assembled; nothing is stored before `store`.

        Without `rid` the turn starts a context of its own. With `rid` it continues that turn's context: cut to `offset`
        tokens if that is given and not 0, without that turn's output if `drop_previous_output`; a leading BOS of `new_ids` is
        dropped. `replace` forgets the turns that followed `rid` (all turns without one).
        """
        known = {"id", "rid", "offset", "replace", "drop_previous_output"}
        if not isinstance(params, dict) or not set(params) <= known:
            raise refuse("session_params", params, f"an object with only {sorted(known)}")
        turns = self._turns.get(_string("session_params.id", params.get("id")))
        if turns is None:
            raise refuse("session_params.id", params["id"], "the id of an open session", "open it with /open_session")
        replace = _boolean("session_params.replace", params.get("replace"), False)
        drop_output = _boolean("session_params.drop_previous_output", params.get("drop_previous_output"), False)
        offset = _integer("session_params.offset", params.get("offset"), 0, 0)
        if params.get("rid") is None:
            if replace:
                turns.clear()
            return Turn(params["id"], rid, None, new_ids)
        parent = turns.get(_string("session_params.rid", params["rid"]))
        if parent is None or parent.context is None:
            raise refuse("session_params.rid", params["rid"], "the rid of a finished request of this session")
        if replace:
            self._forget_children(turns, parent)
        context = parent.input_ids if drop_output else parent.context
        if offset > len(context):
            raise refuse("session_params.offset", offset, f"at most the {len(context)} stored tokens")
        added = new_ids[1:] if bos_id is not None and new_ids[0] == bos_id else new_ids
        return Turn(params["id"], rid, parent, (context[:offset] if offset else context) + added)

    def store(self, turn: Turn, output_ids: list[int]) -> None:
        """Keep an ended turn, so that it can be continued; nothing happens if its session was closed meanwhile."""
        turns = self._turns.get(turn.session)
        if turns is not None:
            turn.context = turn.input_ids + output_ids
            if turn.parent is not None:
                turn.parent.children.append(turn)
            turns[turn.rid] = turn

    def _forget_children(self, turns: dict[str, Turn], parent: Turn) -> None:
        for child in parent.children:
            self._forget_children(turns, child)
            if turns.get(child.rid) is child:
                del turns[child.rid]
        parent.children.clear()


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise refuse(name, value, "a non-empty string")
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


def _number(name: str, value: Any, default: float) -> float:
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value):
        raise refuse(name, value, "a finite number")
    return float(value)


def _truncated_logprobs(value: Any, possible: bool) -> bool:
    """The one custom parameter: output log-probs of the distribution that was drawn from, and its ids."""
    if value is None:
        return False
    if not isinstance(value, dict) or not set(value) <= {"truncated_logprobs"}:
        raise refuse("sampling_params.custom_params", value, "an object with truncated_logprobs alone", "remove it")
    asked = value.get("truncated_logprobs", False)
    if not isinstance(asked, bool) or (asked and not possible):
        expected = "truncated_logprobs true or false; true with return_logprob=true and a temperature above 0"
        raise refuse("sampling_params.custom_params", value, expected)
    return asked


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise refuse(name, value, "a non-empty string or a list of them")
    return tuple(values)


def _token_ids(name: str, value: Any, vocab_size: int) -> IntArray:
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        raise refuse(name, value, "a non-empty list of token ids (integers)")
    low, high = min(value), max(value)
    if low < 0 or high >= vocab_size:
        raise refuse(
            name, low if low < 0 else high, f"token ids from 0 to {vocab_size - 1}", "use the model's tokenizer"
        )
    return np.array(value, dtype=np.int64)


def _patterns(name: str, value: Any) -> tuple[re.Pattern[str], ...]:
    patterns = []
    for pattern in _strings(name, value):
        try:
            patterns.append(re.compile(pattern))
        except re.error as error:
            raise refuse(name, pattern, f"a valid regular expression ({error})") from None
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
        temperature = _number("sampling_params.temperature", params.get("temperature"), 1.0)
        if temperature < 0.0:
            raise refuse("sampling_params.temperature", temperature, "at least 0 (0 is greedy)")
        top_p = _number("sampling_params.top_p", params.get("top_p"), 1.0)
        if not 0.0 < top_p <= 1.0:
            raise refuse("sampling_params.top_p", top_p, "a number in (0, 1]")
        top_k = _integer("sampling_params.top_k", params.get("top_k"), -1, -1)
        if top_k == 0:
            raise refuse("sampling_params.top_k", 0, "-1 (whole vocabulary) or at least 1")
        min_p = _number("sampling_params.min_p", params.get("min_p"), 0.0)
        if not 0.0 <= min_p <= 1.0:
            raise refuse("sampling_params.min_p", min_p, "a number in [0, 1]")
        seed = params.get("sampling_seed")
        if seed is None:
            seed = secrets.randbits(64)
        else:
            seed = _integer("sampling_params.sampling_seed", seed, 0, -(2**63), 2**64 - 1) % 2**64
        return cls(temperature, top_p, top_k, min_p, seed)


class RequestParser:
    """Checks /generate bodies against one served model. Every fault raises DataError that names the field."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._mask_key: tuple[list[int], bool] | None = None
        self._mask: BoolArray = np.zeros(0, np.bool_)

    def parse(self, body: Any, sessions: Sessions) -> tuple[list[Item], bool]:
        """The items of a body and whether it is a batch (then the answer is a list, else one object)."""
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
        items = [
            self._item(ids, rid, {name: column[i] for name, column in columns.items()}, sessions)
            for i, (ids, rid) in enumerate(zip(prompts, rids, strict=True))
        ]
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
            return [self.model.encode(t) for t in texts], batched
        if not isinstance(ids, list) or not ids:
            raise refuse("input_ids", ids, "a non-empty list of token ids, or a list of such lists")
        batched = any(isinstance(entry, list) for entry in ids)
        lists = ids if batched else [ids]
        for i, entry in enumerate(lists):
            _token_ids(f"input_ids[{i}]" if batched else "input_ids", entry, self.model.vocab_size)
        return lists, batched

    @staticmethod
    def _rids(rid: Any, count: int, batched: bool) -> list[str]:
        if rid is None:
            return [uuid.uuid4().hex for _ in range(count)]
        if isinstance(rid, list):
            if not batched or len(rid) != count or not all(isinstance(r, str) and r for r in rid):
                raise refuse("rid", rid, f"{count} non-empty strings, one per prompt")
            if len(set(rid)) != count:
                raise refuse("rid", rid, "different ids within a batch")
            return list(rid)
        name = _string("rid", rid)
        return [f"{name}_{i}" for i in range(count)] if batched else [name]

    def _item(self, ids: list[int], rid: str, options: dict[str, Any], sessions: Sessions) -> Item:
        turn = None
        if options["session_params"] is not None:
            turn = sessions.begin(options["session_params"], rid, ids, self.model.bos_id)
            ids = turn.input_ids
        n = len(ids)
        params = _sampling_params(options["sampling_params"])
        max_new = _integer("sampling_params.max_new_tokens", params.get("max_new_tokens"), _DEFAULT_MAX_NEW_TOKENS, 0)
        self._require_room(n, max_new)
        draw = _Draw.of(params)
        patterns = _patterns("sampling_params.stop_regex", params.get("stop_regex"))
        _boolean("sampling_params.spaces_between_special_tokens", params.get("spaces_between_special_tokens"), True)
        return_logprob = _boolean("return_logprob", options["return_logprob"], False)
        start = _integer("logprob_start_len", options["logprob_start_len"], -1, -1)
        if start > n:
            raise refuse("logprob_start_len", start, f"at most the {n} input tokens")
        top_num = _integer("top_logprobs_num", options["top_logprobs_num"], 0, 0, self.model.vocab_size)
        chosen = options["token_ids_logprob"]
        truncated = _truncated_logprobs(params.get("custom_params"), return_logprob and not draw.greedy)
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
                params.get("stop_token_ids"), _boolean("sampling_params.ignore_eos", params.get("ignore_eos"), False)
            ),
            stop=_strings("sampling_params.stop", params.get("stop")),
            stop_regex=patterns,
            return_logprob=return_logprob,
            logprob_start=start if return_logprob and start >= 0 else n,
            top_logprobs_num=top_num if return_logprob else 0,
            token_ids_logprob=None
            if chosen in (None, []) or not return_logprob
            else tuple(_token_ids("token_ids_logprob", chosen, self.model.vocab_size).tolist()),
            truncated_logprobs=truncated,
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
                f"{n} tokens + max_new_tokens={max_new}",
                f"at most {self.model.max_tokens} tokens together (context length and cache_tokens)",
                "shorten the input, lower max_new_tokens, or raise cache_tokens",
            )

    def _stop_mask(self, ids: Any, ignore_eos: bool) -> BoolArray:
        """True at the ids that end an output. The last mask is kept: the items of a batch nearly always share it."""
        ids = [] if ids is None else ids
        if self._mask_key is not None and self._mask_key == (ids, ignore_eos):
            return self._mask
        mask = np.zeros(self.model.vocab_size, np.bool_)
        if ids:
            mask[_token_ids("sampling_params.stop_token_ids", ids, self.model.vocab_size)] = True
        elif ids != []:
            raise refuse("sampling_params.stop_token_ids", ids, "a list of token ids")
        if not ignore_eos:
            mask[[i for i in self.model.eos_ids if i < self.model.vocab_size]] = True
        self._mask, self._mask_key = mask, (ids, ignore_eos)
        return mask


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
    if matched in job.stop:
        found = text.find(matched)
    else:
        match = next(p for p in job.stop_regex if p.pattern == matched).search(text)
        found = match.start() if match else -1
    return text if found < 0 else text[:found]

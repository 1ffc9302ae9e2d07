"""Turns jobs into answers: continuous batching, stops, log-probs. No HTTP and no threads here.

Why not transformers' own continuous batching (5.24, `generation/continuous_batching`): it returns the log-prob of the sampled
token only (no input, top or chosen-id log-probs), draws from torch's global generator (the tokens of a request depend on its
neighbours), shares prefixes in pages of 256 tokens by default, and without flash kernels builds a dense mask of [new tokens,
new tokens + all contexts] for the whole packed batch.

One step either prefills (new sequences first, in chunks) or decodes all running sequences by one token. Slot rows 0 .. n-1
are always in use; per-row state lies in numpy arrays, so a decode step costs no Python work per row.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from slime_tandem.engines.embedded.kv_model import KVModel
from slime_tandem.engines.embedded.patterns import Pattern
from slime_tandem.engines.embedded.prefix_cache import PrefixCache
from slime_tandem.engines.embedded.sampling import SamplingBatch, sample
from slime_tandem.types import BoolArray, IntArray

Decode = Callable[[list[list[int]]], list[str]]
Candidates = list[tuple[float, int]]

_PREFILL_TOKENS = 4096
"""Padded tokens of a prefill step."""
_MASK_ELEMENTS = 2**23
"""Entries of a prefill step's attention mask, before the repetition over query groups."""
_LOGIT_ELEMENTS = 2**25
"""Entries of a prefill step's logits (128 MiB in float32)."""
_PATTERN_S, _PATTERN_TOKEN_S = 0.5, 2e-4
"""Seconds of this thread that a request's patterns may take: once, and for each token written."""


@dataclass(frozen=True, slots=True)
class Job:
    """One checked request. `stop_mask` [V] is True at ids that end the output (end-of-sequence ids included).

    `truncated_logprobs`: output log-probs are of the distribution drawn from, whose ids are reported (temperature above 0).
    `logprob_start` is the first input position that is reported, len(input_ids) for none.
    """

    rid: str
    input_ids: IntArray
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_mask: BoolArray
    stop: tuple[str, ...]
    stop_regex: tuple[Pattern, ...]
    return_logprob: bool
    logprob_start: int
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...] | None
    truncated_logprobs: bool = False
    input_temperature: float = 1.0


@dataclass(slots=True)
class Output:
    """The answer to a job. Per-position input lists begin with None: SGLang reports nothing for the first position.

    `kept_ids`: per output id what it was drawn from, empty for the whole vocabulary. `error` is set, and nothing else
    counts, when a step of the model failed.
    """

    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length", "abort"] = "abort"
    matched: int | str | None = None
    message: str | None = None
    cached_tokens: int = 0
    weight_version: str = ""
    input_log_probs: list[float | None] = field(default_factory=list)
    input_top: list[Candidates | None] = field(default_factory=list)
    input_chosen: list[Candidates | None] = field(default_factory=list)
    output_top: list[Candidates] = field(default_factory=list)
    output_chosen: list[Candidates] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)
    error: str | None = None


class _Running:
    """A job in a slot row."""

    __slots__ = ("done", "followers", "job", "output", "read", "row", "seen", "shown", "spent", "text")

    def __init__(self, job: Job, row: int, cached: int) -> None:
        self.job = job
        self.row = row
        self.done = cached  # input tokens whose keys and values are in the slot
        self.followers: list[_Running] = []  # same prompt, admitted while this one prefills
        self.output = Output(cached_tokens=cached)
        if job.return_logprob and job.logprob_start < len(job.input_ids):
            self.output.input_log_probs.append(None)
            self.output.input_top.append(None)
            self.output.input_chosen.append(None)
        self.text, self.shown, self.read = "", 0, 0
        self.seen = 0  # characters of the text in which no stop string begins and ends
        self.spent = 0.0  # seconds that its patterns took

    @property
    def watches_text(self) -> bool:
        return bool(self.job.stop or self.job.stop_regex)

    @property
    def wants_candidates(self) -> bool:
        return self.job.return_logprob and (self.job.top_logprobs_num > 0 or self.job.token_ids_logprob is not None)


def _candidates(log_probs: torch.Tensor, jobs: Sequence[Job]) -> tuple[list[Candidates], list[Candidates]]:
    """Top and chosen-id log-probs of each row of `log_probs` [n, V] as its job asks (empty lists where it does not)."""
    top: list[Candidates] = [[] for _ in jobs]
    chosen: list[Candidates] = [[] for _ in jobs]
    widest = max(job.top_logprobs_num for job in jobs)
    if widest:
        values, ids = log_probs.topk(widest, dim=-1)
        for i, (job, v, t) in enumerate(zip(jobs, values.tolist(), ids.tolist(), strict=True)):
            top[i] = list(zip(v, t, strict=True))[: job.top_logprobs_num]
    start = 0
    for _, mine in itertools.groupby(jobs, key=id):  # the positions of one input stand together
        job, stop = jobs[start], start + sum(1 for _ in mine)
        if job.token_ids_logprob is not None:
            ids_here = list(job.token_ids_logprob)
            values_here = log_probs[start:stop][:, ids_here].tolist()
            chosen[start:stop] = [list(zip(row, ids_here, strict=True)) for row in values_here]
        start = stop
    return top, chosen


class Runner:
    """Runs jobs on one model. Single-threaded: whoever owns it calls `step` until `busy` is False.

    `decode` turns lists of ids into texts, special tokens shown; stop strings and regexes are looked for in those.
    """

    def __init__(self, model: Any, decode: Decode, *, max_batch: int, cache_tokens: int, weight_version: str) -> None:
        self.kv = KVModel(model, max_rows=max_batch, cache_tokens=cache_tokens)
        self.cache = PrefixCache(cache_tokens)
        self.weight_version = weight_version
        self.max_batch = max_batch
        self._decode_text = decode
        self._waiting: deque[Job] = deque()
        self._rows: list[_Running] = []
        self._prefilling: list[_Running] = []
        self._finished: list[tuple[Job, Output]] = []
        self._admitting: list[Job] = []
        self._apart: deque[list[Job]] = deque()  # sequences of a step that failed: each part runs without the others
        self._is_part = False  # whether what is in the slots is such a part
        self.patterns_stopped = 0
        self._allocate_state()

    def _allocate_state(self) -> None:
        R, V = self.max_batch, self.kv.vocab_size
        self._length = np.zeros(R, np.int64)  # tokens of the sequence, the last sampled one included
        self._limit = np.zeros(R, np.int64)  # length at which max_new_tokens is reached
        self._temperature = np.zeros(R, np.float32)
        self._top_k = np.zeros(R, np.int64)
        self._top_p = np.zeros(R, np.float64)
        self._min_p = np.zeros(R, np.float64)
        self._seed = np.zeros(R, np.uint64)
        self._stop = np.zeros((R, V), np.bool_)
        self._special = np.zeros(R, np.bool_)  # watches text, wants candidates or kept ids
        self._ids = np.zeros((self.kv.rows, self.kv.width), np.int64)
        self._log_probs = np.zeros((self.kv.rows, self.kv.width), np.float64)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._rows or self._apart)

    @property
    def counts(self) -> tuple[int, int]:
        """(running, waiting) sequences."""
        return len(self._rows), len(self._waiting) + sum(map(len, self._apart))

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; they are admitted in this order."""
        self._waiting.extend(jobs)

    def flush(self) -> None:
        """Forget all kept prefixes; running sequences are not touched."""
        self.cache.flush()

    def swap_weights(self, model: Any, weight_version: str) -> None:
        """Serve other weights; only while idle. Raises ModelError and keeps the old ones if they do not fit."""
        assert not self.busy
        self.kv.swap(model)
        self.cache.flush()
        self.weight_version = weight_version

    def abort(self, wanted: Callable[[Job], bool], message: str) -> list[tuple[Job, Output]]:
        """End matching jobs now; returns them with what they have written so far."""
        for queue in (self._waiting, *self._apart):
            gone = [job for job in queue if wanted(job)]
            if gone:
                queue_left = [job for job in queue if not wanted(job)]
                queue.clear()
                queue.extend(queue_left)
            for job in gone:
                output = Output(finish="abort", message=message, weight_version=self.weight_version)
                self._finished.append((job, output))
        leaving = [run for run in self._rows if wanted(run.job)]
        for run in leaving:
            self._finish(run, "abort", message=message)
        self._remove(leaving)
        return self._take_finished()

    def step(self) -> list[tuple[Job, Output]]:
        """Do one prefill or decode step; returns the jobs that ended in it.

        A fault ends the one sequence that causes it: those in the slots start anew in two halves, one after the other, until
        it is alone. They write the same tokens again, draws depend on seed and position.
        """
        try:
            self._admit()
            if self._prefilling:
                self._prefill()
            elif self._rows:
                self._decode()
        except Exception as error:  # noqa: BLE001 - a fault of one step must not end the server
            self._part(f"{type(error).__name__}: {error}")
        return self._take_finished()

    def _take_finished(self) -> list[tuple[Job, Output]]:
        finished, self._finished = self._finished, []
        return finished

    def _part(self, message: str) -> None:
        """Take all sequences out of the slots: one alone has failed, of several the halves are tried apart."""
        answered = {id(job) for job, _ in self._finished}
        lost = {id(job): job for job in [*self._admitting, *(run.job for run in self._rows)] if id(job) not in answered}
        self._admitting, self._rows, self._prefilling = [], [], []
        self.cache.flush()  # places may have been promised that were never filled
        jobs = list(lost.values())
        if len(jobs) == 1:
            self._finished.append((jobs[0], Output(error=message)))
        elif jobs:
            half = len(jobs) // 2
            self._apart.extendleft((jobs[half:], jobs[:half]))

    # Admission

    def _admit(self) -> None:
        """Move waiting jobs into slot rows while they fit, and copy what the pool knows of their prompts."""
        self._is_part = self._is_part and bool(self._rows)
        if self._apart and not self._rows:
            self._is_part = True
            self._admitting.extend(self._apart.popleft())  # they have been in the slots before, so they fit
        width = max((len(job.input_ids) + job.max_new_tokens for job in self._admitting), default=0)
        width = max((int(self._limit[run.row]) for run in self._rows), default=width)
        new = self._admitting
        while self._waiting and not self._is_part and not self._apart:
            job = self._waiting[0]
            wider = max(width, len(job.input_ids) + job.max_new_tokens)
            count = len(self._rows) + len(new) + 1
            if not self.kv.fits(count, wider):
                break
            width = wider
            new.append(self._waiting.popleft())
        if not new:
            return
        used = int(self._length[: len(self._rows)].max()) if self._rows else 0
        if self.kv.fit(len(self._rows) + len(new), width, len(self._rows), used):
            for name in ("_ids", "_log_probs"):
                old = getattr(self, name)
                fresh = np.zeros((self.kv.rows, self.kv.width), old.dtype)
                fresh[: len(self._rows), :used] = old[: len(self._rows), :used]
                setattr(self, name, fresh)
        self.cache.tick()
        leaders = {run.job.input_ids.tobytes(): run for run in self._prefilling}
        rows, positions, locations = list[IntArray](), list[IntArray](), list[IntArray]()
        for job in new:
            row, n = len(self._rows), len(job.input_ids)
            leader = leaders.get(job.input_ids.tobytes()) if job.logprob_start >= n else None
            # A position whose log-prob is wanted must be computed, and so must the last one.
            found = self.cache.match(job.input_ids[: min(n - 1, job.logprob_start)]) if leader is None else ()
            run = _Running(job, row, n if leader is not None else len(found))
            self._rows.append(run)
            if leader is not None:
                leader.followers.append(run)
            else:
                self._prefilling.append(run)
                leaders[job.input_ids.tobytes()] = run
                rows.append(np.full(len(found), row))
                positions.append(np.arange(len(found)))
                locations.append(np.asarray(found, np.int64))
            self._ids[row, :n] = job.input_ids
            self._length[row] = n
            self._limit[row] = n + job.max_new_tokens
            self._temperature[row] = job.temperature
            self._top_k[row] = job.top_k
            self._top_p[row] = job.top_p
            self._min_p[row] = job.min_p
            self._seed[row] = job.seed
            self._stop[row] = job.stop_mask
            self._special[row] = run.watches_text or run.wants_candidates or job.truncated_logprobs
        if any(map(len, locations)):
            self.kv.load(np.concatenate(rows), np.concatenate(positions), np.concatenate(locations))
        self._admitting = []

    # Steps

    def _prefill(self) -> None:
        chunk, spans = self._choose_chunk()
        ids = np.concatenate([run.job.input_ids[a:b] for run, (a, b) in zip(chunk, spans, strict=True)])
        keep, scored, targets, last = list[int](), list[int](), list[int](), list[int]()
        owners, completed = list[_Running](), list[_Running]()
        flat = 0
        for run, (a, b) in zip(chunk, spans, strict=True):
            n = len(run.job.input_ids)
            for position in range(max(a, run.job.logprob_start), min(b, n - 1)):
                scored.append(len(keep))
                targets.append(int(run.job.input_ids[position + 1]))
                owners.append(run)
                keep.append(flat + position - a)
            if b == n:
                completed.append(run)
                last.append(len(keep))
                keep.append(flat + b - 1 - a)
            flat += b - a
        starts, stops = np.array(spans, np.int64).T.copy()
        rows = np.array([run.row for run in chunk], np.int64)
        # Without any wanted logits one row is still computed, transformers has no way to ask for none.
        logits = self.kv.forward(rows, ids, starts, stops - starts, np.array(keep or [0], np.int64))
        for run, (_, b) in zip(chunk, spans, strict=True):
            run.done = b
        if scored:
            self._report_inputs(logits[scored], owners, targets)
        if completed:
            self._begin(completed, logits[last])

    def _choose_chunk(self) -> tuple[list[_Running], list[tuple[int, int]]]:
        """Which input tokens the next prefill step feeds: sequences in order, bounded in memory."""
        V = self.kv.vocab_size
        logit_rows = max(1, _LOGIT_ELEMENTS // V)
        chunk, spans, longest, deepest = list[_Running](), list[tuple[int, int]](), 0, 0
        for run in self._prefilling:
            n, a = len(run.job.input_ids), run.done
            room = max(1, min(_PREFILL_TOKENS, _MASK_ELEMENTS // n))
            b = min(n, a + room, max(a, run.job.logprob_start) + max(1, logit_rows - 1))
            wanted = max(0, b - max(a, run.job.logprob_start)) + 1
            longer, deeper = max(longest, b - a), max(deepest, b)
            padded = (len(chunk) + 1) * longer
            if chunk and (padded > _PREFILL_TOKENS or padded * deeper > _MASK_ELEMENTS or wanted > logit_rows):
                break
            logit_rows -= wanted
            chunk.append(run)
            spans.append((a, b))
            longest, deepest = longer, deeper
        return chunk, spans

    def _report_inputs(self, logits: torch.Tensor, owners: list[_Running], targets: list[int]) -> None:
        """Log-probs of input tokens, at temperature 1 whatever the request's is (as SGLang), or the one asked for."""
        heat = torch.tensor([run.job.input_temperature for run in owners])
        log_probs = torch.log_softmax(logits / heat[:, None] if (heat != 1.0).any() else logits, dim=-1)
        picked = log_probs.gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1).tolist()
        for run, value in zip(owners, picked, strict=True):
            run.output.input_log_probs.append(value)
        special = [i for i, run in enumerate(owners) if run.wants_candidates]
        if special:
            top, chosen = _candidates(log_probs[special], [owners[i].job for i in special])
            for i, t, c in zip(special, top, chosen, strict=True):
                owners[i].output.input_top.append(t)
                owners[i].output.input_chosen.append(c)

    def _begin(self, completed: list[_Running], logits: torch.Tensor) -> None:
        """Prompts are in: share them, and draw the first token of each sequence. `logits` [len(completed), V]."""
        ready = set(map(id, completed))
        self._prefilling = [run for run in self._prefilling if id(run) not in ready]
        self._remember([(run, len(run.job.input_ids)) for run in completed])
        group = list(completed)
        source = list(range(len(completed)))
        for i, run in enumerate(completed):
            if run.followers:
                target = np.array([f.row for f in run.followers], np.int64)
                self.kv.copy_rows(np.full(len(target), run.row), target, len(run.job.input_ids))
                group += run.followers
                source += [i] * len(run.followers)
                run.followers = []
        score_only = [run for run in group if run.job.max_new_tokens == 0]
        for run in score_only:
            self._finish(run, "length")
        drawing = [i for i, run in enumerate(group) if run.job.max_new_tokens > 0]
        if drawing:
            rows = np.array([group[i].row for i in drawing], np.int64)
            self._emit(rows, logits[[source[i] for i in drawing]], also_remove=score_only)
        else:
            self._remove(score_only)

    def _decode(self) -> None:
        n = len(self._rows)
        rows = np.arange(n)
        starts = self._length[:n] - 1
        logits = self.kv.forward(rows, self._ids[rows, starts], starts, np.ones(n, np.int64), None)
        self._emit(rows, logits)

    def _emit(self, rows: IntArray, logits: torch.Tensor, also_remove: Sequence[_Running] = ()) -> None:
        """Draw a token for each of `rows` [n] from `logits` [n, V], and end the sequences that are done."""
        position = self._length[rows]
        settings = SamplingBatch(
            self._temperature[rows], self._top_k[rows], self._top_p[rows], self._min_p[rows], self._seed[rows], position
        )
        drawn, log_probs, kept = sample(logits, settings)
        picked = log_probs.gather(1, drawn.unsqueeze(1)).squeeze(1).numpy()
        special = self._special[rows]
        if special.any():
            self._report_kept(rows, special.nonzero()[0], log_probs, kept, picked)
        tokens = drawn.numpy()
        self._ids[rows, position] = tokens
        self._log_probs[rows, position] = picked
        self._length[rows] = position + 1
        leaving = list(also_remove)
        full = position + 1 >= self._limit[rows]
        stopped = self._stop[rows, tokens]
        broken = ~np.isfinite(picked)
        ended = full | stopped | broken
        if special.any():
            ended |= self._special_rows(rows, special.nonzero()[0], log_probs, full | broken)
        for i in ended.nonzero()[0].tolist():
            run = self._rows[rows[i]]
            leaving.append(run)
            # The order of SGLang's Req.update_finish_state: the length limit first, then texts, then ids.
            if broken[i]:
                self._finished.append((run.job, Output(error="the model gave logits that are not finite")))
            elif full[i]:
                self._finish(run, "length")
            elif run.output.matched is not None:
                self._finish(run, "stop", matched=run.output.matched)
            elif run.output.message is not None:
                self._finish(run, "abort", message=run.output.message)
            else:
                self._finish(run, "stop", matched=int(tokens[i]))
        if leaving:
            self._remember([(run, int(self._length[run.row]) - 1) for run in leaving if run.output.output_ids])
            self._remove(leaving)

    def _report_kept(
        self, rows: IntArray, special: IntArray, log_probs: torch.Tensor, kept: torch.Tensor | None, picked: Any
    ) -> None:
        """Renormalise `picked` [n] over what was kept, and record that, for the rows that ask for it."""
        for i in special.tolist():
            run = self._rows[rows[i]]
            if not run.job.truncated_logprobs:
                continue
            ids = None if kept is None else kept[i].nonzero().squeeze(1)
            if ids is None or len(ids) == log_probs.shape[1]:
                run.output.kept_ids.append([])
            else:
                picked[i] -= float(log_probs[i, ids].double().logsumexp(0))
                run.output.kept_ids.append(ids.tolist())

    def _special_rows(self, rows: IntArray, special: IntArray, log_probs: torch.Tensor, ended: BoolArray) -> BoolArray:
        """Record candidates and look for stop texts in the rows that want them; returns which rows a text ends."""
        runs = [self._rows[rows[i]] for i in special.tolist()]
        asking = [i for i, run in zip(special.tolist(), runs, strict=True) if run.wants_candidates]
        if asking:
            owners = [self._rows[rows[i]] for i in asking]
            top, chosen = _candidates(log_probs[asking], [run.job for run in owners])
            for run, t, c in zip(owners, top, chosen, strict=True):
                run.output.output_top.append(t)
                run.output.output_chosen.append(c)
        matched = np.zeros(len(rows), np.bool_)
        watching = [
            (i, run) for i, run in zip(special.tolist(), runs, strict=True) if run.watches_text and not ended[i]
        ]
        if watching:
            self._grow_texts([run for _, run in watching])
            for i, run in watching:
                run.output.matched = self._text_match(run)
                matched[i] = run.output.matched is not None or run.output.message is not None
        return matched

    def _text_match(self, run: _Running) -> str | None:
        """The stop string or regex that the output text contains now (strings first, in the order given).

        A run whose patterns have taken too long gets the message with which it ends.
        """
        for stop in run.job.stop:
            if run.text.find(stop, max(0, run.seen - len(stop) + 1)) >= 0:
                return stop
        run.seen = len(run.text)
        if not run.job.stop_regex:
            return None
        begun = time.thread_time()
        found = next((pattern.pattern for pattern in run.job.stop_regex if pattern.find(run.text) >= 0), None)
        run.spent += time.thread_time() - begun
        allowed = _PATTERN_S + _PATTERN_TOKEN_S * (int(self._length[run.row]) - len(run.job.input_ids))
        if found is None and run.spent > allowed:
            self.patterns_stopped += 1
            run.output.message = f"sampling_params.stop_regex: matching took more than {allowed:.2g} s"
        return found

    def _grow_texts(self, runs: list[_Running]) -> None:
        """Decode only the newest tokens of each run; a token that ends inside a character waits for the next one.

        `shown` and `read` are the usual two offsets of incremental detokenisation: ids[shown:read] gives the context that a
        decoder may need (leading spaces), ids[read:] is what has not become text yet.
        """
        texts = list[list[int]]()
        for run in runs:
            start = len(run.job.input_ids)
            ids = self._ids[run.row, start : self._length[run.row]].tolist()
            texts += [ids[run.shown : run.read], ids[run.shown :]]
        decoded = self._decode_text(texts)
        for run, old, new in zip(runs, decoded[::2], decoded[1::2], strict=True):
            if len(new) > len(old) and not new.endswith("\ufffd"):
                run.text += new[len(old) :]
                run.shown, run.read = run.read, int(self._length[run.row]) - len(run.job.input_ids)

    # Ends

    def _finish(
        self,
        run: _Running,
        finish: Literal["stop", "length", "abort"],
        *,
        matched: int | str | None = None,
        message: str | None = None,
    ) -> None:
        out, start, end = run.output, len(run.job.input_ids), int(self._length[run.row])
        out.output_ids = self._ids[run.row, start:end].tolist()
        if run.job.return_logprob:
            out.log_probs = self._log_probs[run.row, start:end].tolist()
        out.finish, out.matched, out.message = finish, matched, message
        out.weight_version = self.weight_version
        self._finished.append((run.job, out))

    def _remember(self, known: list[tuple[_Running, int]]) -> None:
        """Keep the first `length` tokens of each run's row in the pool, as far as there is room."""
        self.cache.tick()
        rows, positions, locations = list[IntArray](), list[IntArray](), list[IntArray]()
        for run, length in known:
            start, fresh = self.cache.insert(self._ids[run.row, :length])
            if len(fresh):
                rows.append(np.full(len(fresh), run.row))
                positions.append(np.arange(start, start + len(fresh)))
                locations.append(fresh)
        if rows:
            self.kv.store(np.concatenate(rows), np.concatenate(positions), np.concatenate(locations))

    def _remove(self, leaving: Sequence[_Running]) -> None:
        """Free the rows of `leaving`; the last rows move into the holes."""
        if not leaving:
            return
        gone = {id(run) for run in leaving}
        self._prefilling = [run for run in self._prefilling if id(run) not in gone]
        for run in leaving:
            # A prompt's leader left before its prompt was in: each follower now prefills for itself.
            for follower in run.followers:
                if id(follower) not in gone:
                    follower.done = follower.output.cached_tokens = 0
                    self._prefilling.append(follower)
        for run in self._prefilling:
            run.followers = [f for f in run.followers if id(f) not in gone]
        count = len(self._rows) - len(gone)
        holes = [run.row for run in self._rows[:count] if id(run) in gone]
        movers = [run for run in self._rows[count:] if id(run) not in gone]
        if holes:
            source, target = np.array([run.row for run in movers], np.int64), np.array(holes, np.int64)
            width = int(self._length[source].max())
            self.kv.copy_rows(source, target, width)
            for state in (
                self._length, self._limit, self._temperature, self._top_k, self._top_p, self._min_p, self._seed, self._stop,
                self._special, self._ids, self._log_probs,
            ):  # fmt: skip
                state[target] = state[source]
            for run, row in zip(movers, holes, strict=True):
                run.row = row
                self._rows[row] = run
        del self._rows[count:]
